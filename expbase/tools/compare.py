"""What is compared of two runs: the bits of a checkpoint, its values, and the logged numbers.

differences(files(checkpoint) | logged(run), files(other_checkpoint) | logged(other))
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expbase.base.json_lines import json_lines
from expbase.checkpoint import best, storage
from expbase.checkpoint.layout import STATE_FILE
from expbase.tools.runs import metric_lines


def files(checkpoint: Path) -> dict[str, str]:
    """Returns the checksum of each file of tensors in a checkpoint."""
    return {
        name: f"sha256 {hashlib.sha256(data.tobytes()).hexdigest()}"
        for name, data in storage.opened(checkpoint).files.items()
        if name != STATE_FILE
    }


def values(checkpoint: Path) -> dict[str, Any]:
    """Returns all values of a checkpoint's state.json, by the name of their section."""
    text = (checkpoint / STATE_FILE).read_bytes()
    state = json.loads(text, parse_constant=str)  # "NaN" is equal to itself
    return {**state, **state.pop("values")}


def logged(run: Path, iteration: int | None = None, until: float = math.inf) -> dict[str, Any]:
    """Returns all logged numbers but times and speeds, by name and iteration, in order.

    Args:
        run: The output directory.
        iteration: Only those of this one; None: of all.
        until: Only those that were logged before this time, in seconds since 1970.
    """
    return {
        f"{name} at iteration {line['iteration']}{place}": value
        for place, lines in (("", metric_lines(run)), (f" of {best.FILE}", _validations(run)))
        for line in lines
        if iteration in (None, line["iteration"]) and line.get("time", 0.0) < until
        for name, value in line.items()
        if ("/" in name or name == "best") and not name.startswith("speed/")
    }


def _validations(run: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines about validations, with `best` only if one could be the best."""
    for line in json_lines(run / best.FILE):
        if not line.get("best"):
            line.pop("best", None)
        yield line


def iteration_of(name: str) -> int:
    """Returns the iteration in a name of `logged`."""
    return int(name.rpartition(" at iteration ")[2].partition(" ")[0])
