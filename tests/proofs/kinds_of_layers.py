"""Kinds of state in layers: buffers, what is frozen, added or removed, copies, caches, metrics.

See kinds.py.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, LOUD, REFUSED, Kind
from kinds_of_values import Box, number
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
    expected = REFUSED

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


class HiddenState(Kind):
    def make(self) -> None:
        self.cell = frozen(nn.GRUCell(1, 2))
        self.hidden: Any = None

    def use(self) -> float:
        _, hidden = self.cell(paddle.full([1, 1], self.iteration / 3), self.hidden)
        self.hidden = hidden.detach()
        return number(self.hidden)


class HiddenStateInALayer(HiddenState):
    def use(self) -> float:
        hidden = getattr(self.cell, "hidden_now", None)
        self.cell.hidden_now = self.cell(paddle.full([1, 1], self.iteration / 3), hidden)[1]
        return number(self.cell.hidden_now.detach())


class AverageInADict(_OfNet):
    has_effect = True

    def make(self) -> None:
        self.shadow = {name: p.clone().detach() for name, p in self.model.named_parameters()}

    def use(self) -> float:
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = self.shadow[name] * 0.9 + parameter.detach() * 0.1
        return number(self.shadow)


class AverageInAnObject(AverageInADict):
    def make(self) -> None:
        super().make()
        self.average, self.shadow = Box(shadow=self.shadow), {}

    def use(self) -> float:
        for name, parameter in self.model.named_parameters():
            own = self.average.shadow[name]
            own.set_value(own * 0.9 + parameter.detach() * 0.1)
        return number(self.average.shadow)


class AverageAsAModel(_OfNet):
    has_effect = True

    def make(self) -> None:
        self.teacher = frozen(copy.deepcopy(self.model))

    def use(self) -> float:
        pairs = zip(self.teacher.parameters(), self.model.parameters(), strict=True)
        for slow, fast in pairs:
            slow.set_value(slow * 0.9 + fast.detach() * 0.1)
        return number([p.numpy() for p in self.teacher.parameters()])


class _Holding(Kind):
    """A layer that changes, in something of the user's."""

    def change(self, layer: Any) -> float:
        layer.weight.set_value(layer.weight * 0.9 + 0.01 * self.iteration)
        return number(layer.weight)


class LayerInAList(_Holding):
    def make(self) -> None:
        self.parts = [frozen(nn.Linear(2, 2))]

    def use(self) -> float:
        return self.change(self.parts[0])


class LayerInAnObject(_Holding):
    expected = LOUD

    def make(self) -> None:
        self.teacher = Box(net=frozen(nn.Linear(2, 2)))

    def use(self) -> float:
        return self.change(self.teacher.net)


class LayerInADataSet(_Holding):
    expected = LOUD

    def make(self) -> None:
        self.train_loader.dataset.net = frozen(nn.Linear(2, 2))

    def use(self) -> float:
        return self.change(self.train_loader.dataset.net)


class LayerInAClosure(_Holding):
    expected = LOUD

    def make(self) -> None:
        net = frozen(nn.Linear(2, 2))
        self.changed = lambda: self.change(net)

    def use(self) -> float:
        return self.changed()


class LossLayer(Kind):
    def make(self) -> None:
        self.criterion = _Focal()

    def use(self) -> float:
        return self.criterion(self.iteration)


class _Focal(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.history, self.table = 2.0, [0], np.zeros(2)

    def forward(self, step: int) -> float:
        self.gamma *= 0.9
        self.history.append(step)
        self.table[step % 2] += self.gamma
        return number([self.gamma, self.history, self.table])


class ListOfTensorsInALayer(Kind):
    def make(self) -> None:
        self.model.bank = [paddle.zeros([2])]

    def use(self) -> float:
        self.model.bank.append(self.model.bank[-1] + self.iteration)
        return number(self.model.bank)


class TensorOfALayer(Kind):
    def make(self) -> None:
        self.model.center = paddle.zeros([2])

    def use(self) -> float:
        self.model.center = self.model.center + self.iteration
        return number(self.model.center)


class MaskCache(Kind):
    """Filled lazily, and always with the same."""

    has_effect = False

    def make(self) -> None:
        self.model.masks = {}
        self.model.positions = None

    def use(self) -> float:
        size = self.iteration % 4 + 1
        masks = self.model.masks
        if size not in masks:
            masks[size] = paddle.tril(paddle.ones([size, size]))
        if self.model.positions is None:
            self.model.positions = paddle.arange(8, dtype="float32")
        return float(masks[size].sum() + self.model.positions[size])


class MaskCacheInAnObject(Kind):
    has_effect = False

    def make(self) -> None:
        self.cache = Box(masks={}, grid=None)

    def use(self) -> float:
        size = self.iteration % 4 + 1
        mask = self.cache.masks.setdefault(size, np.tril(np.ones((size, size))))
        self.cache.grid = np.arange(4) if self.cache.grid is None else self.cache.grid
        return float(mask.sum() + self.cache.grid[1])


class KeptOutputs(_OfNet):
    """What a layer keeps of its last forward, with the graph."""

    has_effect = False

    def make(self) -> None:
        self.model.dropout.register_forward_post_hook(self.keep)

    def keep(self, layer: Any, inputs: Any, output: Any) -> None:
        layer.features = output


class _Metric(Kind):
    expected = EITHER

    def use(self) -> float:
        guesses = np.random.RandomState(self.iteration).rand(4, 1).astype("float32")
        self.metric.update(guesses, np.array([[0], [1], [1], [0]]))
        return number(self.metric.accumulate())


class PrecisionOfPaddle(_Metric):
    def make(self) -> None:
        self.metric = paddle.metric.Precision()


class RecallOfPaddle(_Metric):
    def make(self) -> None:
        self.metric = paddle.metric.Recall()


class AucOfPaddle(_Metric):
    def make(self) -> None:
        self.metric = paddle.metric.Auc()

    def use(self) -> float:
        guesses = np.random.RandomState(self.iteration).rand(4, 2).astype("float32")
        self.metric.update(guesses, np.array([[0], [1], [1], [0]]))
        return number(self.metric.accumulate())


class AccuracyOfPaddle(_Metric):
    def make(self) -> None:
        self.metric = paddle.metric.Accuracy()

    def use(self) -> float:
        guesses = np.random.RandomState(self.iteration).rand(4, 3).astype("float32")
        labels = paddle.to_tensor([[0], [1], [2], [0]])
        self.metric.update(self.metric.compute(paddle.to_tensor(guesses), labels))
        return number(self.metric.accumulate())


class AccuracyInAnObject(AccuracyOfPaddle):
    def make(self) -> None:
        self.meters = Box(parts=[paddle.metric.Accuracy()])

    @property
    def metric(self) -> Any:
        return self.meters.parts[0]


class MetricOfOnesOwn(_Metric):
    expected = EITHER

    def make(self) -> None:
        self.metric: Any = _Mean()

    def use(self) -> float:
        self.metric.update(self.iteration)
        return number(self.metric.accumulate())


class _Mean(paddle.metric.Metric):
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def accumulate(self) -> float:
        return self.total / self.count

    def name(self) -> str:
        return "mean"
