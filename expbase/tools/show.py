"""How a run was made: its starts and ends, and what changed in between.

Reads what the run wrote and changes nothing; the run may be running.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.config import differences
from expbase.record.git import SOURCES
from expbase.record.ledger import LEDGER
from expbase.record.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.tools import add_tool
from expbase.tools.runs import Run, Session, printable, read_run


def add_parser(tools: Any) -> None:
    parser = add_tool(tools, main, "0, or 1 if there is no such run")
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the output directory of a run")


def main(args: argparse.Namespace) -> int:
    path: Path = args.run_dir
    if not (path / CONFIG).is_file() and not (path / LEDGER).is_file():
        raise ValueError(f"{path}: holds no run; expected the output directory of one.")
    print("\n".join(describe(path, read_run(path, str(path)))))
    return 0


def describe(path: Path, run: Run) -> Iterator[str]:
    """What is known of a run, line by line."""
    saved = checkpoint.listed(path / checkpoint.FOLDER)
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    newest = f", the newest {saved[-1].name}" if saved else ""
    yield printable(str(path))
    yield from _rows(
        {
            "state": f"{run.state}, {run.iteration} iterations{limit}",
            "checkpoints": f"{len(saved) or 'none'}{newest}",
            "note": run.note,
        }
    )
    before: Mapping[str, Any] = {}
    for number, session in enumerate(run.sessions, 1):
        is_running = number == len(run.sessions) and run.state == "running"
        yield f"\nsession {number} of {len(run.sessions)}: {_span(session, is_running)}"
        if session.end:
            ended = "{reason}, exit code {exit_code}".format_map(session.end)
            yield from _rows({"ended": ended})
        if session.start:
            yield from _rows(_facts(session.start, before))
            before = session.start


def _rows(facts: Mapping[str, str]) -> list[str]:
    """The facts behind their names, without those that are not known."""
    return [f"{name:<12}{printable(text)}" for name, text in facts.items() if text]


def _facts(start: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """What is known of a start, and what differs from the one before it."""
    facts = {
        "restart": start.get("restart") or "",
        "resumed": start["resumed"] or "",
        "on": _machine(start),
        "code": _code(start["git"]),
    }
    for name in ("config", "packages", "environment") if before else ():
        facts[name] = _changes(differences(before[name], start[name]))
    if start["command"] != before.get("command", ()):
        facts["command"] = _command(start["command"])
    return facts


def _span(session: Session, is_running: bool) -> str:
    """When a session was, how long it took, and which iterations it made."""
    start = session.start
    end = session.end
    if not start:
        return f"failed before it began, {_clock(end)}"
    if not end:
        how = "is running" if is_running else "killed: it noted no end"
        return f"{_clock(start)}, from iteration {start['iteration']}, {how}"
    length = datetime.timedelta(seconds=round(end["time"] - start["time"]))
    return f"{_clock(start)}, {length}, iterations {start['iteration']} to {end['iteration']}"


def _clock(record: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))


def _machine(start: Mapping[str, Any]) -> str:
    device = start["device"]
    packages = start["packages"].items()
    versions = [f"{name} {v}" for name, v in packages if name.startswith("paddlepaddle")]
    where = f"{start['host']}, {device['name']} ({device['model']}), ranks: {start['ranks']}"
    return ", ".join([where, f"python {start['python']}", *versions])


def _command(words: Iterable[str] | None) -> str:
    return "no script" if words is None else shlex.join(["python", *words])


def _code(git: Mapping[str, Any]) -> str:
    text = git.get("commit", "")[:7] + (f" ({git['branch']})" if git.get("branch") else "")
    if git.get("dirty"):
        text += " with changes" + (f": {SOURCES}/{git['state']}.diff" if git["state"] else "")
    return "; ".join(part for part in (text, git.get("note")) if part)


def _changes(pairs: Mapping[str, Sequence[Any]]) -> str:
    texts = {key: ["none" if v is None else str(v) for v in pairs[key]] for key in sorted(pairs)}
    return "; ".join(f"{key}: {' → '.join(pair)}" for key, pair in texts.items())
