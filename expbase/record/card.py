"""What a run says of itself before its first batch, and at its end, in lines of text.

Functions of what they are handed; they change nothing.
"""

from __future__ import annotations

import datetime
import math
import platform
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from expbase._version import __version__
from expbase.data.loaders import LoaderAdapter, num_samples
from expbase.stopping import StopReason


def card(
    name: str,
    changes: Mapping[str, Any],
    layers: Mapping[str, Any],
    adapter: LoaderAdapter,
    facts: Mapping[str, str],
    output: str,
) -> Iterator[str]:
    """What there is, at the end of setup; config values that are not by default, further facts."""
    versions = f"expbase {__version__}, paddle {paddle.__version__}, numpy {np.__version__}"
    rows = [("experiment", name), *_config_rows(changes), *_layer_rows(layers), *facts.items()]
    rows.append(("versions", f"{versions}, python {platform.python_version()}"))
    rows.append(("output", output))
    width = max(11, *(len(name) for name, _ in rows))
    for row, text in rows:
        yield f"{row:<{width}} {text}"
    if adapter.filled:
        yield (
            f"the last round of an epoch takes its first {adapter.filled} batches again, so that "
            "every rank has one"
        )


def _config_rows(changes: Mapping[str, Any]) -> list[tuple[str, str]]:
    values = " ".join(f"{key}={value!r}" for key, value in changes.items())
    text = f"{values} (the rest by default)" if values else "all by default"
    # With time and name a line has at most 80 columns.
    parts = textwrap.wrap(text, 58, break_long_words=False, break_on_hyphens=False)
    return list(zip(["config", *[""] * len(parts)], parts, strict=False))


def _layer_rows(layers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        count = sum(math.prod(p.shape) for p in layer.parameters())
        trainable = sum(math.prod(p.shape) for p in layer.parameters() if not p.stop_gradient)
        yield f"self.{name}", f"{count:,} parameters, {trainable:,} trainable"


def data_row(adapter: LoaderAdapter, valid_loader: Any, *, parallel: bool) -> str:
    """How much data there is."""
    samples, batches = adapter.num_samples, adapter.batches_per_epoch
    known = [_count(samples, "sample")] if samples is not None else []
    whose = "a rank's epoch" if parallel else "an epoch"
    known += [f"{_count(batches, 'batch')} {whose}"] if batches is not None else []
    text = ", ".join(known) or "a stream of unknown length"
    text += f", {adapter.sharding}" if adapter.sharding else ""
    if (samples := num_samples(valid_loader)) is not None:
        text += f"; validation: {_count(samples, 'sample')}"
    return text


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number:,} {name}{plural if number != 1 else ''}"


def update_row(batch_size: int | None, batches: int) -> str:
    """How many samples an update takes, on all ranks together."""
    size = f"of {batch_size:,} samples" if batch_size else "of unknown size"
    text = f"{batches} batches {size}" if batches > 1 else f"a batch {size}"
    return f"{text}, {batch_size * batches:,} together" if batch_size and batches > 1 else text


def device_row(world_size: int) -> str:
    """What it trains on."""
    name: str = paddle.device.get_device()
    if name.startswith("gpu"):
        name = f"{name} ({paddle.device.cuda.get_device_name(name)})"
    return f"{name}, ranks: {world_size}"


def goal(training: Any, output: str) -> str:
    """What training goes on until."""
    goals = [f"iteration {training.max_iteration}"] if training.max_iteration else []
    goals += [f"the end of epoch {training.max_epoch}"] if training.max_epoch else []
    return f"training until {' or '.join(goals)} in {output}"


def summary(
    seconds: float,
    shares: Mapping[str, float],
    best: Sequence[tuple[int, float]],
    monitor: str,
    output: str | None,
) -> Iterator[str]:
    """Where the time of this start went, what is best, and how to see the curves.

    Args:
        seconds: The time that training took.
        shares: The part of it, 0 to 1, by what it was spent on.
        best: Iteration and score by the monitored metric, best first.
        monitor: The name of that metric.
        output: The directory of the run; None where there are no curves.
    """
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    yield f"time        {clock(seconds)}: {text}"
    if best:
        iteration, score = best[0]
        yield f"best        {monitor}={score:.6g} at iteration {iteration}"
    if output is not None:
        yield f"curves      python -m expbase board {shlex.quote(output)}"


def ending(place: str, epoch: int, stopped_by: StopReason, reason: str, where: str) -> str:
    """The last line: why it ended, if it stopped early, or where the newest checkpoint is."""
    if stopped_by:
        hint = "" if stopped_by is StopReason.CALL else "; the same command continues"
        return f"{place} STOPPED by {reason or stopped_by}{hint}"
    return f"{place} FINISHED: epoch {epoch}, {where}"


def clock(seconds: float) -> str:
    """A time as a person reads it: 0:03:12; below a minute 12.3 s."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
