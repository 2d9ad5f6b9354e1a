"""A table of runs: what state they are in, how far they came, what differs in their configs.

Reads what the runs wrote, and asks for their locks without taking them: nothing is changed, and
other people's runs can be looked at, too. A run is running if its process holds the lock; how it
ended is what its ledger says; one that ended without a word is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.config import ConfigError, load_yaml
from expbase.meter import METRICS, json_lines, json_value
from expbase.record.run_record import LEDGER, last_config, last_start, read
from expbase.run_dir import CONFIG, LOCK
from expbase.state import checkpoint
from expbase.state.checkpointer import scores_of

_LOCK = LOCK.format(rank=0)
_TAIL = 1 << 16  # bytes of a file's end that are looked at
_PREEMPTED = (124, 143)
_STOPPED = (0, 130)


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        name: Its path, from where the table begins.
        state: running, finished, stopped, preempted, crashed, lost, or new if it never began.
        iteration: Of its newest line or checkpoint.
        max_iteration: That its config asks for; 0 if passes decide.
        best: The best value of training.monitor that was saved; None if there is none.
        best_iteration: Its iteration.
        loss: The last logged training loss; None if there is none.
        age: Seconds since it last wrote something.
        commit: Of the code at the last start; None if that is not known.
        dirty: Whether there were changes to it.
        differs: The config values that are not the same in all runs.
        note: What could not be read.
    """

    name: str
    state: str
    iteration: int = 0
    max_iteration: int = 0
    best: float | None = None
    best_iteration: int | None = None
    loss: float | None = None
    age: float = 0.0
    commit: str | None = None
    dirty: bool = False
    differs: dict[str, Any] | None = None
    note: str = ""


def check_folder(folder: Path) -> None:
    """Checks that there is a directory to look into.

    Raises:
        ValueError: There is none.
    """
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "no such directory"
        raise ValueError(f"{folder}: {wrong}; expected a directory with runs in it.")


def find(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """The directories of runs at or below a folder, sorted.

    Args:
        folder: Where to look.
        on_error: Hears of directories that cannot be read.

    Raises:
        ValueError: There is no such folder.
    """
    check_folder(folder)
    found = []
    for directory, names, files in os.walk(folder, onerror=on_error):
        if len({CONFIG, LEDGER, _LOCK}.intersection(files)) > 1:  # a damaged run may lack one
            found.append(Path(directory))
            names.clear()  # what is below belongs to it
        names[:] = [name for name in sorted(names) if not name.startswith(".")]
    return sorted(found)


def look(path: Path, name: str, now: float) -> tuple[Run, dict[str, Any]]:
    """A run, and the config of its last start by full keys."""
    notes: list[str] = []
    records: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    saved: list[Path] = []
    with _noting(notes):
        records = read(path / LEDGER)
    with _noting(notes):
        first = load_yaml(path / CONFIG)
    with _noting(notes):
        saved = checkpoint.listed(path / checkpoint.FOLDER)
    config = last_config(first, records)
    run = Run(name, "", max_iteration=_whole(config.get("training.max_iteration")))
    for line in _last_lines(path / METRICS):
        run.iteration = run.iteration or _whole(line.get("iteration"))
        if run.loss is None and isinstance(line.get("train/loss"), (float, str)):
            run.loss = line["train/loss"]
    if saved:
        run.iteration = max(run.iteration, checkpoint.iteration_of(saved[-1]) or 0)
        run.best_iteration, run.best = _best(saved[-1])
    run.state = _state(path, records, has_begun=bool(run.iteration))
    if run.state == "lost" and not records and not any(LEDGER in note for note in notes):
        notes.append(f"{LEDGER}: holds no record")
    run.age = _age_of([path / LEDGER, path / METRICS], now)
    # The name of the run stands before it, in its row.
    run.note = "; ".join(" ".join(note.replace(f"{path}/", "").split()) for note in notes)
    code = last_start(records).get("git") or {}  # none in an old ledger
    run.commit, run.dirty = code.get("commit"), bool(code.get("dirty"))
    return run, config


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each config the values that are not the same in all of them; empty ones do not count."""
    known = [config for config in configs if config]
    keys = dict.fromkeys(key for config in known for key in config)
    varying = [k for k in keys if len({repr(config.get(k)) for config in known}) > 1]
    return [{key: config[key] for key in varying if key in config} for config in configs]


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Has what cannot be read be a note, and no more."""
    try:
        yield
    except OSError as error:
        notes.append(f"{error.filename}: cannot be read: {error.strerror}")
    except ConfigError as error:
        notes.append(str(error).rstrip("."))


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _age_of(files: Sequence[Path], now: float) -> float:
    times = []
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(round(now - max(times), 1), 0.0) if times else 0.0


def _state(path: Path, records: Sequence[Mapping[str, Any]], *, has_begun: bool) -> str:
    if _is_locked(path / _LOCK):
        return "running"
    if not records:
        return "lost" if has_begun else "new"
    last = records[-1]
    if last.get("event") != "end":
        return "lost"
    code = last.get("exit_code")
    if code == 0 and last.get("reason") == "finished":
        return "finished"
    if code in _PREEMPTED:
        return "preempted"
    return "stopped" if code in _STOPPED else "crashed"


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock; it is asked for and not taken."""
    try:
        with path.open("rb") as file:
            question = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return False
    kind: int = struct.unpack("hhqqi", answer)[0]
    return kind != fcntl.F_UNLCK


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects at the end of a file, the last one first; torn ones are left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            data = file.read()
    except OSError:
        return
    yield from reversed([*json_lines(data)])


def _best(path: Path) -> tuple[int, float] | tuple[None, None]:
    try:
        scores = scores_of(path)
        return (int(scores[0][0]), float(scores[0][1])) if scores else (None, None)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return None, None


def printable(text: str) -> str:
    """With what no terminal can show, or a file name should not hold, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "ls",
        help="a table of the runs below a directory",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0, or 1 if there is no such directory",
    )
    parser.add_argument("dir", type=Path, nargs="?", default=Path(), help="default: this one")
    parser.add_argument("--json", action="store_true", help="one JSON object per line, for scripts")
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; gives its exit code."""
    now = time.time()
    paths = find(args.dir, _say_unreadable)
    looked = [look(path, str(path.relative_to(args.dir)), now) for path in paths]
    for (run, _), own in zip(looked, differences([config for _, config in looked]), strict=True):
        run.differs = own
    runs = [run for run, _ in looked]
    if args.json:
        for run in runs:
            print(json.dumps({**asdict(run), "best": json_value(run.best)}))
    elif runs:
        _print_table([*map(_shown, runs)])
    else:
        print(f"no runs in {printable(str(args.dir))}")
    return 0


def _say_unreadable(error: OSError) -> None:
    print(f"{error.filename}: {error.strerror}; not looked into.", file=sys.stderr)


def _shown(run: Run) -> Run:
    """A run whose texts keep to their row."""
    differs = {name: printable(str(value)) for name, value in (run.differs or {}).items()}
    return replace(run, name=printable(run.name), note=printable(run.note), differs=differs)


def _print_table(runs: Sequence[Run]) -> None:
    rows = [
        [
            run.name,
            run.state,
            f"{run.iteration}/{run.max_iteration}" if run.max_iteration else str(run.iteration),
            _number(run.best),
            _number(run.loss),
            _age(run.age),
            (run.commit or "")[:7] + "*" * run.dirty,
            run.note or " ".join(f"{k}={v}" for k, v in (run.differs or {}).items()),
        ]
        for run in runs
    ]
    print_table(["run", "state", "iteration", "best", "loss", "age", "commit", "differs in"], rows)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns; on a terminal that is too narrow for it the last one stands below its row.

    Not by rich, which would fold it into the few columns that are left.
    """
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    is_narrow = limit is not None and sum(widths) + 2 * len(head) > limit + 2
    for row in [head, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells[:-1] if is_narrow else cells).rstrip())
        if is_narrow and row is not head:
            print(textwrap.indent(textwrap.fill(row[-1] or "-", (limit or 0) - 4), "    "))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value or "")


def _age(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{name}"
    return f"{seconds:.0f}s"
