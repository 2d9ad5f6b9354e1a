"""Kinds of things under several names: two attributes, views of one array, bound methods.

See kinds.py. If a resumed run had two things instead of one, it would differ.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, Kind
from kinds_of_values import Box, _OfValue, number


class ListUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = [1]

    def use(self) -> float:
        self.one.append(len(self.other))
        return number(self.other)


class DictUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = {"a": 1}

    def use(self) -> float:
        self.one["a"] += 1
        return number(self.other)


class ArrayUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = np.zeros(3)

    def use(self) -> float:
        self.one += 1
        return number(self.other)


class TensorUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = paddle.zeros([3])

    def use(self) -> float:
        self.one.add_(paddle.ones([3]))
        return number(self.other)


class ObjectUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = Box(count=0)

    def use(self) -> float:
        self.one.count += 1
        return number(self.other)


class GeneratorUnderTwoNames(Kind):
    def make(self) -> None:
        self.one = self.other = random.Random(3)

    def use(self) -> float:
        return self.one.random() + self.other.random()


class TwoNamesThatPart(Kind):
    def make(self) -> None:
        self.one = self.other = [1]

    def use(self) -> float:
        if self.now(3):
            self.other = [2]
        self.one.append(len(self.other))
        return number([self.one, self.other])


class TwoNamesThatJoin(Kind):
    expected = EITHER

    def make(self) -> None:
        self.one, self.other = [1], [2]

    def use(self) -> float:
        if self.now(3):
            self.other = self.one
        self.one.append(len(self.other))
        return number(self.other)


class OneListTwiceInAList(Kind):
    def make(self) -> None:
        self.rows = [[0]] * 2

    def use(self) -> float:
        self.rows[0].append(len(self.rows[1]))
        return number(self.rows)


class _ListAlsoIn(_OfValue):
    """A list of the experiment that another object has, too."""

    where = ""

    def make(self) -> None:
        self.seen: Any = [1]
        if self.where == "criterion":
            self.criterion = Box()
        functools.reduce(getattr, self.where.split("."), self).seen = self.seen

    def use(self) -> float:
        self.seen.append(len(self.seen))
        return number(functools.reduce(getattr, self.where.split("."), self).seen)


class ListAlsoInALayer(_ListAlsoIn):
    where = "model"


class ListAlsoInALoss(_ListAlsoIn):
    where = "criterion"


class ListAlsoInASampler(_ListAlsoIn):
    where = "train_loader.batch_sampler.sampler"


class ListAlsoInADataSet(_ListAlsoIn):
    where = "train_loader.dataset"


class ListAlsoInACollateFn(_ListAlsoIn):
    where = "train_loader.collate_fn"


class _ArrayAlsoIn(_ListAlsoIn):
    """The same with an array."""

    def make(self) -> None:
        super().make()
        holder = functools.reduce(getattr, self.where.split("."), self)
        self.seen = holder.seen = np.zeros(3)

    def use(self) -> float:
        self.seen += 1
        return number(functools.reduce(getattr, self.where.split("."), self).seen)


class ArrayAlsoInALoss(_ArrayAlsoIn):
    where = "criterion"


class ArrayAlsoInASampler(_ArrayAlsoIn):
    where = "train_loader.batch_sampler.sampler"


class ArrayAlsoInADataSet(_ArrayAlsoIn):
    where = "train_loader.dataset"


class ArrayAndItsView(Kind):
    def make(self) -> None:
        self.base = np.zeros(6)
        self.view = self.base[1:4]

    def use(self) -> float:
        self.view += 1
        self.base *= 1.1
        return number(self.base)


class ViewsInAnObject(Kind):
    def make(self) -> None:
        self.base = np.zeros((3, 2))
        self.rows = Box(rows=[*self.base])

    def use(self) -> float:
        self.rows.rows[self.iteration % 3] += 1
        return number(self.base)


class ViewOfAHiddenBase(Kind):
    def make(self) -> None:
        base = np.zeros(6)
        self.even, self.odd = base[::2], base.reshape([2, 3])[:, 1]

    def use(self) -> float:
        self.even += 1
        return number(self.odd)


class ArrayInADictAndOnSelf(Kind):
    def make(self) -> None:
        self.scores = np.zeros(3)
        self.all = {"scores": self.scores, "names": ["a"]}

    def use(self) -> float:
        self.scores += 1
        return number(self.all)


class TensorInTwoContainers(Kind):
    def make(self) -> None:
        tensor = paddle.zeros([2])
        self.one, self.other = [tensor], {"a": tensor}

    def use(self) -> float:
        self.one[0].add_(paddle.ones([2]))
        return number(self.other)


class TensorAndItsView(Kind):
    expected = EITHER

    def make(self) -> None:
        self.base = paddle.zeros([4])
        self.view = self.base.view([2, 2])

    def use(self) -> float:
        self.base.add_(paddle.ones([4]))
        return number(self.view)


class BufferAlsoOnSelf(Kind):
    def make(self) -> None:
        self.model.register_buffer("mean", paddle.zeros([2]))
        self.mean = self.model.mean

    def use(self) -> float:
        self.mean.add_(paddle.ones([2]))
        return number(self.model.mean)


class ObjectThatKnowsTheExperiment(Kind):
    def make(self) -> None:
        self.helper = Box(experiment=self, count=0)

    def use(self) -> float:
        self.helper.count += self.helper.experiment.iteration
        return number(self.helper.count)


class ObjectsThatKnowEachOther(Kind):
    def make(self) -> None:
        self.one, self.other = Box(count=0), Box(count=0)
        self.one.other, self.other.other = self.other, self.one

    def use(self) -> float:
        self.one.other.count += 1
        self.other.other.count += 2
        return number([self.one, self.other])


class BoundMethod(Kind):
    def make(self) -> None:
        self.draw = _Steps().step  # nothing else has the object

    def use(self) -> float:
        return self.draw()


class BoundMethodsInADict(Kind):
    def make(self) -> None:
        self.draws = {"a": _Steps().step, "b": _Steps().step}

    def use(self) -> float:
        return self.draws["a"]() + self.draws["b"]()


class BoundMethodInACollateFn(_OfValue):
    def make(self) -> None:
        self.train_loader.collate_fn.step = _Steps().step

    def use(self) -> float:
        return self.train_loader.collate_fn.step()


class _Steps:
    def __init__(self) -> None:
        self.count = 0

    def step(self) -> float:
        self.count += 1
        return number(self.count)
