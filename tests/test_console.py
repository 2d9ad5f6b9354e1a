"""The live line, in a real terminal, beside what is written meanwhile; and where it must not be."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import terminal

from expbase.console import is_terminal

SCRIPT = """
import sys, time
import numpy as np, paddle
from paddle.io import DataLoader, Dataset
from expbase import ExperimentBase, main

class Loud(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        if index % 50 == 0:
            print(f"worker says {index}", flush=True)
            print("and complains to", type(sys.stderr).__name__, file=sys.stderr, flush=True)
        return np.ones(2, "float32")

class Slow(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Loud(), batch_size=4, num_workers=WORKERS)
    def setup_model(self):
        self.model = paddle.nn.Linear(2, 1)
        self.optimizer = paddle.optimizer.SGD(0.001, parameters=self.model.parameters())
    def train_batch(self):
        loss = self.model(self.read_batch()).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)
        time.sleep(0.02)
        if self.iteration == 20:
            print("said by train_batch", "x" * 100 + "end")
        AT_TWENTY
    def valid(self):
        return {"accuracy": 0.5}

if __name__ == "__main__":
    main(Slow)
"""


def script(folder: Path, *, workers: int = 0, at_twenty: str = "pass") -> list[str]:
    """The command of a run of 60 iterations, with a line of the log for each."""
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("WORKERS", str(workers)).replace("AT_TWENTY", at_twenty))
    words = ["max_iteration=60", "valid_interval=25", "save_interval=50", "log_interval=1"]
    options = [f"training.{word}" for word in words]
    return [sys.executable, str(path), "--output", str(folder / "run"), "--device=cpu", *options]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_one_line_that_moves_and_keeps_what_is_worth_it(
    tmp_path: Path, columns: int
) -> None:
    with terminal(script(tmp_path), columns) as shown:
        text = shown.wait(lambda text: "said by" in text and re.search(r"train [345]\d/60", text))
        last = text.splitlines()[-1]
        assert re.search(r"^train \d+/60 .*epoch 1  loss -?\d.* left  \S+ it/s", last)
        assert columns - 6 <= len(last) <= columns - 3 if columns == 80 else len(last) > 80
        assert last.endswith(" MB")
        assert text.count("it/s") == 1
        assert not shown.screen.cursor.hidden  # after a kill -9 nobody would show it again
        assert "x" * 100 + "end" in shown.text.replace("\n", "")  # not broken into words
        end = shown.wait()
    assert shown.exit_code == 0
    assert not shown.screen.cursor.hidden
    assert "it/s" not in end
    assert "[25] epoch=1 valid/accuracy=0.5" in end
    assert "train/loss" not in end  # the live line said it
    assert re.search(r"time +\S+ s: training \d+%, data \d+%, logging", end)
    assert re.search(r"\[60\] FINISHED: epoch 1", end.splitlines()[-1] + end.splitlines()[-2])
    log = (tmp_path / "run/worker_0.log").read_text()
    assert log.count("train/loss") == 60


def test_a_pipe_gets_plain_lines_and_all_of_them(tmp_path: Path) -> None:
    result = subprocess.run(script(tmp_path), capture_output=True, timeout=100)
    assert result.returncode == 0
    for data in (result.stdout, result.stderr):
        assert b"\r" not in data
        assert b"\x1b" not in data
    assert result.stderr.count(b"train/loss") == 60


def test_workers_write_to_the_terminal_and_do_not_hang(tmp_path: Path) -> None:
    with terminal(script(tmp_path, workers=2)) as shown:
        end = shown.wait()
    assert shown.exit_code == 0
    assert "worker says 150" in end
    assert "and complains to TextIOWrapper" in end  # not to rich's, with a lock nobody opens
    assert "FileProxy" not in end


def test_what_is_printed_into_a_file_stays_off_the_terminal(tmp_path: Path) -> None:
    command = shlex.join(script(tmp_path))
    with terminal(["/bin/sh", "-c", f"{command} > {tmp_path}/printed"]) as shown:
        end = shown.wait()
    assert "said by train_batch" in (tmp_path / "printed").read_text()
    assert "said by train_batch" not in end


def test_a_debugger_has_the_terminal_for_itself(tmp_path: Path) -> None:
    command = script(tmp_path, at_twenty="if self.iteration == 20: breakpoint()")
    with terminal(command) as shown:
        text = shown.wait(lambda text: text.endswith("(Pdb)"))
        assert "it/s" not in text
        shown.type("self.iteration\n")
        assert shown.wait(lambda text: text.endswith("(Pdb)") and "\n20\n" in text)
        shown.type("c\n")
        end = shown.wait()
    assert shown.exit_code == 0
    assert "train/loss" in end  # lines again, since the live one is gone


def test_the_error_of_a_run_stands_below_its_log(tmp_path: Path) -> None:
    with terminal(script(tmp_path, at_twenty="assert self.iteration < 20, 'too far'")) as shown:
        end = shown.wait()
    assert shown.exit_code == 1
    assert "AssertionError: too far" in end.splitlines()[-1]
    assert "it/s" not in end


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_of_few_letters_is_no_error(tmp_path: Path, encoding: str) -> None:
    with terminal(script(tmp_path), LC_ALL="C", PYTHONIOENCODING=encoding) as shown:
        end = shown.wait()
    assert shown.exit_code == 0
    assert "Error" not in end


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
