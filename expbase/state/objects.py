"""What the state of an experiment is: finding it, reading it, restoring it.

Tensors are keyed by structured names (`moment1/model.linear.weight`), never by paddle's automatic
ones, so another process, or another order of construction, can read them.

    found = find(vars(experiment), excluded=("judge",))
    state = found.state_dict()               # tensors by file, values by name
    if not found.problems(state):            # everything that does not fit
        found.load_state_dict(state)
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base import framework
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.base.arrays import Array, describe, is_piece, local
from expbase.base.generators import GENERATORS, generator_state, set_generator_state
from expbase.state import optimizers

Tensors = dict[str, dict[str, Array]]  # by file, then by key
State = tuple[Tensors, dict[str, Any]]  # and of each object its kind and its other values, by name

# The file of parameters that no layer holds. No attribute can have this name.
PARAMETERS = "@parameters"
_FLEET = "paddle.distributed.fleet.meta_parallel."  # the modules of what it wraps round a layer
# Attributes of each layer, and of an RNN, which has its parameters as one array, too; but the mode
# of a layer is its user's.
OF_PADDLE = {*paddle.nn.Layer.__init__.__code__.co_names, "_flat_weight"} - {"training"}
OF_PADDLE |= {"_data_format"}  # which BatchNorm1D and BatchNorm3D set in their first forward
_MANY = 1000  # items, of data and not of layers: a history of losses may have millions
# Layers whose parameters of these names are written in the forward.
_RUNNING = {
    paddle.nn.layer.norm._BatchNormBase: ("_mean", "_variance"),
    paddle.nn.BatchNorm: ("_mean", "_variance"),
    paddle.nn.SpectralNorm: ("weight_u", "weight_v"),
}


@dataclass
class StatefulObjects:
    """The stateful objects of an experiment, by the names under which they were found."""

    layers: dict[str, Any] = field(default_factory=dict)  # without a DataParallel round them
    optimizers: dict[str, Any] = field(default_factory=dict)  # in the wrappers that step them
    # Schedules (also those within an optimizer), generators of python and numpy, and others with
    # state_dict and a setter.
    objects: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)  # that are attributes themselves
    parallel: dict[int, Any] = field(default_factory=dict)  # every wrapper of a layer, by id
    excluded_optimizers: list[str] = field(default_factory=list)  # left out by the user

    def names(self) -> list[str]:
        """Returns the names of everything that was found."""
        return [*self.layers, *self.optimizers, *self.objects, *self.parameters]

    def state_dict(self) -> State:
        """Tensors by file and key, and the other values by name.

        Tensors on the CPU are views of the live memory: copy them before training goes on.
        """
        tensors = {
            file: {key: Array.of(tensor) for key, tensor in live.items()}
            for file, live in self._live_tensors().items()
            if live
        }
        kinds = self._kinds()
        return tensors, {name: [kinds[name], get_state(o)] for name, o in self._others().items()}

    def shapes(self) -> dict[str, str]:
        """Returns what all ranks have, by name: type and shape of tensors, and the kind of the
        rest.
        """
        shapes = {f"self.{name}": kind for name, kind in self._kinds().items()}
        pieces = self.pieces()
        sharded = self.sharded()
        for file, live in self._live_tensors().items():
            for key, tensor in live.items() if file not in sharded else ():
                part = self.owner(file, key) in pieces
                shapes[f"self.{file}: {key!r}"] = "distributed" if part else describe(tensor)
        return shapes

    def outline(self) -> dict[str, str]:
        """Returns what there is, by path: classes, and what tensors are like."""
        names = parameter_names(self)
        layers = self.layers.items()
        updated = {
            f"{name}.updates {names.get(p.name, 'a parameter of no layer')}": "updated"
            for name, optimizer in self._innermost().items()
            for p in parameters_of(optimizer)
        }
        return {
            **{path: type(part).__name__ for path, part in self.sublayers()},
            **self._kinds(),
            **{name: describe(tensor) for name, tensor in self.parameters.items()},
            **{f"{n}.{key}": describe(t) for n, o in layers for key, t in o.state_dict().items()},
            **updated,
        }

    def pieces(self) -> set[str]:
        """Returns the structured names of the tensors of which each rank holds another part."""
        layers = self.layers.items()
        named = {f"{n}.{key}": t for n, layer in layers for key, t in layer.state_dict().items()}
        return {name for name, tensor in {**named, **self.parameters}.items() if is_piece(tensor)}

    def sharded(self) -> dict[str, set[str]]:
        """Returns the parameters of this rank, for each optimizer whose ranks have some of them
        each.
        """
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
        """Returns everything that keeps a state from being restored, from what, to what.

        Changes nothing but this: an optimizer that has not made a step yet gets the tensors that
        its first step would make, because they are compared, too.
        """
        tensors, values = state
        names = parameter_names(self)
        for name, inner in self._innermost().items():
            own = {names[p.name]: p for p in parameters_of(inner) if p.name in names}
            optimizers.make_accumulators(inner, tensors.get(name, {}), own)
        saved = {name: kind for name, (kind, _) in values.items()}
        here = self._kinds() | _described(self._live_tensors())
        others = self._others()
        return misfits(saved | _described(tensors), here, "checkpoint") + [
            f"{name}: {value!r:.80} is no state of a {kind}."
            for name, (kind, value) in values.items()
            if name in others and not _takes(others[name], value)
        ]

    def load_state_dict(self, state: State) -> list[str]:
        """Restores a state that has no `problems`; always exact."""
        tensors, values = state
        live = self._live_tensors()
        for file, arrays in tensors.items():
            for key, array in arrays.items():
                array.copy_to(live[file][key])
        self.set_values({name: value for name, (_, value) in values.items()})
        return []

    def values(self, kinds: Any) -> dict[str, Any]:
        """Returns the states, without tensors of layers and optimizers, of all that is of some
        classes.
        """
        return {name: get_state(o) for name, o in self._others().items() if isinstance(o, kinds)}

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Sets what `values` returned."""
        others = self._others()
        for name, value in values.items():
            set_state(others[name], value)

    def _live_tensors(self) -> dict[str, dict[str, Any]]:
        """Returns the tensors themselves, by file and key."""
        names = parameter_names(self)
        live = {
            **{name: layer.state_dict() for name, layer in self.layers.items()},
            PARAMETERS: self.parameters,
            **{n: optimizers.accumulators(o, names) for n, o in self._innermost().items()},
        }
        return {file: {k: local(t) for k, t in tensors.items()} for file, tensors in live.items()}

    def _others(self) -> dict[str, Any]:
        """Returns what has values that are no tensors of layers or optimizers, by name."""
        return {**self._innermost(), **self.objects}

    def _kinds(self) -> dict[str, str]:
        return {name: optimizers.kind(other) for name, other in self._others().items()}

    def sublayers(self) -> list[tuple[str, Any]]:
        """Returns all layers with their paths, those within others, too."""
        return [
            (f"{name}.{path}".rstrip("."), part)
            for name, layer in self.layers.items()
            for path, part in layer.named_sublayers(include_self=True)
        ]

    def _innermost(self) -> dict[str, Any]:
        return {name: optimizers.innermost(o) for name, o in self.optimizers.items()}


def find(
    attributes: Mapping[str, Any],
    excluded: Collection[str] = (),
    in_objects: Mapping[str, Any] = types.MappingProxyType({}),
) -> StatefulObjects:
    """Finds what has state among the attributes, in lists and dicts, too; each object once.

    `excluded` are names that the user left out; `in_objects` are attributes of the user's objects,
    whose generators are plain values.

    Raises:
        ValueError: Two objects would get the same name, or one cannot be the name of a file.
    """
    found, left_out = StatefulObjects(), StatefulObjects()
    seen: set[int] = set()
    # The excluded ones are searched first, so that one with a second name is "seen" there.
    for name in excluded:
        if name in attributes or name in in_objects:
            _visit(left_out, seen, name, {**in_objects, **attributes}[name])
    found.excluded_optimizers = list(left_out.optimizers)
    for name, value in attributes.items():
        if name not in excluded:
            _visit(found, seen, name, value)
    for name, value in in_objects.items():
        if name not in excluded and not isinstance(value, GENERATORS):
            _visit(found, seen, name, value)
    for name, optimizer in found.optimizers.items():
        # A schedule that only its optimizer knows. One that has a name was seen before.
        rate = optimizers.innermost(optimizer)._learning_rate
        _visit(found, seen, f"{name}.learning_rate", rate)
    if found.parameters:
        # A list of parameters says which they are; those of a layer are saved with it.
        of_layers = {id(p) for layer in found.layers.values() for p in layer.parameters()}
        found.parameters = {n: p for n, p in found.parameters.items() if id(p) not in of_layers}
    return found


def own_attributes(layer: Any) -> dict[str, Any]:
    """Returns what a user, or the layer's class, has set on it: no parameters, no sublayers, no
    hooks.

    Of the buffers those that a checkpoint does not hold anyway.
    """
    own = {name: value for name, value in vars(layer).items() if name not in OF_PADDLE}
    passing = layer._non_persistable_buffer_names_set
    return own | {name: value for name, value in layer._buffers.items() if name in passing}


@functools.cache
def is_users(module: str) -> bool:
    """Returns whether a module is the user's own, of no installed package, and has a file."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    is_installed = "-packages" in file or root in (*sys.stdlib_module_names, "expbase", "paddle")
    return bool(file) and not is_installed


def is_parameter(value: Any) -> bool:
    """Returns whether it is a parameter, which is saved with its layer."""
    return isinstance(value, framework.EagerParamBase)


def unwrap(layer: Any) -> Any:
    """Returns the user's layer in a DataParallel or a wrapper of fleet's; others as they are."""
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
        if id(value) not in seen and len(value) < _MANY:
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
                if isinstance(own, (*GENERATORS, list, dict, deque)) and key not in OF_PADDLE:
                    where = f"{name}.{path}.{key}".replace("..", ".")
                    _visit(found, seen, where, own, (*GENERATORS, framework.EagerParamBase))


def _kind(found: StatefulObjects, value: Any) -> dict[str, Any] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, paddle.nn.Layer):
        return found.layers
    if isinstance(optimizers.innermost(value), Optimizer):
        return found.optimizers
    if isinstance(value, framework.EagerParamBase):
        return found.parameters
    return found.objects if has_state(value) else None


def get_state(value: Any) -> Any:
    """Returns what an object with state holds, as values and tensors."""
    if isinstance(value, Optimizer):  # a learning rate that no schedule decides
        rate = value._learning_rate
        return None if isinstance(rate, LRScheduler) else float(rate)
    if isinstance(value, LRScheduler):
        return optimizers.schedule_values(value)
    return generator_state(value) if isinstance(value, GENERATORS) else value.state_dict()


def set_state(value: Any, state: Any) -> None:
    """Sets what `get_state` returned."""
    if isinstance(value, Optimizer):
        if state is not None:
            value.set_lr(state)
    elif isinstance(value, LRScheduler):
        optimizers.set_schedule_values(value, state)
    elif isinstance(value, GENERATORS):
        set_generator_state(value, state)
    # A scaler that switched itself off (bfloat16) saves an empty state, refuses to load one, and
    # will switch itself off again.
    elif state or not isinstance(value, paddle.amp.AmpScaler):
        state_setter(value)(state)


def _takes(value: Any, state: Any) -> bool:
    """Returns whether a rate, a schedule or a generator may have a state; of others their class
    decides.
    """
    if isinstance(value, Optimizer):
        return state is None or isinstance(state, (int, float))
    try:
        if isinstance(value, GENERATORS):
            set_state(copy.deepcopy(value), state)
    except Exception:
        return False
    return not isinstance(value, LRScheduler) or isinstance(state, dict)


def has_state(value: Any) -> bool:
    """Returns whether it is a schedule, a generator, or an object that gives and takes a state."""
    return isinstance(value, (LRScheduler, *GENERATORS)) or state_setter(value) is not None


def state_setter(candidate: Any) -> Any:
    """Returns the method that loads a state, by either of its names; None if there is no state to
    save.
    """
    setter = getattr(candidate, "set_state_dict", None)
    setter = setter or getattr(candidate, "load_state_dict", None)
    return setter if hasattr(candidate, "state_dict") else None


def parameter_names(found: StatefulObjects) -> dict[str, str]:
    """Returns structured names of all parameters, `model.linear.weight`, by paddle's automatic
    ones.
    """
    return {parameter.name: name for name, parameter in named_parameters(found)}


def settings_of_parameters(found: StatefulObjects) -> dict[str, Any]:
    """Returns each group of an optimizer, and each parameter: they have settings beside what is
    trained.
    """
    groups = {
        f"{name}.groups.{number}": group
        for name, optimizer in found.optimizers.items()
        for number, group in enumerate(optimizers.innermost(optimizer)._param_groups or [])
        if isinstance(group, dict)
    }
    return groups | dict(named_parameters(found))


def named_parameters(found: StatefulObjects) -> list[tuple[str, Any]]:
    """Returns all parameters with their structured names; one that several layers share has
    several.
    """
    layers = found.layers.items()
    of_layers = [(f"{n}.{key}", p) for n, layer in layers for key, p in layer.named_parameters()]
    return [*found.parameters.items(), *of_layers]


def statistics(found: StatefulObjects) -> Iterator[tuple[str, Any]]:
    """Yields every buffer, and what a normalization keeps of the batches that it has seen."""
    for path, part in found.sublayers():
        for name, tensor in {**running_statistics(part), **part._buffers}.items():
            if tensor is not None and tensor._is_initialized():
                yield f"{path}.{name}", tensor


def running_statistics(part: Any) -> dict[str, Any]:
    """Returns the parameters of a layer, not of those within it, that its forward writes."""
    names = [n for kind, names in _RUNNING.items() if isinstance(part, kind) for n in names]
    return {name: part._parameters.get(name) for name in names}


def parameters_of(optimizer: Any) -> list[Any]:
    """Returns the parameters that an optimizer was given, in groups or not."""
    parameters = []
    for item in optimizer._param_groups or optimizer._parameter_list or []:
        parameters += list(item["params"]) if isinstance(item, dict) else [item]
    return parameters


def _described(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns type and shape of tensors by their names in a message."""
    return {
        f"{file}: {key!r}": describe(tensor)
        for file, by_key in tensors.items()
        for key, tensor in by_key.items()
    }


def misfits(saved: Mapping[str, str], here: Mapping[str, str], where: str) -> list[str]:
    """Returns one line for each name that only one side has, or that is described otherwise."""
    return [
        *(f"{name}: missing in the {where}." for name in here if name not in saved),
        *(f"{name}: in the {where}, and not here." for name in saved if name not in here),
        *(
            f"{name} is {there} in the {where} and {here[name]} here."
            for name, there in saved.items()
            if here.get(name, there) != there
        ),
    ]
