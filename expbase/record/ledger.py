"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

Between them stands the checksum of its first batch ("data"). A start without an end is a process
that was killed. What is noted is passed in (provenance.py gathers it).

    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("start", iteration=400, ranks=2, config=flat(config))
    ledger.write("end", iteration=600, reason="finished", exit_code=0)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from expbase.base.files import AppendedFile
from expbase.config import flatten

LEDGER = "ledger.jsonl"
STOP_FILE = "a file named STOP"  # the `reason` of an end that somebody has asked for by it


class Ledger(AppendedFile):
    """The ledger of a run, of rank 0.

    It stays open: the end is noted where the start is, also if the directory is elsewhere then.
    """

    def write(self, event: str, **facts: Any) -> None:
        """Appends an event with JSON values, on disk when this returns; or says that it cannot."""
        record = {"event": event, "time": round(time.time(), 3), **facts}
        self.append(f"{json.dumps(record)}\n".encode())  # one piece, which no kill tears
        self.flush()


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config by full keys, as JSON values."""
    # The way through JSON makes two of them comparable: tuples become lists, and a nan, which is
    # not equal to itself, becomes a text.
    text = json.dumps(flatten(config), default=str)
    values: dict[str, Any] = json.loads(text, parse_constant=str)
    return values
