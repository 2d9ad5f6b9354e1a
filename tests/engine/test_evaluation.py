"""Evaluating: when, in which mode, with what result; done at any time, and felt by nothing."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from graded import SETTINGS, Graded, answer, same_run, snapshot
from paddle.io import DataLoader
from tiny import Facts, Notes, Points, Tiny, curve, make, metrics, run_of, same_bits, trained

from expbase import on
from expbase.extras.all_events import AllEvents

# --- validation by passes ----------------------------------------------------------------------


def test_a_pass_that_ends_within_an_update_is_validated_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Accumulating(Graded):
        def train_batch(self) -> None:
            for points, labels in self.micro_batches():
                self.backward(F.cross_entropy(self.model(points), labels))
            self.step_optimizers()

    # A pass has ten batches, so update 4 takes batch 10 of the first and two of the second.
    options = {"valid_interval": 0, "valid_every_epoch": 1, "accumulation_steps": 3}
    options |= {"max_iteration": 5, "save_interval": 4, "log_interval": 0}
    trained(Accumulating, tmp_path / "run", **{**SETTINGS, **options})
    logged = curve(tmp_path / "run", "valid/loss")
    assert [*logged] == [4, 5]
    given = answer(capsys, Accumulating, "--output", str(tmp_path / "run"), "--evaluate", "4")
    assert given["loss"] == logged[4]


# --- at any time, without a trace --------------------------------------------------------------


class Evaluating(Graded):
    """Evaluates other data after each update, and between a validation and its save."""

    size = 12

    def setup_model(self) -> None:
        super().setup_model()
        self.found = Facts()

    @on("on_train_batch_end")
    @on("on_train_epoch_end")
    def look(self) -> None:
        self.found.update(self.evaluate(self.other))
        assert self.found.keys() == {"loss", "samples", "score", "rank"}
        assert self.found["samples"] == 7


class Predicting(Graded):
    """Predicts, by a model that draws, the data that are trained on, too."""

    size = 12

    def predict_batch(self, batch: Any) -> Any:
        random.random(), np.random.rand(), paddle.rand([2])
        self.log(anything=1.0)
        assert not any(layer.training for layer in self.model.sublayers(include_self=True))
        output = self.model(batch[0])
        assert (self.internals.phase, output.stop_gradient) == ("predict", True)
        return output

    @on("on_train_batch_end")
    def look(self) -> None:
        assert len(self.predict(self.valid_loader)) == 10
        assert len(self.predict(self.train_loader)) == 12


class Exporting(Graded):
    size = 12

    @on("on_train_batch_end")
    def look(self) -> None:
        if self.iteration in (0, 4):
            self.export(self.output_dir / "exported/model")


@pytest.mark.device
def test_what_is_looked_at_during_training_does_not_change_it(tmp_path: Path) -> None:
    options = {**SETTINGS, "max_iteration": 6, "valid_interval": 3, "save_interval": 3}
    options |= {"monitor": "samples", "monitor_mode": "min"}  # the other data have fewer
    trained(type("Plain", (Graded,), {"size": 12}), tmp_path / "plain", **options)
    for experiment in (Evaluating, Predicting, Exporting):
        output = tmp_path / experiment.__name__
        looked: Any = make(experiment, output, **options)
        looked.setup()
        looked.look()  # from outside, too
        looked.run()
        same_run(tmp_path / "plain", output)
        assert curve(output, "valid/samples") == {3: 10, 6: 10}
        layers = looked.model.sublayers(include_self=True)
        assert all(layer.training for layer in layers), experiment


class Leaving(Graded):
    """Its validations leave gradients or clear them; its training has some, zeros or none then."""

    has = ""
    leaves = False

    def setup_model(self) -> None:
        super().setup_model()
        self.scale = paddle.create_parameter([2], "float32")  # of no layer
        self.other_optimizer = paddle.optimizer.Momentum(0.01, parameters=[self.scale])

    def add_gradients(self, batch: Any) -> None:
        points, labels = batch
        F.cross_entropy(self.model(points) * self.scale, labels).backward()

    def train_batch(self) -> None:
        self.add_gradients(self.read_batch())
        if self.has != "some" or self.iteration % 2 == 0:
            for optimizer in (self.optimizer, self.other_optimizer):
                optimizer.step()
            self.clear(self.has)

    def clear(self, what: str) -> None:
        for optimizer in (self.optimizer, self.other_optimizer):
            optimizer.clear_grad(set_to_zero=what != "none")

    def valid(self) -> dict[str, float]:
        if self.leaves:
            with paddle.enable_grad():
                for batch in self.valid_batches():
                    self.add_gradients(batch)
            what = ("some", "zeros", "none")[self.iteration % 3]
            if what != "some":
                self.clear(what)
        return super().valid()


@pytest.mark.device
@pytest.mark.parametrize(
    "has", ["some", *(pytest.param(has, marks=pytest.mark.long) for has in ("zeros", "none"))]
)
def test_gradients_that_a_validation_leaves_are_not_felt_by_training(
    tmp_path: Path, has: str
) -> None:
    for leaves in (False, True):
        told = {"has": has, "leaves": leaves}
        options = {**SETTINGS, "valid_interval": 1}
        trained(type("Leaving", (Leaving,), told), tmp_path / str(leaves), **options)
    same_run(tmp_path / "False", tmp_path / "True")


def test_evaluate_by_hand_in_a_validated_iteration_adds_no_second_line(tmp_path: Path) -> None:
    class Again(Graded):
        def on_train_epoch_end(self) -> None:
            self.again = self.evaluate()["loss"]

    short = type("Again", (Again,), {"size": 8})  # two batches a pass
    options = {**SETTINGS, "max_iteration": 2}
    exp: Any = trained(short, tmp_path / "run", **options)
    lines = [line for line in metrics(tmp_path / "run") if "valid/loss" in line]
    assert [(line["iteration"], line["valid/loss"]) for line in lines] == [(2, exp.again)]


def test_a_wrong_monitor_fails_in_an_evaluation_by_hand_too(tmp_path: Path) -> None:
    class ByHand(Tiny):
        def on_train_batch_end(self) -> None:
            self.evaluate()

    with pytest.raises(ValueError, match=r"training\.monitor: 'acuracy' given; .*: accuracy\."):
        trained(ByHand, tmp_path / "run", monitor="acuracy", valid_interval=0)


def test_persistent_workers_serve_after_the_run_too(tmp_path: Path) -> None:
    class Working(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            options = {"num_workers": 1, "persistent_workers": True}
            self.valid_loader = DataLoader(Points(10), batch_size=3, **options)

    exp = trained(Working, tmp_path / "run", **{**SETTINGS, "max_iteration": 2})
    try:
        assert exp.evaluate()["loss"] == curve(tmp_path / "run", "valid/loss")[2]
        assert len(exp.predict(exp.valid_loader)) == 10
    finally:
        run_of(exp).evaluation.let_go()


def test_evaluate_after_the_run_gives_the_numbers_of_then_and_logs_no_curve(tmp_path: Path) -> None:
    exp = trained(Evaluating, tmp_path / "run", **{**SETTINGS, "max_iteration": 3})
    before = snapshot(tmp_path / "run")
    assert exp.evaluate(exp.other) == exp.found
    own = exp.evaluate()
    assert own == {name: curve(tmp_path / "run", f"valid/{name}")[3] for name in own}
    assert own["loss"] != exp.found["loss"]
    assert snapshot(tmp_path / "run") == before


class Noting(AllEvents, Tiny):
    """Notes what its events tell about each batch and each loader."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.test_loader = DataLoader(Points(4), batch_size=3)
        self.noted: list[Any] = []

    def valid(self) -> dict[str, float]:
        for points, _ in self.valid_batches():
            self.wrong = len(points)  # what a listener of the batch wants to see
        return {}

    def on_valid_batch_end(self, batch: Any, indices: Any) -> None:
        self.noted.append((len(batch[0]), indices, self.wrong, self.internals.phase))

    def on_evaluate_end(self, results: Any) -> None:
        self.noted.append(self.internals.evaluated_loader)


def test_events_of_a_validation_know_its_batches_and_its_loader(tmp_path: Path) -> None:
    exp: Any = make(Noting, tmp_path)
    exp.setup()
    with exp.internals.closing():
        exp.evaluate(exp.test_loader)
        assert exp.noted == [(3, [0, 1, 2], 3, "valid"), (1, [3], 1, "valid"), exp.test_loader]
        assert exp.internals.evaluated_loader is exp.valid_loader
        exp.evaluate()
        assert exp.noted[-1] is exp.valid_loader


def test_generators_on_self_that_valid_draws_from_are_not_felt_by_training(tmp_path: Path) -> None:
    class Drawing(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.generators = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]

        def draw(self) -> float:
            return float(sum(generator.random() for generator in self.generators))

        def train_batch(self) -> None:
            super().train_batch()
            self.log(drawn=self.draw())

        def valid(self) -> dict[str, float]:
            return {"drawn": self.draw()}

    for interval in (0, 1):
        trained(Drawing, tmp_path / str(interval), valid_interval=interval, save_interval=100)
    one, other = (curve(tmp_path / folder, "train/drawn") for folder in ("0", "1"))
    assert one == other
    same_bits(*(tmp_path / f / "checkpoints/step-00000006" for f in ("0", "1")), todo=False)


def test_a_valid_that_does_not_read_the_batches_of_a_loader_is_told_once_of_each(
    tmp_path: Path,
) -> None:
    class Bare(Tiny):
        def valid(self) -> dict[str, float]:
            batches = float(len(list(self.valid_loader)))
            if self.output_dir.name == "logged":
                self.log(batches=batches)
            return {"batches": batches}

        def on_train_end(self) -> None:
            self.evaluate()
            self.evaluate(self.valid_loader)
            self.evaluate(self.train_loader)

    told = "valid: did not call self.valid_batches(), which reads self.%s"
    for run, counts in (("logged", [1, 1]), ("own", [0, 1])):
        trained(Bare, tmp_path / run)
        log = (tmp_path / run / "worker_0.log").read_text()
        assert [log.count(told % name) for name in ("valid_loader", "train_loader")] == counts


def test_a_generator_that_evaluate_or_predict_is_given_is_read_once(tmp_path: Path) -> None:
    class Given(Predicting):
        def on_train_batch_end(self) -> None:
            if self.iteration == 1:
                batches = (batch for batch in self.valid_loader)
                assert self.evaluate(batches)["samples"] == 10
                with pytest.raises(ValueError, match=r"to evaluate: has no batch; .* a gen"):
                    self.evaluate(batches)
                assert len(self.predict(batch for batch in self.valid_loader)) == 10
                with pytest.raises(ValueError, match="the loader given to predict: has no batch"):
                    self.predict(iter(()))

    trained(Given, tmp_path, **{**SETTINGS, "max_iteration": 2})


def test_a_mean_over_nothing_is_told_once(tmp_path: Path) -> None:
    class Rare(Tiny):
        def valid(self) -> dict[str, float]:
            for _ in self.valid_batches():
                pass
            return self.average({"recall": 0.0, "precision": 0.0}, weight=0)

    trained(Rare, tmp_path, valid_interval=2)
    assert [line for line in metrics(tmp_path) if "valid/recall" in line] == []
    told = (tmp_path / "worker_0.log").read_text()
    text = "average: weight 0 given on all ranks, so recall, precision has no value here; expected"
    assert told.count("average: weight") == told.count(text) == 1


def test_an_error_of_a_loader_has_the_name_by_which_a_user_knows_it(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(())

    class Naming(Predicting):
        reads_another = False

        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.test_loader = self.other = Stream()
            self.third = Stream()

        def valid(self) -> Any:
            return [*self.valid_batches(Stream() if self.reads_another else None)]

        def on_train_batch_end(self) -> None:
            for name, read in {
                "self.test_loader": lambda: self.evaluate(self.other),
                "self.third": lambda: self.predict(self.third),
                "the loader given to evaluate": lambda: self.evaluate(Stream()),
                "the loader given to predict": lambda: self.predict(Stream()),
                "the loader given to valid_batches": self.read_another,
            }.items():
                with pytest.raises(ValueError, match=f"^{name}: has no batch; .* a Stream"):
                    read()

        def read_another(self) -> None:
            self.reads_another = True
            self.evaluate()

    trained(Naming, tmp_path, **{**SETTINGS, "max_iteration": 1, "valid_interval": 0})


@pytest.mark.parametrize("returned", [None, {}])
def test_a_valid_without_a_result_is_told_once_unless_it_is_meant(
    tmp_path: Path, returned: Any
) -> None:
    class Drawing(Tiny):
        def valid(self) -> Any:
            for _ in self.valid_batches():
                pass
            return returned

    trained(Drawing, tmp_path, valid_interval=2, max_iteration=4, save_interval=0)
    told = (tmp_path / "worker_0.log").read_text()
    text = "[2] valid: returned None and logged nothing, so it has no result; expected numbers by"
    assert told.count("returned None") == told.count(text) == int(returned is None)


class Watching(Tiny):
    """Overrides valid without any decorator, and looks at where it runs."""

    def setup_model(self) -> None:
        super().setup_model()
        self.seen = Notes()

    def valid(self) -> dict[str, float]:
        self.seen[:] = [self.internals.phase, self.model.training, self.model[1].training]
        self.seen.append(paddle.is_grad_enabled())
        paddle.rand([3])
        return super().valid()


@pytest.mark.device
def test_valid_runs_in_eval_mode_without_gradients_and_layers_get_back_the_mode_of_each(
    tmp_path: Path,
) -> None:
    class Frozen(Watching):
        def setup_model(self) -> None:
            super().setup_model()
            self.model[2].eval()

    exp: Any = trained(Frozen, tmp_path / "run", max_iteration=3)
    assert exp.seen == ["valid", False, False, False]
    assert [layer.training for layer in exp.model] == [True, True, False, True]
    assert exp.model.training
    assert exp.internals.phase == "train"


def test_when_one_validates_never_changes_training(tmp_path: Path) -> None:
    options = {"save_interval": 100}
    trained(Watching, tmp_path / "often", valid_interval=1, **options)
    trained(Watching, tmp_path / "never", valid_interval=0, **options)
    often, never = (tmp_path / n / "checkpoints/step-00000006" for n in ("often", "never"))
    same_bits(often, never, todo=False)


def test_an_excluded_model_is_in_eval_mode_too(tmp_path: Path) -> None:
    class Judged(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.judge = paddle.nn.BatchNorm1D(4)
            self.exclude_from_state("judge")

        def valid(self) -> None:  # type: ignore[override]
            for points, _ in self.valid_batches():
                self.judge(points)

    exp = trained(Judged, tmp_path / "run", max_iteration=3)
    assert exp.judge._mean.tolist() == [0.0] * 4


def test_validation_leaves_no_worker_behind(tmp_path: Path) -> None:
    before = {*multiprocessing.active_children()}  # of earlier tests: they may end at any time

    def workers() -> int:
        return len({*multiprocessing.active_children()} - before)

    class Persistent(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            options = {"num_workers": 1, "persistent_workers": True}
            self.valid_loader = DataLoader(self.valid_loader.dataset, batch_size=3, **options)
            self.children: list[int] = []

        def valid(self) -> None:  # type: ignore[override]
            for _ in self.valid_batches():
                break
            list(self.valid_batches())
            self.children.append(workers())

    exp = trained(Persistent, tmp_path / "run", valid_interval=2, max_iteration=4)
    assert max(exp.children) <= 2
    assert workers() == 0


def test_results_that_are_no_mapping_are_an_error(tmp_path: Path) -> None:
    class Wrong(Tiny):
        def valid(self) -> float:  # type: ignore[override]
            return 0.5

    with pytest.raises(TypeError, match=r"valid: returned 0\.5; expected numbers by name"):
        trained(Wrong, tmp_path / "run")


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    class Wordy(Tiny):
        def valid(self) -> dict[str, Any]:
            return {"accuracy": "good"}

    with pytest.raises(TypeError, match="valid: the metric 'accuracy' is 'good'; expected a numb"):
        trained(Wordy, tmp_path)


# --- several loaders ---------------------------------------------------------------------------


class Several(Tiny):
    """Has two loaders where one is expected."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        parts = [DataLoader(Points(10), batch_size=size) for size in (3, 4)]
        self.valid_loader = parts if self.as_list else dict(zip("ab", parts, strict=True))

    as_list = False


class EachRead(Several):
    def valid(self) -> None:
        for name, loader in self.valid_loader.items():
            for points, _ in self.valid_batches(loader):
                self.log({f"mean_{name}": points.mean()})


@pytest.mark.parametrize("as_list", [False, True])
def test_a_loop_over_several_loaders_says_that_one_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], as_list: bool
) -> None:
    kind = type("Kind", (Several,), {"as_list": as_list})
    what = f"self.valid_loader: a {'list' if as_list else 'dict'} of loaders"
    with pytest.raises(TypeError, match=f"{what} given; expected one. Evaluate each: self.evalu"):
        trained(kind, tmp_path / "run")
    assert f"WARNING: {what}, and valid_batches() reads one." in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/step-00000003").exists()


def test_a_valid_that_reads_each_of_several_loaders_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(EachRead, tmp_path / "run")
    assert [*curve(tmp_path / "run", "valid/mean_b")] == [3, 6]
    assert "of loaders" not in capsys.readouterr().err
