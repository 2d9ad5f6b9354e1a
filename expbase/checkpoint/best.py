"""The results of a run's validations, in a file beside its checkpoints, and which were best.

They are no part of a checkpoint, which is written before its iteration is validated. The file has
a JSON line for each validation, with the best checkpoints until then, and one when the run has come
to its end. Like the logs it is cut back to where it was at the checkpoint that is continued.

    validations = Validations(run / FILE, config.training)
    validations.add(400, 2, {"accuracy": 0.9}, has_checkpoint=True)
    validations.best            # [(400, 0.9)]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.record.metrics import MetricsFile, json_lines

FILE = "validations.jsonl"  # in the directory of a run

_END_BYTES = 1 << 20  # of the file: its last line is in them

Scores = list[Sequence[Any]]  # iterations and their scores, best first


class Validations(MetricsFile):
    """What is known of the validations of a run; `training` is that section of its config."""

    def __init__(self, path: Path | None, training: Any) -> None:
        super().__init__(path)
        self.best: Scores = []  # of those that have a checkpoint
        self._training = training
        self._monitor = f"{training.monitor_mode} {training.monitor}"

    def add(
        self, iteration: int, epoch: int, results: Mapping[str, float], *, has_checkpoint: bool
    ) -> None:
        """Notes the results of one; a score that is not finite is never the best."""
        training = self._training
        score = results.get(training.monitor.removeprefix("valid/"), math.nan)
        if has_checkpoint and math.isfinite(score):
            sign = -1 if training.monitor_mode == "max" else 1
            scores = sorted([*self.best, (iteration, score)], key=lambda one: sign * one[1])
            self.best = scores[: max(training.keep_best, 1)]
        if results:
            self.write(iteration, epoch, {f"valid/{name}": n for name, n in results.items()})

    def write(self, iteration: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line, with the best until now."""
        super().write(iteration, epoch, {**metrics, "monitor": self._monitor, "best": self.best})

    def is_finished(self) -> bool:
        """Whether the run has come to its end, and was not continued since."""
        return "finished" in _last_line(self.path)

    def kept(self) -> list[int]:
        """The iterations whose checkpoints stay for being the best."""
        return [iteration for iteration, _ in self.best[: self._training.keep_best]]

    def cut(self, size: int) -> None:
        """Goes back to where the file had this size, in bytes; other metrics' scores are gone."""
        super().cut(size)
        last = _last_line(self.path)
        self.best = last["best"] if last.get("monitor") == self._monitor else []


def best_of(run: Path) -> Scores:
    """The best checkpoints of a run, by the file in its output directory."""
    best: Scores = _last_line(run / FILE).get("best", [])
    return best


def _last_line(path: Path | None) -> dict[str, Any]:
    return next(reversed([*json_lines(path, _END_BYTES)] if path else []), {})
