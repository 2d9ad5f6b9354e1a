"""A forked program finds what a fresh one finds, and its end is known as that of any child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest

LOOKS = """
import atexit, inspect, json, os, random, signal, sys, threading, warnings
import numpy

def found():
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path,
        "options": [*{*sys.warnoptions}], "here": os.getcwd(),
        "environment": dict(os.environ), "name": __name__,
        "file": globals().get("__file__"), "main": vars(sys.modules["__main__"]) is globals(),
        "threads": threading.active_count(), "blocked": [*signal.pthread_sigmask(0, [])],
        "handlers": [str(signal.getsignal(n)).split(" at ")[0] for n in range(1, 32)],
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3], "input": sys.stdin.read(),
    }

atexit.register(lambda: print("the end", file=sys.stderr))
print(json.dumps(found()))
if __name__ == "__main__":
    sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("command", ["-c {code} a b", "-m look a", "-u -W ignore look.py --b"])
def test_a_forked_program_finds_what_a_fresh_one_finds(tmp_path: Path, command: str) -> None:
    (tmp_path / "look.py").write_text(LOOKS)
    words = [sys.executable, *(word.format(code=LOOKS) for word in command.split())]
    variables = {
        "CODE": "7",
        "PYTHONPATH": f"{tmp_path}/more:{tmp_path}",
        "PYTHONWARNINGS": "ignore",
    }
    how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **variables}, "text": True}
    how |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    seen = []
    for start in (subprocess.Popen, forks.Popen):
        with start(words, **how) as process:
            out, err = process.communicate("said", timeout=forks.LONG_SECONDS)
        seen.append((json.loads(out), err, process.returncode))
    assert seen[0] == seen[1]
    assert seen[0][1:] == ("the end\n", 7)


def test_how_a_forked_program_ended_is_known_and_each_draws_its_own_numbers() -> None:
    code = "import numpy, signal; print(numpy.random.rand(), flush=True); signal.pause()"
    drawn = set()
    for signum in (signal.SIGKILL, signal.SIGTERM):
        command = [sys.executable, "-W", "ignore", "-c", code]
        with forks.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout
            drawn.add(process.stdout.readline())
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.001)
            process.send_signal(signum)
            assert process.wait(timeout=forks.LONG_SECONDS) == process.poll() == -signum
    assert len(drawn) == 2


def test_what_may_warn_or_is_not_python_is_started_as_ever(tmp_path: Path) -> None:
    code = "import sys; sys.exit('tiny' in sys.modules)"
    for words, expected in (
        ([sys.executable, "-W", "ignore", "-c", code], 1),
        ([sys.executable, "-c", code], 0),
        ([sys.executable, "-S", "-W", "ignore", "-c", code], 0),
        (["sh", "-c", "exit 3"], 3),
    ):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
        with forks.Popen(words, env=environment) as process:
            assert process.wait(forks.LONG_SECONDS) == expected
