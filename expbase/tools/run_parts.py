"""The parts in which a run can be made again, from its records. A part begins at a checkpoint that
is kept, or where the run began, and ends at a later iteration.

history = history_of(run)
history.parts()                  # between neighbours among the checkpoints
history.part(300, 420)           # from one of them to any later iteration
history.legs(part)               # the starts that have trained it, with their code and config
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from expbase.checkpoint import layout, storage
from expbase.config import ConfigError, differences
from expbase.record.metrics import metric_lines
from expbase.record.starts_and_ends import LEDGER, Facts, maker, sessions, those_that_trained

# What is read of it, with the types of the values.
_KINDS: dict[str, Any] = {
    "iteration": int,
    "time": (int, float),
    "script": int,
    "command": list,
    "experiment": str,
    "directory": (str, type(None)),
    "sources": (dict, type(None)),
    **dict.fromkeys(("git", "environment", "config"), dict),
}


class Stretch(NamedTuple):
    """A part of a run: the iterations after `first`, and `last` is one of them."""

    first: int  # at whose state it begins
    last: int

    def __str__(self) -> str:
        return f"iterations {self.first + 1} to {self.last}"


class Leg(NamedTuple):
    """Iterations that are trained by one command."""

    start: Facts
    last: int


@dataclass(frozen=True)
class History:
    """What has trained a run."""

    run: Path
    starts: Sequence[Facts]  # that have trained what it holds, in order
    kept: list[int]  # the iterations of its checkpoints after that where it began, in order
    has_kept_first: bool  # one that began from another run's may have saved that state, too

    @property
    def first(self) -> int:
        """The iteration at whose state the run began: 0, or that of another run's checkpoint."""
        return int(self.starts[0]["iteration"])

    def parts(self) -> list[Stretch]:
        """Returns the parts between neighbours; a ConfigError if no checkpoint is kept."""
        if not self.kept:
            last = self._reached()
            raise ConfigError(
                f"{self.run}: holds no checkpoint; expected --to N, at most {last}, the last line."
            )
        return [Stretch(*pair) for pair in zip([self.first, *self.kept], self.kept, strict=False)]

    def part(self, first: int | None, last: int | None) -> Stretch:
        """Returns one part, by default from the beginning, and to the newest checkpoint.

        Raises:
            ConfigError: It begins or ends where none can.
        """
        begin = self.first if first is None else first
        if begin not in (self.first, *self.kept):
            there = ", ".join(map(str, [self.first, *self.kept]))
            raise ConfigError(
                f"{self.run}: --from {begin} given, and the state of that iteration is not kept; "
                f"expected one of {there}."
            )
        if last is None:
            last = self.parts()[-1].last
        reached = self._reached()
        if not begin < last <= reached:
            raise ConfigError(
                f"{self.run}: --to {last} given; expected {begin + 1} to {reached}, the last "
                "iteration that has a checkpoint or a line."
            )
        return Stretch(begin, last)

    def _reached(self) -> int:
        lines = (line["iteration"] for line in metric_lines(self.run))
        reached: int = max([self.first, *self.kept, *lines])
        if reached == self.first:
            raise ConfigError(
                f"{self.run}: has no line and no checkpoint of an iteration: there is nothing to "
                "reproduce."
            )
        return reached

    def kept_in(self, part: Stretch) -> list[int]:
        """Returns the iterations of the checkpoints that a part passes, in order."""
        first = [self.first] * (self.has_kept_first and part.first == self.first)
        return first + [iteration for iteration in self.kept if part.first < iteration <= part.last]

    def legs(self, part: Stretch) -> list[Leg]:
        """Returns how a part was trained: a run may be continued with other code or config."""
        legs = [Leg(self.maker(part.first + 1), part.last)]
        for iteration in sorted({start["iteration"] for start in self.starts}):
            if part.first < iteration < part.last and self.has_changed_at(iteration):
                legs[-1] = legs[-1]._replace(last=iteration)
                legs.append(Leg(self.maker(iteration + 1), part.last))
        return legs

    def maker(self, iteration: int) -> Facts:
        """Returns the start that has made an iteration: the last one that began before it."""
        return maker(self.starts, iteration)

    def has_changed_at(self, iteration: int) -> bool:
        """Returns whether other code, config or (without shares) ranks have trained from there."""
        before, after = self.maker(iteration), self.maker(iteration + 1)
        made_by = ["config", "sources", "git"]
        if not before["config"].get("training.shares"):
            made_by.append("ranks")
        return bool(
            differences(*({name: one[name] for name in made_by} for one in (before, after)))
        )


def history_of(run: Path) -> History:
    """Reads what has trained a run.

    Raises:
        ConfigError: It cannot be made again.
        FormatError: Another version of expbase has written its checkpoints.
    """
    starts = [session.start for session in sessions(run) if session.start]
    if not starts or not starts[0].get("command") or "script" not in starts[0]:
        raise ConfigError(f"{run}: holds no run of a script, made by this version of expbase.")
    for number, start in enumerate(starts):
        _check(start, f"{run / LEDGER}: start {number + 1}")
    trained = those_that_trained(starts)
    begin = trained[0]["iteration"]
    checkpoints = layout.listed(run / layout.FOLDER)
    for path in checkpoints:
        storage.check_format_at(path)
    saved = [layout.iteration_of(path) or 0 for path in checkpoints]
    return History(run, trained, [one for one in saved if one > begin], begin in saved)


def _check(start: Facts, place: str) -> None:
    """Raises a ConfigError if a start has not noted what is needed to make it again.

    Somebody else may have written it: the names of a commit and of a diff are given to git.
    """
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(start.get(name), kinds)]
    if not wrong:
        names = ("commit", "state")
        wrong += [f"git.{name}" for name in names if not _is_name(start["git"].get(name))]
        wrong += ["command"] * (not all(isinstance(word, str) for word in start["command"]))
    if wrong:
        shown = repr(start.get(wrong[0], "nothing"))
        raise ConfigError(
            f"{place}: has {shown:.80} for {wrong[0]!r}, so it cannot be made again; expected the "
            "record that a run writes."
        )


def _is_name(value: Any) -> bool:
    """Returns whether a value is the name of a commit or of a diff, or there is none."""
    return value is None or (isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{7,64}", value)))
