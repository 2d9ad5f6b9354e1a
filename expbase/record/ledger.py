"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

A start without an end is a process that was killed. What is noted is passed in (provenance.py
gathers it).

    ledger = Ledger(directory / "ledger.jsonl")
    ledger.write("start", iteration=400, ranks=2, config=flat(config))
    ledger.write("end", iteration=600, reason="finished", exit_code=0)
    for session in sessions(read(directory / "ledger.jsonl")): ...
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.config import flatten
from expbase.ranks.processes import exit_code_of
from expbase.ranks.stopping import StopReason
from expbase.record.meter import json_lines

LEDGER = "ledger.jsonl"


class Ledger:
    """Appends to the ledger of a run; without a path (on ranks other than 0) it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.gathered: Future[dict[str, Any]] | None = None  # of a start; None: it writes nothing
        self.resumed: str | None = None  # the checkpoint from which this start goes on
        self.has_begun = False  # whether this start is noted

    def begin(
        self, iteration: int, config: Mapping[str, Any], reason: str | None, ranks: int
    ) -> None:
        """Notes a start that trains, on rank 0, and for what reason --restarts makes it, if any."""
        self.has_begun = True
        if self.gathered is not None:
            facts = self.gathered.result()
            facts |= {"ranks": ranks, "resumed": self.resumed, "restart": reason}
            facts["config"] = flat(config)
            self.write("start", iteration=iteration, **facts)

    def end(self, iteration: int, failure: BaseException | None, stopped_by: StopReason) -> None:
        """Notes how a start has ended."""
        reason = repr(failure) if failure else str(stopped_by or "finished")
        code = stopped_by.exit_code
        if failure:
            code = exit_code_of(failure, in_setup=not self.has_begun)
        self.write("end", iteration=iteration, reason=reason, exit_code=code)

    def write(self, event: str, **facts: Any) -> None:
        """Appends a "start" or "end" with JSON values, on disk when this returns; or an OSError."""
        if self._path is None:
            return
        record = {"event": event, "time": round(time.time(), 3), **facts}
        with self._path.open("ab", buffering=0) as file:  # one piece, which no kill tears
            file.write(f"{json.dumps(record)}\n".encode())
            os.fsync(file.fileno())


@dataclass
class Session:
    """What one process of the run noted."""

    start: dict[str, Any] | None  # None: it failed before it began, because another rank did
    end: dict[str, Any] | None = None  # None: it is running, or was killed


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a ledger, without damaged lines; none if there is no file."""
    return list(json_lines(path))


def last_start(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the last start noted; empty if there was none."""
    starts = [record for record in records if record.get("event") == "start"]
    return dict(starts[-1]) if starts else {}


def sessions(records: Iterable[Mapping[str, Any]]) -> list[Session]:
    """The starts with their ends, in order."""
    found: list[Session] = []
    for record in records:
        if record.get("event") == "start":
            found.append(Session(dict(record)))
        elif record.get("event") == "end":
            if not found or found[-1].end is not None:
                found.append(Session(None))
            found[-1].end = dict(record)
    return found


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config by full keys, as JSON values."""
    # The way through JSON makes two of them comparable: tuples become lists, and a nan, which is
    # not equal to itself, becomes a text.
    text = json.dumps(flatten(config), default=str)
    values: dict[str, Any] = json.loads(text, parse_constant=str)
    return values
