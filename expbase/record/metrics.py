"""Writes the metrics of a run: a line of text, a line of JSON, and a point on each curve.

log = MetricLog(logger, JsonLines(path), lambda: visualizer)
log.write(iteration, epoch, {"train/loss": 0.25})
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from expbase.base.json_lines import JsonLines, json_lines
from expbase.record.meter import Meter
from expbase.record.visualizer import Visualizer

METRICS = "metrics.jsonl"  # a line has `checkpoint` if it is about the weights of one
_IN_LINES = "speed/steps_per_second", "speed/seconds_left"  # of the speeds: a line is short


class MetricLog:
    """Writes the metrics of one rank to the text log, metrics.jsonl and VisualDL.

    Args:
        logger: Of the text log.
        file: metrics.jsonl.
        visualizer: Returns the Visualizer.
    """

    def __init__(
        self, logger: logging.Logger, file: JsonLines, visualizer: Callable[[], Visualizer]
    ) -> None:
        self.meter = Meter()  # scalars that were logged in training since the last line
        self._logger = logger
        self._file = file
        self._visualizer = visualizer  # called each time, since setup_visualizer makes it later
        self._num_drawn = 0  # points that were drawn here

    def write(
        self,
        iteration: int,
        epoch: int,
        metrics: Mapping[str, float],
        *,
        checkpoint: str = "",
        is_shown: bool = False,
    ) -> None:
        """Writes one event.

        Args:
            iteration: Of the event.
            epoch: Of the event; 0: none was begun.
            metrics: Numbers by their full names: "train/loss".
            checkpoint: The name of the checkpoint whose weights were evaluated; "": those of now.
            is_shown: The progress bar shows it, so it is not printed on the terminal.
        """
        text = words({"epoch": epoch, **metrics} if epoch else metrics)
        text += f" of {checkpoint}" if checkpoint else ""
        self._logger.info("[%d] %s", iteration, text, extra={"is_shown": is_shown})
        about = {"checkpoint": checkpoint} if checkpoint else {}
        self._file.write(iteration, epoch, {**metrics, **about})
        for name, value in metrics.items():
            # The board (the program in visualdl/server/dist) sorts the groups of curves by name and
            # opens the first one, which is to be train, and not speed.
            tag = name.replace("speed/", "wall_clock/", 1) if name.startswith("speed/") else name
            self._visualizer().add_scalar(tag, value, iteration)
        self._num_drawn += len(metrics)

    @property
    def is_used(self) -> bool:
        """Whether the user has logged anything, perhaps only on the board."""
        return self.meter.is_used or self._visualizer().num_scalars > self._num_drawn

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files, in bytes. They are no state: lines have times in them."""
        return {"metrics_bytes": self._file.size(), "visualdl_bytes": self._visualizer().size()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Removes what was written after the files had these sizes; {} removes everything."""
        self._file.cut(sizes.get("metrics_bytes", 0))
        self._visualizer().cut(sizes.get("visualdl_bytes", 0))

    def write_no_more(self) -> None:
        """Writes only to the text log from now on: a finished run has its metrics already."""
        self._file = JsonLines(None)
        self._visualizer().write_no_more()

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self._file.close()
        self._visualizer().end()


def metric_lines(run: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a run's metrics.jsonl, as mappings."""
    for line in json_lines(run / METRICS):
        if as_metrics(line) is not None:
            yield line


def as_metrics(record: Any) -> dict[str, Any] | None:
    """Returns a line of metrics.jsonl; None if it is of another kind."""
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    has_parts = any(isinstance(value, (dict, list)) for value in record.values())
    return None if has_parts else record


def words(metrics: Mapping[str, Any]) -> str:
    """Returns metrics as text, in their order: `loss=0.25 lr=0.001`."""
    shown = [key for key in metrics if key in _IN_LINES or not key.startswith("speed/")]
    return " ".join(f"{key}={_shown(key, metrics[key])}" for key in shown)


def _shown(key: str, value: Any) -> str:
    if key.endswith("seconds_left"):
        return str(datetime.timedelta(seconds=round(value)))
    if not isinstance(value, float):
        return str(value)
    if key.startswith("speed/"):  # 0.123, 45.6, 7823
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.6g}"
