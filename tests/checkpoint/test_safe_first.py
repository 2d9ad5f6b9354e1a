"""What was trained is safe before anything else: the checkpoint stands before the validation."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from test_loop import ByEpochs
from tiny import DEVICE, Notes, Tiny, curve, run_script, same_bits, trained, validations

from expbase import Config, on
from expbase.checkpoint import layout
from expbase.checkpoint.layout import NonFiniteError
from expbase.checkpoint.named import find_in_run
from expbase.extras.all_events import AllEvents


class Broken(Exception):
    """What a test breaks an experiment with."""


class Eventful(AllEvents, Tiny):
    """Everything that follows a checkpoint changes the state and draws random numbers."""

    breaks_at: tuple[tuple[str, int], ...] = ()  # places and iterations, each once
    failure: type[BaseException] | None = Broken  # None: SIGTERM
    validations: list[int]

    def setup_model(self) -> None:
        super().setup_model()
        rate = paddle.optimizer.lr.ReduceOnPlateau(0.01, factor=0.5, patience=1)
        self.optimizer = paddle.optimizer.Adam(rate, parameters=self.model.parameters())
        self.rate, self.noise, self.marks = rate, 0.0, 0
        self.register_stateful("noise", "marks")
        self.validations = Notes()

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        loss = paddle.nn.functional.cross_entropy(self.model(points + self.noise), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)

    def reach(self, place: str) -> None:
        """Breaks the experiment if it is to be broken here."""
        if self.breaks_at[:1] == ((place, self.iteration),):
            type(self).breaks_at = self.breaks_at[1:]
            if self.failure is not None:
                raise self.failure(f"{place} of {self.iteration}")
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluate_begin(self) -> None:
        self.marks += 1
        self.reach("begin")

    def valid(self) -> dict[str, float]:
        self.validations.append(self.iteration)
        for number, _ in enumerate(self.valid_batches()):
            if number == 1:
                self.reach("batch")
        return {"score": float(np.sin(self.iteration * 5)), "marks": self.marks}

    def on_evaluate_end(self, results: Any) -> None:
        self.rate.step(results["score"])
        self.reach("end")

    @on("on_evaluate_begin", every=2)
    def every_second_one(self) -> None:
        self.noise += 0.125

    def on_train_epoch_end(self) -> None:
        self.noise += float(np.random.rand()) / 10
        self.reach("epoch")

    def on_train_end(self) -> None:
        if self.finished:
            self.reach("train end")


OPTIONS: dict[str, Any] = {
    "max_iteration": 25,
    "valid_interval": 4,
    "valid_every_epoch": 1,
    "save_interval": 4,
    "log_interval": 3,
    "monitor": "score",
    "keep_last": 2,
}


def same_run(one: Path, other: Path) -> None:
    """Asserts that two runs ended with the same bits, curves, scores and checkpoints."""
    kept, others = layout.listed(one / "checkpoints"), layout.listed(other / "checkpoints")
    assert [path.name for path in kept] == [path.name for path in others]
    for ours, theirs in zip(kept, others, strict=True):
        same_bits(ours, theirs)
    assert validations(one) == validations(other)
    for name in ("train/loss", "train/lr", "valid/score", "valid/marks"):
        assert curve(one, name) == curve(other, name)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    trained(Eventful, run, **OPTIONS)
    return run


# Iterations 4, 8, 12, 16, 24 have a checkpoint and a validation, 20 both and the end of an epoch;
# 10 the end of an epoch and its validation alone; 25 is the last one.
PLACES = (
    ("batch", 4), ("end", 8), ("epoch", 10), ("batch", 10), ("end", 10), ("begin", 12),
    ("batch", 16), ("epoch", 20), ("batch", 25), ("train end", 25),
)  # fmt: skip


def is_safe(run: Path, straight: Path, place: tuple[str, int]) -> None:
    """Asserts that what was trained until there is on disk, and like that of the other run."""
    newest = layout.listed(run / "checkpoints")[-1]
    # Where no checkpoint was due, the copy from before what was left becomes one.
    assert layout.iteration_of(newest) == place[1], place
    assert curve(run, "train/loss").items() <= curve(straight, "train/loss").items(), place


def test_what_fails_after_the_checkpoint_is_done_again_to_the_same_bits(
    tmp_path: Path, straight: Path
) -> None:
    """One run, which fails at each place once."""
    breaking = type("Eventful", (Eventful,), {"breaks_at": PLACES})
    for place in PLACES:
        with pytest.raises(Broken, match=f"^{place[0]} of {place[1]}$"):
            trained(breaking, tmp_path, **OPTIONS)
        is_safe(tmp_path, straight, place)
    trained(breaking, tmp_path, **OPTIONS)
    same_run(straight, tmp_path)


def test_a_stop_leaves_the_validation_and_the_next_start_makes_it(
    tmp_path: Path, straight: Path
) -> None:
    """One run, which is stopped at each place once."""
    places = (("batch", 10), ("begin", 12), ("batch", 16), ("batch", 25))
    breaking: Any = type("Eventful", (Eventful,), {"breaks_at": places, "failure": None})
    for place in places:
        with pytest.raises(SystemExit) as stop:
            trained(breaking, tmp_path, **OPTIONS)
        assert stop.value.code == 143
        is_safe(tmp_path, straight, place)
        assert place[1] not in curve(tmp_path, "valid/score")
    trained(breaking, tmp_path, **OPTIONS)
    same_run(straight, tmp_path)


def test_raising_the_limit_of_a_finished_run_is_exact(tmp_path: Path) -> None:
    # Iteration 25 is validated because it is the last one, and not if it is not; 24 is due.
    trained(Eventful, tmp_path / "straight", **{**OPTIONS, "max_iteration": 28})
    for limit in (24, 25, 28):
        trained(Eventful, tmp_path / "run", **{**OPTIONS, "max_iteration": limit})
    assert validations(tmp_path / "straight") == validations(tmp_path / "run")
    same_bits(*(tmp_path / run / "checkpoints/step-00000028" for run in ("straight", "run")))


def test_a_run_that_came_to_its_end_repeats_nothing(tmp_path: Path, straight: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    again: Any = trained(Eventful, tmp_path / "run", **OPTIONS)
    assert again.validations == []
    same_run(straight, tmp_path / "run")
    assert "FINISHED already: iteration 25" in (tmp_path / "run/worker_0.log").read_text()


def test_a_loop_over_epochs_makes_up_for_what_follows_its_last_checkpoint(tmp_path: Path) -> None:
    class Once(Tiny):
        fails = True

        @classmethod
        def default_config(cls) -> Config:
            config = super().default_config()
            config.training.max_iteration = 0
            return config

        def valid(self) -> dict[str, float]:
            if self.epoch == 2 and self.fails:
                raise Broken
            return super().valid()

    options = {"max_iteration": 0, "max_epoch": 2, "valid_interval": 0, "valid_every_epoch": 1}
    once: Any = type("Once", (ByEpochs, Once), {"size": 20})
    with pytest.raises(Broken):
        trained(once, tmp_path, **options)
    once.fails = False
    trained(once, tmp_path, **options)
    assert list(curve(tmp_path, "valid/accuracy")) == [5, 10]
    assert validations(tmp_path)[-1]["finished"]


# --- several ranks ---------------------------------------------------------------------------

LONG = """
import os, signal, sys, time
from expbase import main
from paddle.io import DataLoader
from tiny import Notes, Points, Tiny

class Long(Tiny):
    def valid(self):
        first, *signalled = [int(word) for word in os.environ["LONG"].split()]
        for number, _ in enumerate(self.valid_batches(DataLoader(Points(1200)))):
            if number == 5 and self.rank in signalled and self.rank != first:
                os.kill(os.getpid(), signal.SIGTERM)
            if signalled and self.rank != first:  # who has read its share, waits in average
                time.sleep(0.1)
        if self.rank in signalled and self.rank == first:
            os.kill(os.getpid(), signal.SIGTERM)
        self.save_model("model.pdparams")  # waits for rank 0, too
        return self.average({"accuracy": 0.5}, weight=1)

if __name__ == "__main__":
    main(Long)
"""


@pytest.mark.long
@pytest.mark.parametrize("long", ["0 0", "0 1"])
def test_ranks_leave_a_validation_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: str
) -> None:
    """The first number: which rank waits for the other; the second: who gets the signal."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    words = ["--output", "run", "--device", DEVICE, "--nprocs", "2", "training.max_iteration=6"]
    words += ["training.valid_interval=3", "training.save_interval=100"]
    monkeypatch.setenv("LONG", long)
    stopped = run_script(script, *words)
    assert stopped.returncode == 143, stopped.stderr
    assert "left the validation" in stopped.stderr
    newest = layout.listed(tmp_path / "run/checkpoints")[-1]
    assert layout.iteration_of(newest) == 3
    assert not (tmp_path / "run/validations.jsonl").exists()


FAILING = """
import os
import paddle
from expbase import main
from expbase.extras.all_events import AllEvents
from tiny import Tiny

class Failing(AllEvents, Tiny):
    def on_evaluate_begin(self):
        self.kept = [p.clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.set_value(paddle.zeros_like(p))

    def on_evaluate_end(self, results):
        for p, kept in zip(self.model.parameters(), self.kept):
            p.set_value(kept)
        del self.kept

    def valid(self):
        if str(self.rank) in os.environ.get("FAILS_ON", ""):
            raise RuntimeError(f"rank {self.rank} fails")
        return super().valid()

if __name__ == "__main__":
    main(Failing)
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["1", "01"])
def test_a_validation_that_fails_on_any_rank_loses_nothing_and_saves_no_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    words = ["--device", DEVICE, "--nprocs", "2", "training.valid_interval=3"]
    words += ["training.max_iteration=4"]
    monkeypatch.setenv("FAILS_ON", ranks)
    failed = run_script(script, "--output", "run", *words, "training.save_interval=100")
    assert failed.returncode == 1
    assert re.search(f"RuntimeError: rank [{ranks}] fails", failed.stderr)
    saved = [path.name for path in layout.listed(tmp_path / "run/checkpoints")]
    assert saved == ["step-00000003"]
    monkeypatch.delenv("FAILS_ON")
    straight = run_script(script, "--output", "straight", *words, "training.save_interval=3")
    assert straight.returncode == 0, straight.stderr
    runs = ("straight", "run")
    same_bits(*(tmp_path / run / "checkpoints/step-00000003" for run in runs), todo=False)


# --- what no checkpoint holds ----------------------------------------------------------------


class Diverging(Tiny):
    """A parameter, or what the optimizer keeps of it, becomes nan; nobody logs it."""

    what = "parameter"

    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 5:
            state = self.optimizer.state_dict()
            moment = next(t for name, t in state.items() if "moment1" in name)
            tensor = self.model[0].weight if self.what == "parameter" else moment
            tensor.set_value(paddle.full_like(tensor, float("nan")))


@pytest.mark.device
@pytest.mark.parametrize("what", ["parameter", "accumulator"])
def test_no_checkpoint_holds_a_value_that_is_not_finite(tmp_path: Path, what: str) -> None:
    diverging = type("Diverging", (Diverging,), {"what": what, "log": lambda *_, **__: None})
    options = {"save_interval": 2, "keep_last": 1}
    with pytest.raises(NonFiniteError, match=r"after iteration 6\. .* last good one is step-0+4"):
        trained(diverging, tmp_path, max_iteration=20, **options)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.device
def test_a_parameter_of_no_layer_must_be_finite_too(tmp_path: Path) -> None:
    class Bare(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.scale = paddle.create_parameter([1], "float32")

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.scale.set_value(paddle.full([1], float("nan")))

    with pytest.raises(NonFiniteError, match=r"@parameters\.scale"):
        trained(Bare, tmp_path, save_interval=2)


def test_with_warn_a_run_goes_on_without_checkpoints_that_are_not_finite(tmp_path: Path) -> None:
    class Late(Diverging):
        def valid(self) -> dict[str, float]:
            return {"score": float(self.iteration)}

    options = {"valid_interval": 2, "save_interval": 2, "monitor": "score"}
    assert trained(Late, tmp_path, nonfinite="warn", max_iteration=8, **options).iteration == 8
    text = (tmp_path / "worker_0.log").read_text()
    assert "[8] NO CHECKPOINT: not finite: model.0.bias" in text
    assert layout.listed(tmp_path / "checkpoints")[-1].name == "step-00000004"
    assert find_in_run(tmp_path, "best").name == "step-00000004"


def test_a_mask_that_is_infinite_is_no_mistake(tmp_path: Path) -> None:
    class Masked(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.model[0].register_buffer("mask", paddle.full([2], -float("inf")))

    trained(Masked, tmp_path, max_iteration=2)
    assert layout.listed(tmp_path / "checkpoints")


def test_an_overridden_save_is_what_the_loop_calls(tmp_path: Path) -> None:
    class Counting(Tiny):
        saves = 0

        def save(self) -> None:
            self.saves += 1
            super().save()

    exp: Any = trained(Counting, tmp_path, save_interval=2)
    assert exp.saves == 3
