"""Kinds of state that is opaque, generators of random numbers, and what is harmless.

See kinds.py. What is opaque (an iterator, a thread) can be told at most; what is harmless changes
no bits, and must not be warned of at each resume.
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

import numpy as np
import paddle
from kinds import EITHER, EXACT, LOUD, TOLD, Kind, Points
from kinds_of_values import Box, number
from paddle.io import DataLoader

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)

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
    expected = LOUD

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
