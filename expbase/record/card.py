"""What a run says of itself before its first batch, and at its end, in lines of text.

Reads an experiment and changes nothing.

    for text in card(exp): exp.logger.info("%s", text)
    for text in summary(exp): exp.logger.info("%s", text)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import platform
import shlex
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from expbase import console, logs
from expbase._version import __version__
from expbase.config import differences
from expbase.state import objects
from expbase.stopping import StopReason

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase

_COLUMNS = 58  # of a value in the card: with time and name a line has at most 80


def card(exp: ExperimentBase, found: objects.StatefulObjects) -> Iterator[str]:
    """What there is, at the end of setup.

    Args:
        exp: The experiment.
        found: What on it has state.
    """
    rows = [*_facts(exp, found)]
    width = max(11, *(len(name) for name, _ in rows))
    for name, text in rows:
        yield f"{name:<{width}} {text}"
    feed = exp._cursor.adapter
    if feed.filled:
        yield (
            f"the last round of a pass takes its first {feed.filled} batches again, so that every "
            "rank has one"
        )


def _facts(exp: ExperimentBase, found: objects.StatefulObjects) -> Iterator[tuple[str, str]]:
    changed = differences(type(exp).default_config(), exp.config)
    values = " ".join(f"{key}={now!r}" for key, (_, now) in changed.items())
    yield "experiment", type(exp).__name__
    text = f"{values} (the rest by default)" if values else "all by default"
    parts = textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)
    yield from zip(["config", *[""] * len(parts)], parts, strict=False)
    for name, layer in found.layers.items():
        count = sum(math.prod(p.shape) for p in layer.parameters())
        trainable = sum(math.prod(p.shape) for p in layer.parameters() if not p.stop_gradient)
        yield f"self.{name}", f"{count:,} parameters, {trainable:,} trainable"
    yield "data", _data(exp)
    yield "update", _update(exp)
    yield "device", f"{_device()}, ranks: {exp.world_size}"
    versions = f"expbase {__version__}, paddle {paddle.__version__}, numpy {np.__version__}"
    yield "versions", f"{versions}, python {platform.python_version()}"
    yield "output", str(exp.args.output)


def _row(name: str, text: str) -> str:
    return f"{name:<11} {text}"


def _data(exp: ExperimentBase) -> str:
    feed = exp._cursor.adapter
    samples, batches = feed.num_samples, feed.batches_per_epoch
    known = [_count(samples, "sample")] if samples is not None else []
    whose = "a rank's pass" if exp.parallel else "a pass"
    known += [f"{_count(batches, 'batch')} {whose}"] if batches is not None else []
    text = ", ".join(known) or "a stream of unknown length"
    held_out = _size(exp.valid_loader)
    return f"{text}; validation: {held_out}" if held_out else text


def _size(loader: Any) -> str:
    """How much a loader gives; empty if nobody knows."""
    try:
        size = len(loader.dataset)
    except (AttributeError, TypeError, RuntimeError):  # RuntimeError: an IterableDataset's
        return ""
    is_ready = getattr(loader, "batch_sampler", True) is None  # its data set gives batches
    return _count(size, "batch" if is_ready else "sample")


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number:,} {name}{plural if number != 1 else ''}"


def _update(exp: ExperimentBase) -> str:
    batch_size, count = exp._cursor.adapter.batch_size, exp.config.training.accumulation_steps
    batches = exp.world_size * count
    size = f"of {batch_size:,} samples" if batch_size else "of unknown size"
    text = f"{batches} batches {size}" if batches > 1 else f"a batch {size}"
    return f"{text}, {batch_size * batches:,} together" if batch_size and batches > 1 else text


def _device() -> str:
    name: str = paddle.device.get_device()
    if name.startswith("gpu"):
        return f"{name} ({paddle.device.cuda.get_device_name(name)})"
    return name


def goal(exp: ExperimentBase) -> str:
    """What training goes on until."""
    training = exp.config.training
    goals = [f"iteration {training.max_iteration}"] if training.max_iteration else []
    goals += [f"the end of epoch {training.max_epoch}"] if training.max_epoch else []
    return f"training until {' or '.join(goals)} in {exp.args.output}"


@contextlib.contextmanager
def live(exp: ExperimentBase) -> Iterator[None]:
    """Shows how far it is, while the block runs, to somebody at a terminal."""
    if exp.rank or not console.is_terminal(sys.stderr):
        yield
        return
    with (
        console.live_line(lambda: _line(exp)) as is_shown,
        logs.routine_elsewhere(exp.logger, is_shown),
    ):
        yield


def _line(exp: ExperimentBase) -> console.Line:
    """Called in another thread: it looks, and changes nothing."""
    last, step = exp._journal.last, exp._watch.step_seconds(exp.iteration)
    loss = next((name for name in ("train/loss", *last) if name in last), None)
    left, seconds = exp._journal.iterations_left(), exp._journal.seconds_left()
    words = [f"epoch {exp.epoch}"]
    words += [f"{loss.removeprefix('train/')} {last[loss]:.4g}"] if loss else []
    words += [f"{clock(seconds)} left"] if seconds is not None else []
    words += [f"{logs.short(1 / step)} it/s"] if step else []
    total = None if left is None else exp.iteration + left
    return console.Line(exp.phase, exp.iteration, total, [*words, console.memory()])


def summary(exp: ExperimentBase) -> Iterator[str]:
    """Where the time of this start went, what is best, and how to see the curves."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in exp._watch.shares().items())
    yield _row("time", f"{clock(exp._watch.seconds())}: {shares}")
    if exp._checkpointer.scores:
        iteration, score = exp._checkpointer.scores[0]
        yield _row("best", f"{exp.config.training.monitor}={score:.6g} at iteration {iteration}")
    if exp.rank == 0 and not getattr(exp.args, "smoke", False):
        yield _row("curves", f"python -m expbase board {shlex.quote(str(exp.args.output))}")


def ending(exp: ExperimentBase) -> str:
    """The last line: why it ended, and where the checkpoint is."""
    if exp._stopped_by:
        hint = "" if exp._stopped_by is StopReason.CALL else "; the same command continues"
        return f"[{exp.iteration}] STOPPED by {exp._stop_text or exp._stopped_by}{hint}"
    newest = exp._checkpointer.newest_saved
    where = f"{newest.name} in {exp.args.output}" if newest else "no checkpoint was asked for"
    where = where if exp.rank == 0 else "rank 0 has the checkpoints"
    return f"[{exp.iteration}] FINISHED: epoch {exp.epoch}, {where}"


def clock(seconds: float) -> str:
    """A time as a person reads it: 0:03:12; below a minute 12.3 s."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
