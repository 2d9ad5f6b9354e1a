"""A rank that stands still says where."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from tiny import Tiny, ledger, run_script, trained, wait_until

from expbase.ranks import hang
from expbase.ranks.hang import watching


class Clock:
    """One that stands still, however slow the machine is, but where a test hangs."""

    now = 0.0

    def wait_for(self, path: Path, text: str) -> None:
        """Returns when the text has come into the file."""
        wait_until(lambda: self.goes_on() and path.exists() and text in path.read_text())

    def goes_on(self) -> bool:
        self.now += 0.1
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of those who watch."""
    clock = Clock()
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


ENDLESS = """
import time
from types import SimpleNamespace
from tiny import Tiny
from expbase import main
from expbase.ranks import hang

hang.time = SimpleNamespace(monotonic=lambda: now)  # it stands still but where the run hangs
now = 0.0

class Hanging(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3:
            self.hang_for_ever()

    def hang_for_ever(self):
        global now
        while True:
            now += 0.1
            time.sleep(0.01)

if __name__ == "__main__":
    main(Hanging)
"""


def test_a_run_that_hangs_says_where_and_goes_on(tmp_path: Path, clock: Clock) -> None:
    class Hanging(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.where_it_hangs()

        def where_it_hangs(self) -> None:
            clock.wait_for(self.output_dir / "worker_0.log", "where_it_hangs")

        def valid(self) -> Any:
            next(iter(self.valid_batches()))
            clock.wait_for(self.output_dir / "worker_0.log", "phase=valid")
            return {"accuracy": 1}

    exp = trained(Hanging, tmp_path, hang_seconds=1, valid_interval=4, max_iteration=4)
    log = (tmp_path / "worker_0.log").read_text()
    assert "no progress for 1 s: phase=train iteration=3 batch_in_epoch=3" in log
    assert "phase=valid iteration=4 batch_in_epoch=4 evaluated_batches=1" in log
    assert 'test_hang.py", line' in log
    assert log.count("no progress") == 2
    assert exp.iteration == 4
    assert "[4] FINISHED" in log
    assert not [t for t in threading.enumerate() if t.name == "expbase-hang"]


def test_what_moves_is_never_reported_and_zero_means_never(tmp_path: Path) -> None:
    counter = {"n": 0}

    def progress() -> dict[str, int]:
        counter["n"] += 1
        return dict(counter)

    path = tmp_path / "log"
    with watching(0.02, progress, logging.Logger("test"), path):
        wait_until(lambda: counter["n"] >= 20)
    assert not path.read_text()
    names: list[str] = []

    class Unwatched(Tiny):
        def on_train_begin(self) -> None:
            names.extend(thread.name for thread in threading.enumerate())

    trained(Unwatched, tmp_path / "run", hang_seconds=0, max_iteration=1)
    assert "expbase-hang" not in names


def test_a_hang_in_code_that_holds_pythons_lock_says_where_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "_LATER_SECONDS", 0.0)
    path = tmp_path / "log"
    # Of another process: none of Python's runs in this one until the stacks are there.
    seen = f"for i in $(seq 200); do grep -q Timeout {path} && break; sleep 0.05; done; echo"
    with (
        forks.Popen(["sh", "-c", seen], stdout=subprocess.PIPE) as process,
        watching(0.05, lambda: {"iteration": 3}, logging.Logger("test"), path),
    ):
        assert process.stdout is not None
        ctypes.PyDLL(None).read(process.stdout.fileno(), ctypes.create_string_buffer(1), 1)
    _, _, stacks = path.read_text().partition("Timeout")
    assert "in test_a_hang_in_code_that_holds_pythons_lock_says_where_too" in stacks


def test_with_the_action_end_a_run_that_hangs_ends_and_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    words = ["--output", "run", "training.hang_seconds=1", "training.hang_action=end"]
    assert run_script(script, *words).returncode == 1
    log = (tmp_path / "run/worker_0.log").read_text()
    text = "no progress for 1 s: phase=train iteration=3 batch_in_epoch=3 evaluated_batches=0"
    assert f"{text}. The stacks of all threads are in worker_0.log; this rank ends." in log
    assert "in hang_for_ever" in log
    end = ledger(tmp_path / "run")[-1]
    assert (end["event"], end["iteration"], end["exit_code"]) == ("end", 3, 1)
    assert end["reason"] == text
