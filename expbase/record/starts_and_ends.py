"""ledger.jsonl: one JSON object for each start and each end of a process of the run.

Between them stands the checksum of the first batch ("data"). A start without an end is a process
that was killed. The facts are passed in; provenance.py gathers them.

    ledger = Ledger()
    ledger.begin(directory / "ledger.jsonl", {"versions": {"paddle": "3.3.1"}})
    ledger.write_start(iteration=400, ranks=2, config=flat(config))
    ledger.write("end", iteration=600, reason="finished", exit_code=0)
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.files import DAMAGES, AppendedFile
from expbase.base.json_lines import json_lines
from expbase.base.processes import began
from expbase.config import flatten

LEDGER = "ledger.jsonl"
DIGEST = "digest.txt"  # of a run that has finished; engine/run_digest.py says what is in it
STOP_FILE = "a file named STOP"  # the `reason` of an end that somebody has asked for by it

Facts = Mapping[str, Any]  # the record of a start


class Ledger(AppendedFile):
    """The ledger of a run, written by rank 0; until `begin` it only gathers facts of this start.

    The file stays open, so the end is noted beside the start, also if the directory was moved.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.facts: dict[str, Any] = {"resumed": None, "began_from": {}}
        self.weights_from: Path | None = None  # what load_model has read last, on rank 0
        self.has_start = False  # whether this start is past setup

    def begin(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Takes the file, once the directory is the run's, and facts of this start."""
        self.path = path
        self.note(**facts)

    def note(self, **facts: Any) -> None:
        """Notes facts of this start; one of the same name takes the place of the one before."""
        self.facts |= facts

    def note_weights(self, path: Path | None) -> None:
        """Notes what load_model has read."""
        self.weights_from = path

    def write_start(self, **facts: Any) -> None:
        """Appends that this start trains, with the facts that were gathered."""
        self.has_start = True
        self.write("start", **facts, **self.facts)

    def write(self, event: str, **facts: Any) -> None:
        """Appends an event; it is on disk when this returns. If that fails, a line says so.

        Args:
            event: "start", "data" or "end".
            **facts: JSON values.
        """
        record = {"event": event, "time": round(time.time(), 3), **facts}
        self.append(f"{json.dumps(record)}\n".encode())  # one piece, which no kill tears
        self.flush()


def open_start(run: Path) -> dict[str, Any]:
    """Returns the record of a run's last start if no end came after it; else an empty one.

    Its process runs, or was killed.
    """
    last: dict[str, Any] = {}
    for record in json_lines(run / LEDGER):
        if record.get("event") in ("start", "end"):
            last = record
    return last if last.get("event") == "start" else {}


def runs_here(start: Mapping[str, Any]) -> bool:
    """Returns whether the process that has written the record of a start runs on this machine."""
    pid = start.get("pid", 0)
    if start.get("host") != platform.node() or pid == os.getpid():
        return False
    try:
        return bool(began(pid) <= start["time"])  # one that began later has its id by chance
    except DAMAGES:
        return False


@dataclass
class Session:
    """The records of one process of the run in the ledger."""

    start: dict[str, Any] = field(default_factory=dict)  # empty: another rank failed before
    end: dict[str, Any] = field(default_factory=dict)  # empty: it is running, or was killed
    digest: str = ""  # of the run, which had finished in it


def sessions(path: Path) -> list[Session]:
    """Returns the starts of a run with their ends, in order; none if it has no ledger."""
    found: list[Session] = []
    for record in json_lines(path / LEDGER):
        if record.get("event") == "start":
            found.append(Session(record))
        elif record.get("event") == "data" and found:
            found[-1].start["first_batch"] = record.get("first_batch")
        elif record.get("event") == "digest" and found:
            found[-1].digest = str(record.get("digest"))
        elif record.get("event") == "end":
            if not found or found[-1].end:
                found.append(Session())
            found[-1].end = record
    return found


def configs_in(noted: Sequence[Session]) -> list[Facts]:
    """Returns the configs that starts were given, in order; of one that has noted none, nothing."""
    configs = [session.start.get("config") for session in noted]
    return [config for config in configs if isinstance(config, dict)]


def those_that_trained(starts: Sequence[Facts]) -> list[Facts]:
    """Returns the starts that have trained what a run holds, in order, of all that it noted.

    If several began at the beginning, it is the last one: what the others did was done again.
    """
    begin = min(one["iteration"] for one in starts)
    last = max(number for number, one in enumerate(starts) if one["iteration"] == begin)
    first = {**starts[last], **_began_from([one for one in starts if one["iteration"] == begin])}
    return [first, *starts[last + 1 :]]


def maker(starts: Sequence[Facts], iteration: int) -> Facts:
    """Returns the start that has made an iteration: the last one that began before it."""
    return [start for start in starts if start["iteration"] < iteration][-1]


def _began_from(starts: Sequence[Facts]) -> dict[str, Any]:
    """Returns the fact of what a run began from, by the starts at its beginning.

    The last of them may have gone on from the run's own copy of a state that an earlier one had
    from another run's checkpoint.
    """
    option = "--checkpoint_path"
    noted = [dict(one["began_from"]) for one in starts if "began_from" in one]
    if not noted:
        return {}
    before = [one for one in noted if option in one] if starts[-1]["resumed"] else []
    return {"began_from": {option: one[option] for one in before[-1:]} | noted[-1]}


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config by full keys, as JSON values."""
    # JSON makes two configs comparable: tuples become lists, and a nan, which is not equal to
    # itself, becomes a text.
    text = json.dumps(flatten(config), default=str)
    values: dict[str, Any] = json.loads(text, parse_constant=str)
    return values
