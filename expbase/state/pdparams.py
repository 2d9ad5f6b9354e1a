"""The arrays in a `.pdparams` file, read without running anything from it.

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
from dataclasses import dataclass
from types import FunctionType
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
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
# How many items other instructions take off the stack. The second kind takes those above a mark.
_TAKES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}
_TAKES |= {"STACK_GLOBAL": 2, "REDUCE": 2, "BUILD": 1}
_TAKES_MARKED = frozenset({"TUPLE", "APPENDS", "SETITEMS"})


class PdparamsError(ValueError):
    """Bytes that are not a file of paddle, or one with something else than plain values in it."""


def parse(content: bytes) -> dict[str, Array]:
    """The arrays at the top level of a file, by name.

    Raises:
        PdparamsError: It is no such file, or holds what arrays do not need.
    """
    items, _ = unpack(content)
    found = {str(name): item for name, item in items.items() if isinstance(item, np.ndarray)}
    distinct = {id(item): item for item in found.values()}
    if sum(array.nbytes for array in distinct.values()) > len(content):
        # A small file could fill the memory: a thousand arrays, all from the same bytes.
        raise PdparamsError("holds more arrays than it has bytes for.")
    arrays = {key: _array(array) for key, array in distinct.items()}
    return {name: arrays[id(item)] for name, item in found.items()}


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The plain values, dicts and numpy arrays in a file, and the automatic names of tensors.

    Raises:
        PdparamsError: It is no such file, or holds what such values do not need.
    """
    try:
        value = _as(dict, _Machine().run(content))
        # paddle writes a tensor as an array, with a table of names; or as (automatic name, array)
        names = dict(value.pop("StructuredToParameterName@@", {}))
        names |= {n: i[0] for n, i in value.items() if isinstance(i, tuple) and len(i) == 2}
        return _plain(value, depth=2), names
    except Exception as error:  # a file that is cut off or made to harm raises anything
        text = str(error) if isinstance(error, PdparamsError) else repr(error)
        raise PdparamsError(f"not a file of weights: {text:.300}") from error


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, dict) and depth:  # what is deeper may contain itself
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    value = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    return _as(np.ndarray, value.content) if isinstance(value, _NumpyArray) else value


def _array(value: np.ndarray[Any, Any]) -> Array:
    data = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
    # paddle writes bfloat16 as uint16, a type that its tensors do not have
    dtype = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
    return Array(dtype, value.shape, data.reshape(-1).view(np.uint8))


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
        stack = self._stack
        marked = name in _TAKES_MARKED
        count = len(stack) - self._marks.pop() if marked else _TAKES.get(name, 0)
        items = [stack.pop() for _ in range(count)][::-1]
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(items))
            case "APPEND" | "APPENDS":
                _as(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                _set_items(_as(dict, stack[-1]), items)
            case "GLOBAL":
                stack.append(_known(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(_known(*items))
            case "REDUCE":  # the only functions on the stack are those of _KNOWN
                stack.append(_as(FunctionType, items[0])(*items[1]))
            case "BUILD":
                _as((_NumpyType, _NumpyArray), stack[-1]).build(items[0])
            case _ if name in _ARGUMENT:
                stack.append(argument)
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _:
                raise PdparamsError(f"has the instruction {name}, which weights do not need.")


def _set_items(target: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Python crashes when it hashes a tuple in a tuple in a tuple, a million deep.
        target[_as((str, int, float, bytes), key)] = value


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise PdparamsError(f"has a {type(value).__name__} in a place where weights have none.")
    return value


# What a file may name: stand-ins that only we fill.


class _NumpyType:
    """Stands for a numpy.dtype; `build` may set its byte order and nothing else."""

    def __init__(self, text: str) -> None:
        if not _NUMERIC.fullmatch(text):
            raise PdparamsError(f"has an array of type {text!r:.80}; expected a type of numbers.")
        self.dtype = np.dtype(text)

    def build(self, state: Any) -> None:
        order = state[1]
        if state[:1] + state[2:] != _PLAIN_DTYPE or order not in ("<", ">", "|", "="):
            raise PdparamsError("has a type of numbers with fields, flags or a strange byte order.")
        self.dtype = self.dtype.newbyteorder(order)


@dataclass
class _NumpyArray:
    """Stands for a numpy.ndarray; empty until `build`."""

    content: np.ndarray[Any, Any] | None = None

    def build(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.content = _numbers(dtype, shape, data, "F" if is_fortran else "C")


def _numbers(dtype: Any, shape: Any, data: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    """An array over the file's bytes, after its size was found to be that of the bytes."""
    if not isinstance(dtype, _NumpyType) or not isinstance(data, bytes):
        raise PdparamsError("has an array of Python objects; expected numbers.")
    fits = all(isinstance(size, int) and size >= 0 for size in shape)
    if not fits or math.prod(shape) * dtype.dtype.itemsize != len(data):
        raise PdparamsError(f"has {len(data)} bytes for an array of shape {shape!r:.80}.")
    return np.frombuffer(data, dtype.dtype).reshape(shape, order=order)


def _encoded(text: str = "", encoding: str = "latin1") -> bytes:
    # Protocol 2 has no bytes: it writes them as a text and the name of its encoding.
    if encoding != "latin1":
        raise PdparamsError(f"has bytes in {encoding!r:.80}; expected latin1.")
    return text.encode("latin1")


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since numpy 2
_KNOWN = {
    ("collections", "OrderedDict"): lambda: {},  # noqa: PIE807  # a function, and no class
    ("builtins", "tuple"): lambda items: _as(tuple, items),
    ("__builtin__", "tuple"): lambda items: _as(tuple, items),
    ("__builtin__", "bytes"): _encoded,
    ("_codecs", "encode"): _encoded,
    ("numpy", "ndarray"): lambda: None,  # only named, as an argument of _reconstruct
    ("numpy", "dtype"): lambda text, *_: _NumpyType(text),
    **{(module, "_reconstruct"): lambda *_: _NumpyArray() for module in _NUMPY},
    **{(module, "scalar"): lambda kind, data: _numbers(kind, (), data)[()] for module in _NUMPY},
}


def _known(module: Any, name: Any) -> Any:
    found = _KNOWN.get((_as(str, module), _as(str, name)))
    if found is None:
        raise PdparamsError(
            f"names {f'{module}.{name}'!r:.100}, which weights do not need and which could run "
            "code. Refused; write the file again with save_model or paddle.save of a state_dict."
        )
    return found
