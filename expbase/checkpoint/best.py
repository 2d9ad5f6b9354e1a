"""The results of a run's validations, in a file beside its checkpoints, and which were best.

They are no part of a checkpoint, which is made before its iteration is validated. The file has a
JSON line for each validation, with its score, and one when the run has come to its end. Like the
logs it is cut back to where it was at the checkpoint that is continued. Which is the best is
decided when somebody asks, among the checkpoints that are there: files are written in the
background, and one that was on its way when its score was noted may never appear.

    validations = Validations(run / FILE, config.training)
    validations.add(400, 2, {"accuracy": 0.9})
    validations.best            # [(400, 0.9)], if checkpoints/step-00000400 is there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from expbase.base.json_lines import JsonLines, json_lines
from expbase.checkpoint.layout import FOLDER, iteration_of, listed

FILE = "validations.jsonl"  # in the directory of a run

_MOST_BYTES = 1 << 26  # of the file; the lines of some 400,000 validations

Scores = list[tuple[int, float]]  # iterations and their scores, best first
Lines = list[dict[str, Any]]


class Validations:
    """What is known of the validations of a run; `training` is that section of its config."""

    def __init__(self, path: Path | None, training: Any) -> None:
        self._path = path
        self._file = JsonLines(path)
        self._lines: Lines = []  # also what a full disk has refused
        self._training = training

    def add(self, iteration: int, epoch: int, results: Mapping[str, float]) -> None:
        """Notes the results of one; a score that is not finite is never the best."""
        score = results.get(self._training.monitor.removeprefix("valid/"), math.nan)
        may_be_best = not math.isnan(merit(score, self._training.monitor_mode))
        if results:
            named = {f"valid/{name}": number for name, number in results.items()}
            self._note(iteration, epoch, named, [(iteration, score)] * may_be_best)

    def add_end(self, iteration: int, epoch: int) -> None:
        """Notes that the run has come to its end."""
        self._note(iteration, epoch, {"finished": True}, [])

    def _note(self, iteration: int, epoch: int, metrics: Mapping[str, Any], best: Scores) -> None:
        by = criterion(self._training) if self._training.monitor else ""
        line = {**metrics, "monitor": by, "best": best}
        self._lines.append(line)
        self._file.write(iteration, epoch, line)

    def is_finished(self) -> bool:
        """Returns whether the run has come to its end, and was not continued since."""
        return any("finished" in line for line in _lines(self._path)[-1:])

    @property
    def best(self) -> Scores:
        """The best checkpoints that are there; empty but on rank 0."""
        return _there(self._path.parent, _ranked(self._lines)) if self._path else []

    def kept(self, coming: Iterable[int] = ()) -> Callable[[Iterable[int]], list[int]]:
        """Returns a function: by what is noted now, which iterations stay for being the best.

        It is given those that have a checkpoint. `coming` are others, whose checkpoints are not
        there yet.
        """
        ranked, most, coming = _ranked(self._lines), self._training.keep_best, {*coming}

        def kept(there: Iterable[int]) -> list[int]:
            known = coming.union(there)
            return [iteration for iteration, _ in ranked if iteration in known][:most]

        return kept

    def is_kept(self, iteration: int, coming: Iterable[int]) -> bool:
        """Returns whether an iteration, one of the `coming`, stays for being the best."""
        ranked, most = _ranked(self._lines), self._training.keep_best
        if self._path is None or iteration not in [number for number, _ in ranked]:
            return False
        # Directories are listed only if one that was better may have no checkpoint any more.
        best = [number for number, _ in ranked[:most]]
        return iteration in best or iteration in self.kept(coming)(_saved(self._path.parent))

    def cut(self, size: int) -> None:
        """Goes back to where the file had this size, in bytes."""
        self._file.cut(size)
        self._lines = _lines(self._path)

    def size(self) -> int:
        """Returns the size of the file now, in bytes."""
        return self._file.size()

    def close(self) -> None:
        """Closes the file until the next line. May be called twice."""
        self._file.close()


def best_of(run: Path) -> Scores:
    """Returns the best checkpoints of a run that are there, by the file in its output directory."""
    return _there(run, _ranked(_lines(run / FILE)))


def _there(run: Path, ranked: Scores) -> Scores:
    saved = _saved(run) if ranked else set()
    return [(iteration, score) for iteration, score in ranked if iteration in saved]


def _saved(run: Path) -> set[int]:
    return {iteration_of(path) or 0 for path in listed(run / FOLDER)}


def _ranked(lines: Lines) -> Scores:
    """Sorts all by the metric that the last line names; others' scores do not count."""
    monitor = _monitor_of(lines[-1]) if lines else ""
    noted = [line["best"] for line in lines if _monitor_of(line) == monitor]
    # Versions before 0.2 have in each line all that were best until then.
    scores = {iteration: score for best in noted for iteration, score in best}
    mode = monitor.partition(" ")[0]
    return sorted(scores.items(), key=lambda one: -merit(one[1], mode))


def _monitor_of(line: Mapping[str, Any]) -> str:
    """Returns the `criterion` that a line was noted by; older lines have the word valid/ in it."""
    return str(line.get("monitor")).replace(" valid/", " ", 1)


def _lines(path: Path | None) -> Lines:
    return [*json_lines(path, _MOST_BYTES)] if path else []


def merit(score: float, mode: str) -> float:
    """Returns how good a score is, by a `monitor_mode`: the more, the better, and an equal one is
    not better; nan for one that is not finite, which is never the best.
    """
    if not math.isfinite(score):
        return math.nan
    return score if mode == "max" else -score


def criterion(training: Any) -> str:
    """Returns by what scores are compared: "max accuracy". Those by another one do not count."""
    return f"{training.monitor_mode} {training.monitor.removeprefix('valid/')}"
