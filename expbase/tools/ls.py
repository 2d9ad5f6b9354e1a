"""A table of runs: what state they are in, how far they are, what differs in their configs.

Reads what the runs wrote, and asks for their locks without taking them: nothing is changed, and
other people's runs can be listed, too. A run is running if its process holds the lock; how it
ended is in its ledger; one that ended without a record there is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import struct
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from expbase.cli import Paragraphs
from expbase.config import ConfigError, load_yaml
from expbase.logs import METRICS, json_lines, json_value
from expbase.record.run_record import LEDGER, last_config, last_start, read
from expbase.run_dir import CONFIG
from expbase.state import checkpoint
from expbase.state.checkpointer import scores_of
from expbase.tools.runs import LOCK_FILE, find, printable

_TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are read
_PREEMPTED = (124, 143)  # exit codes
_STOPPED = (0, 130)


@dataclass
class Run:
    """What is known about a run.

    Attributes:
        name: Its path, from where the table begins.
        state: running, finished, stopped, preempted, crashed, lost, or new if it never began.
        iteration: Of its newest line or checkpoint.
        max_iteration: That its config asks for; 0 if epochs decide.
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
    state: str = ""
    iteration: int = 0
    max_iteration: int = 0
    best: float | None = None
    best_iteration: int | None = None
    loss: float | None = None
    age: float = 0.0
    commit: str | None = None
    dirty: bool = False
    differs: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def inspect_run(path: Path, name: str, now: float) -> tuple[Run, dict[str, Any]]:
    """A run, and the config of its last start by full keys."""
    run = Run(name)
    notes: list[str] = []
    records: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    with _noting(notes):
        records = read(path / LEDGER)
    with _noting(notes):
        config = load_yaml(path / CONFIG)
    config = last_config(config, records)
    run.max_iteration = _int(config.get("training.max_iteration"))
    code = last_start(records).get("git") or {}  # an old ledger has none
    run.commit, run.dirty = code.get("commit"), bool(code.get("dirty"))
    with _noting(notes):
        _read_progress(path, run)
    run.state = _state(path, records, has_begun=bool(run.iteration))
    if run.state == "lost" and not records and not any(LEDGER in note for note in notes):
        notes.append(f"{LEDGER}: holds no record")
    run.age = _age_of([path / LEDGER, path / METRICS], now)
    # The path of the run is in its row already.
    run.note = "; ".join(" ".join(note.replace(f"{path}/", "").split()) for note in notes)
    return run, config


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Turns what cannot be read into a note."""
    try:
        yield
    except OSError as error:
        notes.append(f"{error.filename}: cannot be read: {error.strerror}")
    except ConfigError as error:
        notes.append(str(error).rstrip("."))


def _int(value: Any) -> int:
    return value if type(value) is int else 0


def _read_progress(path: Path, run: Run) -> None:
    """Fills in what the run's metrics and checkpoints say."""
    for line in _last_lines(path / METRICS):
        run.iteration = run.iteration or _int(line.get("iteration"))
        if run.loss is None and isinstance(line.get("train/loss"), (float, str)):
            run.loss = line["train/loss"]
    if saved := checkpoint.listed(path / checkpoint.FOLDER):
        run.iteration = max(run.iteration, checkpoint.iteration_of(saved[-1]) or 0)
        # A damaged checkpoint may hold anything.
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError
        ):
            iteration, best = scores_of(saved[-1])[0]
            run.best_iteration, run.best = int(iteration), float(best)


def _age_of(files: Sequence[Path], now: float) -> float:
    ages = []
    for file in files:
        with contextlib.suppress(OSError):
            ages.append(round(now - file.stat().st_mtime, 1))
    return max(min(ages, default=0.0), 0.0)  # a clock may have been set back


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects at the end of a file, the last one first, without torn ones."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        yield from reversed([*json_lines(file.read())])


def _state(path: Path, records: Sequence[Mapping[str, Any]], *, has_begun: bool) -> str:
    if _is_locked(path / LOCK_FILE):
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
    """Whether a process holds the lock; the lock is asked for and not taken."""
    try:
        with path.open("rb") as file:
            question = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return False
    kind: int = struct.unpack("hhqqi", answer)[0]
    return kind != fcntl.F_UNLCK


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each config the values that are not the same in all of them; empty ones do not count."""
    known = [config for config in configs if config]
    keys = dict.fromkeys(key for config in known for key in config)
    varying = [k for k in keys if len({repr(config.get(k)) for config in known}) > 1]
    return [{key: config[key] for key in varying if key in config} for config in configs]


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
    parser.set_defaults(run=main, slips=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; returns its exit code."""
    now = time.time()
    paths = find(args.dir, _report_unreadable)
    inspected = [inspect_run(path, str(path.relative_to(args.dir)), now) for path in paths]
    runs = [run for run, _ in inspected]
    for run, own in zip(runs, differences([config for _, config in inspected]), strict=True):
        run.differs = own
    if args.json:
        for run in runs:
            print(json.dumps({**asdict(run), "best": json_value(run.best)}))
    elif runs:
        head = ["run", "state", "iteration", "best", "loss", "age", "commit", "differs in"]
        _print_table([head, *map(_row, runs)])
    else:
        print(f"no runs in {printable(str(args.dir))}")
    return 0


def _report_unreadable(error: OSError) -> None:
    print(f"{error.filename}: {error.strerror}; not looked into.", file=sys.stderr)


def _row(run: Run) -> list[str]:
    cells = [
        run.name,
        run.state,
        f"{run.iteration}/{run.max_iteration}" if run.max_iteration else str(run.iteration),
        _number(run.best),
        _number(run.loss),
        _age(run.age),
        (run.commit or "")[:7] + "*" * run.dirty,
        run.note or " ".join(f"{key}={value}" for key, value in run.differs.items()),
    ]
    return [printable(cell) for cell in cells]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value or "")


def _age(seconds: float) -> str:
    for name, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{name}"
    return f"{seconds:.0f}s"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows; on a terminal that is too narrow the last cell is below its row.

    rich would fold the last column into the few characters that are left beside the others.
    """
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_narrow = limit is not None and sum(widths) + 2 * (len(widths) - 1) > limit
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells[:-1] if is_narrow else cells).rstrip())
        if limit is not None and is_narrow and number:  # the head has nothing below
            print(textwrap.indent(textwrap.fill(row[-1] or "-", limit - 4), "    "))
