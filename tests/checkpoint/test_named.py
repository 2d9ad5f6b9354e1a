"""Checkpoints by their names: of a run, in it, one of its iterations, the last, the best."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny import Tiny, curve, make, trained

from expbase.checkpoint import layout
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.named import find_in_run


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of 3 and 6."""
    run = tmp_path_factory.mktemp("named") / "run"
    trained(Tiny, run, monitor="accuracy", save_interval=3, valid_interval=3)
    return run


def test_another_runs_state_is_continued_in_a_new_place(tmp_path: Path, first: Path) -> None:
    exp = trained(Tiny, tmp_path, {"checkpoint_path": str(first)}, max_iteration=8)
    assert list(curve(tmp_path, "train/loss")) == [7, 8]
    assert exp.iteration == 8


def test_checkpoint_path_takes_the_names_that_evaluate_takes(tmp_path: Path, first: Path) -> None:
    best = layout.iteration_of(find_in_run(first, "best"))
    for name, iteration in {
        "best": best, "last": 6, "step-3": 3, "3": 3, "checkpoints/step-3": 3, "step-00000006": 6,
        "checkpoints": 6, "checkpoints/step-00000006": 6,
    }.items():  # fmt: skip
        exp = make(Tiny, tmp_path / "new", {"checkpoint_path": str(first / name)})
        exp.setup()
        exp.resume_or_load()
        assert exp.iteration == iteration, name
        exp.close()


@pytest.mark.parametrize("what", ["7", "bset", "missing", "empty", "worker_0.log"])
def test_a_checkpoint_path_without_a_checkpoint_is_an_error(
    tmp_path: Path, first: Path, what: str
) -> None:
    (tmp_path / "empty").mkdir()
    path = (tmp_path if what in ("missing", "empty") else first) / what
    text = "no intact checkpoint there" if path.exists() else "no such directory"
    text = f"{path}: {text}; expected the output directory of a run"
    with pytest.raises(CheckpointError, match="there are: step-00000003" if what == "7" else text):
        trained(Tiny, tmp_path / "run", {"checkpoint_path": str(path)})


def test_a_foreign_run_is_read_without_changing_anything_in_it(tmp_path: Path, first: Path) -> None:
    theirs = shutil.copytree(first, tmp_path / "theirs")
    (theirs / "checkpoints/step-00000006/state.json").write_text("damaged")
    before = sorted(str(path) for path in theirs.rglob("*"))
    trained(Tiny, tmp_path / "ours", {"checkpoint_path": str(theirs)}, max_iteration=4)
    assert sorted(str(path) for path in theirs.rglob("*")) == before
    log = (tmp_path / "ours/worker_0.log").read_text()
    assert "theirs/checkpoints/step-00000003" in log
