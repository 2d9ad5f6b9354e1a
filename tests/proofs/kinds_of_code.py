"""Kinds of state in code: closures, hooks, modules and classes; what is opaque; what is harmless.

See kinds.py. What is opaque (an iterator, a thread) can be told at most; what is harmless changes no
bits, and must not be warned of at each resume.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import io
import itertools
import logging
import os
import platform
import queue
import random
import re
import sqlite3
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kinds_of_objects
import numpy as np
import paddle
from kinds import EITHER, EXACT, LOUD, TOLD, Kind, Points
from kinds_of_values import Box, number
from paddle.io import DataLoader

COUNT = 0
ITEMS: list[int] = []
TABLE = {"a": 1}
METER = Box(total=0)
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


# Closures and functions


def counting() -> Any:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


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
        self.model.register_forward_pre_hook(lambda layer, x, watch=_Watch(): watch(layer, x, x[0]))


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


class GradientHook(Kind):
    expected = EITHER
    has_effect = False

    def make(self) -> None:
        count = counting()
        self.model.weight.register_hook(lambda gradient: gradient * (1 + count() / 10))


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


# Opaque


class _Iterator(Kind):
    expected = EITHER

    def use(self) -> float:
        return number(next(self.walk))


class CountingIterator(_Iterator):
    def make(self) -> None:
        self.walk = itertools.count(3)


class Cycle(_Iterator):
    def make(self) -> None:
        self.walk = itertools.cycle("abcdefg")


class IteratorOfAList(_Iterator):
    def make(self) -> None:
        self.walk = iter([*range(20)])


class Enumeration(_Iterator):
    def make(self) -> None:
        self.walk = enumerate("abcdefghijkl")


class Zipped(_Iterator):
    def make(self) -> None:
        self.walk = zip(range(20), range(5, 25), strict=True)


class Generator(_Iterator):
    expected = TOLD

    def make(self) -> None:
        self.walk = self.walked()

    def walked(self) -> Any:
        yield from ((n, n % 3) for n in range(100))


class GeneratorInAnObject(_Iterator):
    expected = TOLD

    def make(self) -> None:
        self.helper = Box(walks={"a": (n * 3 for n in range(100))})

    def use(self) -> float:
        return number(next(self.helper.walks["a"]))


class GeneratorInADataSet(_Iterator):
    expected = TOLD

    def make(self) -> None:
        self.train_loader.dataset.walk = (n * 3 for n in range(100))

    def use(self) -> float:
        return number(next(self.train_loader.dataset.walk))


class SecondLoader(_Iterator):
    expected = TOLD

    def make(self) -> None:
        self.second = DataLoader(Points(80), batch_size=4, shuffle=True)
        self.walk = iter(self.second)


class OpenFile(_Iterator):
    expected = TOLD

    def make(self) -> None:
        path = Path(self.output_dir) / "numbers.txt"
        path.write_text("".join(f"{n * 7 % 31}\n" for n in range(50)))
        self.walk = path.open()

    def use(self) -> float:
        return number(self.walk.readline())


class TextInMemory(_Iterator):
    def make(self) -> None:
        self.walk = io.StringIO("".join(f"{n}\n" for n in range(50)))

    def use(self) -> float:
        return number(self.walk.readline())


class Queue(Kind):
    expected = EITHER

    def make(self) -> None:
        self.todo: Any = queue.Queue()
        self.todo.put(1)

    def use(self) -> float:
        last = self.todo.get()
        self.todo.put(last + 1)
        return number(last)


class SimpleQueue(Queue):
    expected = TOLD

    def make(self) -> None:
        self.todo = queue.SimpleQueue()
        self.todo.put(1)


class ThreadWithACounter(Kind):
    expected = EITHER

    def make(self) -> None:
        self.worker = _Worker()
        self.worker.start()

    def use(self) -> float:
        self.worker.asked.put(self.iteration)
        return number(self.worker.answers.get(timeout=60))


class _Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked: Any = queue.Queue()
        self.answers: Any = queue.Queue()
        self.total = 0

    def run(self) -> None:
        while True:
            self.total += self.asked.get()
            self.answers.put(self.total)


class NumberOfC(Kind):
    expected = EITHER

    def make(self) -> None:
        self.count = ctypes.c_int(0)

    def use(self) -> float:
        self.count.value += 1
        return number(self.count.value)


class Memory(Kind):
    expected = EITHER

    def make(self) -> None:
        self.view = memoryview(bytearray(8))

    def use(self) -> float:
        self.view[0] += 1
        return number(bytes(self.view))


class DatabaseInMemory(Kind):
    expected = TOLD

    def make(self) -> None:
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table t (n)")

    def use(self) -> float:
        self.base.execute("insert into t values (1)")
        return number(self.base.execute("select count(*) from t").fetchone())


class ContextVariable(Kind):
    expected = EITHER

    def make(self) -> None:
        VARIABLE.set(0)
        self.variable = VARIABLE

    def use(self) -> float:
        self.variable.set(self.variable.get() + 1)
        return number(self.variable.get())


# Random numbers


class SpawnedGenerators(Kind):
    expected = EITHER

    def make(self) -> None:
        self.generator = np.random.default_rng(3)

    def use(self) -> float:
        return float(self.generator.spawn(1)[0].random())


class SeedSequence(Kind):
    expected = EITHER

    def make(self) -> None:
        self.seeds = np.random.SeedSequence(3)

    def use(self) -> float:
        return float(np.random.default_rng(self.seeds.spawn(1)[0]).random())


class OtherBitGenerators(Kind):
    def make(self) -> None:
        kinds = (np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM)
        self.generators = [np.random.Generator(kind(3)) for kind in kinds]

    def use(self) -> float:
        return number([float(generator.normal()) for generator in self.generators])


class BitGenerator(Kind):
    expected = EITHER

    def make(self) -> None:
        self.bits = np.random.PCG64(3)

    def use(self) -> float:
        return number(self.bits.random_raw())


class GeneratorOfAnotherKind(Kind):
    expected = "told refused"

    def make(self) -> None:
        self.generator = np.random.default_rng(3)

    def use(self) -> float:
        if self.now(3):
            self.generator = np.random.Generator(np.random.Philox(5))
        return float(self.generator.random())


class GeneratorMadeAnew(Kind):
    def make(self) -> None:
        self.generator = random.Random(3)

    def use(self) -> float:
        if self.now(3):
            self.generator = random.Random(5)
        return self.generator.random()


class SubclassOfRandom(Kind):
    def make(self) -> None:
        self.generator = type("Dice", (random.Random,), {})(3)

    def use(self) -> float:
        return self.generator.random() + self.generator.gauss(0, 1)


class GeneratorOfPaddle(Kind):
    expected = EITHER

    def make(self) -> None:
        self.generator = paddle.base.core.Generator()
        self.generator.manual_seed(3)

    def use(self) -> float:
        return number(self.generator.random())


class GlobalGenerators(Kind):
    has_effect = False  # they are the template's

    def use(self) -> float:
        return random.random() + float(np.random.rand()) + float(paddle.rand([]))


# Harmless


class _Harmless(Kind):
    has_effect = False

    def use(self) -> float:
        return 0.5


class ProgressBar(_Harmless):
    def make(self) -> None:
        self.bar = _Bar(10)

    def use(self) -> float:
        self.bar.update()
        return 0.5


class _Bar:
    def __init__(self, total: int) -> None:
        self.total, self.n = total, 0
        self.began = self.seen = time.perf_counter()
        self.file, self.lock = None, threading.RLock()

    def update(self) -> None:
        with self.lock:
            self.n += 1
            self.seen = time.perf_counter()


class TrackingClient(_Harmless):
    expected = EITHER

    def make(self) -> None:
        self.client = Box(id=uuid.uuid4().hex, sent=0, last=0.0, todo=queue.Queue(), url="http://x")

    def use(self) -> float:
        self.client.sent += 1
        self.client.last = time.time()
        self.client.todo.put({"loss": 1.0})
        return 0.5


class FactsOfTheStart(_Harmless):
    def make(self) -> None:
        self.began, self.clock = time.time(), time.perf_counter()
        self.host, self.pid = platform.node(), os.getpid()
        self.name = f"run-{uuid.uuid4().hex}"
        self.facts = Box(pid=os.getpid(), began=time.time(), address=id(self))


class TimesOfUpdates(_Harmless):
    def make(self) -> None:
        self.times: list[float] = []
        self.timer = Box(last=time.time(), total=0.0)

    def use(self) -> float:
        now = time.time()
        self.times.append(now - self.timer.last)
        self.timer.last, self.timer.total = now, self.timer.total + self.times[-1]
        return 0.5


class ThingsOfCode(_Harmless):
    def make(self) -> None:
        self.device = "cpu"
        self.log_of_mine = logging.getLogger("mine")
        self.pattern = re.compile("a+")
        self.root = Path("data")
        self.activation, self.norm, self.np = np.tanh, paddle.nn.LayerNorm, np
        self.place = paddle.CPUPlace()
        self.types = {"f": np.float32, "t": paddle.float32, "n": type(None)}
        self.options = SimpleNamespace(lr=0.1, names=["a"], act=paddle.nn.functional.relu)


class Locks(_Harmless):
    expected = EITHER

    def make(self) -> None:
        self.lock, self.event = threading.Lock(), threading.Event()

    def use(self) -> float:
        with self.lock:
            return 0.5


class OwnLogFile(_Harmless):
    expected = EITHER

    def make(self) -> None:
        self.file = (Path(self.output_dir) / "mine.txt").open("a")

    def use(self) -> float:
        self.file.write("line\n")
        return 0.5


class LruCache(_Harmless):
    expected = EXACT

    def use(self) -> float:
        return _square(self.iteration % 4) + self.cube(self.iteration % 3)

    @functools.lru_cache  # noqa: B019
    def cube(self, n: int) -> float:
        return n**3 / 10


@functools.cache
def _square(n: int) -> float:
    return n**2 / 10


class LruCacheOnSelf(_Harmless):
    def make(self) -> None:
        self.tokens = functools.lru_cache(lambda text: len(text))
        self.helper = Box(cache=functools.cache(lambda text: len(text)))

    def use(self) -> float:
        return float(self.tokens("a" * (self.iteration % 5)) + self.helper.cache("b"))


class KeptBatchAndLoss(_Harmless):
    def make(self) -> None:
        self.kept: Any = None
        self.history: list[Any] = []

    def update(self) -> Any:
        self.kept = self.read_batch()
        self.kept_loss = self.model(self.kept).square().mean()  # with its graph
        self.kept_loss.backward()
        self.step()
        self.history.append(float(self.kept_loss))
        return self.kept_loss.detach()
