"""Kinds of state with training.shares, on one process and on two; see kinds.py.

The straight run is on one process. Statistics are each share's own; a value is changed between two
updates, or is one of each share by name; anything else that moves while the shares are computed is
refused, because on another number of processes it would be another one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle
from kinds import LOUD, REFUSED, Kind
from kinds_of_layers import frozen
from kinds_of_values import Box, number
from paddle import nn


class _Shared(Kind):
    training = {"shares": 2}  # noqa: RUF012
    has_effect = False  # nothing is made anew

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Dropout(0.2), nn.Linear(4, 1))

    def optimizers(self) -> None:
        layers = [layer for layer in (self.model, *self.more()) if layer is not None]
        parameters = [p for layer in layers for p in layer.parameters()]
        self.optimizer = paddle.optimizer.SGD(0.05, parameters=parameters)

    def more(self) -> list[Any]:
        """Other layers that are trained, made on self."""
        return []

    def output(self, batch: Any) -> Any:
        return self.model(batch)

    def update(self) -> Any:
        for batch in self.micro_batches():
            loss = (self.output(batch) - 0.5).square().mean()
            self.backward(loss)
            self.log(loss_of_shares=loss)
        self.step_optimizers()
        self.use()
        return loss.detach() * 0


class Norm(_Shared):
    pass


class NormOfAPartUsedLate(_Shared):
    def more(self) -> list[Any]:
        self.late = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1D(4), nn.Linear(4, 1))
        return [self.late]

    def output(self, batch: Any) -> Any:
        output = self.model(batch)
        return self.late(output) if self.iteration >= 6 else output


class NormsInTurn(_Shared):
    def more(self) -> list[Any]:
        self.norms = nn.LayerList([nn.BatchNorm1D(1), nn.BatchNorm1D(1)])
        return [self.norms]

    def output(self, batch: Any) -> Any:
        return self.norms[self.iteration // 3 % 2](self.model(batch))


class NormOfOneShare(_Shared):
    def more(self) -> list[Any]:
        self.norms = nn.LayerList([nn.BatchNorm1D(1), nn.BatchNorm1D(1)])
        return [self.norms]

    def output(self, batch: Any) -> Any:
        return self.norms[self.internals.share](self.model(batch))


class NormUnfrozen(_Shared):
    """A part in eval mode, trained from the fifth update on."""

    def make(self) -> None:
        self.model[1].eval()
        for parameter in self.model[0].parameters():
            parameter.stop_gradient = True

    def use(self) -> float:
        if self.iteration == 4:
            self.model[1].train()
            for parameter in self.model[0].parameters():
                parameter.stop_gradient = False
        return 0.5


class NormReplaced(_Shared):
    expected = LOUD

    def use(self) -> float:
        if self.iteration == 3:
            self.model[1] = nn.BatchNorm1D(4, momentum=0.5)
            self.optimizers()
        return 0.5


class NormOfOnePoint(_Shared):
    """Maps of 1 × 1 that are zero at first."""

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm2D(4), nn.Flatten(), nn.Linear(4, 1))

    def output(self, batch: Any) -> Any:
        first, norm, flat, last = self.model
        features = first(batch) * float(self.iteration > 5)
        return last(flat(norm(features.reshape([-1, 4, 1, 1]))))


class StatisticThatBeginsAtZero(_Shared):
    def net(self) -> Any:
        return _Centred()

    def output(self, batch: Any) -> Any:
        return self.model(batch * float(self.iteration > 2))


class _Centred(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1, bias_attr=False)
        self.register_buffer("center", paddle.zeros([1]))

    def forward(self, batch: Any) -> Any:
        output = self.inner(batch)
        with paddle.no_grad():
            self.center.set_value(self.center * 0.9 + output.mean(0) * 0.1)
        return output - self.center


class PassingStatistic(StatisticThatBeginsAtZero):
    def net(self) -> Any:
        net = _Centred()
        net.register_buffer("center", paddle.zeros([1]), persistable=False)
        return net


class SpectralNormOfShares(_Shared):
    expected = "exact refused"

    def net(self) -> Any:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


class ValueOfEachShare(_Shared):
    def make(self) -> None:
        self.scale = 1.0
        self.register_stateful("scale", by_share=True)

    def output(self, batch: Any) -> Any:
        output = self.model(batch) * self.scale
        self.scale = self.scale * 0.9 + 0.1 * float(output.mean())
        return output


class ValueAfterTheShares(_Shared):
    def make(self) -> None:
        self.scale = Box(now=1.0, rows=[0])

    def output(self, batch: Any) -> Any:
        return self.model(batch) * self.scale.now + number(self.scale.rows) / 10

    def use(self) -> float:
        self.scale.now *= 0.9
        self.scale.rows.append(self.iteration)
        return 0.5


class _Refused(_Shared):
    expected = REFUSED


class ValueInTheLoop(_Refused):
    def make(self) -> None:
        self.scale = 1.0

    def output(self, batch: Any) -> Any:
        self.scale *= 0.9
        return self.model(batch) * self.scale


class ValueInTheLoopInOneUpdate(ValueInTheLoop):
    def output(self, batch: Any) -> Any:
        if self.iteration == 3:
            self.scale *= 0.9
        return self.model(batch) * self.scale


class ValueOfAnObjectInTheLoop(_Refused):
    def make(self) -> None:
        self.meter = Box(scale=1.0)

    def output(self, batch: Any) -> Any:
        if self.iteration == 3:
            self.meter.scale *= 0.9
        return self.model(batch) * self.meter.scale


class FrozenWeightInTheLoop(_Refused):
    def make(self) -> None:
        self.teacher = frozen(nn.Linear(3, 1))

    def output(self, batch: Any) -> Any:
        self.teacher.weight.set_value(self.teacher.weight + batch.mean() * 0.1)
        return self.model(batch) - self.teacher(batch)


class GeneratorInTheLoop(_Refused):
    expected = "told refused"

    def make(self) -> None:
        self.generator = np.random.default_rng(3)

    def output(self, batch: Any) -> Any:
        return self.model(batch) * float(self.generator.random())


def _on_two(kind: type[_Shared]) -> type[_Shared]:
    return type(f"{kind.__name__}OnTwo", (kind,), {"processes": 2, "__module__": __name__})


_ONES = [kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, _Shared)]
KINDS = [_on_two(kind) for kind in _ONES if not kind.__name__.startswith("_")]


class ProcessIdSetAtBegin(_Shared):
    """Each rank has another one, and an array of its own."""

    processes = 2

    def make(self) -> None:
        self.pid, self.machine = 0, np.zeros(2)

    def on_train_begin(self) -> None:
        self.pid = os.getpid()
        self.machine = np.array([self.rank, os.getpid()])
