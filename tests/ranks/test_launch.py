"""The processes of --nprocs: exit codes, and the end of the others when one fails.

Runs with --nprocs are in test_stop.py and test_distributed.py.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path
from typing import Any

import forks
import pytest
from tiny import DEVICE, PYTHONPATH, Helped, run_script, same_bits, trained

from expbase import ConfigError
from expbase.ranks import collectives, launch


class Process:
    """One that ends with a return code; with None one that runs until it is killed."""

    def __init__(self, returncode: int | None) -> None:
        ending = f"kill {returncode} $$" if (returncode or 0) < 0 else f"exit {returncode}"
        script = "exec sleep 1000" if returncode is None else ending
        self._process = subprocess.Popen(["sh", "-c", script])
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # as multiprocessing does it; Popen would collect it

    def join(self) -> None:
        self.exitcode = self._process.wait()
        os.close(self.sentinel)


ANSWERS = [
    ([0, 0], 0),
    ([143, 0], 143),  # stopped
    ([0, -15], 143),  # by a signal that nobody handled
    ([124, 1], 1),  # a failure says more than a stop
    ([1, 78], 78),  # and a mistake more than that
    ([-9, 0], 137),  # as a shell shows it
    ([1, -9], 137),  # who loses it fails
    ([0, 124], 124),
]


def test_the_answer_is_the_code_of_a_failure_else_of_a_stop() -> None:
    for exitcodes, answer in ANSWERS:
        assert launch._join([Process(code) for code in exitcodes]).code == answer, exitcodes


def test_no_wait_is_without_limit_because_a_signal_may_be_heard_at_its_end_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def noted(sentinels: list[int], timeout: float | None) -> list[Any]:
        limits.append(timeout)
        return connection.wait(sentinels, timeout)

    monkeypatch.setattr(launch, "wait", noted)
    assert launch._join([Process(0), Process(0)]).code == 0
    assert limits
    assert None not in limits


INHERITED: list[str] = []


def begun(pid: int, way: str) -> None:
    """Asserts what a rank must not have of its parent; one has something to do at its exit."""
    assert ["fork"] * (way == "fork") == INHERITED
    assert (os.getppid(), collectives.world_size()) == (pid, 2)
    assert sorted(map(signal.getsignal, (signal.SIGTERM, signal.SIGUSR1))) == [signal.SIG_DFL] * 2
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    atexit.register(print, "left rank", collectives.rank())
    if collectives.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def begin(way: str) -> int:
    """Starts two ranks; called in a process of its own."""
    assert collectives.world_size() == 1  # paddle remembers it
    INHERITED.append(way)
    launch._GRACE_SECONDS = forks.LONG_SECONDS  # rank 0 may not have begun when rank 1 ends
    atexit.register(os._exit, 8)
    if way == "spawn":  # of several threads a fork would have one
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    outcome = launch.spawn(begun, (os.getpid(), way), 2, "cpu", launch.StopSignals())
    atexit.unregister(os._exit)
    return outcome.code


@pytest.mark.long
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_rank_has_no_handlers_no_rank_and_no_exit_functions_of_its_parent(way: str) -> None:
    code = "import sys, test_launch; sys.exit(test_launch.begin(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    result = forks.run([sys.executable, "-c", code, way], env=environment)
    assert result.returncode == 143, result.stderr
    assert result.stdout == "left rank 0\n"
    assert result.stderr.splitlines()[-1] == "rank 1 was killed by SIGTERM"


# Ranks that wait in C at their first collective, where libraries connect them; with Python's lock.
WAITING = """
import ctypes, os
import paddle
from tiny import Tiny
from expbase import main


def wait(values, value):
    os.write(1, b".")
    lock = ctypes.create_string_buffer(64)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(lock)


paddle.distributed.all_gather_object = wait

if __name__ == "__main__":
    main(Tiny)
"""


CTRL_C = pytest.param("SIGINT", os.killpg, 130, marks=pytest.mark.long)


@pytest.mark.parametrize(("signum", "send", "answer"), [("SIGTERM", os.kill, 143), CTRL_C])
def test_a_signal_ends_ranks_that_wait_in_c_while_they_are_being_connected(
    signum: str, send: Callable[[int, int], None], answer: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    command = [sys.executable, "train.py", "--nprocs", "2", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    how: Any = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
    with forks.Popen(command, **how, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.read(2) == b".."
            send(process.pid, signal.Signals[signum])
            said = process.communicate(timeout=forks.LONG_SECONDS)[1].decode()
        finally:
            process.kill()
    assert process.returncode == answer, said
    for rank in range(2):
        assert re.search(f"rank {rank} was killed by SIG(TERM|INT)", said)


def test_when_a_process_fails_those_that_go_on_are_killed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)
    for exitcode in (1, -11, -15):
        going_on = [Process(None), Process(None)]
        deaths = launch._join([going_on[0], Process(exitcode), going_on[1]]).deaths
        assert [process.exitcode for process in going_on] == [-9, -9], exitcode
        text = "rank 2 did not end when another one had failed, and was killed"
        assert deaths[-1] == text, exitcode


def test_the_last_line_names_the_rank_that_died_by_a_signal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch._join([Process(0), Process(-9)])
    assert capsys.readouterr().err == "rank 1 was killed by SIGKILL\n"


def test_auto_is_the_largest_divisor_of_the_shares_for_which_there_are_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In the place of a new process, which would not know of this.
    monkeypatch.setattr(launch, "ProcessPoolExecutor", lambda number, way: ThreadPoolExecutor())
    for shares, devices, number in ((8, 1, 1), (8, 3, 2), (8, 7, 4), (8, 64, 8), (1, 4, 1)):
        for kind in ("cpu", "gpu"):
            monkeypatch.setattr(launch, "number_of_devices", {kind: devices}.__getitem__)
            assert launch._most_processes(shares, kind) == number, (shares, devices, kind)


@pytest.mark.pretend
def test_auto_takes_each_device_and_the_ranks_have_the_bits_of_one(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(script.read_text().replace("Tiny", "Helped"))
    monkeypatch.setenv("PRETEND_DEVICES", "2")
    words = ["--nprocs", "auto", "--output", str(script.parent / "run")]
    training = {"shares": 2, "max_iteration": 2, "valid_interval": 0, "log_interval": 0}
    words += [f"training.{key}={value}" for key, value in training.items()]
    result = run_script(script, *words)
    assert result.returncode == 0, result.stderr
    assert f"--nprocs auto: 2 (2 shares, 2 {DEVICE} devices)" in result.stderr
    assert f"{DEVICE}:0, ranks: 2" in result.stderr
    assert "FatalError" not in result.stderr  # of paddle, in a process that is ended by SIGTERM
    trained(Helped, script.parent / "one", **training)
    end = "checkpoints/step-00000002"
    same_bits(script.parent / "run" / end, script.parent / "one" / end)


@pytest.mark.pretend
def test_more_processes_than_devices_are_refused_with_their_number() -> None:
    text = f"--nprocs: 5 given; expected at most 4, one process for each {DEVICE} that this one"
    with pytest.raises(ConfigError, match=text):
        launch.spawn(print, (), 5, DEVICE, launch.StopSignals())


PACKAGE = """
import threading
from expbase.ranks import launch

class Answer:
    pass

def tell(answer):
    assert type(answer).__name__ == "Answer"

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # else it would be forked
    raise SystemExit(launch.spawn(tell, (Answer(),), 1, "cpu", launch.StopSignals()).code)
"""


@pytest.mark.long
def test_what_python_m_package_defines_is_found_by_a_process_that_is_spawned(
    tmp_path: Path,
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/__main__.py").write_text(PACKAGE)
    command = [sys.executable, "-W", "ignore", "-m", "package"]
    result = forks.run(command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Exception ignored" not in result.stderr  # of paddle, whose own end was left out


def test_a_script_that_a_rank_imports_must_not_start_the_ranks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Multiprocessing notes so while it imports the script."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=r'expected `if __name__ == "__main__":` before'):
        launch.StopSignals().installed()
