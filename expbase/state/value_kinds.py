"""Whether a class is the user's, and whether its objects are values, code or handles to the world.

A module is installed if it belongs to a distribution (a `*.dist-info` beside the top-level module)
or to Python. Every other module that has a file is the user's own.

    is_users("train")                 # True
    asks(value)                       # whether it is asked for its state
"""

from __future__ import annotations

import array
import datetime
import enum
import functools
import io
import logging
import re
import socket
import sys
import threading
import types
import uuid
import weakref
from collections import deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import paddle
from paddle.nn import Layer
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.base.any_object import (
    attributes_of,
    definer,
    has_attributes,
    module_of,
    state_setter,
)
from expbase.base.generator_states import GENERATORS

ATOMS = {type(None), bool, int, float, complex, str, bytes, range, slice}
# What holds nothing that changes, whatever its class is derived from.
CONSTANT: Any = (str, int, float, complex, bytes, enum.Enum, np.generic, np.dtype, Decimal)
CONSTANT += (Fraction, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
CONSTANT += (PurePath, uuid.UUID)
LEAVES: Any = (paddle.Tensor, np.ndarray, bytearray, array.array, *GENERATORS)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
CODE: Any = (type, types.ModuleType, *_FUNCTIONS, classmethod, staticmethod, property)
CODE += (np.ufunc,)  # np.sin; that of numpy 1 has no attributes, and seemed to be an object
_LOCKS = type(threading.Lock()), type(threading.RLock())
# What talks to the world, and is no state.
WORLD: Any = (io.IOBase, threading.Thread, *_LOCKS, socket.socket, logging.Logger, logging.Handler)
WORLD += (threading.local, np.memmap)
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque, np.ndarray)
_HANDLES = (io.IOBase, threading.Thread, socket.socket)


def asks(value: Any) -> bool:
    """Returns whether an object is asked for its state, and not walked: its class defines
    `state_dict`, and it is no layer, schedule or optimizer of paddle's alone.
    """
    if isinstance(value, (type, Layer)) or state_setter(value) is None:
        return False
    if isinstance(value, (LRScheduler, Optimizer)):
        return is_users(module_of(definer(type(value), "state_dict")))
    return True


@functools.cache
def is_users(module: str) -> bool:
    """Returns whether a module is the user's own: it has a file and is not installed."""
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


def is_written(value: Any) -> bool:
    """Returns whether an object only writes to the world, or is closed: an output file, a progress
    bar, a client.
    """
    if isinstance(value, io.IOBase):
        return value.closed or not value.readable()
    return isinstance(value, WORLD) or (not hasattr(value, "__next__") and holds_handle(value))


def is_handle(value: Any) -> bool:
    """Returns whether an object is a handle to something outside of the program that can be opened
    again: a file, a socket, a database, or a progress bar or client that holds one.
    """
    if isinstance(value, (io.BytesIO, io.StringIO, *CODE)):
        return False
    if isinstance(value, (*WORLD, weakref.ref)):
        return True
    if hasattr(value, "__next__") or isinstance(value, (*_COLLECTIONS, BaseException)):
        return False
    module = module_of(type(value))
    root = module.partition(".")[0]
    is_of_python = root in sys.stdlib_module_names and root != "collections"
    is_of_c = not has_attributes(value) and not is_users(module)
    return is_of_python or is_of_c or holds_handle(value, 2)


def talks_to_the_world(value: Any) -> bool:
    """Returns whether an object is a file, a progress bar or the like, of which nothing is lost."""
    return value is not None and (is_written(value) or is_handle(value))


def holds_handle(value: Any, depth: int = 0) -> bool:
    """Returns whether an object holds a file, a socket or a thread; a lock does not count."""
    items = attributes_of(value).values() if has_attributes(value) else ()
    return any(
        isinstance(item, _HANDLES) or (depth > 0 and holds_handle(item, depth - 1))
        for item in items
        if type(item) not in ATOMS and not isinstance(item, (*CODE, Layer))
    )


def is_memory(value: Any) -> bool:
    """Returns whether an object is a piece of memory, such as a number of ctypes."""
    try:
        return memoryview(value) is not None
    except TypeError:
        return False
