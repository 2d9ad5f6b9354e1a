"""What workers leave in shared memory: notes and files, of the living and of the dead."""

from __future__ import annotations

import fcntl
import glob
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import forks
import pytest
from tiny import Tiny, make, trained

from expbase.data import shared_memory

KILLED_WITH_WORKERS = """
import glob, os, signal, sys, time
import numpy as np
from paddle.io import DataLoader, Dataset
from expbase.data.loaders import Shard, adapt_loader
from expbase.data.workers import workers_end_with_this

class Workers(Dataset):
    def __getitem__(self, index):
        while index and sys.argv[1] == "at work":  # makes files faster than anybody removes them
            index += 1
            open(f"/dev/shm/paddle_{os.getpid()}_{index}", "w").close()
        return np.full([1000], os.getpid())
    def __len__(self):
        return 3 if sys.argv[1] == "later" else 100

loader = DataLoader(Workers(), batch_size=1, num_workers=1)
if sys.argv[1] == "read by hand":
    watching = workers_end_with_this()
    watching.__enter__()
    batches = iter(loader)
else:
    batches = adapt_loader(loader, "loader", Shard(seed=0)).open(1)
batch = next(batches)
worker = int(np.ravel(batch)[0])
while not glob.glob(f"/dev/shm/paddle_{worker}_*"):  # of the batches that it has read ahead
    time.sleep(0.01)
if sys.argv[1] == "later":
    kept = [batch, *batches]  # to the end, where the worker ends
print(worker, flush=True)
if sys.argv[1] == "with it":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # paddle's handler may raise before our kill
    os.kill(worker, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", ["at work", "read by hand", "with it", "later"])
def test_of_a_run_that_was_killed_nothing_is_left(tmp_path: Path, killed: str) -> None:
    """Killed before its worker, which is making files just then, or is of a loader that is read by
    hand; with it; or when that has ended and its batches are held.
    """
    command = [sys.executable, "-W", "ignore", "-c", KILLED_WITH_WORKERS, killed]
    result = forks.run(command)  # until nobody has its stdout any more, the worker neither
    assert result.returncode == -9, result.stderr
    files = f"/dev/shm/paddle_{result.stdout.strip()}_*"
    if killed != "with it":  # else the next start removes them
        assert not glob.glob(files)
    experiment = make(Tiny, tmp_path)
    experiment.setup()
    experiment.close()
    assert not glob.glob(files)


# Holds the lock of a note, as a worker does, until its stdin ends. It is a process of its own: what
# this one holds, a program that another thread starts holds, too, until it has begun.
HOLDER = """
import fcntl, sys
note = open(sys.argv[1])
fcntl.flock(note, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(note: Path) -> Iterator[None]:
    """A worker holds the lock of this note."""
    note.touch()
    command = [sys.executable, "-S", "-c", HOLDER, str(note)]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as worker:  # type: ignore[call-overload]
        assert worker.stdout.readline() == "held\n"
        yield


def test_what_was_in_use_at_the_start_of_a_run_is_looked_at_again_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    pid = 2**22 + 1  # no process here has it: the system gives smaller ones
    made, note = tmp_path / f"paddle_{pid}_0_1", tmp_path / f"expbase_worker_{pid}_a"
    made.touch()
    with held(note):  # by a worker that is being killed
        experiment = make(Tiny, tmp_path / "run")
        experiment.setup()
        assert made.exists()
    experiment.close()
    assert not made.exists()


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, where other tests clean up, too."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_files_are_left_alone_as_long_as_a_worker_of_that_id_lives_anywhere(
    memory: Path,
) -> None:
    # Two containers that share this memory may both have a process of this id.
    pid = 2**22 + 1  # no process here has it: the system gives smaller ones
    made, alive = memory / f"paddle_{pid}_0_1", memory / f"expbase_worker_{pid}_a"
    for file in made, memory / f"expbase_worker_{pid}_dead":
        file.touch()
    with held(alive):
        shared_memory.remove_left_files()
        assert made.exists()
    shared_memory.remove_left_files()
    assert not [*memory.iterdir()]


def test_two_processes_may_look_at_a_time(memory: Path) -> None:
    note = memory / f"expbase_worker_{2**22 + 1}_a"
    note.touch()
    with note.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        shared_memory.remove_left_files()
    assert not note.exists()


def test_a_note_of_another_user_is_not_believed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = memory / "paddle_77_0_1"
    made.touch()
    (memory / "expbase_worker_*_trap").touch()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    shared_memory.remove_left_files()
    assert made.exists()


def test_workers_hold_the_lock_of_a_note_and_leave_nothing_when_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "memory")
    shared_memory.SHARED_MEMORY.mkdir()

    class WithWorkers(Tiny):
        loader_options: ClassVar = {"num_workers": 2, "use_shared_memory": False}

        def on_train_batch_end(self) -> None:
            (note, *_) = shared_memory.SHARED_MEMORY.glob("expbase_worker_*")
            with note.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    trained(WithWorkers, tmp_path / "run")
    assert not [*shared_memory.SHARED_MEMORY.iterdir()]
