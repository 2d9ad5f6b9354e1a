"""Kinds of second names: what setup has made at one place, and training puts at another, too.

See kinds.py. Such a place holds a reference, whatever stood there before, and is put back as that
object, which keeps the names that it has since setup. A function or a method is one by its name.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from kinds import EITHER, EXACT, LOUD, REFUSED, TOLD, Kind
from kinds_of_layers import frozen
from kinds_of_shares import _Shared
from kinds_of_values import Box, number
from paddle import nn, optimizer
from paddle.optimizer import lr

SAVED_BEFORE = 3  # the last iteration before the checkpoint


def moved(layer: Any, update: int) -> None:
    """A layer that is trained by hand."""
    layer.weight.set_value(layer.weight * 0.9 + 0.01 * (update + 1))


def stepped(adam: Any, update: int) -> None:
    """An optimizer that updates what all of its kind update."""
    (adam._parameter_list[0] * (update + 1)).sum().backward()
    adam.step()
    adam.clear_grad()


def layers(e: Any) -> list[Any]:
    e.layers = [frozen(nn.Linear(2, 2)) for _ in range(3)]
    return e.layers


def other_layers(e: Any) -> list[Any]:
    e.layers = [frozen(nn.Linear(2, size)) for size in (2, 3, 4)]
    return e.layers


def parts(e: Any) -> list[Any]:
    e.whole = nn.LayerList(frozen(nn.Linear(2, 2)) for _ in range(3))
    return [*e.whole]


def optimizers(e: Any) -> list[Any]:
    e.scale = nn.Linear(2, 2)
    rates = (0.1, 0.2, 0.3)
    e.all = [optimizer.Adam(rate, parameters=e.scale.parameters()[:1]) for rate in rates]
    return e.all


def other_optimizers(e: Any) -> list[Any]:
    e.scale = nn.Linear(2, 2)
    kinds = (optimizer.Adam, optimizer.Momentum, optimizer.SGD)
    e.all = [kind(0.1, parameters=e.scale.parameters()[:1]) for kind in kinds]
    return e.all


def kept(e: Any, things: list[Any]) -> list[Any]:
    e.things = things
    return things


# By name: how three are made, how one of them is used, and what is seen of it.
Thing = tuple[Callable[[Any], list[Any]], Callable[[Any, int], Any], Callable[[Any], Any]]
THINGS: dict[str, Thing] = {
    "layer": (layers, moved, lambda v: v.weight),
    "part of a layer": (parts, moved, lambda v: v.weight),
    "parameter": (
        lambda e: [part.weight for part in parts(e)],
        lambda v, n: v.set_value(v * 0.9 + 0.01 * (n + 1)),
        lambda v: v.numpy(),
    ),
    "an optimizer": (optimizers, stepped, lambda v: v._parameter_list[0]),
    "layer of another shape": (other_layers, moved, lambda v: v.weight),
    "optimizer of another kind": (other_optimizers, stepped, lambda v: v._parameter_list[0]),
    "schedule": (
        lambda e: kept(e, [lr.ExponentialDecay(0.1, gamma) for gamma in (0.9, 0.8, 0.7)]),
        lambda v, n: v.step(),
        lambda v: v(),
    ),
    "schedule of another kind": (
        lambda e: kept(e, [lr.ExponentialDecay(1, 0.9), lr.LinearLR(1, 9), lr.StepDecay(1, 2)]),
        lambda v, n: v.step(),
        lambda v: v(),
    ),
    "object": (
        lambda e: kept(e, [Box(count=n) for n in range(3)]),
        lambda v, n: setattr(v, "count", v.count + n),
        lambda v: v.count,
    ),
    "object with a state": (
        lambda e: kept(e, [Tally(n) for n in range(3)]),
        lambda v, n: v.add(n),
        lambda v: v.total,
    ),
    "an array": (
        lambda e: kept(e, [np.zeros(3) + n for n in range(3)]),
        lambda v, n: v.__iadd__(n),
        lambda v: v,
    ),
    "a list": (
        lambda e: kept(e, [[n] for n in range(3)]),
        lambda v, n: v.append(n),
        lambda v: v,
    ),
    "buffer": (
        lambda e: [part.mean for part in with_buffers(e)],
        lambda v, n: v.add_(paddle.ones([2]) * n),
        lambda v: v,
    ),
    "random generator": (
        lambda e: kept(e, [np.random.default_rng(n) for n in range(3)]),
        lambda v, n: v.random(),
        lambda v: v.bit_generator.state["state"]["state"] % 1000,
    ),
}
MAY_BE_TOLD = {"an array", "a list", "buffer", "random generator"}  # no promise names them


def with_buffers(e: Any) -> Any:
    e.whole = parts(e)
    for part in e.whole:
        part.register_buffer("mean", paddle.zeros([2]))
    return e.whole


class Tally:
    def __init__(self, total: int) -> None:
        self.total = total

    def add(self, number: int) -> None:
        self.total += number

    def state_dict(self) -> Any:
        return {"total": self.total}

    def set_state_dict(self, state: Any) -> None:
        self.total = state["total"]


# By name: what it makes of the experiment, how a place is set, and what it has.
Place = tuple[Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]
PLACES: dict[str, Place] = {
    "": (
        lambda e: None,
        lambda e, v: setattr(e, "active", v),
        lambda e: e.active,
    ),
    "in a list": (
        lambda e: setattr(e, "row", [0, None]),
        lambda e, v: e.row.__setitem__(1, v),
        lambda e: e.row[1],
    ),
    "in a dict": (
        lambda e: setattr(e, "table", {}),
        lambda e, v: e.table.update(now=v),
        lambda e: e.table["now"],
    ),
    "in an object": (
        lambda e: setattr(e, "helper", Box()),
        lambda e, v: setattr(e.helper, "active", v),
        lambda e: e.helper.active,
    ),
    "in a layer": (
        lambda e: None,
        lambda e, v: setattr(e.model, "active", v),
        lambda e: e.model.active,
    ),
    "in a tuple": (
        lambda e: None,
        lambda e, v: setattr(e, "pair", (0, v)),
        lambda e: e.pair[1],
    ),
}
# By name: which of three it is in setup, and from which iterations on another one.
MANNERS: dict[str, tuple[int | None, dict[int, int]]] = {
    "switched": (0, {SAVED_BEFORE: 1}),
    "from none": (None, {SAVED_BEFORE: 1}),
    "switched twice": (0, {2: 1, SAVED_BEFORE: 2}),
    "switched and back": (0, {1: 1, SAVED_BEFORE: 0, 5: 2}),
}


class _Switched(Kind):
    """One of three things of setup has another name, under which it is used."""

    thing: Thing
    place: Place
    manner: tuple[int | None, dict[int, int]]

    def optimizers(self) -> None:
        super().optimizers()
        self.of_setup()

    def of_setup(self) -> list[Any]:
        made = self.thing[0](self)
        self.place[0](self)
        return made

    def which(self) -> list[Any]:
        """The three, from where setup has put them."""
        for name in ("layers", "all", "things"):
            if name in vars(self):
                return getattr(self, name)
        whole = [*self.whole]
        if self.thing is THINGS["parameter"]:
            return [part.weight for part in whole]
        return [part.mean for part in whole] if self.thing is THINGS["buffer"] else whole

    def make(self) -> None:
        first = self.manner[0]
        self.place[1](self, None if first is None else self.which()[first])

    def use(self) -> float:
        for iteration, of_them in self.manner[1].items():
            if self.now(iteration):
                self.place[1](self, self.which()[of_them])
        active = self.place[2](self)
        if active is not None:
            self.thing[1](active, self.iteration)
        seen = [self.thing[2](thing) for thing in self.which()]
        return number([active is thing for thing in self.which()]) + number(seen)


def _grid() -> list[type[Kind]]:
    main = ["layer", "part of a layer", "parameter", "an optimizer"]
    triples = [(thing, "switched", place) for thing in main for place in PLACES]
    triples += [(thing, manner, "") for thing in main for manner in [*MANNERS][1:]]
    triples += [(thing, "from none", "in a dict") for thing in main]
    others = [thing for thing in THINGS if thing not in main]
    triples += [(thing, manner, "") for thing in others for manner in ("switched", "from none")]
    return [
        type(
            f"{thing} {manner} {place}".strip(),
            (_Switched,),
            {
                "thing": THINGS[thing],
                "manner": MANNERS[manner],
                "place": PLACES[place],
                "expected": EITHER if thing in MAY_BE_TOLD else EXACT,
                "__module__": __name__,
            },
        )
        for thing, manner, place in triples
    ]


KINDS = _grid()


# Layers that are trained


class _Body(nn.Layer):
    """A body with three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.heads = nn.LayerList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, batch: Any) -> Any:
        return paddle.tanh(self.first(batch))


class _Trained(Kind):
    """The loss is of what `output` makes of the features."""

    def net(self) -> Any:
        return _Body()

    def optimizers(self) -> None:
        self.optimizer = optimizer.Adam(0.05, parameters=self.model.parameters())

    def change(self) -> None:
        """Before an update."""

    def output(self, features: Any) -> Any:
        return self.head(features)

    def update(self) -> Any:
        self.change()
        features = self.model(self.read_batch())
        others = sum(parameter.sum() for parameter in self.model.parameters()) * 1e-3
        loss = (self.output(features) - 0.5).square().mean() + others
        loss.backward()
        self.step()
        return loss.detach()


class HeadOfALayerList(_Trained):
    def make(self) -> None:
        self.head: Any = self.model.heads[0]

    def change(self) -> None:
        if self.now(3):
            self.head = self.model.heads[1]


class HeadOfALayerListFromNone(_Trained):
    def make(self) -> None:
        self.head: Any = None

    def change(self) -> None:
        if self.head is None or self.now(3):
            self.head = self.model.heads[self.iteration % 3]


class HeadChosenInEachUpdate(_Trained):
    has_effect = False  # it is chosen anew

    def output(self, features: Any) -> Any:
        self.head = self.model.heads[self.iteration % 3]
        return self.head(features)


class HeadThatSetupHasChosen(_Trained):
    """A second name that stays."""

    has_effect = False

    def make(self) -> None:
        self.head: Any = self.model.heads[2]


class ListOfLayersThatIsPopped(_Trained):
    def make(self) -> None:
        self.todo = [*self.model.heads]

    def change(self) -> None:
        if self.now(2) or self.now(7):
            self.todo.pop(0)

    def output(self, features: Any) -> Any:
        return self.todo[0](features)


class ListOfLayersThatGrows(_Trained):
    def make(self) -> None:
        self.done = [self.model.heads[0]]

    def change(self) -> None:
        if self.now(2) or self.now(7):
            self.done.append(self.model.heads[len(self.done)])

    def output(self, features: Any) -> Any:
        return sum(head(features) for head in self.done)


class ListOfLayersInAnotherOrder(_Trained):
    def make(self) -> None:
        self.turns = [*self.model.heads]

    def change(self) -> None:
        if self.now(3):
            self.turns.reverse()

    def output(self, features: Any) -> Any:
        return self.turns[0](features)


class Task:
    def __init__(self, name: str, head: Any) -> None:
        self.name, self.head, self.updates = name, head, 0


class TaskThatIsGivenAHead(_Trained):
    def make(self) -> None:
        self.task = Task("a", self.model.heads[0])

    def change(self) -> None:
        if self.now(3):
            self.task.head = self.model.heads[1]

    def output(self, features: Any) -> Any:
        return self.task.head(features)


class TaskMadeOnTheWayWithAHead(TaskThatIsGivenAHead):
    def change(self) -> None:
        self.task.updates += 1
        if self.now(3):
            self.task = Task("b", self.model.heads[1])

    def output(self, features: Any) -> Any:
        return self.task.head(features) * (1 + self.task.updates / 100)


class TasksOfAList(_Trained):
    """Made on the way, and each holds its head."""

    def make(self) -> None:
        self.tasks = [Task("a", self.model.heads[0])]

    def change(self) -> None:
        if self.now(2) or self.now(7):
            self.tasks.append(Task("b", self.model.heads[len(self.tasks)]))
        self.tasks[-1].updates += 1

    def output(self, features: Any) -> Any:
        return self.tasks[-1].head(features) * (1 + self.tasks[-1].updates / 100)


class _Hooked(_Trained):
    """A forward hook notes the features of each layer."""

    def optimizers(self) -> None:
        super().optimizers()
        for name, layer in self.model.named_sublayers():
            if isinstance(layer, nn.Linear):
                layer.register_forward_post_hook(functools.partial(self.note, name))

    def make(self) -> None:
        self.features: dict[Any, Any] = {}

    def output(self, features: Any) -> Any:
        known = sum(self.known(value).mean() for value in self.features.values())
        return self.model.heads[self.iteration % 3](features) + known / 10

    def known(self, value: Any) -> Any:
        return value


class FeaturesByTheLayersName(_Hooked):
    def note(self, name: str, layer: Any, inputs: Any, output: Any) -> None:
        self.features[name] = output.detach()


class FeaturesByLayer(_Hooked):
    expected = EITHER  # keys

    def note(self, name: str, layer: Any, inputs: Any, output: Any) -> None:
        self.features[layer] = output.detach()


class FeaturesWithTheirLayers(_Hooked):
    def note(self, name: str, layer: Any, inputs: Any, output: Any) -> None:
        self.features[name] = layer, output.detach()

    def known(self, value: Any) -> Any:
        return value[0].bias + value[1]


class _Average(_Trained):
    """A model that is trained, and its average."""

    def optimizers(self) -> None:
        super().optimizers()
        self.ema = frozen(copy.deepcopy(self.model))

    def change(self) -> None:
        for slow, fast in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            slow.set_value(slow * 0.9 + fast.detach() * 0.1)


class EvalModelThatBecomesTheAverage(_Average):
    def make(self) -> None:
        self.eval_model = self.model

    def change(self) -> None:
        super().change()
        if self.now(3):
            self.eval_model = self.ema

    def output(self, features: Any) -> Any:
        return self.model.heads[0](features) + float(self.eval_model.first.weight.sum())


class EvalModelThatIsPartOfTheAverage(_Average):
    def make(self) -> None:
        self.eval_head = self.model.heads[0]

    def change(self) -> None:
        super().change()
        if self.now(3):
            self.eval_head = self.ema.heads[0]

    def output(self, features: Any) -> Any:
        return self.model.heads[0](features) + self.eval_head(features)


class TeacherByDeepcopy(_Average):
    """Made anew at the place of one of the same class and shapes."""

    def make(self) -> None:
        self.made = 0

    def change(self) -> None:
        if self.now(3):
            self.ema, self.made = frozen(copy.deepcopy(self.model)), self.iteration

    def output(self, features: Any) -> Any:
        return self.model.heads[0](features) + self.ema.heads[0](features) + self.made / 10


class TeacherByDeepcopyTwice(TeacherByDeepcopy):
    def change(self) -> None:
        if self.now(1) or self.now(3) or self.now(7):
            self.ema, self.made = frozen(copy.deepcopy(self.model)), self.iteration


class TeacherByDeepcopyInADict(TeacherByDeepcopy):
    def optimizers(self) -> None:
        super().optimizers()
        self.models = {"student": self.model, "teacher": frozen(copy.deepcopy(self.model))}

    def change(self) -> None:
        if self.now(3):
            self.models["teacher"] = frozen(copy.deepcopy(self.model))
            self.made = self.iteration

    def output(self, features: Any) -> Any:
        teacher = self.models["teacher"].heads[0](features)
        return self.model.heads[0](features) + teacher + self.made / 10


class TeacherByDeepcopyWithASecondName(TeacherByDeepcopy):
    def change(self) -> None:
        super().change()
        if self.now(3):
            self.judge = self.ema

    def output(self, features: Any) -> Any:
        judge = getattr(self, "judge", self.model)
        return super().output(features) + judge.heads[1](features)


class TeacherByDeepcopyFromNone(_Trained):
    """Which no start could load."""

    expected = REFUSED

    def make(self) -> None:
        self.teacher: Any = None

    def change(self) -> None:
        if self.now(3):
            self.teacher = frozen(copy.deepcopy(self.model))

    def output(self, features: Any) -> Any:
        return self.model.heads[0](features)

    has_effect = False  # it ends before


class ModelThatIsFrozenAndKept(_Average):
    """The old model is the teacher of a new one, under the names that they have."""

    expected = "exact refused"

    def make(self) -> None:
        self.swaps = 0

    def change(self) -> None:
        if self.now(3):
            self.model, self.ema = self.ema, self.model
            self.swaps += 1

    def output(self, features: Any) -> Any:
        return self.model.heads[0](features) + self.ema.heads[1](features) + self.swaps

    def update(self) -> Any:
        loss = super().update()
        moved(self.ema.first, self.iteration)
        return loss


# Optimizers and schedules


class _OfTwoPlayers(Kind):
    """A GAN in small: a player that is trained now, by an optimizer of its own."""

    def optimizers(self) -> None:
        self.critic = nn.Linear(3, 1)
        self.d_optimizer = optimizer.Adam(0.05, parameters=self.critic.parameters())
        self.g_optimizer = optimizer.Adam(0.02, parameters=self.model.parameters())

    def weights(self) -> Any:
        return [*super().weights(), *self.critic.state_dict().values()]

    def update(self) -> Any:
        batch = self.read_batch()
        self.use()
        loss = (self.model(batch) + self.critic(batch) - 0.5).square().mean()
        loss.backward()
        self.step()
        for optimizer_of_one in (self.d_optimizer, self.g_optimizer):
            optimizer_of_one.clear_grad()
        return loss.detach()


class OptimizerOfAPhaseByItsName(_OfTwoPlayers):
    """The phase is a text."""

    def make(self) -> None:
        self.phase = "d"

    def use(self) -> float:
        if self.now(3) or self.now(8):
            self.phase = "g" if self.phase == "d" else "d"
        return 0.0

    def step(self) -> None:
        getattr(self, f"{self.phase}_optimizer").step()


class OptimizerOfAPhase(_OfTwoPlayers):
    def make(self) -> None:
        self.optimizer_now = self.d_optimizer

    def use(self) -> float:
        if self.now(3):
            self.optimizer_now = self.g_optimizer
        return 0.0

    def step(self) -> None:
        self.optimizer_now.step()


class OptimizerOfAPhaseOfADict(OptimizerOfAPhase):
    def optimizers(self) -> None:
        super().optimizers()
        self.by_name = {"d": self.d_optimizer, "g": self.g_optimizer}

    def make(self) -> None:
        self.phase, self.optimizer_now = "d", self.by_name["d"]

    def use(self) -> float:
        if self.now(3):
            self.phase, self.optimizer_now = "g", self.by_name["g"]
        return 0.0


class OptimizersThatSwap(_OfTwoPlayers):
    def make(self) -> None:
        self.first, self.second = self.d_optimizer, self.g_optimizer

    def use(self) -> float:
        if self.now(3):
            self.first, self.second = self.second, self.first
        return 0.0

    def step(self) -> None:
        self.first.step()
        if self.iteration % 3 == 0:
            self.second.step()


class OptimizersThatSwapTheirOwnNames(_OfTwoPlayers):
    """Those under which their accumulators are."""

    expected = "exact refused"
    has_effect = False  # both names are taken anew

    def use(self) -> float:
        if self.iteration == 3:
            self.d_optimizer, self.g_optimizer = self.g_optimizer, self.d_optimizer
        return 0.0

    def step(self) -> None:
        self.d_optimizer.step()
        if self.iteration % 3 == 0:
            self.g_optimizer.step()


class OptimizerAndScheduleMadeAnew(_Trained):
    def optimizers(self) -> None:
        self.begin(0.1)

    def begin(self, rate: float) -> None:
        self.schedule = lr.ExponentialDecay(rate, 0.9)
        self.optimizer = optimizer.Adam(self.schedule, parameters=self.model.parameters())

    def make(self) -> None:
        self.head = self.model.heads[0]

    def change(self) -> None:
        if self.now(3):
            self.begin(0.05)

    def step(self) -> None:
        super().step()
        self.schedule.step()


class OptimizerMadeAnewInADict(_Trained):
    def optimizers(self) -> None:
        self.by_name = {"main": optimizer.Adam(0.1, parameters=self.model.parameters())}

    def make(self) -> None:
        self.head = self.model.heads[0]

    def change(self) -> None:
        if self.now(2):
            parameters = self.model.parameters()
            self.by_name["main"] = optimizer.Adam(0.05, parameters=parameters)

    def step(self) -> None:
        self.by_name["main"].step()
        self.by_name["main"].clear_grad()


class ScheduleOfAnOptimizerThatIsSwitched(_Trained):
    """Both are made in setup, and the optimizer has one of them at a time."""

    def optimizers(self) -> None:
        self.curves = [lr.ExponentialDecay(0.1, 0.9), lr.ExponentialDecay(0.05, 0.7)]
        parameters = self.model.parameters()
        self.optimizer = optimizer.Adam(self.curves[0], parameters=parameters)

    def make(self) -> None:
        self.head = self.model.heads[0]
        self.optimizer.set_lr_scheduler(self.curves[0])

    def change(self) -> None:
        if self.now(3):
            self.optimizer.set_lr_scheduler(self.curves[1])

    def step(self) -> None:
        super().step()
        self.optimizer._learning_rate.step()


# Two that swap


class _Swapping(Kind):
    """Two layers that nobody updates but by hand; the first one more."""

    def optimizers(self) -> None:
        super().optimizers()
        self.both()

    def both(self) -> None:
        self.a, self.b = (frozen(nn.Linear(2, 2)) for _ in range(2))

    def make(self) -> None:
        self.swaps = 0

    def use(self) -> float:
        if self.now(3):
            self.swap()
            self.swaps += 1
        first, second = self.pair()
        moved(first, self.iteration)
        return number([first.weight, second.weight, self.swaps])

    def pair(self) -> Any:
        return self.a, self.b

    def swap(self) -> None:
        self.a, self.b = self.b, self.a


class LayersThatSwapTheirNames(_Swapping):
    pass


class LayersThatSwapInAList(_Swapping):
    def both(self) -> None:
        self.row = [frozen(nn.Linear(2, 2)) for _ in range(2)]

    def pair(self) -> Any:
        return self.row

    def swap(self) -> None:
        self.row.reverse()


class LayersThatSwapInALayer(_Swapping):
    def both(self) -> None:
        self.whole = nn.LayerList(frozen(nn.Linear(2, 2)) for _ in range(2))

    def pair(self) -> Any:
        return [*self.whole]

    def swap(self) -> None:
        self.whole[0], self.whole[1] = self.whole[1], self.whole[0]


class LayersThatSwapTwice(_Swapping):
    def use(self) -> float:
        for iteration in (2, 8):
            if self.now(iteration):
                self.swap()
        return super().use()


class LayersOfOtherShapesThatSwap(_Swapping):
    expected = "exact refused"

    def both(self) -> None:
        self.a, self.b = frozen(nn.Linear(2, 2)), frozen(nn.Linear(2, 3))


class LayersThatSwapAndAreTrained(_Trained):
    """By an optimizer that has the parameters of both since setup."""

    expected = "exact refused"

    def optimizers(self) -> None:
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        parameters = [p for layer in (self.model, self.a, self.b) for p in layer.parameters()]
        self.optimizer = optimizer.Adam(0.05, parameters=parameters)

    def make(self) -> None:
        self.swaps = 0

    def change(self) -> None:
        if self.now(3):
            self.a, self.b, self.swaps = self.b, self.a, self.swaps + 1

    def output(self, features: Any) -> Any:
        return self.a(features) + 0.1 * self.b(features) + self.swaps / 10


class SecondNamesThatSwap(LayersThatSwapAndAreTrained):
    """Of heads of the model."""

    expected = EXACT

    def optimizers(self) -> None:
        _Trained.optimizers(self)
        self.a, self.b = self.model.heads[0], self.model.heads[1]


# A layer at several places


class LayerInTwoLists(_Trained):
    def make(self) -> None:
        self.all = [*self.model.heads]
        self.free = [*self.model.heads][:2]

    def change(self) -> None:
        if self.now(3):
            self.free.append(self.all.pop(0))

    def output(self, features: Any) -> Any:
        return self.all[0](features) + 0.1 * sum(head(features) for head in self.free)


class LayerThatMovesToAnotherList(_Switched):
    """Which has no other name."""

    def of_setup(self) -> list[Any]:
        self.todo, self.done = [frozen(nn.Linear(2, 2)) for _ in range(3)], []
        return []

    def make(self) -> None:
        self.moves = 0

    def use(self) -> float:
        if self.now(3):
            self.done.append(self.todo.pop(0))
            self.moves += 1
        for layer in self.done:
            moved(layer, self.iteration)
        return number([layer.weight for layer in (*self.todo, *self.done)]) + self.moves


class LayerInASet(_Trained):
    expected = LOUD

    def make(self) -> None:
        self.free: Any = {self.model.heads[0]}

    def change(self) -> None:
        if self.now(3):
            self.free = {self.model.heads[1]}

    def output(self, features: Any) -> Any:
        return sum(head(features) for head in self.free)


class ObjectsOfALayerInTwoNames(_Trained):
    """A part has a second name in an object that has another one, too."""

    def make(self) -> None:
        self.helper = self.other = Box(head=self.model.heads[0])

    def change(self) -> None:
        if self.now(3):
            self.helper.head = self.model.heads[1]

    def output(self, features: Any) -> Any:
        return self.other.head(features)


class BackboneByItsOwnName(_Trained):
    """A part with a name on self since setup, under which it has files; moved by both."""

    def make(self) -> None:
        self.backbone = self.model.first
        self.head = self.model.heads[0]

    def change(self) -> None:
        if self.now(3):
            self.head = self.model.heads[1]
        moved(self.backbone, self.iteration)


class _Tied(nn.Layer):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first, self.last, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, batch: Any) -> Any:
        return self.out(self.last(paddle.tanh(self.first(batch))))


class TiedWeights(Kind):
    has_effect = False  # nothing is made anew

    def net(self) -> Any:
        return _Tied(True)


class WeightsTiedOnTheWay(Kind):
    has_effect = False

    def net(self) -> Any:
        return _Tied(False)

    def use(self) -> float:
        if self.iteration == 3:
            self.model.last.weight = self.model.first.weight
        return 0.5


class LayersTiedOnTheWay(WeightsTiedOnTheWay):
    def use(self) -> float:
        if self.iteration == 3:
            self.model.last = self.model.first
        return 0.5


class SecondNameOfATiedWeight(TiedWeights):
    """Of either layer."""

    has_effect = True

    def make(self) -> None:
        self.watched = self.model.out.weight

    def use(self) -> float:
        if self.now(3):
            self.watched = self.model.last.weight
        return float(self.watched.sum())


# What is excluded


class SecondNameThatIsExcluded(_Trained):
    """The layer itself is in the checkpoint by its other name."""

    has_effect = False  # the name is set anew

    def make(self) -> None:
        self.view: Any = None
        self.exclude_from_state("view")

    def output(self, features: Any) -> Any:
        self.view = self.model.heads[self.iteration % 2]
        return self.view(features)


class SecondNameOfAnExcludedLayer(Kind):
    """The layer does not change."""

    expected = EITHER

    def optimizers(self) -> None:
        super().optimizers()
        self.judges = [frozen(nn.Linear(2, 2)) for _ in range(2)]
        for judge, level in zip(self.judges, (0.3, 0.7), strict=True):
            judge.weight.set_value(paddle.full([2, 2], level))
        self.exclude_from_state("judges")

    def make(self) -> None:
        self.judge = self.judges[0]

    def use(self) -> float:
        if self.now(3):
            self.judge = self.judges[1]
        return number(self.judge.weight)


# Shares and ranks


class _HeadsOfShares(_Shared):
    """Switched between two updates."""

    has_effect = True

    def net(self) -> Any:
        return _Body()

    def make(self) -> None:
        self.head = self.model.heads[0]

    def output(self, batch: Any) -> Any:
        others = sum(parameter.sum() for parameter in self.model.parameters()) * 1e-3
        return self.head(self.model(batch)) + others

    def use(self) -> float:
        if self.now(3):
            self.head = self.model.heads[1]
        return 0.0


class HeadOfShares(_HeadsOfShares):
    pass


class HeadOfSharesOnTwo(_HeadsOfShares):
    processes = 2


class HeadFromNoneOnTwo(_HeadsOfShares):
    processes = 2

    def make(self) -> None:
        self.head: Any = None

    def output(self, batch: Any) -> Any:
        others = sum(parameter.sum() for parameter in self.model.parameters()) * 1e-3
        return (self.head or self.model.heads[2])(self.model(batch)) + others


class HeadOfSharesOnTwoThenOne(_HeadsOfShares):
    processes, processes_then = 2, 1


class OptimizerOfAPhaseOnTwo(_HeadsOfShares):
    processes = 2

    def optimizers(self) -> None:
        first = self.model.first.parameters()
        self.both = [optimizer.Adam(0.05, parameters=self.model.parameters())]
        self.both.append(optimizer.Momentum(0.02, parameters=first))

    def make(self) -> None:
        super().make()
        self.optimizer = self.both[0]

    def use(self) -> float:
        if self.now(3):
            self.optimizer = self.both[1]
        return 0.0


class TeacherOfSharesOnTwo(_HeadsOfShares):
    processes = 2

    def more(self) -> list[Any]:
        self.teachers = [frozen(nn.Linear(3, 1)) for _ in range(2)]
        return []

    def make(self) -> None:
        super().make()
        self.teacher = self.teachers[0]

    def output(self, batch: Any) -> Any:
        return super().output(batch) - self.teacher(batch)

    def use(self) -> float:
        if self.now(3):
            self.teacher = self.teachers[1]
        moved(self.teacher, self.iteration)
        return 0.0


# Functions and methods


def warm(value: Any) -> Any:
    return value * 2 + 1


def main(value: Any) -> Any:
    return value * 3 - 1


class _Phases(Kind):
    """A function that is another one from the fourth update on, at several places."""

    expected = EXACT
    where = "self"

    def first(self) -> Any:
        return warm

    def second(self) -> Any:
        return main

    def optimizers(self) -> None:
        super().optimizers()
        self.helper = _Helper()
        self.holders: dict[str, Any] = {"helper": Box(), "dict": {}, "list": [None]}

    def put(self, function: Any) -> None:
        if self.where == "self":
            self.fn = function
        elif self.where == "model":
            self.model.fn = function
        elif self.where == "helper":
            self.holders["helper"].fn = function
        else:
            self.holders[self.where]["fn" if self.where == "dict" else 0] = function

    def got(self) -> Any:
        if self.where == "self":
            return self.fn
        if self.where == "model":
            return self.model.fn
        if self.where == "helper":
            return self.holders["helper"].fn
        return self.holders[self.where]["fn" if self.where == "dict" else 0]

    def make(self) -> None:
        self.put(self.first())

    def use(self) -> Any:
        if self.now(3):
            self.put(self.second())
        return float(np.asarray(self.called(self.got())))

    def called(self, function: Any) -> Any:
        return function(self.iteration / 10)

    def warm_phase(self, value: Any) -> Any:
        return value * 2 + 1

    def main_phase(self, value: Any) -> Any:
        return value * 3 - 1


class _Helper:
    def __init__(self) -> None:
        self.scale = 2.0

    def warm(self, value: Any) -> Any:
        return value * self.scale

    def main(self, value: Any) -> Any:
        self.scale *= 0.9
        return value * self.scale - 1

    @classmethod
    def of_class(cls, value: Any) -> Any:
        return value + len(cls.__name__)

    @staticmethod
    def of_none(value: Any) -> Any:
        return value - 3


class FunctionSwitched(_Phases):
    pass


class FunctionSwitchedInADict(_Phases):
    where = "dict"


class FunctionSwitchedInAList(_Phases):
    where = "list"


class FunctionSwitchedInAnObject(_Phases):
    where = "helper"


class FunctionSwitchedInALayer(_Phases):
    where = "model"


class FunctionFromNone(_Phases):
    def first(self) -> Any:
        return None

    def called(self, function: Any) -> Any:
        return super().called(function) if function else 0.5


class LossFunctionOfPaddleSwitched(_Phases):
    def first(self) -> Any:
        return F.mse_loss

    def second(self) -> Any:
        return F.l1_loss

    def called(self, function: Any) -> Any:
        return function(paddle.ones([2]) * 2, paddle.ones([2]) / (1 + self.iteration))


class LossFunctionOfPaddleSwitchedInADict(LossFunctionOfPaddleSwitched):
    where = "dict"


class BuiltinFunctionSwitched(_Phases):
    def first(self) -> Any:
        return math.sin

    def second(self) -> Any:
        return math.cos


class UfuncSwitched(_Phases):
    def first(self) -> Any:
        return np.tanh

    def second(self) -> Any:
        return np.exp


class MethodSwitched(_Phases):
    def first(self) -> Any:
        return self.warm_phase

    def second(self) -> Any:
        return self.main_phase


class MethodSwitchedInADict(MethodSwitched):
    where = "dict"


class MethodSwitchedInAnObject(MethodSwitched):
    where = "helper"


class MethodSwitchedInALayer(MethodSwitched):
    where = "model"


class MethodFromNone(FunctionFromNone):
    def second(self) -> Any:
        return self.main_phase


class MethodOfAHelperSwitched(_Phases):
    def first(self) -> Any:
        return self.helper.warm

    def second(self) -> Any:
        return self.helper.main


class MethodOfAHelperSwitchedInADict(MethodOfAHelperSwitched):
    where = "dict"


class MethodOfAnotherHelper(_Phases):
    def optimizers(self) -> None:
        super().optimizers()
        self.helpers = [_Helper(), _Helper()]
        self.helpers[1].scale = 5.0

    def first(self) -> Any:
        return self.helpers[0].main

    def second(self) -> Any:
        return self.helpers[1].main


class MethodOfALayerSwitched(_Phases):
    def first(self) -> Any:
        return self.model.forward

    def second(self) -> Any:
        return self.model.__call__

    has_effect = False  # both give the same

    def called(self, function: Any) -> Any:
        return function(paddle.ones([1, 3])).sum()


class MethodsOfAClassSwitched(_Phases):
    def first(self) -> Any:
        return _Helper.of_class

    def second(self) -> Any:
        return _Helper.of_none


class MethodOfAnObjectThatNothingElseHas(_Phases):
    """Made on the way: by no name."""

    expected = LOUD

    def first(self) -> Any:
        return _Helper().main

    def second(self) -> Any:
        return _Helper().main

    def called(self, function: Any) -> Any:
        return super().called(function) + (self.iteration > 3)


class LambdaSwitched(_Phases):
    expected = TOLD

    def first(self) -> Any:
        return lambda value: value * 2 + 1

    def second(self) -> Any:
        return lambda value: value * 3 - 1


class NestedFunctionSwitched(LambdaSwitched):
    def second(self) -> Any:
        def nested(value: Any) -> Any:
            return value * 3 - 1

        return nested


class PartialSwitched(_Phases):
    expected = EITHER

    def first(self) -> Any:
        return functools.partial(round, ndigits=1)

    def second(self) -> Any:
        return functools.partial(round, ndigits=0)


class ClassSwitched(_Phases):
    def first(self) -> Any:
        return float

    def second(self) -> Any:
        return Metres

    def called(self, function: Any) -> Any:
        return function(self.iteration / 10) + 0


class Metres(float):
    def __new__(cls, value: float) -> Any:
        return float.__new__(cls, value * 3)
