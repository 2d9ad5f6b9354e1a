"""The arrays in a `.pdparams` or `.pdopt` file, read without running anything from it.

Such a file is a pickle, and a pickle is a program: it names functions and calls them. No unpickler
is used here, because even `numpy.dtype` alone can be told by a pickle to take raw bytes for
pointers. The program is read as data instead: a small machine knows the instructions that plain
values need, calls nothing, and builds every array itself from numbers whose size it has checked.
Whatever else a file holds is refused.

    arrays = parse(path.read_bytes())      # {"fc.weight": Array}
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from expbase.state.arrays import Array

# bool, integers, floats and complex numbers of 1 to 16 bytes; no objects, records, texts or dates
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c(8|16))")
# What numpy writes after the byte order for a plain type: no fields, no flags. With other flags
# numpy would believe that an array of objects holds none, and take the file's bytes for pointers.
_PLAIN_DTYPE = (3, None, None, None, -1, -1, 0)

# Instructions that put their own argument on the stack.
_ARGUMENT = frozenset(
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8".split()
)
# How many items other instructions take off the stack; None: those above the last mark.
_TAKES = {
    "TUPLE": None,
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "STACK_GLOBAL": 2,
    "REDUCE": 2,
    "APPEND": 1,
    "APPENDS": None,
    "ADDITEMS": None,
    "SETITEM": 2,
    "SETITEMS": None,
    "BUILD": 1,
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NOTHING_TO_DO = frozenset({"PROTO", "FRAME", "STOP"})


class PdparamsError(ValueError):
    """Bytes that are not a file of paddle, or one with something else than plain values in it."""


def parse(content: bytes) -> dict[str, Array]:
    """The arrays at the top level of a file, by name.

    Args:
        content: The whole file.

    Raises:
        PdparamsError: It is no such file, or holds what arrays do not need.
    """
    try:
        value = _Machine().run(content)
    except Exception as error:  # a file that is cut off or made to harm raises anything
        text = str(error) if isinstance(error, PdparamsError) else repr(error)
        raise PdparamsError(f"not a file of weights: {text:.300}") from error
    if not isinstance(value, dict):
        raise PdparamsError(f"holds a {type(value).__name__}; expected a dict of arrays.")
    if "UnpackBigParamInfor@@" in value:
        raise PdparamsError("written in slices by protocol 2 or 3; save it with protocol=4.")
    found = {}
    for name, item in value.items():
        # paddle writes a tensor as an array, or as (automatic name, array)
        item = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if isinstance(item, _NumpyArray):
            found[str(name)] = item
    distinct = {id(item): item.filled() for item in found.values()}
    if sum(array.nbytes for array in distinct.values()) > len(content):
        # A small file could fill the memory: a thousand arrays, all from the same bytes.
        raise PdparamsError("holds more arrays than it has bytes for.")
    arrays = {key: _array(array) for key, array in distinct.items()}
    return {name: arrays[id(item)] for name, item in found.items()}


def _array(value: np.ndarray[Any, Any]) -> Array:
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    # paddle writes bfloat16 as uint16, a type that its tensors do not have
    dtype = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
    return Array(dtype, value.shape, data.reshape(-1).view(np.uint8))


# --- what a file may name: stand-ins that only we fill ----------------------------------------


@dataclass
class _NumpyType:
    """Stands for numpy.dtype; `build` may set its byte order and nothing else."""

    dtype: np.dtype[Any]

    @classmethod
    def named(cls, text: str, *_: Any) -> _NumpyType:
        if not _NUMERIC.fullmatch(text):
            raise PdparamsError(f"has an array of type {text!r:.80}; expected a type of numbers.")
        return cls(np.dtype(text))

    def build(self, state: Any) -> None:
        order = state[1]
        if state[:1] + state[2:] != _PLAIN_DTYPE or order not in ("<", ">", "|", "="):
            raise PdparamsError("has a type of numbers with fields, flags or a strange byte order.")
        self.dtype = self.dtype.newbyteorder(order)


@dataclass
class _NumpyArray:
    """Stands for numpy.ndarray; empty until `build`."""

    content: np.ndarray[Any, Any] | None = None

    @classmethod
    def empty(cls, *_: Any) -> _NumpyArray:
        return cls()

    def build(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.content = _numbers(dtype, shape, data, "F" if is_fortran else "C")

    def filled(self) -> np.ndarray[Any, Any]:
        if self.content is None:
            raise PdparamsError("has an array without content.")
        return self.content


def _numbers(dtype: Any, shape: Any, data: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    """An array over the file's bytes, after its size was found to be that of the bytes."""
    if not isinstance(dtype, _NumpyType) or not isinstance(data, bytes):
        raise PdparamsError("has an array of Python objects; expected numbers.")
    fits = all(isinstance(size, int) and size >= 0 for size in shape)
    if not fits or math.prod(shape) * dtype.dtype.itemsize != len(data):
        raise PdparamsError(f"has {len(data)} bytes for an array of shape {shape!r:.80}.")
    return np.frombuffer(data, dtype.dtype).reshape(shape, order=order)


def _scalar(dtype: Any, data: Any) -> Any:
    return _numbers(dtype, (), data)[()]


def _encoded(text: str = "", encoding: str = "latin1") -> bytes:
    # Protocol 2 has no bytes: it writes them as a text and the name of its encoding.
    if encoding != "latin1":
        raise PdparamsError(f"has bytes in {encoding!r:.80}; expected latin1.")
    return text.encode("latin1")


def _tuple(items: Any) -> Any:
    return _as(tuple, items)


def _dict() -> dict[Any, Any]:
    return {}


@dataclass(frozen=True)
class _Named:
    """Something that a file named; `make` is our function for it."""

    make: Callable[..., Any]


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since numpy 2
_KNOWN = {
    ("collections", "OrderedDict"): _Named(_dict),
    ("numpy", "ndarray"): _Named(_NumpyArray.empty),
    ("numpy", "dtype"): _Named(_NumpyType.named),
    ("_codecs", "encode"): _Named(_encoded),
    **{(module, "tuple"): _Named(_tuple) for module in ("builtins", "__builtin__")},
    **{(module, "bytes"): _Named(_encoded) for module in ("builtins", "__builtin__")},
    **{(module, "_reconstruct"): _Named(_NumpyArray.empty) for module in _NUMPY},
    **{(module, "scalar"): _Named(_scalar) for module in _NUMPY},
}


# --- the machine ------------------------------------------------------------------------------


class _Machine:
    """Goes through the instructions of a pickle; a wrong program ends in any exception."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack at which a group of items begins
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """The value that the program leaves."""
        for instruction, argument, _ in pickletools.genops(program):
            self._step(instruction.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        push = self._stack.append
        items = self._taken(_TAKES[name]) if name in _TAKES else []
        if name in _ARGUMENT:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name == "MARK":
            self._marks.append(len(self._stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            push(self._memo[argument])
        elif name == "EMPTY_DICT":
            push({})
        elif name in ("EMPTY_LIST", "EMPTY_SET"):
            push([])  # a set stays a list: no array is read from it, and no item must be hashed
        elif name.startswith("TUPLE"):
            push(tuple(items))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            _as(list, self._stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(items)
        elif name == "GLOBAL":
            push(_known(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            push(_known(*items))
        elif name == "REDUCE":
            push(_as(_Named, items[0]).make(*items[1]))
        elif name == "BUILD":
            _as((_NumpyType, _NumpyArray), self._stack[-1]).build(items[0])
        elif name not in _NOTHING_TO_DO:
            raise PdparamsError(f"has the pickle instruction {name}, which weights do not need.")

    def _taken(self, count: int | None) -> list[Any]:
        """Takes items off the stack; None: those above the last mark."""
        start = self._marks.pop() if count is None else len(self._stack) - count
        if start < 0:
            raise PdparamsError("an instruction lacks its items.")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = _as(dict, self._stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Python crashes when it hashes a tuple in a tuple in a tuple, a million deep.
            target[_as((str, int, float, bytes), key)] = value


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise PdparamsError(f"has a {type(value).__name__} in a place where weights have none.")
    return value


def _known(module: Any, name: Any) -> _Named:
    found = _KNOWN.get((_as(str, module), _as(str, name)))
    if found is None:
        raise PdparamsError(
            f"names {f'{module}.{name}'!r:.100}, which weights do not need and which could run "
            "code. Refused; write the file again with save_model or paddle.save of a state_dict."
        )
    return found
