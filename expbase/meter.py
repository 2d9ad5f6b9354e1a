"""The numbers that a run logs: their means, as text and as JSON lines.

Nothing waits for the device before the numbers are needed.

    meter.add(400, {"loss": loss})          # a tensor, copied but not read
    metrics = meter.means()                 # numbers; the meter is empty again
    logger.info(line(400, metrics))
    MetricsFile(directory / METRICS).write(400, 2, metrics)
"""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import paddle

METRICS = "metrics.jsonl"


class NonFiniteError(FloatingPointError):
    """A logged training scalar, a parameter or an accumulator is not finite."""

    def __init__(self, bad: str, newest: str) -> None:
        super().__init__(
            f"not finite: {bad}. No checkpoint holds it; the last good one is {newest}. Lower the "
            "learning rate or clip gradients; with training.nonfinite=warn the run goes on."
        )


class Meter:
    """The scalars that were logged since the last line, and their means.

    Tensors are detached and copied, so that the meter keeps no graph and does not see a later
    change in place. They are read only when they are needed, because that waits for the device.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, Any]]] = {}  # with their iterations
        self.is_used = False  # whether anything was added, since it was made

    def add(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Adds one value for each name.

        Raises:
            TypeError: A value is not one number.
        """
        for name, value in scalars.items():
            is_number = hasattr(value, "item") or isinstance(value, (int, float))
            if not is_number or getattr(value, "size", 1) != 1:
                shown = f"of shape {[*value.shape]}" if hasattr(value, "shape") else repr(value)
                raise TypeError(
                    f"log: {name!r} is {shown}; expected one number. Reduce it first, for example "
                    "with mean()."
                )
            value = value.detach().clone() if isinstance(value, paddle.Tensor) else value
            self._values.setdefault(name, []).append((iteration, value))
            self.is_used = True

    def means(self) -> dict[str, float]:
        """The mean of each name over the times it was logged; the meter is empty afterwards."""
        numbers = self._numbers()
        self._values = {}
        return {name: sum(v for _, v in pairs) / len(pairs) for name, pairs in numbers.items()}

    def nonfinite(self) -> str:
        """The first numbers that are not finite, with names and iterations; "" if all are."""
        bad = [
            f"{name}={value} at iteration {iteration}"
            for name, pairs in self._numbers().items()
            for iteration, value in pairs
            if not math.isfinite(value)
        ]
        return ", ".join(bad[:5])

    def state_dict(self) -> dict[str, list[tuple[int, float]]]:
        """The iteration and the number of each value since the last line, by name."""
        return {name: list(pairs) for name, pairs in self._numbers().items()}

    def load_state_dict(self, state: Mapping[str, list[tuple[int, float]]]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        self._values = {name: [*pairs] for name, pairs in state.items()}
        self.is_used = bool(state)
        return []

    def _numbers(self) -> dict[str, list[tuple[int, float]]]:
        # The numbers take the tensors' place, so that each is read from the device only once.
        self._values = {name: _to_numbers(values) for name, values in self._values.items()}
        return self._values


def _to_numbers(values: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    tensors = [v.reshape([]) for _, v in values if isinstance(v, paddle.Tensor)]
    if len(tensors) == len(values) > 1 and len({tensor.dtype for tensor in tensors}) == 1:
        stacked = paddle.stack(tensors)  # so that the device is waited for once, not many times
        if stacked.dtype == paddle.bfloat16:  # numpy has no such type: tolist returns raw bits
            stacked = stacked.astype("float32")
        numbers = stacked.tolist()
    else:
        numbers = [v.item() if hasattr(v, "item") else v for _, v in values]
    return [(i, float(number)) for (i, _), number in zip(values, numbers, strict=True)]


def line(iteration: int, metrics: Mapping[str, Any]) -> str:
    """Metrics as a line of the log: `[400] loss=0.25 lr=0.001`, with sorted keys."""
    words = " ".join(f"{key}={_shown(key, metrics[key])}" for key in sorted(metrics))
    return f"[{iteration}] {words}"


def _shown(key: str, value: Any) -> str:
    if key.endswith("seconds_left"):
        return str(datetime.timedelta(seconds=round(value)))
    if not isinstance(value, float):
        return str(value)
    return short(value) if key.startswith("speed/") else f"{value:.6g}"


def short(value: float) -> str:
    """A speed with three digits, or all of those before the point: 0.123, 45.6, 7823."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


class MetricsFile:
    """metrics.jsonl: per line a JSON object of `iteration`, `epoch`, `time` and the metrics.

    `time` is in seconds since 1970. Without a path nothing is written.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._file: IO[str] | None = None  # stays open: opening it costs as much as a line

    def size(self) -> int:
        """The size of the file now, in bytes."""
        return self.path.stat().st_size if self.path and self.path.exists() else 0

    def cut(self, size: int) -> None:
        """Removes what was written after the file had this size, in bytes."""
        self.close()
        if self.path and self.size() > size:
            os.truncate(self.path, size)

    def write(self, iteration: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line; a number that is not finite is a text in it."""
        if self.path is None:
            return
        record = {"iteration": iteration, "epoch": epoch, "time": round(self._clock(), 3)}
        record |= {key: json_value(metrics[key]) for key in sorted(metrics)}
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()  # a kill does not lose the line

    def close(self) -> None:
        """Closes the file until the next line. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; a line that is torn or of another kind is skipped."""
    for text in data.splitlines():
        try:
            record = json.loads(text)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def json_value(value: Any) -> Any:
    """A number for JSON; one that is not finite as a text ("nan", "inf")."""
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
