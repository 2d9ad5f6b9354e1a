"""Child processes: none outlives its parent."""

from __future__ import annotations

import fcntl
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import forks
import pytest
from tiny import Tiny, make, trained

from expbase.base import processes
from expbase.base.processes import ended_by_sigterm, handling, signals_held, survive_signals

# Each child has the stdout of its parent, so the pipe ends when all of them have ended: waiting
# for that end is the test. The module is read by its path, without the seconds that paddle takes.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
child.wait()
"""
CHILD = """
import runpy, signal, sys
runpy.run_path(sys.argv[1])["die_with_parent"]()
print("ready", flush=True)
signal.alarm(100)  # if the test fails
signal.pause()
"""


def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, CHILD, processes.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.communicate(timeout=forks.LONG_SECONDS)


ORPHAN = """
import multiprocessing, os, runpy, sys, time

def work(parent):
    while os.getppid() == parent:  # until it is dead
        time.sleep(0.01)
    print("asks", flush=True)
    runpy.run_path(sys.argv[1])["die_with_parent"](multiprocessing.parent_process().pid)
    time.sleep(100)

if __name__ == "__main__":
    way = multiprocessing.get_context(sys.argv[2])
    way.Process(target=work, args=(os.getpid(),)).start()
    os._exit(0)
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_ends_whose_parent_was_dead_before_it_asked(tmp_path: Path, way: str) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, str(tmp_path / "orphan.py"), processes.__file__, way]
    result = subprocess.run(command, capture_output=True, text=True, timeout=forks.LONG_SECONDS)
    assert result.stdout == "asks\n", result.stderr  # the pipe has ended, and so has the child


KILLED_WITH_WORKERS = """
import glob, os, signal, sys, time
import numpy as np
from paddle.io import DataLoader, Dataset
from expbase.data.loaders import Shard, adapt_loader

class Workers(Dataset):
    def __getitem__(self, index):
        return np.full([1000], os.getpid())
    def __len__(self):
        return 3 if sys.argv[1] == "later" else 100

loader = DataLoader(Workers(), batch_size=1, num_workers=1)
batches = adapt_loader(loader, "loader", Shard(seed=0)).open(1)
batch = next(batches)
worker = int(batch[0, 0])
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


@pytest.mark.parametrize("killed", ["before it", "with it", "later"])
def test_of_a_run_that_was_killed_nothing_is_left_after_the_next_start(
    tmp_path: Path, killed: str
) -> None:
    """Killed before its worker, with it, or when that has ended and its batches are held."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED_WITH_WORKERS, killed]
    result = forks.run(command)  # until nobody has its stdout any more, the worker neither
    assert result.returncode == -9, result.stderr
    files = f"/dev/shm/paddle_{result.stdout.strip()}_*"
    if killed == "later":
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
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
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
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /dev/shm, where other tests clean up, too."""
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_files_are_left_alone_as_long_as_a_worker_of_that_id_lives_anywhere(
    shared_memory: Path,
) -> None:
    # Two containers that share this memory may both have a process of this id.
    pid = 2**22 + 1  # no process here has it: the system gives smaller ones
    made, alive = shared_memory / f"paddle_{pid}_0_1", shared_memory / f"expbase_worker_{pid}_a"
    for file in made, shared_memory / f"expbase_worker_{pid}_dead":
        file.touch()
    with held(alive):
        processes.remove_left_files()
        assert made.exists()
    processes.remove_left_files()
    assert not [*shared_memory.iterdir()]


def test_two_processes_may_look_at_a_time(shared_memory: Path) -> None:
    note = shared_memory / f"expbase_worker_{2**22 + 1}_a"
    note.touch()
    with note.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        processes.remove_left_files()
    assert not note.exists()


def test_a_note_of_another_user_is_not_believed(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = shared_memory / "paddle_77_0_1"
    made.touch()
    (shared_memory / "expbase_worker_*_trap").touch()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    processes.remove_left_files()
    assert made.exists()


def test_workers_hold_the_lock_of_a_note_and_leave_nothing_when_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path / "memory")
    processes.SHARED_MEMORY.mkdir()

    class WithWorkers(Tiny):
        loader_options: ClassVar = {"num_workers": 2, "use_shared_memory": False}

        def on_train_batch_end(self) -> None:
            (note, *_) = processes.SHARED_MEMORY.glob("expbase_worker_*")
            with note.open() as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    trained(WithWorkers, tmp_path / "run")
    assert not [*processes.SHARED_MEMORY.iterdir()]


def test_sigterm_ends_a_process_with_its_code_until_the_block_ends() -> None:
    """Also the first process of a container, for which the system ignores what has no handler."""
    with handling({signal.SIGTERM: signal.SIG_IGN}):
        with pytest.raises(SystemExit) as ended, ended_by_sigterm():
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_in_another_thread_no_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(lambda: ended_by_sigterm().__enter__()).result()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_worker_survives_the_sigterm_of_anybody_from_its_first_moment() -> None:
    with signals_held({signal.SIGTERM}):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # the group's, before anything was done
            survive_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(os.getpgrp() == os.getpid())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
