"""Kinds of what is set after setup: by on_train_begin, by a mixin, and by the script; see kinds.py.

Each is set at each start, and once (`if self.iteration == 0`). What differs from what setup has
made is state, so it is restored before on_train_begin. Of what that hook makes anew at each start,
such as a file, there is no line; there is one of what it sets anew although training has changed
it, and of what it has set once and no checkpoint can hold.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from kinds import EITHER, EXACT, TOLD, Kind, Points
from kinds_of_layers import frozen
from kinds_of_values import Box, number
from paddle import nn, optimizer
from paddle.io import DataLoader
from paddle.optimizer import lr

SCALE = 1.0
TABLE = {"a": 1.0}


class Settings:
    level = 1.0


def doubled(value: float) -> float:
    return value * 2


def counting() -> Callable[[float], float]:
    count = 0

    def step(value: float) -> float:
        nonlocal count
        count += 1
        return value + count

    return step


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def scale_outputs(e: Any) -> None:
    e.model.register_forward_post_hook(lambda layer, x, y: y * 1.5)


def let_hooks_go(e: Any) -> None:
    e.model._forward_post_hooks.clear()


def freeze(e: Any, is_frozen: bool) -> None:
    e.model.bias.stop_gradient = is_frozen


def count_start(e: Any) -> None:
    """It stands beside the state, and must go on."""
    e.starts += 1
    if e.starts != 1 + (e.iteration > 0 and e.at_each_start):
        raise ValueError(f"{e.starts} starts in iteration {e.iteration}")


def open_log(e: Any) -> None:
    e.own_log = (Path(e.output_dir) / "own.txt").open("a")


def write_log(e: Any) -> float:
    if e.own_log:
        e.own_log.write("line\n")
    return 0.0


def fresh_weights(e: Any) -> None:
    e.model.weight.set_value(paddle.to_tensor([[0.5], [0.25], [-0.5]]))


def move_array(e: Any) -> float:
    e.value = e.value * 0.9
    return number(e.value)


def move_rate(e: Any) -> float:
    e.optimizer.set_lr(e.optimizer.get_lr() * 0.9)
    return 0.5


def walk(e: Any) -> float:
    return number(next(e.walk)) if e.walk else 0.0


def numbers() -> Any:
    yield from (n * 7 % 31 for n in range(100))


def masked(e: Any) -> float:
    e.model.weight.set_value(e.model.weight * e.model.weight.mask)
    return 0.5


def give(sgd: Any, parameters: list[Any]) -> None:
    """The list has two names: SGD steps on the second, and clears the first."""
    sgd._parameter_list = sgd._param_groups = parameters


def points(e: Any) -> Any:
    return e.train_loader.dataset.points


Does = Callable[[Any], Any]
# By name: what setup makes, what is set, and what an update makes of it.
SETTINGS: dict[str, tuple[Does, Does, Does]] = {
    "rate": (
        lambda e: e.optimizer.set_lr(0.1),
        lambda e: e.optimizer.set_lr(0.02),
        lambda e: 0.5,
    ),
    "rate that moves": (
        lambda e: e.optimizer.set_lr(0.1),
        lambda e: e.optimizer.set_lr(0.02),
        move_rate,
    ),
    "schedule": (
        lambda e: e.optimizer.set_lr_scheduler(e.curves[0]),
        lambda e: e.optimizer.set_lr_scheduler(e.curves[1]),
        lambda e: e.optimizer._learning_rate.step() or 0.5,
    ),
    "base rate of a schedule": (
        lambda e: vars(e.curves[0]).update(base_lr=0.1),
        lambda e: vars(e.curves[0]).update(base_lr=0.4),
        lambda e: e.curves[0].step() or e.curves[0]() * 10,
    ),
    "number": (
        lambda e: setattr(e, "value", 1),
        lambda e: setattr(e, "value", 7),
        lambda e: number(e.value),
    ),
    "text": (
        lambda e: setattr(e, "value", "a"),
        lambda e: setattr(e, "value", "b"),
        lambda e: number(e.value),
    ),
    "array": (
        lambda e: setattr(e, "value", np.zeros(3)),
        lambda e: setattr(e, "value", np.arange(3.0)),
        lambda e: number(e.value),
    ),
    "array in place": (
        lambda e: setattr(e, "value", np.zeros(3)),
        lambda e: e.value.__iadd__(2),
        lambda e: number(e.value),
    ),
    "array that moves": (
        lambda e: setattr(e, "value", np.zeros(3)),
        lambda e: setattr(e, "value", np.arange(1.0, 4.0)),
        move_array,
    ),
    "centres": (
        lambda e: setattr(e, "clusters", Box(centres=None)),
        lambda e: setattr(e.clusters, "centres", points(e)[:3].copy()),
        lambda e: number(e.clusters.centres),
    ),
    "measured scale": (
        lambda e: setattr(e, "scale", 1.0),
        lambda e: setattr(e, "scale", float(points(e).std())),
        lambda e: number(e.scale),
    ),
    "scale of a layer": (
        lambda e: setattr(e.model, "scale", 1.0),
        lambda e: setattr(e.model, "scale", float(points(e).std())),
        lambda e: number(e.model.scale),
    ),
    "buffer": (
        lambda e: e.model.register_buffer("mean", paddle.zeros([3])),
        lambda e: e.model.mean.set_value(paddle.to_tensor(points(e).mean(0))),
        lambda e: number(e.model.mean),
    ),
    "level of a data set": (
        lambda e: setattr(e.train_loader.dataset, "level", 1),
        lambda e: setattr(e.train_loader.dataset, "level", 2),
        lambda e: number(e.train_loader.dataset.level),
    ),
    "frozen part": (
        lambda e: freeze(e, False),
        lambda e: freeze(e, True),
        lambda e: 0.5,
    ),
    "weights": (
        lambda e: e.model.weight.set_value(paddle.zeros([3, 1])),
        fresh_weights,
        lambda e: 0.5,
    ),
    "copied teacher": (
        lambda e: e.teacher.weight.set_value(paddle.zeros([3, 1])),
        lambda e: e.teacher.set_state_dict(e.model.state_dict()),
        lambda e: number(e.teacher.weight),
    ),
    "second name": (
        lambda e: setattr(e, "head", e.heads[0]),
        lambda e: setattr(e, "head", e.heads[1]),
        lambda e: number(e.head.weight),
    ),
    "mask of a parameter": (
        lambda e: setattr(e.model.weight, "mask", paddle.ones([3, 1])),
        lambda e: setattr(e.model.weight, "mask", paddle.to_tensor([[1.0], [0.0], [1.0]])),
        masked,
    ),
    "parameters of an optimizer": (
        lambda e: give(e.optimizer, e.model.parameters()),
        lambda e: give(e.optimizer, e.model.parameters()[:1]),
        lambda e: 0.5,
    ),
    "set": (
        lambda e: setattr(e, "value", {"a"}),
        lambda e: setattr(e, "value", {"a", "b"}),
        lambda e: number(e.value),
    ),
    "dict": (
        lambda e: setattr(e, "value", {}),
        lambda e: e.value.update(a=[1], b=(2.0, None)),
        lambda e: number(e.value),
    ),
    "object": (
        lambda e: setattr(e, "value", None),
        lambda e: setattr(e, "value", Box(a=1)),
        lambda e: number(e.value),
    ),
    "drawn number": (
        lambda e: setattr(e, "value", 0.5),
        lambda e: setattr(e, "value", random.random()),
        lambda e: number(e.value),
    ),
    "time": (
        lambda e: setattr(e, "began", 0.0),
        lambda e: setattr(e, "began", time.time()),
        lambda e: 0.0,
    ),
    "pid": (
        lambda e: setattr(e, "where", Box(pid=0)),
        lambda e: vars(e.where).update(pid=os.getpid(), host=platform.node(), id=id(e)),
        lambda e: 0.0,
    ),
    "counter of starts": (
        lambda e: setattr(e, "starts", 0),
        count_start,
        lambda e: 0.0,
    ),
    "list of starts": (
        lambda e: setattr(e, "starts", []),
        lambda e: e.starts.append({"time": time.time(), "pid": os.getpid()}),
        lambda e: 0.0,
    ),
    "lambda": (
        lambda e: setattr(e, "fn", lambda value: value),
        lambda e: setattr(e, "fn", lambda value: value * 2),
        lambda e: e.fn(0.3),
    ),
    "lambda in a dict": (
        lambda e: setattr(e, "fns", {"a": None}),
        lambda e: e.fns.update(a=lambda value: value * 2),
        lambda e: e.fns["a"](0.3) if e.fns["a"] else 0.1,
    ),
    "cell": (
        lambda e: setattr(e, "fn", float),
        lambda e: setattr(e, "fn", counting()),
        lambda e: e.fn(0.3),
    ),
    "partial": (
        lambda e: setattr(e, "fn", functools.partial(max, 0.1)),
        lambda e: setattr(e, "fn", functools.partial(max, 0.5)),
        lambda e: e.fn(0.3),
    ),
    "method": (
        lambda e: setattr(e, "fn", e.warm_phase),
        lambda e: setattr(e, "fn", e.main_phase),
        lambda e: e.fn(0.3),
    ),
    "function": (
        lambda e: setattr(e, "fn", F.relu),
        lambda e: setattr(e, "fn", F.sigmoid),
        lambda e: float(e.fn(paddle.to_tensor(0.3))),
    ),
    "function of a module": (
        lambda e: setattr(e, "fn", float),
        lambda e: setattr(e, "fn", doubled),
        lambda e: e.fn(0.3),
    ),
    "file": (lambda e: setattr(e, "own_log", None), open_log, write_log),
    "lock": (
        lambda e: setattr(e, "lock", None),
        lambda e: setattr(e, "lock", threading.Lock()),
        lambda e: 0.0,
    ),
    "iterator": (
        lambda e: setattr(e, "walk", None),
        lambda e: setattr(e, "walk", numbers()),
        walk,
    ),
    "counting iterator": (
        lambda e: setattr(e, "walk", itertools.count(3)),
        lambda e: setattr(e, "walk", itertools.count(5)),
        walk,
    ),
    "iterator that stands": (
        lambda e: setattr(e, "walk", None),
        lambda e: setattr(e, "walk", numbers()),
        lambda e: 0.0,
    ),
    "iterator of a loader": (
        lambda e: setattr(e, "walk", None),
        lambda e: setattr(e, "walk", iter(DataLoader(Points(80), batch_size=2))),
        walk,
    ),
    "hook": (let_hooks_go, scale_outputs, lambda e: 0.5),
    "global": (
        lambda e: set_global(1.0),
        lambda e: set_global(2.0),
        lambda e: SCALE,
    ),
    "item of a global": (
        lambda e: TABLE.update(a=1.0),
        lambda e: TABLE.update(a=2.0),
        lambda e: TABLE["a"],
    ),
    "attribute of a class": (
        lambda e: setattr(Settings, "level", 1.0),
        lambda e: setattr(Settings, "level", 2.0),
        lambda e: Settings.level,
    ),
}
# What training changes after it was set, so that it is lost if it is set anew.
MOVING = {"rate that moves", "array that moves", "weights", "copied teacher", "cell", "iterator"}
MOVING |= {"iterator of a loader", "counting iterator"}
# What no checkpoint holds, so that it is lost if it is not set again.
CODE = {"lambda", "lambda in a dict", "cell", "iterator", "iterator that stands", "hook", "global"}
CODE |= {"iterator of a loader", "item of a global", "attribute of a class"}
MAY_BE_TOLD = {"partial", "counting iterator", "file", "lock"}  # the last two are only written
WITHOUT_EFFECT = {"time", "pid", "counter of starts", "list of starts", "file", "lock"}
WITHOUT_EFFECT |= {"iterator that stands"}


class _Set(Kind):
    """Something that is set after setup."""

    setting: tuple[Does, Does, Does]
    at_each_start = True

    def optimizers(self) -> None:
        parameters = self.model.parameters()
        self.curves = [lr.ExponentialDecay(0.1, 0.9), lr.ExponentialDecay(0.05, 0.7)]
        self.optimizer = optimizer.SGD(0.1, parameters=parameters)
        self.heads = [frozen(nn.Linear(2, 2)) for _ in range(2)]
        self.teacher = frozen(nn.Linear(3, 1))

    def make(self) -> None:
        self.setting[0](self)

    def use(self) -> Any:
        return self.setting[2](self)

    def step(self) -> None:
        super().step()
        self.model.clear_gradients()  # also of what the optimizer does not update

    def warm_phase(self, value: float) -> float:
        return value

    def main_phase(self, value: float) -> float:
        return value * 3


class _ByTheHook(_Set):
    def on_train_begin(self) -> None:
        if self.at_each_start or self.iteration == 0:
            self.setting[1](self)


class _Finder:
    """A mixin of the user's."""

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        if self.at_each_start or self.iteration == 0:  # type: ignore[attr-defined]
            self.setting[1](self)  # type: ignore[attr-defined]


class _ByAMixin(_Finder, _Set):
    pass


class _ByTheScript(_Set):
    """The restore comes after it."""

    def script(self) -> None:
        if self.at_each_start or not any(self.checkpoint_dir.glob("step-*")):
            self.setting[1](self)


def expected_of(name: str, base: type[_Set], at_each_start: bool) -> str:
    if name == "drawn number" and at_each_start:
        return EITHER
    if name == "set":
        return EITHER  # of what is restored the order may be another one
    is_restored_after = base is _ByTheScript and name not in CODE
    is_lost = name in MOVING if at_each_start and not is_restored_after else False
    is_lost |= not at_each_start and name in CODE
    if name in MAY_BE_TOLD and not at_each_start:
        return EITHER
    return TOLD if is_lost else EXACT


def _grid() -> list[type[Kind]]:
    few = ["rate", "array that moves", "centres", "counter of starts", "lambda", "file", "hook"]
    by_script = ["rate", "rate that moves", "schedule", "array", "array that moves", "weights"]
    by_script += ["frozen part", "second name", "mask of a parameter", "time", "lambda", "method"]
    by_script += ["set", "file", "iterator", "hook", "global"]
    ways: list[tuple[str, type[_Set], list[str]]] = [
        ("at begin", _ByTheHook, [*SETTINGS]),
        ("by a mixin", _ByAMixin, few),
        ("by the script", _ByTheScript, by_script),
    ]
    return [
        type(
            f"{name} set {way} {'of each start' if at_each_start else 'once'}",
            (base,),
            {
                "setting": SETTINGS[name],
                "at_each_start": at_each_start,
                "has_effect": name not in WITHOUT_EFFECT,
                "expected": expected_of(name, base, at_each_start),
                "__module__": __name__,
            },
        )
        for way, base, names in ways
        for name in names
        for at_each_start in (True, False)
        # What adds to what there is counts the starts.
        if not (name == "array in place" and at_each_start)
    ]


KINDS = _grid()


class SearchedRateThatIsAppliedOnce(_ByTheHook):
    """As a finder does it: with the model as it was before."""

    at_each_start = False
    setting = (lambda e: None, lambda e: e.search(), lambda e: 0.5)
    has_effect = False  # nothing is made anew

    def search(self) -> None:
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        losses = {}
        for rate in (0.01, 0.05):
            self.optimizer.set_lr(rate)
            loss = (self.model(paddle.to_tensor(self.train_loader.dataset.points)) - 1).square()
            loss.mean().backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            losses[float(loss.mean())] = rate
        self.model.set_state_dict(before)
        self.optimizer.set_lr(losses[min(losses)])


class RestoredByTheUser(Kind):
    """What on_load_checkpoint sets is state, and what the user saves of it."""

    def make(self) -> None:
        self.level, self.loads = 1.0, 0

    def use(self) -> float:
        self.level *= 1.1
        return self.level

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"level": self.level}

    def on_load_checkpoint(self, states: Any) -> None:
        self.level, self.loads = states["level"], self.loads + 1
