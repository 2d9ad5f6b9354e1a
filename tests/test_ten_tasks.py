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
    assert lines == proof.MOST_LINES == 31, table
    assert names == proof.MOST_NAMES == 24, table


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


def test_names_of_others_are_counted_as_ours_are_with_keywords_and_keys_of_a_dict(
    proof: Any,
) -> None:
    script = (
        "from lightning import LightningModule, Trainer\n"
        "class Mine(LightningModule):\n"
        "    def training_step(self, batch):\n"
        "        self.net.train()\n"
        "        return {'scheduler': self.rate, 'mine': Trainer(devices=2)}\n"
    )
    names = proof.others.LIGHTNING.names
    assert sorted(proof.names_of_others_in(script, names)) == [
        *((1, "LightningModule"), (1, "Trainer"), (2, "LightningModule"), (3, "training_step")),
        *((5, "Trainer"), (5, "devices"), (5, "scheduler")),
    ]


def test_the_table_has_four_columns_by_one_rule(proof: Any) -> None:
    _, _, table = proof.count()
    rows = {row[:20].strip(): row[20:].split() for row in table[: len(NAMES) + 2]}
    assert rows["lines names +plain"] == ["expbase", "Lightning", "Fabric", "Model.fit"]
    # By hand, as lines, new names, plain lines. Lightning's: import and Trainer(callbacks=…), of
    # which ModelCheckpoint has made `callbacks` known.
    assert rows["early stopping"] == "3 2 +0 2 2 +0 0 0 +6 2 2 +0".split()
    assert rows["accumulation"] == "2 2 +0 1 1 +0 2 2 +2 1 1 +0*".split()
    assert rows["a loop of one's own"] == "4 3 +1 -* 0 0 +0 2 1 +1*".split()
    assert rows["in all"] == "31 24 +15 31 26 +19 22 16 +40 24 19 +21".split()  # docs/proofs.md
    for library in proof.others.LIBRARIES:
        tasks = [task for task in proof.tasks_of(library) if task]
        assert {name for task in tasks for name in task.names()} == library.names  # none is idle
        assert {*library.changes, *library.falls_short, *library.commands} <= {*NAMES}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_each_task_does_what_it_promises(
    proof: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    [task] = [task for task in proof.TASKS if task.name == name]
    proof.run(task, tmp_path)
