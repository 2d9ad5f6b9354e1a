"""The one walk over what an experiment holds: which objects have places, by path.

It goes from the attributes of the experiment through layers, optimizers, schedules, objects of any
class, a loader's data set, samplers and collate function (its cells, too), and the items of lists
and dicts. A node is what has places: attributes, items, cells; or it is changed as a whole: a list,
an array, a generator. Each has one path, that of the first way to it, and another start finds it
there. Breadth first, each object once, at most MOST of them.

Not walked are the template's own objects, most of paddle's, what talks to the world (files,
threads, locks, loggers, and what holds one, as progress bars do), code, and long lists of data.

    walk = Walk(experiment, attributes, excluded=["judge"])
    walk.nodes["meter"].places()         # {"sum": 1.5, "count": 3}
    walk.nodes["meter"].put("count", 4)
"""

from __future__ import annotations

import array
import contextlib
import datetime
import enum
import functools
import gc
import io
import logging
import re
import socket
import sys
import threading
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.io import DataLoader
from paddle.nn import Layer
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.base.encoding import Names, attributes_of, class_name, set_attribute
from expbase.base.generators import GENERATORS, generator_state, set_generator_state
from expbase.state import optimizers

MOST = 20_000  # nodes
MANY = 1000  # items: of data, and each may be one of millions
WHOLE: Any = object()  # the one place of what is changed as a whole
LOADERS = ("train_loader", "valid_loader", "test_loader")
_ATOMS = {type(None), bool, int, float, complex, str, bytes, range, slice}
# What holds nothing that changes, whatever its class is derived from.
_CONSTANT: Any = (str, int, float, complex, bytes, enum.Enum, np.generic, np.dtype, Decimal)
_CONSTANT += (Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
_CONSTANT += (PurePath, uuid.UUID)
_LEAVES: Any = (paddle.Tensor, np.ndarray, bytearray, array.array, *GENERATORS)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
CODE: Any = (type, types.ModuleType, *_FUNCTIONS, classmethod, staticmethod, property)
_LOCKS = type(threading.Lock()), type(threading.RLock())
# What talks to the world, and is no state.
WORLD: Any = (io.IOBase, threading.Thread, *_LOCKS, socket.socket, logging.Logger, logging.Handler)
WORLD += (threading.local, np.memmap)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque, np.ndarray)
_HANDLES = (io.IOBase, threading.Thread, socket.socket)
# Modules whose objects have values that a user changes, by training or by hand.
_PARTLY = {
    "paddle": ("io", "metric", "vision.transforms", "regularizer", "nn.clip", "audio", "amp"),
    "expbase": ("extras",),
}
# Of Python's own what is no state, beside what holds a lock or a file.
_NOT_OF_PYTHON = {"asyncio", "concurrent", "contextlib", "functools", "importlib", "inspect"}
_NOT_OF_PYTHON |= {"logging", "multiprocessing", "subprocess", "threading", "traceback", "typing"}
_NOT_OF_PYTHON |= {"unittest", "warnings"}
_PARTS = ("dataset", "batch_sampler", "collate_fn", "worker_init_fn")  # of a loader
# Attributes of each layer, and of an RNN, which has its parameters as one array, too; but the mode
# of a layer is its user's.
_OF_LAYERS = {*Layer.__init__.__code__.co_names, "_flat_weight"} - {"training"}
_OF_LAYERS |= {"_data_format"}  # which BatchNorm1D and BatchNorm3D set in their first forward
_FLEET = "paddle.distributed.fleet.meta_parallel."  # the modules of what it wraps round a layer
_GROUPS = "groups."  # what the keys of an optimizer's groups begin with
_AUTOMATIC = re.compile(r"\w+_\d+\.\w+")  # paddle's names of parameters: "linear_0.w_0"
_WORDS = ("None", "True", "False")  # that other keys are written like
_SMALLEST_ID = 1 << 20


class Node:
    """An object that has places: its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def places(self) -> Mapping[Any, Any]:
        """Returns what stands in each place, by its key."""
        return attributes_of(self.value)

    def child(self, key: Any) -> Any:
        """Returns what `children` yields by a key; None if there is none any more."""
        return next((value for name, value in self.children() if name == key), None)

    def put(self, key: Any, value: Any) -> None:
        """Puts a value into a place; no code of the user's is called."""
        set_attribute(self.value, key, value)

    def remove(self, key: Any) -> None:
        """Takes a place away."""
        if key in self.places():
            object.__delattr__(self.value, key)

    def children(self) -> Iterator[tuple[Any, Any]]:
        """Yields what one comes to from here, by key."""
        yield from self.places().items()


class WholeNode(Node):
    """What is changed as a whole: a list, a set, an array, a tensor, a generator."""

    def places(self) -> Mapping[Any, Any]:
        return {WHOLE: self.value}

    def put(self, key: Any, value: Any) -> None:
        """Gives the thing what another one of its class holds; two names of it stay one."""
        thing = self.value
        if isinstance(thing, paddle.Tensor):
            thing.copy_(value, True)
            thing.stop_gradient = value.stop_gradient
            thing.grad = value.grad  # None is another thing than zeros
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

    def children(self) -> Iterator[tuple[Any, Any]]:
        items = self.value
        if isinstance(items, (list, deque)) and _may_hold_objects(items):
            yield from enumerate(items)


class DictNode(Node):
    """A dict, whose items are places; one with many items is changed as a whole."""

    def places(self) -> Mapping[Any, Any]:
        items: dict[Any, Any] = self.value
        return items if len(items) < MANY else {WHOLE: items}

    def put(self, key: Any, value: Any) -> None:
        if key is WHOLE and isinstance(value, dict) and len(value) >= MANY:
            WholeNode(self.value).put(key, value)
        else:
            _dict_of(self.value).__setitem__(self.value, key, value)

    def remove(self, key: Any) -> None:
        _dict_of(self.value).pop(self.value, key, None)

    def children(self) -> Iterator[tuple[Any, Any]]:
        if len(self.value) < MANY or _may_hold_objects([*self.value.values()]):
            yield from self.value.items()

    def order(self, keys: Sequence[Any]) -> None:
        """Brings the items into an order, and takes away what is not in it."""
        base = _dict_of(self.value)
        items = {key: self.value[key] for key in keys if key in self.value}
        base.clear(self.value)
        for key, item in items.items():
            base.__setitem__(self.value, key, item)


class LayerNode(Node):
    """A layer: what its class or its user has set on it, and buffers that no checkpoint has."""

    def places(self) -> Mapping[Any, Any]:
        layer = self.value
        own = {name: value for name, value in vars(layer).items() if name not in _OF_LAYERS}
        passing = layer._non_persistable_buffer_names_set
        own |= {name: value for name, value in layer._buffers.items() if name in passing}
        forward = own.get("forward")
        if isinstance(forward, types.MethodType) and forward.__self__ is layer:
            del own["forward"]  # which to_static has set
        return own

    def has_with_weights(self, key: Any) -> bool:
        """Returns whether it is a buffer that is saved beside the parameters."""
        layer = self.value
        return key in layer._buffers and key not in layer._non_persistable_buffer_names_set

    def put(self, key: Any, value: Any) -> None:
        layer = self.value
        self.remove(key)
        if isinstance(value, paddle.Tensor):  # of which paddle makes a buffer, too
            layer._non_persistable_buffer_names_set.add(key)
            layer._buffers[key] = value
        else:
            vars(layer)[key] = value

    def remove(self, key: Any) -> None:
        vars(self.value).pop(key, None)
        self.value._buffers.pop(key, None)

    def children(self) -> Iterator[tuple[Any, Any]]:
        yield from _inside_layer(self.value)
        yield from self.places().items()


def _inside_layer(layer: Any) -> Iterator[tuple[str, Any]]:
    for by_name in (layer._sub_layers, layer._parameters, layer._buffers):
        yield from by_name.items()


class ParameterNode(Node):
    """A parameter: what is set on it beside what is trained."""

    def places(self) -> Mapping[Any, Any]:
        return {name: getattr(self.value, name) for name in ("stop_gradient", "optimize_attr")}

    def put(self, key: Any, value: Any) -> None:
        setattr(self.value, key, value)

    def children(self) -> Iterator[tuple[Any, Any]]:
        return iter(())


class OptimizerNode(Node):
    """An optimizer: its settings, and what its class adds to paddle's."""

    def places(self) -> Mapping[Any, Any]:
        return optimizers.settings(self.value)

    def put(self, key: Any, value: Any) -> None:
        optimizers.set_setting(self.value, key, value)

    def children(self) -> Iterator[tuple[Any, Any]]:
        groups = enumerate(optimizers.groups(self.value))
        yield from ((f"{_GROUPS}{number}", group) for number, group in groups)
        yield from self.places().items()


class GroupNode(Node):
    """A group of an optimizer's parameters: its settings."""

    def places(self) -> Mapping[Any, Any]:
        return {name: value for name, value in self.value.items() if name != "params"}

    def put(self, key: Any, value: Any) -> None:
        self.value[key] = value

    def remove(self, key: Any) -> None:
        self.value.pop(key, None)


class ScheduleNode(Node):
    """A learning rate schedule: all that it has but an automatic name of paddle's."""

    def places(self) -> Mapping[Any, Any]:
        return {name: v for name, v in attributes_of(self.value).items() if name != "_var_name"}


class StatefulNode(Node):
    """An object that is asked for its state; of a class derived from a package's, what that class
    adds.
    """

    def places(self) -> Mapping[Any, Any]:
        kind = type(self.value)
        if is_users(_definer(kind, "state_dict").__module__) or not is_users(kind.__module__):
            return {}
        theirs = optimizers.stored_by(kind, lambda base: not is_users(base.__module__))
        return {n: value for n, value in attributes_of(self.value).items() if n not in theirs}


class LoaderNode(Node):
    """A loader: its parts."""

    def places(self) -> Mapping[Any, Any]:
        return {name: getattr(self.value, name, None) for name in _PARTS}


class CellsNode(Node):
    """A function that collates: the variables that it shares with the one that has made it."""

    def places(self) -> Mapping[Any, Any]:
        return cells_of(self.value)

    def put(self, key: Any, value: Any) -> None:
        number = self.value.__code__.co_freevars.index(key)
        self.value.__closure__[number].cell_contents = value


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Makes many small objects without a search for garbage among all objects of the program."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Walk:
    """What was reached from an experiment, by path.

    Args:
        root: The experiment.
        attributes: Those of its attributes that are its user's, and its loaders.
        excluded: Values by the paths by which they are no state.
    """

    def __init__(
        self,
        root: Any,
        attributes: Mapping[str, Any],
        excluded: Mapping[str, Any] | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {"": Node(root)}
        self.layers: dict[str, Any] = {}  # that stand in no other layer
        self.left_out: dict[str, Any] = {}  # layers, optimizers and others that are excluded
        self.wrappers: dict[int, Any] = {}  # of layers, by id
        self.wrapped: dict[str, Any] = {}  # what steps an optimizer that stands in it
        self.found_at: dict[str, tuple[Node, Any]] = {}  # where what has a form of its own stands
        self.classes: dict[str, type] = {}
        self.closed: dict[str, Any] = {}  # what has no places: code, files, iterators
        self.is_whole = True  # whether it ended before MOST
        self.paths: dict[int, str] = {}  # by id
        self.automatic: dict[str, str] = {}  # of parameters: paths by paddle's names
        self._roots: set[int] = set()  # ids of layers that are noted, or left out
        self._plain: set[type] = set()  # classes whose objects are their attributes
        self.alive: list[Any] = []  # so that no id is used again
        self._worldly: dict[tuple[int, int], bool] = {}
        self._queue: deque[tuple[str, Any, Node, Any]] = deque()
        self._later: deque[tuple[str, Node]] = deque()  # dicts whose keys need what comes before
        self._note("", root)
        for path, value in (excluded or {}).items():
            self._leave_out(path, unwrap(value))
        self.enter((name, v, self.nodes[""], name) for name, v in attributes.items())

    def names(self) -> WalkedNames:
        """Returns by which names another start finds what was reached."""
        return WalkedNames(self)

    def enter(self, ways: Iterable[tuple[str, Any, Node, Any]]) -> None:
        """Goes on from objects, each with its path, and the node and key where it stands."""
        self._queue.extend(ways)
        with no_garbage_collection():
            while (self._queue or self._later) and self.is_whole:
                if self._queue:
                    self._visit(*self._queue.popleft())
                else:
                    self._enter(*self._later.popleft())
                self.is_whole = len(self.nodes) <= MOST

    def _visit(self, path: str, value: Any, parent: Node, key: Any) -> None:
        kind = type(value)
        if kind not in self._plain and isinstance(value, Layer):
            if _wrapped(value) is not None:
                self.wrappers[id(value)] = value
                value = unwrap(value)
            if not isinstance(parent, LayerNode):
                self._note_root(path, value, parent, key)
        if id(value) in self.paths or kind in _ATOMS:
            return
        if kind in self._plain:  # as most are of many
            path = self._free(path)
            self._note(path, value)
            self.nodes[path] = node = Node(value)
            for name, item in attributes_of(value).items():
                if type(item) not in _ATOMS:
                    self._queue.append((self.path_of(path, name), item, node, name))
            return
        self.classes.setdefault(class_name(kind), kind)
        if not isinstance(value, _CONSTANT):
            self._meet(path, value, parent, key)

    def _note_root(self, path: str, layer: Any, parent: Node, key: Any) -> None:
        if id(layer) not in self._roots:
            self._roots.add(id(layer))
            while path in self.layers:  # as the node gets it
                path += "'"
            self.layers[path] = layer
            self.found_at[path] = (parent, key)

    def _meet(self, path: str, value: Any, parent: Node, key: Any) -> None:
        """Notes an object that was met for the first time, and what is reached from it."""
        if isinstance(value, (tuple, frozenset)):
            self._note(path, value)
            if isinstance(value, tuple) and len(value) < MANY:
                self._extend(path, parent, enumerate(value))
            return
        if isinstance(value, types.MethodType):
            self._extend(path, parent, [("__self__", value.__self__)])
            if self._sees_function(path):
                self._queue.append((path, value.__func__, parent, None))
            return
        if isinstance(value, functools.partial):
            inner = {"args": value.args, "keywords": value.keywords, "func": value.func}
            self._note(path, value)
            return self._extend(path, parent, inner.items())
        if isinstance(value, type):
            self.classes.setdefault(class_name(value), value)
        if isinstance(value, weakref.ref):
            self._note(path, value)
            return self._extend(path, parent, [("()", value())])
        if isinstance(parent, LayerNode) and parent.has_with_weights(key):
            return self._note(path, value)  # a checkpoint has it
        node = self._node_of(path, value)
        if isinstance(parent, OptimizerNode) and str(key).startswith(_GROUPS):
            node = GroupNode(value)
        path = self._free(path)
        if node is None:
            self.closed[path] = value
            return self._note(path, value)
        self._note(path, value)
        if isinstance(node, OptimizerNode) and node.value is not value:
            if (known := self.paths.get(id(node.value))) is not None:  # it was met before
                self.wrapped[known] = value
                return
            self._note(path, node.value)
            self.wrapped[path] = value
        self.nodes[path] = node
        if isinstance(node, (OptimizerNode, ScheduleNode, StatefulNode)) or (
            isinstance(node, ParameterNode) and not isinstance(parent, LayerNode)
        ):
            self.found_at[path] = (parent, key)
        if isinstance(node, ParameterNode):
            self.automatic.setdefault(value.name, path)
        elif isinstance(node, DictNode) and any(map(_is_of_process, node.places())):
            self._later.append((path, node))
        elif not isinstance(value, _LEAVES) or getattr(value, "__dict__", None):
            self._enter(path, node)

    def _enter(self, path: str, node: Node) -> None:
        is_dotted = isinstance(node, (LayerNode, OptimizerNode))  # whose keys may be paths
        for key, value in node.children():
            if type(value) not in _ATOMS:
                where = f"{path}.{key}" if is_dotted else self.path_of(path, key)
                self._queue.append((where, value, node, key))
        if type(node) is Node:
            return
        if isinstance(node, DictNode):  # a key that is an object: another start has it, too
            for number, key in enumerate(node.places()):
                if type(key) not in _ATOMS and key is not WHOLE:
                    self._queue.append((f"{path}.key {number}", key, node, None))
        is_collection = isinstance(node, (DictNode, WholeNode))
        own = getattr(node.value, "__dict__", None) if is_collection else None
        if own and own is not node.value:  # of a user's class that is derived from one of Python's
            self._queue.append((f"{path}.__dict__", own, node, None))

    def _extend(self, path: str, parent: Node, items: Any) -> None:
        for key, value in items:
            if type(value) not in _ATOMS:
                self._queue.append((self.path_of(path, key), value, parent, None))

    def _sees_function(self, path: str) -> bool:
        """Returns whether the cells of a function are places."""
        return _is_collate(path)

    def path_of(self, path: str, key: Any) -> str:
        """Returns the path of a place; a key that is a parameter, its id or its automatic name is
        its path. What a thing holds as a whole is another place than the one where it stands.
        """
        if key is WHOLE:
            return f"{path}[:]"
        if type(key) is str:
            key = self.automatic.get(key, key)
            is_word = "." not in key and not key.isdigit() and key not in _WORDS
            text = key if is_word else f"<{key}>" if key in self.nodes else repr(key)
        elif type(key) is int and key < _SMALLEST_ID:
            text = str(key)
        else:
            known = self.paths.get(key if type(key) is int else id(key))
            text = repr(key) if known is None else f"<{known}>"
            if " at 0x" in text:
                text = f"<a {type(key).__name__}>"
        return f"{path}.{text}" if path else text

    def _free(self, path: str) -> str:
        while path in self.nodes or path in self.closed:
            path += "'"
        return path

    def _note(self, path: str, value: Any) -> None:
        self.paths[id(value)] = path
        self.alive.append(value)

    def _leave_out(self, path: str, value: Any) -> None:
        if type(value) in _ATOMS or id(value) in self.paths:
            return
        self._note(path, value)
        if isinstance(value, (list, tuple, dict, deque)) and len(value) < MANY:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                self._leave_out(self.path_of(path, key), unwrap(item))
        elif isinstance(value, (Layer, EagerParamBase)) or optimizers.is_optimizer(value):
            self.left_out[path] = value
            self._roots.add(id(value))
            self._note(path, optimizers.innermost(value))

    def _node_of(self, path: str, value: Any) -> Node | None:
        """Returns what has the places of an object; None if it has none."""
        if isinstance(value, Layer):
            return LayerNode(value)
        if isinstance(value, EagerParamBase):
            return ParameterNode(value)
        if isinstance(value, np.memmap):  # a file
            return None
        if isinstance(value, (*_LEAVES, list, set, deque)):
            return WholeNode(value)
        if isinstance(value, dict):
            return DictNode(value)
        if isinstance(value, LRScheduler):
            return (StatefulNode if asks(value) else ScheduleNode)(value)
        if optimizers.is_optimizer(value):
            return OptimizerNode(optimizers.innermost(value))
        if isinstance(value, types.FunctionType):
            return CellsNode(value) if _is_collate(path) and value.__closure__ else None
        if isinstance(value, DataLoader):
            return LoaderNode(value)
        if isinstance(value, (*CODE, *WORLD)):
            return None
        if asks(value):
            # Of what deals out a loader's data the position has the state.
            is_of_data = path.startswith(LOADERS) and ".dataset" not in path
            return None if is_of_data else StatefulNode(value)
        if not self._is_open(value):
            return None
        if is_users(type(value).__module__):
            self._plain.add(type(value))
        return Node(value)

    def _is_open(self, value: Any) -> bool:
        """Returns whether the attributes of an object are places."""
        kind = type(value)
        if not has_attributes(value) or _is_memory(value):
            return False
        if is_users(kind.__module__):
            return True
        root, _, module = kind.__module__.partition(".")
        if hasattr(value, "__next__"):
            return False
        if root in _NOT_OF_PYTHON:
            return False
        if root == "queue":  # which has locks
            return True
        if root in _PARTLY and not module.startswith(_PARTLY[root]):
            return False
        return not self._is_of_the_world(value, 3)

    def _is_of_the_world(self, value: Any, depth: int) -> bool:
        """Returns whether an object of an installed package holds a file, a thread or a lock."""
        known = self._worldly.get((id(value), depth))
        if known is None:
            self.alive.append(value)
            self._worldly[id(value), depth] = False  # until it is known: objects hold each other
            items = [*attributes_of(value).values()] if has_attributes(value) else []
            if isinstance(value, types.FunctionType):
                items += cells_of(value).values()
            known = self._worldly[id(value), depth] = any(
                isinstance(item, WORLD) or (depth > 0 and self._is_of_the_world(item, depth - 1))
                for item in items
                if type(item) not in _ATOMS and not isinstance(item, (type, Layer, *_LEAVES))
                if not isinstance(item, types.ModuleType)
            )
        return known


class WalkedNames(Names):
    """By which names another start finds what was reached; nothing is kept alive that can be
    watched.
    """

    def __init__(self, walk: Walk) -> None:
        self._refs: dict[str, Callable[[], Any]] = {}
        self._paths: dict[int, str] = {}
        for value in walk.alive:
            path = walk.paths.get(id(value))
            if path is not None and path not in self._refs:
                self._refs[path] = _reference(value)
                self._paths[id(value)] = path
        self._automatic = {name: walk.nodes[path].value for name, path in walk.automatic.items()}
        self._classes = walk.classes
        self._closed = {*walk.closed}

    def has(self, name: str) -> bool:
        """Returns whether something had this name, even if it is gone."""
        return name in self._refs

    def is_closed(self, value: Any) -> bool:
        """Returns whether it has a name, and no places: a file, say."""
        return self.name_of(value) in self._closed

    def name_of(self, value: Any) -> str | None:
        path = self._paths.get(id(value))
        return path if path is not None and self._refs[path]() is value else None

    def get(self, name: str) -> Any:
        found = self._refs.get(name)
        return None if found is None else found()

    def key_of(self, key: Any) -> Any:
        if type(key) is str and key in self._automatic:
            return ["name", self.name_of(self._automatic[key])]
        if type(key) is int and key >= _SMALLEST_ID and key in self._paths:
            found = self.get(self._paths[key])
            return ["id", self._paths[key]] if isinstance(found, EagerParamBase) else None
        return None

    def key(self, content: Any) -> Any:
        how, path = content
        parameter = self.get(path)
        return parameter.name if how == "name" else id(parameter)

    def class_named(self, name: str) -> type | None:
        return self._classes.get(name) or super().class_named(name)


class _InLayers(Walk):
    """What stands in layers, and in collections there; no objects."""

    def _is_open(self, value: Any) -> bool:
        return False


def nodes_in_layers(layers: Iterable[Any]) -> list[Node]:
    """Returns what a forward may change: what is set on layers, and their buffers."""
    walk = _InLayers(None, {str(number): layer for number, layer in enumerate(layers)})
    found = [node for path, node in walk.nodes.items() if path]
    buffers = [node.value._buffers for node in found if isinstance(node, LayerNode)]
    tensors = [tensor for by_name in buffers for tensor in by_name.values() if tensor is not None]
    # Buffers first: what is none any more goes back among the attributes.
    return [*map(DictNode, buffers), *map(WholeNode, tensors), *found]


def _reference(value: Any) -> Callable[[], Any]:
    # A thing that is replaced should not keep its memory; a list cannot be watched like that.
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def cells_of(function: Any) -> dict[str, Any]:
    """Returns the variables that a function shares with the one that has made it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                found[name] = cell.cell_contents
            except ValueError:  # it is empty
                found[name] = None
    return found


def has_attributes(value: Any) -> bool:
    """Returns whether an object may have attributes that Python can set."""
    return hasattr(value, "__dict__") or bool(type(value).__dict__.get("__slots__"))


def state_setter(candidate: Any) -> Any:
    """Returns the method that loads a state, by either of its names; None if there is no state to
    save.
    """
    kind = type(candidate)  # an object itself may answer to any name
    if not hasattr(kind, "state_dict"):
        return None
    names = [name for name in ("set_state_dict", "load_state_dict") if hasattr(kind, name)]
    return getattr(candidate, names[0]) if names else None


def asks(value: Any) -> bool:
    """Returns whether an object is asked for its state: one with `state_dict`, of a class that
    writes it; paddle's schedules and optimizers are walked.
    """
    if isinstance(value, (type, Layer)) or state_setter(value) is None:
        return False
    if isinstance(value, (LRScheduler, Optimizer)):
        return is_users(_definer(type(value), "state_dict").__module__)
    return True


def _definer(kind: type, name: str) -> type:
    """Returns the class of which a method is inherited."""
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def unwrap(layer: Any) -> Any:
    """Returns the user's layer in a DataParallel or a wrapper of fleet's; others as they are."""
    while (inner := _wrapped(layer)) is not None:
        layer = inner
    return layer


def _wrapped(layer: Any) -> Any:
    if not isinstance(layer, Layer):
        return None
    fleets = type(layer).__module__.startswith(_FLEET)
    inside = layer._sub_layers if fleets or isinstance(layer, paddle.DataParallel) else {}
    return inside.get("_layers", inside.get("_layer"))  # fleet's own layers have neither name


@functools.cache
def is_users(module: str) -> bool:
    """Returns whether a module is the user's own, of no distribution, and has a file."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    root = module.partition(".")[0]
    if not file or root in (*sys.stdlib_module_names, "expbase", "paddle"):
        return module == "__main__"  # of a notebook, say
    top = Path(file).absolute()
    top = top.parent if top.name == "__init__.py" else top
    for _ in module.split(".")[1:]:
        top = top.parent
    return top.stem not in _installed_in(str(top.parent))


@functools.cache
def _installed_in(folder: str) -> Any:
    """Returns the names of the modules in a folder that belong to distributions."""
    if folder.endswith("-packages"):
        return _Everything()
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        lines = record.read_text(errors="replace").splitlines()
        found |= {re.split(r"[/.,]", line, maxsplit=1)[0] for line in lines}
    return found


class _Everything:
    def __contains__(self, name: str) -> bool:
        return True


def _is_collate(path: str) -> bool:
    part = path.partition(".")[2]
    return path.startswith(LOADERS) and part.startswith(("collate_fn", "worker_init_fn"))


def is_written(value: Any) -> bool:
    """Returns whether it is a file that is not read, or closed, or talks to the world otherwise, as
    progress bars and clients do.
    """
    if isinstance(value, io.IOBase):
        return value.closed or not value.readable()
    return isinstance(value, WORLD) or (not hasattr(value, "__next__") and holds_handle(value))


def is_handle(value: Any) -> bool:
    """Returns whether it stands for something outside of the program that can be opened again: a
    file, a socket, a data base, a progress bar or a client that holds one.
    """
    if isinstance(value, (io.BytesIO, io.StringIO, *CODE)):
        return False
    if isinstance(value, (*WORLD, weakref.ref)):
        return True
    if hasattr(value, "__next__") or isinstance(value, (*_COLLECTIONS, BaseException)):
        return False
    is_of_c = not has_attributes(value) and not is_users(type(value).__module__)
    return is_of_c or holds_handle(value, 2)


def holds_handle(value: Any, depth: int = 0) -> bool:
    """Returns whether an object has a file, a socket or a thread; many have a lock."""
    items = attributes_of(value).values() if has_attributes(value) else ()
    return any(
        isinstance(item, _HANDLES) or (depth > 0 and holds_handle(item, depth - 1))
        for item in items
        if type(item) not in _ATOMS and not isinstance(item, (*CODE, Layer))
    )


def _may_hold_objects(items: Sequence[Any]) -> bool:
    """Returns whether a long list may hold more than data."""
    if len(items) < MANY:
        return True
    some = (items[0], items[len(items) // 2], items[-1])
    kinds = (*_ATOMS, tuple, *_LEAVES, list, dict, np.generic)
    return not any(isinstance(item, kinds) for item in some)


def _is_of_process(key: Any) -> bool:
    """Returns whether a key may mean nothing in another process: a parameter, its id or name."""
    if type(key) is int:
        return key >= _SMALLEST_ID
    return isinstance(key, paddle.Tensor) or (type(key) is str and bool(_AUTOMATIC.match(key)))


def _is_memory(value: Any) -> bool:
    """Returns whether an object is a piece of memory: a number of C, say."""
    try:
        return memoryview(value) is not None
    except TypeError:
        return False


def _dict_of(value: Any) -> Any:
    """Returns the class whose methods change a dict; a subclass of the user's may have others."""
    return OrderedDict if isinstance(value, OrderedDict) else dict
