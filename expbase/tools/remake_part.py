"""Makes one part of a run again, and compares it: its checkpoints, logged numbers, facts.

made = make(history, Stretch(300, 420), commands, folder)
made.problem        # why it is not the same; empty if it is
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.files import read_bytes, regular
from expbase.base.json_lines import json_lines
from expbase.checkpoint import best, layout, storage
from expbase.checkpoint.checkpointer import VALIDATIONS_BYTES
from expbase.config import CONFIG, ConfigError, differences, flatten
from expbase.engine.compare_runs import iteration_of, logged, what_is_saved
from expbase.record.starts_and_ends import sessions
from expbase.tools import train_again
from expbase.tools.recorded_commands import Commands
from expbase.tools.run_parts import History, Leg, Stretch

# The facts of a start that may explain a difference, likely causes first.
_FACTS = (
    *("experiment", "config", "sources", "began_from", "loaders", "model", "first_batch", "ranks"),
    *("device", "processor", "environment", "python", "packages"),
)
_MOST_BYTES = 1 << 30  # of a file that is read whole
_OF_BEGIN = ("began_from", "first_batch")  # of the part with which a start began


@dataclass
class PartResult:
    """What there is of a part: in the run, or of its second making."""

    numbers: dict[str, Any] = field(default_factory=dict)  # logged ones, by name and iteration
    saved: dict[str, Any] = field(default_factory=dict)  # what checkpoints hold, by their names
    facts: dict[str, Any] = field(default_factory=dict)  # that may explain a difference


@dataclass
class Made:
    """A part that was made again."""

    part: Stretch
    then: PartResult = field(default_factory=PartResult)
    now: PartResult = field(default_factory=PartResult)
    problem: str = ""  # why it is not the same; empty if it is
    has_failed: bool = False  # whether its command has, before the first update
    changed: dict[str, Any] = field(default_factory=dict)  # facts of then and now that differ
    new: dict[str, Any] = field(default_factory=dict)  # numbers that the run had not logged
    updates: list[str] = field(default_factory=list)  # a line about each, if they are asked for


def make(history: History, part: Stretch, commands: Commands, folder: Path) -> Made:
    """Makes a part again in a folder, which is removed at the end, and compares it.

    Raises:
        ConfigError: There is nothing to compare, or the code cannot be had.
    """
    made = Made(part)
    folder.mkdir()
    try:
        _make(history, made, commands, folder / "run")
    except layout.CheckpointError as error:
        made.problem = str(error)
    finally:
        shutil.rmtree(folder)
    return made


def _make(history: History, made: Made, commands: Commands, output: Path) -> None:
    """Makes a part again in an output directory, and notes what comes out.

    Raises:
        ConfigError: There is nothing to compare, or the code cannot be had.
        CheckpointError: The run has a damaged checkpoint.
    """
    part = made.part
    _begin(history, part, output)
    made.then.saved = _saved(history, part)
    of_run = logged(history.run)
    at_end = _names_at_end(history, part)
    there = _of_part(part, of_run, at_end)
    if not (made.then.saved or there):
        raise ConfigError(
            f"{history.run}: has logged nothing in {part}, and keeps no checkpoint of them, so "
            "there is nothing to compare; expected a --to that reaches a line of the log."
        )
    before = logged(output)  # of the run itself
    legs = history.legs(part)
    problem = ""
    for leg in legs:
        problem = problem or commands.train(leg, output, [*history.kept_in(part), leg.last])
    _note_what_was_made(made, legs, output)
    found = logged(output)
    # What follows a checkpoint is done by who goes on from it.
    begun = {n for n in found if iteration_of(n) == part.first and n not in before}
    mine = begun | _of_part(part, found, at_end).keys()
    made.then.numbers = {name: v for name, v in of_run.items() if name in begun or name in there}
    made.now.numbers = {name: number for name, number in found.items() if name in mine}
    if commands.here:
        new = [name for name in made.now.numbers if name not in made.then.numbers]
        made.new = {name: made.now.numbers.pop(name) for name in new}
    made.has_failed = bool(problem) and not train_again.begun_path(output).exists()
    made.problem = problem or _difference(made, here=commands.here)


def _begin(history: History, part: Stretch, output: Path) -> None:
    """Makes an output directory in which a command goes on from the state that a part begins at.

    Raises:
        CheckpointError: The checkpoint of it is damaged.
    """
    if part.first not in history.kept:
        return
    run = history.run
    first = run / layout.FOLDER / layout.name_of(part.first)
    with storage.reading(first / layout.MANIFEST):
        size = len(range(storage.verify(first)["info"][VALIDATIONS_BYTES]))
    # The best one of then is there, too: a script may test it at its end.
    best_then = [iteration for iteration, _ in best.best_of(run) if iteration <= part.first]
    for name in map(layout.name_of, {part.first, *best_then[:1]}):
        _copy(run / layout.FOLDER / name, output / layout.FOLDER / name)
    (output / CONFIG).write_bytes(read_bytes(run / CONFIG, _MOST_BYTES))
    if (validations := run / best.FILE).exists():  # which decide what is kept as the best
        (output / best.FILE).write_bytes(read_bytes(validations, _MOST_BYTES)[:size])


def _copy(checkpoint: Path, target: Path) -> None:
    """Copies a checkpoint, and nothing that its manifest does not name: a pipe has no end."""
    target.mkdir(parents=True)
    for name in (layout.MANIFEST, *storage.read_manifest(checkpoint)["files"]):
        with (
            open(checkpoint / name, "rb", opener=regular) as source,
            open(target / name, "wb") as to,
        ):
            shutil.copyfileobj(source, to)


def _saved(history: History, part: Stretch) -> dict[str, Any]:
    """Returns what the checkpoints of a part hold, by their names.

    Raises:
        CheckpointError: One is damaged.
    """
    saved = {}
    for iteration in history.kept_in(part):
        checkpoint = history.run / layout.FOLDER / layout.name_of(iteration)
        storage.verify(checkpoint)
        saved[checkpoint.name] = what_is_saved(checkpoint)
    return saved


def _note_what_was_made(made: Made, legs: Sequence[Leg], output: Path) -> None:
    """Notes the checkpoints and the updates that were made, and what may explain a difference."""
    from expbase.base.json_values import is_of_a_sample  # here: it imports paddle

    then, now = made.then, made.now
    for line in json_lines(train_again.saved_path(output)):
        now.saved |= {name: saved for name, saved in line.items() if name in then.saved}
    made.updates = _updates(output)
    starts = [session.start for session in sessions(output)]
    for leg, start in zip(legs, starts, strict=False):  # few if one did not begin
        begins = leg.start["iteration"] == made.part.first
        names = [name for name in _FACTS if begins or name not in _OF_BEGIN]
        names = [name for name in names if name in leg.start and name in start]
        if is_of_a_sample(*(str(facts.get("first_batch")) for facts in (leg.start, start))):
            names.remove("first_batch")
        for side, facts in ((then, leg.start), (now, start)):
            side.facts |= {name: facts[name] for name in names}
        made.changed |= differences(*({n: facts[n] for n in names} for facts in (leg.start, start)))
    # Not the bits, but the versions, threads and flags with which a checkpoint was made.
    for side in (then, now):
        for name, saved in side.saved.items():
            environment = saved.pop("environment")
            if name in then.saved.keys() & now.saved.keys():
                side.facts["checkpoint"] = environment
    checkpoints = [side.facts.get("checkpoint", {}) for side in (then, now)]
    made.changed |= differences(*({"checkpoint": facts} for facts in checkpoints))


def _names_at_end(history: History, part: Stretch) -> Collection[str] | None:
    """Returns what was logged at the last iteration of a part before other code went on from it;
    None if none did.
    """
    later = [start for start in history.starts if start["iteration"] == part.last]
    if not (later and history.has_changed_at(part.last)):
        return None
    return logged(history.run, part.last, until=later[0]["time"])


def _of_part(
    part: Stretch, numbers: dict[str, Any], at_end: Collection[str] | None
) -> dict[str, Any]:
    """Returns those numbers of one side that were logged after the first iteration of a part.

    Args:
        part: The part.
        numbers: All of one side.
        at_end: Which of the last iteration belong to it; None: all.
    """
    at = {name: iteration_of(name) for name in numbers}
    return {
        name: number
        for name, number in numbers.items()
        if part.first < at[name] <= part.last
        and (at[name] < part.last or at_end is None or name in at_end)
    }


def _difference(made: Made, *, here: bool) -> str:
    """Returns the first difference, by its iteration; empty if there is none."""
    then, now = made.then, made.now
    found = [
        (iteration_of(n), n, pair) for n, pair in differences(then.numbers, now.numbers).items()
    ]
    for name, saved in then.saved.items():
        at = layout.iteration_of(Path(name)) or 0
        if name not in now.saved:
            found.append((at, name, ("kept", "not made")))
        known = flatten(saved)  # by the code of now more may be logged, and others may listen
        for key, pair in differences(saved, now.saved.get(name, saved)).items():
            found += [(at, f"{key} of {name}", pair)] if key in known or not here else []
    for _, name, (before, after) in sorted(found, key=lambda one: one[0])[:1]:
        return f"{name} differs: {before} then, {after} now"
    return ""


def _updates(output: Path) -> list[str]:
    """Returns a line about each update, with what all ranks have logged and read."""
    lines: dict[int, list[str]] = {}
    for path in sorted(output.parent.glob(train_again.updates_path(output, "*").name)):
        for update in json_lines(path):
            words = lines.setdefault(update["iteration"], [f"[{update['iteration']}]"])
            for name, numbers in update["logged"].items():
                words.append(f"{name}={','.join(map(_shown, numbers))}")
            for samples in update["samples"]:
                words += ["samples", "unknown" if samples is None else ",".join(map(str, samples))]
    return [" ".join(lines[iteration]) for iteration in sorted(lines)]


def _shown(number: float) -> str:
    """Returns a number as text: whole ones may be those of samples."""
    return f"{number:.0f}" if number.is_integer() and abs(number) < 1e15 else f"{number:.6g}"
