"""Receipts of `reproduce`: what was compared of which part, as JSON, to publish or to put together.

write(path, history, made, result)
problem, result = together(history, [path, other])    # do they show the whole run?
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expbase.base.files import write_single_file
from expbase.checkpoint import layout
from expbase.config import ConfigError
from expbase.engine.compare_runs import iteration_of, logged, what_is_saved
from expbase.tools.remake_part import Made
from expbase.tools.run_parts import History, Stretch


def write(
    path: Path, history: History, made: Sequence[Made], result: str, digest: str | None = None
) -> None:
    """Writes the receipt of some parts of the run of a digest, if one was given."""
    first = history.maker(made[0].part.first + 1)
    receipt = {
        "result": result,
        "reproduced": not any(one.problem for one in made),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "run": str(history.run),
        "digest": digest,
        "command": first["command"],
        "git": first["git"],
        "parts": [_entry(one) for one in made],
    }
    write_single_file(path, [json.dumps(receipt, indent=1).encode()])


def _entry(made: Made) -> dict[str, Any]:
    return {
        "first": made.part.first,
        "last": made.part.last,
        "problem": made.problem,
        "not as it was": made.changed,
        "new": made.new,
        "updates": made.updates,
        "then": asdict(made.then),
        "now": asdict(made.now),
    }


def together(history: History, paths: Sequence[Path]) -> tuple[str, str]:
    """Returns why receipts do not show that a run is reproduced as a whole, or "", and a line."""
    there = logged(history.run)
    parts: set[Stretch] = set()
    problems: list[tuple[Stretch, str]] = []
    numbers: set[str] = set()
    saved: set[str] = set()
    for path in paths:
        for entry in _read(path):
            part = Stretch(entry["first"], entry["last"])
            parts.add(part)
            numbers |= entry["then"]["numbers"].keys()
            saved |= entry["then"]["saved"].keys()
            if problem := entry["problem"] or _does_not_fit(history, entry, there):
                problems.append((part, f"{path}: {part}: {problem}"))
    problem = min(problems)[1] if problems else _missing(history, parts, numbers, there)
    if problem:
        return problem, f"NOT REPRODUCED: {problem}"
    what = f"{Stretch(history.first, history.kept[-1])}, by the receipts of {len(parts)} parts"
    sizes = f"{len(saved)} checkpoints, {len(numbers)} logged numbers"
    return "", f"reproduced: {what}, the same bits ({sizes})"


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        parts = list(json.loads(path.read_bytes())["parts"])
        for part in parts:  # another file would lack these
            _ = part["first"], part["last"], part["problem"], part["not as it was"]
            _ = part["then"]["saved"].items(), part["then"]["numbers"].items()
        return parts
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"{path}: is no receipt of `reproduce`, which --record writes: {error!r:.200}"
        raise ConfigError(text) from None


def _does_not_fit(history: History, entry: Any, there: dict[str, Any]) -> str:
    """Returns why a receipt shows nothing of this run; empty if it does.

    Args:
        history: Of the run.
        entry: A part in a receipt.
        there: The numbers that the run has logged.
    """
    then = entry["then"]
    if any(fact.startswith("sources.") for fact in entry["not as it was"]):
        return "it was made with --here, by code that is not the run's"
    for name, saved in then["saved"].items():
        checkpoint = history.run / layout.FOLDER / name
        if not checkpoint.exists():
            return f"the run has no {name}"
        now = json.loads(json.dumps(what_is_saved(checkpoint)))
        del now["environment"]
        if now != saved:
            return f"the run has another {name} than the one that was compared"
    for name, number in then["numbers"].items():
        if repr(number) != repr(there.get(name)):  # nan is not equal to itself
            return f"{name} was {number} when it was compared; the run has {there.get(name)}"
    return ""


def _missing(
    history: History, parts: set[Stretch], numbers: set[str], there: dict[str, Any]
) -> str:
    """Returns what no receipt shows of a run; empty if they show all of it."""
    end = history.parts()[-1].last
    reached = history.first
    for part in sorted(parts):
        if part.first <= reached:
            reached = max(reached, part.last)
    if reached < end:
        return f"no receipt of the iterations from {reached + 1} on, of {end}"
    left = [name for name in there if iteration_of(name) <= end and name not in numbers]
    return f"no receipt has {left[0]}" if left else ""
