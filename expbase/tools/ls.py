"""A table of runs: what state they are in, how far they came, what differs in their configs.

Reads what the runs wrote, and asks for their locks without taking them: nothing is changed, and
other people's runs can be looked at, too. A run is running if its process holds the lock; how it
ended is what its ledger says; one that ended without a word is lost (kill -9, power).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import struct
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expbase import checkpoint
from expbase.checkpointer import scores_of
from expbase.cli import Paragraphs
from expbase.config import ConfigError, load_yaml
from expbase.ledger import LEDGER, last_config, read
from expbase.logs import METRICS, json_lines
from expbase.output import CONFIG, LOCK

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


def find(folder: Path) -> list[Path]:
    """The directories of runs at or below a folder, sorted.

    Raises:
        ValueError: There is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory; expected one with runs in it.")
    found = []
    for directory, names, files in os.walk(folder):
        if CONFIG in files and (LEDGER in files or _LOCK in files):
            found.append(Path(directory))
            names.clear()  # what is below belongs to it
        names[:] = [name for name in sorted(names) if not name.startswith(".")]
    return sorted(found)


def look(path: Path, name: str, now: float) -> tuple[Run, dict[str, Any]]:
    """A run, and the config of its last start by full keys."""
    records = _records(path)
    run = Run(name, _state(path, records))
    config: dict[str, Any] = {}
    try:
        config = last_config(load_yaml(path / CONFIG), records)
    except ConfigError as error:
        run.note = str(error)
    run.max_iteration = config.get("training.max_iteration", 0)
    for line in _last_lines(path / METRICS):
        run.iteration = run.iteration or line.get("iteration", 0)
        if run.loss is None:
            run.loss = line.get("train/loss")
    saved = checkpoint.listed(path / checkpoint.FOLDER)
    if saved:
        run.iteration = max(run.iteration, checkpoint.iteration_of(saved[-1]) or 0)
        run.best_iteration, run.best = _best(saved[-1])
    times = [file.stat().st_mtime for file in (path / LEDGER, path / METRICS) if file.exists()]
    run.age = round(now - max(times), 1) if times else 0.0
    starts = [record for record in records if record.get("event") == "start"]
    code = (starts[-1].get("git") if starts else None) or {}  # none in an old ledger
    run.commit, run.dirty = code.get("commit"), bool(code.get("dirty"))
    return run, config


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each config the values that are not the same in all of them; empty ones do not count."""
    known = [config for config in configs if config]
    keys = dict.fromkeys(key for config in known for key in config)
    varying = [k for k in keys if len({repr(config.get(k)) for config in known}) > 1]
    return [{key: config[key] for key in varying if key in config} for config in configs]


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return read(path / LEDGER)
    except OSError:
        return []


def _state(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    if _is_locked(path / _LOCK):
        return "running"
    if not records:
        return "new"
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
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None, None


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
    parser.set_defaults(run=main, slips=(ValueError,))


def main(args: argparse.Namespace) -> int:
    """Runs the tool; gives its exit code."""
    now = time.time()
    paths = find(args.dir)
    looked = [look(path, str(path.relative_to(args.dir)), now) for path in paths]
    for (run, _), own in zip(looked, differences([config for _, config in looked]), strict=True):
        run.differs = own
    runs = [run for run, _ in looked]
    if args.json:
        for run in runs:
            print(json.dumps(asdict(run)))
    elif runs:
        _print_table(runs)
    else:
        print(f"no runs in {args.dir}")
    return 0


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
