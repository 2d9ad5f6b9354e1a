"""What the state of an experiment is: finding it, reading it, restoring it.

Tensors are keyed by structured names (`moment1/model.linear.weight`), never by paddle's automatic
ones, so another process, or another order of construction, can read them.

    found = find(vars(experiment), excluded=("judge",))
    state = found.state_dict()               # tensors by file, values by name
    if not found.problems(state):            # everything that does not fit
        found.load_state_dict(state)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle.base import framework
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.state import encoding, optimizers
from expbase.state.arrays import Array, describe, is_piece, local

Tensors = dict[str, dict[str, Array]]  # by file, then by key
Values = dict[str, Any]  # JSON values, by name
State = tuple[Tensors, Values]

# The file of parameters that no layer holds. No attribute can have this name.
PARAMETERS = "@parameters"
_FLEET = "paddle.distributed.fleet.meta_parallel."  # the modules of what it wraps round a layer
_RATE = ".learning_rate"  # what follows an optimizer's name, for the rate or the schedule in it
_KINDS = "@kinds"  # the value with the class of each optimizer and schedule
_FLAGS = "@flags"  # the value with what is frozen, and what is in eval mode


# Attributes of each layer, and of an RNN, which has its parameters as one array, too.
OF_PADDLE = frozenset(paddle.nn.Layer.__init__.__code__.co_names) | {"_flat_weight"}
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


@dataclass
class StatefulObjects:
    """The stateful objects of an experiment, by the names under which they were found."""

    layers: dict[str, Any] = field(default_factory=dict)  # without a DataParallel round them
    optimizers: dict[str, Any] = field(default_factory=dict)  # in the wrappers that step them
    schedulers: dict[str, Any] = field(default_factory=dict)  # also those within an optimizer
    objects: dict[str, Any] = field(default_factory=dict)  # others with state_dict and a setter
    generators: dict[str, Any] = field(default_factory=dict)  # of python and numpy
    parameters: dict[str, Any] = field(default_factory=dict)  # that are attributes themselves
    parallel: dict[int, Any] = field(default_factory=dict)  # every wrapper of a layer, by id
    excluded_optimizers: list[str] = field(default_factory=list)  # left out by the user

    def names(self) -> list[str]:
        """The names of everything that was found."""
        kinds = (self.layers, self.optimizers, self.schedulers)
        rest = (self.objects, self.generators, self.parameters)
        return [name for kind in (*kinds, *rest) for name in kind]

    def state_dict(self) -> State:
        """Tensors by file and key, and JSON values by name.

        Tensors on the CPU are views of the live memory: copy them before training goes on.

        Raises:
            TypeError: The state of an object holds what a checkpoint cannot carry.
        """
        tensors: Tensors = {
            file: {key: Array.of(tensor) for key, tensor in live.items()}
            for file, live in self._live_tensors().items()
        }
        values = {
            name: encoding.encode(value, name, tensors.setdefault(name, {}))
            for name, value in self._live_values().items()
        }
        return {file: arrays for file, arrays in tensors.items() if arrays}, values

    def shapes(self) -> dict[str, str]:
        """What all ranks have, by name: type and shape of tensors, and the kind of the rest."""
        others = {**self.schedulers, **self.generators, **self.objects}
        shapes = {f"self.{n}": type(other).__name__ for n, other in others.items()}
        pieces, sharded = self.pieces(), self.sharded()
        for file, live in self._live_tensors().items():
            for key, tensor in live.items() if file not in sharded else ():
                part = self.owner(file, key) in pieces
                shapes[f"self.{file}: {key!r}"] = "distributed" if part else describe(tensor)
        return shapes | dict.fromkeys((f"self.{name}" for name in self.optimizers), "there")

    def pieces(self) -> set[str]:
        """The structured names of the tensors of which each rank holds another part."""
        layers = self.layers.items()
        named = {f"{n}.{key}": t for n, layer in layers for key, t in layer.state_dict().items()}
        return {name for name, tensor in {**named, **self.parameters}.items() if is_piece(tensor)}

    def sharded(self) -> dict[str, set[str]]:
        """The parameters of this rank, for each optimizer whose ranks have some of them each."""
        names = parameter_names(self)
        return {
            name: {names[p.name] for p in parameters_of(inner)}
            for name, inner in self._innermost().items()
            if hasattr(self.optimizers[name], "_param2rank")  # fleet's stages 1 and 2
        }

    def owner(self, file: str, key: str) -> str:
        """The structured name of a tensor; of an accumulator, that of its parameter."""
        if file in self.optimizers:
            return key.partition("/")[2]
        return key if file == PARAMETERS else f"{file}.{key}"

    def problems(self, state: State) -> list[str]:
        """Everything that keeps a state from being restored, from what, to what.

        Changes nothing but this: an optimizer that has not made a step yet gets the tensors that
        its first step would make, because they are compared, too.
        """
        tensors, values = state
        names = parameter_names(self)
        problems: list[str] = []
        for name, inner in self._innermost().items():
            own = {names[p.name]: p for p in parameters_of(inner) if p.name in names}
            problems += optimizers.make_accumulators(inner, name, tensors.get(name, {}), own)
        live = _flat(self._live_tensors())
        # A file with the name of a value has the arrays in that value, which are not compared.
        saved = _flat({file: of for file, of in tensors.items() if file not in values})
        problems += misfits(saved, live, "checkpoint")
        there, here = values.get(_KINDS, {}), self._kinds()
        problems += [
            f"{name}: is a {there[name]} in the checkpoint and a {here[name]} here."
            for name in there.keys() & here.keys()
            if there[name] != here[name]
        ]
        expected = [*self._float_rates(), *self.schedulers, *self.generators, *self.objects]
        return problems + unmatched(values, [*expected, _KINDS, _FLAGS])

    def load_state_dict(self, state: State) -> list[str]:
        """Restores a state that has no `problems`; always exact."""
        tensors, encoded = state
        # All is decoded before anything is set: a value that cannot be read changes nothing.
        values = {n: encoding.decode(v, tensors.get(n, {})) for n, v in encoded.items()}
        for file, live in self._live_tensors().items():
            for key, array in tensors.get(file, {}).items():
                array.copy_to(live[key])
        for name in self._float_rates():
            self._innermost()[name.removesuffix(_RATE)].set_lr(values[name])
        for name, scheduler in self.schedulers.items():
            optimizers.set_schedule_values(scheduler, values[name])
        self._set_flags(values[_FLAGS])
        set_generator_states(self, values)
        for name, stateful in self.objects.items():
            # A scaler that switched itself off (bfloat16) saves an empty state, refuses to load
            # one, and will switch itself off again.
            if values[name] or not isinstance(stateful, paddle.amp.AmpScaler):
                state_setter(stateful)(values[name])
        return []

    def _live_tensors(self) -> dict[str, dict[str, Any]]:
        """The tensors themselves, by file and key."""
        names = parameter_names(self)
        live = {
            **{name: layer.state_dict() for name, layer in self.layers.items()},
            PARAMETERS: self.parameters,
            **{n: optimizers.accumulators(o, names) for n, o in self._innermost().items()},
        }
        return {file: {k: local(t) for k, t in tensors.items()} for file, tensors in live.items()}

    def _live_values(self) -> dict[str, Any]:
        """What is no tensor of a layer or an optimizer, by name, not encoded yet."""
        return {
            **self._float_rates(),
            **{name: optimizers.schedule_values(s) for name, s in self.schedulers.items()},
            **generator_states(self),
            **{name: stateful.state_dict() for name, stateful in self.objects.items()},
            _KINDS: self._kinds(),
            _FLAGS: self._flags(),
        }

    def _kinds(self) -> dict[str, str]:
        kinds = {name: type(o).__name__ for name, o in self._innermost().items()}
        kinds |= dict.fromkeys(self._float_rates(), "number")
        return kinds | {name: optimizers.kind(s) for name, s in self.schedulers.items()}

    def _flags(self) -> dict[str, list[str]]:
        """What a listener may have changed since setup: frozen parameters, layers in eval mode."""
        return {
            "frozen": [name for name, p in named_parameters(self) if p.stop_gradient],
            "eval": [name for name, layer in self.sublayers() if not layer.training],
        }

    def _set_flags(self, flags: Mapping[str, Collection[str]]) -> None:
        frozen, evaluated = {*flags["frozen"]}, {*flags["eval"]}  # there may be thousands
        for name, parameter in named_parameters(self):
            parameter.stop_gradient = name in frozen
        for name, layer in self.sublayers():
            layer.training = name not in evaluated

    def sublayers(self) -> list[tuple[str, Any]]:
        """All layers with their paths, those within others, too."""
        return [
            (f"{name}.{path}".rstrip("."), part)
            for name, layer in self.layers.items()
            for path, part in layer.named_sublayers(include_self=True)
        ]

    def _float_rates(self) -> dict[str, float]:
        """The learning rates that no schedule decides, by `optimizer.learning_rate`."""
        rates = {f"{name}{_RATE}": o._learning_rate for name, o in self._innermost().items()}
        return {n: float(rate) for n, rate in rates.items() if not isinstance(rate, LRScheduler)}

    def _innermost(self) -> dict[str, Any]:
        return {name: optimizers.innermost(o) for name, o in self.optimizers.items()}


def find(attributes: Mapping[str, Any], excluded: Collection[str] = ()) -> StatefulObjects:
    """Finds what has state among the attributes, in lists and dicts, too; each object once.

    `excluded` are names that the user left out.

    Raises:
        ValueError: Two objects would get the same name, or one cannot be the name of a file.
    """
    found, left_out = StatefulObjects(), StatefulObjects()
    seen: set[int] = set()
    # The excluded ones are searched first, so that one with a second name is "seen" there.
    for name in excluded:
        if name in attributes:
            _visit(left_out, seen, name, attributes[name])
    found.excluded_optimizers = list(left_out.optimizers)
    for name, value in attributes.items():
        if name not in excluded:
            _visit(found, seen, name, value)
    for name, optimizer in found.optimizers.items():
        # A schedule that only its optimizer knows. One that has a name was seen before.
        _visit(found, seen, f"{name}{_RATE}", optimizers.innermost(optimizer)._learning_rate)
    if found.parameters:
        # A list of parameters says which they are; those of a layer are saved with it.
        of_layers = {id(p) for layer in found.layers.values() for p in layer.parameters()}
        found.parameters = {n: p for n, p in found.parameters.items() if id(p) not in of_layers}
    return found


def hidden_layers(attributes: Mapping[str, Any], found: StatefulObjects) -> list[str]:
    """Layers within plain objects, which nobody looks into: `holder.net`."""
    known = {id(part) for layer in found.layers.values() for part in layer.sublayers(True)}
    return [
        f"{name}.{key}"
        for name, value in attributes.items()
        if not isinstance(value, (paddle.nn.Layer, type))
        for key, part in getattr(value, "__dict__", {}).items()
        if isinstance(part, paddle.nn.Layer) and id(unwrap(part)) not in known
    ]


def half_protocols(attributes: Mapping[str, Any]) -> list[str]:
    """The names of objects that give a state and take none, or the other way round."""
    return [
        name
        for name, value in attributes.items()
        if not isinstance(value, type) and hasattr(value, "state_dict") != bool(_setter(value))
    ]


def unwrap(layer: Any) -> Any:
    """The user's layer in a DataParallel or a wrapper of fleet's; any other layer as it is."""
    while (inner := _wrapped(layer)) is not None:
        layer = inner
    return layer


def _wrapped(layer: Any) -> Any:
    fleets = isinstance(layer, paddle.nn.Layer) and type(layer).__module__.startswith(_FLEET)
    inside = layer._sub_layers if fleets or isinstance(layer, paddle.DataParallel) else {}
    return inside.get("_layers", inside.get("_layer"))  # fleet's own layers have neither name


def _visit(
    found: StatefulObjects, seen: set[int], name: str, value: Any, kinds: Any = object
) -> None:
    if isinstance(value, (list, tuple, dict, deque)):
        if id(value) not in seen and not _is_plain_data(value):
            seen.add(id(value))  # containers may contain each other
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                _visit(found, seen, f"{name}.{key}", item, kinds)
        return
    if not isinstance(value, kinds):
        return
    if _wrapped(value) is not None:
        found.parallel[id(value)] = value
    value = unwrap(value)
    kind, inner = _kind(found, value), optimizers.innermost(value)
    if id(inner) in seen and inner is not value:  # the wrapper is what steps
        found.optimizers |= {n: value for n, o in found.optimizers.items() if o is inner}
    if kind is not None and id(inner) not in seen:
        if name in found.names() or "/" in name:
            raise ValueError(
                f"self.{name}: two stateful objects would get this name, or it has a '/' in it; "
                "expected names that can be those of files."
            )
        seen.add(id(inner))
        kind[name] = value
    if isinstance(value, paddle.nn.Layer):
        for path, part in value.named_sublayers(include_self=True):
            for key, own in vars(part).items():
                if isinstance(own, (*_GENERATORS, list, dict, deque)) and key not in OF_PADDLE:
                    where = f"{name}.{path}.{key}".replace("..", ".")
                    _visit(found, seen, where, own, (*_GENERATORS, framework.EagerParamBase))


def _is_plain_data(value: Any) -> bool:
    # The search is repeated at every logged line, and a history of losses may have millions: a
    # list of this many items is judged by its ends.
    if len(value) < 1000 or isinstance(value, dict):
        return False
    return optimizers.is_plain([value[0], value[-1]])


def _kind(found: StatefulObjects, value: Any) -> dict[str, Any] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, paddle.nn.Layer):
        return found.layers
    if isinstance(optimizers.innermost(value), Optimizer):
        return found.optimizers
    if isinstance(value, LRScheduler):
        return found.schedulers
    if isinstance(value, _GENERATORS):
        return found.generators
    if isinstance(value, framework.EagerParamBase):
        return found.parameters
    return found.objects if state_setter(value) else None


def state_setter(candidate: Any) -> Any:
    """The method that loads a state, by either of its names; None if there is no state to save."""
    return _setter(candidate) if hasattr(candidate, "state_dict") else None


def _setter(candidate: Any) -> Any:
    return getattr(candidate, "set_state_dict", None) or getattr(candidate, "load_state_dict", None)


def parameter_names(found: StatefulObjects) -> dict[str, str]:
    """Structured names of all parameters, `model.linear.weight`, by paddle's automatic ones."""
    return {parameter.name: name for name, parameter in named_parameters(found)}


def settings_of_parameters(found: StatefulObjects) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The settings of each group of an optimizer, and of each parameter: its learning rate."""
    settings = {
        f"{name}.groups.{place}": group
        for name, optimizer in found.optimizers.items()
        for place, group in enumerate(optimizers.innermost(optimizer)._param_groups or [])
        if isinstance(group, dict)
    }
    settings |= {name: p.optimize_attr for name, p in named_parameters(found) if p.optimize_attr}
    return {
        path: (own, {key: value for key, value in own.items() if key != "params"})
        for path, own in settings.items()
    }


def named_parameters(found: StatefulObjects) -> list[tuple[str, Any]]:
    """All parameters with their structured names; one that several layers share has several."""
    layers = found.layers.items()
    of_layers = [(f"{n}.{key}", p) for n, layer in layers for key, p in layer.named_parameters()]
    return [*found.parameters.items(), *of_layers]


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer was given, in groups or not."""
    parameters = []
    for item in optimizer._parameter_list or []:
        parameters += list(item["params"]) if isinstance(item, dict) else [item]
    return parameters


def _flat(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{file}: {key!r}": t for file, by_key in tensors.items() for key, t in by_key.items()}


def unmatched(
    saved: Collection[str], here: Collection[str], where: str = "checkpoint"
) -> list[str]:
    """One line for each name that only one side has."""
    return [
        *(f"{name}: missing in the {where}." for name in here if name not in saved),
        *(f"{name}: in the {where}, and not here." for name in saved if name not in here),
    ]


def misfits(saved: Mapping[str, Array], here: Mapping[str, Any], where: str) -> list[str]:
    """One line for each tensor that only one side has, or that has another type or shape."""
    return unmatched(saved, here, where) + [
        f"{name} is {array} in the {where} and {describe(here[name])} here."
        for name, array in saved.items()
        if name in here and str(array) != describe(here[name])
    ]


def generator_states(found: StatefulObjects) -> dict[str, Any]:
    """The states of the random generators that were found, for `set_generator_states`."""
    return {
        name: of.bit_generator.state if isinstance(of, np.random.Generator) else of.__getstate__()
        for name, of in found.generators.items()
    }


def set_generator_states(found: StatefulObjects, states: Mapping[str, Any]) -> None:
    """Sets what `generator_states` returned."""
    for name, generator in found.generators.items():
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = states[name]
        else:
            generator.__setstate__(states[name])
