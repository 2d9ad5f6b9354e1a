"""AllEvents: each event comes from its method, wherever that is overridden."""

from __future__ import annotations

import inspect
import json
import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from tiny import Helped, Notes, Points, Tiny, curve, make, metrics, same_bits, trained

from expbase import ExperimentBase, on
from expbase.base.json_lines import json_lines
from expbase.events import OF_MIXINS, Events, events_of
from expbase.extras.all_events import AllEvents
from expbase.extras.prediction import Prediction
from expbase.mixins_in_front import put_in_front, users_class
from expbase.record.sources import Code
from expbase.smoke import Smoke
from expbase.tools.verified_run import PLAN, Verified, notes_path


class Heard(AllEvents, Helped):
    """Notes the events of the mixin."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard = Notes()
        self.exclude_from_state("heard")


def _noting(name: str) -> Any:
    return lambda self, *args: self.heard.append(name)


for _name in vars(AllEvents):
    if _name.startswith("on_"):
        setattr(Heard, _name, _noting(_name))

READ = ["on_fetch_data_begin", "on_fetch_data_end", "on_batch_read"]
BACKWARD = ["on_before_backward", "on_after_backward"]
STEP = ["on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad"]
SETUP = ["on_setup_begin", "on_setup_end"]
VALID = ["on_evaluate_begin", *4 * ["on_valid_batch_end"]]


def test_the_core_knows_by_name_what_the_mixins_declare() -> None:
    for mixin in (AllEvents, Prediction):
        ours = [name for name in vars(mixin) if name.startswith("on_")]
        place = f"{mixin.__module__}.{mixin.__name__}"
        assert ours == [name for name, of in OF_MIXINS.items() if of == place]
        assert {*events_of(mixin)} == {*ours, *(n for n in vars(Events) if n.startswith("on_"))}
        assert all(getattr(mixin, name).__doc__ for name in ours)


class WithSuper(Heard):
    """Overrides what the events belong to."""

    def setup_dataloader(self) -> None:
        self.heard.append("setup_dataloader")
        super().setup_dataloader()

    def read_batch(self, twice: bool = False) -> Any:
        self.heard.append("read_batch")
        return super().read_batch()

    def backward(self, loss: Any, *, scale: float = 1.0) -> None:
        self.heard.append("backward")
        super().backward(loss * scale)

    def step_optimizers(self, *optimizers: Any) -> None:
        self.heard.append("step")
        super().step_optimizers(*optimizers)

    def valid(self) -> dict[str, float]:
        self.heard.append("valid")
        return super().valid()

    def valid_batches(self, loader: Any = None) -> Iterator[Any]:
        self.heard.append("valid_batches")
        return super().valid_batches(loader)

    def train_batch(self) -> None:
        points, _ = self.read_batch(twice=True)
        self.backward(self.model(points).mean(), scale=2.0)
        self.step_optimizers()


def test_an_override_that_calls_super_is_surrounded(tmp_path: Path) -> None:
    exp: Any = trained(WithSuper, tmp_path / "run", max_iteration=1)
    begin, end = SETUP
    fetch, *read = READ
    before, after = BACKWARD
    evaluate, *batches = VALID
    assert exp.heard == [
        *(begin, "setup_dataloader", end, fetch, "read_batch", *read, before, "backward", after),
        *("step", *STEP, evaluate, "valid", "valid_batches", *batches),
    ]


class WithoutSuper(Heard):
    """Does by itself what the events belong to."""

    def setup_dataloader(self) -> None:
        self.valid_loader = DataLoader(Points(10), batch_size=3)

    def read_batch(self) -> Any:
        return paddle.ones([2, 4]), None

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step_optimizers(self, *optimizers: Any) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()

    def valid(self) -> dict[str, float]:
        return {"batches": len([*self.valid_batches()])}

    def train_batch(self) -> None:
        points, _ = self.read_batch()
        self.backward(self.model(points).mean())
        self.step_optimizers()


def test_an_override_that_does_not_is_surrounded_but_between_its_own_parts_nothing_acts(
    tmp_path: Path,
) -> None:
    exp: Any = trained(WithoutSuper, tmp_path / "run", max_iteration=1)
    assert exp.heard == [*SETUP, *READ, *BACKWARD, *VALID]


class Base(Helped):
    """An experiment of somebody's, with a step of its own."""

    def step_optimizers(self, *optimizers: Any) -> None:
        self.stepped = True
        super().step_optimizers(*optimizers)


def test_the_mixin_hides_no_override_of_a_base_that_is_named_after_it(tmp_path: Path) -> None:
    class Both(AllEvents, Base):
        def on_after_zero_grad(self) -> None:
            assert self.stepped

        def on_batch_read(self, batch: Any, indices: Any) -> None:
            batch[0].set_value(batch[0] * 0)

    exp: Any = trained(Both, tmp_path / "run", max_iteration=1)
    assert exp.stepped


def test_what_is_changed_in_a_batch_and_what_it_is_of_is_told_before_train_batch_has_it(
    tmp_path: Path,
) -> None:
    class Changing(AllEvents, Tiny):
        def read_batch(self) -> Any:
            points, labels = super().read_batch()
            return points + 1, labels

        def on_batch_read(self, batch: Any, indices: Any) -> None:
            data = self.train_loader.dataset
            assert (batch[1].numpy() == data.labels[indices]).all()
            noise = batch[0].numpy() - (data.points[indices] + 1)
            assert 0 < abs(noise).max() < 1
            batch[0].set_value(paddle.zeros_like(batch[0]))

        def train_batch(self) -> None:
            self.model.register_forward_pre_hook(self.look)
            super().train_batch()

        def look(self, model: Any, inputs: Any) -> None:
            assert not inputs[0].any()

    trained(Changing, tmp_path / "run", max_iteration=1, valid_interval=0)


def test_on_evaluate_begin_is_within_the_validation_and_knows_its_loader(tmp_path: Path) -> None:
    class Asking(AllEvents, Tiny):
        def on_evaluate_begin(self) -> None:
            assert not self.model.training
            assert not paddle.is_grad_enabled()
            self.seen.append(self.internals.evaluated_loader)
            self.log(before=self.iteration)

        def setup_model(self) -> None:
            super().setup_model()
            self.seen = Notes()

        def on_train_end(self) -> None:
            self.evaluate(self.train_loader)

    exp: Any = trained(Asking, tmp_path / "run", max_iteration=2, valid_interval=1)
    assert exp.seen == [exp.valid_loader, exp.valid_loader, exp.train_loader]
    assert curve(tmp_path / "run", "valid/before") == {1: 1, 2: 2}


def test_an_evaluate_that_does_not_call_super_has_a_begin_too(tmp_path: Path) -> None:
    class Own(Heard):
        def evaluate(self, loader: Any = None, *, name: str = "") -> Any:
            return self.valid()

    exp: Any = trained(Own, tmp_path / "run", max_iteration=1)
    assert exp.heard[-5:] == VALID


def test_valid_called_by_hand_in_training_is_no_evaluation(tmp_path: Path) -> None:
    class ByHand(Heard):
        def train_batch(self) -> None:
            super().train_batch()
            self.valid()

    exp: Any = trained(ByHand, tmp_path / "run", max_iteration=1, valid_interval=0)
    assert exp.heard == [*SETUP, *READ, *BACKWARD, *STEP, *4 * ["on_valid_batch_end"]]


def test_a_batch_of_a_loop_round_another_one_has_its_own_indices(tmp_path: Path) -> None:
    class Nested(AllEvents, Tiny):
        def valid(self) -> dict[str, float]:
            for _ in self.valid_batches():
                for _ in self.valid_batches(self.train_loader):
                    pass
            return {}

        def on_valid_batch_end(self, batch: Any, indices: Any) -> None:
            self.sizes.append((len(batch[0]), len(indices)))

        def setup_model(self) -> None:
            super().setup_model()
            self.sizes = Notes()

    exp: Any = trained(Nested, tmp_path / "run", max_iteration=1, valid_interval=1)
    assert {read for read, _ in exp.sizes} == {1, 3, 4}
    assert all(read == of for read, of in exp.sizes)


def test_what_a_prediction_reads_is_no_batch_of_a_validation(tmp_path: Path) -> None:
    class Predicting(Heard, Prediction):
        def predict_batch(self, batch: Any) -> Any:
            return self.model(batch[0])

        def on_predict_batch_end(self, outputs: Any) -> None:
            self.heard.append("predicted")

    exp: Any = make(Predicting, tmp_path / "run")
    exp.setup()
    with exp.internals.closing():
        exp.predict(exp.valid_loader)
    assert exp.heard == [*SETUP, *4 * ["predicted"]]


def test_saving_and_loading_a_model_are_told_before(tmp_path: Path) -> None:
    class Asking(AllEvents, Helped):
        def on_save_model(self) -> None:
            assert not (tmp_path / "m.safetensors").exists()

        def on_load_model(self) -> None:
            self.weight = self.unwrap(self.model)[0].weight.numpy()

    exp: Any = make(Asking, tmp_path / "run")
    exp.setup()
    exp.save_model(tmp_path / "m.safetensors")
    saved = exp.model[0].weight.numpy()
    exp.model[0].weight.set_value(saved + 1)
    exp.load_model(tmp_path / "m.safetensors")
    assert (exp.weight == saved + 1).all()
    assert (exp.model[0].weight.numpy() == saved).all()
    exp.close()


# --- listeners, and what they draw ------------------------------------------------------------


class Counting(AllEvents, Helped):
    """Its listeners decide about training, by their counters and by what they draw."""

    size = 20  # 5 batches: an epoch ends within an update
    stop_at = 0

    @on("on_fetch_data_end", every=3)
    def waste(self) -> None:
        paddle.randn([3])
        np.random.rand()

    @on("on_batch_read", every=3)
    def add_noise(self, batch: Any, indices: Any) -> None:
        batch[0].set_value(batch[0] + paddle.randn(batch[0].shape) / 10)

    @on("on_before_backward", every=5)
    def log_loss(self, loss: Any) -> None:
        self.log(fifth=loss)

    @on("on_after_backward", filter_fn=lambda filter_, exp: filter_.num_executed < 4)
    def four_times(self) -> None:
        self.log(counted=1)

    @on("on_valid_batch_end", every=3)
    def count(self, batch: Any, indices: Any) -> None:
        self.unwrap(self.model)[0].bias.set_value(paddle.rand([8]))

    def on_train_batch_end(self) -> None:
        if self.iteration == self.stop_at:
            self.stop()


class Quiet(Counting):
    """The same, but for what is drawn where it moves nothing."""

    waste = None  # type: ignore[assignment]


def test_counters_and_draws_of_its_events_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    options = {"max_iteration": 7, "accumulation_steps": 2, "valid_interval": 3, "save_interval": 7}
    trained(Counting, tmp_path / "whole", **options)
    for end in (2, 5, 7):
        stopped = type("Counting", (Counting,), {"stop_at": end})
        trained(stopped, tmp_path / "parts", **options)
    step = "checkpoints/step-00000007"
    same_bits(tmp_path / "whole" / step, tmp_path / "parts" / step)
    lines = [line["iteration"] for line in metrics(tmp_path / "whole") if "train/counted" in line]
    assert lines == [1, 2]


def test_what_is_drawn_after_a_fetch_moves_nothing(tmp_path: Path) -> None:
    for experiment in (Counting, Quiet):
        trained(experiment, tmp_path / experiment.__name__, max_iteration=4)
    one, other = (curve(tmp_path / name, "train/loss") for name in ("Counting", "Quiet"))
    assert one == other


# --- the class that stands in front is nobody's ------------------------------------------------


def test_the_class_with_the_mixin_looks_like_the_users(tmp_path: Path) -> None:
    exp: Any = make(Heard, tmp_path / "run")
    cls: Any = type(exp)
    assert cls is not Heard
    assert users_class(cls) is Heard
    assert isinstance(exp, Heard)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Heard", "Heard", __name__)
    assert inspect.signature(cls) == inspect.signature(Heard)
    assert Code.of(cls) == Code.of(Heard)
    assert "Notes the events of the mixin." in pydoc.plain(pydoc.render_doc(cls))
    assert inspect.getdoc(exp.backward) == inspect.getdoc(ExperimentBase.backward)
    assert type(cls(exp.config, exp.args)) is type(Heard(exp.config, exp.args)) is cls
    assert type(make(Tiny, tmp_path / "other")) is Tiny


def test_what_is_missing_is_missed_with_the_mixin_too(tmp_path: Path) -> None:
    class Empty(AllEvents, ExperimentBase): ...

    with pytest.raises(TypeError, match=r"Empty: setup_dataloader, setup_model, train_batch"):
        make(Empty, tmp_path / "run")

    class Wrong(AllEvents, Tiny):
        def valid(self, loader: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"Wrong\.valid: cannot be called as the method"):
        make(Wrong, tmp_path / "run")


def test_a_tool_stands_in_front_of_the_mixin(tmp_path: Path, capsys: Any) -> None:
    class Changed(Heard):
        def on_batch_read(self, batch: Any, indices: Any) -> None:
            batch[0].set_value(paddle.zeros_like(batch[0]))

    class Watching(ExperimentBase):
        def read_batch(self) -> Any:
            batch = super().read_batch()
            assert not batch[0].any()
            return batch

    with put_in_front(Watching), put_in_front(Smoke):
        exp: Any = trained(Changed, tmp_path / "run")
    assert [cls.__name__ for cls in type(exp).__mro__[:5]] == [
        *("Changed", "Smoke", "Watching", "Surrounding", "Changed"),
    ]
    assert "smoke test passed: 2 updates, validated, saved and loaded" in capsys.readouterr().out
    two_batches = ["on_evaluate_begin", "on_valid_batch_end"]  # the loop is left at the second
    assert exp.heard[-2:] == two_batches


class Unvalidated(Heard):
    valid = ExperimentBase.valid


def test_a_tool_sees_that_there_is_no_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"training": {"valid_interval": 2}, "kill": "inside a validation", "at": 99, "delay": 0}
    monkeypatch.setenv(PLAN, json.dumps(plan))
    for tool in (Smoke, Verified):
        with put_in_front(tool):
            exp: Any = trained(Unvalidated, tmp_path / tool.__name__, valid_interval=0)
        assert "on_evaluate_begin" not in exp.heard
    assert exp.verifying.kill == "at a random moment"


def test_verify_sees_the_batch_that_train_batch_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"training": {"max_iteration": 3}, "kill": "", "at": 0, "delay": 0}
    monkeypatch.setenv(PLAN, json.dumps(plan))
    notes = []
    still = type("Still", (Counting,), {"add_noise": None})
    for experiment in (Counting, still):
        with put_in_front(Verified):
            trained(experiment, tmp_path / experiment.__name__)
        notes.append(json_lines(notes_path(tmp_path / experiment.__name__, 0)))
    same = [one["batches"] == other["batches"] for one, other in zip(*notes, strict=True)]
    assert same == [True, True, False]  # noise is added to the third
