"""What is compared of two runs: the bits of a checkpoint, its values, and the logged numbers.

one = files(checkpoint) | logged(run)
one == files(other_checkpoint) | logged(other)   # where not is said by config.py, differences
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from expbase.base.json_lines import json_lines
from expbase.checkpoint import best, storage
from expbase.checkpoint.layout import STATE_FILE
from expbase.record.metrics import METRICS, metric_lines


def what_is_saved(checkpoint: Path) -> dict[str, Any]:
    """Returns what is compared of a checkpoint: checksums of its files, and its values."""
    saved = files(checkpoint) | values(checkpoint)
    # One that is made at a stop has none: the to-do list was done before.
    saved["loop"].pop("todo")
    return saved


def files(checkpoint: Path) -> dict[str, str]:
    """Returns the checksum of each file of tensors in a checkpoint."""
    there = storage.opened(checkpoint).files
    there.pop(STATE_FILE, None)
    with ThreadPoolExecutor() as executor:  # hashlib lets the other threads run
        digests = executor.map(hashlib.sha256, there.values())
        return {
            name: f"sha256 {digest.hexdigest()}"
            for name, digest in zip(there, digests, strict=True)
        }


def values(checkpoint: Path) -> dict[str, Any]:
    """Returns all values of a checkpoint's state.json, by the name of their section."""
    text = (checkpoint / STATE_FILE).read_bytes()
    state = json.loads(text, parse_constant=str)  # "NaN" is equal to itself
    return {**state, **state.pop("values")}


class Number(NamedTuple):
    """A number that a run has logged."""

    file: str  # in the output directory
    name: str
    iteration: int
    time: float  # seconds since 1970
    value: Any

    @property
    def words(self) -> str:
        """Which number it is, in words."""
        place = "" if self.file == METRICS else f" of {self.file}"
        return f"{self.name} at iteration {self.iteration}{place}"


def numbers(run: Path) -> Iterator[Number]:
    """Yields all that a run has logged but times and speeds, in order."""
    for file, lines in ((METRICS, metric_lines(run)), (best.FILE, _validations(run))):
        for line in lines:
            for name, value in line.items():
                if ("/" in name or name == "best") and not name.startswith("speed/"):
                    yield Number(file, name, line["iteration"], line.get("time", 0.0), value)


def logged(run: Path, iteration: int | None = None, until: float = math.inf) -> dict[str, Any]:
    """Returns all logged numbers but times and speeds, by their words, in order.

    Args:
        run: The output directory.
        iteration: Only those of this one; None: of all.
        until: Only those that were logged before this time, in seconds since 1970.
    """
    return {
        one.words: one.value
        for one in numbers(run)
        if iteration in (None, one.iteration) and one.time < until
    }


def _validations(run: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines about validations, with `best` only if one could be the best."""
    for line in json_lines(run / best.FILE):
        if not line.get("best"):
            line.pop("best", None)
        yield line


def iteration_of(name: str) -> int:
    """Returns the iteration in the words of a number."""
    return int(name.rpartition(" at iteration ")[2].partition(" ")[0])
