"""An update in parts: accumulation, synchronization over ranks, GradScaler, steps, inner events."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.amp import grad_scaler
from paddle.io import DataLoader, TensorDataset
from tiny import DEVICE, Points, Tiny, curve, make, run_ranks, same_bits, trained

from expbase.extras.all_events import AllEvents
from expbase.extras.mixins import GradientClipping

RARE = {"log_interval": 1000, "valid_interval": 1000, "save_interval": 1000}


class Helped(Tiny):
    """Draws nothing at random, so that 2 x 4 samples give what 8 give; notes its gradients."""

    def setup_dataloader(self) -> None:
        data = Points(self.size)
        tensors = [paddle.to_tensor(data.points), paddle.to_tensor(data.labels)]
        self.train_loader = DataLoader(
            TensorDataset(tensors), batch_size=self.batch_size, shuffle=True
        )
        self.valid_loader = DataLoader(TensorDataset(tensors), batch_size=20)

    def setup_model(self) -> None:
        net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 2))
        self.model = self.data_parallel(net)
        self.optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
        self.noted: list[tuple[bool, list[float]]] = []  # after each backward

    def train_batch(self) -> None:
        for batch in self.micro_batches():
            loss = self.loss_of(batch)
            self.add_gradients(loss)
            self.log(loss=loss)
            synchronizes = getattr(self.model, "grad_need_sync", True)
            self.noted.append((synchronizes, gradient_of(self.model).tolist()))
        self.update()

    def loss_of(self, batch: Any) -> Any:
        points, labels = batch
        return F.cross_entropy(self.model(points), labels)

    def add_gradients(self, loss: Any) -> None:
        self.backward(loss)

    def update(self) -> None:
        self.step_optimizers()


class ByHand(Helped):
    def add_gradients(self, loss: Any) -> None:
        (loss / self.config.training.accumulation_steps).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()


class Pair(Helped):
    """Two models with an optimizer each."""

    def setup_model(self) -> None:
        super().setup_model()
        self.other = paddle.nn.Linear(4, 2)
        self.other_optimizer = paddle.optimizer.SGD(0.1, parameters=self.other.parameters())

    def loss_of(self, batch: Any) -> Any:
        points, labels = batch
        return super().loss_of(batch) + F.cross_entropy(self.other(points), labels)


def gradient_of(layer: Any) -> np.ndarray:
    gradients = [p.grad for p in layer.parameters()]
    return np.concatenate([np.ravel(g.numpy()) for g in gradients if g is not None] or [[]])


def weights_of(layer: Any) -> np.ndarray:
    return np.concatenate([p.numpy().ravel() for p in layer.parameters()])


def of_batch_size(experiment: type[Tiny], size: int) -> type[Tiny]:
    return type(experiment.__name__, (experiment,), {"batch_size": size})


# --- accumulation ------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pathlib import Path
from test_update import ByHand, Helped, of_batch_size, weights_of
from tiny import trained

for experiment in (Helped, ByHand):
    output = Path(sys.argv[1]) / experiment.__name__
    options = {"max_iteration": 7, "accumulation_steps": 2, "valid_interval": 0, "save_interval": 0}
    exp = trained(of_batch_size(experiment, 2), output, **options)
    facts = {"weights": weights_of(exp.model).tolist(), "noted": exp.noted}
    (output / f"facts_{exp.rank}.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that accumulate 2 x 2 samples each; 7 updates, more than a pass."""
    folder = tmp_path_factory.mktemp("launched")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    for rank in run_ranks([[str(script), str(folder)]] * 2):
        assert rank.returncode == 0, rank.stderr
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The weights after as many updates of 8 samples each."""
    output = tmp_path_factory.mktemp("large")
    return weights_of(trained(of_batch_size(Helped, 8), output, max_iteration=7, **RARE).model)


def facts_of(launched: Path, experiment: type[Tiny]) -> list[dict]:
    folder = launched / experiment.__name__
    return [json.loads((folder / f"facts_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.device
@pytest.mark.parametrize("experiment", [Helped, ByHand])
def test_accumulation_gives_the_parameters_of_one_large_batch(
    tmp_path: Path, large: np.ndarray, experiment: type[Tiny]
) -> None:
    options = {**RARE, "max_iteration": 7, "accumulation_steps": 2}
    small = trained(experiment, tmp_path / "small", **options)
    assert (small.epoch, small.internals.batch_in_epoch) == (2, 4)
    np.testing.assert_allclose(weights_of(small.model), large, rtol=0, atol=1e-6)


@pytest.mark.parametrize("experiment", [Helped, ByHand])
def test_two_ranks_that_accumulate_equal_one_process_with_all_samples(
    launched: Path, large: np.ndarray, experiment: type[Tiny]
) -> None:
    one, two = (facts["weights"] for facts in facts_of(launched, experiment))
    assert one == two
    np.testing.assert_allclose(one, large, rtol=0, atol=1e-6)


@pytest.mark.parametrize("experiment", [Helped, ByHand])
def test_ranks_average_their_gradients_once_per_update_with_the_last_batch(
    launched: Path, experiment: type[Tiny]
) -> None:
    one, two = (facts["noted"] for facts in facts_of(launched, experiment))
    assert [synchronizes for synchronizes, _ in one] == [False, True] * 7
    equal = [mine == theirs for (_, mine), (_, theirs) in zip(one, two, strict=True)]
    assert equal == [False, True] * 7


def test_accumulation_that_train_batch_ignores_is_an_error_before_a_checkpoint(
    tmp_path: Path,
) -> None:
    class Ignoring(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.updates = self.iteration
            self.save()

    exp = make(Ignoring, tmp_path / "run", max_iteration=5000, accumulation_steps=2, **RARE)
    exp.setup()
    text = r"accumulation_steps: 2 given, .* did not call self\.micro_batches\(\); expected `for"
    with pytest.raises(ValueError, match=text):
        exp.run()
    assert exp.updates == 1
    assert not list((tmp_path / "run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("experiment", "within"), [(Helped, False), (Helped, True), (ByHand, False)]
)
def test_an_update_after_part_of_the_batches_is_an_error(
    tmp_path: Path, experiment: type[Helped], within: bool
) -> None:
    class Hasty(experiment):  # type: ignore[misc, valid-type]
        def train_batch(self) -> None:
            for batch in self.micro_batches():
                self.add_gradients(self.loss_of(batch))
                if within:
                    self.update()
                elif self.internals.batch_in_epoch % 3 == 2:
                    break
            self.update()

    with pytest.raises(RuntimeError, match=r"made after \d of 3 batches; expected .* no break"):
        trained(Hasty, tmp_path / "run", accumulation_steps=3, save_interval=1)
    if experiment is Helped:
        assert not list((tmp_path / "run/checkpoints").glob("step-*"))


def test_backward_divides_within_the_loop_alone(tmp_path: Path) -> None:
    class Penalized(Helped):
        def train_batch(self) -> None:
            self.factors, self.heard = [], []
            [weight] = self.optimizer._parameter_list[-1:]
            before = None
            for batch in self.micro_batches():
                before = before or self.loss_of(batch)
                self.add_of(weight)
            self.add_of(weight)
            self.step_optimizers()
            self.add_of(weight)
            self.optimizer.clear_grad()

        def add_of(self, weight: Any) -> None:
            weight.clear_gradient()
            self.backward(3 * weight.sum())
            self.factors.append(weight.grad.numpy().tolist()[0])

    accumulated = trained(Penalized, tmp_path / "run", max_iteration=2, accumulation_steps=4)
    assert accumulated.factors == [0.75] * 4 + [3, 3]
    assert trained(Penalized, tmp_path / "one", max_iteration=1).factors == [3, 3, 3]


def test_a_loop_that_took_all_batches_without_asking_for_more_is_over(tmp_path: Path) -> None:
    class Zipped(Helped):
        def train_batch(self) -> None:
            batches = self.micro_batches()
            for _ in range(2):
                next(batches)
            self.step_optimizers()
            weight = self.optimizer._parameter_list[-1]
            self.backward(weight.sum())
            self.gradient = weight.grad.numpy().tolist()[0]

    assert trained(Zipped, tmp_path / "run", max_iteration=1, accumulation_steps=2).gradient == 1


def test_accumulation_goes_over_the_end_of_a_pass(tmp_path: Path) -> None:
    class Noting(AllEvents, Helped):
        size = 20  # 5 batches

        def on_train_begin(self) -> None:
            self.read: list[Any] = []

        def on_train_epoch_begin(self) -> None:
            self.read.append((self.iteration, []))

        def on_batch_read(self, batch: Any, indices: Any) -> None:
            self.read[-1][1].extend(indices)

        def on_train_epoch_end(self) -> None:
            self.read.append("end")

    exp = trained(Noting, tmp_path / "run", max_iteration=0, max_epoch=3, accumulation_steps=2)
    # 3 passes of 5 batches; the last update has its second batch from a fourth pass.
    assert (exp.iteration, exp.epoch, exp.internals.batch_in_epoch) == (8, 4, 1)
    passes, ends = exp.read[::2], exp.read[1::2]
    assert ends == ["end"] * 3
    assert [sorted(indices) for _, indices in passes[:3]] == [list(range(20))] * 3
    assert [iteration for iteration, _ in passes] == [0, 3, 5, 8]  # begun within updates 3 and 8


def test_an_accumulating_run_continues_to_the_same_bits_in_mid_epoch(tmp_path: Path) -> None:
    class Accumulating(Tiny):
        size = 20  # 5 batches: the third update stands on both sides of the end of a pass

        def train_batch(self) -> None:
            for points, labels in self.micro_batches():
                self.backward(F.cross_entropy(self.model(points), labels))
                self.between()
            self.step_optimizers()
            self.optimizer._learning_rate.step()

        def between(self) -> None: ...

    class Killed(Accumulating):
        def between(self) -> None:
            if self.iteration == 4:  # half of its gradients and a batch are lost
                raise KeyboardInterrupt

    options = {"max_iteration": 7, "accumulation_steps": 2, "save_interval": 3}
    trained(Accumulating, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        trained(Killed, tmp_path / "parts", **options)
    assert [path.name for path in (tmp_path / "parts/checkpoints").iterdir()] == ["step-00000003"]
    trained(Accumulating, tmp_path / "parts", **options)
    end = "checkpoints/step-00000007"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


# --- the GradScaler ----------------------------------------------------------------------------


@pytest.fixture
def enabled_scaler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes GradScalers that are enabled, also on the CPU, where paddle switches them off."""
    if DEVICE == "cpu":
        tracer = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
        monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: tracer)
    monkeypatch.setattr(grad_scaler.amp_global_state(), "amp_dtype", "float16")
    return paddle.amp.GradScaler


def with_scaler(experiment: type[Tiny], make_scaler: Callable[..., Any], **options: Any) -> Any:
    class Scaled(experiment):  # type: ignore[misc, valid-type]
        def setup_model(self) -> None:
            super().setup_model()
            self.scaler = make_scaler(**{"init_loss_scaling": 1024.0, **options})

    return Scaled


@pytest.mark.device
def test_losses_are_scaled_and_gradients_unscaled_before_they_can_be_changed(
    tmp_path: Path, enabled_scaler: Callable[..., Any]
) -> None:
    class Noting(AllEvents, Pair):
        def on_before_backward(self, loss: Any) -> None:
            self.log(heard=loss)

        def on_before_optimizers_step(self) -> None:
            self.unscaled = [gradient_of(self.model), gradient_of(self.other)]

    options = {"max_iteration": 3, "accumulation_steps": 2}
    plain = trained(Noting, tmp_path / "plain", **options)
    scaled = trained(with_scaler(Noting, enabled_scaler), tmp_path / "scaled", **options)
    for (_, mine), (_, theirs) in zip(scaled.noted, plain.noted, strict=True):
        assert mine == (np.float32(1024) * np.float32(theirs)).tolist()  # a power of 2: exact
    for name in ("model", "other"):
        ours, theirs = weights_of(getattr(scaled, name)), weights_of(getattr(plain, name))
        assert (ours == theirs).all()
    assert all((a == b).all() for a, b in zip(scaled.unscaled, plain.unscaled, strict=True))
    accuracies = [curve(tmp_path / run, "valid/accuracy") for run in ("scaled", "plain")]
    assert accuracies[0] == accuracies[1]


class Tied(Pair):
    """Its second optimizer has each parameter twice, and others have what these two have."""

    def setup_model(self) -> None:
        super().setup_model()
        self.other_optimizer = paddle.optimizer.SGD(0.1, parameters=self.other.parameters() * 2)
        both = [*self.model.parameters(), *self.other.parameters()]
        self.more = [paddle.optimizer.SGD(0.02, parameters=both) for _ in range(4)]


@pytest.mark.device
@pytest.mark.parametrize(("name", "several"), [("model", Pair), ("other", Tied)])
def test_an_infinite_gradient_of_one_optimizer_has_none_step_and_lowers_the_scale(
    tmp_path: Path, enabled_scaler: Callable[..., Any], name: str, several: type[Pair]
) -> None:
    class Overflowing(AllEvents, several):  # type: ignore[misc, valid-type]
        def on_train_begin(self) -> None:
            self.weights = [self.both()]
            self.scales: list[float] = []

        def on_after_backward(self) -> None:
            if self.iteration == 2:
                [first, *_] = getattr(self, name).parameters()
                first.grad_.set_value(paddle.full_like(first, float("inf")))

        def on_train_batch_end(self) -> None:
            self.weights.append(self.both())
            self.scales.append(self.scaler.state_dict()["scale"].item())

        def both(self) -> list[np.ndarray]:
            return [weights_of(self.model), weights_of(self.other)]

    exp = trained(with_scaler(Overflowing, enabled_scaler), tmp_path / "run", max_iteration=3)
    moved = [
        [bool((a != b).any()) for a, b in zip(before, after, strict=True)]
        for before, after in pairwise(exp.weights)
    ]
    assert moved == [[True, True], [False, False], [True, True]]
    assert exp.scales == [1024, 512, 512]
    assert np.isfinite(exp.weights[-1][0]).all()


def test_the_state_of_the_scaler_comes_back(
    tmp_path: Path, enabled_scaler: Callable[..., Any]
) -> None:
    scaled = with_scaler(Pair, enabled_scaler, incr_every_n_steps=3)
    trained(scaled, tmp_path / "whole", max_iteration=7, save_interval=100)
    trained(scaled, tmp_path / "parts", max_iteration=5, valid_interval=0)  # scaled up once
    exp = trained(scaled, tmp_path / "parts", max_iteration=7, save_interval=100)
    assert exp.scaler.state_dict()["scale"].item() == 4096
    end = "checkpoints/step-00000007"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


@pytest.mark.skipif(DEVICE != "cpu", reason="paddle switches it off on the CPU alone")
def test_a_scaler_that_paddle_switched_off_is_harmless(tmp_path: Path) -> None:
    def switched_off(**options: Any) -> Any:
        with pytest.warns(UserWarning, match="AmpScaler can only be enabled on"):
            return paddle.amp.GradScaler(**options)

    plain = trained(Pair, tmp_path / "plain", max_iteration=3, **RARE)
    for end in (2, 3):  # its state is empty, and comes back
        scaled = trained(with_scaler(Pair, switched_off), tmp_path / "run", max_iteration=end)
    assert (weights_of(scaled.model) == weights_of(plain.model)).all()
    assert (weights_of(scaled.other) == weights_of(plain.other)).all()


@pytest.mark.device
def test_the_scale_is_taken_out_once_of_a_gradient_that_several_optimizers_have(
    tmp_path: Path, enabled_scaler: Callable[..., Any]
) -> None:
    plain = trained(Tied, tmp_path / "plain", max_iteration=3, **RARE)
    for is_dynamic in (True, False):
        tied = with_scaler(Tied, enabled_scaler, use_dynamic_loss_scaling=is_dynamic)
        scaled = trained(tied, tmp_path / f"scaled_{is_dynamic}", max_iteration=3, **RARE)
        for name in ("model", "other"):
            ours, theirs = weights_of(getattr(scaled, name)), weights_of(getattr(plain, name))
            assert (ours == theirs).all(), (name, is_dynamic)


@pytest.mark.filterwarnings("ignore:It is not recommended to use dynamic loss scaling")
def test_a_scaler_that_switches_itself_off_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled_scaler: Callable[..., Any]
) -> None:
    monkeypatch.setattr(grad_scaler.amp_global_state(), "amp_dtype", "bfloat16")
    scaled = with_scaler(Helped, enabled_scaler)
    for end in (2, 4):
        assert trained(scaled, tmp_path / "run", max_iteration=end).iteration == end


@pytest.mark.device
def test_an_overflow_does_not_end_a_run_that_clips_its_gradients(
    tmp_path: Path, enabled_scaler: Callable[..., Any]
) -> None:
    class Clipped(AllEvents, GradientClipping, Helped):
        def on_after_backward(self) -> None:
            if self.iteration == 2:
                [first, *_] = self.model.parameters()
                first.grad_.set_value(paddle.full_like(first, float("inf")))

    scaled = with_scaler(Clipped, enabled_scaler)
    config = Clipped.default_config()
    config.training.update({"max_iteration": 4, "log_interval": 1})
    exp = scaled(config, argparse.Namespace(output=str(tmp_path / "run"), device=DEVICE))
    exp.setup()
    exp.run()
    assert exp.iteration == 4


# --- steps and inner events --------------------------------------------------------------------


@pytest.mark.device
def test_optimizers_that_are_given_step_alone(tmp_path: Path) -> None:
    class Apart(Pair):
        def train_batch(self) -> None:
            self.backward(self.loss_of(self.read_batch()))
            self.before = weights_of(self.model), weights_of(self.other)
            self.step_optimizers(self.other_optimizer)
            self.left = gradient_of(self.model), gradient_of(self.other)

        def on_before_optimizers_step(self) -> None:
            self.stepped = self.internals.stepping

    exp = trained(Apart, tmp_path / "run", max_iteration=1)
    assert exp.stepped == (exp.other_optimizer,)
    assert (weights_of(exp.model) == exp.before[0]).all()
    assert (weights_of(exp.other) != exp.before[1]).any()
    assert exp.left[0].any()  # not cleared
    assert not exp.left[1].any()


def test_without_a_choice_every_optimizer_steps_once(tmp_path: Path) -> None:
    class Named(Pair):
        def setup_model(self) -> None:
            super().setup_model()
            self.all = {"again": [self.optimizer]}
            self.exclude_from_state("other_optimizer")

        def on_before_optimizers_step(self) -> None:
            self.stepped = self.internals.stepping

    exp = trained(Named, tmp_path / "run", max_iteration=2, **RARE)
    plain = trained(Pair, tmp_path / "plain", max_iteration=2, **RARE)
    assert exp.stepped == (exp.optimizer, exp.other_optimizer)
    assert (weights_of(exp.model) == weights_of(plain.model)).all()
    assert (weights_of(exp.other) == weights_of(plain.other)).all()


def test_the_inner_events_come_in_order_and_show_what_they_promise(tmp_path: Path) -> None:
    def noting(name: str) -> Callable[..., None]:
        def method(self: Any, *args: Any) -> None:
            given = [float(loss) == self.loss for loss in args]  # neither divided nor scaled
            stepped = bool((weights_of(self.model) != self.before).any())
            has_gradients = bool(gradient_of(self.model).any())
            steps = self.internals.stepping == (self.optimizer,)
            self.calls.append((name.removeprefix("on_"), *given, has_gradients, stepped, steps))

        return method

    class Traced(AllEvents, Helped):
        def train_batch(self) -> None:
            self.calls = []
            self.before = weights_of(self.model)
            super().train_batch()
            self.calls.append(self.internals.stepping)

        def loss_of(self, batch: Any) -> Any:
            loss = super().loss_of(batch)
            self.loss = float(loss)
            return loss

    names = ["on_before_backward", "on_after_backward", "on_before_optimizers_step"]
    names += ["on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad"]
    traced = type("Traced", (Traced,), {name: noting(name) for name in names})
    exp = trained(traced, tmp_path / "run", max_iteration=2, accumulation_steps=2)
    # what was heard, gradients are there, was stepped, is in internals.stepping
    assert exp.calls == [
        ("before_backward", True, False, False, False),
        ("after_backward", True, False, False),
        ("before_backward", True, True, False, False),
        ("after_backward", True, False, False),
        ("before_optimizers_step", True, False, True),
        ("after_optimizers_step", True, True, True),
        ("before_zero_grad", True, True, True),
        ("after_zero_grad", False, True, True),
        (),
    ]


def test_a_container_that_holds_itself_is_no_endless_search(tmp_path: Path) -> None:
    class Cyclic(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            self.notes: list[Any] = [{}]
            self.notes[0]["all"] = self.notes

    assert trained(Cyclic, tmp_path / "run", max_iteration=2, accumulation_steps=2).iteration == 2
