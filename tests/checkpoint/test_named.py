"""Checkpoints by their names: of a run, in it, one of its iterations, the last, the best."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import Tiny, curve, make, trained

from expbase.checkpoint import layout
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.named import find_in_run


def test_another_runs_state_is_continued_in_a_new_place(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "first", max_iteration=4)
    for where in ("first", "first/checkpoints", "first/checkpoints/step-00000004"):
        output = tmp_path / f"new-{where.replace(chr(47), chr(45))}"
        exp = trained(Tiny, output, {"checkpoint_path": str(tmp_path / where)}, max_iteration=6)
        assert list(curve(output, "train/loss")) == [5, 6]
        assert exp.iteration == 6


def test_checkpoint_path_takes_the_names_that_evaluate_takes(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", monitor="accuracy", save_interval=3, valid_interval=3)
    best = layout.iteration_of(find_in_run(tmp_path / "run", "best"))
    for name, iteration in {
        "best": best, "last": 6, "step-3": 3, "3": 3, "checkpoints/step-3": 3, "step-00000006": 6,
    }.items():  # fmt: skip
        exp = make(Tiny, tmp_path / "new", {"checkpoint_path": str(tmp_path / "run" / name)})
        exp.setup()
        exp.resume_or_load()
        assert exp.iteration == iteration, name
        exp.close()
    for name, text in (("7", "there are: step-00000003"), ("bset", "no intact checkpoint there")):
        with pytest.raises(CheckpointError, match=text):
            trained(Tiny, tmp_path / "new", {"checkpoint_path": str(tmp_path / "run" / name)})


@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_a_checkpoint_path_without_a_checkpoint_is_an_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    if what == "file":
        path.write_text("x")
    with pytest.raises(CheckpointError, match="no intact checkpoint there; expected a directory"):
        trained(Tiny, tmp_path / "run", {"checkpoint_path": str(path)})


def test_a_foreign_run_is_read_without_changing_anything_in_it(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "theirs", max_iteration=4)
    (tmp_path / "theirs/checkpoints/step-00000004/state.json").write_text("damaged")
    before = sorted(str(path) for path in (tmp_path / "theirs").rglob("*"))
    args = {"checkpoint_path": str(tmp_path / "theirs")}
    trained(Tiny, tmp_path / "ours", args, max_iteration=3)
    assert sorted(str(path) for path in (tmp_path / "theirs").rglob("*")) == before
    log = (tmp_path / "ours/worker_0.log").read_text()
    assert "theirs/checkpoints/step-00000002" in log
