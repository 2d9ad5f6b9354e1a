"""A process that user code forks is not the run, however it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forks
from tiny import TESTS, ledger, same_bits

SCRIPT = """
import os, signal, sys
from paddle.io import DataLoader
from tiny import Tiny
from expbase import main

class Forking(Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        dataset = self.train_loader.dataset
        self.train_loader = DataLoader(dataset, batch_size=4, num_workers=1)
        self.valid_loader = DataLoader(dataset, batch_size=4, num_workers=1)

    def fork(self, leave):
        if "ALONE" in os.environ:
            return
        child = os.fork()
        if not child:
            signal.alarm(60)  # it may wait for a thread that it lacks
            leave()
        print("left", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

    def train_batch(self):
        super().train_batch()
        leaves = {1: lambda: sys.exit(3), 2: lambda: 1 / 0, 3: lambda: sys.exit("a text")}
        if self.iteration in leaves:
            self.fork(leaves[self.iteration])

    def valid(self):
        for number, batch in enumerate(self.valid_batches()):
            if number == 2:
                self.fork(sys.exit)
            self.log(accuracy=float(batch[0].sum()))
        saved = self.output_dir / "checkpoints/step-00000002"  # none is due there
        print("saved" if saved.exists() else "not saved", flush=True)

    def on_train_end(self):
        print("on_train_end", flush=True)
        self.fork(self.close_and_leave)

    def close_and_leave(self):
        self.close()
        os._exit(5)

    def on_exception(self, error):
        print("on_exception", flush=True)

    def terminal(self):
        super().terminal()
        print("terminal", flush=True)

main(Forking)
"""


def run(folder: Path, **variables: str) -> tuple[list[str], str]:
    """What it prints, its log aside, and its errors."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = ["--device", "cpu", "--output", "run", "training.max_iteration=4"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    with forks.Popen(
        [sys.executable, "train.py", *words, "training.valid_interval=2"],
        cwd=folder, env={**environment, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        said, errors = process.communicate(timeout=forks.LONG_SECONDS)
    assert process.returncode == 0, errors
    return said.splitlines(), errors


def test_a_fork_that_leaves_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    said, errors = run(tmp_path / "run")
    first = ["left 3", "left 1", "left 0", "not saved"]
    second = ["left 1", "left 0", "not saved", "on_train_end", "left 5", "terminal"]
    assert said == first + second
    assert errors.count("ZeroDivisionError: division by zero") == errors.count("a text\n") == 1
    ends = [record for record in ledger(tmp_path / "run/run") if record["event"] == "end"]
    assert [(end["iteration"], end["reason"]) for end in ends] == [(4, "finished")]
    assert "Error" not in (tmp_path / "run/run/worker_0.log").read_text()
    assert run(tmp_path / "alone", ALONE="1")[0] == [*["not saved"] * 2, "on_train_end", "terminal"]
    same_bits(*(tmp_path / name / "run/checkpoints/step-00000004" for name in ("run", "alone")))
