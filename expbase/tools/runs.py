"""What is known about the runs below a directory; every tool that looks at runs reads them here.

Reads what the runs wrote, and asks for their locks without taking them: nothing is changed, and
other people's runs can be read, too. Damage becomes a note.

    for path in find(Path("runs")):
        run, config = read_run(path, printable(str(path)), time.time())
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.config import ConfigError, load_yaml
from expbase.meter import METRICS, json_lines
from expbase.record.run_record import LEDGER, last_config, last_start, read
from expbase.run_dir import CONFIG, LOCK
from expbase.state import checkpoint
from expbase.state.checkpointer import scores_of

_LOCK = LOCK.format(rank=0)
_TAIL = 1 << 16  # bytes at the end of metrics.jsonl that are read
_PREEMPTED = (124, 143)  # exit codes
_STOPPED = (0, 130)


def printable(text: str) -> str:
    """The text with what a terminal cannot show, line ends too, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def find(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """The output directories of runs at or below a folder, sorted.

    Args:
        folder: Where to look.
        on_error: Called for directories that cannot be read.

    Raises:
        ValueError: There is no such folder.
    """
    if not folder.is_dir():
        wrong = "is a file" if folder.exists() else "no such directory"
        raise ValueError(f"{folder}: {wrong}; expected a directory with runs in it.")
    found = []
    for directory, names, files in os.walk(folder, onerror=on_error):
        names[:] = [name for name in names if not name.startswith(".")]
        # Two of them are enough: a damaged run may lack one.
        if len({CONFIG, LEDGER, _LOCK}.intersection(files)) > 1:
            found.append(Path(directory))
            names.clear()  # what is below belongs to the run
    return sorted(found)


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


def read_run(path: Path, name: str, now: float) -> tuple[Run, dict[str, Any]]:
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
    """Whether a process holds the lock; the lock is asked for and not taken."""
    try:
        with path.open("rb") as file:
            question = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return False
    kind: int = struct.unpack("hhqqi", answer)[0]
    return kind != fcntl.F_UNLCK
