"""Reads the runs below a directory, for all tools that look at runs.

It reads the files of the runs, and asks for their locks without taking them. Nothing is changed, so
other people's runs can be read, too. Damage becomes a note.

    for path in find(Path("runs")):
        run = read_run(path, printable(str(path)))
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expbase.base.errors import ValueMistake
from expbase.base.files import DAMAGES, regular
from expbase.base.terminal import escaped, shown
from expbase.checkpoint import layout
from expbase.checkpoint.best import best_of
from expbase.config import CONFIG, load_yaml
from expbase.engine.run_dir import LOCK, NO_LOCKS, is_run
from expbase.record.metrics import METRICS
from expbase.record.starts_and_ends import (
    DIGEST,
    LEDGER,
    Session,
    flat,
    open_start,
    runs_here,
    sessions,
)
from expbase.tools.newest_metrics import read_newest

_LOCK = LOCK.format(rank=0)
_OF_RUNS = {CONFIG, LEDGER, _LOCK}


def printable(text: str) -> str:
    """Returns a text with escapes for line ends and for characters that a terminal cannot show."""
    return shown(escaped(text))


def find(folder: Path) -> list[Path]:
    """Returns the output directories of runs at or below a folder, sorted.

    Raises:
        ValueError: There is no such folder.
    """
    if not folder.is_dir():
        raise ValueMistake(f"{folder}: no such directory; expected one with runs in it.")
    found = []
    for directory, names, files in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        if not _OF_RUNS.isdisjoint(files) and is_run(directory):
            found.append(Path(directory))
            names[:] = [name for name in names if name != layout.FOLDER]
    return sorted(found)


@dataclass
class RunFacts:
    """The facts about a run."""

    name: str  # its path, from where the table begins
    state: str = ""  # running, finished, stopped, preempted, crashed, failed, lost, new: no start
    iteration: int = 0  # at its newest line or checkpoint
    max_iteration: int = 0  # that its config asks for; 0 if epochs decide
    best: float | None = None  # the best saved value of training.monitor
    best_iteration: int | None = None
    tested: str = ""  # the checkpoint of the last final test; "": no test, or of other weights
    loss: float | str | None = None  # the last logged training loss; "nan" is a text
    metrics: dict[str, Any] = field(default_factory=dict)  # the last value of each that was logged
    age: float = 0.0  # seconds since it last wrote something
    commit: str | None = None  # the code's, at the last start
    dirty: bool = False  # whether there were changes to it
    differs: dict[str, Any] = field(default_factory=dict)  # config values that others have not
    note: str = ""  # the first error in reading its files
    experiment: str = ""  # its class; "": unknown
    config: dict[str, Any] = field(default_factory=dict)  # the last start's, by full keys
    sessions: list[Session] = field(default_factory=list)
    digest: str = ""  # of a run that has finished; "": it has none


def read_run(path: Path, name: str) -> RunFacts:
    """Reads the facts about a run.

    Args:
        path: Its output directory.
        name: How it is called in a table.
    """
    run = RunFacts(name)
    for read in (_read_progress, _read_ledger, _read_config, _read_lock):
        try:
            read(run, path)
        except (OSError, *DAMAGES) as error:
            # One line; the path of the run is in its row already.
            run.note = run.note or " ".join(str(error).replace(f"{path}/", "").split())
    files = [file for file in (path / LEDGER, path / METRICS) if file.exists()]
    now = time.time()
    newest = max((file.stat().st_mtime for file in files), default=now)
    run.age = max(round(now - newest, 1), 0.0)  # a clock may have been set back
    return run


def find_differences(runs: Sequence[RunFacts]) -> None:
    """Sets `differs` of each run: the config values that another run of its experiment has not.

    Keys of the training section come last: the other keys are more often what a user has tried.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        for key, value in run.config.items():
            values[run.experiment, key].add(repr(value))
    for run in runs:
        for key in sorted(run.config, key=lambda key: key.startswith("training.")):
            if len(values[run.experiment, key]) > 1:
                run.differs[key] = run.config[key]


def _read_progress(run: RunFacts, path: Path) -> None:
    newest = read_newest(path)
    run.iteration, run.metrics, run.tested = newest.iteration, newest.metrics, newest.tested
    run.loss = run.metrics.get("train/loss")
    if saved := layout.listed(path / layout.FOLDER):
        run.iteration = max(run.iteration, layout.iteration_of(saved[-1]) or 0)
        with contextlib.suppress(Exception):  # a damaged file may hold anything
            run.best_iteration, run.best = best_of(path)[0]


def _read_ledger(run: RunFacts, path: Path) -> None:
    run.state = "lost"
    run.sessions = sessions(path)
    if (path / DIGEST).is_file():  # else the run goes on, and it is that of before
        run.digest = next((one.digest for one in reversed(run.sessions) if one.digest), "")
    run.state = _state(run)
    start = next((session.start for session in reversed(run.sessions) if session.start), {})
    run.config = dict(start.get("config", {}))
    run.max_iteration = run.config.get("training.max_iteration") or 0
    code = start.get("git") or {}
    run.experiment = str(start.get("experiment", ""))
    run.commit = code.get("commit") and str(code["commit"])
    run.dirty = bool(code.get("dirty"))


def _read_config(run: RunFacts, path: Path) -> None:
    if not run.config:  # else that of the last start holds, and YAML takes long to read
        run.config = flat(load_yaml(path / CONFIG))
        run.max_iteration = run.config.get("training.max_iteration") or 0


def _state(run: RunFacts) -> str:
    if not run.sessions:
        return "lost" if run.iteration else "new"
    last = run.sessions[-1]
    if not last.end:
        return "lost"
    if last.end.get("reason") == "finished":
        return "finished"
    states = dict.fromkeys((124, 129, 143), "preempted") | {0: "stopped", 130: "stopped"}
    return states.get(last.end.get("exit_code", 1), "crashed" if last.start else "failed")


def _read_lock(run: RunFacts, path: Path) -> None:
    """Notes whether another process has the run, by the lock, without taking it."""
    lock = path / _LOCK
    if not (lock.is_file() and os.access(lock, os.R_OK)):
        return
    with open(lock, "rb", opener=regular) as file:
        try:
            os.lockf(file.fileno(), os.F_TEST, 0)
        except PermissionError:
            run.state = "running"
        except OSError as error:  # there are no locks, so nobody knows of another machine
            if error.errno not in NO_LOCKS:
                raise
            run.state = "running" if runs_here(open_start(path)) else run.state
