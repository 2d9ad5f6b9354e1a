"""Early stopping, averages of the weights, clipping: each alone, and all in any order."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.base.framework import EagerParamBase
from paddle.io import DataLoader
from tiny import (
    DEVICE,
    Facts,
    Helped,
    Notes,
    Points,
    Tiny,
    curve,
    ledger,
    run_of,
    same_bits,
    training_config,
)
from tiny import trained as trained_without_mixins

from expbase import Config, ConfigError, ExperimentBase
from expbase.checkpoint import model_files
from expbase.checkpoint.best import best_of
from expbase.checkpoint.layout import NonFiniteError
from expbase.extras.mixins import (
    EarlyStopping,
    ExponentialMovingAverage,
    GradientClipping,
    WeightAverages,
)
from expbase.extras.prediction import Prediction

FILES = ("model.safetensors", "optimizer.safetensors")


def make(
    experiment_class: type[ExperimentBase],
    output: Path,
    args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An experiment under its own default_config; a dict among the options is for a section."""
    config = experiment_class.default_config()
    config.training.update(training_config().training)
    for name, value in options.items():
        if isinstance(value, dict):
            config[name].update(value)
        else:
            config.training[name] = value
    return experiment_class(
        config, argparse.Namespace(output=str(output), device=DEVICE, **(args or {}))
    )


def trained(
    experiment_class: type[ExperimentBase],
    output: Path,
    args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    exp = make(experiment_class, output, args, **options)
    exp.setup()
    exp.run()
    return exp


def weights_of(exp: Any) -> dict[str, np.ndarray]:
    parameters = exp.unwrap(exp.model).named_parameters()
    return {name: parameter.numpy() for name, parameter in parameters}


def same_weights(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    assert one.keys() == other.keys()
    return all((one[name] == other[name]).all() for name in one)


def same_training(one: Path, other: Path) -> bool:
    """Whether the last checkpoints of two runs hold the same model and optimizer."""
    ends = [sorted((output / "checkpoints").iterdir())[-1] for output in (one, other)]
    return ends[0].name == ends[1].name and all(
        (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes() for file in FILES
    )


# --- early stopping ----------------------------------------------------------------------------


class Scored(EarlyStopping, Tiny):
    """Validation k gives the k-th score, and the last one from then on."""

    scores: tuple[float, ...] = (1,)

    def valid(self) -> dict[str, float]:
        number = self.iteration // self.config.training.valid_interval
        return {"score": self.scores[min(number, len(self.scores)) - 1], "other": 0.0}


def scored(*scores: float) -> type[Scored]:
    return type("Scored", (Scored,), {"scores": scores})


def stopping(**options: Any) -> dict[str, Any]:
    """Options of a run that only early stopping should end."""
    watched = {"monitor": "score", "monitor_mode": options.pop("mode", "max"), "save_interval": 12}
    section = {"patience": 2, **options}
    return {"early_stopping": section, "max_iteration": 12, "valid_interval": 1, **watched}


nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "options", "end"),
    [
        ((1, 2, 1, 3, 3, 2), {}, 6),  # a better one begins the count anew; as good is not better
        ((3, 2.6, 2.2, 2, 1.8), {"min_delta": 0.5, "mode": "min"}, 5),  # by more than it
        ((nan, 1, nan, nan), {}, 4),
        ((inf,), {"patience": 3}, 3),
        ((*range(12),), {}, 12),
    ],
)
def test_a_run_ends_when_the_metric_was_not_better_for_the_patience(
    tmp_path: Path, scores: tuple[float, ...], options: dict[str, Any], end: int
) -> None:
    exp = trained(scored(*scores), tmp_path / "run", **stopping(**options))
    assert exp.iteration == end
    assert exp.early_stopping["failures"] == (0 if end == 12 else options.get("patience", 2))
    assert (tmp_path / f"run/checkpoints/step-{end:08d}").exists()


@pytest.mark.parametrize(
    ("mode", "best", "better", "not_better"),
    [
        ("max", None, [-1, 0.0], [nan, inf, -inf]),
        ("max", 1.0, [1.6], [1.5, 1.0, 0.0, nan, inf]),
        ("min", None, [1], [nan, inf, -inf]),
        ("min", -1.0, [-1.6], [-1.5, -1.0, 0.0, nan, -inf]),
    ],
)
def test_a_value_is_better_by_more_than_min_delta_and_never_if_it_is_not_finite(
    tmp_path: Path, mode: str, best: float | None, better: list[float], not_better: list[float]
) -> None:
    exp = make(scored(1), tmp_path / "run", **stopping(mode=mode, min_delta=0.5))
    exp.early_stopping = {"best": best}
    assert [value for value in better if not exp.is_better(value)] == []
    assert [value for value in not_better if exp.is_better(value)] == []


def test_validations_count_and_not_iterations(tmp_path: Path) -> None:
    options = {**stopping(), "valid_interval": 3, "max_iteration": 30}
    assert trained(scored(1, 2, 2), tmp_path / "run", **options).iteration == 12


def test_patience_zero_is_off_and_needs_no_metric(tmp_path: Path) -> None:
    options = {**stopping(patience=0), "monitor": "", "max_iteration": 4}
    assert trained(scored(nan), tmp_path / "run", **options).iteration == 4


def test_no_metric_is_an_error_before_training(tmp_path: Path) -> None:
    class Untrained(Scored):
        def train_batch(self) -> None:
            raise AssertionError("trained")

    with pytest.raises(ConfigError, match=r"training\.monitor: not given; expected the metric"):
        trained(Untrained, tmp_path / "run", **{**stopping(), "monitor": ""})


def test_a_metric_that_valid_does_not_give_is_an_error(tmp_path: Path) -> None:
    text = r"training\.monitor: 'f1' given; expected one of .*: score, other"
    with pytest.raises(ConfigError, match=text):
        trained(scored(1), tmp_path / "run", **{**stopping(), "monitor": "f1"})


def test_a_run_that_was_stopped_early_stays_stopped_and_answers_0(tmp_path: Path) -> None:
    class Again(scored(1)):  # type: ignore[misc]
        ended = False

        def train_batch(self) -> None:
            raise AssertionError("trained on")

        def on_train_end(self) -> None:
            self.ended = self.finished

    trained(scored(1), tmp_path / "run", **stopping())
    again = trained(Again, tmp_path / "run", **{**stopping(), "max_iteration": 50})
    assert (again.iteration, again.ended) == (3, True)
    record = ledger(tmp_path / "run")[-1]
    assert (record["iteration"], record["exit_code"]) == (3, 0)
    assert again.end_reason == f"stopped: {record['reason']}"
    log = (tmp_path / "run/worker_0.log").read_text()
    said = "[3] STOPPED by early stopping: score was 1 at best, and not better in the last 2 valid"
    assert log.count(said) == 2
    assert record["reason"].startswith("early stopping: score was 1 at best, and not better")


def test_patience_goes_on_over_a_resume(tmp_path: Path) -> None:
    class Dying(scored(1, 2, 2, 2, 2)):  # type: ignore[misc]
        def train_batch(self) -> None:
            if self.iteration > 6:  # a failure is counted
                raise RuntimeError("died")
            super().train_batch()

    options = {**stopping(patience=3), "valid_interval": 2, "save_interval": 6}
    whole = trained(scored(1, 2, 2, 2, 2), tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, tmp_path / "parts", **options)
    parts = trained(scored(1, 2, 2, 2, 2), tmp_path / "parts", **options)
    assert whole.iteration == parts.iteration == 10
    end = "checkpoints/step-00000010"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


class Otherwise(Scored):
    """Ever better in another metric, and in the other mode, though worse than what was before."""

    def valid(self) -> dict[str, float]:
        return {"score": 100.0 - self.iteration, "other": self.iteration - 1000.0}


@pytest.mark.parametrize(
    ("changed", "by", "end"),
    [
        ({"monitor": "valid/other"}, "max other", 12),  # its patience has run out, at 4
        # It is counting.
        pytest.param({"monitor_mode": "min"}, "min score", 3, marks=pytest.mark.long),
    ],
)
def test_with_another_metric_or_mode_it_counts_anew(
    tmp_path: Path, changed: dict[str, Any], by: str, end: int
) -> None:
    options = stopping(patience=3)
    first = trained(scored(9, 8), tmp_path / "run", **{**options, "max_iteration": end})
    assert first.iteration == min(end, 4)
    other = type("Scored", (Otherwise,), {})  # another class would be no exact continuation
    exp = trained(other, tmp_path / "run", **{**options, **changed})
    assert (exp.iteration, exp.early_stopping["failures"]) == (12, 0)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert log.count("counts anew") == 1
    assert f"early stopping: counts anew, by {by!r}; until iteration " in log
    assert " it was by 'max score'\n" in log
    assert "not exact" not in log


def test_the_prefix_of_the_monitor_is_no_change(tmp_path: Path) -> None:
    trained(scored(1), tmp_path / "run", **{**stopping(), "max_iteration": 2})
    options = {**stopping(), "monitor": "valid/score"}
    assert trained(scored(1), tmp_path / "run", **options).iteration == 3
    assert "counts anew" not in (tmp_path / "run/worker_0.log").read_text()


def test_a_count_that_does_not_say_by_what_begins_anew(tmp_path: Path) -> None:
    exp = make(scored(1), tmp_path / "run", **stopping())
    exp.setup()
    with exp.internals.closing():
        exp.early_stopping = {"best": 7.0, "failures": 9, "iteration": 4}
        exp.begin_count()
    assert (exp.early_stopping["best"], exp.early_stopping["failures"]) == (None, 0)


@pytest.mark.parametrize(
    ("scores", "mode"),
    [
        ((inf, nan, 2, 3, -inf, 3, 0, -0.0), "max"),
        ((inf, nan, 2, 3, -inf, 3, 0, -0.0), "min"),
        ((inf, nan), "max"),
    ],
)
def test_its_best_is_the_best_of_the_checkpoints(
    tmp_path: Path, scores: tuple[float, ...], mode: str
) -> None:
    options = {**stopping(patience=99, mode=mode), "max_iteration": len(scores)}
    options["save_interval"] = 1
    exp = trained(scored(*scores), tmp_path / "run", **options)
    best = exp.early_stopping["best"]
    expected = [] if best is None else [(exp.iteration - exp.early_stopping["failures"], best)]
    assert best_of(tmp_path / "run")[:1] == expected


def test_evaluating_other_data_or_again_does_not_count(tmp_path: Path) -> None:
    class Curious(scored(1)):  # type: ignore[misc]
        def on_train_begin(self) -> None:
            self.evaluated: list[int] = []
            self.evaluate()

        def on_evaluate_end(self, results: Mapping[str, float]) -> None:
            self.evaluated.append(self.iteration)

        def on_train_batch_end(self) -> None:
            self.evaluate(self.train_loader)
            if self.iteration == 3:
                self.evaluate()
                self.evaluate()

    options = {**stopping(), "valid_interval": 3}
    first = trained(Curious, tmp_path / "run", **{**options, "max_iteration": 6})
    assert first.evaluated == [0, 1, 2, 3, 3, 3, 4, 5, 6, 6]
    second = trained(Curious, tmp_path / "run", **options)
    assert second.evaluated[0] == 6
    assert second.iteration == 9


class Named(Tiny):
    """Its evaluate takes the word before the metrics."""

    def evaluate(self, loader: Any = None, *, name: str = "") -> dict[str, float]:
        return super().evaluate(loader)


@pytest.mark.parametrize(("name", "end"), [("raw", 6), ("valid", 3)])
def test_results_under_another_name_do_not_count(tmp_path: Path, name: str, end: int) -> None:
    class ByHand(EarlyStopping, ExponentialMovingAverage, Named):
        def on_train_batch_end(self) -> None:
            self.evaluate(self.valid_loader, name=name)

        def valid(self) -> dict[str, float]:
            return {"score": 1.0}

    options = {**stopping(), "valid_interval": 0, "max_iteration": 6}
    assert trained(ByHand, tmp_path / "run", **options).iteration == end


def test_evaluating_outside_of_training_does_not_count(tmp_path: Path) -> None:
    exp = make(scored(1), tmp_path / "run", **stopping())
    exp.setup()
    with exp.internals.closing():
        run_of(exp).loop.iteration = 1
        exp.evaluate()
    assert exp.early_stopping == {"monitor": "", "best": None, "failures": 0, "iteration": 0}


# --- averages of the weights -------------------------------------------------------------------


class Averaged(ExponentialMovingAverage, Prediction, Tiny):
    """Notes the weights that valid and predict_batch see."""

    def setup_model(self) -> None:
        super().setup_model()
        self.trajectory = Notes()
        self.seen = Facts()

    def on_train_begin(self) -> None:
        self.trajectory.append(weights_of(self))

    def on_train_batch_end(self) -> None:
        self.trajectory.append(weights_of(self))

    def valid(self) -> dict[str, float]:
        self.seen[self.iteration] = weights_of(self)
        return super().valid()

    def predict_batch(self, batch: Any) -> Any:
        return self.model(batch[0])


EMA = {"ema": {"decay": 0.8}}


def averages_of(trajectory: list[dict[str, np.ndarray]], decay: float) -> dict[str, np.ndarray]:
    """What a layer has to hold; running statistics are those of the last moment."""
    averages = {name: array.astype("float64") for name, array in trajectory[0].items()}
    for n, weights in enumerate(trajectory[1:], 1):
        for name, array in weights.items():
            warm = min(decay, (1 + n) / (10 + n))
            part = 0 if name.endswith(("_mean", "_variance")) else warm
            averages[name] = part * averages[name] + (1 - part) * array
    return averages


def close(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return all(np.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in other)


@pytest.mark.device
def test_valid_sees_the_averages_of_all_weights_so_far(tmp_path: Path) -> None:
    exp = trained(Averaged, tmp_path / "run", max_iteration=7, valid_interval=3, **EMA)
    assert sorted(exp.seen) == [3, 6, 7]
    for iteration, weights in exp.seen.items():
        assert close(weights, averages_of(exp.trajectory[: iteration + 1], 0.8))
        assert not close(weights, exp.trajectory[iteration])


@pytest.mark.long
def test_averaging_leaves_the_bits_of_training_alone(tmp_path: Path) -> None:
    trained_without_mixins(Tiny, tmp_path / "without")
    exp = trained(Averaged, tmp_path / "with", valid_interval=1, **EMA)
    assert same_training(tmp_path / "without", tmp_path / "with")
    assert same_weights(weights_of(exp), exp.trajectory[-1])


class Thawing(Averaged):
    """Its first layer is frozen until after its second update."""

    def setup_model(self) -> None:
        super().setup_model()
        for parameter in self.model[0].parameters():
            parameter.stop_gradient = True

    def on_train_batch_end(self) -> None:
        super().on_train_batch_end()
        if self.iteration == 2:
            for parameter in self.model.parameters():  # the usual loop: running statistics, too
                parameter.stop_gradient = False


def test_what_is_thawed_after_setup_is_averaged_and_continues_exactly(tmp_path: Path) -> None:
    exp = trained(Thawing, tmp_path / "whole", valid_interval=1, **EMA)
    weights, averages = exp.trajectory[6], exp.seen[6]
    assert not np.allclose(weights["0.weight"], exp.trajectory[2]["0.weight"])
    assert close(averages, averages_of(exp.trajectory, 0.8))
    assert not np.allclose(averages["0.weight"], weights["0.weight"])
    frozen = [exp.seen[n]["0.weight"] for n in (1, 2)]
    assert all((bits == exp.trajectory[0]["0.weight"]).all() for bits in frozen)

    for end in (1, 4, 6):  # the second start thaws, and the third begins with it frozen
        trained(Thawing, tmp_path / "parts", max_iteration=end, valid_interval=0, **EMA)
    assert same_training(tmp_path / "whole", tmp_path / "parts")
    values = "checkpoints/step-00000006/@values.safetensors"
    assert (tmp_path / "whole" / values).read_bytes() == (tmp_path / "parts" / values).read_bytes()


def test_all_weights_are_averaged_but_for_running_statistics_and_quantized_ones() -> None:
    norms = [paddle.nn.BatchNorm1D(2), paddle.nn.BatchNorm(2), paddle.nn.SpectralNorm([2, 2])]
    layer = paddle.nn.Sequential(*norms, paddle.nn.Linear(2, 2), paddle.nn.LayerNorm(2))
    codes = EagerParamBase.from_tensor(paddle.to_tensor([1, 2]), trainable=False)
    layer[3].add_parameter("codes", codes)
    layer[3].weight.stop_gradient = True
    averages = WeightAverages(layer)
    averages.update(0.9)
    weights = [f"{number}.{name}" for number in (0, 1, 3, 4) for name in ("weight", "bias")]
    assert sorted(averages.state_dict()["averages"]) == sorted(weights)


def test_averages_warm_up_but_for_those_that_an_earlier_version_has_begun() -> None:
    layer = paddle.nn.Linear(1, 1)
    for state, expected in (
        # From 11 to 0: 11 * 2/11, then * 3/12, then * 0.25, which is less than 4/13.
        ({"warms_up": True}, [2.0, 0.5, 0.125]),
        ({}, [2.75, 0.6875, 0.171875]),  # 11 / 4, and so on
    ):
        averages = WeightAverages(layer)
        started = {"weight": paddle.full([1, 1], 11.0), "bias": paddle.zeros([1])}
        averages.load_state_dict({"updates": 0, "averages": started, **state})
        layer.weight.set_value(paddle.zeros([1, 1]))
        found = []
        for _ in expected:
            averages.update(0.25)
            found.append(averages.state_dict()["averages"]["weight"].item())
        assert found == pytest.approx(expected, rel=1e-6)
        assert averages.state_dict().keys() == {"updates", "averages", *state}
    assert WeightAverages(layer).state_dict()["warms_up"]


def test_the_average_of_a_weight_that_does_not_move_has_its_bits() -> None:
    layer = paddle.nn.Linear(100, 100)
    averages = WeightAverages(layer)
    for _ in range(20):
        averages.update(0.999)
    average = averages.state_dict()["averages"]["weight"].numpy()
    assert average.tobytes() == layer.weight.numpy().tobytes()


def test_the_weights_come_back_when_something_fails_under_the_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("on purpose")

    exp = trained(Averaged, tmp_path / "run", valid_interval=0, **EMA)
    for name in ("valid", "predict_batch"):
        monkeypatch.setattr(Averaged, name, fail)
    monkeypatch.setattr(model_files, "export", fail)
    arguments = {"evaluate": [], "predict": [exp.valid_loader], "export": [tmp_path / "to", []]}
    for method, given in arguments.items():
        with pytest.raises(RuntimeError, match="on purpose"):
            getattr(exp, method)(*given)
        assert same_weights(weights_of(exp), exp.trajectory[-1]), method


@pytest.mark.device
def test_averages_are_state_and_continue_exactly(tmp_path: Path) -> None:
    trained(Averaged, tmp_path / "whole", max_iteration=8, **EMA)
    parts = trained(Averaged, tmp_path / "parts", max_iteration=5, valid_interval=0, **EMA)
    first = parts.trajectory
    parts = trained(Averaged, tmp_path / "parts", max_iteration=8, **EMA)
    end = "checkpoints/step-00000008"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)
    assert close(parts.seen[8], averages_of(first + parts.trajectory[1:], 0.8))


@pytest.mark.device
def test_predictions_and_exports_are_those_of_the_averages(tmp_path: Path) -> None:
    class Exporting(Averaged):
        def setup_model(self) -> None:
            super().setup_model()
            self.input_spec = [paddle.static.InputSpec([None, 4], "float32")]

    exp = trained(Exporting, tmp_path / "run", **EMA)
    points = paddle.to_tensor(Points(10).points)
    predicted = np.stack(exp.predict([[points]]))
    exp.export(tmp_path / "exported")
    exported = paddle.jit.load(str(tmp_path / "exported"))(points).numpy()
    assert same_weights(weights_of(exp), exp.trajectory[-1])
    exp.model.eval()
    assert np.abs(exp.model(points).numpy() - predicted).max() > 1e-4
    for name, average in averages_of(exp.trajectory, 0.8).items():
        dict(exp.model.named_parameters())[name].set_value(average.astype("float32"))
    for given in (predicted, exported):
        np.testing.assert_allclose(given, exp.model(points).numpy(), rtol=0, atol=1e-5)


@pytest.mark.device
def test_the_best_checkpoint_brings_the_averages_of_the_best(tmp_path: Path) -> None:
    class Best(Averaged):
        def valid(self) -> dict[str, float]:
            super().valid()
            return {"score": {2: 5.0}.get(self.iteration, 1.0)}

        def on_train_end(self) -> None:
            last = weights_of(self)
            self.load_checkpoint("best")
            self.evaluate(self.train_loader)  # under the number of the last iteration
            assert not same_weights(weights_of(self), last)

    options = {"valid_interval": 1, "save_interval": 1, "monitor": "score", **EMA}
    exp = trained(Best, tmp_path / "run", **options)
    assert close(exp.seen[exp.iteration], averages_of(exp.trajectory[:3], 0.8))
    assert same_weights(weights_of(exp), exp.trajectory[2])


def test_averages_begin_with_the_weights_that_were_loaded(tmp_path: Path) -> None:
    trained(Averaged, tmp_path / "other", valid_interval=0, max_iteration=2, **EMA)
    for args in ({"init_model_path": str(tmp_path / "other")}, None):
        exp = make(Averaged, tmp_path / "run", args, valid_interval=0, **EMA)
        exp.setup()
        with exp.internals.closing():
            exp.resume_or_load()
            if not args:
                exp.load_model(tmp_path / "other")
            exp.evaluate()
        assert same_weights(exp.seen[0], weights_of(exp)), args or "load_model"


@pytest.mark.device
def test_averages_of_half_precision_take_small_changes() -> None:
    layer = paddle.nn.Linear(2, 2)
    layer.to(dtype="bfloat16")
    layer.weight.set_value(paddle.ones([2, 2], "bfloat16"))
    averages = WeightAverages(layer)
    averages.updates = 8990  # warm: (1 + 8991) / (10 + 8991) is more than 0.999
    layer.weight.set_value(paddle.full([2, 2], 2, "bfloat16"))
    averages.update(0.999)
    assert np.allclose(averages.state_dict()["averages"]["weight"].numpy(), 1.001, atol=1e-5)
    with averages.applied():
        assert layer.weight.dtype == paddle.bfloat16


# --- clipping ----------------------------------------------------------------------------------


class Pair(Tiny):
    """Two models with an SGD each; notes the gradients and what the update made of them."""

    apart = False

    def setup_model(self) -> None:
        self.model, self.other = paddle.nn.Linear(4, 2), paddle.nn.Linear(4, 2)
        self.optimizer, self.second = (
            paddle.optimizer.SGD(0.1, parameters=layer.parameters())
            for layer in (self.model, self.other)
        )
        self.noted: list[tuple[np.ndarray, np.ndarray]] = []  # gradients; changes by them

    def train_batch(self) -> None:
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            self.backward(loss + F.cross_entropy(self.other(points), labels) / 8)
        both = [self.optimizer, self.second]
        for optimizers in [[one] for one in both] if self.apart else [both]:
            parameters = [p for optimizer in optimizers for p in optimizer._parameter_list]
            gradients, before = joined([p.grad for p in parameters]), joined(parameters)
            self.update(optimizers)
            self.noted.append((gradients, (before - joined(parameters)) / 0.1))

    def update(self, optimizers: list[Any]) -> None:
        self.step_optimizers(*optimizers)


class ByHand(Pair):
    def update(self, optimizers: list[Any]) -> None:
        self.clip_gradients(*optimizers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.clear_grad()


class Scheduled(Helped):
    """Its schedule steps with it."""

    def train_batch(self) -> None:
        super().train_batch()
        self.optimizer._learning_rate.step()


def joined(tensors: list[Any]) -> np.ndarray:
    return np.concatenate([tensor.numpy().astype("float64").ravel() for tensor in tensors])


@pytest.mark.device
@pytest.mark.parametrize(("pair", "apart"), [(Pair, False), (ByHand, True)])
def test_gradients_that_step_together_are_scaled_to_the_greatest_norm(
    tmp_path: Path, pair: type[Pair], apart: bool
) -> None:
    clipped = type("Clipped", (GradientClipping, pair), {"apart": apart})
    options = {"accumulation_steps": 2, "clipping": {"max_norm": 0.125}}
    exp = trained(clipped, tmp_path / "run", **options)
    norms = [np.linalg.norm(gradients) for gradients, _ in exp.noted]
    assert len(norms) == (12 if apart else 6)
    assert max(norms) > 0.125
    assert any(norm < 0.125 for norm in norms) is apart  # then those of the second are small enough
    for norm, (gradients, changes) in zip(norms, exp.noted, strict=True):
        expected = gradients * min(1, 0.125 / norm)
        np.testing.assert_allclose(changes, expected, rtol=0, atol=1e-5)
    assert "does not come" not in (tmp_path / "run/worker_0.log").read_text()  # by hand, too
    if not apart:
        logged = curve(tmp_path / "run", "train/grad_norm")
        np.testing.assert_allclose(list(logged.values()), norms, rtol=1e-6)


@pytest.mark.device
@pytest.mark.parametrize("how", ["two have it", "one has it twice", "given twice"])
def test_a_gradient_counts_once_and_is_scaled_once(tmp_path: Path, how: str) -> None:
    class Shared(GradientClipping, Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            parameters = self.model.parameters()
            other = paddle.nn.Linear(4, 2)
            self.noted: list[list[np.ndarray]] = []
            self.optimizers = [paddle.optimizer.SGD(0.1, parameters=parameters)]
            if how == "two have it":
                self.other = other
                parameters = [*parameters, *other.parameters()]
                self.optimizers += [paddle.optimizer.Adam(0.1, parameters=parameters)]
            elif how == "one has it twice":
                self.optimizers[0] = paddle.optimizer.SGD(0.1, parameters=[*parameters] * 2)

        def train_batch(self) -> None:
            points, labels = self.read_batch()
            F.cross_entropy(self.model(points), labels).backward()
            trained = [p for p in self.model.parameters() if p.grad is not None]
            before = joined([p.grad for p in trained])
            self.clip_gradients(*self.optimizers * (2 if how == "given twice" else 1))
            self.noted.append([before, joined([p.grad for p in trained])])
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.clear_grad()

    options = {"valid_interval": 0, "max_iteration": 3, "clipping": {"max_norm": 0.125}}
    exp = trained(Shared, tmp_path / "run", **options)
    norms = [np.linalg.norm(before) for before, _ in exp.noted]
    logged = curve(tmp_path / "run", "train/grad_norm")
    np.testing.assert_allclose(list(logged.values()), norms, rtol=1e-5)
    for norm, (before, after) in zip(norms, exp.noted, strict=True):
        np.testing.assert_allclose(after, before * min(1, 0.125 / norm), rtol=1e-5, atol=1e-7)


def test_gradients_below_the_greatest_norm_keep_their_bits_and_zero_only_logs(
    tmp_path: Path,
) -> None:
    clipped = type("Clipped", (GradientClipping, Scheduled), {})
    trained_without_mixins(Tiny, tmp_path / "without")
    for max_norm in (0.0, 7.3):
        output = tmp_path / str(max_norm)
        trained(clipped, output, clipping={"max_norm": max_norm})
        assert same_training(tmp_path / "without", output), max_norm
        norms = curve(output, "train/grad_norm")
        assert list(norms) == [1, 2, 3, 4, 5, 6]
        assert all(0.1 < norm < 7.3 for norm in norms.values())


@pytest.mark.parametrize("has_scaler", [True, False])
def test_a_norm_that_overflows_is_left_out_with_a_scaler_and_else_an_error(
    tmp_path: Path, has_scaler: bool
) -> None:
    class Overflowing(GradientClipping, Pair):
        def setup_model(self) -> None:
            super().setup_model()
            if has_scaler:
                self.scaler = paddle.amp.GradScaler(enable=False)

        def train_batch(self) -> None:
            self.read_batch()
            factor = float("inf") if self.iteration == 2 else 1.0
            (self.model(paddle.ones([1, 4])).sum() * factor).backward()
            self.clip_gradients(self.optimizer)
            self.optimizer.clear_grad()  # as a scaler leaves out such a step

    with nullcontext() if has_scaler else pytest.raises(NonFiniteError, match="grad_norm=inf"):
        trained(Overflowing, tmp_path / "run", max_iteration=3)
    logged = curve(tmp_path / "run", "train/grad_norm")
    assert [*logged] == [1, 3] if has_scaler else [1]


def test_a_sparse_gradient_is_refused(tmp_path: Path) -> None:
    class Sparse(GradientClipping, Pair):
        def setup_model(self) -> None:
            super().setup_model()
            self.words = paddle.nn.Embedding(5, 2, sparse=True)
            self.third = paddle.optimizer.SGD(0.1, parameters=self.words.parameters())

        def train_batch(self) -> None:
            self.read_batch()
            self.backward(self.words(paddle.to_tensor([1, 2])).sum())
            self.step_optimizers()

    with pytest.raises(ValueError, match=r"an Embedding with sparse=True; expected dense"):
        trained(Sparse, tmp_path / "run")


# --- together ----------------------------------------------------------------------------------

MIXINS = (EarlyStopping, ExponentialMovingAverage, GradientClipping)
ORDERS = (MIXINS, MIXINS[::-1], (*MIXINS[1:], MIXINS[0]))  # each of them is the first once


@pytest.mark.long
def test_the_three_give_the_same_bits_in_any_order(tmp_path: Path) -> None:
    options = {"clipping": {"max_norm": 0.5}, "ema": {"decay": 0.5}, "valid_interval": 1}
    options |= {"monitor": "loss", "monitor_mode": "min", "early_stopping": {"patience": 3}}
    ends = []
    for number, order in enumerate(ORDERS):

        class All(*order, Scheduled):  # type: ignore[misc]
            def valid(self) -> dict[str, float]:
                [loss] = [F.cross_entropy(self.model(x), y) for x, y in self.valid_batches()]
                return {"loss": float(loss) + self.iteration}

            def setup_dataloader(self) -> None:
                super().setup_dataloader()
                self.valid_loader = DataLoader(Points(10), batch_size=10)

        output = tmp_path / str(number)
        assert trained(All, output, **options).iteration == 4
        ends.append(output / "checkpoints/step-00000004")
        assert max(curve(output, "train/grad_norm").values()) > 0.5
        assert curve(output, "valid/loss") == curve(tmp_path / "0", "valid/loss")
    for end in ends[1:]:
        same_bits(ends[0], end)


@pytest.mark.parametrize(
    ("mixin", "section", "key", "values"),
    [
        (ExponentialMovingAverage, "ema", "decay", [-0.1, 1.0, nan]),
        (GradientClipping, "clipping", "max_norm", [-1.0, inf]),
    ],
)
def test_a_value_with_which_a_mixin_does_nothing_is_an_error(
    tmp_path: Path, mixin: type[ExperimentBase], section: str, key: str, values: list[float]
) -> None:
    mixed = type("Mixed", (mixin, Scheduled), {})
    for value in values:
        with pytest.raises(ConfigError, match=rf"{section}\.{key}: {value} given; expected 0 "):
            trained(mixed, tmp_path / "run", **{section: {key: value}})


def test_every_section_stands_in_the_config_beside_those_of_the_experiment() -> None:
    class Own(EarlyStopping, ExponentialMovingAverage, GradientClipping, Tiny):
        @classmethod
        def default_config(cls) -> Config:
            config = super().default_config()
            config.optim = Config({"lr": 0.1})
            config.ema.decay = 0.5
            return config

    config = Own.default_config()
    assert set(config) == {"training", "early_stopping", "ema", "clipping", "optim"}
    assert config.ema.decay == 0.5
    assert ExponentialMovingAverage.default_config().ema.decay == 0.999


def test_what_a_mixin_adds_says_where_it_is_without_the_mixin(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path)
    for mixin in (*MIXINS, Prediction):
        added = [
            name for name in vars(mixin) if name[0] != "_" and not hasattr(ExperimentBase, name)
        ]
        assert added
        for name in added:
            with pytest.raises(AttributeError) as caught:
                getattr(exp, name)
            place = f"from {mixin.__module__} import {mixin.__name__}"
            assert f"no attribute {name!r}. It is the mixin" in str(caught.value)
            assert f"`{place}`" in str(caught.value)
