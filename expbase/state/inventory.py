"""What an experiment can reach, walked once at the end of setup: objects with places, and things.

An owner is what has places: the experiment, its layers and optimizers, objects of any class, the
parts of a loader, functions with cells, classes and modules of the user's own. In a place stands a
value: an attribute, an item, a cell, a global. A thing is a value that can be changed in place, a
list or an array; so it has a name, by which another start finds it.

Not walked are the template's own objects, paddle's (but for its data sets, samplers, transforms,
metrics, and the settings of optimizers), what talks to the world (files, threads, locks, loggers,
and what holds one, as progress bars do), and long lists.

    inventory = Inventory("experiment", roots, found.names(), excluded)
    inventory.owners       # {"meter": AverageMeter, "class train.Meter": Meter, …}
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import os
import socket
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.base.encoding import is_thing
from expbase.base.generators import GENERATORS
from expbase.base.things import Things, class_name, join
from expbase.state import objects
from expbase.state.optimizers import settings

MOST = 20_000  # owners and things
_MANY = 1000  # items: of data, and each may be one of millions
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, np.generic)
_LEAVES: Any = (paddle.Tensor, np.ndarray, *GENERATORS)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CODE = (type, types.ModuleType, *_FUNCTIONS, types.BuiltinFunctionType, classmethod, staticmethod)
_DESCRIPTORS = (property, functools.cached_property, types.MemberDescriptorType)
_LOCKS = type(threading.Lock()), type(threading.RLock())
# What talks to the world, and is no state.
_WORLD: Any = (io.IOBase, threading.Thread, *_LOCKS, socket.socket, logging.Logger, weakref.ref)
_CLOSED: Any = (LRScheduler, paddle.amp.AmpScaler, types.GeneratorType, os.PathLike)
# Modules of paddle whose objects have values that a user changes, by training or by hand.
_OPEN = ("io", "metric", "vision.transforms", "regularizer", "nn.clip", "audio")
_PARTS = ("dataset", "batch_sampler", "collate_fn", "worker_init_fn")  # of a loader
_HOOKS = "forward hooks"  # of a layer: the place of all of them
_RUN = "_ExperimentBase__run"
BEYOND = ("class ", "module ")  # what the paths of what is no attribute begin with
LOADERS = ("train_loader", "valid_loader", "test_loader")

Kept = Callable[[], Any]  # the thing, if it is still there


class Inventory(Things):
    """What was reached from `roots`, by path.

    Args:
        root: The experiment.
        attributes: Those of its attributes that are its user's.
        is_left_out: Says of a path whether what is there is no state.
    """

    def __init__(
        self, root: Any, attributes: Mapping[str, Any], is_left_out: Callable[[str], bool]
    ) -> None:
        super().__init__()
        self.owners: dict[str, Any] = {}
        self.is_whole = True  # whether it ended before MOST
        self._is_left_out = is_left_out
        self._kept: dict[str, Kept] = {}
        self._names: dict[int, str] = {id(root): ""}
        self._kept[""] = weakref.ref(root)
        self._queue = deque(attributes.items())
        for base in type(root).__mro__:
            if objects.is_users(base.__module__):
                self._queue.append(("", base))
        while self._queue:
            if len(self._names) > MOST:
                self.is_whole = False
                break
            path, value = self._queue.popleft()
            self._visit(path, objects.unwrap(value))

    def reference(self, value: Any, path: str) -> str | None:
        return None if is_thing(value) else self.name(value, path)

    def name(self, value: Any, path: str) -> str | None:
        found = self._names.get(id(value))
        return found if found is not None and self.get(found) is value else None

    def get(self, name: str) -> Any:
        kept = self._kept.get(name)
        return None if kept is None else kept()

    def is_walked(self, value: Any) -> bool:
        has_state = isinstance(value, (paddle.nn.Layer, *_CODE)) or objects.state_setter(value)
        is_other = objects.is_parameter(value) or isinstance(value, (Optimizer, *_CLOSED[:2]))
        return bool(has_state or is_other or self.name(value, "") in ("", *self.owners))

    def opaque(self) -> dict[str, Any]:
        """Returns what has no places and cannot be saved, by path: iterators, files, locks."""
        found = {path: kept() for path, kept in self._kept.items()}
        return {
            path: value
            for path, value in found.items()
            if not (value is None or is_thing(value) or self.is_walked(value))
        }

    def _visit(self, path: str, value: Any) -> None:
        path = _named(path, value)
        if isinstance(value, _ATOMS) or id(value) in self._names:
            return
        self._names[id(value)] = path
        self._kept[path] = _kept(value)
        if isinstance(value, _LEAVES) or self._is_left_out(path):  # by its other names, too
            return
        kind = value if isinstance(value, type) else type(value)
        is_open = _is_open(path, value)
        is_plain = is_open or isinstance(value, (type, *_COLLECTIONS))
        if is_plain and not issubclass(kind, (paddle.nn.Layer, Optimizer, *_CODE)):
            self.classes[class_name(kind)] = kind
        if isinstance(value, _COLLECTIONS) and len(value) < _MANY:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            self._queue.extend((join(path, key), item) for key, item in items)
        if is_open:
            self.owners[path] = value
            self._queue.extend((join(path, n), item) for n, item in _reached(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of one object, those in slots, too."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def has_attributes(value: Any) -> bool:
    """Returns whether an object may have attributes that Python can set."""
    return hasattr(value, "__dict__") or bool(copyreg._slotnames(type(value)))  # type: ignore[attr-defined]


def _named(path: str, value: Any) -> str:
    """Returns the path of a value; a class and a module have one, however they were reached."""
    if isinstance(value, types.ModuleType):
        return f"module {Path(getattr(value, '__file__', None) or value.__name__).stem}"
    return f"class {value.__qualname__}" if isinstance(value, type) else path


def _kept(value: Any) -> Kept:
    # A thing that is replaced should not keep its memory; a list cannot be watched like that.
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _is_open(path: str, value: Any) -> bool:
    """Returns whether a value has places of which a line is to be said."""
    if isinstance(value, (paddle.nn.Layer, DataLoader)):
        return True
    is_users = objects.is_users(type(value).__module__)
    if isinstance(value, (*_CLOSED, *_COLLECTIONS)) or (isinstance(value, _WORLD) and not is_users):
        return False
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return objects.is_users(_module_of(value))
    if isinstance(value, (types.MethodType, functools.partial, Optimizer)):
        return True
    module = type(value).__module__
    if not has_attributes(value) or isinstance(value, _CODE) or _is_memory(value):
        return False
    if path.startswith(LOADERS) and ".dataset" not in path and objects.state_setter(value):
        return False  # the position in the data has its state
    if is_users:
        return True
    if hasattr(value, "__next__"):
        return False
    name = module.removeprefix("paddle.")
    if name != module and not name.startswith(_OPEN):
        return False
    is_ours = module.startswith("expbase.") and not module.startswith("expbase.extras.")
    return module == "queue" or not (is_ours or _is_of_the_world(value, 3))


def _is_memory(value: Any) -> bool:
    """Returns whether an object is a piece of memory: a number of C, say."""
    try:
        return memoryview(value) is not None
    except TypeError:
        return False


def _is_of_the_world(value: Any, depth: int) -> bool:
    """Returns whether an object of an installed package holds a file, a thread or a lock."""
    items = [*getattr(value, "__dict__", {}).values()] if has_attributes(value) else []
    cells = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
    return any(
        isinstance(item, _WORLD) or (depth > 0 and _is_of_the_world(item, depth - 1))
        for item in (*items, *cells)
        if not isinstance(item, (*_ATOMS, type, types.ModuleType, paddle.nn.Layer))
    )


def _reached(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what one comes to from an owner: what stands in its places, and code."""
    yield from places(value).items()
    if isinstance(value, paddle.nn.Layer):
        yield from value._sub_layers.items()
    elif isinstance(value, types.MethodType):
        yield from (("__self__", value.__self__), ("__func__", value.__func__))
    elif isinstance(value, functools.partial):
        yield "func", value.func
    elif isinstance(value, (type, types.ModuleType)):
        for name, item in vars(value).items():
            item = getattr(item, "__func__", getattr(item, "fget", item))
            if isinstance(item, _CODE) and objects.is_users(_module_of(item)):
                yield name, item
    kind = value if isinstance(value, _CODE) else type(value)
    if objects.is_users(module := _module_of(kind)):
        if not isinstance(kind, _FUNCTIONS):
            yield "__class__", kind
        yield "__module__", sys.modules[module]


def places(owner: Any) -> dict[str, Any]:
    """Returns what stands in the places of an owner, by name."""
    if isinstance(owner, dict):  # the group of an optimizer
        return {name: value for name, value in owner.items() if name != "params"}
    if isinstance(owner, paddle.nn.Layer):
        hooks = (*owner._forward_pre_hooks.values(), *owner._forward_post_hooks.values())
        return {**objects.own_attributes(owner), **({_HOOKS: hooks} if hooks else {})}
    if isinstance(owner, Optimizer):
        return settings(owner)
    if isinstance(owner, DataLoader):
        return {name: getattr(owner, name, None) for name in _PARTS}
    if isinstance(owner, functools.partial):
        return {"args": owner.args, "keywords": owner.keywords, **vars(owner)}
    if isinstance(owner, (type, types.ModuleType)):
        return {
            name: value
            for name, value in vars(owner).items()
            if not (name.startswith("__") or isinstance(value, (*_CODE, *_DESCRIPTORS)))
            if not hasattr(value, _RUN)  # an experiment is none's state
        }
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        found = {name: _content(cell) for name, cell in cells if name != "__class__"}
        defaults = {"__defaults__": owner.__defaults__} if owner.__defaults__ else {}
        return {**found, **defaults, **vars(owner)}
    if objects.is_parameter(owner):
        return {name: getattr(owner, name) for name in ("stop_gradient", "optimize_attr")}
    found = attributes_of(owner)
    if isinstance(owner, _WORLD):  # a thread of the user's, with a counter
        return {name: value for name, value in found.items() if not name.startswith("_")}
    return found


def put(owner: Any, name: str, value: Any) -> None:
    """Puts a value into a place."""
    if isinstance(owner, dict):
        owner[name] = value
    elif isinstance(owner, types.FunctionType) and name in owner.__code__.co_freevars:
        (owner.__closure__ or ())[owner.__code__.co_freevars.index(name)].cell_contents = value
    elif isinstance(owner, functools.partial):
        found = {**places(owner), name: value}
        state = (owner.func, found.pop("args"), found.pop("keywords"), found)
        owner.__setstate__(state)  # type: ignore[attr-defined]
    elif isinstance(owner, (*_CODE, paddle.nn.Layer)):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def remove(owner: Any, name: str) -> None:
    """Takes a place away."""
    if name in places(owner):
        object.__delattr__(owner, name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _module_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name)


def is_fixed(owner: Any, name: str) -> bool:
    """Returns whether nothing can be put into a place: hooks are registered, a thread has read its
    own.
    """
    is_hooks = name == _HOOKS and isinstance(owner, paddle.nn.Layer)
    return is_hooks or isinstance(owner, threading.Thread)


def is_computed(owner: Any, name: str) -> bool:
    """Returns whether what stands in a place is computed anew when it is asked for."""
    return isinstance(getattr(type(owner), name, None), functools.cached_property)
