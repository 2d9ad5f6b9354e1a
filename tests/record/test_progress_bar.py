"""The progress bar, on a screen, beside what is written meanwhile; and where it must not be."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from paddle.io import DataLoader
from terminal import terminal
from tiny import PYTHONPATH, Points, Tiny, trained

from expbase.engine import report
from expbase.record.progress_bar import is_terminal, progress_bar

DEBUGGED = """
from tiny import Tiny
from expbase import main

class Debugged(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 20:
            breakpoint()
        assert self.iteration < 30, "too far"

if __name__ == "__main__":
    main(Debugged)
"""


Screen = Callable[[], str]
LAST = "epoch=1 train/loss=0.25 speed/steps_per_second=45"


@contextlib.contextmanager
def a_screen(columns: int = 80, encoding: str = "utf-8") -> Iterator[Screen]:
    """Lets sys.stdout and sys.stderr be a terminal; yields what is on its screen, to be asked."""
    reader, writer = pty.openpty()
    shown = pyte.Screen(columns, 60)
    stream = pyte.ByteStream(shown)

    def look() -> str:
        # A title comes after all that was written: what a terminal is given takes a while.
        shown.title = ""
        os.write(writer, b"\x1b]2;all\x07")
        while not shown.title:
            stream.feed(os.read(reader, 1 << 16))
        assert not shown.cursor.hidden  # after a kill -9 nobody would show it again
        return "\n".join(line.rstrip() for line in shown.display).rstrip()

    # Not in a fixture: pytest puts its own streams in place between a fixture and its test.
    with pytest.MonkeyPatch.context() as patch, open(writer, "w", 1, encoding) as written:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", written)
        patch.setattr(sys, "stderr", written)
        yield look
    os.close(reader)


@contextlib.contextmanager
def a_bar() -> Iterator[None]:
    """Shows one at half of its way."""
    with progress_bar(20, 60) as show:
        show(completed=30, description=LAST)
        yield


@pytest.mark.parametrize(("columns", "encoding"), [(80, "utf-8"), (120, "ascii"), (80, "latin-1")])
def test_what_is_printed_stands_above_the_bar(columns: int, encoding: str) -> None:
    with a_screen(columns, encoding) as screen:
        with a_bar():
            print("printed", "x" * 150 + "end")
            text = screen()
        end = screen()
    last = text.splitlines()[-1]
    assert last.startswith("train 30/60 ")
    assert "epoch=1 train/loss=0.25" in last
    assert text.count("train/loss") == 1
    assert "printed " + "x" * 150 + "end" in text.replace("\n", "")  # not broken into words
    assert "train" not in end
    assert "printed" in end


def test_a_narrow_terminal_cuts_off_what_is_least_important() -> None:
    with a_screen(40) as screen, a_bar():
        last = screen().splitlines()[-1]
    assert last.startswith("train 30/60 ")
    assert len(last) <= 40


def test_what_is_printed_into_a_file_stays_off_the_terminal() -> None:
    file = io.StringIO()
    with a_screen() as screen, contextlib.redirect_stdout(file), a_bar():
        print("into the file")
        text = screen()
    assert "into the file" not in text
    assert file.getvalue() == "into the file\n"


def failing() -> None:
    with a_bar():
        print("before")
        raise ArithmeticError


def test_an_error_removes_the_bar() -> None:
    with a_screen() as screen:
        with pytest.raises(ArithmeticError):
            failing()
        assert screen() == "before"


class Loud(Points):
    """The worker that reads the first sample says so."""

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            print("worker says", index, flush=True)
            print("and complains to", type(sys.stderr).__name__, file=sys.stderr, flush=True)
        return super().__getitem__(index)


def test_a_run_shows_a_bar_that_moves_and_its_workers_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shown(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = DataLoader(Loud(), batch_size=4, num_workers=2)

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 5:
                print("said by train_batch", "x" * 100 + "end")
            seen.append(screen())

    monkeypatch.setattr(report, "_MOVE_SECONDS", -1.0)  # each time, however fast it is
    seen: list[str] = []
    with a_screen() as screen:
        trained(Shown, tmp_path / "run", max_iteration=10, valid_interval=8, save_interval=0)
        end = screen()
    # The worker draws the bar anew, and does not know where training is.
    assert "worker says 0" in seen[0]
    assert "and complains to" in seen[0]
    assert "train  0/10" not in seen[0]
    for number, text in enumerate(seen[1:], 1):
        assert re.search(rf"^train +{number}/10 .*train/loss=.*", text, re.MULTILINE)
    assert "said by train_batch" in end
    assert re.search(r"\[8\] epoch=1 valid/accuracy=[\d.]+", end)
    assert "train/loss" not in end  # the bar said it
    assert re.search(r"time +\S+ s\n", end)
    assert re.search(r"\[10\] FINISHED: epoch 1", end.splitlines()[-1] + end.splitlines()[-2])
    assert (tmp_path / "run/worker_0.log").read_text().count("train/loss") == 10


@pytest.mark.long
def test_a_debugger_can_be_used_and_an_error_comes_last(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEBUGGED)
    command = [sys.executable, str(tmp_path / "train.py"), "--output", str(tmp_path / "run")]
    command += ["training.max_iteration=60", "--device=cpu"]
    with terminal(command, PYTHONPATH=PYTHONPATH) as shown:
        shown.wait(lambda text: "(Pdb)" in text)
        shown.type("self.iteration\n")
        assert shown.wait(lambda text: "\n20\n" in text)
        shown.type("c\n")
        end = shown.wait()
    assert shown.exit_code == 1
    assert "AssertionError: too far" in end.splitlines()[-1]


def test_without_a_terminal_a_run_writes_plain_lines_and_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run")
    said = capsys.readouterr()
    assert not re.search(r"[\r\x1b]", said.out + said.err)
    assert said.err.count("train/loss") == 6


def test_a_dumb_terminal_and_a_pipe_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Stream())
    for name in ("dumb", "unknown"):
        monkeypatch.setenv("TERM", name)
        assert not is_terminal(Stream())
    monkeypatch.delenv("TERM")
    assert not is_terminal(Stream())
