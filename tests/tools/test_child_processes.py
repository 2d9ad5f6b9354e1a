"""What a tool starts ends with it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from expbase.tools.child_processes import ended_by_signals, kill


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_ends_the_block_and_the_handler_is_as_before(
    number: signal.Signals, code: int
) -> None:
    def interrupted() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # the second one, while things are cleaned up

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, ended_by_signals():
        interrupted()
    assert caught.value.code == code
    assert signal.getsignal(number) == before


def test_what_a_process_started_is_dead_when_it_was_killed(tmp_path: Path) -> None:
    command = f"setsid sleep 100 & echo $! > {tmp_path}/pid; echo up; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        kill(process)
        assert process.returncode == -signal.SIGKILL
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    kill(process)  # that has ended: nothing happens


def test_a_process_of_which_the_system_says_nothing_while_it_ends_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", gone)
    with subprocess.Popen(["sleep", "100"]) as process:
        kill(process)
        assert process.returncode == -signal.SIGKILL
