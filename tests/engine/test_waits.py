"""How often training waits for a device: not at all between two lines.

What the device has no kernel for is computed on the CPU, with copies that wait, in any loop: so
what a loop without a template waits is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pretend
import pytest
from tiny import make

from expbase import ExperimentBase
from expbase.doctor.first_updates import EARLY
from expbase.extras.mixins import GradientClipping

pytestmark = pytest.mark.pretend
WEIGHTS = 4  # of the model, with biases


class Plain(ExperimentBase):
    """A model and its update; what is read is no tensor, which would have to be copied."""

    set_to_zero = False  # whether gradients are left as zeros

    def setup_dataloader(self) -> None:
        self.train_loader = range(1000)

    def setup_model(self) -> None:
        self.model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
        parameters = self.model.parameters()
        self.optimizer = paddle.optimizer.Momentum(0.01, parameters=parameters)

    def train_batch(self) -> None:
        self.read_batch()
        self.log(self.update())

    def update(self) -> dict[str, Any]:
        loss = self.model(paddle.ones([4, 4])).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=self.set_to_zero)
        return {"loss": loss, "shaped": loss.reshape([1]), "wide": loss.astype("float64")}

    def bare(self) -> None:
        """What a loop without a template does: what it logs is copied, to be read later."""
        for value in self.update().values():
            value.detach().clone()


def counted(call: Callable[[], Any]) -> pretend.Counts:
    """How often the device was asked within a call."""
    before = pretend.counts()
    call()
    return pretend.counts().since(before)


def iterate(exp: ExperimentBase, times: int) -> None:
    """Makes iterations."""
    for _ in range(times):
        assert exp.going_on()
        exp.train_batch()
        exp.end_iteration()


def begun(experiment: type[ExperimentBase], output: Path, **training: Any) -> Any:
    """An experiment at the defaults, after a line, and after the updates that are looked at."""
    by_default = {"max_iteration": 1000, "valid_interval": 1000, "save_interval": 1000}
    exp = make(experiment, output, **by_default, log_interval=10, **training)
    exp.setup()
    iterate(exp, EARLY)
    return exp


def test_between_lines_nothing_waits_for_the_device_and_a_line_waits_once(tmp_path: Path) -> None:
    exp = begun(Plain, tmp_path / "run")
    bare = counted(exp.bare)
    assert counted(lambda: iterate(exp, 9)) == tuple(9 * number for number in bare)
    line = counted(lambda: iterate(exp, 1)).since(bare)
    exp.close()
    assert line == pretend.Counts(0, 0, 0, 0, 0, 0, 0)._replace(synchronized=1, queued_to_host=2)


def test_a_save_waits_once_and_copies_each_tensor_once(tmp_path: Path) -> None:
    exp = begun(Plain, tmp_path / "run")
    counts = counted(exp.save)
    exp.close()
    assert (counts.waits, counts.synchronized) == (1, 1)
    assert counts.queued_to_host == 2 * WEIGHTS  # with their velocities


def test_gradients_of_zeros_are_not_copied_at_a_save(tmp_path: Path) -> None:
    exp = begun(type("Zeros", (Plain,), {"set_to_zero": True}), tmp_path / "run")
    counts = counted(exp.save)
    exp.close()
    assert counts.queued_to_host == 1 + 2 * WEIGHTS  # whether there are others, of all at once


def test_clipping_waits_no_more_with_a_scaler_than_without(tmp_path: Path) -> None:
    class Clipped(GradientClipping, Plain):
        def update(self) -> dict[str, Any]:
            self.model(paddle.ones([4, 4])).mean().backward()
            self.clipping = counted(lambda: self.clip_gradients(self.optimizer))
            self.optimizer.clear_grad()
            return {}

    class Scaled(Clipped):
        def setup_model(self) -> None:
            super().setup_model()
            self.scaler = paddle.amp.GradScaler(enable=False)

    plain, scaled = (make(each, tmp_path / each.__name__) for each in (Clipped, Scaled))
    for exp in (plain, scaled):
        exp.setup()
        iterate(exp, 1)
        exp.close()
    assert plain.clipping == scaled.clipping


def test_the_statistics_of_a_share_are_copied_without_waiting(tmp_path: Path) -> None:
    class Shared(Plain):
        def setup_model(self) -> None:
            super().setup_model()
            self.normed = paddle.nn.BatchNorm1D(2)

        def train_batch(self) -> None:
            for _ in self.micro_batches():
                self.backward(self.normed(self.model(paddle.ones([4, 4]))).mean())
            self.step_optimizers()

    exp = begun(Shared, tmp_path / "run", shares=2)
    counts = counted(lambda: iterate(exp, 1))
    exp.close()
    assert counts.within == 0


def test_an_average_of_several_numbers_waits_once(tmp_path: Path) -> None:
    exp = begun(Plain, tmp_path / "run")
    values = {name: paddle.full([], number) for number, name in enumerate("abc")}
    averages: list[dict[str, float]] = []
    counts = counted(lambda: averages.append(exp.average(values, weight=2)))
    exp.close()
    assert averages == [{"a": 0.0, "b": 1.0, "c": 2.0}]
    assert counts.waits == 1
