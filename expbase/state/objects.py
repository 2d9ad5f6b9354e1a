"""What the state of an experiment is: finding it, capturing it, putting it back.

Everything stateful that stands on the experiment is state, whatever its name: layers,
optimizers, learning rate schedules, objects with `state_dict` and a setter, random generators,
bare parameters, also inside lists and dicts, once however many names it has. Tensors are keyed by
structured names (`moment1/model.linear.weight`), never by paddle's automatic ones, so another
process, another order of construction or a second experiment in the process reads them back.

Restoring is strict both ways and in two steps: `check` finds everything that does not fit,
`apply` sets what `check` has passed. Files are checkpoint.py's business.

    found = find(vars(experiment), excluded=("judge",))
    tensors, values = capture(found)
    problems = check(found, tensors, values)
    apply(found, tensors, values)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle.base import framework
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.state import encoding
from expbase.state.arrays import Array, describe

_LONG = 1000  # items of a list that is taken for data if its ends are

Tensors = dict[str, dict[str, Array]]  # by file, by key
Values = dict[str, Any]  # JSON values, by name

_PARAMETERS = (
    "@parameters"  # no attribute has such a name: the file of bare parameters on the experiment
)


@dataclass
class StatefulObjects:
    """The stateful objects of an experiment, by the names under which they were found."""

    layers: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    parallel: dict[int, Any] = field(default_factory=dict)  # every paddle.DataParallel, by id
    excluded: list[str] = field(default_factory=list)
    excluded_optimizers: list[str] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)  # keeps them alive: an id is not reused
    containers: set[int] = field(default_factory=set)  # that were looked into: there are cycles

    def names(self) -> list[str]:
        """Of everything found."""
        kinds = (self.layers, self.optimizers, self.schedulers)
        rest = (self.objects, self.generators, self.parameters)
        return [name for kind in (*kinds, *rest) for name in kind]


def unwrap(layer: Any) -> Any:
    """The user's layer in a DataParallel; any other layer as it is."""
    while isinstance(layer, paddle.DataParallel):
        layer = layer._layers
    return layer


def find(attributes: Mapping[str, Any], excluded: Iterable[str] = ()) -> StatefulObjects:
    """Finds what has state among the attributes, in their order.

    Args:
        attributes: Of the experiment, without the template's own.
        excluded: Names that the user left out.
    """
    found = StatefulObjects(excluded=list(excluded))
    left_out = StatefulObjects(seen=found.seen)  # what is found there is seen, and nothing more
    for name in found.excluded:
        if name in attributes:
            _visit(left_out, name, attributes[name])
    found.excluded_optimizers = list(left_out.optimizers)
    for name, value in attributes.items():
        if name not in found.excluded:
            _visit(found, name, value)
    for name, optimizer in found.optimizers.items():
        # A schedule that only its optimizer knows.
        _visit(found, f"{name}.learning_rate", optimizer._learning_rate)
    return found


def _visit(found: StatefulObjects, name: str, value: Any) -> None:
    if isinstance(value, (list, tuple, dict)):
        if id(value) not in found.containers and not _is_plain_data(value):
            found.containers.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                _visit(found, f"{name}.{key}", item)
        return
    if isinstance(value, paddle.DataParallel):
        found.parallel[id(value)] = value
    value = unwrap(value)
    kind = _kind(found, value)
    if kind is not None and id(value) not in found.seen:
        if name in found.names() or "/" in name:
            raise ValueError(
                f"self.{name}: two stateful objects would get this name, or it has a '/' in it; "
                "expected names that can be those of files."
            )
        found.seen[id(value)] = value
        kind[name] = value


def _is_plain_data(value: Any) -> bool:
    """Whether a long list holds data, by its ends: it is not walked at every logged line."""
    if len(value) < _LONG or isinstance(value, dict):
        return False
    return all(_is_plain(item) for item in (value[0], value[-1]))


def _kind(found: StatefulObjects, value: Any) -> dict[str, Any] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, paddle.nn.Layer):
        return found.layers
    if isinstance(value, Optimizer):
        return found.optimizers
    if isinstance(value, LRScheduler):
        return found.schedulers
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        return found.generators
    if isinstance(value, framework.EagerParamBase):
        return found.parameters
    if hasattr(value, "state_dict") and _setter(value) is not None:
        return found.objects
    return None


def _setter(value: Any) -> Any:
    return getattr(value, "set_state_dict", None) or getattr(value, "load_state_dict", None)


# --- capturing -----------------------------------------------------------------------------


def capture(found: StatefulObjects) -> tuple[Tensors, Values]:
    """The state of everything found; tensors on the CPU are live views, not copies.

    Raises:
        TypeError: An object's state holds what a checkpoint cannot carry.
    """
    tensors: Tensors = {}
    values: Values = {}
    for name, layer in found.layers.items():
        tensors[name] = _arrays(layer.state_dict())
    if found.parameters:
        tensors[_PARAMETERS] = _arrays(found.parameters)
    names = parameter_names(found)
    for name, optimizer in found.optimizers.items():
        tensors[name] = _arrays(_accumulators(optimizer, names))
        if not isinstance(optimizer._learning_rate, LRScheduler):
            values[f"{name}.learning_rate"] = float(optimizer._learning_rate)
    for name, scheduler in found.schedulers.items():
        arrays: dict[str, Array] = {}
        values[name] = _scheduler_values(scheduler, name, arrays)
        tensors[name] = arrays
    for name, generator in found.generators.items():
        arrays = {}
        values[name] = encoding.encode(_generator_state(generator), name, arrays)
        tensors[name] = arrays
    for name, stateful in found.objects.items():
        arrays = {}
        values[name] = encoding.encode(stateful.state_dict(), name, arrays)
        tensors[name] = arrays
    return {name: arrays for name, arrays in tensors.items() if arrays}, values


def parameter_names(found: StatefulObjects) -> dict[str, str]:
    """Structured names of all parameters, `model.linear.weight`, by paddle's automatic ones."""
    names: dict[str, str] = {}
    for name, parameter in named_parameters(found):
        names.setdefault(parameter.name, name)
    return names


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


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {key: Array.of(tensor) for key, tensor in tensors.items()}


def _accumulators(optimizer: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """An optimizer's tensors as `accumulator/structured parameter name`."""
    master = getattr(optimizer, "_master_weights", {})
    # Accumulators of a parameter with a master weight go by the master weight's name.
    names = {**names, **{tensor.name: names[name] for name, tensor in master.items()}}
    tensors = {f"master_weight/{names[name]}": tensor for name, tensor in master.items()}
    prefix = f"{optimizer._name}_" if optimizer._name else ""
    for accumulator, of_parameters in optimizer._accumulators.items():
        for parameter, tensor in of_parameters.items():
            tensors[f"{accumulator.removeprefix(prefix)}/{names[parameter]}"] = tensor
    return tensors


def _scheduler_values(scheduler: Any, place: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Every plain value of a schedule, those of the schedules within it too.

    Its own state_dict leaves some out (CosineAnnealingWarmRestarts loses two), and some are
    tensors (ReduceOnPlateau keeps the best loss as it was given).
    """
    values = {}
    for name, value in vars(scheduler).items():
        if isinstance(value, LRScheduler):
            values[name] = {"$scheduler": _scheduler_values(value, f"{place}.{name}", arrays)}
        elif _is_plain(value) and name != "_var_name":  # an automatic name of paddle's
            values[name] = encoding.encode(value, f"{place}.{name}", arrays)
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    kinds = (bool, int, float, str, np.generic, np.ndarray, paddle.Tensor)
    return value is None or isinstance(value, kinds)


def generator_states(found: StatefulObjects) -> dict[str, Any]:
    """The states of the random generators that were found, for `set_generator_states`."""
    return {name: _generator_state(generator) for name, generator in found.generators.items()}


def set_generator_states(found: StatefulObjects, states: Mapping[str, Any]) -> None:
    """Sets what `generator_states` gave."""
    for name, generator in found.generators.items():
        _set_generator_state(generator, states[name])


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


# --- restoring -----------------------------------------------------------------------------


def check(found: StatefulObjects, tensors: Tensors, values: Values) -> list[str]:
    """Everything that keeps a captured state from being put back; nothing is changed for good.

    Creates the accumulators of the optimizers that have not made a step yet.

    Returns:
        One line for each entry, naming it, from what, to what; empty if all fits.
    """
    problems: list[str] = []
    for name, layer in found.layers.items():
        problems += _compare(name, tensors.get(name, {}), layer.state_dict())
    problems += _compare(_PARAMETERS, tensors.get(_PARAMETERS, {}), found.parameters)
    names = parameter_names(found)
    for name, optimizer in found.optimizers.items():
        saved = tensors.get(name, {})
        problems += _make_accumulators(optimizer, name, saved, names)
        problems += _compare(name, saved, _accumulators(optimizer, names))
    expected = [*found.schedulers, *found.objects, *found.generators]
    expected += [
        f"{name}.learning_rate"
        for name, optimizer in found.optimizers.items()
        if not isinstance(optimizer._learning_rate, LRScheduler)
    ]
    problems += [f"{name}: missing in the checkpoint." for name in expected if name not in values]
    problems += [
        f"{name}: in the checkpoint, but nothing of that name is on the experiment."
        for name in sorted({*values} - {*expected})
    ]
    known = {*found.names(), _PARAMETERS}
    problems += [
        f"{name}: tensors in the checkpoint, but nothing of that name is on the experiment."
        for name in sorted({*tensors} - known)
    ]
    return problems


def apply(found: StatefulObjects, tensors: Tensors, values: Values) -> None:
    """Puts back what `check` found to fit."""
    for name, layer in found.layers.items():
        _copy(tensors.get(name, {}), layer.state_dict())
    _copy(tensors.get(_PARAMETERS, {}), found.parameters)
    names = parameter_names(found)
    for name, optimizer in found.optimizers.items():
        _copy(tensors.get(name, {}), _accumulators(optimizer, names))
        if not isinstance(optimizer._learning_rate, LRScheduler):
            optimizer.set_lr(values[f"{name}.learning_rate"])
    for name, scheduler in found.schedulers.items():
        _set_scheduler_values(scheduler, values[name], tensors.get(name, {}))
    for name, generator in found.generators.items():
        _set_generator_state(generator, encoding.decode(values[name], tensors.get(name, {})))
    for name, stateful in found.objects.items():
        content = encoding.decode(values[name], tensors.get(name, {}))
        # A scaler that switched itself off (bfloat16) saves nothing, refuses nothing, and will
        # switch itself off again.
        if content or not isinstance(stateful, paddle.amp.AmpScaler):
            _setter(stateful)(content)


def _compare(name: str, saved: Mapping[str, Array], expected: Mapping[str, Any]) -> list[str]:
    problems = [
        f"{name}: {key!r} is missing in the checkpoint." for key in expected if key not in saved
    ]
    for key, array in saved.items():
        if key not in expected:
            problems.append(f"{name}: {key!r} is in the checkpoint, {array}, and not here.")
        elif str(array) != describe(expected[key]):
            problems.append(
                f"{name}: {key!r} is {array} in the checkpoint and {describe(expected[key])} here."
            )
    return problems


def _copy(saved: Mapping[str, Array], live: Mapping[str, Any]) -> None:
    for key, array in saved.items():
        array.copy_to(live[key])


def _make_accumulators(
    optimizer: Any, name: str, saved: Mapping[str, Array], names: Mapping[str, str]
) -> list[str]:
    """Makes the tensors that a first step would make, for the parameters that had one."""
    by_name = {names[p.name]: p for p in parameters_of(optimizer) if p.name in names}
    stepped = dict.fromkeys(key.partition("/")[2] for key in saved)
    unknown = [parameter for parameter in stepped if parameter not in by_name]
    if unknown:
        return [
            f"{name}: the checkpoint has state for {p!r}, which it does not update."
            for p in unknown
        ]
    if stepped:
        block = framework.default_main_program().global_block()
        optimizer._create_accumulators(block, [by_name[parameter] for parameter in stepped])
    return []


def _set_scheduler_values(
    scheduler: Any, values: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and "$scheduler" in value:
            _set_scheduler_values(getattr(scheduler, name), value["$scheduler"], arrays)
        else:
            setattr(scheduler, name, encoding.decode(value, arrays))


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
