"""Kinds of optimizers of people's own, and what these keep of each parameter; see kinds.py.

The start that is killed has other automatic names and other addresses than the one that goes on, as
another process has, or a notebook. The buffers are under a parameter, its id, its automatic name or
its place, with and without a `state_dict`.
"""

from __future__ import annotations

import atexit
import collections
from dataclasses import dataclass
from typing import Any

import paddle
from kinds import REFUSED, Kind, is_killed
from kinds_of_shares import _Shared
from kinds_of_values import number
from paddle import nn, optimizer
from paddle.optimizer import lr

EXACT_OR_REFUSED = "exact refused"  # what fits no other process may be refused at the save


def elsewhere() -> None:
    """Uses up names and addresses, in the start that is killed."""
    if is_killed():
        for _ in range(3):
            paddle.utils.unique_name.generate("linear")
        atexit.register([paddle.zeros([1]) for _ in range(50)].clear)  # till the end


def _two_layers() -> Any:
    elsewhere()
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


class _Own(Kind):
    """Has an optimizer of class `kind`."""

    kind: type[Any]

    def net(self) -> Any:
        return _two_layers()

    def optimizers(self) -> None:
        """Are made in `make`."""

    def make(self) -> None:
        self.optimizer = type(self).kind(self.rate(), parameters=self.model.parameters())

    def rate(self) -> Any:
        return 0.05

    def use(self) -> float:
        return 0.5


# Where the buffers are


class _Heavy(optimizer.SGD):
    """Momentum by hand, whose buffers are made in the first step, by parameter."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters=parameters)
        self.velocity: Any = {}

    def key(self, parameter: Any) -> Any:
        return parameter

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self._parameter_list:
            if parameter.grad is not None:
                self.move(parameter)

    def move(self, parameter: Any) -> None:
        key = self.key(parameter)
        self.velocity[key] = parameter.grad + self.velocity.get(key, 0.0) * 0.9
        parameter.set_value(parameter - self.velocity[key] * self.get_lr())


class _ById(_Heavy):
    def key(self, parameter: Any) -> Any:
        return id(parameter)


class _ByName(_Heavy):
    def key(self, parameter: Any) -> Any:
        return parameter.name


class _InAList(_Heavy):
    """All of them made at once."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters)
        self.velocity = [paddle.zeros(parameter.shape) for parameter in parameters]

    def move(self, parameter: Any) -> None:
        place = [id(other) for other in self._parameter_list].index(id(parameter))
        self.velocity[place] = self.velocity[place] * 0.9 + parameter.grad
        parameter.set_value(parameter - self.velocity[place] * self.get_lr())


class _InPlace(_InAList):
    def move(self, parameter: Any) -> None:
        place = [id(other) for other in self._parameter_list].index(id(parameter))
        velocity = self.velocity[place]
        velocity.set_value(velocity * 0.9 + parameter.grad)
        parameter.set_value(parameter - velocity * self.get_lr())


class _InAListThatGrows(_InAList):
    """Each made in the first step."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters)
        self.velocity = []

    def move(self, parameter: Any) -> None:
        if len(self.velocity) < len(self._parameter_list):
            self.velocity.append(paddle.zeros(parameter.shape))
        super().move(parameter)


class _Numbers(_Heavy):
    """A factor of each parameter, by name."""

    def move(self, parameter: Any) -> None:
        factor = self.velocity[parameter.name] = self.velocity.get(parameter.name, 1.0) * 0.8
        parameter.set_value(parameter - parameter.grad * self.get_lr() * factor)


class _LikeTorch(_Heavy):
    """`self.state[parameter]["step"]`, as code that comes from there has it."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters)
        self.state: Any = collections.defaultdict(dict)

    def move(self, parameter: Any) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["mean"] = 0, paddle.zeros_like(parameter)
        state["step"] += 1
        state["mean"] = state["mean"] * 0.9 + parameter.grad * 0.1
        unbiased = state["mean"] / (1 - 0.9 ** state["step"])
        parameter.set_value(parameter - unbiased * self.get_lr())


@dataclass
class Moments:
    """Of a parameter."""

    mean: Any
    steps: int = 0


class _InObjects(_Heavy):
    """An object for each parameter, made in the first step."""

    def move(self, parameter: Any) -> None:
        moments = self.velocity.get(parameter.name)
        if moments is None:
            moments = self.velocity[parameter.name] = Moments(paddle.zeros(parameter.shape))
        moments.steps += 1
        moments.mean = moments.mean * 0.9 + parameter.grad * 0.1
        parameter.set_value(parameter - moments.mean * self.get_lr() / moments.steps)


class _Stepping(_Heavy):
    """Nothing but the number of its steps."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        super().step()

    def move(self, parameter: Any) -> None:
        parameter.set_value(parameter - parameter.grad * self.get_lr() / self.steps)


class _Late(optimizer.Optimizer):
    """Makes paddle's accumulators, in `step`."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters=parameters)

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self._parameter_list:
            if parameter.grad is not None:
                velocity = self._add_accumulator("velocity", parameter)
                velocity.set_value(velocity * 0.9 + parameter.grad)
                parameter.set_value(parameter - velocity * self.get_lr())


class _LateBesides(optimizer.Adam):
    """Beside those of its base class, which makes the step."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters=parameters)

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self._parameter_list:
            mean = self._add_accumulator("mean_grad", parameter)
            mean.set_value(mean * 0.5 + parameter.grad)
            parameter.grad.set_value(mean)
        super().step()


class _InPaddlesWay(optimizer.Optimizer):
    """As paddle's own: `_create_accumulators` and `_append_optimize_op`."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters=parameters)

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for parameter in parameters:
            self._add_accumulator("velocity", parameter)

    @paddle.no_grad()
    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        parameter, gradient = param_and_grad
        velocity = self._get_accumulator("velocity", parameter)
        velocity.set_value(velocity * 0.9 + gradient)
        parameter.set_value(parameter - velocity * self.get_lr())


# With a state_dict


class _Stated:
    """Gives what it has as it is, beside what paddle gives."""

    velocity: Any

    def state_dict(self) -> Any:
        state = super().state_dict()  # type: ignore[misc]
        state["velocity"] = self.velocity
        return state

    def set_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.velocity = state.pop("velocity")
        super().set_state_dict(state)  # type: ignore[misc]


class _ByParameterStated(_Stated, _Heavy):
    pass


class _ByIdStated(_Stated, _ById):
    pass


class _ByNameStated(_Stated, _ByName):
    pass


class _InAListStated(_Stated, _InAList):
    pass


class _NumbersStated(_Stated, _Numbers):
    pass


class _InOrderStated(_Heavy):
    """By parameter, and as a list in its state."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        state["velocity"] = [self.velocity.get(p) for p in self._parameter_list]
        return state

    def set_state_dict(self, state: Any) -> None:
        state = dict(state)
        pairs = zip(self._parameter_list, state.pop("velocity"), strict=True)
        self.velocity = {p: v for p, v in pairs if v is not None}
        super().set_state_dict(state)


class _LateStated(_Late):
    """Accumulators made in `step`, and a counter, which its state has."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, parameters)
        self.steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1
        self.set_lr(0.05 / (1 + self.steps))

    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def set_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        super().set_state_dict({name: v for name, v in state.items() if name != "steps"})


_KINDS: dict[str, tuple[type[Any], str]] = {
    "buffers by parameter": (_Heavy, "exact"),
    "buffers by id": (_ById, EXACT_OR_REFUSED),
    "buffers by name": (_ByName, "exact"),
    "buffers in a list": (_InAList, "exact"),
    "buffers in place": (_InPlace, "exact"),
    "buffers in a list that grows": (_InAListThatGrows, "exact"),
    "numbers by name": (_Numbers, "exact"),
    "buffers as torch has them": (_LikeTorch, "exact"),
    "buffers in objects": (_InObjects, "exact"),
    "optimizer that counts": (_Stepping, "exact"),
    "accumulators made in step": (_Late, "exact"),
    "accumulators beside paddle's": (_LateBesides, "exact"),
    "accumulators in paddle's way": (_InPaddlesWay, "exact"),
    "buffers by parameter with a state": (_ByParameterStated, EXACT_OR_REFUSED),
    "buffers by id with a state": (_ByIdStated, EXACT_OR_REFUSED),
    "buffers by name with a state": (_ByNameStated, EXACT_OR_REFUSED),
    "buffers in a list with a state": (_InAListStated, "exact"),
    "numbers by name with a state": (_NumbersStated, EXACT_OR_REFUSED),
    "buffers by parameter with a list for a state": (_InOrderStated, "exact"),
    "accumulators made in step with a state": (_LateStated, "exact"),
}
KINDS = [
    type(name, (_Own,), {"kind": kind, "expected": expected, "__module__": __name__})
    for name, (kind, expected) in _KINDS.items()
]


# With more of the template


class _Noting(optimizer.Momentum):
    """Paddle's accumulators, and a history of its own in its state."""

    def __init__(self, rate: Any, parameters: Any) -> None:
        super().__init__(rate, 0.9, parameters=parameters)
        self.rates: list[float] = []

    def step(self) -> None:
        self.rates.append(self.get_lr())
        super().step()

    def state_dict(self) -> Any:
        return {**super().state_dict(), "rates": self.rates}

    def set_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.rates = list(state.pop("rates"))
        super().set_state_dict(state)


class OptimizerWithAStateAndASchedule(_Own):
    kind = _Noting

    def rate(self) -> Any:
        return lr.StepDecay(0.05, 3)

    def use(self) -> float:
        return number(self.optimizer.rates)

    def step(self) -> None:
        super().step()
        self.optimizer._learning_rate.step()


class ParameterThatBeginsLateInAnOptimizerWithAState(_Own):
    """Its accumulator is made after the resume, and paddle looks for it in the state then."""

    kind = _Noting

    def make(self) -> None:
        super().make()
        for parameter in self.model[0].parameters():
            parameter.stop_gradient = self.iteration < 7

    def use(self) -> float:
        if self.iteration == 7:
            for parameter in self.model[0].parameters():
                parameter.stop_gradient = False
        return number(self.optimizer.rates)


class ConstantOfAnOptimizerGivenAnew(_Own):
    """What first counts after the checkpoint follows the code; a line names it."""

    expected = "exact alarm"

    class kind(_Stepping):
        def __init__(self, rate: Any, parameters: Any) -> None:
            super().__init__(rate, parameters)
            self.warm = 9 if is_killed() else 7

        def move(self, parameter: Any) -> None:
            factor = 0.5 if self.steps < self.warm else 2.0
            parameter.set_value(parameter - parameter.grad * self.get_lr() * factor)


class RateOfAnOptimizerThatBeginsLateGivenAnew(_Own):
    """Its rate is in no line of the log, where that of the killed start would be another one."""

    expected = "exact alarm"
    kind = _Heavy

    def make(self) -> None:
        super().make()
        rate = 0.5 if is_killed() else 0.01
        self.second = optimizer.Momentum(rate, parameters=self.model.parameters())

    def on_log(self, metrics: Any) -> None:
        del metrics["train/lr/second"]

    def step(self) -> None:
        (self.optimizer if self.iteration < 7 else self.second).step()
        self.optimizer.clear_grad()


class _Grouped(optimizer.SGD):
    """Groups with a schedule each."""

    def __init__(self, groups: Any) -> None:
        super().__init__(1.0, parameters=groups)

    @paddle.no_grad()
    def step(self) -> None:
        for group in self._param_groups:
            for parameter in group["params"]:
                parameter.set_value(parameter - parameter.grad * group["schedule"]())
            group["schedule"].step()


class SchedulesOfGroups(_Own):
    def make(self) -> None:
        schedules = [lr.StepDecay(0.05, 2), lr.ExponentialDecay(0.1, 0.8)]
        pairs = zip(self.model, schedules, strict=True)
        self.optimizer = _Grouped([{"params": p.parameters(), "schedule": s} for p, s in pairs])


class _OwnOfBatches(_Own):
    training = {"accumulation_steps": 2}  # noqa: RUF012

    def update(self) -> Any:
        for batch in self.micro_batches():
            loss = (self.model(batch) - 0.5).square().mean()
            self.backward(loss)
        self.step_optimizers()
        return loss.detach()


class BuffersByNameUnderAccumulation(_OwnOfBatches):
    kind = _ByName


class BuffersInAListWithAStateUnderAccumulation(_OwnOfBatches):
    kind = _InAListStated


class AccumulatorsMadeInStepUnderAccumulation(_OwnOfBatches):
    kind = _Late


class _OwnOfShares(_Shared):
    has_effect = True
    kind: type[Any]

    def net(self) -> Any:
        elsewhere()
        return super().net()

    def optimizers(self) -> None:
        """Are made in `make`."""

    def make(self) -> None:
        self.optimizer = type(self).kind(0.05, parameters=self.model.parameters())


class BuffersByParameterOfShares(_OwnOfShares):
    kind = _Heavy


class BuffersByNameOnTwo(_OwnOfShares):
    kind = _ByName
    processes = 2


class BuffersAsTorchHasThemOnTwo(_OwnOfShares):
    kind = _LikeTorch
    processes = 2


class BuffersInAListWithAStateOnTwo(_OwnOfShares):
    kind = _InAListStated
    processes = 2


class AccumulatorsMadeInStepOnTwo(_OwnOfShares):
    kind = _Late
    processes = 2


# Of no class of paddle's


class _Plain:
    """Knows nothing of paddle's optimizers."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = [*parameters]
        self.velocity = [paddle.zeros(p.shape) for p in self.parameters]
        self.steps = 0

    @paddle.no_grad()
    def step(self) -> None:
        self.steps += 1
        for place, parameter in enumerate(self.parameters):
            self.velocity[place] = self.velocity[place] * 0.9 + parameter.grad
            parameter.set_value(parameter - self.velocity[place] * 0.1 / self.steps)

    def clear_grad(self) -> None:
        for parameter in self.parameters:
            parameter.clear_gradient(False)


class _PlainStated(_Plain):
    def state_dict(self) -> Any:
        return {"velocity": [v.numpy() for v in self.velocity], "steps": self.steps}

    def set_state_dict(self, state: Any) -> None:
        self.velocity = [paddle.to_tensor(v) for v in state["velocity"]]
        self.steps = state["steps"]


class OptimizerOfNoBase(_Own):
    """The only one: expbase may ask for one of paddle's, and says what to do."""

    expected = EXACT
    plain: type[_Plain] = _Plain

    def make(self) -> None:
        self.optimizer = type(self).plain(self.model.parameters())


class OptimizerOfNoBaseWithAState(OptimizerOfNoBase):
    plain = _PlainStated


class OptimizerOfNoBaseBesideAnother(_Own):
    plain: type[_Plain] = _Plain

    def make(self) -> None:
        self.optimizer = optimizer.SGD(0.05, parameters=self.model[1].parameters())
        self.plain_one = type(self).plain(self.model[0].parameters())

    def step(self) -> None:
        self.plain_one.step()
        self.plain_one.clear_grad()
        super().step()


class OptimizerOfNoBaseWithAStateBesideAnother(OptimizerOfNoBaseBesideAnother):
    plain = _PlainStated


class _SlowWeights:
    """Holds an optimizer, and weights that follow those that it trains."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.steps = inner, 0
        self.slow = [p.clone().detach() for p in inner._parameter_list]

    def step(self) -> None:
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for place, fast in enumerate(self.inner._parameter_list):
                self.slow[place] = self.slow[place] * 0.5 + fast.detach() * 0.5
                fast.set_value(self.slow[place])

    def clear_grad(self) -> None:
        self.inner.clear_grad()


class OptimizerThatHoldsAnother(_Own):
    def make(self) -> None:
        inner = optimizer.Momentum(0.05, parameters=self.model.parameters())
        self.optimizer = _SlowWeights(inner)


class OptimizerReplacedByOneOfOnesOwn(_Own):
    expected = REFUSED
    kind = _Heavy

    def use(self) -> float:
        if self.now(3):
            self.optimizer = _Late(0.01, self.model.parameters())
        return 0.5


# Averages, which people keep in the same way


class _Average:
    """Of weights, under `key`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.shadow = {self.key(p): p.clone().detach() for p in layer.parameters()}

    def key(self, parameter: Any) -> Any:
        return parameter.name

    def update(self) -> float:
        for parameter in self.layer.parameters():
            key = self.key(parameter)
            self.shadow[key] = self.shadow[key] * 0.9 + parameter.detach() * 0.1
        return number([*self.shadow.values()])


class _AverageById(_Average):
    def key(self, parameter: Any) -> Any:
        return id(parameter)


class AverageByName(_Own):
    kind = _Heavy
    expected = EXACT_OR_REFUSED
    average_class: type[_Average] = _Average

    def make(self) -> None:
        super().make()
        self.shadows = type(self).average_class(self.model)

    def use(self) -> float:
        return self.shadows.update()


class AverageById(AverageByName):
    average_class = _AverageById
