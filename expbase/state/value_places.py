"""Nodes: how the places of an object are read and filled, a class for each kind of object.

A place is an attribute, an item of a dict or a cell of a function. A list, an array or a generator
is changed as a whole, in place, so that two names of it stay names of one object.

    node = Node(meter)
    node.places()                     # {"sum": 1.5, "count": 3}
    node.put("count", 4)
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.nn import Layer
from paddle.nn.utils import spectral_norm_hook, weight_norm_hook

from expbase.base.any_object import (
    attributes_of,
    definer,
    module_of,
    remove_attribute,
    set_attribute,
    slots_of,
)
from expbase.base.generator_states import GENERATORS, generator_state, set_generator_state
from expbase.base.gradients import gradient, set_gradient
from expbase.state import optimizers
from expbase.state.value_kinds import ATOMS, LEAVES, is_users

MANY = 1000  # items: of data, and each may be one of millions
WHOLE: Any = object()  # the one place of what is changed as a whole
_PARTS = ("dataset", "batch_sampler", "collate_fn", "worker_init_fn")  # of a loader
# Attributes of each layer, and of an RNN, which has its parameters as one array, too; but the mode
# of a layer is its user's.
_OF_LAYERS = {*Layer.__init__.__code__.co_names, "_flat_weight"} - {"training"}
_OF_LAYERS |= {"_data_format"}  # which BatchNorm1D and BatchNorm3D set in their first forward
# Hooks that set an attribute anew before each forward, by what a checkpoint has of the layer.
_DERIVING = (weight_norm_hook.WeightNorm, spectral_norm_hook.SpectralNorm)
# Attributes of a parameter that are paddle's own: paddle/base/framework.py, EagerParamBase; of amp
# paddle/distributed/fleet/utils/mix_precision_utils.py; of fleet dygraph_sharding_optimizer.py,
# group_sharded_storage.py, mp_layers.py, sequence_parallel_utils.py, tensor_fusion_helper.py.
_OF_PARAMETERS = {"_init_func", "_init_op_creator", "_is_param", "is_distributed", "main_grad"}
_OF_PARAMETERS |= {"fw_storage", "bw_storage", "split_axis", "is_firstly_shared", "color"}
_OF_PARAMETERS |= {"sequence_parallel", "unslice", "_need_shard"}
_RATES = "optimize_attr"  # the factor of a parameter's learning rate, in a dict
_PASSED_OVER = {*_OF_PARAMETERS, _RATES}
_SETTINGS = {"regularizer", "need_clip", "do_model_average"}  # of a ParamAttr, on each parameter
GROUPS = "groups."  # what the keys of an optimizer's groups begin with


def is_same_key(one: Any, other: Any) -> bool:
    """Returns whether a dict takes two keys for one; == alone compares the numbers of tensors."""
    return one is other or (hash(one) == hash(other) and bool(one == other))


class Node:
    """An object that has places: its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def places(self) -> Mapping[Any, Any]:
        """Returns the value in each place, by key."""
        return attributes_of(self.value)

    def child(self, key: Any) -> Any:
        """Returns the child of a key, as `children` yields it; None if it is gone."""
        return next((value for name, value in self.children() if is_same_key(name, key)), None)

    def put(self, key: Any, value: Any) -> None:
        """Puts a value into a place; no code of the user's is called."""
        set_attribute(self.value, key, value)

    def remove(self, key: Any) -> None:
        """Removes a place."""
        if key in self.places():
            remove_attribute(self.value, key)

    def children(self) -> Iterator[tuple[Any, Any]]:
        """Yields the key and the value of each object that this one leads to."""
        yield from self.places().items()

    def may_have(self, key: Any) -> bool:
        """Returns whether a key is that of a place, now or later: a checkpoint may be forged."""
        kind = type(self.value)
        if key in slots_of(kind):
            return True
        found = next((vars(base)[key] for base in kind.__mro__ if key in vars(base)), None)
        is_own = isinstance(found, types.GetSetDescriptorType)  # Python's: `__class__`, `__dict__`
        return hasattr(self.value, "__dict__") and not is_own


class WholeNode(Node):
    """An object that is changed as a whole: a list, a set, an array, a tensor, a generator."""

    def places(self) -> Mapping[Any, Any]:
        return {WHOLE: self.value}

    def put(self, key: Any, value: Any) -> None:
        """Makes the object hold what another one of its class holds, in place."""
        thing = self.value
        if isinstance(thing, paddle.Tensor):
            thing.copy_(value, True)
            thing.stop_gradient = value.stop_gradient
            if thing.is_leaf:  # of others paddle lets none be set
                set_gradient(thing, gradient(value))
        elif isinstance(thing, np.ndarray):
            thing[...] = value
        elif isinstance(thing, GENERATORS):
            set_generator_state(thing, generator_state(value))
        elif isinstance(thing, (set, dict, deque)):
            base: Any = next(kind for kind in (set, dict, deque) if isinstance(thing, kind))
            add: Any = base.update if base is not deque else deque.extend
            base.clear(thing)
            add(thing, value)
        else:
            thing[:] = value

    def may_have(self, key: Any) -> bool:
        return key is WHOLE

    def children(self) -> Iterator[tuple[Any, Any]]:
        items = self.value
        if isinstance(items, (list, deque)) and _may_hold_objects(items):
            yield from enumerate(items)


class SeededNode(WholeNode):
    """A generator that base/rng.py seeds anew at each place, so that it has no state to save."""

    def places(self) -> Mapping[Any, Any]:
        return {}


class DictNode(Node):
    """A dict, whose items are places; one with many items is changed as a whole."""

    def places(self) -> Mapping[Any, Any]:
        items: dict[Any, Any] = self.value
        return {**items} if len(items) < MANY else {WHOLE: items}  # a copy: threads may add some

    def put(self, key: Any, value: Any) -> None:
        if key is WHOLE and isinstance(value, dict) and len(value) >= MANY:
            WholeNode(self.value).put(key, value)
        else:
            _dict_of(self.value).__setitem__(self.value, key, value)

    def remove(self, key: Any) -> None:
        _dict_of(self.value).pop(self.value, key, None)

    def children(self) -> Iterator[tuple[Any, Any]]:
        items = [*self.value.items()]
        if len(items) < MANY or _may_hold_objects([item for _, item in items]):
            yield from items

    def may_have(self, key: Any) -> bool:
        return True  # as a whole if it grows

    def order(self, keys: Sequence[Any]) -> None:
        """Puts the items into an order, and removes those that are not in it."""
        base = _dict_of(self.value)
        items = {key: self.value[key] for key in keys if key in self.value}
        base.clear(self.value)
        for key, item in items.items():
            base.__setitem__(self.value, key, item)


class LayerNode(Node):
    """A layer: the attributes of its class and user, which layers and parameters stand in it, and
    buffers that paddle does not save.
    """

    def places(self) -> Mapping[Any, Any]:
        layers, parameters, _ = _parts_of(self.value)  # one may be a second name of another
        return {**self._own_places(), **layers, **parameters}

    def _own_places(self) -> dict[str, Any]:
        layer = self.value
        own = {name: value for name, value in vars(layer).items() if name not in _OF_LAYERS}
        passing = layer._non_persistable_buffer_names_set
        own |= {name: value for name, value in layer._buffers.items() if name in passing}
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _DERIVING):
                own.pop(hook.name, None)  # as large as the weights
        forward = own.get("forward")
        if isinstance(forward, types.MethodType) and forward.__self__ is layer:
            del own["forward"]  # which to_static has set
        return own

    def has_with_weights(self, key: Any) -> bool:
        """Returns whether a key is that of a buffer that is saved with the parameters."""
        layer = self.value
        return key in layer._buffers and key not in layer._non_persistable_buffer_names_set

    def put(self, key: Any, value: Any) -> None:
        # As paddle/nn/layer/layers.py, Layer.__setattr__; what is there keeps its place.
        layers, parameters, buffers = _parts_of(self.value)
        held: Any = vars(self.value)
        if isinstance(value, Layer):
            held = layers
        elif isinstance(value, EagerParamBase):
            held = parameters
        elif isinstance(value, paddle.Tensor):
            self.value._non_persistable_buffer_names_set.add(key)
            held = buffers
        if key not in held:
            self.remove(key)
        held[key] = value

    def remove(self, key: Any) -> None:
        for by_name in (*_parts_of(self.value), vars(self.value)):
            by_name.pop(key, None)

    def may_have(self, key: Any) -> bool:
        is_theirs = key in _OF_LAYERS or self.has_with_weights(key)
        return super().may_have(key) and not is_theirs

    def children(self) -> Iterator[tuple[Any, Any]]:
        for by_name in _parts_of(self.value):
            yield from by_name.items()
        yield from self._own_places().items()  # the buffers that pass, too


def _parts_of(layer: Any) -> tuple[Any, ...]:
    """Returns where paddle keeps the parts of a layer, by name: layers, parameters, buffers."""
    return layer._sub_layers, layer._parameters, layer._buffers


class ParameterNode(Node):
    """A parameter: the attributes that are set on it, without its value."""

    def places(self) -> Mapping[Any, Any]:
        own = {n: value for n, value in vars(self.value).items() if n not in _OF_PARAMETERS}
        return {"stop_gradient": self.value.stop_gradient, **own}

    def flat_places(self) -> Mapping[Any, Any]:
        """Returns the same, with the factor of the learning rate in the place of its dict."""
        own = {**self.places()}
        rates = own.pop(_RATES, None)
        return own | (rates if type(rates) is dict else {_RATES: rates})

    def put(self, key: Any, value: Any) -> None:
        if key == "stop_gradient":
            self.value.stop_gradient = value
        else:  # not by setattr: paddle refuses a second `color`
            vars(self.value)[key] = value

    def remove(self, key: Any) -> None:
        vars(self.value).pop(key, None)

    def may_have(self, key: Any) -> bool:
        return key == "stop_gradient" or (super().may_have(key) and key not in _OF_PARAMETERS)

    def has_users(self) -> bool:
        """Returns whether it has an attribute of the user's own."""
        return not vars(self.value).keys() <= _PASSED_OVER | _SETTINGS

    def children(self) -> Iterator[tuple[Any, Any]]:
        # A dict of rates has no places of its own: there is one for each parameter.
        yield from ((n, v) for n, v in vars(self.value).items() if n not in _PASSED_OVER)


class OptimizerNode(Node):
    """An optimizer: its settings, and the attributes that a class of the user's adds."""

    def places(self) -> Mapping[Any, Any]:
        return optimizers.settings(self.value)

    def put(self, key: Any, value: Any) -> None:
        optimizers.set_setting(self.value, key, value)

    def may_have(self, key: Any) -> bool:
        return super().may_have(key) and optimizers.may_have_setting(self.value, key)

    def children(self) -> Iterator[tuple[Any, Any]]:
        groups = enumerate(optimizers.groups(self.value))
        yield from ((f"{GROUPS}{number}", group) for number, group in groups)
        yield from self.places().items()


class GroupNode(Node):
    """A group of an optimizer's parameters: its settings."""

    def places(self) -> Mapping[Any, Any]:
        return {**self.value}

    def put(self, key: Any, value: Any) -> None:
        self.value[key] = value

    def remove(self, key: Any) -> None:
        self.value.pop(key, None)

    def may_have(self, key: Any) -> bool:
        return type(key) is str


class ScheduleNode(Node):
    """A learning rate schedule: all its attributes but paddle's automatic name."""

    def places(self) -> Mapping[Any, Any]:
        return {name: v for name, v in attributes_of(self.value).items() if name != "_var_name"}


class StatefulNode(Node):
    """An object that is asked for its state; its places are the attributes that a class of the
    user's adds to an installed one.
    """

    def places(self) -> Mapping[Any, Any]:
        kind = type(self.value)
        if is_users(module_of(definer(kind, "state_dict"))) or not is_users(module_of(kind)):
            return {}
        theirs = optimizers.stored_by(kind, lambda base: not is_users(module_of(base)))
        return {n: value for n, value in attributes_of(self.value).items() if n not in theirs}

    def may_have(self, key: Any) -> bool:
        kind = type(self.value)
        if is_users(module_of(definer(kind, "state_dict"))) or not is_users(module_of(kind)):
            return False
        theirs = optimizers.stored_by(kind, lambda base: not is_users(module_of(base)))
        return super().may_have(key) and key not in theirs


class LoaderNode(Node):
    """A loader: its parts."""

    def places(self) -> Mapping[Any, Any]:
        return {name: getattr(self.value, name, None) for name in _PARTS}

    def may_have(self, key: Any) -> bool:
        return key in _PARTS


class CellsNode(Node):
    """A collate function: the variables that it shares with the function that has made it."""

    def places(self) -> Mapping[Any, Any]:
        return cells_of(self.value)

    def put(self, key: Any, value: Any) -> None:
        number = self.value.__code__.co_freevars.index(key)
        self.value.__closure__[number].cell_contents = value

    def may_have(self, key: Any) -> bool:
        return key in self.places()


def cells_of(function: Any) -> dict[str, Any]:
    """Returns the variables that a function shares with the function that has made it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                found[name] = cell.cell_contents
            except ValueError:  # it is empty
                found[name] = None
    return found


def _may_hold_objects(items: Sequence[Any]) -> bool:
    """Returns whether a long list may hold objects beside numbers and texts."""
    if len(items) < MANY:
        return True
    some = (items[0], items[len(items) // 2], items[-1])
    kinds = (*ATOMS, tuple, *LEAVES, list, dict, np.generic)
    return not any(isinstance(item, kinds) for item in some)


def _dict_of(value: Any) -> Any:
    """Returns the class whose methods change a dict; a subclass of the user's may have others."""
    return OrderedDict if isinstance(value, OrderedDict) else dict
