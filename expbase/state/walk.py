"""The one walk over what an experiment holds: which objects have places, by path.

It goes from the attributes of the experiment through layers, optimizers, schedules, objects of any
class, a loader's data set, samplers and collate function (its cells, too), and the items of lists
and dicts. A node is what has places: attributes, items, cells; or it is changed as a whole: a list,
an array, a generator. Each has one path, that of the first way to it, and another start finds it
there. Breadth first, each object once, at most MOST of them.

Not walked are the template's own objects, most of paddle's, what talks to the world (files,
threads, locks, loggers, connections, iterators), code, and long lists of data. What holds such a
thing is walked: the attribute that leads to it is closed, and numbers beside it are state.

    walk = Walk(experiment, attributes, {"judge": judge})
    walk.nodes["meter"].places()         # {"sum": 1.5, "count": 3}
    walk.nodes["meter"].put("count", 4)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.base.framework import EagerParamBase
from paddle.io import DataLoader
from paddle.nn import Layer
from paddle.optimizer.lr import LRScheduler

from expbase.base import rng
from expbase.base.any_object import attributes_of, class_name, has_attributes, module_of
from expbase.base.json_values import Names
from expbase.state import optimizers
from expbase.state.value_kinds import (
    ATOMS,
    CODE,
    CONSTANT,
    LEAVES,
    WORLD,
    asks,
    is_memory,
    is_users,
)
from expbase.state.value_places import (
    GROUPS,
    MANY,
    WHOLE,
    CellsNode,
    DictNode,
    GroupNode,
    LayerNode,
    LoaderNode,
    Node,
    OptimizerNode,
    ParameterNode,
    ScheduleNode,
    SeededNode,
    StatefulNode,
    WholeNode,
    cells_of,
)

MOST = 20_000  # nodes
LOADERS = ("train_loader", "valid_loader", "test_loader")
# Modules whose objects have values that a user changes, by training or by hand.
_PARTLY = {
    "paddle": ("io", "metric", "vision.transforms", "regularizer", "nn.clip", "audio", "amp"),
    "expbase": ("extras",),
}
# Of Python's own what is no state, beside what holds a lock or a file.
_NOT_OF_PYTHON = {"asyncio", "concurrent", "contextlib", "functools", "importlib", "inspect"}
_NOT_OF_PYTHON |= {"logging", "multiprocessing", "subprocess", "threading", "traceback", "typing"}
_NOT_OF_PYTHON |= {"unittest", "warnings"}
_OFTEN = (EagerParamBase, Layer, dict, list)  # as a model has them
# What another start has under the same path, whichever object it is: its class is compared.
_BY_PATH = (LayerNode, ParameterNode, OptimizerNode, ScheduleNode, StatefulNode)
_PASSED = (tuple, frozenset, types.MethodType, functools.partial, weakref.ref)
_FLEET = "paddle.distributed.fleet.meta_parallel."  # the modules of what it wraps round a layer
_AUTOMATIC = re.compile(r"\w+_\d+\.\w+")  # paddle's names of parameters: "linear_0.w_0"
# Those, and of other tensors: "generated_tensor_3", "eager_tmp_0".
AUTOMATIC = re.compile(r"\w+_\d+(\.\w+)?")
_WORDS = ("None", "True", "False")  # that other keys are written like
_SMALLEST_ID = 1 << 20
_WRAPPED = " in its wrapper"  # behind the name of the layer


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
    """All objects that an experiment leads to, by path.

    Args:
        root: The experiment.
        attributes: Those of its attributes that are its user's, and its loaders.
        excluded: The excluded values, by path.
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
        self.updated: dict[int, Any] = {}  # parameters of optimizers, by id
        self.reporting: list[str] = []  # the beginnings of paths in progress bars and clients
        self._num_objects = 1  # without parameters
        self.paths: dict[int, str] = {}  # by id
        self.automatic: dict[str, str] = {}  # of parameters: paths by paddle's names
        self._roots: set[int] = set()  # ids of layers that are noted, or left out
        self._plain: set[type] = set()  # classes whose objects are their attributes
        self.alive: list[Any] = []  # so that no id is used again
        self._worldly: dict[tuple[int, int], bool] = {}  # by id, and by the depth of the look
        self._queue: deque[tuple[str, Any, Node, Any]] = deque()
        self._later: deque[tuple[str, Node]] = deque()  # dicts whose keys need what comes before
        self._note("", root)
        for path, value in (excluded or {}).items():
            self._leave_out(path, unwrap(value))
        self.enter((name, v, self.nodes[""], name) for name, v in attributes.items())

    def has(self, value: Any) -> bool:
        """Returns whether an object is used: somewhere, or by an optimizer."""
        return id(value) in self.paths or id(value) in self.updated

    def names(self) -> WalkedNames:
        """Returns the names by which another start finds the same objects."""
        return WalkedNames(self)

    def enter(self, ways: Iterable[tuple[str, Any, Node, Any]]) -> None:
        """Walks on from objects; each comes with its path, its node and its key."""
        self._queue.extend(ways)
        with no_garbage_collection():
            while (self._queue or self._later) and self.is_whole:
                if self._queue:
                    self._visit(*self._queue.popleft())
                else:
                    self._enter(*self._later.popleft())
                self.is_whole = self._num_objects <= MOST

    def _visit(self, path: str, value: Any, parent: Node, key: Any) -> None:
        kind = type(value)
        if kind not in self._plain and isinstance(value, Layer):
            if _wrapped(value) is not None:
                self.wrappers[id(value)] = value
                value = unwrap(value)
            if not isinstance(parent, LayerNode):
                self._note_root(path, value, parent, key)
        if id(value) in self.paths or kind in ATOMS:
            return
        if kind in self._plain:  # as most are of many
            path = self._free(path)
            self._note(path, value)
            self.nodes[path] = node = Node(value)
            self._num_objects += 1
            return self._enter_attributes(path, node)
        self.classes.setdefault(class_name(kind), kind)
        if not isinstance(value, CONSTANT):
            self._meet(path, value, parent, key)

    def _note_root(self, path: str, layer: Any, parent: Node, key: Any) -> None:
        if id(layer) not in self._roots:
            self._roots.add(id(layer))
            while path in self.layers:  # as the node gets it
                path += "'"
            self.layers[path] = layer
            self.found_at[path] = (parent, key)

    def _meet(self, path: str, value: Any, parent: Node, key: Any) -> None:
        """Notes an object that is met for the first time, and the objects that it leads to."""
        if not isinstance(value, _OFTEN) and isinstance(value, _PASSED):
            return self._pass_through(path, value, parent)
        if isinstance(parent, LayerNode) and parent.has_with_weights(key):
            self._note(path, value)  # a checkpoint has it
            if attributes_of(value):
                self.nodes[path] = Node(value)
                self._enter_attributes(path, self.nodes[path])
            return
        if isinstance(value, type):
            self.classes.setdefault(class_name(value), value)
        node = self._node_of(path, value)
        if isinstance(parent, OptimizerNode) and str(key).startswith(GROUPS):
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
        self._num_objects += not isinstance(node, ParameterNode)  # of which there are many
        if isinstance(node, (OptimizerNode, ScheduleNode, StatefulNode)) or (
            isinstance(node, ParameterNode) and not isinstance(parent, LayerNode)
        ):
            self.found_at[path] = (parent, key)
        if isinstance(node, ParameterNode):
            self.automatic.setdefault(node.value.name, path)
            self._extend(path, node, node.children())
        elif isinstance(parent, (OptimizerNode, GroupNode)) and key in optimizers.LISTS:
            # Those of layers; one that stands in none any more is updated still.
            self.updated |= {id(parameter): parameter for parameter in value}
        elif isinstance(node, DictNode) and any(map(_is_of_process, node.places())):
            self._later.append((path, node))
        elif not isinstance(value, LEAVES) or getattr(value, "__dict__", None):
            self._enter(path, node)

    def _pass_through(self, path: str, value: Any, parent: Node) -> None:
        """Walks on through an object that has no places itself, such as a tuple."""
        if isinstance(value, types.MethodType):  # each time that it is asked for it is another one
            self._extend(path, parent, [("__self__", value.__self__)])
            if self._sees_function(path):
                self._queue.append((path, value.__func__, parent, None))
            return
        self._note(path, value)
        if isinstance(value, functools.partial):
            inner = {"args": value.args, "keywords": value.keywords, "func": value.func}
            self._extend(path, parent, inner.items())
        elif isinstance(value, weakref.ref):
            self._extend(path, parent, [("()", value())])
        elif isinstance(value, tuple) and len(value) < MANY:
            self._extend(path, parent, enumerate(value))

    def _enter_attributes(self, path: str, node: Node) -> None:
        for name, item in attributes_of(node.value).items():
            if type(item) not in ATOMS:
                self._queue.append((self.path_of(path, name), item, node, name))

    def _enter(self, path: str, node: Node) -> None:
        is_dotted = isinstance(node, (LayerNode, OptimizerNode))  # whose keys may be paths
        for key, value in node.children():
            if type(value) not in ATOMS:
                where = f"{path}.{key}" if is_dotted else self.path_of(path, key)
                self._queue.append((where, value, node, key))
        if type(node) is Node:
            return
        if isinstance(node, DictNode):  # a key that is an object: another start has it, too
            for number, key in enumerate(node.places()):
                if type(key) not in ATOMS and key is not WHOLE:
                    self._queue.append((f"{path}.key {number}", key, node, None))
        is_collection = isinstance(node, (DictNode, WholeNode))
        own = getattr(node.value, "__dict__", None) if is_collection else None
        if own and own is not node.value:  # of a user's class that is derived from one of Python's
            self._queue.append((f"{path}.__dict__", own, node, None))

    def _extend(self, path: str, parent: Node, items: Any) -> None:
        for key, value in items:
            if type(value) not in ATOMS:
                self._queue.append((self.path_of(path, key), value, parent, None))

    def _sees_function(self, path: str) -> bool:
        """Returns whether the cells of a function are places."""
        return _is_collate(path)

    def path_of(self, path: str, key: Any) -> str:
        """Returns the path of a place; a key that is a parameter, its id or its automatic name is
        written as that parameter's path. The content of an object as a whole ends in `[:]`.
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
        if type(value) in ATOMS or id(value) in self.paths:
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
        """Returns the node of an object; None if it has no places."""
        if isinstance(value, Layer):
            return LayerNode(value)
        if isinstance(value, EagerParamBase):
            return ParameterNode(value)
        if isinstance(value, np.memmap):  # a file
            return None
        if isinstance(value, core.Generator) and rng.is_seeded(value):
            return SeededNode(value)
        if isinstance(value, (*LEAVES, list, set, deque)):
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
        if is_users(module_of(type(value))):
            self._plain.add(type(value))
        elif self._is_of_the_world(value, 3):
            self.reporting.append(f"{path}.")
        return Node(value)

    def _is_open(self, value: Any) -> bool:
        """Returns whether the attributes of an object are places."""
        kind = type(value)
        if not has_attributes(value) or is_memory(value):
            return False
        if is_users(module_of(kind)):
            return True
        root, _, module = module_of(kind).partition(".")
        if hasattr(value, "__next__"):
            return False
        if root in _NOT_OF_PYTHON:
            return False
        if root == "queue":  # which has locks
            return True
        return root not in _PARTLY or module.startswith(_PARTLY[root])

    def _is_of_the_world(self, value: Any, depth: int) -> bool:
        """Returns whether an object of an installed package holds a file, a thread or a lock: it
        reports, as progress bars and clients do, and what it cannot save is worth no line.
        """
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
                if type(item) not in ATOMS and not isinstance(item, (type, Layer, *LEAVES))
                if not isinstance(item, types.ModuleType)
            )
        return known


class WalkedNames(Names):
    """The names by which another start finds the same objects; it keeps them alive only where
    they cannot be watched.

    An object has the name that it has at the end of setup, wherever it stands since then. What is
    made later in the place of a layer, an optimizer or the like, which is gone, gets its name.
    """

    def __init__(self, walk: Walk) -> None:
        self._refs: dict[str, Callable[[], Any]] = {}
        self._paths: dict[int, str] = {}
        for value in walk.alive:
            path = walk.paths.get(id(value))
            if path is not None and path not in self._refs:
                self._refs[path] = reference(value)
                self._paths[id(value)] = path
        self._slots = [  # that have their names as such: of which layer, under which key
            (reference(node.value), key, reference(buffer))
            for path, node in walk.nodes.items()
            if isinstance(node, LayerNode)
            for key, buffer in node.value._buffers.items()
            if self._paths.get(id(buffer)) == f"{path}.{key}" and node.has_with_weights(key)
        ]
        self._wrappers = {id(unwrap(w)): reference(w) for w in walk.wrappers.values()}  # by layers
        self._replaced: set[int] = set()  # ids of those that another tensor has taken the place of
        self._automatic = {name: walk.nodes[path].value for name, path in walk.automatic.items()}
        self._classes = walk.classes
        self._closed = {*walk.closed}
        self._anew: dict[int, str] = {}  # names of what a later walk has found in another's place
        self._made: dict[str, Any] = {}  # by name
        self._others: Mapping[int, str] = {}  # what else has a name

    def now(self, walk: Walk) -> WalkedNames:
        """Returns the same names in a later walk, with what was made anew since."""
        names = copy.copy(self)
        names._replaced = self._replaced_buffers()
        names._made = {
            path: node.value
            for path, node in walk.nodes.items()
            if isinstance(node, _BY_PATH) and path in self._refs
            if self.known(node.value) is None and not walk.has(self.get(path))
        }
        names._anew = {id(value): path for path, value in names._made.items()}
        return names

    def _replaced_buffers(self) -> set[int]:
        """Returns the ids of buffers that stand in their layer no more; their name is that of the
        tensor that does.
        """
        return {
            id(buffer)
            for layer, key, ref in self._slots
            if (buffer := ref()) is not None and (owner := layer()) is not None
            if owner._buffers.get(key) is not buffer
        }

    def and_others(self, paths: Mapping[int, str]) -> WalkedNames:
        """Returns these names, and those of what has none among them, by id."""
        names = copy.copy(self)
        names._others = paths
        return names

    def is_closed(self, value: Any) -> bool:
        """Returns whether an object has a name and no places: a file, say."""
        return self.name_of(value) in self._closed

    def known(self, value: Any) -> str | None:
        """Returns the name of an object that setup has made; None for any other one."""
        path = self._paths.get(id(value))
        found = None if path is None else self._refs[path]()
        # The node of a wrapper of fleet's is that of the optimizer in it.
        is_known = path is not None and (found is value or found is optimizers.innermost(value))
        return path if is_known and id(value) not in self._replaced else None

    def name_of(self, value: Any) -> str | None:
        path = self.known(value)
        if path is None:
            path = self._anew.get(id(value))
        if path is None and (layer := unwrap(value)) is not value:
            inner = self.known(layer) if self.wrapper_of(layer) is value else None
            path = None if inner is None else inner + _WRAPPED
        return self._others.get(id(value)) if path is None else path

    def wrapper_of(self, layer: Any) -> Any:
        """Returns the wrapper that setup has made of a layer; of one without it, the layer."""
        found = self._wrappers.get(id(layer))
        wrapper = None if found is None else found()
        return wrapper if unwrap(wrapper) is layer else layer

    def get(self, name: str) -> Any:
        if name.endswith(_WRAPPED):
            return self.wrapper_of(self.get(name.removesuffix(_WRAPPED)))
        if name in self._made:
            return self._made[name]
        found = self._refs.get(name)
        return None if found is None else found()

    def may_be_keys(self, keys: Mapping[Any, Any]) -> bool:
        known: Any = self._automatic if type(next(iter(keys))) is str else self._paths
        return not known.keys().isdisjoint(keys)

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
    """A walk over layers and the collections in them, but not over other objects."""

    def _node_of(self, path: str, value: Any) -> Node | None:
        node = super()._node_of(path, value)
        # Of parameters there are many, and what is paddle's on them no forward changes.
        return None if isinstance(node, ParameterNode) and not node.has_users() else node

    def _is_open(self, value: Any) -> bool:
        return False


def nodes_in_layers(layers: Iterable[Any]) -> list[Node]:
    """Returns the nodes that a forward may change: attributes and buffers of layers."""
    walk = _InLayers(None, {str(number): layer for number, layer in enumerate(layers)})
    found = [node for path, node in walk.nodes.items() if path]
    buffers = [node.value._buffers for node in found if isinstance(node, LayerNode)]
    tensors = [tensor for by_name in buffers for tensor in by_name.values() if tensor is not None]
    # Buffers first: what is none any more goes back among the attributes.
    return [*map(DictNode, buffers), *map(WholeNode, tensors), *found]


def reference(value: Any) -> Callable[[], Any]:
    """Returns what gives the object, as long as it lives."""
    # A thing that is replaced should not keep its memory; a list cannot be watched like that.
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def unwrap(layer: Any) -> Any:
    """Returns the user's layer in a DataParallel or a wrapper of fleet; another layer itself."""
    while (inner := _wrapped(layer)) is not None:
        layer = inner
    return layer


def _wrapped(layer: Any) -> Any:
    if not isinstance(layer, Layer):
        return None
    fleets = module_of(type(layer)).startswith(_FLEET)
    inside = layer._sub_layers if fleets or isinstance(layer, paddle.DataParallel) else {}
    return inside.get("_layers", inside.get("_layer"))  # fleet's own layers have neither name


def _is_collate(path: str) -> bool:
    part = path.partition(".")[2]
    return path.startswith(LOADERS) and part.startswith(("collate_fn", "worker_init_fn"))


def _is_of_process(key: Any) -> bool:
    """Returns whether a key is a parameter, its id or automatic name: valid in one process only."""
    if type(key) is int:
        return key >= _SMALLEST_ID
    return isinstance(key, paddle.Tensor) or (type(key) is str and bool(_AUTOMATIC.match(key)))
