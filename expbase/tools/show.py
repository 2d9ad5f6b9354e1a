"""What a run was: how far it came, its starts and ends, and what changed in between.

Reads what the run wrote and changes nothing; the run may be running. With --reproduce it prints a
shell script that makes the run again, from its beginning, in a fresh clone of the repository: the
code with the changes that were not committed, the packages, the environment and the command, with
another --output. Of a later start: from the checkpoint that it continued.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.config import flatten, get_default_training_config
from expbase.record.git import CHANGES, SOURCES, UNTRACKED
from expbase.record.provenance import SET_BY_LAUNCHER
from expbase.record.run_record import LEDGER, Session, parse, sessions
from expbase.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.tools import runs
from expbase.tools.runs import printable

_WIDTH = 80
_LABEL = 12  # columns of a row's name
_NEWEST = 3  # checkpoints that are named
_TIMES = 1e11  # seconds since 1970 that can be told
_UNBEGUN = {"new": "it was set up and never began", "running": "it is being set up"}


@dataclass
class Story:
    """What is known of a run.

    Attributes:
        path: Its directory.
        run: What `ls` says.
        config: Of the last start, by full keys.
        checkpoints: Their names, oldest first.
        sessions: Its starts and ends.
        unreadable: Lines of the ledger that cannot be read.
    """

    path: Path
    run: runs.Run
    config: dict[str, Any]
    checkpoints: list[str]
    sessions: list[Session]
    unreadable: int


def look(path: Path) -> Story:
    """Reads a run.

    Args:
        path: Its output directory.

    Raises:
        ValueError: There is no run.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"{path}: {what}; expected the output directory of a run.")
    if not (path / CONFIG).is_file() and not (path / LEDGER).is_file():
        below = "; there are runs below it: python -m expbase ls" if runs.find(path) else ""
        raise ValueError(f"{path}: holds no run; expected the output directory of one{below}.")
    run, config = runs.read_run(path, str(path), time.time())
    text, checkpoints = b"", []
    with contextlib.suppress(OSError):  # run.note tells of it
        text = (path / LEDGER).read_bytes()
    with contextlib.suppress(OSError):
        checkpoints = checkpoint.listed(path / checkpoint.FOLDER)
    records = parse(text)
    return Story(
        path=path,
        run=run,
        config=config,
        checkpoints=[found.name for found in checkpoints],
        sessions=sessions(records),
        unreadable=sum(bool(line.strip()) for line in text.splitlines()) - len(records),
    )


# --- for a person ----------------------------------------------------------------------------


def told(story: Story) -> Iterator[str]:
    """The story in lines of at most 80 columns, as far as its words are short enough."""
    yield printable(str(story.path))
    for name, text in _rows_of_run(story):
        yield from _row(name, text)
    before: Mapping[str, Any] = {}
    for number, session in enumerate(story.sessions, 1):
        yield ""
        yield f"session {number} of {len(story.sessions)}: {_span(session, story, number)}"
        for name, words in _rows_of_session(session, before):
            yield from _row(name, words)
        before = session.start or before


def _rows_of_run(story: Story) -> Iterator[tuple[str, str]]:
    run, names = story.run, story.checkpoints
    limit = f" of {run.max_iteration}" if run.max_iteration else ""
    yield "state", f"{run.state}, {run.iteration} iterations{limit}"
    if run.best is not None:
        monitor = story.config.get("training.monitor")
        value = f"{monitor}={run.best:.6g}" if monitor else f"{run.best:.6g}"
        yield "best", f"{value} at iteration {run.best_iteration}"
    if run.loss is not None:
        yield "loss", f"{run.loss:.6g}" if isinstance(run.loss, float) else str(run.loss)
    more = f" and {len(names) - _NEWEST} before" if names[_NEWEST:] else ""
    yield "checkpoints", f"{', '.join(names[-_NEWEST:]) or 'none'}{more}"
    defaults = flatten({"training": get_default_training_config()})
    changed = {k: v for k, v in story.config.items() if k in defaults and v != defaults[k]}
    values = [f"{key.partition('.')[2]}={value!r}" for key, value in changed.items()]
    is_known = "training.max_iteration" in story.config  # every config has it
    yield "training", " ".join(values) or ("all by default" if is_known else "not known")
    if run.note:
        yield "note", run.note
    if story.unreadable:
        yield "note", f"lines of {LEDGER} that cannot be read: {story.unreadable}"
    if not story.sessions and run.state in _UNBEGUN:
        yield "note", _UNBEGUN[run.state]


def _rows_of_session(
    session: Session, before: Mapping[str, Any]
) -> Iterator[tuple[str, str | list[str]]]:
    start, end = session.start, session.end
    if end is not None:
        code = end.get("exit_code")
        yield "ended", f"{end.get('reason')}, exit code {code}" if code else str(end.get("reason"))
    if start is None:
        return
    if start.get("resumed"):
        yield "resumed", str(start["resumed"])
    if "command" not in start:
        yield "note", "written by an earlier expbase, which noted no more"
        return
    yield "on", _machine(start)
    yield "code", _code(start)
    if changes := start.get("config_changes"):
        yield "config", _changes((key, *pair) for key, pair in changes.items())
    for name in ("packages", "environment"):
        if text := _differences(name, before, start):
            yield name, text
    if not before or _seen("command", before) != _seen("command", start):
        words = start["command"] or []
        yield "command", [*map(shlex.quote, ["python", *words])] if words else "no script"
    if (start.get("directory") or ".") != (before.get("directory") or "."):
        yield "in", start.get("directory") or "."


def _span(session: Session, story: Story, number: int) -> str:
    """When it was, how long it took, and which iterations it made."""
    start, end = session.start, session.end
    if start is None:
        return f"failed before it began, {_clock((end or {}).get('time'))}"
    text = f"{_clock(start.get('time'))}, "
    first = start.get("iteration")
    if end is not None:
        began, ended = _seconds(start.get("time")), _seconds(end.get("time"))
        if began is not None and ended is not None:
            text += f"{datetime.timedelta(seconds=round(ended - began))}, "
        return f"{text}iterations {first} to {end.get('iteration')}"
    if number == len(story.sessions) and story.run.state == "running":
        return f"{text}from iteration {first}, is running"
    return f"{text}from iteration {first}, killed: it noted no end"


def _machine(start: Mapping[str, Any]) -> str:
    device, ranks = _map(start.get("device")), start.get("ranks")
    name = f"{device['name']} ({device.get('model')})" if device else str(start.get("device"))
    packages = _map(start.get("packages"))
    versions = [f"{n} {v}" for n, v in packages.items() if n.startswith("paddlepaddle")]
    text = f"{start.get('host')}: {ranks} {'process' if ranks == 1 else 'processes'}"
    return ", ".join([text, name, f"python {start.get('python')}", *versions])


def _code(start: Mapping[str, Any]) -> str:
    git = start.get("git") or {}
    text = ""
    if commit := git.get("commit"):
        text = commit[:7] + (f" ({git['branch']})" if git.get("branch") else "")
        if git.get("dirty"):
            saved = f": {SOURCES}/{git['state']}" if git.get("state") else ", which are not saved"
            text += f" with changes{saved}"
    if git.get("left_out"):
        text += f"; not saved: {_left_out(git)}"
    return "; ".join(filter(None, [text, git.get("note")]))


def _left_out(git: Mapping[str, Any]) -> str:
    count, first = git["left_out"]["count"], git["left_out"]["first"]
    names = ", ".join(map(printable, first)) + (", …" if count > len(first) else "")
    return f"{count} {'file' if count == 1 else 'files'}: {names}"


def _differences(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    one, other = before.get(name), now.get(name)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""  # a text says why it is not known
    keys = [key for key in {**one, **other} if key not in SET_BY_LAUNCHER]
    triples = [(key, one.get(key), other.get(key)) for key in sorted(keys, key=str.lower)]
    return _changes((key, was, now) for key, was, now in triples if was != now)


def _changes(triples: Iterable[tuple[Any, ...]]) -> str:
    return "; ".join(f"{key}: {_value(was)} → {_value(now)}" for key, was, now in triples)


def _row(name: str, text: str | Sequence[str]) -> Iterator[str]:
    """A row, folded between words; one of given words, a command, so that it can be copied."""
    words = text.split() if isinstance(text, str) else text
    end = "" if isinstance(text, str) else " \\"
    line = f"{name:<{_LABEL - 1}}"
    is_empty = True
    for word in map(printable, words):
        if not is_empty and len(line) + 1 + len(word) + len(end) > _WIDTH:
            yield line + end
            line = " " * (_LABEL - 1)
        line, is_empty = f"{line} {word}", False
    yield line


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _seconds(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and abs(value) < _TIMES else None


def _clock(value: Any) -> str:
    seconds = _seconds(value)
    if seconds is None:
        return "at no known time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _map(value: Any) -> dict[str, Any]:
    """The mapping that should stand there; empty if a text says why it is not known."""
    return value if isinstance(value, dict) else {}


# --- to run it again -------------------------------------------------------------------------


def script(story: Story, number: int) -> Iterator[str]:
    """The lines of a shell script that runs a session again.

    Args:
        story: Of the run.
        number: Of the session, from 1: the first one began the run, so its command makes all of
            it again. A later one is begun from the checkpoint that it continued.

    Raises:
        ValueError: There is no such session, or it does not say how it was started.
    """
    start = _start_of(story, number)
    yield "#!/bin/sh"
    yield from _comment(
        f"Runs {story.path} again as in session {number}, {_clock(start.get('time'))}. For the top "
        "of a fresh clone of its repository, in a fresh Python environment. An argument says where "
        "the run is now, if it was moved."
    )
    yield from _warnings(story, number)
    yield "set -eu"
    yield f"run=${{1:-{shlex.quote(str(story.path.absolute()))}}}"
    yield from _code_again(story.path, _map(start.get("git")))
    yield from _packages_again(start)
    yield from _environment_again(start)
    yield from _command_again(story, number, start)


def _start_of(story: Story, number: int) -> Mapping[str, Any]:
    count = len(story.sessions)
    if not 1 <= number <= count:
        known = f"1 to {count}" if count else f"none in {LEDGER}, as far as it can be read"
        known = "none: the run never began" if story.run.state == "new" else known
        raise ValueError(f"--reproduce: session {number} given; there are {known}.")
    start = story.sessions[number - 1].start
    if start is None:
        raise ValueError(f"--reproduce: session {number} failed before it began.")
    if "command" not in start:
        raise ValueError(
            f"--reproduce: session {number} was written by an earlier expbase, which did not note "
            "how it was started."
        )
    words = start["command"]
    if not words or not all(isinstance(word, str) for word in words):
        raise ValueError(
            f"--reproduce: session {number} was not started by a script (a notebook, say): there "
            "is no command to give again."
        )
    return start


def _warnings(story: Story, number: int) -> Iterator[str]:
    """What the script does not do as it was."""
    start = story.sessions[number - 1].start or {}
    for later, session in enumerate(story.sessions[number:], number + 1):
        other = session.start or {}
        names = ["config"] if other.get("config_changes") else []
        names += [name for name in _RELEVANT if other and _seen(name, start) != _seen(name, other)]
        if names:
            yield from _comment(
                f"Session {later} continued it with another {', '.join(names)}: --reproduce {later}"
            )
    nodes = _map(start.get("environment")).get("PADDLE_NNODES", "1")
    if nodes != "1":
        yield from _comment(f"It ran on {nodes} nodes: this is the command of the first one.")
    yield from _comment(
        f"It was on: {_machine(start)}, {start.get('platform')}. Its resolved config is in "
        f"$run/{CONFIG}."
    )


_RELEVANT = ("code", "command", "packages", "environment", "ranks")


def _seen(name: str, start: Mapping[str, Any]) -> Any:
    if name == "code":
        git = start.get("git") or {}
        return git.get("commit"), git.get("state")
    if name == "environment":
        return {k: v for k, v in _map(start.get(name)).items() if k not in SET_BY_LAUNCHER}
    return start.get(name)


def _code_again(run: Path, git: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    commit, state = str(git.get("commit")), str(git.get("state"))
    if re.fullmatch(r"[0-9a-f]{7,64}", commit):
        yield f"git checkout --detach {commit}"
        yield "if [ -f .gitmodules ]; then git submodule update --init --recursive; fi"
    elif not git.get("state"):
        yield from _comment(f"Which code it was is not known: {git.get('note') or 'not noted'}.")
        return
    if note := git.get("note"):
        yield from _comment(f"Note: {note}.")
    if git.get("left_out"):
        yield from _comment(f"Not saved with the run, and not in git: {_left_out(git)}.")
    if not re.fullmatch(r"[0-9a-f]{12}", state):
        if git.get("dirty"):
            yield from _comment("There were changes that were not committed. They are lost.")
        return
    folder = run / SOURCES / state
    if not folder.is_dir():
        yield from _comment(
            f"There were changes that were not committed; $run/{SOURCES}/{state} is gone."
        )
    if (folder / CHANGES).is_file():
        yield f'git apply --index --whitespace=nowarn "$run"/{SOURCES}/{state}/{CHANGES}'
    if (folder / UNTRACKED).is_dir():
        yield f'cp -R "$run"/{SOURCES}/{state}/{UNTRACKED}/. .'


def _packages_again(start: Mapping[str, Any]) -> Iterator[str]:
    packages, local = start.get("packages"), start.get("local_packages")
    local = local if isinstance(local, list) else []
    yield ""
    if not isinstance(packages, dict):
        yield from _comment(f"Which packages there were is not known: {packages}.")
        return
    yield from _comment(f"All packages that were installed, for python {start.get('python')}.")
    if "paddlepaddle-gpu" in packages:
        yield from _comment("paddlepaddle-gpu comes from PaddlePaddle's own index.")
    if named := [f"{name} {packages[name]}" for name in local if name in packages]:
        yield from _comment(f"From no index, so install them yourself: {', '.join(named)}.")
    yield "python -m pip install -r /dev/stdin <<'END'"
    for name, version in packages.items():
        if name not in local:
            yield _one_line(f"{name}=={version}")
    yield "END"


def _environment_again(start: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    for name, value in _map(start.get("environment")).items():
        if name not in SET_BY_LAUNCHER and re.fullmatch(r"\w+", name, re.ASCII):
            yield f"export {name}={shlex.quote(value)}"


def _command_again(story: Story, number: int, start: Mapping[str, Any]) -> Iterator[str]:
    words, is_elsewhere = with_other_output(start["command"], story.path)
    if start.get("directory") is None:
        yield from _comment(
            "It was not started within the repository: other paths in the command are relative to "
            "where it was."
        )
    elif start["directory"] != ".":
        yield f"cd {shlex.quote(start['directory'])}"
    line = f"python {shlex.join(words)}"
    if number > 1 and start.get("resumed"):
        path = f"{checkpoint.FOLDER}/{start['resumed']}"
        if not (story.path / path).is_dir():
            yield from _comment(f"It continued {path}, which is gone: this begins anew.")
        elif _runner_place(words) is not None:
            yield from _comment(f"It continued {path}: this begins anew.")
        else:
            line += f' --checkpoint_path "$run"/{shlex.quote(path)}'
    if not is_elsewhere:
        yield from _comment(
            "The command names no --output. Have it write into another directory, or it continues "
            "the run:"
        )
        line = f"# {_one_line(line)}"
    yield line


def with_other_output(words: Sequence[str], run: Path) -> tuple[list[str], bool]:
    """A command that does not continue the run; False if that cannot be had.

    Args:
        words: After the interpreter.
        run: The directory of the run.
    """
    changed, found = list(words), False
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--ou") or not "--output".startswith(name):
            continue
        if equals:
            changed[place], found = f"{name}={_again(value)}", True
        elif place + 1 < len(words):
            changed[place + 1], found = _again(words[place + 1]), True
    if not found and _runner_place(words) is not None:
        return [*words, "--output", _again(run.absolute().parent.name)], True
    return changed, found


def _again(output: str) -> str:
    return f"{output.rstrip('/')}-again"


def _runner_place(words: Sequence[str]) -> int | None:
    """Where in the words `python -m expbase run` begins, which needs no --output."""
    places = range(len(words) - 2)
    return next((i for i in places if list(words[i : i + 3]) == ["-m", "expbase", "run"]), None)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        printable(_one_line(text)), _WIDTH, initial_indent="# ", subsequent_indent="# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "show",
        help="what a run was, and the commands that make it again",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0, or 1 if there is no such run or session",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the output directory of a run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all of it as a JSON object, for scripts")
    form.add_argument("--reproduce", type=int, nargs="?", const=1, metavar="SESSION",
        help="print a shell script that runs it again (default: 1, the whole run)")  # fmt: skip
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; gives its exit code."""
    story = look(args.run_dir)
    if args.json:
        print(json.dumps({**asdict(story), "path": str(story.path)}))
    elif args.reproduce is None:
        _print(told(story))
    else:
        _print(script(story, args.reproduce))
    return 0


def _print(lines: Iterable[str]) -> None:
    # A name that is no UTF-8 goes out as the bytes that it is.
    sys.stdout.flush()
    sys.stdout.buffer.write(
        "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    )
    sys.stdout.buffer.flush()
