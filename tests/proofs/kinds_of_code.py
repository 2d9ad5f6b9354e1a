"""Kinds of state in code: closures, defaults, hooks, classes and modules; see kinds.py."""

from __future__ import annotations

import functools
from typing import Any

import kinds_of_objects
import numpy as np
import paddle
from kinds import EITHER, LOUD, Kind, Points
from kinds_of_values import Box, counting, number
from paddle.io import DataLoader

COUNT = 0
ITEMS: list[int] = []
TABLE = {"a": 1}
METER = Box(total=0)


# Closures and functions


class Closure(Kind):
    expected = EITHER

    def make(self) -> None:
        self.count = counting()

    def use(self) -> float:
        return number(self.count())


class ClosureOverAList(Kind):
    expected = EITHER

    def make(self) -> None:
        items = [1]
        self.append = lambda: items.append(len(items)) or number(items)

    def use(self) -> float:
        return self.append()


class ClosureInAnObject(Kind):
    expected = EITHER

    def make(self) -> None:
        self.helper = Box(parts=[counting()])

    def use(self) -> float:
        return number(self.helper.parts[0]())


class ClosureAsACollateFn(Kind):
    expected = EITHER
    has_effect = False  # nothing is made anew

    def loader(self) -> Any:
        count = counting()
        return DataLoader(
            Points(), batch_size=4, collate_fn=lambda batch: np.stack(batch) / (1 + count())
        )


class Partial(Kind):
    expected = EITHER

    def make(self) -> None:
        self.append = functools.partial(_append, [1])

    def use(self) -> float:
        return self.append(3)


def _append(items: list[int], item: int) -> float:
    items.append(item)
    return number(items)


class PartialThatIsReplaced(Kind):
    expected = EITHER

    def make(self) -> None:
        self.scale = functools.partial(max, 1)

    def use(self) -> float:
        self.scale = functools.partial(max, self.scale(0) + 1)
        return number(self.scale(0))


class DefaultOfALambda(Kind):
    expected = EITHER

    def make(self) -> None:
        self.append = lambda items=[1]: items.append(1) or number(items)

    def use(self) -> float:
        return self.append()


class AttributeOfAFunction(Kind):
    expected = EITHER

    def make(self) -> None:
        _counted.count = 0  # type: ignore[attr-defined]
        self.counted = _counted

    def use(self) -> float:
        return self.counted()


def _counted() -> float:
    _counted.count += 1  # type: ignore[attr-defined]
    return number(_counted.count)  # type: ignore[attr-defined]


class FunctionChosenOnTheWay(Kind):
    expected = LOUD

    def make(self) -> None:
        self.stage: Any = self.warm

    def warm(self) -> float:
        return 0.5

    def main(self) -> float:
        return 1.5

    def use(self) -> float:
        if self.now(3):
            self.stage = self.main
        return self.stage()


class ClassChosenOnTheWay(Kind):
    expected = LOUD

    def make(self) -> None:
        self.kind_of_norm: Any = paddle.nn.BatchNorm1D

    def use(self) -> float:
        if self.now(3):
            self.kind_of_norm = paddle.nn.LayerNorm
        return float(len(self.kind_of_norm.__name__))


class MethodReplacedOnSelf(Kind):
    expected = LOUD

    def make(self) -> None:
        self.__dict__.pop("value_now", None)

    def value_now(self) -> float:
        return 0.5

    def use(self) -> float:
        if self.now(3):
            self.value_now = lambda: 1.5  # type: ignore[method-assign]
        return self.value_now()


# Hooks


class HookWithACell(Kind):
    expected = EITHER
    has_effect = False  # a second one is no new state

    def make(self) -> None:
        count = counting()
        self.model.register_forward_post_hook(lambda layer, x, y: y * (1 + count() / 10))


class HookOfAnObject(Kind):
    has_effect = False

    def make(self) -> None:
        self.watch = _Watch()
        self.model.register_forward_post_hook(self.watch)


class HookOfAnObjectThatNothingElseHas(Kind):
    expected = EITHER
    has_effect = False

    def make(self) -> None:
        watch = _Watch()
        self.model.register_forward_pre_hook(lambda layer, x, watch=watch: watch(layer, x, x[0]))


class _Watch:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, layer: Any, inputs: Any, output: Any) -> Any:
        self.calls += 1
        return output * (1 + self.calls / 10)


class HookRegisteredLater(Kind):
    expected = LOUD

    def use(self) -> float:
        if self.now(3):
            self.model.register_forward_post_hook(lambda layer, x, y: y * 2)
        return 0.5


class HookRemovedLater(Kind):
    expected = LOUD

    def make(self) -> None:
        self.hook = self.model.register_forward_post_hook(lambda layer, x, y: y * 2)

    def use(self) -> float:
        if self.now(3):
            self.hook.remove()
        return 0.5


# Classes and modules


class CounterOfTheClass(Kind):
    expected = EITHER
    total = 0

    def make(self) -> None:
        type(self).total = 0

    def use(self) -> float:
        type(self).total += 1
        return number(self.total)


class ListOfTheClass(Kind):
    expected = EITHER
    items: list[int] = []  # noqa: RUF012

    def make(self) -> None:
        self.items.clear()

    def use(self) -> float:
        self.items.append(self.iteration)
        return number(self.items)


class _Counted:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1


class _Special(_Counted):
    def __init__(self) -> None:
        """Is not counted."""


class CounterOfAHelpersClass(Kind):
    expected = EITHER

    def make(self) -> None:
        _Counted.made = 0
        self.helper = _Counted()

    def use(self) -> float:
        _Counted()
        return number(_Counted.made)


class CounterOfABaseClass(Kind):
    expected = EITHER

    def make(self) -> None:
        _Counted.made = 0
        self.helper = _Special()

    def use(self) -> float:
        _Counted.made += 1
        return number(self.helper.made)


class GlobalNumber(Kind):
    expected = EITHER

    def make(self) -> None:
        global COUNT
        COUNT = 0

    def use(self) -> float:
        global COUNT
        COUNT += 1
        return number(COUNT)


class GlobalList(Kind):
    expected = EITHER

    def make(self) -> None:
        ITEMS.clear()

    def use(self) -> float:
        ITEMS.append(self.iteration)
        return number(ITEMS)


class GlobalDict(Kind):
    expected = EITHER

    def make(self) -> None:
        TABLE["a"] = 1

    def use(self) -> float:
        TABLE["a"] += 1
        return number(TABLE)


class GlobalObject(Kind):
    expected = EITHER

    def make(self) -> None:
        METER.total = 0

    def use(self) -> float:
        METER.total += 1
        return number(METER.total)


class GlobalOfAnotherModule(Kind):
    expected = EITHER

    def make(self) -> None:
        kinds_of_objects.COUNTS.clear()

    def use(self) -> float:
        kinds_of_objects.COUNTS.append(1)
        return number(kinds_of_objects.COUNTS)
