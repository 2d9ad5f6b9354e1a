"""How a run was made: its starts and ends, and what changed in between.

Reads what the run wrote and changes nothing; the run may be running. With --reproduce it prints the
commands that make the run again, for the top of a fresh clone of its repository: the code with the
changes that were not committed, the packages, the environment, and the command with another
--output. A later session is made again from the checkpoint that it continued.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase.config import differences
from expbase.record.git import SOURCES
from expbase.record.run_record import LEDGER, Session, read, sessions
from expbase.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.tools import add_tool
from expbase.tools.runs import Run, printable, read_run


def add_parser(tools: Any) -> None:
    add = add_tool(tools, main, "0, or 1 if there is no such run or session").add_argument
    add("run_dir", type=Path, metavar="RUN", help="the output directory of a run")
    add("--reproduce", type=int, nargs="?", const=1, metavar="SESSION",
        help="print the commands that make it again (default: 1, the whole run)")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    path: Path = args.run_dir
    if not (path / CONFIG).is_file() and not (path / LEDGER).is_file():
        raise ValueError(f"{path}: holds no run; expected the output directory of one.")
    run, _ = read_run(path, str(path), time.time())
    found = sessions(read(path / LEDGER))
    number = args.reproduce
    lines = describe(path, run, found) if number is None else reproduce(path, found, number)
    print("\n".join(lines))
    return 0


def describe(path: Path, run: Run, found: Sequence[Session]) -> Iterator[str]:
    """What is known of a run, in lines of 80 columns as far as its words are short enough."""
    saved = checkpoint.listed(path / checkpoint.FOLDER)
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    yield printable(str(path))
    yield from _row("state", f"{run.state}, {run.iteration} iterations{limit}")
    newest = f", the newest {saved[-1].name}" if saved else ""
    yield from _row("checkpoints", f"{len(saved) or 'none'}{newest}")
    yield from _row("note", run.note)
    before: Mapping[str, Any] = {}
    for number, session in enumerate(found, 1):
        is_running = number == len(found) and run.state == "running"
        yield ""
        yield f"session {number} of {len(found)}: {_span(session, is_running)}"
        if session.end is not None:
            yield from _row("ended", "{reason}, exit code {exit_code}".format_map(session.end))
        if session.start is not None:
            yield from _start(session.start, before)
            before = session.start


def _start(start: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """A start, and what differs from the one before it."""
    yield from _row("restart", start.get("restart") or "")
    yield from _row("resumed", start["resumed"] or "")
    yield from _row("on", _machine(start))
    yield from _row("code", _code(start["git"]))
    yield from _row("config", _changes(start["config_changes"]))
    for name in ("packages", "environment") if before else ():
        yield from _row(name, _changes(differences(before[name], start[name])))
    if start["command"] != before.get("command", ()):
        yield from _row("command", _shell(start["command"]) if start["command"] else "no script")


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


def _changes(pairs: Mapping[str, Sequence[Any]]) -> str:
    texts = {key: ["none" if v is None else str(v) for v in pairs[key]] for key in sorted(pairs)}
    return "; ".join(f"{key}: {' → '.join(pair)}" for key, pair in texts.items())


def _row(name: str, text: str) -> list[str]:
    """A fact behind its name; none without a text."""
    return _folded(f"{name:<12}", " " * 12, text) if text else []


def _comment(text: str) -> list[str]:
    return _folded("# ", "# ", text)


def _folded(first: str, rest: str, text: str) -> list[str]:
    # Between words alone: a path or an option that is broken in two cannot be copied.
    folder = textwrap.TextWrapper(80, first, rest, break_long_words=False, break_on_hyphens=False)
    return folder.wrap(printable(text))


def reproduce(path: Path, found: Sequence[Session], number: int) -> Iterator[str]:
    """The commands that make a session again, the first of which has the number 1."""
    if not 1 <= number <= len(found):
        raise ValueError(f"--reproduce: session {number} given; {LEDGER} has {len(found)}.")
    start = found[number - 1].start
    if start is None or not start["command"]:
        raise ValueError(
            f"--reproduce: session {number} failed before it began, or was not started by a script "
            "(a notebook, say): there is no command to run again."
        )
    place = "the top of a fresh clone" if start["git"].get("commit") else "a folder with its code"
    yield from _comment(f"Session {number} of {path}, for {place}.")
    yield from _comment(f"It was on: {_machine(start)}, {start['platform']}.")
    if len(found) > number:
        yield from _comment(f"A later session continued it: --reproduce {number + 1}.")
    yield from _checkout(path, start["git"])
    yield from _install(start["packages"], start["local_packages"])
    for name, value in start["environment"].items():
        yield f"export {name}={shlex.quote(value)}"
    if start["directory"] not in (None, "."):
        yield f"cd {shlex.quote(start['directory'])}"
    yield from _command(path, start["command"], start["resumed"] if number > 1 else None)


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


def _command(run: Path, typed: list[str], name: str | None) -> Iterator[str]:
    """The command with another --output, from a checkpoint of the run, if one is named."""
    words = [
        f"{word.rstrip('/')}-again" if word.startswith("--output=") or last == "--output" else word
        for last, word in zip(["", *typed], typed, strict=False)
    ]
    is_runner = "-m expbase run" in " ".join(typed)
    if words == typed:  # the output of a runner is the folder of its runs
        output = (run.parent if is_runner else run).absolute()
        words += ["--output", f"{output.name}-again"]
    if name:
        path = (run / checkpoint.FOLDER / name).absolute()
        if path.is_dir() and not is_runner:  # which takes checkpoints from its file alone
            words += ["--checkpoint_path", str(path)]
        else:
            yield from _comment(f"It continued {name}, but this begins anew.")
    yield _shell(words)


def _shell(words: Iterable[str]) -> str:
    return shlex.join(["python", *words])
