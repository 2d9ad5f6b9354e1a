"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

A start without an end is a process that was killed. What is noted is passed in (provenance.py
gathers it).

    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("start", iteration=400, ranks=2, config=flat(config))
    ledger.write("end", iteration=600, reason="finished", exit_code=0)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.base.exit_codes import exit_code_of
from expbase.base.files import AppendedFile
from expbase.config import flatten

LEDGER = "ledger.jsonl"


class Ledger(AppendedFile):
    """The ledger of a run; without a path (on ranks other than 0) it writes nothing.

    It stays open: the end is noted where the start is, also if the directory is elsewhere then.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.facts: dict[str, Any] = {}  # of this start, from provenance.py
        self.resumed: str | None = None  # the checkpoint from which this start goes on
        self.has_begun = False  # whether this start is noted

    def begin(
        self, iteration: int, config: Mapping[str, Any], reason: str | None, ranks: int
    ) -> None:
        """Notes a start that trains, on rank 0, and for what reason --restarts makes it, if any."""
        self.has_begun = True
        facts = {**self.facts, "ranks": ranks, "resumed": self.resumed, "restart": reason}
        self.write("start", iteration=iteration, config=flat(config), **facts)

    def end(self, iteration: int, failure: BaseException | None, reason: str, code: int) -> None:
        """Notes how a start has ended; a failure counts for more than another reason."""
        if failure:
            reason = repr(failure)
            code = exit_code_of(failure, in_setup=not self.has_begun)
        self.write("end", iteration=iteration, reason=reason, exit_code=code)

    def write(self, event: str, **facts: Any) -> None:
        """Appends a "start" or "end" with JSON values, on disk when this returns; or an OSError."""
        if self.path is None:
            return
        record = {"event": event, "time": round(time.time(), 3), **facts}
        file = self.open()
        file.write(f"{json.dumps(record)}\n".encode())  # one piece, which no kill tears
        os.fsync(file.fileno())


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config by full keys, as JSON values."""
    # The way through JSON makes two of them comparable: tuples become lists, and a nan, which is
    # not equal to itself, becomes a text.
    text = json.dumps(flatten(config), default=str)
    values: dict[str, Any] = json.loads(text, parse_constant=str)
    return values
