"""Child processes: none outlives its parent."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expbase import processes
from expbase.processes import leave_process_group, sigterm_held

# Each child has the stdout of its parent, so the pipe ends when all of them have ended: waiting
# for that end is the test. The module is read by its path, without the seconds that paddle takes.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
child.wait()
"""
CHILD = """
import os, runpy, signal, sys
processes = runpy.run_path(sys.argv[1])
processes[sys.argv[2]](*sys.argv[3:])
print("ready", flush=True)
signal.alarm(100)  # if the test fails
signal.pause()
"""


@pytest.mark.parametrize("function", ["die_with_parent", "end_with_parent"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, function: str) -> None:
    left = tmp_path / "left_by_the_child"
    left.touch()
    arguments = [str(tmp_path / "left_*")] if function == "end_with_parent" else []
    command = [sys.executable, "-c", PARENT, CHILD, processes.__file__, function, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.communicate(timeout=60)
    assert left.exists() == (function == "die_with_parent")


ORPHAN = """
import multiprocessing, os, runpy, sys, time

def work(parent):
    while os.getppid() == parent:  # until it is dead
        time.sleep(0.01)
    print("asks", flush=True)
    runpy.run_path(sys.argv[1])["end_with_parent"]("no such file")
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "asks\n", result.stderr  # the pipe has ended, and so has the child


KILLED_WITH_WORKERS = """
import glob, os, signal, time
import numpy as np
from paddle.io import DataLoader, Dataset
from expbase.data.loaders import Shard, adapt_loader

class Workers(Dataset):
    def __getitem__(self, index):
        return np.full([1000], os.getpid())
    def __len__(self):
        return 100

loader = DataLoader(Workers(), batch_size=1, num_workers=1)
batches = adapt_loader(loader, "loader", Shard(seed=0)).open(1)
worker = int(next(batches)[0, 0])
while not glob.glob(f"/dev/shm/paddle_{worker}_*"):  # of the batches that it has read ahead
    time.sleep(0.01)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_workers_and_no_shared_memory() -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED_WITH_WORKERS]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    assert not glob.glob(f"/dev/shm/paddle_{int(killed.stdout)}_*")


def test_an_exit_code_is_the_one_that_a_shell_shows() -> None:
    assert [processes.exit_code(code) for code in (0, 1, 124, -9)] == [0, 1, 124, 137]


def test_a_child_survives_the_sigterm_of_its_group_from_its_first_moment() -> None:
    with sigterm_held():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # the group's, before anything was done
            leave_process_group()
            os._exit(os.getpgrp() == os.getpid())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_sigterm_reaches_a_child_that_has_left_its_group() -> None:
    with sigterm_held():
        child = os.fork()
        if child == 0:
            leave_process_group()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
