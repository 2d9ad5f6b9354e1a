"""Kinds of attributes of parameters, and of the list of them that an optimizer has; see kinds.py.

A parameter has places as any object has: masks of a pruned net, the weights before they were
binarized, buffers of an optimizer by hand, `need_clip`, `optimize_attr`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, EXACT, LOUD, REFUSED, TOLD, Kind
from kinds_of_layers import frozen
from kinds_of_shares import _Shared
from kinds_of_values import Box, Meter, number
from paddle import nn, optimizer


class _OfParameters(Kind):
    """Two layers, which Adam trains."""

    def net(self) -> Any:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def optimizers(self) -> None:
        self.optimizer = optimizer.Adam(0.05, parameters=self.model.parameters())

    def use(self) -> float:
        return 0.5

    def step(self) -> None:
        super().step()
        self.model.clear_gradients()  # also of what the optimizer updates no more


# An attribute


class Tally:
    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> Any:
        return {"total": self.total}

    def set_state_dict(self, state: Any) -> None:
        self.total = state["total"]


def set_to(value: Any) -> Callable[[Any, int], None]:
    return lambda p, n: setattr(p, "mine", value)


def filled(count: int) -> Any:
    return paddle.full([2], float(count))


# By name: what setup makes, and what an update does.
ATTRIBUTES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "tensor": (lambda: filled(0), lambda p, n: setattr(p, "mine", p.mine + n)),
    "tensor in place": (lambda: filled(0), lambda p, n: p.mine.set_value(p.mine + n)),
    "array": (lambda: np.zeros(3), lambda p, n: p.mine.__iadd__(n)),
    "int": (lambda: 0, lambda p, n: setattr(p, "mine", p.mine + 1)),
    "float": (lambda: 1.0, lambda p, n: setattr(p, "mine", p.mine * 0.9)),
    "text": (lambda: "", lambda p, n: setattr(p, "mine", p.mine + "a")),
    "list": (lambda: [0], lambda p, n: p.mine.append(n)),
    "list of tensors": (lambda: [filled(0)], lambda p, n: p.mine.append(filled(n))),
    "dict": (lambda: {"steps": 0}, lambda p, n: p.mine.update(steps=p.mine["steps"] + n)),
    "tensor from none": (lambda: None, lambda p, n: n == 3 and setattr(p, "mine", filled(n))),
    "tensor that becomes none": (lambda: filled(0), lambda p, n: n == 3 and set_to(None)(p, n)),
    "object": (lambda: Box(count=0), lambda p, n: setattr(p.mine, "count", p.mine.count + n)),
    "object of an object": (
        lambda: Box(a=Meter()),
        lambda p, n: setattr(p.mine.a, "total", p.mine.a.total + n),
    ),
    "object with a state": (Tally, lambda p, n: setattr(p.mine, "total", p.mine.total + n)),
    "object made later": (lambda: None, lambda p, n: n == 3 and set_to(Box(count=n))(p, n)),
    "set": (set, lambda p, n: p.mine.add(str(n))),
    "generator": (lambda: np.random.default_rng(3), lambda p, n: p.mine.random()),
    "lambda": (lambda: None, lambda p, n: n == 3 and set_to(lambda: 1)(p, n)),
}
EXPECTED = {"lambda": TOLD, "set": EITHER}  # of a set the order may be another one
# By name: which of the kind's has it.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "of a weight": lambda e: e.model[0].weight,
    "of a frozen weight": lambda e: e.teacher.weight,
    "of a weight in a list": lambda e: e.row[0].bias,
    "of a parameter of no layer": lambda e: e.scale,
    "of a tensor": lambda e: e.tensor,
    "of a buffer": lambda e: e.model[0].mean,
}
OF_NO_PARAMETER = "of a tensor", "of a buffer"  # of which nothing is promised
EVERYWHERE = ["tensor", "int", "object"]


class _OfAttribute(_OfParameters):
    attribute: tuple[Callable[[], Any], Callable[[Any, int], Any]]
    holder: tuple[Callable[[Any], Any]]

    def optimizers(self) -> None:
        super().optimizers()
        self.teacher = frozen(nn.Linear(2, 2))
        self.row = [frozen(nn.Linear(2, 2))]
        self.scale = paddle.create_parameter([2], "float32")
        self.tensor = filled(0)
        self.model[0].register_buffer("mean", filled(0))

    def make(self) -> None:
        self.holder[0](self).mine = self.attribute[0]()

    def use(self) -> float:
        holder = self.holder[0](self)
        self.attribute[1](holder, self.iteration)
        return number(holder.mine() if callable(holder.mine) else holder.mine)


def _grid() -> list[type[Kind]]:
    pairs = [(name, where) for where in HOLDERS for name in ATTRIBUTES if name in EVERYWHERE]
    pairs += [(name, "of a weight") for name in ATTRIBUTES if name not in EVERYWHERE]
    return [
        type(
            f"{name} {where}",
            (_OfAttribute,),
            {
                "attribute": ATTRIBUTES[name],
                "holder": (HOLDERS[where],),
                "expected": LOUD if where in OF_NO_PARAMETER else EXPECTED.get(name, EXACT),
                "__module__": __name__,
            },
        )
        for name, where in pairs
    ]


KINDS = _grid()


class AttributeOfAParameterMadeLater(_OfParameters):
    has_effect = False  # nothing is made anew

    def use(self) -> float:
        weight = self.model[0].weight
        weight.seen = getattr(weight, "seen", 0) + self.iteration
        return number(weight.seen)


class AttributeOfAParameterDeleted(_OfParameters):
    def make(self) -> None:
        self.model[0].weight.warm = 1

    def use(self) -> float:
        if self.now(3):
            del self.model[0].weight.warm
        return float(hasattr(self.model[0].weight, "warm"))


class ParameterThatNamesAnother(_OfParameters):
    def make(self) -> None:
        self.model[0].weight.partner = self.model[0].bias

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.partner = self.model[1].bias
        return float(self.model[0].weight.partner.sum())


class ParameterThatNamesItsLayer(_OfParameters):
    def make(self) -> None:
        for layer in self.model:
            layer.weight.layer = layer

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.layer = self.model[1]
        return float(self.model[0].weight.layer.bias.sum())


class ObjectOfAParameterAndOfTheExperiment(_OfParameters):
    def make(self) -> None:
        self.info = self.model[0].weight.info = Box(rows=[0])

    def use(self) -> float:
        self.info.rows.append(self.iteration)
        return number(self.model[0].weight.info)


class ArrayOfAParameterAndOfTheExperiment(_OfParameters):
    def make(self) -> None:
        self.scores = self.model[0].weight.scores = np.zeros(2)

    def use(self) -> float:
        self.scores += 1
        return number(self.model[0].weight.scores)


class AttributeOfAParameterThatIsExcluded(_OfParameters):
    has_effect = False

    def make(self) -> None:
        self.clock = self.model[0].weight.clock = Box(now=0)
        self.exclude_from_state("clock")

    def use(self) -> float:
        self.clock.now += 1
        return 0.5


# What people write


class MasksOfAPrunedNet(_OfParameters):
    """A net that is pruned after its third update."""

    def make(self) -> None:
        for parameter in self.model.parameters():
            parameter.mask = paddle.ones_like(parameter)

    def use(self) -> float:
        for parameter in self.model.parameters():
            if self.now(3):
                parameter.mask = (parameter.abs() > parameter.abs().mean()).astype("float32")
            parameter.set_value(parameter * parameter.mask)
        return 0.5


class MasksOfAPrunedNetFromNone(MasksOfAPrunedNet):
    def make(self) -> None:
        for parameter in self.model.parameters():
            parameter.mask = 1.0


class MasksOfAPrunedNetInPlace(MasksOfAPrunedNet):
    def use(self) -> float:
        for parameter in self.model.parameters():
            if self.now(3):
                parameter.mask.set_value((parameter > 0).astype("float32"))
            parameter.set_value(parameter * parameter.mask)
        return 0.5


class MasksThatShrink(MasksOfAPrunedNet):
    """By steps, with numbers beside them."""

    def make(self) -> None:
        super().make()
        for parameter in self.model.parameters():
            parameter.sparsity = 0.0

    def use(self) -> float:
        for parameter in self.model.parameters():
            parameter.sparsity = min(parameter.sparsity + 0.07, 0.9)
            level = paddle.quantile(parameter.abs().flatten(), parameter.sparsity)
            parameter.mask = parameter.mask * (parameter.abs() >= level).astype("float32")
            parameter.set_value(parameter * parameter.mask)
        return 0.5


class BinarizedWeights(_OfParameters):
    """`org` has the real ones, on which the optimizer steps."""

    def make(self) -> None:
        for parameter in self.model.parameters():
            parameter.org = parameter.detach().clone() + 0.1

    def use(self) -> float:
        for parameter in self.model.parameters():
            parameter.set_value(paddle.sign(parameter.org) * 0.5)
        return 0.5

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.set_value(parameter.org)
        super().step()
        for parameter in self.model.parameters():
            parameter.org = parameter.detach().clip(-1, 1)


class BinarizedWeightsFromTheFirstUpdateOn(BinarizedWeights):
    """Made where they are not there yet."""

    has_effect = False

    def make(self) -> None:
        """Makes nothing yet."""

    def use(self) -> float:
        for parameter in self.model.parameters():
            if not hasattr(parameter, "org"):
                parameter.org = parameter.detach().clone()
        return super().use()


class MomentumByHand(_OfParameters):
    """Of a layer that no optimizer has: a buffer and a counter of each parameter."""

    def optimizers(self) -> None:
        self.optimizer = optimizer.Adam(0.05, parameters=self.model[1].parameters())

    def make(self) -> None:
        for parameter in self.model[0].parameters():
            parameter.buf, parameter.steps = None, 0

    @paddle.no_grad()
    def step(self) -> None:
        for parameter in self.model[0].parameters():
            parameter.steps += 1
            last = 0.0 if parameter.buf is None else parameter.buf
            parameter.buf = parameter.grad * 1.0 + last * 0.9
            parameter.set_value(parameter - parameter.buf * (0.1 / parameter.steps))
        super().step()


class FisherOfAParameter(_OfParameters):
    """Importance and the old value, of elastic weights."""

    def make(self) -> None:
        for parameter in self.model.parameters():
            parameter.fisher, parameter.old = paddle.zeros_like(parameter), None

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.fisher = parameter.fisher * 0.9 + parameter.grad.square()
            if self.now(3):
                parameter.old = parameter.detach().clone()
            if parameter.old is not None:
                pull = (parameter.detach() - parameter.old) * 0.1
                parameter.set_value(parameter - pull / (1 + parameter.fisher))
        super().step()


class WeightsBeforeAnUpdate(_OfParameters):
    """Kept within an update, as sharpness-aware steps do."""

    has_effect = False

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.before = parameter.detach().clone()
            parameter.set_value(parameter + 0.01 * paddle.sign(parameter.grad))
        for parameter in self.model.parameters():
            parameter.set_value(parameter.before)
            del parameter.before
        super().step()


class SlowWeights(_OfParameters):
    def make(self) -> None:
        for parameter in self.model.parameters():
            parameter.slow = parameter.detach().clone()

    def step(self) -> None:
        super().step()
        for parameter in self.model.parameters():
            parameter.slow.set_value(parameter.slow * 0.8 + parameter.detach() * 0.2)
            if self.iteration % 3 == 2:
                parameter.set_value(parameter.slow)


# What paddle asks a parameter for


class NeedClip(_OfParameters):
    def optimizers(self) -> None:
        clip = nn.ClipGradByGlobalNorm(0.1)
        self.optimizer = optimizer.SGD(0.1, parameters=self.model.parameters(), grad_clip=clip)

    def make(self) -> None:
        self.model[0].weight.need_clip = True

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.need_clip = False
        return 0.5


class RateOfAParameter(_OfParameters):
    def make(self) -> None:
        self.model[0].weight.optimize_attr = {"learning_rate": 1.0}

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.optimize_attr = {"learning_rate": 0.1}
        return 0.5


class RateOfAParameterInPlace(RateOfAParameter):
    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.optimize_attr["learning_rate"] = 0.1
        return 0.5


class RegularizerOfAParameter(_OfParameters):
    """Let go in the fourth update."""

    def make(self) -> None:
        self.model[0].weight.regularizer = paddle.regularizer.L2Decay(0.5)

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.regularizer = None
        return 0.5


class CoefficientOfARegularizer(RegularizerOfAParameter):
    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.regularizer._coeff = 0.1
        return 0.5


class DoModelAverage(_OfParameters):
    def make(self) -> None:
        self.model[0].weight.do_model_average = None

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.do_model_average = True
        return number(self.model[0].weight.do_model_average)


class GradientOfAParameterByStopGradient(_OfParameters):
    def make(self) -> None:
        self.model[0].weight.stop_gradient = False

    def use(self) -> float:
        if self.now(3):
            self.model[0].weight.stop_gradient = True
        return 0.5


# The list of an optimizer


class _OfAList(_OfParameters):
    def make(self) -> None:
        self.optimizer._parameter_list = [*self.model.parameters()]

    def use(self) -> float:
        if self.now(3):
            self.change()
        return number([parameter.shape for parameter in self.optimizer._parameter_list])

    def change(self) -> None:
        """In the fourth update."""


class ListOfParametersThatIsCut(_OfAList):
    def change(self) -> None:
        self.optimizer._parameter_list = self.optimizer._parameter_list[2:]


class ListOfParametersThatIsCutInPlace(_OfAList):
    def change(self) -> None:
        del self.optimizer._parameter_list[:2]


class ListOfParametersThatIsCutTwice(_OfAList):
    def use(self) -> float:
        if self.now(1) or self.now(3):
            del self.optimizer._parameter_list[:1]
        return 0.5


class ListOfParametersInAnotherOrder(_OfAList):
    def change(self) -> None:
        self.optimizer._parameter_list = self.optimizer._parameter_list[::-1]


class ListOfParametersOfAnotherLayer(_OfAList):
    """As many, of a layer that setup has made."""

    expected = "exact refused"

    def optimizers(self) -> None:
        super().optimizers()
        self.other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def change(self) -> None:
        self.optimizer._parameter_list = [*self.other.parameters()]


class ListOfParametersMadeAnew(_OfAList):
    """The same ones."""

    has_effect = False

    def change(self) -> None:
        self.optimizer._parameter_list = [*self.optimizer._parameter_list]


class ListOfParametersThatIsLonger(_OfAList):
    """By a frozen layer of setup's that is trained now."""

    expected = REFUSED

    def optimizers(self) -> None:
        super().optimizers()
        self.late = frozen(nn.Linear(3, 1))

    def change(self) -> None:
        for parameter in self.late.parameters():
            parameter.stop_gradient = False
        self.optimizer._parameter_list = [*self.model.parameters(), *self.late.parameters()]

    def update(self) -> Any:
        batch = self.read_batch()
        self.use()
        loss = (self.model(batch) + self.late(batch) - 0.5).square().mean()
        loss.backward()
        self.step()
        return loss.detach()


class ListOfParametersWithOneThatHasNoName(_OfAList):
    expected = REFUSED

    def change(self) -> None:
        self.optimizer._parameter_list.append(paddle.create_parameter([2], "float32"))


class ListOfParametersThatIsCutToATrainedPart(_OfAList):
    """Frozen besides."""

    def change(self) -> None:
        self.model[0].weight.stop_gradient = True
        trained = [p for p in self.model.parameters() if not p.stop_gradient]
        self.optimizer._parameter_list = trained


class ListOfParametersThatIsCutLate(_OfAList):
    """After the checkpoint, in either start."""

    has_effect = False

    def use(self) -> float:
        if self.iteration == 7:
            del self.optimizer._parameter_list[:2]
        return 0.5


class GroupOfParametersThatIsCut(_OfParameters):
    def optimizers(self) -> None:
        groups = [{"params": [*layer.parameters()]} for layer in self.model]
        self.optimizer = optimizer.Momentum(0.05, parameters=groups)

    def make(self) -> None:
        for group, layer in zip(self.optimizer._param_groups, self.model, strict=True):
            group["params"] = [*layer.parameters()]

    def use(self) -> float:
        if self.now(3):
            self.optimizer._param_groups[0]["params"] = [*self.model[0].parameters()][:1]
        return 0.5


# Shares and ranks


class _MasksOfShares(_Shared):
    has_effect = True

    def make(self) -> None:
        self.model[0].weight.mask = paddle.ones([3, 4])

    def use(self) -> float:
        weight = self.model[0].weight
        if self.now(3):
            weight.mask = (weight > 0).astype("float32")
        weight.set_value(weight * weight.mask)
        return 0.0


class MaskOfShares(_MasksOfShares):
    pass


class MaskOfSharesOnTwo(_MasksOfShares):
    processes = 2


class AttributeInTheLoopOfShares(_MasksOfShares):
    """Which is refused as any value is that moves while shares are computed."""

    expected = REFUSED
    has_effect = False

    def output(self, batch: Any) -> Any:
        self.model[0].weight.mask = self.model[0].weight.mask * 0.9
        return self.model(batch)


class ListOfParametersThatIsCutOnTwo(_Shared):
    processes = 2
    has_effect = True

    def optimizers(self) -> None:
        self.optimizer = optimizer.Adam(0.05, parameters=self.model.parameters())

    def make(self) -> None:
        self.optimizer._parameter_list = [*self.model.parameters()]

    def use(self) -> float:
        if self.now(3):
            del self.optimizer._parameter_list[:2]
        self.model.clear_gradients()
        return 0.0
