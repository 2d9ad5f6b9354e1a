"""How a run was made: its starts and ends, and what changed in between. Or a checkpoint's config.

With --digest: whether the files of a run are those that its digest binds, and which one is not.

Reads what the run wrote and changes nothing; the run may be running.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expbase.base.errors import ValueMistake
from expbase.base.files import DAMAGES
from expbase.checkpoint import layout, storage
from expbase.config import CONFIG, differences
from expbase.engine import run_digest
from expbase.record.starts_and_ends import LEDGER, Session
from expbase.tools import add_tool
from expbase.tools.runs import RunFacts, printable, read_run

_FACTS = (
    *("code", "sources", "host", "device", "processor", "ranks", "python", "git", "config"),
    *("packages", "environment"),
)


def add_parser(tools: Any) -> None:
    codes = "0 shown, and as the digest binds it; 1 not, or an error"
    parser = add_tool(tools, main, codes, "RUN [--digest [D]]")
    text = "the output directory of a run; RUN/best, RUN/last, RUN/400: a checkpoint of it"
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=text)
    text = "check the files of a finished run by its own digest, or by this one, from a paper say"
    parser.add_argument("--digest", nargs="?", const="", metavar="D", help=text)


def main(args: argparse.Namespace) -> int:
    path: Path = args.run_dir
    if args.digest is not None:
        return check(path, args.digest)
    if not path.exists() and (path.parent / layout.FOLDER).is_dir():
        from expbase.checkpoint.named import find_named  # here: it imports paddle

        path = find_named(path)
    if (path / layout.MANIFEST).exists():
        for line in of_checkpoint(path):
            print(printable(line))
        return 0
    if not (path / CONFIG).is_file() and not (path / LEDGER).is_file():
        raise ValueMistake(f"{path}: holds no run; expected the output directory of one.")
    for line in lines_about(path, read_run(path, str(path))):
        print(printable(line))
    return 0


def check(run: Path, digest: str) -> int:
    """Prints what of a run is not as its digest binds it; returns whether there is anything.

    Args:
        run: The output directory.
        digest: The one that it must have; "": the run's own.
    """
    if digest:
        run_digest.check_form(digest)
    written = run_digest.read(run)
    problems = run_digest.problems(run, digest)
    for problem in problems:
        print(printable(problem))
    if problems:
        print(f"NOT the files of digest {digest or written.digest}")
    else:
        print(f"digest: {written.digest}, and each of its {len(written.bound)} lines is as bound")
    return int(bool(problems))


def of_checkpoint(path: Path) -> list[str]:
    """Returns lines about a checkpoint: iteration, versions, config.

    Raises:
        CheckpointError: It is damaged.
    """
    manifest = storage.verify(path)
    with storage.reading(path / layout.MANIFEST):
        info = manifest["info"]
        facts = {"iteration": manifest["iteration"], "versions": info.get("versions")}
        facts |= {f"config.{key}": value for key, value in info.get("config", {}).items()}
        return [str(path), *(f"{name}: {value}" for name, value in facts.items())]


def lines_about(path: Path, run: RunFacts) -> Iterator[str]:
    """Yields lines about a run: its state, its checkpoints, and each of its sessions."""
    saved = layout.listed(path / layout.FOLDER)
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    newest = f", the newest {saved[-1].name}" if saved else ""
    yield str(path)
    yield f"state: {run.state}, {run.iteration} iterations{limit}"
    yield f"checkpoints: {len(saved) or 'none'}{newest}"
    if run.digest:
        yield f"digest: {run.digest}"
    if run.note:
        yield f"note: {run.note}"
    before: dict[str, Any] = {}
    for number, session in enumerate(run.sessions, 1):
        is_running = number == len(run.sessions) and run.state == "running"
        title = f"session {number} of {len(run.sessions)}"
        yield ""
        try:
            lines = [f"{title}: {_span(session, is_running)}", *_how(session, before)]
            before = _facts(session) or before
        except (OSError, *DAMAGES) as error:
            lines = [f"{title}: its record in {LEDGER} is damaged: {error!r:.80}"]
        yield from lines


def _facts(session: Session) -> dict[str, Any]:
    return {name: session.start.get(name) for name in _FACTS} if session.start else {}


def _how(session: Session, before: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines on how a session ended, and on what has changed since the one before.

    Args:
        session: The session.
        before: The facts of the one before; {}: there was none.
    """
    if session.end:
        yield "ended: {reason}, exit code {exit_code}".format_map(session.end)
    if session.digest:
        yield f"digest: {session.digest}"
    for name in ("restart", "resumed"):
        if session.start.get(name):
            yield f"{name}: {session.start[name]}"
    for option, digest in session.start.get("began_from", {}).items():
        yield f"began from {option}: {digest}"
    if facts := _facts(session):
        yield f"command: {shlex.join(['python', *(session.start.get('command') or ())])}"
        for key, (old, new) in differences(before or _unsaid(facts), facts).items():
            now = "not there" if new is None else new
            yield f"{key}: {now}" if old is None else f"{key}: {old} → {now}"


def _unsaid(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of the first start that are not shown: they are long, and in the ledger."""
    packages = facts["packages"] or {}
    others = {name: packages[name] for name in packages if not name.startswith("paddlepaddle")}
    unsaid = {name: facts[name] for name in ("sources", "config", "environment")}
    processor = facts["processor"] or {}
    of_processor = {name: processor.get(name) for name in ("instructions", "blas")}
    return {**unsaid, "packages": others, "processor": of_processor}


def _span(session: Session, is_running: bool) -> str:
    """Returns a text on a session: when it was, how long it took, and its iterations."""
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
