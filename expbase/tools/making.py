"""Makes one part of a run again, and compares it: its checkpoints, logged numbers, facts.

made = make(history, Part(300, 420), commands, folder)
made.problem        # why it is not the same; empty if it is
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.json_lines import json_lines
from expbase.checkpoint import best, layout, storage
from expbase.checkpoint.checkpointer import VALIDATIONS_BYTES
from expbase.config import ConfigError, differences
from expbase.engine.run_dir import CONFIG
from expbase.tools import again
from expbase.tools.commands import Commands
from expbase.tools.compare import iteration_of, logged
from expbase.tools.parts import Facts, History, Leg, Part
from expbase.tools.runs import sessions

# The facts of a start that may explain a difference, likely causes first.
_FACTS = (
    *("experiment", "config", "sources", "began_from", "loaders", "model", "first_batch", "ranks"),
    *("device", "environment", "python", "packages"),
)
_OF_BEGIN = ("began_from", "first_batch")  # of the part with which a start began


@dataclass
class Side:
    """What there is of a part: in the run, or of its second making."""

    numbers: dict[str, Any] = field(default_factory=dict)  # logged ones, by name and iteration
    saved: dict[str, Any] = field(default_factory=dict)  # what checkpoints hold, by their names
    facts: dict[str, Any] = field(default_factory=dict)  # that may explain a difference


@dataclass
class Made:
    """A part that was made again."""

    part: Part
    then: Side = field(default_factory=Side)
    now: Side = field(default_factory=Side)
    problem: str = ""  # why it is not the same; empty if it is
    changed: dict[str, Any] = field(default_factory=dict)  # facts of then and now that differ
    new: dict[str, Any] = field(default_factory=dict)  # numbers that the run had not logged
    updates: list[str] = field(default_factory=list)  # a line about each, if they are asked for


def make(history: History, part: Part, commands: Commands, folder: Path) -> Made:
    """Makes a part again in a folder, and compares it.

    Raises:
        ConfigError: There is nothing to compare, or the code cannot be had.
    """
    made = Made(part)
    then, now = made.then, made.now
    output = folder / "run"
    try:
        _begin(history, part, output)
        then.saved = _saved(history, part)
    except layout.CheckpointError as error:
        made.problem = str(error)
        return made
    before = logged(output)  # of the run itself
    legs = history.legs(part)
    code = 0
    for leg in legs:
        code = code or commands.train(leg, output, [*history.kept_in(part), leg.last])
    now.saved = {n: s for line in json_lines(again.saved_path(output)) for n, s in line.items()}
    now.saved = {name: saved for name, saved in now.saved.items() if name in then.saved}
    _note_facts(made, legs, [session.start for session in sessions(output)])
    found = logged(output)
    then.numbers = _of_part(history, part, logged(history.run), found)
    now.numbers = _of_part(history, part, found, found.keys() - before.keys())
    if commands.here:
        new = [name for name in now.numbers if name not in then.numbers]
        made.new = {name: now.numbers.pop(name) for name in new}
    made.problem = _problem(made, code, here=commands.here)
    made.updates = _updates(output)
    return made


def _begin(history: History, part: Part, output: Path) -> None:
    """Makes an output directory in which a command goes on from the state that a part begins at.

    Raises:
        CheckpointError: The checkpoint of it is damaged.
    """
    output.parent.mkdir()
    if part.first not in history.kept:
        return
    run = history.run
    info = storage.verify(run / layout.FOLDER / layout.name_of(part.first))["info"]
    # The best one of then is there, too: a script may test it at its end.
    best_then = [iteration for iteration, _ in best.best_of(run) if iteration <= part.first]
    for name in map(layout.name_of, {part.first, *best_then[:1]}):
        shutil.copytree(run / layout.FOLDER / name, output / layout.FOLDER / name)
    shutil.copy(run / CONFIG, output)
    if (validations := run / best.FILE).exists():  # which decide what is kept as the best
        (output / best.FILE).write_bytes(validations.read_bytes()[: info[VALIDATIONS_BYTES]])


def _saved(history: History, part: Part) -> dict[str, Any]:
    """Returns what the checkpoints of a part hold, by their names.

    Raises:
        CheckpointError: One is damaged.
    """
    saved = {}
    for iteration in history.kept_in(part):
        checkpoint = history.run / layout.FOLDER / layout.name_of(iteration)
        storage.verify(checkpoint)
        saved[checkpoint.name] = again.what_is_saved(checkpoint)
    return saved


def _note_facts(made: Made, legs: Sequence[Leg], starts: Sequence[Facts]) -> None:
    """Notes what may explain a difference; there are few starts if one did not begin."""
    for leg, start in zip(legs, starts, strict=False):
        begins = leg.start["iteration"] == made.part.first
        names = [name for name in _FACTS if begins or name not in _OF_BEGIN]
        names = [name for name in names if name in leg.start and name in start]
        for side, facts in ((made.then, leg.start), (made.now, start)):
            side.facts |= {name: facts[name] for name in names}
        made.changed |= differences(*({n: facts[n] for n in names} for facts in (leg.start, start)))
    # The versions, threads and flags with which a checkpoint was made.
    both = [name for name in made.then.saved if name in made.now.saved]
    for side in (made.then, made.now):
        side.facts |= {"checkpoint": side.saved[name]["environment"] for name in both}
        for saved in side.saved.values():
            del saved["environment"]
    made.changed |= differences(
        *({"checkpoint": s.facts.get("checkpoint", {})} for s in (made.then, made.now))
    )


def _of_part(
    history: History, part: Part, numbers: dict[str, Any], begun: Collection[str]
) -> dict[str, Any]:
    """Returns those numbers that were logged in a part.

    Args:
        history: Of the run.
        part: The part.
        numbers: All of one side.
        begun: Which of those of its first iteration belong to it: what follows a checkpoint is
            done by who goes on from it.
    """
    last = part.last
    # Who went on from there with other code has perhaps done what follows.
    if any(start["iteration"] == last for start in history.starts) and history.has_changed_at(last):
        last -= 1
    at = {name: iteration_of(name) for name in numbers}
    inner = {name for name in numbers if part.first < at[name] <= last}
    inner |= {name for name in begun if at.get(name) == part.first}
    return {name: number for name, number in numbers.items() if name in inner}


def _problem(made: Made, code: int, *, here: bool) -> str:
    """Returns why a part is not the same; empty if it is."""
    then, now = made.then, made.now
    if not (then.numbers or then.saved):
        raise ConfigError(f"{made.part}: the run has no number of them, and no checkpoint.")
    if not here and then.facts.get("sources") != now.facts.get("sources"):
        return "this is not the code of the run"
    if code:
        return f"the command ended with code {code}"
    found = [
        (iteration_of(n), n, pair) for n, pair in differences(then.numbers, now.numbers).items()
    ]
    for name, saved in then.saved.items():
        at = layout.iteration_of(Path(name)) or 0
        for key, pair in differences(saved, now.saved.get(name, {})).items():
            is_new = here and pair[0] is None  # what is logged more, and who listens
            found += [] if is_new else [(at, f"{key} of {name}", pair)]
    for _, name, (before, after) in sorted(found, key=lambda one: one[0])[:1]:
        return f"{name} differs: {before} then, {after} now"
    return ""


def _updates(output: Path) -> list[str]:
    """Returns a line about each update, with what all ranks have logged and read."""
    lines: dict[int, list[str]] = {}
    for path in sorted(output.parent.glob(f"{output.name}.updates.*")):
        for update in json_lines(path):
            words = lines.setdefault(update["iteration"], [f"[{update['iteration']}]"])
            for name, numbers in update["logged"].items():
                words.append(f"{name}={','.join(f'{number:.6g}' for number in numbers)}")
            for samples in update["samples"]:
                words += ["samples", "unknown" if samples is None else ",".join(map(str, samples))]
    return [" ".join(lines[iteration]) for iteration in sorted(lines)]
