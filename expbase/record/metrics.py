"""The metrics of a run on their way out: a line of text, a line of JSON, a point on each curve.
Formats are in meter.py and visualizer.py.

    log = MetricLog(logger, MetricsFile(path), visualizer)
    log.write(iteration, epoch, {"train/loss": 0.25})
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from expbase.record.meter import Meter, MetricsFile, line
from expbase.record.visualizer import Visualizer


class MetricLog:
    """Where the metrics of one rank go: the text log, metrics.jsonl and VisualDL."""

    def __init__(
        self, logger: logging.Logger, file: MetricsFile, visualizer: Callable[[], Visualizer]
    ) -> None:
        self.meter = Meter()  # what `log` was given in training since the last line
        self.last: Mapping[str, float] = {}  # what the last line of training said
        self._logger = logger
        self._file = file
        self._visualizer = visualizer  # of now: setup_visualizer makes it
        self._num_drawn = 0  # points of ours
        self.is_live: Callable[[], bool] = lambda: False  # whether a progress line is shown now

    def write(
        self, iteration: int, epoch: int, metrics: Mapping[str, float], *, is_routine: bool = False
    ) -> None:
        """Writes one event: numbers by full name, `train/loss`.

        A routine one is not printed while the progress line of a terminal shows it.
        """
        text = line(iteration, {"epoch": epoch, **metrics} if epoch else metrics)
        self._logger.info("%s", text, extra={"is_shown": is_routine and self.is_live()})
        self._file.write(iteration, epoch, metrics)
        for name, value in metrics.items():
            # VisualDL sorts the groups of curves by name and opens the first: train, and not speed.
            tag = name.replace("speed/", "wall_clock/", 1) if name.startswith("speed/") else name
            self._visualizer().add_scalar(tag, value, iteration)
        self._num_drawn += len(metrics)

    @property
    def is_used(self) -> bool:
        """Whether the user has logged anything, on the board alone perhaps."""
        return self.meter.is_used or self._visualizer().num_added > self._num_drawn

    def sizes(self) -> dict[str, int]:
        """How long the files are now, in bytes; no part of the state: lines have times in them."""
        return {"metrics_bytes": self._file.size(), "visualdl_bytes": self._visualizer().size()}

    def cut(self, sizes: Mapping[str, int] | None) -> None:
        """Removes what was written after the files had these sizes; None: everything."""
        sizes = sizes or {}
        self._file.cut(sizes.get("metrics_bytes", 0))
        self._visualizer().cut(sizes.get("visualdl_bytes", 0))

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self._file.close()
        self._visualizer().close()
