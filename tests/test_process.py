"""What a tool starts ends with it, and a script runs in a tool as python would run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from expbase.tools.process import ended_by_signals, kill, run_program


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


def test_a_script_has_its_words_and_its_folder_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["a tool's", *sys.path])
    code = "import sys\nprint(__name__, sys.argv, sys.path[0])\n"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train.py").write_text(code)
    (tmp_path / "module_with_words.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    run_program(["scripts/train.py", "--output", "a"])
    words = ["scripts/train.py", "--output", "a"]
    assert capsys.readouterr().out == f"__main__ {words} {tmp_path}/scripts\n"
    run_program(["-m", "module_with_words", "b"])
    module = [f"{tmp_path}/module_with_words.py", "b"]
    assert capsys.readouterr().out == f"__main__ {module} {tmp_path}\n"
