"""How a run was made: how far it came, its starts and ends, and what changed in between.

Reads what the run wrote and changes nothing; the run may be running. With --reproduce it prints the
commands that make the run again, for the top of a fresh clone of its repository: the code with the
changes that were not committed, the packages, the environment, and the command with another
--output. A later session is made again from the checkpoint that it continued.
"""

from __future__ import annotations

import argparse
import contextlib
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
from expbase.config import flatten, get_default_training_config
from expbase.meter import json_lines
from expbase.record.git import SOURCES
from expbase.record.run_record import LEDGER, Session, sessions
from expbase.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.tools.runs import Run, find, printable, read_run

_WIDTH = 80
_LABEL = 12  # columns of a row's name
_NEWEST = 3  # checkpoints that are named
_NO_SESSION = {"new": "it was set up and never began", "running": "it is being set up"}


@dataclass
class RunReport:
    """What is known of a run.

    Attributes:
        path: Its directory.
        run: What `ls` knows of it.
        config: Of the last start, by full keys.
        checkpoints: Their names, oldest first.
        sessions: Its starts and ends.
        unreadable: How many lines of the ledger are damaged.
    """

    path: Path
    run: Run
    config: dict[str, Any]
    checkpoints: list[str]
    sessions: list[Session]
    unreadable: int


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
        below = "; there are runs below it: python -m expbase ls" if find(path) else ""
        raise ValueError(f"{path}: holds no run; expected the output directory of one{below}.")
    run, config = read_run(path, str(path), time.time())
    lines, checkpoints = [], []
    with contextlib.suppress(OSError):  # run.note says so
        lines = [line for line in (path / LEDGER).read_bytes().splitlines() if line.strip()]
    with contextlib.suppress(OSError):
        checkpoints = [found.name for found in checkpoint.listed(path / checkpoint.FOLDER)]
    records = list(json_lines(b"\n".join(lines)))
    return RunReport(path, run, config, checkpoints, sessions(records), len(lines) - len(records))


# --- for a person ----------------------------------------------------------------------------


def describe(report: RunReport) -> Iterator[str]:
    """The report in lines of at most 80 columns, as far as its words are short enough."""
    yield printable(str(report.path))
    for name, text in _rows_of_run(report):
        yield from _row(name, text)
    before: Mapping[str, Any] = {}
    for number, session in enumerate(report.sessions, 1):
        yield ""
        yield f"session {number} of {len(report.sessions)}: {_span(report, number)}"
        for name, text in _rows_of_session(session, before):
            yield from _row(name, text)
        before = session.start or before


def _rows_of_run(report: RunReport) -> Iterator[tuple[str, str]]:
    run, names = report.run, report.checkpoints
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    yield "state", f"{run.state}, {run.iteration} iterations{limit}"
    if run.best is not None:
        monitor = report.config.get("training.monitor")
        name = f"{monitor}=" if monitor else ""
        yield "best", f"{name}{run.best:.6g} at iteration {run.best_iteration}"
    if run.loss is not None:
        yield "loss", f"{run.loss:.6g}" if isinstance(run.loss, float) else str(run.loss)
    more = f" and {len(names) - _NEWEST} before" if names[_NEWEST:] else ""
    yield "checkpoints", f"{', '.join(names[-_NEWEST:]) or 'none'}{more}"
    defaults = flatten({"training": get_default_training_config()})
    changed = {k: v for k, v in report.config.items() if k in defaults and v != defaults[k]}
    values = [f"{key.partition('.')[2]}={value!r}" for key, value in changed.items()]
    is_known = "training.max_iteration" in report.config  # every config has it
    yield "training", " ".join(values) or ("all by default" if is_known else "not known")
    if run.note:
        yield "note", run.note
    if report.unreadable:
        yield "note", f"lines of {LEDGER} that cannot be read: {report.unreadable}"
    if not report.sessions and run.state in _NO_SESSION:
        yield "note", _NO_SESSION[run.state]


def _rows_of_session(session: Session, before: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A session, and what differs from the start before it."""
    start, end = session.start, session.end
    if end is not None:
        code = end.get("exit_code")
        yield "ended", f"{end.get('reason')}{f', exit code {code}' if code else ''}"
    if start is None:
        return
    if start.get("resumed"):
        yield "resumed", start["resumed"]
    yield "on", _machine(start)
    yield "code", _code(start.get("git") or {})
    if changes := start.get("config_changes"):
        yield "config", _changes((key, *pair) for key, pair in changes.items())
    for name in ("packages", "environment"):
        one, other = before.get(name), start.get(name)
        if isinstance(one, dict) and isinstance(other, dict):  # a text says why it is not known
            keys = sorted({**one, **other}, key=str.lower)
            if text := _changes((k, one.get(k), other.get(k)) for k in keys):
                yield name, text
    if start.get("command") != before.get("command") or not before:
        words = start.get("command")
        yield "command", shlex.join(["python", *words]) if words else "no script"
    if start.get("directory") not in (None, ".", before.get("directory")):
        yield "in", start["directory"]


def _span(report: RunReport, number: int) -> str:
    """When a session was, how long it took, and which iterations it made."""
    session = report.sessions[number - 1]
    start, end = session.start, session.end
    if start is None:
        return f"failed before it began, {_clock(end or {})}"
    first = start.get("iteration")
    if end is not None:
        length = datetime.timedelta(seconds=round(end["time"] - start["time"]))
        return f"{_clock(start)}, {length}, iterations {first} to {end.get('iteration')}"
    is_running = number == len(report.sessions) and report.run.state == "running"
    how = "is running" if is_running else "killed: it noted no end"
    return f"{_clock(start)}, from iteration {first}, {how}"


def _clock(record: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))


def _machine(start: Mapping[str, Any]) -> str:
    device, packages, ranks = start.get("device"), start.get("packages"), start.get("ranks")
    if isinstance(device, dict):  # a text says why it is not known
        device = f"{device['name']} ({device.get('model')})"
    known = packages.items() if isinstance(packages, dict) else ()
    versions = [f"{name} {v}" for name, v in known if name.startswith("paddlepaddle")]
    text = f"{start.get('host')}: {ranks} {'process' if ranks == 1 else 'processes'}"
    return ", ".join([text, str(device), f"python {start.get('python')}", *versions])


def _code(git: Mapping[str, Any]) -> str:
    text = ""
    if commit := git.get("commit"):
        text = commit[:7] + (f" ({git['branch']})" if git.get("branch") else "")
    if state := git.get("state"):
        text += f" with changes: {SOURCES}/{state}.diff"
    elif git.get("dirty"):
        text += " with changes that are not saved"
    return "; ".join([text.strip(), *_not_known(git)]).removeprefix("; ")


def _not_known(git: Mapping[str, Any]) -> list[str]:
    """What the record and the patch do not hold of the code."""
    notes = [git["note"]] if git.get("note") else []
    if left_out := git.get("left_out"):
        more = ", …" if left_out["count"] > len(left_out["first"]) else ""
        names = ", ".join(map(printable, left_out["first"]))
        notes.append(f"untracked and not saved: {left_out['count']} ({names}{more})")
    return notes


def _changes(triples: Iterable[tuple[str, Any, Any]]) -> str:
    def text(value: Any) -> str:
        return "none" if value is None else str(value)

    return "; ".join(f"{k}: {text(was)} → {text(now)}" for k, was, now in triples if was != now)


def _row(name: str, text: str) -> list[str]:
    return _folded(f"{name:<{_LABEL}}", " " * _LABEL, text)


def _comment(text: str) -> list[str]:
    return _folded("# ", "# ", text)


def _folded(first: str, rest: str, text: str) -> list[str]:
    # Between words alone: a path or an option that is broken in two cannot be copied.
    folder = textwrap.TextWrapper(_WIDTH, first, rest)
    folder.break_long_words = folder.break_on_hyphens = False
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
    start = _start_of(report, number)
    yield from _comment(f"Session {number} of {report.path}, for the top of a fresh clone.")
    yield from _comment(f"It was on: {_machine(start)}, {start.get('platform')}.")
    if len(report.sessions) > number:
        yield from _comment(f"A later session continued it: --reproduce {number + 1}.")
    yield from _checkout(report.path, start.get("git") or {})
    yield from _install(start)
    for name, value in (start.get("environment") or {}).items():
        yield f"export {name}={shlex.quote(value)}"
    if start.get("directory") is None:
        yield from _comment("It was not started within the repository: its paths are from there.")
    elif start["directory"] != ".":
        yield f"cd {shlex.quote(start['directory'])}"
    yield from _command(report, number, start)


def _checkout(run: Path, git: Mapping[str, Any]) -> Iterator[str]:
    for note in _not_known(git):
        yield from _comment(f"Of its code: {note}.")
    if git.get("commit"):
        yield f"git checkout --detach {git['commit']}"
    if git.get("state"):
        patch = (run / SOURCES / f"{git['state']}.diff").absolute()
        yield f"git apply --index --whitespace=nowarn {shlex.quote(str(patch))}"
    yield "git submodule update --init --recursive"  # last: the patch may move submodules


def _start_of(report: RunReport, number: int) -> Mapping[str, Any]:
    count = len(report.sessions)
    if not 1 <= number <= count:
        known = f"1 to {count}" if count else f"none in {LEDGER}, as far as it can be read"
        known = "none: the run never began" if report.run.state == "new" else known
        raise ValueError(f"--reproduce: session {number} given; there are {known}.")
    start = report.sessions[number - 1].start
    if start is None:
        raise ValueError(f"--reproduce: session {number} failed before it began.")
    if not start.get("command"):
        raise ValueError(
            f"--reproduce: session {number} was not started by a script (a notebook, say): there "
            "is no command to run again."
        )
    return start


def _install(start: Mapping[str, Any]) -> Iterator[str]:
    packages, local = start.get("packages"), start.get("local_packages") or []
    if not isinstance(packages, dict):
        yield from _comment(f"Its packages: {packages}.")
        return
    if "paddlepaddle-gpu" in packages:
        yield from _comment("paddlepaddle-gpu comes from PaddlePaddle's own index.")
    if named := [f"{name} {packages[name]}" for name in local if name in packages]:
        yield from _comment(f"From no index, so install them yourself: {', '.join(named)}.")
    wanted = [f"{name}=={version}" for name, version in packages.items() if name not in local]
    yield f"python -m pip install {shlex.join(wanted)}"


def _command(report: RunReport, number: int, start: Mapping[str, Any]) -> Iterator[str]:
    words = start["command"]
    is_runner = ["-m", "expbase", "run"] in [words[i : i + 3] for i in range(len(words))]
    # The output of a runner is the folder of its runs.
    words = _with_other_output(words, (report.path.parent if is_runner else report.path).absolute())
    if number > 1 and (name := start.get("resumed")):
        path = (report.path / checkpoint.FOLDER / name).absolute()
        if path.is_dir() and not is_runner:  # which takes checkpoints from its file alone
            words += ["--checkpoint_path", str(path)]
        else:
            yield from _comment(f"It continued {name}, but this begins anew.")
    yield f"python {shlex.join(words)}"


def _with_other_output(words: Sequence[str], output: Path) -> list[str]:
    """The command with another --output, so that it does not continue the run."""
    changed = list(words)
    for place, word in enumerate(words):
        if word.startswith("--output="):
            changed[place] = f"{word.rstrip('/')}-again"
            return changed
        if word == "--output" and place + 1 < len(words):
            changed[place + 1] = f"{words[place + 1].rstrip('/')}-again"
            return changed
    return [*changed, "--output", f"{output.name}-again"]


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
