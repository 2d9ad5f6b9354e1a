"""Child processes: none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import pytest

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
