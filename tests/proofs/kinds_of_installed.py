"""Kinds of objects of installed packages, of other processes, and of code that has no module.

See kinds.py. What talks to the world is closed where it stands, so the numbers beside it are state;
an iterator is told wherever it stands.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing.managers
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, EXACT, TOLD, Kind, Points, is_killed
from kinds_of_shares import _Shared
from kinds_of_values import Box, number
from paddle import nn
from paddle.io import DataLoader

from expbase.base.processes import die_with_parent

# A module that belongs to a distribution, as those that pip installs.
PACKAGE = "package_of_kinds"
CODE = '''
import logging
import threading
import queue

import paddle

class Holder:
    """Counts beside what it holds."""
    def __init__(self, held):
        self.held, self.count, self.history = held, 0, [0]
    def step(self):
        self.count += 1
        self.history.append(self.count * 2)
        return self.count

class Constraint(Holder):
    """Reads its own data, as those of PaddleScience."""
    def step(self):
        self.last = next(self.held)
        return super().step()

class Prefetcher:
    """A queue that a thread fills."""
    def __init__(self):
        self.todo = queue.Queue(2)
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.fill, daemon=True)
        self.thread.start()
    def fill(self):
        n = 0
        while True:
            self.todo.put(n)
            n += 1

class Slots:
    __slots__ = ("held", "count")
    def __init__(self, held):
        self.held, self.count = held, 0
    def step(self):
        self.count += 1
        return self.count

class Transform:
    """Has a name of its own in each process, as those of PaddleDetection."""
    def __init__(self, name):
        self.name, self.count = name, 0
    def __call__(self, value):
        return value * 2

class Bar:
    """Only reports."""
    def __init__(self, file):
        self.file, self.n, self.lock = file, 0, threading.RLock()
    def update(self):
        self.n += 1
        self.file.write(".")
        self.file.flush()

class WithACell:
    """Holds a function that holds a lock."""
    def __init__(self):
        lock = threading.Lock()
        def locked(value):
            with lock:
                return value
        self.locked, self.count = locked, 0
    def step(self):
        self.count += 1
        return self.locked(self.count)

class Head(paddle.nn.Layer):
    """A layer with a lock and a counter."""
    def __init__(self):
        super().__init__()
        self.lock, self.count = threading.Lock(), 0
        self.inner = paddle.nn.Linear(3, 1)
    def forward(self, batch):
        with self.lock:
            self.count += 1
        return self.inner(batch) * (1 + self.count / 10)

def lock():
    return threading.Lock()

def condition():
    return threading.Condition()

def logger():
    return logging.getLogger("package_of_kinds")
'''


def install() -> Any:
    """Writes it to a folder of this process, and imports it."""
    folder = Path(tempfile.mkdtemp(prefix="expbase-kinds-installed-"))
    parent = os.getpid()
    atexit.register(lambda: os.getpid() == parent and shutil.rmtree(folder, ignore_errors=True))
    (folder / f"{PACKAGE}.py").write_text(CODE)
    (folder / f"{PACKAGE}-1.0.dist-info").mkdir()
    (folder / f"{PACKAGE}-1.0.dist-info" / "RECORD").write_text(f"{PACKAGE}.py,,\n")
    sys.path.append(str(folder))
    return importlib.import_module(PACKAGE)


package = install()


def numbers() -> Any:
    yield from (n * 7 % 31 for n in range(1000))


class Nested:
    """Holds an iterator two levels deeper."""

    def __init__(self) -> None:
        self.reader = Box(iterators=[numbers()])


# Beside a counter

Does = Callable[[Any], Any]
HELD: dict[str, Does] = {
    "a lock": lambda e: package.lock(),
    "a condition": lambda e: package.condition(),
    "a logger": lambda e: package.logger(),
    "a file": lambda e: (Path(e.output_dir) / "own.txt").open("a"),
    "a prefetcher": lambda e: package.Prefetcher(),
    "a progress bar": lambda e: package.Bar((Path(e.output_dir) / "own.txt").open("a")),
    "a lock in a dict": lambda e: {"lock": package.lock(), "logger": package.logger()},
    "an iterator": lambda e: numbers(),
    "an iterator of a loader": lambda e: iter(DataLoader(Points(80), batch_size=2)),
    "an iterator of an object": lambda e: Nested(),
}
WITH_AN_ITERATOR = [name for name in HELD if "iterator" in name]
# By name: how it is put there, and found again.
PLACES: dict[str, tuple[Callable[[Any, Any], Any], Does]] = {
    "": (lambda e, v: setattr(e, "helper", v), lambda e: e.helper),
    "in an object": (
        lambda e, v: setattr(e, "box", Box(helper=v)),
        lambda e: e.box.helper,
    ),
    "in a dict": (lambda e, v: setattr(e, "table", {"a": v}), lambda e: e.table["a"]),
    "in a list": (lambda e, v: setattr(e, "row", [v]), lambda e: e.row[0]),
    "in a data set": (
        lambda e, v: setattr(e.train_loader.dataset, "helper", v),
        lambda e: e.train_loader.dataset.helper,
    ),
}


class _Held(Kind):
    """An installed object that holds something, and counts.

    Where the iterator is told, nothing else would say that the counter is lost.
    """

    held: tuple[Does]
    place: tuple[Callable[[Any, Any], Any], Does]
    kind: tuple[Any]

    def make(self) -> None:
        self.place[0](self, self.kind[0](self.held[0](self)))

    def use(self) -> float:
        count = self.place[1](self).step()
        if TOLD in self.expected and count != self.iteration:
            raise ValueError(f"the counter is {count} in iteration {self.iteration}")
        return number(count)


def _grid() -> list[type[Kind]]:
    pairs = [(held, "") for held in HELD]
    few = ("a lock", "a logger", "an iterator", "an iterator of a loader")
    pairs += [(held, place) for place in PLACES if place for held in few]
    return [
        type(
            f"counter {place} of an installed object beside {held}".replace("  ", " "),
            (_Held,),
            {
                "held": (HELD[held],),
                "place": PLACES[place],
                "kind": (package.Holder,),
                "expected": EITHER if held in WITH_AN_ITERATOR else EXACT,
                "__module__": __name__,
            },
        )
        for held, place in pairs
    ]


KINDS = _grid()


class InstalledConstraintThatReads(_Held):
    expected = TOLD
    held = (HELD["an iterator of a loader"],)
    place = PLACES[""]
    kind = (package.Constraint,)

    def use(self) -> float:
        count = super().use()
        return count + float(np.asarray(self.helper.last).sum())


class InstalledConstraintsInADict(InstalledConstraintThatReads):
    def make(self) -> None:
        names = ("equations", "borders")
        self.constraints = {name: package.Constraint(self.held[0](self)) for name in names}
        self.helper = self.constraints["borders"]


class InstalledConstraintOverAGenerator(InstalledConstraintThatReads):
    held = (HELD["an iterator"],)


class InstalledObjectWithSlots(_Held):
    held = (HELD["a lock"],)
    place = PLACES[""]
    kind = (package.Slots,)


class InstalledObjectWithALockInACell(_Held):
    held = (lambda e: None,)
    place = PLACES[""]
    kind = (lambda held: package.WithACell(),)


class InstalledObjectInAnInstalledObject(_Held):
    """A lock of the outer one, and a counter of the inner."""

    held = (lambda e: None,)
    place = (
        lambda e, v: setattr(e, "outer", package.Holder([package.lock(), v])),
        lambda e: e.outer.held[1],
    )
    kind = (package.Holder,)


class InstalledLayerWithALock(Kind):
    has_effect = False  # nothing is made anew

    def net(self) -> Any:
        return package.Head()


class InstalledProgressBar(Kind):
    """Only reports, so no line is about it."""

    has_effect = False

    def make(self) -> None:
        self.bar = package.Bar((Path(self.output_dir) / "own.txt").open("a"))

    def use(self) -> float:
        self.bar.update()
        return 0.5


class UuidsOfTransforms(Kind):
    """Of a data set, which are others in each start; no line may be about them."""

    has_effect = False

    def loader(self) -> Any:
        data: Any = Points()
        kinds = ("Decode", "Flip", "Resize", "Normalize", "Permute")
        data.transforms = [package.Transform(f"{kind}_{uuid.uuid4()}"[-6:]) for kind in kinds]
        return DataLoader(data, batch_size=4, shuffle=True)

    def terminal(self) -> None:
        super().terminal()
        log = (Path(self.output_dir) / "worker_0.log").read_text()
        if lines := [line for line in log.splitlines() if "transforms" in line]:
            raise ValueError(lines[0])


class UuidsOfTransformsOfTheUsers(UuidsOfTransforms):
    def loader(self) -> Any:
        loader = super().loader()
        loader.dataset.transforms = [Box(id=uuid.uuid4().hex[-6:], scale=1.0) for _ in range(3)]
        return loader


# Other processes, and files


class DictOfAManager(Kind):
    """Another process has it."""

    expected = EITHER

    def make(self) -> None:
        self.manager = multiprocessing.managers.SyncManager()
        self.manager.start(die_with_parent, (os.getpid(),))
        self.shared: Any = self.manager.dict(count=0)

    def use(self) -> float:
        self.shared["count"] += 1
        return number(self.shared["count"])


class DictOfAManagerInADataSet(DictOfAManager):
    def make(self) -> None:
        super().make()
        self.train_loader.dataset.shared = self.shared
        del self.shared

    def use(self) -> float:
        shared = self.train_loader.dataset.shared
        shared["count"] += 1
        return number(shared["count"])


class ListOfAManager(DictOfAManager):
    def make(self) -> None:
        super().make()
        self.shared = self.manager.list([0])

    def use(self) -> float:
        self.shared.append(self.shared[-1] + 2)
        return number([*self.shared])


class ValueOfSharedMemory(Kind):
    expected = EITHER

    def make(self) -> None:
        self.shared = multiprocessing.get_context("fork").Value("d", 0.0)

    def use(self) -> float:
        self.shared.value += 1
        return number(self.shared.value)


class _Mapped(Kind):
    """A file that training writes, opened as it is."""

    expected = EITHER

    def make(self) -> None:
        path = Path(self.output_dir) / "values.bin"
        if os.environ.get("KINDS_FORGETS") or not path.exists():
            np.zeros(8, "float32").tofile(path)
        self.values = np.memmap(path, "float32", "r+")

    def use(self) -> float:
        self.values[self.iteration % 8] += 1 + self.values.sum()
        return float(self.values.sum())


class MemmapThatTrainingWrites(_Mapped):
    pass


class MemmapOfAnObject(_Mapped):
    def make(self) -> None:
        super().make()
        self.bank = Box(values=self.values)
        del self.values

    def use(self) -> float:
        self.bank.values[self.iteration % 8] += 1 + self.bank.values.sum()
        return float(self.bank.values.sum())


class ViewOfAMemmap(_Mapped):
    def make(self) -> None:
        super().make()
        self.values = np.asarray(self.values)[2:]

    def use(self) -> float:
        self.values[self.iteration % 6] += 1 + self.values.sum()
        return float(self.values.sum())


class MemmapThatIsRead(_Mapped):
    """And never written."""

    expected = EXACT
    has_effect = False

    def use(self) -> float:
        return float(self.values.sum())


class MemmapMadeAnewAtEachStart(_Mapped):
    """Of zeros: what training has written is another file's."""

    def make(self) -> None:
        path = Path(self.output_dir) / f"values-{uuid.uuid4().hex}.bin"
        self.values = np.memmap(path, "float32", "w+", shape=8)


# Code that has no module


def bare(text: str) -> Any:
    """What this text evaluates to, as a library for symbols makes functions."""
    return eval(text, {})


def made_in_a_bare_namespace() -> Any:
    names: dict[str, Any] = {}
    exec(
        "Made = type('Made', (object,), {'count': 0})\ndef doubled(value): return value * 2", names
    )
    return names


class FunctionWithoutAModule(Kind):
    def make(self) -> None:
        self.fn = bare("lambda value: value * 1.5 + 1")
        self.count = 0

    def use(self) -> float:
        self.count += 1
        return self.fn(self.count)


class FunctionsWithoutAModuleInADict(Kind):
    """Beside a loss, as PaddleScience has equations."""

    def make(self) -> None:
        names = made_in_a_bare_namespace()
        self.equations = Box(by_name={"a": names["doubled"], "b": bare("lambda v: v - 1")}, count=0)

    def use(self) -> float:
        self.equations.count += 1
        return sum(fn(self.equations.count) for fn in self.equations.by_name.values())


class FunctionWithoutAModuleAsACollateFn(Kind):
    has_effect = False

    def loader(self) -> Any:
        collate = eval("lambda batch: stack(batch) * 2", {"stack": np.stack})
        return DataLoader(Points(), batch_size=4, shuffle=True, collate_fn=collate)


class FunctionWithoutAModuleSwitched(Kind):
    """By no name, so it is code."""

    expected = TOLD

    def make(self) -> None:
        self.fn = bare("lambda value: value * 2")

    def use(self) -> float:
        if self.now(3):
            self.fn = bare("lambda value: value * 3")
        return self.fn(self.iteration / 10)


class ObjectOfAClassWithoutAModule(Kind):
    """Which setup makes, and training moves."""

    expected = EITHER

    def make(self) -> None:
        self.helper = made_in_a_bare_namespace()["Made"]()
        self.count = 0

    def use(self) -> float:
        self.helper.count += 2
        self.count += 1
        return number([self.helper.count, self.count])


class ObjectOfAClassWhoseModuleIsNone(ObjectOfAClassWithoutAModule):
    def make(self) -> None:
        self.helper = type("Made", (), {"__module__": None, "count": 0})()
        self.count = 0


class ClassWithoutAModuleOnSelf(Kind):
    def make(self) -> None:
        self.class_of_helpers = made_in_a_bare_namespace()["Made"]
        self.count = 0

    def use(self) -> float:
        self.count += 1
        return number(self.count) + self.class_of_helpers().count


class LayerOfAClassWithoutAModule(Kind):
    """Which is trained."""

    has_effect = False

    def net(self) -> Any:
        made = eval("type('Net', (Linear,), {})", {"Linear": nn.Linear})
        return made(3, 1)


class DataSetOfAClassWithoutAModule(Kind):
    has_effect = False

    def loader(self) -> Any:
        made = eval("type('Data', (Points,), {})", {"Points": Points})
        return DataLoader(made(), batch_size=4, shuffle=True)


class OptimizerOfAClassWithoutAModule(Kind):
    has_effect = False

    def optimizers(self) -> None:
        made = eval("type('Own', (Adam,), {})", {"Adam": paddle.optimizer.Adam})
        self.optimizer = made(0.05, parameters=self.model.parameters())


class ScheduleOfAClassWithoutAModule(Kind):
    has_effect = False

    def optimizers(self) -> None:
        decay = paddle.optimizer.lr.ExponentialDecay
        made = eval("type('Own', (Decay,), {})", {"Decay": decay})
        self.schedule = made(0.1, 0.9)
        self.optimizer = paddle.optimizer.SGD(self.schedule, parameters=self.model.parameters())

    def step(self) -> None:
        super().step()
        self.schedule.step()


class HookWithoutAModule(Kind):
    has_effect = False

    def make(self) -> None:
        self.model.register_forward_post_hook(bare("lambda layer, x, y: y * 1.5"))


# Names that paddle gives


class _Flow(nn.Layer):
    """As WaveFlow: each permutation is a buffer under its automatic name."""

    def __init__(self, elsewhere: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.out = nn.Linear(3, 1)
        kept = [paddle.to_tensor([0]) for _ in range(elsewhere)]  # uses names up
        self.perms = [paddle.to_tensor(order) for order in ([2, 0, 1], [1, 2, 0])]
        for perm in self.perms:
            self.register_buffer(perm.name, perm)
        del kept

    def forward(self, batch: Any) -> Any:
        for perm in self.perms:
            batch = paddle.index_select(self.inner(batch), perm, axis=1)
        return self.out(batch)


class BuffersUnderTheirAutomaticNames(Kind):
    has_effect = False  # nothing is made anew

    def net(self) -> Any:
        return _Flow(3 if is_killed() else 0)


class BuffersUnderTheirAutomaticNamesThatMove(BuffersUnderTheirAutomaticNames):
    has_effect = True

    def make(self) -> None:
        for perm, order in zip(self.model.perms, ([2, 0, 1], [1, 2, 0]), strict=True):
            perm.set_value(paddle.to_tensor(order))

    def use(self) -> float:
        if self.now(3):
            self.model.perms[0].set_value(paddle.to_tensor([0, 1, 2]))
        return 0.5


class ParametersUnderTheirAutomaticNames(Kind):
    """Names as `unique_name` makes them; paddle's own have a point, which no key may have."""

    has_effect = False

    def net(self) -> Any:
        for _ in range(3 if is_killed() else 0):
            paddle.utils.unique_name.generate("scale")
        net = nn.Linear(3, 1)
        for level in (0.5, 2.0):
            attr = paddle.ParamAttr(
                paddle.utils.unique_name.generate("scale"), nn.initializer.Constant(level)
            )
            parameter = net.create_parameter([3], attr)
            net.add_parameter(parameter.name, parameter)
        return net

    def update(self) -> Any:
        batch = self.read_batch()
        first, second = (p for p in self.model.parameters() if p.shape == [3])
        loss = (self.model(batch * first) - (batch * second).mean()).square().mean()
        loss.backward()
        self.step()
        return loss.detach()


class _FlowOfShares(_Shared):
    """Each start has other names, and each rank."""

    names_of_a_rank = 0

    def net(self) -> Any:
        return _Flow(self.rank * self.names_of_a_rank + (3 if is_killed() else 0))

    def make(self) -> None:
        for perm, order in zip(self.model.perms, ([2, 0, 1], [1, 2, 0]), strict=True):
            perm.set_value(paddle.to_tensor(order))

    def use(self) -> float:
        if self.iteration == 3:
            self.model.perms[0].set_value(paddle.to_tensor([0, 1, 2]))
        return 0.0


class BuffersUnderTheirAutomaticNamesOfShares(_FlowOfShares):
    pass


class BuffersUnderTheirAutomaticNamesOnTwo(_FlowOfShares):
    processes = 2


class BuffersUnderTheNamesOfEachRankOnTwo(_FlowOfShares):
    processes, names_of_a_rank = 2, 2


class BuffersUnderTheirAutomaticNamesOnTwoThenOne(_FlowOfShares):
    processes, processes_then = 2, 1
