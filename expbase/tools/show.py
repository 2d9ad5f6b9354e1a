"""How a run was made: how far it came, its starts and ends, and what changed in between.

Reads what the run wrote and changes nothing; the run may be running. With --reproduce it prints the
commands that make the run again, for the top of a fresh clone of its repository: the code with the
changes that were not committed, the packages, the environment, and the command with another
--output. A later session is made again from the checkpoint that it continued.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.record.git import SOURCES
from expbase.record.run_record import LEDGER, Session, read, sessions
from expbase.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.tools.runs import Run, printable, read_run


@dataclass
class RunReport:
    """What is known of a run."""

    path: Path  # its directory
    run: Run  # what `ls` knows of it
    config: dict[str, Any]  # of the last start, by full keys
    checkpoints: list[str]  # their names, oldest first
    sessions: list[Session]


def read_report(path: Path) -> RunReport:
    """Reads what is known of a run.

    Args:
        path: Its output directory.

    Raises:
        ValueError: There is no run.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path}: {what}; expected the output directory of a run.")
    if not (path / CONFIG).is_file() and not (path / LEDGER).is_file():
        raise ValueError(f"{path}: holds no run; expected the output directory of one.")
    run, config = read_run(path, str(path), time.time())
    names = [found.name for found in checkpoint.listed(path / checkpoint.FOLDER)]
    records = read(path / LEDGER) if (path / LEDGER).is_file() else []
    return RunReport(path, run, config, names, sessions(records))


# --- for a person ----------------------------------------------------------------------------


def describe(report: RunReport) -> Iterator[str]:
    """The report in lines of at most 80 columns, as far as its words are short enough."""
    yield printable(str(report.path))
    yield from _rows(_facts_of_run(report))
    before: Mapping[str, Any] = {}
    for number, session in enumerate(report.sessions, 1):
        is_running = number == len(report.sessions) and report.run.state == "running"
        yield ""
        yield f"session {number} of {len(report.sessions)}: {_span(session, is_running)}"
        if session.end is not None:
            reason, code = session.end.get("reason"), session.end.get("exit_code")
            yield from _rows([("ended", f"{reason}, exit code {code}")])
        if session.start is not None:
            yield from _rows(_facts_of_start(session.start, before))
            before = session.start


def _facts_of_run(report: RunReport) -> Iterator[tuple[str, str]]:
    run, names = report.run, report.checkpoints
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    yield "state", f"{run.state}, {run.iteration} iterations{limit}"
    if run.best is not None:
        monitor = report.config.get("training.monitor", "best")
        yield "best", f"{monitor}={run.best:.6g} at iteration {run.best_iteration}"
    if run.loss is not None:
        yield "loss", f"{run.loss:.6g}" if isinstance(run.loss, float) else str(run.loss)
    yield "checkpoints", f"{len(names)}, the newest {names[-1]}" if names else "none"
    yield "note", run.note


def _facts_of_start(
    start: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """A start, and what differs from the one before it."""
    yield "resumed", start["resumed"] or ""
    yield "on", _machine(start)
    yield "code", _code(start["git"])
    yield "config", _changes((key, *pair) for key, pair in start["config_changes"].items())
    for name in ("packages", "environment") if before else ():
        was, now = before[name], start[name]
        yield name, _changes((key, was.get(key), now.get(key)) for key in sorted({**was, **now}))
    if start["command"] != before.get("command", ()):
        yield "command", _shell(start["command"]) if start["command"] else "no script"
    if start["directory"] not in (None, ".", before.get("directory")):
        yield "in", start["directory"]


def _span(session: Session, is_running: bool) -> str:
    """When a session was, how long it took, and which iterations it made."""
    start, end = session.start, session.end
    if start is None:
        return f"failed before it began, {_clock(end or {})}"
    if end is None:
        how = "is running" if is_running else "killed: it noted no end"
        return f"{_clock(start)}, from iteration {start['iteration']}, {how}"
    length = datetime.timedelta(seconds=round(end["time"] - start["time"]))
    return f"{_clock(start)}, {length}, iterations {start['iteration']} to {end['iteration']}"


def _clock(record: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))


def _machine(start: Mapping[str, Any]) -> str:
    device, packages = start["device"], start["packages"].items()
    versions = [f"{name} {v}" for name, v in packages if name.startswith("paddlepaddle")]
    where = f"{start['host']}, {device['name']} ({device['model']}), ranks: {start['ranks']}"
    return ", ".join([where, f"python {start['python']}", *versions])


def _code(git: Mapping[str, Any]) -> str:
    text = git.get("commit", "")[:7] + (f" ({git['branch']})" if git.get("branch") else "")
    if git.get("state"):
        text += f" with changes: {SOURCES}/{git['state']}.diff"
    return "; ".join(part for part in (text, git.get("note")) if part)


def _changes(triples: Iterable[tuple[str, Any, Any]]) -> str:
    def text(value: Any) -> str:
        return "none" if value is None else str(value)

    return "; ".join(f"{k}: {text(was)} → {text(now)}" for k, was, now in triples if was != now)


def _rows(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Each fact behind its name; those without a text are left out."""
    for name, text in facts:
        yield from _folded(f"{name:<12}", " " * 12, text)


def _comment(text: str) -> list[str]:
    return _folded("# ", "# ", text)


def _folded(first: str, rest: str, text: str) -> list[str]:
    # Between words alone: a path or an option that is broken in two cannot be copied.
    folder = textwrap.TextWrapper(80, first, rest, break_long_words=False, break_on_hyphens=False)
    return folder.wrap(printable(text))


# --- to make it again ------------------------------------------------------------------------


def reproduce(report: RunReport, number: int) -> Iterator[str]:
    """The commands that make a session again, for the top of a fresh clone.

    Args:
        report: Of the run.
        number: Of the session, from 1: the first one began the run, so its command makes all of
            it again. A later one begins with the checkpoint that it continued.

    Raises:
        ValueError: There is no such session, or it does not say how it was started.
    """
    if not 1 <= number <= len(report.sessions):
        count = len(report.sessions)
        raise ValueError(f"--reproduce: session {number} given; {LEDGER} has {count}.")
    start = report.sessions[number - 1].start
    if start is None or not start["command"]:
        raise ValueError(
            f"--reproduce: session {number} failed before it began, or was not started by a script "
            "(a notebook, say): there is no command to run again."
        )
    yield from _comment(f"Session {number} of {report.path}, for the top of a fresh clone.")
    yield from _comment(f"It was on: {_machine(start)}, {start['platform']}.")
    if len(report.sessions) > number:
        yield from _comment(f"A later session continued it: --reproduce {number + 1}.")
    yield from _checkout(report.path, start["git"])
    yield from _install(start["packages"], start["local_packages"])
    for name, value in start["environment"].items():
        yield f"export {name}={shlex.quote(value)}"
    if start["directory"] is None:
        yield from _comment("It was not started within the repository: its paths are from there.")
    elif start["directory"] != ".":
        yield f"cd {shlex.quote(start['directory'])}"
    yield from _command(report, start["command"], start["resumed"] if number > 1 else None)


def _checkout(run: Path, git: Mapping[str, Any]) -> Iterator[str]:
    if git.get("note"):
        yield from _comment(f"Of its code: {git['note']}.")
    if git.get("commit"):
        yield f"git checkout --detach {git['commit']}"
    if git.get("state"):
        patch = (run / SOURCES / f"{git['state']}.diff").absolute()
        yield f"git apply --index --whitespace=nowarn {shlex.quote(str(patch))}"
    yield "git submodule update --init --recursive"  # last: the patch may move submodules


def _install(packages: Mapping[str, str], local: Sequence[str]) -> Iterator[str]:
    if "paddlepaddle-gpu" in packages:
        yield from _comment("paddlepaddle-gpu comes from PaddlePaddle's own index.")
    if named := [f"{name} {packages[name]}" for name in local]:
        yield from _comment(f"From no index, so install them yourself: {', '.join(named)}.")
    wanted = [f"{name}=={version}" for name, version in packages.items() if name not in local]
    yield f"python -m pip install {shlex.join(wanted)}"


def _command(report: RunReport, typed: list[str], name: str | None) -> Iterator[str]:
    """The command with another --output, from a checkpoint of the run, if one is named."""
    words = [
        f"{word.rstrip('/')}-again" if word.startswith("--output=") or last == "--output" else word
        for last, word in zip(["", *typed], typed, strict=False)
    ]
    is_runner = "-m expbase run" in " ".join(typed)
    if words == typed:  # the output of a runner is the folder of its runs
        output = (report.path.parent if is_runner else report.path).absolute()
        words += ["--output", f"{output.name}-again"]
    if name:
        path = (report.path / checkpoint.FOLDER / name).absolute()
        if path.is_dir() and not is_runner:  # which takes checkpoints from its file alone
            words += ["--checkpoint_path", str(path)]
        else:
            yield from _comment(f"It continued {name}, but this begins anew.")
    yield _shell(words)


def _shell(words: Sequence[str]) -> str:
    return shlex.join(["python", *words])


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "show",
        help="how a run was made, and the commands that make it again",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0, or 1 if there is no such run or session",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the output directory of a run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all of it as a JSON object, for scripts")
    form.add_argument("--reproduce", type=int, nargs="?", const=1, metavar="SESSION",
        help="print the commands that make it again (default: 1, the whole run)")  # fmt: skip
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; returns its exit code."""
    report = read_report(args.run_dir)
    if args.json:
        print(json.dumps({**asdict(report), "path": str(report.path)}))
        return 0
    lines = describe(report) if args.reproduce is None else reproduce(report, args.reproduce)
    print("\n".join(lines))
    return 0
