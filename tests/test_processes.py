"""Child processes: none outlives its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expbase import processes

CHILD = """
import runpy, signal, sys
runpy.run_path(sys.argv[1])["die_with_parent"]()
print("ready", flush=True)
signal.pause()
"""
# Its child shares its stdout: the pipe ends when both are dead.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, processes.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert parent.stdout.readline() == "ready\n"
            parent.kill()
            parent.communicate(timeout=20)  # for ever, if the child lives on
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


ORPHAN = """
import multiprocessing, os, sys, time
from expbase import processes

def work(parent):
    while os.getppid() == parent:  # until it is dead
        time.sleep(0.01)
    print("asks", flush=True)
    processes.end_with_parent("no such file")
    print("lives on", flush=True)
    time.sleep(10)

if __name__ == "__main__":
    way = multiprocessing.get_context(sys.argv[1])
    way.Process(target=work, args=(os.getpid(),)).start()
    os._exit(0)
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_ends_whose_parent_was_dead_before_it_asked(tmp_path: Path, way: str) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "orphan.py"), way]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "asks\n", result.stderr


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (1, 1), (124, 124), (-9, 137)])
def test_an_exit_code_is_the_one_that_a_shell_shows(returncode: int, code: int) -> None:
    assert processes.exit_code(returncode) == code
