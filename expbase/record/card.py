"""The card: lines of text about a run before its first batch."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from expbase.data.loaders import LoaderAdapter, num_samples, num_validated
from expbase.record.provenance import device, repeatable, versions


def card(
    name: str,
    output: str,
    changes: Mapping[str, Any],
    layers: Mapping[str, Any],
    adapter: LoaderAdapter,
    valid_loader: Any,
    world_size: int,
    batches: int,
    plan: Iterable[tuple[str, str]],
) -> Iterator[str]:
    """Yields what there is, at the end of setup.

    `output` is the output directory ("": it does not stay), `changes` are config values that are
    not by default, `batches` those of an update on a rank, `plan` rows that say when training ends,
    validates and saves.
    """
    rows = [
        ("experiment", name),
        *([("output", output)] if output else ()),
        *(("config", f"{key}={value!r}") for key, value in changes.items()),
        *_layer_rows(layers),
        ("data", _data(adapter, valid_loader, world_size)),
        ("update", _update(adapter, world_size * batches)),
        *plan,
        ("device", f"{device()}, ranks: {world_size}"),
        ("versions", versions()),
    ]
    if changes.get("training.deterministic"):
        rows.append(("repeatable", repeatable()))
    if adapter.loader is None:
        rows = [row for row in rows if row[0] not in ("data", "update")]
    for row, text in rows:
        yield f"{row:<11} {text}"
    if adapter.filled:
        yield (
            f"the last round of an epoch takes its first {adapter.filled} batches again, so that "
            f"every {adapter.shard.dealt_to} has one"
        )


def _layer_rows(layers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        count = sum(math.prod(p.shape) for p in layer.parameters())
        trainable = sum(math.prod(p.shape) for p in layer.parameters() if not p.stop_gradient)
        if count:  # else it is a loss, say
            yield f"self.{name}", f"{count:,} parameters, {trainable:,} trainable"


def _data(adapter: LoaderAdapter, valid_loader: Any, world_size: int) -> str:
    batches = adapter.batches_per_epoch
    whose = "a rank's epoch" if world_size > 1 else "an epoch"
    known = _samples(adapter.num_read, adapter.num_samples)
    known += [f"{batches:,} batches {whose}"] if batches is not None else []
    text = ", ".join(known) or "a stream of unknown length"
    text += f", {adapter.sharding}" if adapter.sharding else ""
    for samples in _samples(num_validated(valid_loader), num_samples(valid_loader)):
        text += f"; validation: {samples}"
    return text


def _samples(read: int | None, there: int | None) -> list[str]:
    """Says how many samples are read, or else how many there are; nothing of a stream."""
    if read is not None:
        return [f"{read:,} samples"]
    return [] if there is None else [f"a data set of {there:,} samples"]


def _update(adapter: LoaderAdapter, batches: int) -> str:
    size = adapter.batch_size
    text = f"{batches} batches" if batches > 1 else "a batch"
    if not size:
        return f"{text} of the loader's size"
    together = size * batches
    if (adapter.num_samples or together) < together:
        return f"{text} of at most {size:,} samples"
    return f"{text} of {size:,} samples" + f", {together:,} together" * (batches > 1)


def end(limits: Sequence[tuple[str, int, int | None]]) -> str:
    """Returns which limit ends training, when, and which one it comes before.

    Of each, the first one first: its key, its value, the updates until then (None: unknown).
    """
    texts = []
    for key, value, updates in limits:
        counts = [f"{value:,} epoch{'s' * (value > 1)}"] if key == "max_epoch" else []
        counts += [] if updates is None else [f"{updates:,} updates"]
        texts.append(f"training.{key} ({', '.join(counts)})")
    *_, updates_of_last = limits[-1]
    if updates_of_last is None and len(texts) > 1:
        return f"by {' or '.join(texts)}, whichever comes first"
    return f"by {', before '.join(texts)}"


def how_often(training: Mapping[str, Any], what: str) -> str:
    """Returns how often a config asks for "valid" or "save", in words."""
    counts = [(training[f"{what}_interval"], "update"), (training[f"{what}_every_epoch"], "epoch")]
    counts += [(training["save_seconds"], "second")] if what == "save" else []
    texts = [f"every {n:,} {unit}s" if n > 1 else f"every {unit}" for n, unit in counts if n]
    if not texts:
        return f"never: training.{what}_interval=0"
    if texts == ["every epoch"] and not training["max_iteration"]:
        return texts[0]  # of which the last one is the end
    return f"{' and '.join(texts)}, and at the end"


def clock(seconds: float) -> str:
    """Returns a time as a person reads it: 0:03:12; below a minute 12.3 s."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))
