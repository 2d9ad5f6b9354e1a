"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

A start without an end is a process that was killed. A leaf; what a start or an end is worth
noting is passed in.

    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("start", iteration=400, ranks=2)
    ledger.write("end", iteration=600, reason="finished", exit_code=0)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEDGER = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of a run.

    Args:
        path: The file, made at the first record; None writes nothing (on ranks other than 0).
        clock: Gives the time in seconds since 1970.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def write(self, event: str, **facts: Any) -> None:
        """Appends one record, so that it is on disk when this returns."""
        if self._path is None:
            return
        record = {"event": event, "time": round(self._clock(), 3), **facts}
        with self._path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_with_newline(self._path):
                file.write("\n")  # a kill tore the record before
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
