"""Mixed precision where it is alive, on the pretend accelerator: on the CPU paddle has none."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pretend
import pytest
from paddle.amp.auto_cast import amp_global_state
from tiny import Notes, Tiny, curve, same_bits, trained

from expbase.base.arrays import Array, parse
from expbase.extras.mixins import ExponentialMovingAverage, GradientClipping

pytestmark = pytest.mark.pretend

IN_HALVES = {"0.weight", "0.bias", "3.weight", "3.bias"}  # paddle leaves batch norm in float32
OVERFLOWING = 2.0**24  # a scale with which the first gradients overflow in float16


class Mixed(Tiny):
    """Tiny in 16 bits, without dropout; in float16 with a scaler."""

    level, dtype, scale = "O2", "float16", 2.0**10

    def setup_model(self) -> None:
        net = paddle.nn.Sequential(
            paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Tanh(),
            paddle.nn.Linear(8, 2),
        )  # fmt: skip
        rate = paddle.optimizer.lr.CosineAnnealingDecay(0.01, T_max=30)
        adam = paddle.optimizer.AdamW(rate, parameters=net.parameters())
        self.model, self.optimizer = paddle.amp.decorate(net, adam, self.level, self.dtype)
        if self.dtype == "float16":
            self.scaler = paddle.amp.GradScaler(True, self.scale, incr_every_n_steps=3)
        self.scales: list[float] = Notes()
        self.weights: list[np.ndarray] = Notes([self.weight()])

    def train_batch(self) -> None:
        for points, labels in self.micro_batches():
            with paddle.amp.auto_cast(level=self.level, dtype=self.dtype):
                loss = F.cross_entropy(self.model(points), labels)
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers()
        self.optimizer._learning_rate.step()
        if self.dtype == "float16":
            self.scales.append(self.scaler.state_dict()["scale"].item())
        self.weights.append(self.weight())

    def weight(self) -> np.ndarray:
        return self.model[0].weight.astype("float32").numpy()


def files_of(checkpoint: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays of the model, and of the optimizer."""
    names = "model.safetensors", "optimizer.safetensors"
    return tuple(parse((checkpoint / name).read_bytes()) for name in names)


def killed(experiment: type[Tiny]) -> type[Tiny]:
    class Killed(experiment):  # type: ignore[misc, valid-type]
        def backward(self, loss: Any) -> None:
            super().backward(loss)
            if self.iteration == 8:
                raise KeyboardInterrupt

    return Killed


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_in_float16_that_skips_updates_continues_to_the_same_bits(
    tmp_path: Path, level: str
) -> None:
    experiment = type("Half", (Mixed,), {"level": level, "scale": OVERFLOWING})
    options = {"max_iteration": 14, "accumulation_steps": 2, "save_interval": 3}
    whole = trained(experiment, tmp_path / "whole", **options)
    stays = [bool((a == b).all()) for a, b in pairwise(whole.weights)]
    falls = [b < a for a, b in pairwise([OVERFLOWING, *whole.scales])]
    assert stays == falls  # an update is left out where the scale falls
    assert stays[:4] == [True] * 4  # the first checkpoint knows no update yet
    assert not all(stays[4:])
    assert any(b > a for a, b in pairwise(whole.scales))
    with pytest.raises(KeyboardInterrupt):
        trained(killed(experiment), tmp_path / "parts", **options)
    parts = trained(experiment, tmp_path / "parts", **options)
    assert parts.scales == whole.scales[6:]
    end = "checkpoints/step-00000014"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


def test_a_run_in_bfloat16_with_master_weights_continues_to_the_same_bits(tmp_path: Path) -> None:
    experiment = type("Brain", (Mixed,), {"dtype": "bfloat16"})
    options = {"max_iteration": 9, "accumulation_steps": 2, "save_interval": 3, "keep_last": 0}
    trained(experiment, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        trained(killed(experiment), tmp_path / "parts", **options)
    trained(experiment, tmp_path / "parts", **options)
    end = "checkpoints/step-00000009"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)
    model, optimizer = files_of(tmp_path / "whole" / end)
    assert {name for name, array in model.items() if array.dtype == "bfloat16"} == IN_HALVES
    masters = {n.partition("/model.")[2]: a for n, a in optimizer.items() if n[:6] == "master"}
    assert masters.keys() == IN_HALVES
    _, before = files_of(tmp_path / "whole/checkpoints/step-00000006")
    for name, master in masters.items():
        assert master.dtype == "float32"
        assert master.converted("bfloat16") == model[name]
        assert master != before[f"master_weight/model.{name}"]
        assert master != model[name].converted("float32")  # it has more bits


def test_clipping_and_averages_go_with_a_scaler_and_16_bits(tmp_path: Path) -> None:
    class Both(ExponentialMovingAverage, GradientClipping, Mixed):
        scale = OVERFLOWING

    def run(output: Path, end: int) -> Any:
        config = Both.default_config()
        config.training.update({"max_iteration": end, "log_interval": 1, "valid_interval": 3})
        exp = Both(config, argparse.Namespace(output=str(output), device=pretend.NAME))
        exp.setup()
        exp.run()
        return exp

    whole = run(tmp_path / "whole", 12)
    updates = 1 + np.flatnonzero([(a != b).any() for a, b in pairwise(whole.weights)])
    assert [*curve(tmp_path / "whole", "train/grad_norm")] == updates.tolist()
    averages = whole.weight_averages.state_dict()["averages"]
    assert {str(average.dtype) for average in averages.values()} == {"paddle.float32"}
    assert (averages["0.weight"].numpy() != whole.weights[0]).any()
    for end in (5, 12):
        run(tmp_path / "parts", end)
    end = "checkpoints/step-00000012"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


def test_weights_that_are_loaded_in_training_are_what_the_next_step_starts_from(
    tmp_path: Path,
) -> None:
    class Loading(Mixed):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 5:
                self.load_model(tmp_path / "first.safetensors")
                self.weights.append(self.weight())

    trained(Mixed, tmp_path / "first", max_iteration=1).save_model(tmp_path / "first.safetensors")
    *_, loaded, after = trained(Loading, tmp_path / "run", max_iteration=6).weights
    assert (loaded != after).any()
    # Adam moves a weight by about its rate; from the master weights of before it would be by five.
    assert np.abs(after - loaded).max() < 0.02


def test_an_exported_model_in_16_bits_computes_what_the_layer_does(tmp_path: Path) -> None:
    exp = trained(Mixed, tmp_path / "run", max_iteration=2)
    exp.export(tmp_path / "export/model", [paddle.static.InputSpec([None, 4], "float16")])
    exported = paddle.jit.load(str(tmp_path / "export/model"))
    points = paddle.ones([2, 4], "float16")
    exp.model.eval()
    with paddle.amp.auto_cast(level="O2"):
        expected = exp.model(points)
    assert expected.dtype == paddle.float16
    assert (exported(points) == expected).all()


@pytest.mark.parametrize(("dtype", "asked"), [("float16", 1), ("bfloat16", 0)])
def test_an_update_waits_for_the_device_only_where_the_scaler_asks_it(
    tmp_path: Path, dtype: str, asked: int
) -> None:
    class Counted(Mixed):
        def weight(self) -> Any:
            return None  # which would ask

        def step_optimizers(self, *optimizers: Any) -> None:
            before = pretend.counts()
            super().step_optimizers(*optimizers)
            self.counts = Notes([*getattr(self, "counts", []), pretend.counts().since(before)])

    exp = trained(type("Counted", (Counted,), {"dtype": dtype}), tmp_path / "run", max_iteration=4)
    later = exp.counts[1:]  # the first step makes the accumulators
    # paddle/optimizer/optimizer.py, _create_optimization_pass, looks whether gradients overflowed.
    assert [counts.to_host for counts in later] == [asked] * 3
    assert [counts.to_device + counts.within for counts in later] == [0] * 3
    assert [bool(counts.waits) for counts in later] == [bool(asked)] * 3


def test_gradients_of_float32_that_an_update_leaves_to_weights_in_16_bits_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Every(Mixed):
        """Steps with the gradients of two updates; paddle makes them float32 after each."""

        dtype = "bfloat16"

        def setup_model(self) -> None:
            super().setup_model()
            monkeypatch.setattr(amp_global_state(), "model_parameters", self.model.parameters())

        def step_optimizers(self, *optimizers: Any) -> None:
            assert self.model[0].weight.grad.dtype == paddle.float32
            if self.iteration % 2 == 0:
                super().step_optimizers(*optimizers)

    monkeypatch.setattr(amp_global_state(), "use_master_grad", True)  # decorate(master_grad=True)
    for output, ends in {"whole": (6,), "parts": (3, 6)}.items():
        for end in ends:
            trained(Every, tmp_path / output, max_iteration=end)
    end = "checkpoints/step-00000006"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)


class Plain(Mixed):
    """The step by hand: self.backward scales the loss, and nobody divides the gradients."""

    def step_optimizers(self, *optimizers: Any) -> None:
        self.optimizer.step()
        self.optimizer.clear_grad()


class Unscaled(Mixed):
    """The backward by hand: the step divides gradients that nobody has multiplied."""

    def backward(self, loss: Any) -> None:
        loss.backward()


class ByHand(Plain, Unscaled):
    """Both by hand, as paddle's own pages write it."""

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()

    def step_optimizers(self, *optimizers: Any) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.clear_grad()


@pytest.mark.parametrize(
    ("experiment", "line"),
    [
        (Mixed, ""),
        (ByHand, ""),
        (
            Plain,
            "[1] self.optimizer has stepped, and its gradients are still multiplied by the "
            "GradScaler's scale; expected self.step_optimizers().",
        ),
        (
            Unscaled,
            "[1] self.optimizer has stepped, and its gradients were divided by the GradScaler's "
            "scale, and the loss was not multiplied by it; expected self.backward(loss).",
        ),
    ],
)
def test_half_of_a_scaler_is_told_after_the_first_step(
    tmp_path: Path, experiment: type[Tiny], line: str
) -> None:
    trained(experiment, tmp_path, max_iteration=3, log_interval=1)
    log = (tmp_path / "worker_0.log").read_text().splitlines()
    warned = [text.partition("WARNING: ")[2] for text in log if "WARNING: " in text]
    assert warned == [line] * bool(line)
