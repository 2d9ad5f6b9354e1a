"""Kinds of objects and of attributes: what comes, goes and is replaced; see kinds.py."""

from __future__ import annotations

import collections
import functools
import random
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from kinds import EITHER, EXACT, LOUD, TOLD, Kind
from kinds_of_names import _Steps
from kinds_of_values import Box, number

COUNTS: list[int] = []  # for a kind of another module of this folder


class CallableObject(Kind):
    def make(self) -> None:
        self.schedule = _Warmup()

    def use(self) -> float:
        return self.schedule()


class _Warmup(_Steps):
    def __call__(self) -> float:
        return self.step()


class AttributeDeleted(Kind):
    def make(self) -> None:
        self.warming = [1]

    def use(self) -> float:
        if self.now(3):
            del self.warming
        return float(hasattr(self, "warming"))


class AttributeOfAnObjectDeleted(Kind):
    def make(self) -> None:
        self.helper = Box(warming=1)

    def use(self) -> float:
        if self.now(3):
            del self.helper.warming
        return float(hasattr(self.helper, "warming"))


class AttributeOfALayerDeleted(Kind):
    def make(self) -> None:
        self.model.warming = 1

    def use(self) -> float:
        if self.now(3):
            del self.model.warming
        return float(hasattr(self.model, "warming"))


class KeyDeleted(Kind):
    def make(self) -> None:
        self.helper = Box(table={"a": Box(n=1), "b": Box(n=1)})

    def use(self) -> float:
        if self.now(3):
            del self.helper.table["a"]
        return number(self.helper.table)


class AttributeDeletedAndMadeAgain(Kind):
    def make(self) -> None:
        self.window = [1, 2]

    def use(self) -> float:
        if self.now(2):
            del self.window
        if self.now(3):
            self.window = {"a": 1}
        if self.iteration > 3:
            self.window["a"] += 1
        return number(getattr(self, "window", None))


class AttributeMadeLater(Kind):
    has_effect = False  # nothing is made anew

    def use(self) -> float:
        self.later = [*getattr(self, "later", []), self.iteration]
        return number(self.later)


class AttributeOfAnObjectMadeLater(Kind):
    def make(self) -> None:
        self.helper = Box()

    def use(self) -> float:
        self.helper.later = getattr(self.helper, "later", 0) + 1
        return number(self.helper)


class AttributeOfALayerMadeLater(Kind):
    has_effect = False  # nothing is made anew

    def use(self) -> float:
        self.model.later = getattr(self.model, "later", 0) + 1
        return number(self.model.later)


class ObjectMadeLater(Kind):
    expected = LOUD
    has_effect = False  # nothing is made anew

    def use(self) -> float:
        if self.iteration >= 3:
            self.later = getattr(self, "later", None) or Box(count=0)
            self.later.count += 1
        return number(getattr(self, "later", None))


class AttributeThatBecomesAnObject(Kind):
    expected = LOUD

    def make(self) -> None:
        self.best: Any = None

    def use(self) -> float:
        if self.iteration in (2, 7):
            self.best = Box(count=self.iteration)
        return number(self.best)


class ObjectThatBecomesNone(Kind):
    def make(self) -> None:
        self.warmup: Any = Box(count=0)

    def use(self) -> float:
        if self.now(3):
            self.warmup = None
        return number(self.warmup)


class ObjectReplacedByAnotherClass(Kind):
    expected = LOUD

    def make(self) -> None:
        self.helper: Any = Box(count=0)

    def use(self) -> float:
        if self.now(3):
            self.helper = SimpleNamespace(count=5)
        self.helper.count += 1
        return number(self.helper)


class AnotherTypeOnTheWay(Kind):
    def make(self) -> None:
        self.what: Any = 1

    def use(self) -> float:
        self.what = {2: [1], 4: {"a": [2]}, 6: "text"}.get(self.iteration, self.what)
        return number(self.what)


class ReplayBuffer(Kind):
    def make(self) -> None:
        self.buffer: Any = collections.deque(maxlen=5)

    def use(self) -> float:
        self.buffer.append((np.full(2, self.iteration), self.iteration % 3, 0.5, None))
        return number(random.choice(self.buffer))


class BufferOfDicts(Kind):
    def make(self) -> None:
        self.buffer: Any = Box(episodes=[], size=0)

    def use(self) -> float:
        episode = {"state": np.full(2, self.iteration), "reward": self.iteration / 2, "end": False}
        self.buffer.episodes.append(episode)
        return number(self.buffer.episodes[:2])


class LargeArrayOfAHelper(Kind):
    """Larger than what is saved of a helper; it may be told."""

    expected = EITHER

    def make(self) -> None:
        self.helper = Box(rows=np.zeros(17_000_000, "float32"))

    def use(self) -> float:
        self.helper.rows += 1
        return float(self.helper.rows[1])


class LargeArrayOnSelf(LargeArrayOfAHelper):
    expected = EXACT

    def make(self) -> None:
        self.rows = np.zeros(17_000_000, "float32")

    def use(self) -> float:
        self.rows[self.iteration] += 1
        return number(self.rows[:20])


@dataclass
class Episode:
    number: int
    rewards: list[float] = field(default_factory=list)


class ListOfEpisodes(Kind):
    expected = LOUD

    def make(self) -> None:
        self.episodes: list[Episode] = []

    def use(self) -> float:
        self.episodes.append(Episode(self.iteration))
        self.episodes[0].rewards.append(self.iteration / 2)
        return number(self.episodes)


class RingOfEpisodes(Kind):
    """The objects are all there after setup, and are used again."""

    def make(self) -> None:
        self.episodes = [Episode(0) for _ in range(4)]

    def use(self) -> float:
        episode = self.episodes[self.iteration % 4]
        episode.number += self.iteration
        episode.rewards.append(1.0)
        return number(self.episodes)


class ObjectWithAState(Kind):
    def make(self) -> None:
        self.tally = _Tally()

    def use(self) -> float:
        return self.tally.step()


class _Tally(_Steps):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class ObjectWhoseStateLacksAPart(Kind):
    expected = EITHER

    def make(self) -> None:
        self.tally: Any = _Tally()
        self.tally.forgotten = 0

    def use(self) -> float:
        self.tally.forgotten += 3
        return self.tally.step() + self.tally.forgotten


class ObjectWithAStateInAnObject(Kind):
    def make(self) -> None:
        self.helper = Box(tally=_Tally())

    def use(self) -> float:
        return self.helper.tally.step()


class ObjectWithAStateInADataSet(Kind):
    def make(self) -> None:
        self.train_loader.dataset.tally = _Tally()

    def use(self) -> float:
        return self.train_loader.dataset.tally.step()


class RegisteredValue(Kind):
    def make(self) -> None:
        self.helper = Box(count=0)
        self.register_stateful("helper.count")

    def use(self) -> float:
        self.helper.count += 1
        return number(self.helper.count)


class OwnStates(Kind):
    """What is opaque is restored by the user, and so excluded."""

    def make(self) -> None:
        self.walk = iter(range(100))
        self.exclude_from_state("walk")
        self.taken = 0

    def use(self) -> float:
        self.taken = next(self.walk)
        return number(self.taken)

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def on_load_checkpoint(self, states: Any) -> None:
        self.walk = iter(range(states["taken"] + 1, 100))


class ExcludedValue(Kind):
    has_effect = False

    def make(self) -> None:
        self.clock = 0
        self.helper = Box(clock=0)
        self.exclude_from_state("clock", "helper.clock")

    def use(self) -> float:
        self.clock += 1
        self.helper.clock += 1
        return 0.0


class SetInOnTrainBegin(Kind):
    def on_train_begin(self) -> None:
        if not hasattr(self, "level"):
            self.level = 1.0

    def make(self) -> None:
        """Makes nothing yet."""

    def use(self) -> float:
        self.level *= 1.1
        return self.level

    has_effect = False  # nothing is made anew


class SetAnewInOnTrainBegin(Kind):
    expected = TOLD

    def on_train_begin(self) -> None:
        self.level = 1.0

    def use(self) -> float:
        self.level *= 1.1
        return self.level

    has_effect = False  # nothing is made anew


class ObjectMadeAnewInOnTrainBegin(Kind):
    expected = TOLD

    def on_train_begin(self) -> None:
        self.helper = Box(level=1.0)

    def use(self) -> float:
        self.helper.level *= 1.1
        return self.helper.level

    has_effect = False  # nothing is made anew


class ObjectThatAnswersEverything(Kind):
    expected = "exact refused"

    def make(self) -> None:
        self.proxy = _Proxy()

    def use(self) -> float:
        self.proxy.count += 1
        return number(self.proxy.count)


class _Proxy:
    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: self


class ObjectThatCannotBeCompared(Kind):
    def make(self) -> None:
        self.odd = _Odd()

    def use(self) -> float:
        self.odd.count += 1
        return number(self.odd.count)


class _Odd:
    def __init__(self) -> None:
        self.count = 0

    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise TypeError("not to be shown")

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")

    def __len__(self) -> int:
        raise TypeError("no length")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class PropertyThatRaises(Kind):
    def make(self) -> None:
        self.lazy = _Lazy()

    def use(self) -> float:
        self.lazy.count += 1
        return number(self.lazy.count)


class _Lazy:
    def __init__(self) -> None:
        self.count = 0

    @property
    def model(self) -> Any:
        raise RuntimeError("not loaded yet")


class CachedProperty(Kind):
    has_effect = False

    def make(self) -> None:
        self.table = _Table()

    def use(self) -> float:
        return float(self.table.values[self.iteration % 4])


class _Table:
    @functools.cached_property
    def values(self) -> Any:
        return np.arange(4.0)


class CachedPropertyThatChanges(Kind):
    def make(self) -> None:
        self.table = _Table()

    def use(self) -> float:
        self.table.values[0] += 1
        return number(self.table.values)


class PropertyOfTheExperiment(Kind):
    def make(self) -> None:
        self._level = 1.0

    @property
    def level(self) -> float:
        return self._level

    @level.setter
    def level(self, value: float) -> None:
        self._level = min(value, 50.0)

    def use(self) -> float:
        self.level *= 1.2
        return self.level


class PopOrderOfASet(Kind):
    expected = EITHER

    def make(self) -> None:
        self.todo = {*range(0, 40, 8), 3}

    def use(self) -> float:
        self.todo.add(self.iteration * 16 % 31 + 64)
        return number(self.todo.pop())


class WeakReferences(Kind):
    def make(self) -> None:
        self.parts = [Box(n=0)]
        self.weak = weakref.WeakValueDictionary({"a": self.parts[0]})

    def use(self) -> float:
        self.weak["a"].n += 1
        return number(self.parts)


class HiddenByAWeakReference(Kind):
    expected = EITHER

    def make(self) -> None:
        self.counts: Any = weakref.WeakKeyDictionary({self.model: 0})

    def use(self) -> float:
        self.counts[self.model] += 1
        return number(self.counts[self.model])


class MetaInASlot(Kind):
    def make(self) -> None:
        self.parts = (Box(n=[0]), "a")

    def use(self) -> float:
        self.parts[0].n.append(self.iteration)
        return number(self.parts)
