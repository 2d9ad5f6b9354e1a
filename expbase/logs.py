"""What a run writes down as text: log lines, and the metrics as JSON lines.

Nothing here knows an experiment, and nothing waits for the device before `Meter.means`. Curves
for VisualDL are in visualizer.py.

    logger = open_log(directory / "worker_0.log", echo=True)
    meter.add(400, {"loss": loss})       # a tensor, kept as it is
    metrics = meter.means()              # numbers, and the meter is empty again
    logger.info(line(iteration, metrics))
    close_log(logger)
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import paddle


class _Formatter(logging.Formatter):
    """Time and text; the level only where it is worth a look."""

    def __init__(self, date_format: str, *, tracebacks: bool) -> None:
        super().__init__(datefmt=date_format)
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        # Not by the base class, which leaves the traceback in the record, that handlers share.
        mark = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        text = f"{self.formatTime(record, self.datefmt)} {mark}{record.getMessage()}"
        if self._tracebacks and record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


def open_log(path: Path | None, *, echo: bool) -> logging.Logger:
    """A logger of its own, named `expbase`, that appends to a file.

    It is not the one of `logging.getLogger`: two experiments in a process must not write into
    each other's file, and paddle's handler at the root must not print every line again.

    Args:
        path: The file; it is made if need be. None: no file.
        echo: Whether lines go to stderr as well, without the tracebacks that python prints there.
    """
    logger = logging.Logger("expbase", logging.INFO)
    if path is not None:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(_Formatter("%Y-%m-%d %H:%M:%S", tracebacks=True))
        logger.addHandler(file)
    if echo:
        console = _Echo()
        console.setFormatter(_Formatter("%H:%M:%S", tracebacks=False))
        logger.addHandler(console)
    logger.addHandler(logging.NullHandler())  # without any python would print to stderr
    return logger


class _Echo(logging.Handler):
    """Lines for stderr, whatever stands in for it at the moment: a live line may."""

    is_routine_shown: Callable[[], bool] | None = None  # by somebody else

    def emit(self, record: logging.LogRecord) -> None:
        if (
            getattr(record, "is_routine", False)
            and self.is_routine_shown
            and self.is_routine_shown()
        ):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def routine_elsewhere(logger: logging.Logger, is_shown: Callable[[], bool]) -> Iterator[None]:
    """Keeps lines that are logged with `is_routine` off the terminal, while they are shown there.

    Args:
        logger: Of open_log.
        is_shown: Whether something shows now what such lines say.
    """
    echoes = [handler for handler in logger.handlers if isinstance(handler, _Echo)]
    for handler in echoes:
        handler.is_routine_shown = is_shown
    try:
        yield
    finally:
        for handler in echoes:
            handler.is_routine_shown = None


def silent_log() -> logging.Logger:
    """A logger whose lines go nowhere."""
    logger = logging.Logger("expbase")
    logger.addHandler(logging.NullHandler())
    return logger


def close_log(logger: logging.Logger) -> None:
    """Closes the file; what is logged later goes nowhere. May be called twice."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.addHandler(logging.NullHandler())


def line(iteration: int, metrics: Mapping[str, Any]) -> str:
    """One event as text: `[400] loss=0.25 lr=0.001`, keys sorted; seconds left as a clock."""
    words = " ".join(f"{key}={_shown(key, metrics[key])}" for key in sorted(metrics))
    return f"[{iteration}] {words}"


def _shown(key: str, value: Any) -> str:
    if key.endswith("seconds_left"):
        return str(datetime.timedelta(seconds=round(value)))
    if key.startswith("speed/") and isinstance(value, float):
        return short(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def short(value: float) -> str:
    """A speed with three digits, or all of those before the point: 0.123, 45.6, 7823."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


METRICS = "metrics.jsonl"


class MetricsFile:
    """metrics.jsonl: one JSON object per logged line, of `iteration`, `epoch`, `time` and metrics.

    `time` is in seconds since 1970. A value that is not finite stands as a text ("nan", "inf"),
    so that every line is JSON. Lines reach the system at once: what was logged survives a kill.

    Args:
        path: The file to append to, made at the first line; None writes nothing.
        clock: Gives the time of a line.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: IO[str] | None = None

    def size(self) -> int:
        """Of the file now, in bytes."""
        return self._path.stat().st_size if self._path and self._path.exists() else 0

    def cut(self, size: int) -> None:
        """Takes away what was written after the file had this size."""
        self.close()
        if self.size() > size:
            assert self._path is not None
            os.truncate(self._path, size)

    def write(self, iteration: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line."""
        if self._path is None:
            return
        record = {"iteration": iteration, "epoch": epoch, "time": round(self._clock(), 3)}
        record |= {key: json_value(metrics[key]) for key in sorted(metrics)}
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file, until the next line. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; torn ones are passed over."""
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def json_value(value: Any) -> Any:
    """A number as JSON has it; one that is not finite as a text ("nan", "inf")."""
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Meter:
    """The scalars that were logged since the last line, and their means.

    Tensors are detached and cloned, so that neither the graph nor a later change in place
    reaches them, and become numbers only when they are asked for: no wait for the device in
    between.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[int, Any]]] = {}

    def add(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Notes one value for each name.

        Raises:
            TypeError: A value is not one number.
        """
        for name, value in scalars.items():
            if isinstance(value, paddle.Tensor):
                if value.size != 1:
                    raise TypeError(
                        f"log: {name!r} is a tensor of shape {list(value.shape)}; expected one "
                        "number. Reduce it first, with mean() say."
                    )
                value = value.detach().clone()
            elif getattr(value, "size", 1) != 1 or not (
                hasattr(value, "item") or isinstance(value, (int, float))
            ):
                raise TypeError(
                    f"log: {name!r} is {value!r}; expected a number or a tensor of one."
                )
            self._values.setdefault(name, []).append((iteration, value))

    def numbers(self) -> dict[str, list[tuple[int, float]]]:
        """The iteration and the number of each value since the last line; waits for the device."""
        self._values = {name: _to_numbers(values) for name, values in self._values.items()}
        return self._values

    def means(self) -> dict[str, float]:
        """The mean of each name over the times it was logged; the meter is empty afterwards."""
        numbers = self.numbers()
        self._values = {}
        return {name: sum(v for _, v in pairs) / len(pairs) for name, pairs in numbers.items()}

    def nonfinite(self) -> str:
        """Names, values and iterations of what is not a finite number; empty if all is well."""
        bad = [
            f"{name}={value} at iteration {iteration}"
            for name, pairs in self.numbers().items()
            for iteration, value in pairs
            if not math.isfinite(value)
        ]
        return ", ".join(bad[:5]) + (" …" if len(bad) > 5 else "")

    def restore(self, numbers: Mapping[str, list[tuple[int, float]]]) -> None:
        """Puts back what `numbers` gave."""
        self._values = {name: [(i, v) for i, v in pairs] for name, pairs in numbers.items()}


def _to_numbers(values: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    tensors = [v.reshape([]) for _, v in values if isinstance(v, paddle.Tensor)]
    if len(tensors) == len(values) > 1 and len({tensor.dtype for tensor in tensors}) == 1:
        stacked = paddle.stack(tensors)
        if stacked.dtype == paddle.bfloat16:  # numpy has no such type: tolist would give the bits
            stacked = stacked.astype("float32")
        numbers = stacked.tolist()  # one wait for the device, not many
    else:
        numbers = [v.item() if hasattr(v, "item") else v for _, v in values]
    return [(i, float(number)) for (i, _), number in zip(values, numbers, strict=True)]
