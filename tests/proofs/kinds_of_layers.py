"""Kinds of state in layers: buffers, what is frozen, added or removed, copies, caches, metrics.

See kinds.py.
"""

from __future__ import annotations

import copy
from typing import Any

import paddle
from kinds import EITHER, LOUD, REFUSED, Kind
from kinds_of_values import number
from paddle import nn


class _Net(nn.Layer):
    """A layer, batch norm, dropout, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1D(4)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        return self.last(self.dropout(self.norm(self.first(batch))))


def frozen(layer: Any) -> Any:
    """The layer, which no optimizer is to train."""
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    return layer


class _OfNet(Kind):
    def net(self) -> Any:
        return _Net()


class BatchNormAndDropout(_OfNet):
    has_effect = False  # nothing is made anew


class PersistentBuffer(Kind):
    def make(self) -> None:
        self.model.register_buffer("mean", paddle.zeros([2]))

    def use(self) -> float:
        self.model.mean = self.model.mean * 0.9 + self.iteration
        return number(self.model.mean)


class PassingBuffer(Kind):
    def make(self) -> None:
        self.model.register_buffer("mean", paddle.zeros([2]), persistable=False)

    def use(self) -> float:
        self.model.mean = self.model.mean * 0.9 + self.iteration
        return number(self.model.mean)


class BufferInPlace(Kind):
    def make(self) -> None:
        self.model.register_buffer("bank", paddle.zeros([4, 2]))

    def use(self) -> float:
        self.model.bank[self.iteration % 4] = float(self.iteration)
        return number(self.model.bank)


class BufferThatGrows(Kind):
    expected = "exact refused"

    def make(self) -> None:
        self.model.register_buffer("bank", paddle.zeros([1, 2]))

    def use(self) -> float:
        self.model.bank = paddle.concat([self.model.bank, paddle.ones([1, 2])])
        return number(self.model.bank)


class PassingBufferThatGrows(Kind):
    def make(self) -> None:
        self.model.register_buffer("bank", paddle.zeros([1, 2]), persistable=False)

    def use(self) -> float:
        self.model.bank = paddle.concat([self.model.bank, paddle.ones([1, 2])])
        return number(self.model.bank)


class BufferOfAnotherType(Kind):
    expected = LOUD

    def make(self) -> None:
        self.model.register_buffer("mean", paddle.zeros([2]))

    def use(self) -> float:
        if self.now(3):
            self.model.mean = paddle.ones([2], "float64") / 3
        return number(self.model.mean)


class BufferThatIsNone(Kind):
    expected = LOUD

    def make(self) -> None:
        self.model.register_buffer("mean", None)

    def use(self) -> float:
        if self.now(3):
            self.model.mean = paddle.ones([2])
        if self.iteration > 3 and self.model.mean is not None:
            self.model.mean.add_(paddle.ones([2]))
        return number(self.model.mean)


class BufferRegisteredLate(Kind):
    expected = REFUSED

    def use(self) -> float:
        if self.now(3):
            self.model.register_buffer("mean", paddle.ones([2]))
        return number(getattr(self.model, "mean", None))


class Unfrozen(_OfNet):
    def make(self) -> None:
        self.model.first.weight.stop_gradient = True

    def use(self) -> float:
        if self.now(3):
            self.model.first.weight.stop_gradient = False
        return 0.5


class FrozenOnTheWay(_OfNet):
    def use(self) -> float:
        if self.now(3):
            for parameter in self.model.first.parameters():
                parameter.stop_gradient = True
        return 0.5


class UnfrozenWithItsNorm(_OfNet):
    """The usual loop also reaches batch norm's running statistics."""

    def make(self) -> None:
        for parameter in self.model.parameters()[:4]:
            parameter.stop_gradient = True

    def use(self) -> float:
        if self.now(3):
            for parameter in (*self.model.first.parameters(), *self.model.norm.parameters()):
                parameter.stop_gradient = False
        return 0.5


class PartInEvalMode(_OfNet):
    def use(self) -> float:
        if self.now(3):
            self.model.norm.eval()
        return 0.5


class DropoutRate(_OfNet):
    def use(self) -> float:
        self.model.dropout.p *= 1.1
        return 0.5

    has_effect = False  # nothing is made anew


class MomentumOfANorm(_OfNet):
    def use(self) -> float:
        if self.now(3):
            self.model.norm._momentum = 0.5
        return 0.5


class LearnedScaleOfAParameter(_OfNet):
    def use(self) -> float:
        if self.now(3):
            self.model.last.weight.optimize_attr["learning_rate"] = 0.1
        return 0.5


class ParameterReplaced(_OfNet):
    expected = LOUD

    def use(self) -> float:
        if self.now(3):
            self.model.first.weight = paddle.create_parameter([3, 4], "float32")
        return 0.5


class LayerAdded(_OfNet):
    expected = REFUSED

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 1))

    def use(self) -> float:
        if self.now(3):
            self.model.add_sublayer("more", nn.Linear(1, 1))
        return 0.5


class LayerWithoutStateAdded(LayerAdded):
    expected = LOUD

    def use(self) -> float:
        if self.now(3):
            self.model.add_sublayer("more", nn.Tanh())
        return 0.5


class LayerRemoved(_OfNet):
    """Its tensors are the optimizer's still."""

    def net(self) -> Any:
        return nn.Sequential(("first", nn.Linear(3, 1)), ("norm", nn.BatchNorm1D(1)))

    def use(self) -> float:
        if self.now(3):
            del self.model.norm
        return 0.5


class ActivationReplaced(_OfNet):
    expected = LOUD

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 1), nn.Tanh())

    def use(self) -> float:
        if self.now(3):
            self.model[1] = nn.Sigmoid()
        return 0.5


class ModelOfAnotherClass(_OfNet):
    expected = REFUSED

    def net(self) -> Any:
        return nn.Linear(3, 1)

    def use(self) -> float:
        if self.now(3):
            self.model = _Scaled()
            self.optimizers()
        return 0.5


class _Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) * 2


class ModelOfTheSameClass(_OfNet):
    expected = LOUD

    def use(self) -> float:
        if self.now(3):
            self.model = self.net()
            self.optimizers()
        return 0.5


class ModelWithAnotherName(_OfNet):
    """The same layer is found elsewhere."""

    expected = LOUD

    def make(self) -> None:
        self.student = self.model

    def use(self) -> float:
        if self.now(3):
            self.student = copy.deepcopy(self.model)
        return number(self.student.first.weight) if self.iteration > 3 else 0.5


class TwoLayersThatSwap(_OfNet):
    expected = EITHER

    def make(self) -> None:
        self.one, self.other = frozen(nn.Linear(2, 2)), frozen(nn.Linear(2, 2))

    def use(self) -> float:
        if self.now(3):
            self.one, self.other = self.other, self.one
        return number(self.one.weight)


class SpectralNorm(_OfNet):
    has_effect = False

    def net(self) -> Any:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


class WeightNorm(_OfNet):
    has_effect = False

    def net(self) -> Any:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1))
