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
from expbase.tools.again import what_is_saved
from expbase.tools.making import Made
from expbase.tools.parts import History, Part


def write(path: Path, history: History, made: Sequence[Made], result: str) -> None:
    """Writes the receipt of some parts."""
    first = history.maker(made[0].part.first + 1)
    receipt = {
        "result": result,
        "reproduced": not any(one.problem for one in made),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "run": str(history.run),
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
    parts: dict[Part, str] = {}
    numbers: set[str] = set()
    for path in paths:
        for entry in _read(path):
            part = Part(entry["first"], entry["last"])
            parts[part] = entry["problem"] or _is_of_another_run(history, entry)
            if parts[part]:
                parts[part] = f"{path}: {part}: {parts[part]}"
            numbers |= entry["then"]["numbers"].keys()
    problem = next((one for _, one in sorted(parts.items()) if one), "")
    reached = history.first
    for part in sorted(parts):
        if part.first <= reached:
            reached = max(reached, part.last)
    end = history.parts()[-1].last
    if not problem and reached < end:
        problem = f"no receipt of the iterations from {reached + 1} on, of {end}"
    if problem:
        return problem, f"NOT REPRODUCED: {problem}"
    what = f"{Part(history.first, end)}, by the receipts of {len(parts)} parts"
    sizes = f"{len(history.kept)} checkpoints, {len(numbers)} logged numbers"
    return "", f"reproduced: {what}, the same bits ({sizes})"


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(path.read_bytes())["parts"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        text = f"{path}: is no receipt of `reproduce`, which --record writes: {error!r:.200}"
        raise ConfigError(text) from None


def _is_of_another_run(history: History, entry: Any) -> str:
    """Returns which checkpoint is not what a receipt says that the run has; "" if all are."""
    for name, saved in entry["then"]["saved"].items():
        checkpoint = history.run / layout.FOLDER / name
        if not checkpoint.exists():
            return f"the run has no {name}"
        now = json.loads(json.dumps(what_is_saved(checkpoint)))
        del now["environment"]
        if now != saved:
            return f"the run has another {name} than the one that was compared"
    return ""
