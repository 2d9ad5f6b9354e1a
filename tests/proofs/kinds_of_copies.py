"""Kinds of copies and companions of a model: hidden states, averages, caches, losses, metrics.

See kinds.py.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, EXACT, LOUD, Kind
from kinds_of_layers import _OfNet, frozen
from kinds_of_values import Box, number
from paddle import nn


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
        self.holder, self.shadow = Box(shadow=self.shadow), {}

    def use(self) -> float:
        for name, parameter in self.model.named_parameters():
            own = self.holder.shadow[name]
            own.set_value(own * 0.9 + parameter.detach() * 0.1)
        return number(self.holder.shadow)


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
    expected = EXACT

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
