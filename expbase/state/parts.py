"""The parts with a form of their own in a checkpoint: layers, optimizers, objects with state_dict.

Tensors are keyed by structured names (`moment1/model.linear.weight`), never by paddle's automatic
ones, so another process, or another order of construction, can read them. Layers are walked and
never asked; of an object with a `state_dict` of its own the checkpoint has all that it returns.

Everything has the name that it has at the end of setup, wherever it stands since then.

    found = found_in(Walk(None, vars(experiment), {"judge": experiment.judge}))
    state = found.state_dict()               # tensors by file, states by name
    if not found.problems(state):            # everything that does not fit
        found.load_state_dict(state)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle
from paddle.base.framework import EagerParamBase
from paddle.nn import Layer
from paddle.optimizer.lr import LRScheduler

from expbase.base.any_object import state_setter
from expbase.base.arrays import Array, describe, is_piece, local
from expbase.base.checkpoint_part import Part
from expbase.base.errors import ValueMistake
from expbase.base.generator_states import GENERATORS, generator_kind
from expbase.base.json_values import Names
from expbase.state import optimizers
from expbase.state.value_places import OptimizerNode, ParameterNode, ScheduleNode, StatefulNode
from expbase.state.walk import AUTOMATIC, LOADERS, Walk, WalkedNames, reference

Tensors = dict[str, dict[str, Array]]  # by file, then by key
State = tuple[Tensors, dict[str, Any]]  # and of each object its kind and its state, by name

# The file of parameters that no layer holds. No attribute can have this name.
PARAMETERS = "@parameters"
UPDATED = "updated"  # of a parameter, by an optimizer
_TENSOR = "tensor "  # of a tensor that is registered under its automatic name; a number follows
# Layers whose parameters of these names are written in the forward.
_RUNNING = {
    paddle.nn.layer.norm._BatchNormBase: ("_mean", "_variance"),
    paddle.nn.BatchNorm: ("_mean", "_variance"),
    paddle.nn.SpectralNorm: ("weight_u", "weight_v"),
}


Reference = Callable[[], Any]  # gives an object, as long as it lives


class Noted(NamedTuple):
    """What setup has made, to be found again under the same names."""

    names: WalkedNames  # of all objects
    layers: Mapping[str, Reference]  # with files of their own
    sublayers: Mapping[str, Reference]  # all of them, by path
    kinds: Mapping[str, str]  # their classes
    tensors: Mapping[str, Mapping[str, Reference]]  # of layers, by file and key
    parameters: Mapping[str, Reference]  # by structured name
    optimizers: Sequence[str]  # in the order in which they step


@dataclass
class StatefulObjects(Part):
    """The layers, optimizers, schedules and other objects with a state, by name."""

    layers: dict[str, Any] = field(default_factory=dict)  # without a DataParallel round them
    optimizers: dict[str, Any] = field(default_factory=dict)  # in the wrappers that step them
    schedules: dict[str, Any] = field(default_factory=dict)  # whose values are walked
    objects: dict[str, Any] = field(default_factory=dict)  # that are asked for their state
    parameters: dict[str, Any] = field(default_factory=dict)  # that are attributes themselves
    generators: dict[str, Any] = field(default_factory=dict)  # whose values are walked
    parallel: dict[int, Any] = field(default_factory=dict)  # every wrapper of a layer, by id
    excluded_optimizers: list[str] = field(default_factory=list)  # left out by the user
    noted: Noted | None = None  # at the end of setup
    walk: Walk | None = None  # by which it was found
    named: list[tuple[str, Any]] = field(default_factory=list)  # parameters, once they are asked
    is_to_look: bool = False  # whether a checkpoint is loaded and not trained on

    def note(self, names: WalkedNames) -> Noted:
        """Returns what is to be found again later under these names."""
        return Noted(
            names,
            _references(self.layers),
            _references(dict(self.sublayers())),
            {path: type(part).__name__ for path, part in self.sublayers()},
            {
                name: {k: _reference_in(o, n, t) for k, t, o, n in _tensors_in(layer)}
                for name, layer in self.layers.items()
            },
            _references(dict(named_parameters(self))),
            [*self.optimizers],
        )

    def follow(self, noted: Noted, walk: Walk) -> None:
        """Gives everything the name that it has since setup."""
        self.noted, self.walk = noted, walk
        names = noted.names
        layers = {n: layer for n, ref in noted.layers.items() if self.is_reached(layer := ref())}
        for path, layer in self.layers.items():
            if names.known(layer) is None:
                layers[_free(path, layers)] = layer
        self.layers = _in_order(layers, [*noted.layers])
        for found in (self.optimizers, self.schedules, self.objects, self.parameters):
            renamed: dict[str, Any] = {}
            for path, value in found.items():
                renamed[_free(names.known(value) or path, renamed)] = value
            found.clear()
            found |= _in_order(renamed, noted.optimizers)

    def is_reached(self, value: Any) -> bool:
        """Returns whether an object that setup has made is still used."""
        return value is not None and self.walk is not None and self.walk.has(value)

    def tensors_of(self, name: str) -> dict[str, Any]:
        """Returns the tensors of a layer by their keys: at each the one that setup has put there,
        if it is still used.
        """
        noted = self.noted.tensors.get(name, {}) if self.noted else {}
        return self._as_noted(tensors_of(self.layers[name]), noted)

    def _as_noted(self, now: dict[str, Any], noted: Mapping[str, Reference]) -> dict[str, Any]:
        for name, ref in noted.items():
            then = ref()
            if now.get(name) is not then and self.is_reached(then):
                now[name] = then
        return now

    def parameters_as_noted(self, now: dict[str, Any]) -> dict[str, Any]:
        """Returns parameters by structured name: under each the one that setup has, if it is still
        used.
        """
        return self._as_noted(now, self.noted.parameters if self.noted else {})

    def names(self) -> list[str]:
        """Returns the names of everything that was found."""
        of_all = (self.layers, self.optimizers, self.schedules, self.objects, self.parameters)
        return [name for found in of_all for name in found]

    def state_dict(self) -> State:
        """Returns the tensors by file and key, and the states of other objects by name.

        Tensors on the CPU are views of the live memory: copy them before training goes on.
        """
        tensors = self.arrays()
        states = {name: get_state(value) for name, value in self._asked().items()}
        others = self._others().items()
        return tensors, {name: [class_of(other), states.get(name)] for name, other in others}

    def arrays(self) -> Tensors:
        """Returns the tensors by file and key; on the CPU they are views of the live memory."""
        return {
            file: {key: Array.of(tensor) for key, tensor in live.items()}
            for file, live in self._live_tensors().items()
            if live
        }

    def shapes(self) -> dict[str, str]:
        """Returns the facts that must be the same on all ranks, by name: type and shape of tensors,
        and the class of other objects.
        """
        shapes = {f"self.{name}": kind for name, kind in self._kinds().items()}
        shapes |= {f"self.{name}": generator_kind(g) for name, g in self.generators.items()}
        pieces = self.pieces()
        sharded = self.sharded()
        for file, live in self._live_tensors().items():
            for key, tensor in live.items() if file not in sharded else ():
                part = self.owner(file, key) in pieces
                shapes[f"self.{file}: {key!r}"] = "distributed" if part else describe(tensor)
        return shapes

    def outline(self) -> dict[str, str]:
        """Returns the class of each part, and type and shape of each tensor, by path."""
        names = parameter_names(self)
        updated = {
            f"{name}.updates {names.get(p.name, 'a parameter of no layer')}": UPDATED
            for name, optimizer in self._innermost().items()
            for p in parameters_of(optimizer)
        }
        return {
            # Of one that is gone the tensors tell whether anything is lost.
            **(self.noted.kinds if self.noted else {}),
            **{path: type(part).__name__ for path, part in self.sublayers()},
            **self._kinds(),
            **{name: describe(tensor) for name, tensor in self.parameters.items()},
            **{f"{n}.{k}": describe(t) for n in self.layers for k, t in self.tensors_of(n).items()},
            **updated,
        }

    def pieces(self) -> set[str]:
        """Returns the structured names of tensors that are split over the ranks."""
        named = {f"{n}.{k}": t for n in self.layers for k, t in self.tensors_of(n).items()}
        return {name for name, tensor in {**named, **self.parameters}.items() if is_piece(tensor)}

    def sharded(self) -> dict[str, set[str]]:
        """Returns this rank's parameters for each optimizer that is sharded over the ranks."""
        names = parameter_names(self)
        return {
            name: {names[p.name] for p in parameters_of(inner)}
            for name, inner in self._innermost().items()
            if hasattr(self.optimizers[name], "_param2rank")  # fleet's stages 1 and 2
        }

    def owner(self, file: str, key: str) -> str:
        """Returns the structured name of a tensor; of an accumulator, that of its parameter."""
        if file in self.optimizers:
            return key.partition("/")[2]
        return key if file == PARAMETERS else f"{file}.{key}"

    def problems(self, state: State) -> list[str]:
        """Returns one line for each entry of a state that does not fit, from what, to what.

        It changes one thing: an optimizer without a step yet gets the tensors of its first step,
        because they are compared, too.
        """
        tensors, values = state
        for name in self.layers:
            _rename_automatic(tensors.get(name, {}), self.tensors_of(name))
        names = parameter_names(self)
        for name, inner in self._innermost().items():
            own = {names[p.name]: p for p in parameters_of(inner) if p.name in names}
            optimizers.make_accumulators(inner, tensors.get(name, {}), own)
        # Schedules within have names of their own, and may be others that setup has made.
        saved = {name: kind.partition(" of ")[0] for name, (kind, _) in values.items()}
        live = self._live_tensors()
        if self.is_to_look:
            self._leave_accumulators(tensors, live)
        return misfits(saved | _described(tensors), self._kinds() | _described(live), "checkpoint")

    def _leave_accumulators(self, tensors: Any, live: Any) -> None:
        """Leaves out accumulators that the other side lacks: parameters were thawed since, say."""
        for name in self.optimizers:
            there, here = tensors.get(name, {}), live[name]
            shared = there.keys() & here.keys()
            for own in (there, here):
                for key in own.keys() - shared:
                    del own[key]

    def load_state_dict(self, state: State) -> list[str]:
        """Restores a state without `problems`; returns no reasons, since it is always exact."""
        tensors, values = state
        live = self._live_tensors()
        # Of a part that has a file of its own, too, what the whole layer has is restored.
        for file, arrays in sorted(tensors.items(), key=lambda item: len(live[item[0]])):
            for key, array in arrays.items():
                array.copy_to(live[file][key])
        asked = self._asked()
        for name, (_, state_of) in values.items():
            if name in asked:
                set_state(asked[name], state_of)
        return []

    def _live_tensors(self) -> dict[str, dict[str, Any]]:
        """Returns the tensors themselves, by file and key."""
        names = parameter_names(self)
        live = {
            **{name: self.tensors_of(name) for name in self.layers},
            PARAMETERS: self.parameters,
            **{n: optimizers.accumulators(o, names) for n, o in self._innermost().items()},
        }
        return {file: {k: local(t) for k, t in tensors.items()} for file, tensors in live.items()}

    def _asked(self) -> dict[str, Any]:
        """Returns the objects that are asked for their state, by name."""
        innermost = self._innermost()
        return {n: o for n, o in innermost.items() if optimizers.writes_state(o)} | self.objects

    def _others(self) -> dict[str, Any]:
        return {**self._innermost(), **self.schedules, **self.objects}

    def _kinds(self) -> dict[str, str]:
        return {name: type(other).__name__ for name, other in self._others().items()}

    def sublayers(self) -> list[tuple[str, Any]]:
        """Returns the path and the layer of all layers, sublayers included."""
        there = {n: ref() for n, ref in self.noted.sublayers.items()} if self.noted else {}
        there = {name: part for name, part in there.items() if self.is_reached(part)}
        names = {id(part): name for name, part in there.items()}
        now = {
            names.get(id(part), f"{name}.{path}".rstrip(".")): part
            for name, layer in self.layers.items()
            for path, part in layer.named_sublayers(include_self=True)
        }
        return [*{**now, **there}.items()]

    def _innermost(self) -> dict[str, Any]:
        return {name: optimizers.innermost(o) for name, o in self.optimizers.items()}


def found_in(
    walk: Walk, noted: Noted | None = None, *, with_excluded: bool = False
) -> StatefulObjects:
    """Finds the layers, optimizers and other objects with a state that a walk has reached.

    Args:
        walk: That has reached them.
        noted: What setup has made; None before its end.
        with_excluded: Whether to find also what the user has excluded.

    Raises:
        ValueError: A name cannot be that of a file.
    """
    found = StatefulObjects(dict(walk.layers), parallel=walk.wrappers)
    by_node: dict[Any, dict[str, Any]] = {
        OptimizerNode: found.optimizers,
        ScheduleNode: found.schedules,
        StatefulNode: found.objects,
        ParameterNode: found.parameters,
    }
    for path in walk.found_at:
        if path not in walk.layers:
            node = walk.nodes[path]
            by_node[type(node)][path] = walk.wrapped.get(path, node.value)
    found.generators = {
        path: node.value
        for path, node in walk.nodes.items()
        if isinstance(node.value, GENERATORS) and not path.startswith(LOADERS)
    }
    if noted is not None:
        found.follow(noted, walk)
    for path, value in walk.left_out.items():
        is_optimizer = optimizers.is_optimizer(value)
        found.excluded_optimizers += [path] * is_optimizer
        if with_excluded:
            known = found.layers if isinstance(value, Layer) else found.parameters
            (found.optimizers if is_optimizer else known)[path] = value
    if found.parameters:
        # A list of parameters says which they are; those of a layer are saved with it.
        of_layers = {id(p) for name in found.layers for p in found.tensors_of(name).values()}
        found.parameters = {n: p for n, p in found.parameters.items() if id(p) not in of_layers}
    for name in (*found.layers, *found.optimizers):
        if "/" in name:
            raise ValueMistake(f"self.{name}: has a '/' in it; expected names that files can have.")
    return found


def _references(values: Mapping[str, Any]) -> dict[str, Reference]:
    return {name: reference(value) for name, value in values.items()}


def _in_order(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns what has these names first, in their order."""
    return {name: found[name] for name in (*names, *found) if name in found}


def _free(name: str, taken: Container[str]) -> str:
    """Returns a name, or one like it if that is taken."""
    while name in taken:
        name += "'"
    return name


def tensors_of(layer: Any) -> dict[str, Any]:
    """Returns parameters and buffers of a layer under the keys of paddle's own state_dict, also
    where the class overrides that method.
    """
    return {key: tensor for key, tensor, _, _ in _tensors_in(layer)}


def _tensors_in(
    layer: Any, prefix: str = "", above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields the key of each tensor, itself, the layer that has it and its name there."""
    passing = layer._non_persistable_buffer_names_set
    buffers = {name: tensor for name, tensor in layer._buffers.items() if name not in passing}
    for number, (name, tensor) in enumerate({**layer._parameters, **buffers}.items()):
        if tensor is not None:
            yield prefix + key_of(name, tensor, number), tensor, layer, name
    for name, part in layer._sub_layers.items():
        if part is not None and not any(part is outer for outer in (*above, layer)):
            yield from _tensors_in(part, f"{prefix}{name}.", (*above, layer))


def _reference_in(layer: Any, name: str, tensor: Any) -> Reference:
    """Returns what gives a parameter, or the buffer of a layer: that is another one if it is set
    anew, as `self.mean = 0.9 * self.mean + x` does.
    """
    if isinstance(tensor, EagerParamBase):
        return reference(tensor)
    owner = reference(layer)
    return lambda: getattr(owner(), "_buffers", {}).get(name)


def key_of(name: str, tensor: Any, number: int) -> str:
    """Returns the key of a layer's own tensor, of which it is one of several.

    One that is registered under its automatic name would have another key in each process.
    """
    is_automatic = name == tensor.name and AUTOMATIC.fullmatch(name) is not None
    return f"{_TENSOR}{number}" if is_automatic else name


def _rename_automatic(arrays: dict[str, Array], live: Mapping[str, Any]) -> None:
    """Gives tensors that expbase 1.0 has written under automatic names the names of now."""
    for key, tensor in live.items():
        before, dot, name = key.rpartition(".")
        automatic = f"{before}{dot}{tensor.name}"
        if name.startswith(_TENSOR) and key not in arrays and automatic in arrays:
            arrays[key] = arrays.pop(automatic)


def class_of(stateful: Any) -> str:
    """Returns the class of an object, and of the schedules within it: "SGD of StepDecay"."""
    own = getattr(stateful, "__dict__", {}).values()
    inner = [class_of(value) for value in own if isinstance(value, LRScheduler)]
    return " of ".join([type(stateful).__name__, *inner])


def get_state(value: Any) -> Any:
    """Returns the state of an object that is asked for it."""
    if optimizers.is_optimizer(value):
        return optimizers.own_state(value)
    return value.state_dict()


def set_state(value: Any, state: Any) -> None:
    """Sets what `get_state` returned."""
    if optimizers.is_optimizer(value):
        optimizers.set_own_state(value, state)
    # A scaler that switched itself off (bfloat16) saves an empty state, refuses to load one, and
    # will switch itself off again.
    elif state or not isinstance(value, paddle.amp.AmpScaler):
        state_setter(value)(state)


def parameter_names(found: StatefulObjects) -> dict[str, str]:
    """Returns the structured name, `model.linear.weight`, of each parameter, by paddle's automatic
    name.
    """
    return {parameter.name: name for name, parameter in named_parameters(found)}


class ParameterKeys(Names):
    """Finds the structured name of a dict's key that is a parameter, its id or automatic name."""

    def __init__(self, found: StatefulObjects) -> None:
        named = [*named_parameters(found)]
        self._by_name = dict(reversed(named))
        self._automatic = {parameter.name: name for name, parameter in named}
        self._ids = {id(parameter): name for name, parameter in named}

    def may_be_keys(self, keys: Mapping[Any, Any]) -> bool:
        known: Any = self._automatic if type(next(iter(keys))) is str else self._ids
        return not known.keys().isdisjoint(keys)

    def key_of(self, key: Any) -> Any:
        if type(key) is str and key in self._automatic:
            return ["name", self._automatic[key]]
        if type(key) is int and key in self._ids:
            return ["id", self._ids[key]]
        is_parameter = isinstance(key, paddle.Tensor) and id(key) in self._ids
        return ["parameter", self._ids[id(key)]] if is_parameter else None

    def key(self, content: Any) -> Any:
        how, name = content
        parameter = self._by_name[name]
        return {"name": parameter.name, "id": id(parameter), "parameter": parameter}[how]


def named_parameters(found: StatefulObjects) -> list[tuple[str, Any]]:
    """Returns all parameters with their structured names; one that several layers share has
    several.
    """
    if found.named:
        return found.named
    layers = found.layers.items()
    of_layers = {f"{n}.{key}": p for n, layer in layers for key, p in _parameters_in(layer)}
    named = [*found.parameters_as_noted({**found.parameters, **of_layers}).items()]
    if found.noted is not None:  # before the end of setup some may come
        found.named = named
    return named


def _parameters_in(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parameters of a layer by their keys, each once."""
    met: set[int] = set()
    for key, tensor, _, _ in _tensors_in(layer):
        if isinstance(tensor, EagerParamBase) and id(tensor) not in met:
            met.add(id(tensor))
            yield key, tensor


def statistics(found: StatefulObjects) -> Iterator[tuple[str, Any]]:
    """Yields every buffer, and the running mean and variance of every normalization."""
    for path, part in found.sublayers():
        own = {**running_statistics(part), **part._buffers}
        for number, (name, tensor) in enumerate(own.items()):
            if tensor is not None and tensor._is_initialized():
                yield f"{path}.{key_of(name, tensor, number)}", tensor


def running_statistics(part: Any) -> dict[str, Any]:
    """Returns a layer's own parameters that its forward writes: running mean and variance."""
    names = [n for kind, names in _RUNNING.items() if isinstance(part, kind) for n in names]
    return {name: part._parameters.get(name) for name in names}


def parameters_of(optimizer: Any) -> list[Any]:
    """Returns the parameters that an optimizer was given, in groups or not."""
    parameters: list[Any] = []
    groups = optimizers.groups(optimizer)
    for item in groups or optimizer._parameter_list or []:
        parameters += list(item["params"]) if isinstance(item, dict) else [item]
    return parameters


def _described(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the type and shape of tensors as text, by their names in a message."""
    return {
        f"{file}: {key!r}": describe(tensor)
        for file, by_key in tensors.items()
        for key, tensor in by_key.items()
    }


def misfits(saved: Mapping[str, str], here: Mapping[str, str], where: str) -> list[str]:
    """Returns one line for each name that one side lacks or describes otherwise."""
    return [
        *(f"{name}: missing in the {where}." for name in here if name not in saved),
        *(f"{name}: in the {where}, and not here." for name in saved if name not in here),
        *(
            f"{name} is {there} in the {where} and {here[name]} here."
            for name, there in saved.items()
            if here.get(name, there) != there
        ),
    ]
