"""Kinds of state that ordinary people have: schedules of their own, meters, callbacks, counters.

See kinds.py. What lies in an attribute is restored, whoever holds it; what lies in a module, a
class, a closure or an iterator is told; what no start could load is refused.
"""

from __future__ import annotations

import collections
import enum
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from kinds import LOUD, REFUSED, TOLD, Kind, Points, is_killed
from kinds_of_values import Box, counting, number
from paddle import nn, optimizer
from paddle.io import DataLoader
from paddle.optimizer import lr

CALLS = 0  # a counter of this module

# Schedules


class _OfSchedule(Kind):
    """`schedule` makes that of the optimizer."""

    schedule: Callable[..., Any]

    def optimizers(self) -> None:
        """Are made in `make`."""

    def make(self) -> None:
        self.schedule_now = type(self).schedule()
        self.optimizer = optimizer.SGD(self.schedule_now, parameters=self.model.parameters())

    def step(self) -> None:
        super().step()
        self.schedule_now.step()

    def use(self) -> float:
        return 0.5


def _stages() -> list[Any]:
    return [lr.LinearLR(0.1, 6), lr.ExponentialDecay(0.08, 0.8), lr.StepDecay(0.05, 2)]


class _InAList(lr.LRScheduler):
    """One schedule after the other, three updates each."""

    def __init__(self) -> None:
        self.parts: Any = self.gathered(_stages())
        super().__init__(0.1)

    def gathered(self, parts: list[Any]) -> Any:
        return parts

    def part(self) -> Any:
        return self.parts[min(self.last_epoch // 3, 2)]

    def get_lr(self) -> float:
        part = self.part()
        part.step()
        return float(part())


class _InADeque(_InAList):
    def gathered(self, parts: list[Any]) -> Any:
        return collections.deque(parts)


class _Dropping(_InADeque):
    """A schedule that has been used is let go."""

    def part(self) -> Any:
        if self.last_epoch in (3, 7):
            self.parts.popleft()
        return self.parts[0]


class _InADict(_InAList):
    def gathered(self, parts: list[Any]) -> Any:
        return dict(zip(("warm", "main", "last"), parts, strict=True))

    def part(self) -> Any:
        return [*self.parts.values()][min(self.last_epoch // 3, 2)]


class _ListWithAState(_InAList):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "parts": [part.state_dict() for part in self.parts]}

    def set_state_dict(self, state: Any) -> None:
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.set_state_dict(own)
        super().set_state_dict({k: v for k, v in state.items() if k != "parts"})


class _DequeWithAState(_InADeque):
    """Its state does not ask paddle's base class."""

    def state_dict(self) -> Any:
        return {"at": self.last_epoch, "rate": self.last_lr, "parts": [*map(vars, self.parts)]}

    def set_state_dict(self, state: Any) -> None:
        self.last_epoch, self.last_lr = state["at"], state["rate"]
        for part, own in zip(self.parts, state["parts"], strict=True):
            vars(part).update(own)


class ScheduleOfSchedulesInAList(_OfSchedule):
    schedule = _InAList


class ScheduleOfSchedulesInADeque(_OfSchedule):
    schedule = _InADeque


class ScheduleThatDropsSchedules(_OfSchedule):
    schedule = _Dropping
    expected = LOUD


class ScheduleOfSchedulesInADict(_OfSchedule):
    schedule = _InADict


class ScheduleOfAListWithAState(_OfSchedule):
    schedule = _ListWithAState


class ScheduleOfADequeWithAState(_OfSchedule):
    schedule = _DequeWithAState


class WarmupOfAScheduleOfOnesOwn(_OfSchedule):
    schedule = staticmethod(lambda: lr.LinearWarmup(_InAList(), 3, 0.0, 0.1))


class _Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> float:
        self.calls += 1
        return 1 / self.calls


class _Asking(lr.LRScheduler):
    def __init__(self) -> None:
        self.counter = _Counter()
        super().__init__(0.1)

    def get_lr(self) -> float:
        return float(self.base_lr * self.counter())


class ScheduleWithAnObjectThatCounts(_OfSchedule):
    schedule = _Asking


class DecayByAnObjectThatCounts(_OfSchedule):
    schedule = staticmethod(lambda: lr.LambdaDecay(0.1, _Counter()))


class _Named(lr.LRScheduler):
    """Names what is state in paddle's way."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        super().__init__(0.1)

    def state_keys(self) -> None:
        self.keys = ["last_epoch", "last_lr", "seen"]

    def get_lr(self) -> float:
        self.seen.append(0.05 / (1 + len(self.seen)))
        return sum(self.seen) / len(self.seen)


class ScheduleThatNamesItsState(_OfSchedule):
    schedule = _Named


class _Patient(lr.ReduceOnPlateau):
    def __init__(self) -> None:
        super().__init__(0.1, patience=1)
        self.losses: Any = collections.deque(maxlen=3)

    def step(self, metrics: Any, epoch: Any = None) -> None:
        self.losses.append(float(metrics))
        super().step(paddle.to_tensor(sum(self.losses)), epoch)


class ScheduleByTheLastLosses(_OfSchedule):
    schedule = _Patient

    def step(self) -> None:
        Kind.step(self)
        self.schedule_now.step((self.iteration * 7 % 5) / 5)


class ConstantOfAScheduleGivenAnew(_OfSchedule):
    """What first counts after the checkpoint follows the code; a line names it."""

    schedule = staticmethod(lambda: lr.StepDecay(0.1, 6, 0.5 if is_killed() else 0.2))
    expected = "exact alarm"


class ConstantOfAScheduleWithinAnother(_OfSchedule):
    """It first counts after the warm-up."""

    expected = "exact alarm"

    @staticmethod
    def schedule() -> Any:
        return lr.LinearWarmup(lr.PolynomialDecay(0.1, 3 if is_killed() else 8), 5, 0.0, 0.1)


class _Halving(lr.LRScheduler):
    def __init__(self, at: int, factor: float) -> None:
        self.at, self.factor = at, factor
        super().__init__(0.1)

    def get_lr(self) -> float:
        return float(self.last_lr * self.factor if self.last_epoch == self.at else self.last_lr)


class ConstantOfAScheduleOfOnesOwnGivenAnew(_OfSchedule):
    schedule = staticmethod(lambda: _Halving(6, 0.5 if is_killed() else 0.2))
    expected = "exact alarm"


class _Tempered(nn.Layer):
    """Multiplies by a temperature, which it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.temperature: Any = lr.ExponentialDecay(1.0, 0.8)

    def forward(self, batch: Any) -> Any:
        return self.inner(batch) * self.temperature()


class TemperatureOfALayer(Kind):
    def net(self) -> Any:
        return _Tempered()

    def make(self) -> None:
        self.model.temperature = lr.ExponentialDecay(1.0, 0.8)

    def step(self) -> None:
        super().step()
        self.model.temperature.step()


class TemperatureOfAPartOfALayer(TemperatureOfALayer):
    """Of one's own, with a list."""

    def net(self) -> Any:
        return nn.Sequential(_Tempered())

    def make(self) -> None:
        self.model[0].temperature = _InAList()

    def step(self) -> None:
        Kind.step(self)
        self.model[0].temperature.step()


class _Callback:
    """Holds schedules, and is called after an update."""

    def __init__(self) -> None:
        self.factors = {"aux": lr.PolynomialDecay(1.0, 8), "kl": _InAList()}

    def after_update(self) -> float:
        for factor in self.factors.values():
            factor.step()
        return float(sum(factor() for factor in self.factors.values()))


class CallbackWithSchedules(Kind):
    def make(self) -> None:
        self.callbacks = [_Callback()]

    def use(self) -> float:
        return self.callbacks[0].after_update()


class ScheduleMadeOnTheWay(Kind):
    expected = REFUSED

    def make(self) -> None:
        self.factors: dict[str, Any] = {}

    def use(self) -> float:
        if self.now(3):
            self.factors["aux"] = lr.ExponentialDecay(1.0, 0.8)
        for factor in self.factors.values():
            factor.step()
        return sum(factor() for factor in self.factors.values()) or 0.5


# Clips and scalers


class _Adaptive(nn.ClipGradByGlobalNorm):
    """Clips at the mean of the norms that it has seen."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.norms: list[float] = []

    def _dygraph_clip(self, params_grads: Any) -> Any:
        square = sum(float((gradient**2).sum()) for _, gradient in params_grads)
        self.norms.append(square**0.5)
        self.clip_norm = sum(self.norms) / len(self.norms) / 2
        return super()._dygraph_clip(params_grads)


class ClipWithAHistory(Kind):
    def optimizers(self) -> None:
        """Are made in `make`."""

    def make(self) -> None:
        parameters = self.model.parameters()
        self.optimizer = optimizer.SGD(0.1, parameters=parameters, grad_clip=_Adaptive())


class _Scaler(paddle.amp.GradScaler):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__(enable=False)
        self.steps = 0

    def step(self, optimizer: Any) -> None:
        self.steps += 1
        super().step(optimizer)


class ScalerThatCounts(Kind):
    def make(self) -> None:
        self.scaler: Any = _Scaler()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.optimizer.clear_grad()

    def use(self) -> float:
        return number(self.scaler.steps)


class _StatedScaler(_Scaler):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


class ScalerThatCountsWithAState(ScalerThatCounts):
    def make(self) -> None:
        self.scaler = _StatedScaler()


# Layers and tensors


class _Copying(nn.Linear):
    """Gives copies of its tensors."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def state_dict(self, *args: Any, **how: Any) -> Any:
        return {name: t.clone() for name, t in super().state_dict(*args, **how).items()}


class LayerWhoseStateIsCopies(Kind):
    has_effect = False  # nothing is made anew

    def net(self) -> Any:
        return _Copying()


class PartWhoseStateIsCopies(LayerWhoseStateIsCopies):
    def net(self) -> Any:
        return nn.Sequential(nn.Tanh(), _Copying())


class _Arrays(nn.Linear):
    """Gives arrays, with a count, under other names, and takes them."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.count = 0

    def forward(self, batch: Any) -> Any:
        self.count += 1
        return super().forward(batch) / (1 + self.count % 3)

    def state_dict(self, *args: Any, **how: Any) -> Any:
        own = super().state_dict(*args, **how)
        arrays = {f"module.{name}": tensor.numpy() for name, tensor in own.items()}
        return {**arrays, "count": self.count}

    def set_state_dict(self, state: Any, *args: Any, **how: Any) -> Any:
        state = {name.removeprefix("module."): value for name, value in state.items()}
        self.count = state.pop("count")
        return super().set_state_dict(state, *args, **how)

    set_dict = load_dict = set_state_dict


class LayerWhoseStateIsArrays(LayerWhoseStateIsCopies):
    def net(self) -> Any:
        return _Arrays()

    def weights(self) -> Any:
        return self.model.parameters()


class LayersThawedInTurn(Kind):
    """One more every third update, the last ones first."""

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))

    def make(self) -> None:
        for layer in self.model[:2]:
            for parameter in layer.parameters():
                parameter.stop_gradient = True

    def use(self) -> float:
        if self.iteration % 3 == 0:
            for parameter in self.model[max(2 - self.iteration // 3, 0)].parameters():
                parameter.stop_gradient = False
        return 0.5


class GradientOfATensor(Kind):
    """A tensor that is no parameter, moved by hand every third time by what has gathered."""

    def make(self) -> None:
        self.prompt = paddle.zeros([3])
        self.prompt.stop_gradient = False

    def update(self) -> Any:
        loss = (self.model(self.read_batch() + self.prompt) - 0.5).square().mean()
        loss.backward()
        self.step()
        if self.iteration % 3 == 0:
            with paddle.no_grad():
                self.prompt.set_value(self.prompt - 0.3 * self.prompt.grad)
            self.prompt.clear_gradient(False)
        return loss.detach()


class GradientsOfTensorsOfAnObject(GradientOfATensor):
    def make(self) -> None:
        self.attack = Box(noise=[paddle.zeros([3])])
        self.attack.noise[0].stop_gradient = False

    @property
    def prompt(self) -> Any:
        return self.attack.noise[0]


class GeneratorOfPaddlesCore(Kind):
    """One of the layer's own; that of paddle.Generator is the global one."""

    def make(self) -> None:
        self.model.dice = paddle.base.core.Generator()
        self.model.dice.manual_seed(3)

    def use(self) -> float:
        return self.model.dice.random() % 1000 / 100


class GeneratorsOfPaddleInADict(Kind):
    def make(self) -> None:
        self.dice = {"a": paddle.base.core.Generator(), "b": paddle.base.core.Generator()}
        for seed, generator in enumerate(self.dice.values()):
            generator.manual_seed(seed)

    def use(self) -> float:
        return self.dice["ab"[self.iteration % 2]].random() % 1000 / 100


class ParameterAppended(Kind):
    expected = REFUSED

    def net(self) -> Any:
        net = nn.Linear(3, 1)
        net.scales = nn.ParameterList([paddle.create_parameter([1], "float32")])
        return net

    def use(self) -> float:
        if self.now(3):
            self.model.scales.append(paddle.create_parameter([1], "float32"))
        return float(len(self.model.scales))


class LayerPutIntoADict(Kind):
    expected = REFUSED

    def make(self) -> None:
        self.heads: dict[str, Any] = {"a": nn.Linear(2, 1)}

    def use(self) -> float:
        if self.now(3):
            self.heads["b"] = nn.Linear(2, 1)
        return number([head.weight for head in self.heads.values()])


# What training makes


class AverageMeter:
    """The mean of what it was given."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.count = name, 0.0, 0

    def update(self, value: float) -> float:
        self.total, self.count = self.total + value, self.count + 1
        return self.total / self.count


class MetersInADict(Kind):
    """Made at the first use of a key, some of them before the checkpoint."""

    def make(self) -> None:
        self.output_info: dict[str, AverageMeter] = {}

    def use(self) -> float:
        for key in ("loss", f"loss_{self.iteration % 6}"):
            if key not in self.output_info:
                self.output_info[key] = AverageMeter(key)
            self.output_info[key].update(self.iteration)
        return number(self.output_info)


class MetersByDefault(MetersInADict):
    def make(self) -> None:
        self.meters: Any = collections.defaultdict(_Counter)

    def use(self) -> float:
        return sum(self.meters[key]() for key in ("loss", self.iteration % 6))


class MetersInAList(Kind):
    def make(self) -> None:
        self.meters: Any = []

    def use(self) -> float:
        if self.iteration % 3 == 1:
            self.meters.append(AverageMeter(f"{self.iteration}"))
        return sum(meter.update(self.iteration) for meter in self.meters)


class MetersInADeque(MetersInAList):
    def make(self) -> None:
        self.meters = collections.deque(maxlen=2)


class MeterAsAnAttribute(Kind):
    def make(self) -> None:
        self.meter: Any = None

    def use(self) -> float:
        if self.iteration % 3 == 1:
            self.meter = AverageMeter(f"{self.iteration}")
        return number(self.meter and self.meter.update(self.iteration))


class MetersOfMeters(Kind):
    """Objects that hold objects, arrays, tensors and each other."""

    def make(self) -> None:
        self.tree: dict[str, Any] = {}

    def use(self) -> float:
        if self.iteration in (2, 7):
            root = Box(parts=[Box(mean=np.zeros(2)), Box(mean=paddle.zeros([2]))], counts={})
            root.parts[0].root = root
            self.tree[f"at {self.iteration}"] = root
        for root in self.tree.values():
            root.parts[0].mean += self.iteration
            root.parts[1].mean = root.parts[1].mean * 0.5 + self.iteration
            root.counts[self.iteration] = Box(seen=len(root.counts))
        return number(self.tree)


class MetricOfPaddleMadeOnTheWay(Kind):
    """Its class is an installed one."""

    def make(self) -> None:
        self.metrics: dict[str, Any] = {}

    def use(self) -> float:
        key = "ab"[self.iteration % 2]
        if key not in self.metrics:
            self.metrics[key] = paddle.metric.Accuracy()
        correct = paddle.to_tensor(np.eye(4, self.iteration % 4 + 1, dtype="float32")[:, :1])
        self.metrics[key].update(correct)
        return number([metric.accumulate() for metric in self.metrics.values()])


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Score(NamedTuple):
    at: int
    loss: float


@dataclass
class Trial:
    """What a trial had."""

    name: str
    phase: Phase = Phase.WARM
    scores: list[Score] = field(default_factory=list)
    best: Score | None = None


class TrialsInADict(Kind):
    """Data classes with enums, named tuples, and what is None at first."""

    def make(self) -> None:
        self.trials: dict[str, Trial] = {}

    def use(self) -> float:
        name = "abc"[self.iteration % 3]
        trial = self.trials.setdefault(name, Trial(name))
        trial.scores.append(Score(self.iteration, self.iteration * 7 % 5 / 5))
        trial.best = min(trial.scores, key=lambda score: score.loss)
        trial.phase = Phase.MAIN if self.iteration > 3 else Phase.WARM
        return number(self.trials)


class ScoresInAList(Kind):
    def make(self) -> None:
        self.scores: list[Any] = []

    def use(self) -> float:
        self.scores.append((Score(self.iteration, 0.5), [*Phase][self.iteration % 2]))
        self.scores.sort(key=lambda pair: -pair[0].at % 4)
        return number(self.scores)


class PhasesInADeque(Kind):
    def make(self) -> None:
        self.phases: Any = collections.deque([Phase.WARM], maxlen=4)

    def use(self) -> float:
        self.phases.appendleft([*Phase][self.iteration % 3 % 2])
        return number(self.phases)


# Dicts, names and views


class CounterBesideConstants(Kind):
    """The constant beside it follows the code."""

    def make(self) -> None:
        self.warmup = {"count": 0, "until": 9 if is_killed() else 7, "nested": {"a": [1, 2]}}

    def use(self) -> float:
        self.warmup["count"] += 1
        return number(self.warmup["count"] < self.warmup["until"])


class CacheInOrder(Kind):
    """The one that was used longest ago goes."""

    def make(self) -> None:
        self.cache: Any = collections.OrderedDict((f"{n}", n) for n in range(4))

    def use(self) -> float:
        self.cache.move_to_end(f"{self.iteration * 3 % 4}")
        if self.iteration % 4 == 0:
            self.cache.popitem(last=False)
            self.cache[f"{self.iteration // 4 % 4}"] = self.iteration
            self.cache.update((f"{n}", 0) for n in range(4) if f"{n}" not in self.cache)
        return number(self.cache)


class ItemsDeleted(Kind):
    """What is done is taken out of what setup has made."""

    def make(self) -> None:
        self.pending = {f"task {n}": {"priority": n * 7 % 5} for n in range(12)}

    def use(self) -> float:
        del self.pending[max(self.pending, key=lambda name: self.pending[name]["priority"])]
        return number(self.pending)


class ListOfACallbackAndOfTheExperiment(Kind):
    """And of a dict and of an object that training makes."""

    def make(self) -> None:
        self.history: Any = [0.5]
        self.callbacks = {"early": Box(history=self.history)}
        self.later: Any = None

    def use(self) -> float:
        if self.iteration == 2:
            self.later = Box(history=self.history)
        self.callbacks["early"].history.append(self.iteration)
        return number([len(self.later.history) if self.later else 0, self.history])


class ViewOfADataSet(Kind):
    """The harder half of its samples, which is changed by the experiment."""

    def make(self) -> None:
        self.hard = self.train_loader.dataset.points[6:]
        self.hard[...] = Points().points[6:]

    def use(self) -> float:
        self.hard *= 0.8
        self.hard[self.iteration % 6, 0] += 0.5
        return 0.5


class _ReadOnly:
    def __init__(self) -> None:
        self._level = 0

    @property
    def level(self) -> int:
        return self._level

    def rise(self) -> None:
        self._level += 1


class ReadOnlyProperty(Kind):
    def make(self) -> None:
        self.helper = _ReadOnly()

    def use(self) -> float:
        self.helper.rise()
        return number(self.helper.level)


class _Hidden:
    """A property over a value of the same name."""

    def __init__(self) -> None:
        vars(self)["level"] = 0

    @property
    def level(self) -> int:
        return int(vars(self)["level"])

    def rise(self) -> None:
        vars(self)["level"] += 1


class PropertyOverItsValue(ReadOnlyProperty):
    expected = "exact refused"

    def make(self) -> None:
        self.helper: Any = _Hidden()


class EarlyStopping(Kind):
    """As callbacks are: with its best, its patience, and what it has seen."""

    def make(self) -> None:
        self.callback = Box(best=None, wait=0, seen=[], options={"patience": 3}, owner=self)

    def use(self) -> float:
        callback, loss = self.callback, self.iteration * 7 % 10 / 10
        callback.seen.append(loss)
        if callback.best is None or loss < callback.best:
            callback.best, callback.wait = loss, 0
        else:
            callback.wait += 1
        return number([callback.best, callback.wait, len(callback.seen)])


# Data


class _Reading(Points):
    """Counts how often each sample was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: dict[int, int] = {}
        self.last: Any = collections.deque(maxlen=3)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] = self.reads.get(index, 0) + 1
        self.last.append(index)
        return self.points[index] / self.reads[index] + np.float32(sum(self.last) / 10)


class ReadsOfEachSample(Kind):
    def loader(self) -> Any:
        return DataLoader(_Reading(), batch_size=4, shuffle=True)

    def make(self) -> None:
        self.train_loader.dataset.reads.clear()


class _Mixup:
    """An operator on a batch, with random numbers of its own."""

    def __init__(self) -> None:
        self.random, self.calls = np.random.RandomState(3), 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        share = np.float32(self.random.beta(1, 1))
        return batch * share + batch[::-1] * (1 - share) + np.float32(self.calls % 3)


def _collating(operators: list[Any], options: dict[str, int]) -> Any:
    def collate(batch: Any) -> Any:
        batch = np.stack(batch)
        for operator in operators:
            batch = operator(batch)
        options["batches"] += 1
        return batch * np.float32(1 + options["batches"] % options["every"])

    return collate


class OperatorsOfACollateFn(Kind):
    """In its cells, as PaddleClas has them."""

    def make(self) -> None:
        collate = _collating([_Mixup()], {"batches": 0, "every": 4})
        self.train_loader.collate_fn = collate


def _shuffling() -> Any:
    random = np.random.RandomState(3)
    return lambda size: random.permutation(size).tolist()


class _Shuffled:
    """Batches in the order that a function gives."""

    batch_size = 4

    def __init__(self) -> None:
        self.order = _shuffling()

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(12)
        return (order[start : start + 4] for start in range(0, 12, 4))

    def __len__(self) -> int:
        return 3


class RandomStateInACellOfABatchSampler(Kind):
    expected = TOLD

    def loader(self) -> Any:
        return DataLoader(Points(), batch_sampler=_Shuffled())

    def make(self) -> None:
        self.train_loader.batch_sampler.order = _shuffling()


# Told


class CounterOfAModule(Kind):
    expected = TOLD

    def make(self) -> None:
        global CALLS
        CALLS = 0

    def use(self) -> float:
        global CALLS
        CALLS += 1
        return number(CALLS)


class _Registered:
    """A class that knows how many it has."""

    made = 0
    by_name: dict[str, int] = {}  # noqa: RUF012

    def register(self, name: str) -> float:
        type(self).made += 1
        self.by_name[name] = self.made
        return number([self.made, self.by_name])


class AttributesOfAHelpersClass(Kind):
    expected = TOLD

    def make(self) -> None:
        _Registered.made = 0
        _Registered.by_name.clear()
        self.helper = _Registered()

    def use(self) -> float:
        return self.helper.register(f"{self.iteration}")


class CellOfAClosure(Kind):
    expected = TOLD

    def make(self) -> None:
        self.helper = Box(step=counting())

    def use(self) -> float:
        return number(self.helper.step())


class MethodReplaced(Kind):
    expected = TOLD

    def make(self) -> None:
        self.helper: Any = AverageMeter("loss")

    def use(self) -> float:
        if self.now(3):
            self.helper.update = lambda value: value * 3.0
        return number(self.helper.update(1.0))


class EndlessLoader(Kind):
    """A generator over a loader, as many write it."""

    expected = TOLD

    def make(self) -> None:
        self.other = self.endless(DataLoader(Points(20), batch_size=4))

    @staticmethod
    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    def use(self) -> float:
        return number(next(self.other))


class WordsInASet(Kind):
    """Their order is used, which is another one in another process."""

    expected = TOLD

    def make(self) -> None:
        self.words = {"a", "b"}

    def use(self) -> float:
        self.words |= {f"word {self.iteration}", f"{self.iteration}"}
        self.words.discard(f"{self.iteration - 2}")
        return number([*self.words])


def _class_of_a_name() -> Any:
    class Named:
        count = 0

    return Named


class TwoClassesOfOneName(Kind):
    expected = TOLD

    def make(self) -> None:
        self.parts = [_class_of_a_name()(), _class_of_a_name()()]

    def use(self) -> float:
        for place, part in enumerate(self.parts):
            type(part).count += place + 1
        return number([part.count for part in self.parts])


class TwoModulesOfOneFileName(Kind):
    expected = TOLD

    def make(self) -> None:
        self.parts = [self.module(name) for name in ("left", "right")]

    def module(self, folder: str) -> Any:
        file = Path(self.output_dir) / folder / "state.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("COUNT = 0\nclass Part:\n    made = 0\n")
        spec: Any = importlib.util.spec_from_file_location(f"{folder}.state", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module.Part()

    def use(self) -> float:
        numbers = []
        for place, part in enumerate(self.parts):
            module: Any = sys.modules[type(part).__module__]
            module.COUNT += place + 1
            type(part).made += 2 * place + 1
            numbers += [module.COUNT, part.made]
        return number(numbers)
