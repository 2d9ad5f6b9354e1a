"""Kinds of what is exchanged, kept and let go on the way: stages, best weights, transforms.

See kinds.py. An attribute that becomes another object of those that setup has made may be restored
or refused; a layer, an optimizer or an object with a state that training makes is refused.
"""

from __future__ import annotations

import collections
import copy
import random
from typing import Any, NamedTuple

import numpy as np
import paddle
from kinds import EITHER, LOUD, REFUSED, Kind, Points
from kinds_of_layers import frozen
from kinds_of_ordinary import AverageMeter
from kinds_of_own_optimizers import _Own, _two_layers
from kinds_of_values import Box, number
from paddle import nn, optimizer
from paddle.io import DataLoader
from paddle.optimizer import lr

EXACT_OR_REFUSED = "exact refused"

# Another object of those that setup has made


class _Stage:
    """Of a training in stages."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor, self.updates = name, factor, 0

    def step(self) -> float:
        self.updates += 1
        return self.factor * self.updates


class StageThatIsNow(Kind):
    def make(self) -> None:
        self.stages = [_Stage("warm", 0.1), _Stage("main", 0.7), _Stage("last", 0.2)]
        self.stage_now = self.stages[0]

    def use(self) -> float:
        self.stage_now = self.stages[self.iteration // 3 % 3]
        return self.stage_now.step() + number([stage.updates for stage in self.stages])


class StagesInADequeThatTurns(Kind):
    def make(self) -> None:
        self.stages = collections.deque([_Stage("warm", 0.1), _Stage("main", 0.7)])

    def use(self) -> float:
        self.stages.rotate(self.iteration % 3)
        return self.stages[0].step()


class StagesThatAreDone(Kind):
    def make(self) -> None:
        self.stages = [_Stage("warm", 0.1), _Stage("main", 0.7), _Stage("last", 0.2)]

    def use(self) -> float:
        if self.iteration in (3, 7):
            self.stages.pop(0)
        return self.stages[0].step() + len(self.stages)


class ScheduleThatIsNow(_Own):
    """One of two of setup's, of other classes."""

    expected = EXACT_OR_REFUSED
    kind = optimizer.SGD

    def make(self) -> None:
        super().make()
        self.schedules = {"warm": lr.LinearLR(0.1, 6), "main": lr.ExponentialDecay(0.1, 0.8)}
        self.schedule_now = self.schedules["warm"]

    def use(self) -> float:
        self.schedule_now = self.schedules["warm" if self.iteration < 3 else "main"]
        self.schedule_now.step()
        return float(self.schedule_now()) * 10


class ScheduleLetGo(_Own):
    """A warm-up that is None afterwards."""

    expected = EXACT_OR_REFUSED
    kind = optimizer.SGD

    def make(self) -> None:
        super().make()
        self.warmup: Any = lr.LinearLR(0.1, 6)

    def use(self) -> float:
        if self.iteration >= 3:
            self.warmup = None
        if self.warmup:
            self.warmup.step()
        return float(self.warmup()) * 10 if self.warmup else 0.5


class OptimizerThatIsNow(_Own):
    """One of two of setup's, of other classes."""

    expected = EXACT_OR_REFUSED
    has_effect = False  # it is chosen anew in each update

    def make(self) -> None:
        parameters = self.model.parameters()
        adam = optimizer.Adam(0.05, parameters=parameters)
        self.both = {"warm": adam, "main": optimizer.Momentum(0.02, parameters=parameters)}
        self.optimizer = self.both["warm"]

    def step(self) -> None:
        self.optimizer = self.both["warm" if self.iteration < 3 else "main"]
        super().step()


class HeadThatIsNow(Kind):
    """A layer, under a second name from the third update on."""

    expected = EXACT_OR_REFUSED

    def make(self) -> None:
        self.heads = {name: frozen(nn.Linear(2, 2)) for name in "ab"}
        self.head = self.heads["a"]

    def use(self) -> float:
        if self.now(3):
            self.head = self.heads["b"]
        self.head.weight.set_value(self.head.weight * 0.9)
        return number(self.head.weight)


class TeacherLetGo(Kind):
    expected = EXACT_OR_REFUSED

    def make(self) -> None:
        self.teacher: Any = frozen(nn.Linear(3, 1))

    def use(self) -> float:
        if self.now(3):
            self.teacher = None
        return number(self.teacher and self.teacher.weight)


# What is kept


class BestWeightsKept(Kind):
    """And loaded again."""

    def net(self) -> Any:
        return _two_layers()

    def make(self) -> None:
        self.best: Any = None

    def use(self) -> float:
        if self.iteration in (2, 7):
            self.best = {name: t.clone() for name, t in self.model.state_dict().items()}
        if self.iteration in (5, 9) and self.best:
            self.model.set_state_dict(self.best)
        return number(self.best is None)


class BestStatesKept(_Own):
    """Of the optimizer, too, under paddle's automatic names, which are the same in each start."""

    kind = optimizer.Adam

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def make(self) -> None:
        super().make()
        self.best: dict[str, Any] = {}

    def use(self) -> float:
        if self.iteration in (2, 7):
            own = self.optimizer.state_dict().items()
            self.best["optimizer"] = {name: tensor.clone() for name, tensor in own}
            own = self.model.state_dict().items()
            self.best["model"] = {name: tensor.clone() for name, tensor in own}
        if self.iteration in (5, 9) and self.best:
            self.model.set_state_dict(self.best["model"])
            self.optimizer.set_state_dict(self.best["optimizer"])
        return 0.5


class BestModelKept(Kind):
    expected = REFUSED

    def make(self) -> None:
        self.best: Any = None

    def use(self) -> float:
        if self.now(3):
            self.best = frozen(copy.deepcopy(self.model))
        return number(self.best and self.best.weight)


class Transition(NamedTuple):
    """A step of an episode."""

    state: Any
    action: int
    reward: float
    after: Any


class TransitionsKept(Kind):
    """The last eight, of which some are drawn."""

    def make(self) -> None:
        self.memory: Any = collections.deque(maxlen=8)
        self.state = np.zeros(2, "float32")

    def use(self) -> float:
        before = self.state
        self.state = self.state * np.float32(0.5) + self.iteration
        self.memory.append(Transition(before, self.iteration % 3, 0.5, self.state))
        return number(random.sample([*self.memory], min(3, len(self.memory))))


# Objects with a state


class _Stated(AverageMeter):
    def state_dict(self) -> Any:
        return {"total": self.total, "count": self.count}

    def set_state_dict(self, state: Any) -> None:
        self.total, self.count = state["total"], state["count"]


class MeterWithAStateMadeOnTheWay(Kind):
    expected = REFUSED

    def make(self) -> None:
        self.meters: dict[str, Any] = {}

    def use(self) -> float:
        if self.now(3):
            self.meters["late"] = _Stated("late")
        return sum(meter.update(self.iteration) for meter in self.meters.values())


class _Rich:
    """Its state has what a program has: objects, arrays, tensors, its own lists."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.window: Any = collections.deque(maxlen=3)
        self.best, self.mean = Transition(None, 0, 0.0, None), paddle.zeros([2])
        self.random = np.random.RandomState(3)

    def step(self, at: int) -> float:
        self.rows.append({"at": at, "array": np.full(2, at)})
        self.window.append(Transition(at, at % 2, 0.5, None))
        self.best = max(self.window, key=lambda t: t.state % 4)
        self.mean = self.mean * 0.5 + at
        return number([self.rows, self.window, self.best, self.mean]) + float(self.random.rand())

    def state_dict(self) -> Any:
        return dict(vars(self))

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class StateOfManyThings(Kind):
    expected = LOUD

    def make(self) -> None:
        self.rich = _Rich()

    def use(self) -> float:
        return self.rich.step(self.iteration)


class _GivesOnly(AverageMeter):
    """Gives a state, for its user to look at, and takes none."""

    def state_dict(self) -> Any:
        return {"mean": self.total / max(self.count, 1)}


class StateWithoutASetter(Kind):
    def make(self) -> None:
        self.meter = _GivesOnly("loss")

    def use(self) -> float:
        return self.meter.update(self.iteration)


class _Rate:
    """Sets the rate of an optimizer, and is no schedule of paddle's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.updates, self.base = optimizer, 0, optimizer.get_lr()

    def step(self) -> None:
        self.updates += 1
        self.optimizer.set_lr(self.base / (1 + self.updates) + 0.001 * (self.updates % 3))


class _StatedRate(_Rate):
    def state_dict(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def set_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class ScheduleOfNoBase(_Own):
    kind = optimizer.Adam
    rate_class: type[_Rate] = _Rate

    def make(self) -> None:
        super().make()
        self.rates = type(self).rate_class(self.optimizer)

    def step(self) -> None:
        super().step()
        self.rates.step()


class ScheduleOfNoBaseWithAState(ScheduleOfNoBase):
    rate_class = _StatedRate


class ScheduleOfTwoOptimizers(_Own):
    kind = optimizer.Adam

    def make(self) -> None:
        schedule = lr.StepDecay(0.05, 2)
        self.optimizer = optimizer.Adam(schedule, parameters=self.model[0].parameters())
        self.second = optimizer.SGD(schedule, parameters=self.model[1].parameters())
        self.schedules = [{"schedule": schedule, "every": 2}]

    def step(self) -> None:
        self.second.step()
        self.second.clear_grad()
        super().step()
        for entry in self.schedules:
            if self.iteration % entry["every"] == 0:
                entry["schedule"].step()


class StepsOfGroups(_Own):
    """A number in each group, that an optimizer of one's own counts."""

    class kind(optimizer.SGD):
        def __init__(self, rate: Any, parameters: Any) -> None:
            groups = [{"params": [p], "step": 0, "warm": 3 + n} for n, p in enumerate(parameters)]
            super().__init__(rate, parameters=groups)

        @paddle.no_grad()
        def step(self) -> None:
            for group in self._param_groups:
                group["step"] += 1
                factor = min(group["step"] / group["warm"], 1.0) * self.get_lr()
                for parameter in group["params"]:
                    parameter.set_value(parameter - parameter.grad * factor)


# Data and options


class _Mosaic:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sample: Any) -> Any:
        self.calls += 1
        return sample * np.float32(1 + self.calls % 4)


class _Scaled(_Mosaic):
    def __call__(self, sample: Any) -> Any:
        return super().__call__(sample) / np.float32(2)


class _Transformed(Points):
    def __init__(self) -> None:
        super().__init__()
        self.transforms: list[Any] = [_Mosaic(), _Scaled(), _Scaled()]

    def __getitem__(self, index: int) -> Any:
        sample = self.points[index]
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class TransformsDropped(Kind):
    """The last passes are without the strong ones."""

    def loader(self) -> Any:
        return DataLoader(_Transformed(), batch_size=4, shuffle=True)

    def make(self) -> None:
        self.train_loader.dataset.transforms = _Transformed().transforms

    def on_train_epoch_begin(self) -> None:
        data = self.train_loader.dataset
        if self.epoch == 2:
            data.transforms = [t for t in data.transforms if type(t) is not _Mosaic]
        if self.epoch == 3:
            del data.transforms[0]


class OptionsChanged(Kind):
    """Of the command line, by the program itself."""

    expected = EITHER

    def make(self) -> None:
        self.args.level = 1

    def use(self) -> float:
        self.args.level += 1
        return number(self.args.level)


class ControllerInANamespace(Kind):
    """Adapts a coefficient, beside what it was made with."""

    def make(self) -> None:
        self.kl = Box(value=0.2, target=6.0, horizon=10, log=[{"step": 0, "value": 0.2}])

    def use(self) -> float:
        error = np.clip((self.iteration * 7 % 11) / self.kl.target - 1, -0.2, 0.2)
        self.kl.value *= 1 + float(error) / self.kl.horizon
        self.kl.log.append({"step": self.iteration, "value": self.kl.value})
        return number([self.kl.value, len(self.kl.log)])
