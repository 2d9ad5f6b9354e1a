"""Kinds of optimizers, schedules and scalers, and what is changed of them on the way.

See kinds.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import paddle
from kinds import EITHER, EXACT, LOUD, REFUSED, Kind
from kinds_of_layers import frozen
from kinds_of_values import Box, number
from many import switch_scalers_on
from paddle import nn, optimizer
from paddle.optimizer import lr


class _OfOptimizer(Kind):
    has_effect = False  # nothing is made anew
    kind: Callable[..., Any] = optimizer.Adam
    rate: Callable[[], Any] = staticmethod(lambda: 0.05)

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def optimizers(self) -> None:
        self.optimizer = type(self).kind(
            learning_rate=self.rate(), parameters=self.model.parameters()
        )

    def update(self) -> Any:
        loss = super().update()
        rate = self.optimizer._learning_rate
        if isinstance(rate, lr.ReduceOnPlateau):
            rate.step(loss)
        elif isinstance(rate, lr.LRScheduler):
            rate.step()
        return loss


_OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp"]
_OPTIMIZERS += ["Lamb", "NAdam", "RAdam", "Rprop", "ASGD", "LBFGS"]
_NEEDED = {"Adagrad": {}, "ASGD": {"batch_num": 3}}
_SCHEDULES: dict[str, Callable[[], Any]] = {
    "StepDecay": lambda: lr.StepDecay(0.1, 3),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.1, [3, 6]),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.1, 0.9),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.1, 0.1),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.1, 0.1),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.1, 8),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([3, 6], [0.1, 0.05, 0.01]),
    "NoamDecay": lambda: lr.NoamDecay(8, 4, 0.5),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.1, 8),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, 3),
    "LambdaDecay": lambda: lr.LambdaDecay(0.1, lambda step: 0.9**step),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.1, lambda step: 0.9),
    "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.1, patience=1, threshold=0.5),
    "OneCycleLR": lambda: lr.OneCycleLR(0.1, 12),
    "CyclicLR": lambda: lr.CyclicLR(0.01, 0.1, 3),
    "LinearLR": lambda: lr.LinearLR(0.1, 8),
    "LinearWarmup": lambda: lr.LinearWarmup(lr.StepDecay(0.1, 3), 4, 0.0, 0.1),
}


def _optimizer(name: str) -> Callable[..., Any]:
    return lambda **how: getattr(optimizer, name)(**how, **_NEEDED.get(name, {}))


KINDS = [
    type(
        f"{name} optimizer",
        (_OfOptimizer,),
        {
            "kind": staticmethod(_optimizer(name)),
            "expected": REFUSED if name == "LBFGS" else EXACT,
            "__module__": __name__,
        },
    )
    for name in _OPTIMIZERS
] + [
    type(name, (_OfOptimizer,), {"rate": staticmethod(make), "__module__": __name__})
    for name, make in _SCHEDULES.items()
]


class TwoOptimizersOfWhichOneSteps(_OfOptimizer):
    def optimizers(self) -> None:
        self.optimizer = optimizer.SGD(0.05, parameters=self.model.parameters())
        self.second = optimizer.Adam(0.05, parameters=self.model.parameters())

    def step(self) -> None:
        (self.optimizer if self.iteration < 4 else self.second).step()
        self.optimizer.clear_grad()


class OptimizerThatBeginsLate(TwoOptimizersOfWhichOneSteps):
    def step(self) -> None:
        (self.optimizer if self.iteration < 7 else self.second).step()
        self.optimizer.clear_grad()


class OptimizersInADict(_OfOptimizer):
    def optimizers(self) -> None:
        parts = enumerate(self.model)
        self.parts = {f"{n}": optimizer.Adam(0.05, parameters=p.parameters()) for n, p in parts}
        self.optimizer = self.parts["0"]

    def step(self) -> None:
        for part in self.parts.values():
            part.step()
            part.clear_grad()


class OptimizerInAnObject(_OfOptimizer):
    expected = LOUD

    def optimizers(self) -> None:
        super().optimizers()
        self.second = Box(optimizer=optimizer.Adam(0.05, parameters=self.model.parameters()))

    def step(self) -> None:
        self.second.optimizer.step()
        super().step()


class RateSetByHand(_OfOptimizer):
    def use(self) -> float:
        self.optimizer.set_lr(self.optimizer.get_lr() * 0.9)
        return 0.5


class RatesOfGroups(_OfOptimizer):
    has_effect = True

    def optimizers(self) -> None:
        groups = [{"params": part.parameters(), "learning_rate": 1.0} for part in self.model]
        self.optimizer = optimizer.Adam(0.05, parameters=groups)

    def use(self) -> float:
        if self.now(3):
            for parameter in self.model[0].parameters():
                parameter.optimize_attr["learning_rate"] = 0.1
        return 0.5


class OptionsOfGroups(RatesOfGroups):
    expected = EITHER
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._param_groups[0]["weight_decay"] = 0.5
            self.optimizer._param_groups[1]["beta1"] = 0.1
        return 0.5


class OptimizerOfTheSameClass(_OfOptimizer):
    expected = LOUD
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer = optimizer.Adam(0.01, beta1=0.5, parameters=self.model.parameters())
        return 0.5


class OptimizerMadeAnew(_OfOptimizer):
    """Nothing but its accumulators is another one."""

    expected = LOUD
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizers()
        return 0.5


class OptimizerOfAnotherClass(_OfOptimizer):
    expected = REFUSED
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer = optimizer.SGD(0.01, parameters=self.model.parameters())
        return 0.5


class OptimizerOfAnotherClassLate(_OfOptimizer):
    """After the checkpoint of the first start."""

    expected = REFUSED
    has_effect = True

    def use(self) -> float:
        if self.now(7):
            self.optimizer = optimizer.Momentum(0.01, parameters=self.model.parameters())
        return 0.5


class OptimizerOverFewerParameters(_OfOptimizer):
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer = optimizer.Adam(0.05, parameters=self.model[1].parameters())
        return 0.5


class ParametersAdded(_OfOptimizer):
    expected = REFUSED
    has_effect = True

    def optimizers(self) -> None:
        groups = [{"params": self.model[1].parameters()}]
        self.optimizer = optimizer.Adam(0.05, parameters=groups)

    def use(self) -> float:
        if self.now(3):
            more = {"params": self.model[0].parameters(), "weight_decay": 0.0, "grad_clip": None}
            self.optimizer._add_param_group(more)
        return 0.5


class ScheduleInMidRun(_OfOptimizer):
    expected = REFUSED
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer.set_lr_scheduler(lr.StepDecay(0.1, 2))
        return 0.5


class ScheduleOfAnotherClass(_OfOptimizer):
    expected = REFUSED
    rate = staticmethod(_SCHEDULES["LinearLR"])
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer.set_lr_scheduler(lr.StepDecay(0.1, 2))
        return 0.5


class ScheduleOfAnotherClassFromSetup(_OfOptimizer):
    expected = EXACT
    rate = staticmethod(_SCHEDULES["LinearLR"])
    has_effect = True

    def optimizers(self) -> None:
        super().optimizers()
        self.first, self.later = self.optimizer._learning_rate, lr.StepDecay(0.1, 2)

    def use(self) -> float:
        if self.now(3):
            self.optimizer.set_lr_scheduler(self.later)
        return 0.5


class ScheduleOfTheSameClass(_OfOptimizer):
    expected = LOUD
    rate = staticmethod(_SCHEDULES["StepDecay"])
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer.set_lr_scheduler(lr.StepDecay(0.02, 2, gamma=0.5))
        return 0.5


class ScheduleChanged(_OfOptimizer):
    expected = EITHER
    rate = staticmethod(_SCHEDULES["StepDecay"])
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._learning_rate.gamma = 0.7
        return 0.5


class ScheduleOnSelf(_OfOptimizer):
    def optimizers(self) -> None:
        super().optimizers()
        self.factor = lr.CosineAnnealingDecay(1.0, 6)

    def use(self) -> float:
        self.factor.step()
        return float(self.factor())


class ScheduleOfOnesOwn(_OfOptimizer):
    rate = staticmethod(lambda: _Slower(0.1))


class _Slower(lr.LRScheduler):
    def __init__(self, rate: float) -> None:
        self.calls = 0
        super().__init__(rate)

    def get_lr(self) -> float:
        self.calls += 1
        return float(self.base_lr / self.calls)


class Betas(_OfOptimizer):
    expected = EITHER
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._beta1 = 0.5
        return 0.5


class WeightDecay(_OfOptimizer):
    expected = EITHER
    kind = optimizer.AdamW
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._weight_decay = 0.5
        return 0.5


class NormOfAClip(_OfOptimizer):
    expected = EITHER
    has_effect = True

    def optimizers(self) -> None:
        self.clip = nn.ClipGradByGlobalNorm(1.0)
        how = {"parameters": self.model.parameters(), "grad_clip": self.clip}
        self.optimizer = optimizer.SGD(0.05, **how)

    def use(self) -> float:
        if self.now(3):
            self.clip.clip_norm = 0.1
        return 0.5


class ClipReplaced(NormOfAClip):
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._grad_clip = nn.ClipGradByNorm(0.05)
        return 0.5


class ClipOfTheOptimizerAlone(NormOfAClip):
    has_effect = True

    def optimizers(self) -> None:
        super().optimizers()
        del self.clip

    def use(self) -> float:
        if self.now(3):
            self.optimizer._grad_clip.clip_norm = 0.1
        return 0.5


class MomentumOfSgd(_OfOptimizer):
    expected = EITHER
    kind = optimizer.Momentum
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer._momentum = 0.3
        return 0.5


class Scaler(_OfOptimizer):
    def make(self) -> None:
        switch_scalers_on()
        self.scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=3)

    def update(self) -> Any:
        loss = self.model(self.read_batch()).square().mean()
        self.scaler.scale(loss * (1 + self.scaler._scale.item() / 1e4)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.clear_grad()
        return loss.detach()


class LookAhead(_OfOptimizer):
    expected = REFUSED

    def optimizers(self) -> None:
        super().optimizers()
        self.optimizer = paddle.incubate.LookAhead(self.optimizer, alpha=0.5, k=3)

    def update(self) -> Any:
        return Kind.update(self)


class ModelAverage(_OfOptimizer):
    expected = LOUD

    def make(self) -> None:
        self.slow = paddle.incubate.ModelAverage(
            0.15, parameters=self.model.parameters(), min_average_window=2, max_average_window=6
        )

    def use(self) -> float:
        self.slow.step()
        with self.slow.apply(need_restore=True):
            return number(self.model[0].weight)


class WeightsAveragedByHand(_OfOptimizer):
    has_effect = True

    def make(self) -> None:
        self.mean = frozen(copy.deepcopy(self.model))
        self.averaged = 0

    def use(self) -> float:
        if self.iteration % 3 == 0:
            self.averaged += 1
            pairs = zip(self.mean.parameters(), self.model.parameters(), strict=True)
            for mean, now in pairs:
                mean.set_value(mean + (now - mean).detach() / self.averaged)
        return number([p.numpy() for p in self.mean.parameters()])


class AccumulationByHand(_OfOptimizer):
    def step(self) -> None:
        if self.iteration % 3 == 0:
            self.optimizer.step()
            self.optimizer.clear_grad()


class AccumulationThatGrows(_OfOptimizer):
    has_effect = True

    def make(self) -> None:
        self.every, self.waited = 1, 0

    def step(self) -> None:
        self.waited += 1
        if self.waited >= self.every:
            self.every, self.waited = self.every + 1, 0
            self.optimizer.step()
            self.optimizer.clear_grad()


class GradientsKept(_OfOptimizer):
    has_effect = True

    def make(self) -> None:
        self.kept = [paddle.zeros(p.shape) for p in self.model.parameters()]

    def step(self) -> None:
        for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
            kept.set_value(kept * 0.5 + parameter.grad)
            parameter.grad.set_value(kept)
        super().step()


class OptimizerOfOnesOwn(_OfOptimizer):
    has_effect = True

    def make(self) -> None:
        self.velocity = Box(parts=[paddle.zeros(p.shape) for p in self.model.parameters()])

    def step(self) -> None:
        with paddle.no_grad():
            for place, parameter in enumerate(self.model.parameters()):
                self.velocity.parts[place] = self.velocity.parts[place] * 0.9 + parameter.grad
                parameter.subtract_(self.velocity.parts[place] * 0.01)
        self.optimizer.clear_grad()


class HookOfAnOptimizer(_OfOptimizer):
    expected = LOUD
    has_effect = True

    def use(self) -> float:
        if self.now(3):
            self.optimizer.step = self.twice
        return 0.5

    def twice(self) -> None:
        for _ in range(2):
            type(self.optimizer).step(self.optimizer)
