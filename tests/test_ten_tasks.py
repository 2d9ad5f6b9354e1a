"""What ten ordinary tasks need of expbase: tests/proofs/ten_tasks.py, counted and in short."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny import TESTS

NAMES = (
    *("first run", "validation", "resume", "two processes", "an image"),
    *("early stopping", "best checkpoint", "accumulation", "warm-up", "a loop of one's own"),
)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "proofs"))
    return importlib.import_module("ten_tasks")


def test_ten_tasks_need_few_lines_and_few_names(proof: Any) -> None:
    lines, names, table = proof.count()
    assert tuple(task.name for task in proof.TASKS) == NAMES
    assert lines <= proof.MOST_LINES == 30, table
    assert names <= proof.MOST_NAMES == 22, table


def test_a_line_counts_by_names_of_ours_and_not_by_those_of_paddle(proof: Any) -> None:
    script = (
        "class Mine(ExperimentBase):\n"
        "    def train_batch(self):\n"
        "        loss = self.net(self.read_batch()).mean()\n"
        "        loss.backward()\n"
        "        self.net.train()\n"
        "        self.backward(loss)\n"
        "        self.visualizer.add_scalar('loss', loss, self.config.training.seed)\n"
    )
    assert sorted(proof.names_in(script)) == [
        *((1, "ExperimentBase"), (2, "train_batch"), (3, "read_batch"), (6, "backward")),
        *((7, "add_scalar"), (7, "config"), (7, "seed"), (7, "visualizer")),
    ]
    command = "python -m paddle.distributed.launch train.py --evaluate best training.monitor=loss"
    assert [*proof.names_in_command(command)] == ["--evaluate", "monitor"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_task_does_what_it_promises(
    proof: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    [task] = [task for task in proof.TASKS if task.name == name]
    proof.run(task, tmp_path)
