"""The metrics of a run on their way out: a line of text, a line of JSON, a point on each curve.
Formats are in meter.py and visualizer.py.

    log = MetricLog(logger, MetricsFile(path), visualizer)
    log.write(iteration, epoch, {"train/loss": 0.25})
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from expbase.record.meter import Meter, MetricsFile, line
from expbase.record.visualizer import Visualizer

# How the names of curves begin that are drawn for every experiment, in VisualDL's words.
_OURS = ("train/lr", "valid/", "wall_clock/")


class MetricLog:
    """Where the metrics of one rank go: the text log, metrics.jsonl and VisualDL."""

    def __init__(self, logger: logging.Logger, file: MetricsFile, visualizer: Visualizer) -> None:
        self.meter = Meter()  # what `log` was given in training since the last line
        self.last: Mapping[str, float] = {}  # what the last line of training said
        self._logger = logger
        self._file = file
        self.visualizer = visualizer
        self.is_live: Callable[[], bool] = lambda: False  # whether a progress line is shown now
        self.is_compared = False  # whether VisualDL's file has the row for its table of runs

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
            self.visualizer.add_scalar(tag, value, iteration)

    @property
    def is_used(self) -> bool:
        """Whether something was logged in training, or the experiment draws curves of its own."""
        own = (tag for tag in self.visualizer.tags if not tag.startswith(_OURS))
        return self.meter.is_used or any(own)

    def sizes(self) -> dict[str, int]:
        """How long the files are now, in bytes; no part of the state: lines have times in them."""
        return {"metrics_bytes": self._file.size(), "visualdl_bytes": self.visualizer.size()}

    def cut(self, sizes: Mapping[str, int] | None) -> None:
        """Removes what was written after the files had these sizes; None: everything."""
        self.is_compared = self.is_compared and sizes is not None
        sizes = sizes or {}
        self._file.cut(sizes.get("metrics_bytes", 0))
        self.visualizer.cut(sizes.get("visualdl_bytes", 0))

    def state_dict(self) -> dict[str, Any]:
        """What was logged since the last line, and whether the table of runs knows this one."""
        return {"pending": self.meter.state_dict(), "hparams": self.is_compared}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        self.meter.load_state_dict(state["pending"])
        self.is_compared = state["hparams"]
        return []

    def close(self) -> None:
        """Closes the files. May be called twice."""
        self._file.close()
        self.visualizer.close()
