"""What is logged and evaluated round training is recorded: once, by name, at its iteration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle.io import DataLoader
from tiny import Helped, Points, Tiny, curve, metrics, saved, trained, validations

from expbase.__main__ import main
from expbase.checkpoint.best import best_of
from expbase.extras.all_events import AllEvents
from expbase.extras.mixins import EarlyStopping
from expbase.tools.runs import read_run

VALIDATED: dict[str, Any] = {"max_iteration": 6, "valid_interval": 3, "save_interval": 100}


def test_what_on_evaluate_end_logs_is_one_of_the_validation_s_numbers(tmp_path: Path) -> None:
    class Late(AllEvents, Tiny):
        def on_evaluate_begin(self) -> None:
            self.log(first=1.0)

        def on_evaluate_end(self, results: Any) -> None:
            assert results["first"] == 1.0
            self.log(doubled=2 * results["accuracy"])

    trained(Late, tmp_path, monitor="doubled", **VALIDATED)
    doubled = {n: 2 * value for n, value in curve(tmp_path, "valid/accuracy").items()}
    assert curve(tmp_path, "valid/doubled") == doubled
    assert "valid/doubled" in validations(tmp_path)[0]
    assert 3 in saved(tmp_path)  # it was among the best by that metric


def test_what_on_train_end_logs_is_a_last_line(tmp_path: Path) -> None:
    class Last(Tiny):
        def on_train_epoch_end(self) -> None:
            self.log(of_epoch=self.epoch)

        def on_train_end(self) -> None:
            self.log(final=0.25)

    trained(Last, tmp_path / "run", **{**VALIDATED, "max_iteration": 10})
    assert metrics(tmp_path / "run")[-1].items() >= {"iteration": 10, "train/final": 0.25}.items()
    assert curve(tmp_path / "run", "train/of_epoch") == {10: 1.0}  # it was logged after its line
    trained(Last, tmp_path / "none", **VALIDATED, log_interval=0)
    assert curve(tmp_path / "none", "train/final") == {}  # an interval of 0 means never


def test_numbers_of_a_line_that_a_later_start_writes_are_not_in_the_last_one(
    tmp_path: Path,
) -> None:
    class Stopped(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 5 and not self.resumed:
                (self.output_dir / "STOP").touch()

        def on_train_begin(self) -> None:
            self.resumed = self.iteration > 0

        def on_train_end(self) -> None:
            self.log(final=self.iteration)

    class Straight(Stopped):
        def on_train_begin(self) -> None:
            self.resumed = True

    options = {**VALIDATED, "log_interval": 4, "max_iteration": 9, "valid_interval": 0}
    trained(Straight, tmp_path / "straight", **options)
    trained(Stopped, tmp_path / "run", **options)
    first = metrics(tmp_path / "run")[-1]
    assert first["train/final"] == first["iteration"] < 9
    assert "train/loss" not in first
    trained(Stopped, tmp_path / "run", **options)
    losses = [curve(tmp_path / name, "train/loss") for name in ("straight", "run")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("place", ["setup_model", "on_setup_end", "terminal"])
def test_a_number_that_cannot_count_is_an_error(tmp_path: Path, place: str) -> None:
    def method(self: Any, *args: Any) -> None:
        getattr(super(losing, self), place)(*args)
        self.log(lost=1.0)

    when = "after the end" if place == "terminal" else "in setup"
    losing: Any = type("Losing", (AllEvents, Tiny), {place: method})
    with pytest.raises(RuntimeError, match=f"log: called {when}, where it would be lost; expected"):
        trained(losing, tmp_path, **VALIDATED)


def test_what_an_override_of_evaluate_logs_after_its_end_is_an_error(tmp_path: Path) -> None:
    class Late(Tiny):
        def evaluate(self, loader: Any = None, **options: Any) -> dict[str, float]:
            results = super().evaluate(loader, **options)
            self.log(late=1.0)
            return results

    with pytest.raises(RuntimeError, match="log: called in an evaluation after its results"):
        trained(Late, tmp_path, **VALIDATED)


class Judged(Tiny):
    """Tests the best weights at the end, as the recipe does."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.test_loader = DataLoader(Points(7), batch_size=7)
        self.other = DataLoader(Points(6), batch_size=6)

    def valid(self) -> dict[str, float]:
        for _ in self.valid_batches():
            pass
        return {"score": -float(self.iteration)}

    def on_train_end(self) -> None:
        if self.finished:
            self.load_checkpoint("best")
            self.evaluate(self.test_loader)
            self.evaluate(self.other, name="other")
            self.evaluate(self.other)  # which nobody has named


SCORED = {**VALIDATED, "monitor": "score", "keep_last": 1}


@pytest.mark.parametrize("killed", [False, True])
def test_a_last_line_of_training_stands_before_what_on_train_end_writes(
    tmp_path: Path, killed: bool
) -> None:
    class Early(EarlyStopping, Judged):
        def on_train_end(self) -> None:
            super().on_train_end()
            self.log(final=0.25)
            if killed:
                raise KeyboardInterrupt

    options = {**SCORED, "max_iteration": 60, "log_interval": 5}
    if killed:
        with pytest.raises(KeyboardInterrupt):
            trained(Early, tmp_path, **options)
        killed = False
    trained(Early, tmp_path, **options)
    names = ("train/loss", "test/score", "other/score", "train/final")
    last = [[name for name in names if name in line] for line in metrics(tmp_path)[-4:]]
    assert last == [[name] for name in names]
    assert metrics(tmp_path)[-4]["iteration"] == 12  # it stopped early


def test_the_numbers_of_a_final_test_are_recorded_with_their_checkpoint(tmp_path: Path) -> None:
    trained(Judged, tmp_path, **SCORED)
    lines = [line for line in metrics(tmp_path) if "checkpoint" in line]
    assert [{**line, "time": 0} for line in lines] == [
        {"iteration": 6, "epoch": 1, "time": 0, "checkpoint": "step-00000003", f"{word}/score": -6}
        for word in ("test", "other")
    ]
    log = (tmp_path / "worker_0.log").read_text()
    assert "[6] epoch=1 test/score=-6 of step-00000003" in log
    assert "evaluated step-00000003: [6] score=-6" in log
    assert sorted(curve(tmp_path, "valid/score")) == [3, 6]


def test_a_test_without_test_data_says_what_it_has_read(tmp_path: Path) -> None:
    class Untested(Judged):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.test_loader = None

    trained(Untested, tmp_path, **SCORED)
    log = (tmp_path / "worker_0.log").read_text()
    what = "evaluated step-00000003 on self.valid_loader (no loader was given, and self.test_loader"
    assert f"{what} is not set): [6] score=-6" in log


def test_the_last_and_the_best_weights_can_both_be_tested(tmp_path: Path) -> None:
    class Both(Judged):
        def on_train_end(self) -> None:
            self.evaluate(self.test_loader)
            super().on_train_end()

    trained(Both, tmp_path, **SCORED)
    lines = [line for line in metrics(tmp_path) if "test/score" in line]
    assert [line.get("checkpoint") for line in lines] == [None, "step-00000003"]


def test_a_validation_at_the_end_of_a_batch_counts_once_also_after_a_resume(tmp_path: Path) -> None:
    class ByHand(Tiny):
        fails = False

        def on_train_batch_end(self) -> None:
            if self.iteration % 4 == 0:
                self.evaluate()

        def valid(self) -> dict[str, float]:
            return {"score": {4: 0.9}.get(self.iteration, 0.1)}

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 6 and self.fails:
                raise ArithmeticError("once")

    options = {"max_iteration": 8, "valid_interval": 4, "save_interval": 4, "monitor": "score"}
    trained(ByHand, tmp_path / "straight", **options)
    failing: Any = type("ByHand", (ByHand,), {"fails": True})
    with pytest.raises(ArithmeticError):
        trained(failing, tmp_path / "run", **options)
    trained(ByHand, tmp_path / "run", **options)
    for run in (tmp_path / "straight", tmp_path / "run"):
        points = [line["iteration"] for line in metrics(run) if "valid/score" in line]
        assert points == [4, 8]
        assert best_of(run)[0] == (4, 0.9)
    assert validations(tmp_path / "straight") == validations(tmp_path / "run")


@pytest.mark.parametrize("name", ["train", "valid", "speed", "a/b"])
def test_a_word_that_cannot_stand_before_metrics_is_an_error(tmp_path: Path, name: str) -> None:
    class Named(Tiny):
        def on_train_epoch_begin(self) -> None:
            self.evaluate(name=name)

    with pytest.raises(ValueError, match=f"evaluate: name='{name}' given; expected a word"):
        trained(Named, tmp_path)


def test_a_validation_before_the_first_update_is_point_zero_once(tmp_path: Path) -> None:
    class Before(EarlyStopping, Tiny):
        def on_train_begin(self) -> None:
            self.evaluate()
            self.evaluate()

        def valid(self) -> dict[str, float]:
            return {"score": -float(self.iteration)}

    options = {**VALIDATED, "monitor": "score", "save_interval": 2}
    exp = trained(Before, tmp_path, **{**options, "max_iteration": 4})
    assert exp.early_stopping["best"] == -3  # it counts neither there …
    assert validations(tmp_path)[0]["iteration"] == 3  # … nor as the best
    trained(Before, tmp_path, **options)
    points = [line["iteration"] for line in metrics(tmp_path) if "valid/score" in line]
    assert points == [0, 3, 6]


def test_a_validation_by_epochs_says_how_many_have_ended(tmp_path: Path) -> None:
    # 10 batches an epoch, 3 of them in an update: the fourth update begins the second epoch.
    options = {"max_iteration": 0, "max_epoch": 3, "valid_interval": 0, "valid_every_epoch": 1}
    trained(Helped, tmp_path, **options, accumulation_steps=3, save_interval=4)
    epochs = [line["epoch"] for line in metrics(tmp_path) if "valid/accuracy" in line]
    assert epochs == [1, 2, 3]
    assert [line["epoch"] for line in validations(tmp_path)] == [*epochs, 3]
    log = (tmp_path / "worker_0.log").read_text()
    assert "[10] FINISHED: epoch 3" in log
    trained(Helped, tmp_path, **options, accumulation_steps=3, save_interval=4)
    assert "FINISHED already: iteration 10, epoch 3" in (tmp_path / "worker_0.log").read_text()


class Stopping(EarlyStopping, Judged):
    """Is never better than at first."""


@pytest.mark.parametrize("how", [pytest.param(Judged, marks=pytest.mark.long), Stopping])
def test_after_run_one_has_the_same_in_hand_however_often_it_was_given(
    tmp_path: Path, how: type[Judged]
) -> None:
    options = {**SCORED, "max_iteration": 6 if how is Judged else 60}
    first = trained(how, tmp_path, **options)
    lines = [{**line, "time": 0} for line in metrics(tmp_path)]
    record = (tmp_path / "vdlrecords.run.log").stat().st_size
    for _ in range(2):
        again = trained(how, tmp_path, **options)
        assert np.array_equal(first.model[0].weight.numpy(), again.model[0].weight.numpy())
        assert again.finished
        assert again.iteration == first.iteration
        tests = [line for line in metrics(tmp_path) if "test/score" in line]
        assert len(tests) == 1
        assert len(metrics(tmp_path)) == len(lines)
        if how is Judged:
            assert (tmp_path / "vdlrecords.run.log").stat().st_size == record


def test_a_train_that_counts_no_iteration_is_an_error_before_anything_is_saved(
    tmp_path: Path,
) -> None:
    class Uncounted(Tiny):
        def train(self) -> None:
            for _ in range(8):
                self.train_batch()

    with pytest.raises(RuntimeError, match=r"train: made updates and counted no iteration.*while"):
        trained(Uncounted, tmp_path)
    assert saved(tmp_path) == []


def test_a_loop_of_one_s_own_that_counts_by_itself_is_told_what_it_lacks(tmp_path: Path) -> None:
    class Counting(Tiny):
        def train(self) -> None:
            for _ in range(self.iteration, 8):
                self.iteration += 1
                self.train_batch()

    trained(Counting, tmp_path)
    log = (tmp_path / "worker_0.log").read_text()
    assert "train: made 8 iterations without going_on() and end_iteration()" in log
    assert saved(tmp_path) == [8]


def test_ls_shows_the_final_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(Judged, tmp_path / "run", **SCORED)
    assert read_run(tmp_path / "run", "run").tested == "step-00000003"
    assert main(["ls", str(tmp_path)]) == 0
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert row[head.index("test")] == "score=-6"


class Removing(Tiny):
    """Loses its logs after an iteration, before its validation and its checkpoint."""

    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 5:
            for name in ("metrics.jsonl", "validations.jsonl", "vdlrecords.run.log"):
                (self.output_dir / name).unlink()


def test_logs_that_are_removed_while_it_runs_are_told_once_and_what_follows_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"valid_interval": 2, "log_interval": 1, "save_interval": 2, "max_iteration": 8}
    trained(Removing, tmp_path, **options)
    told = [line for line in capsys.readouterr().err.splitlines() if "removed or cut" in line]
    names = ["metrics.jsonl", "validations.jsonl", "vdlrecords.run.log"]
    assert sorted(line.partition(": ")[0].rpartition("/")[2] for line in told) == names
    assert {line["iteration"] for line in metrics(tmp_path)} == {6, 7, 8}
    scores = validations(tmp_path)
    assert [(line["iteration"], line["monitor"]) for line in scores] == [(6, ""), (8, ""), (8, "")]


def test_logs_that_are_shorter_than_at_the_checkpoint_are_told_at_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"valid_interval": 2, "log_interval": 1, "save_interval": 2}
    trained(Tiny, tmp_path, **options, max_iteration=4)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "validations.jsonl").write_text("")
    os.truncate(tmp_path / "vdlrecords.run.log", 10)
    told = []
    for last in (4, 6, 8):  # nothing is left to train; it goes on; nothing was removed since
        capsys.readouterr()
        trained(Tiny, tmp_path, **options, max_iteration=last)
        lines = capsys.readouterr().err.splitlines()
        told.append([line.split()[5] for line in lines if "WARNING: the file of" in line])
    assert told[0] == ["metrics", "visualdl", "validations"]
    assert told[1][:2] == ["metrics", "visualdl"]
    assert told[2] == []
    (tmp_path / "ledger.jsonl").unlink()  # as of a run of which only the checkpoints were copied
    (tmp_path / "metrics.jsonl").unlink()
    trained(Tiny, tmp_path, **options, max_iteration=10)
    assert "WARNING: the file" not in capsys.readouterr().err
