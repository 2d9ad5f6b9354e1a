"""Files of JSON objects, one a line: how a line about an iteration is added, and how all are read.

file = JsonLines(run / "metrics.jsonl")
file.write(iteration, epoch, {"train/loss": 0.25})
for line in json_lines(run / "metrics.jsonl"): ...
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expbase.base.files import AppendedFile, read_bytes

_MOST_BYTES = 1 << 30  # of a file of lines


class JsonLines(AppendedFile):
    """A file of lines about iterations: `iteration`, `epoch`, `time` and further values.

    `time` is in seconds since 1970. Without a path nothing is written.
    """

    def write(self, iteration: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Appends one line; a number that is not finite is a text in it."""
        if self.path is None:
            return
        record = {"iteration": iteration, "epoch": epoch, "time": round(time.time(), 3)}
        record |= {key: json_value(values[key]) for key in sorted(values)}
        self.append(f"{json.dumps(record)}\n".encode())


def json_lines(path: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines, if there is one, or of its last bytes.

    A line that is torn or of another kind is skipped.
    """
    if not path.is_file():
        return
    for text in read_bytes(path, last or _MOST_BYTES, or_end=last is not None).splitlines():
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def json_value(value: Any) -> Any:
    """Returns a number for JSON; one that is not finite as a text ("nan", "inf")."""
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
