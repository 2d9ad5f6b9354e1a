"""The arrays in a `.pdparams` file, read without running anything from it.

Such a file is a pickle, and a pickle is a program: it names functions and calls them. Python's own
reader, the one that is written in Python, reads it here. It has only the instructions that plain
values need, and whatever a file names is one of the stand-ins below: even `numpy.dtype` itself can
be told by a pickle to take raw bytes for pointers. Every array is built here, from numbers whose
size was checked. Whatever else a file holds is refused.

    arrays = parse(path.read_bytes())      # {"fc.weight": Array}
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from expbase.state.arrays import Array

# bool, integers, floats and complex numbers of 1 to 16 bytes; no objects, records, texts or dates
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c(8|16))")
# What numpy writes after the byte order for a plain type: no fields, no flags. With other flags
# numpy would believe that an array of objects holds none, and take the file's bytes for pointers.
_PLAIN_DTYPE = (3, None, None, None, -1, -1, 0)

_CODES = [  # of the instructions that plain values need
    getattr(pickle, name)[0]
    for name in (
        "PROTO FRAME STOP MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
        "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
        "SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
        "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD"
    ).split()
]


class PdparamsError(ValueError):
    """Bytes that are not a file of paddle, or one with something else than plain values in it."""


def parse(content: bytes) -> dict[str, Array]:
    """The arrays at the top level of a file, by name; a PdparamsError as of `unpack`."""
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
        value = _as(dict, _Reader(io.BytesIO(content)).load())
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


class _Instructions(dict[int, Any]):
    """What the reader does at each code that it may meet."""

    def __missing__(self, code: int) -> Any:
        name = pickletools.code2op[chr(code)].name  # type: ignore[attr-defined]  # not in its stub
        raise PdparamsError(f"has the instruction {name}, which weights do not need.")


class _Reader(pickle._Unpickler):
    """Python's reader of pickles; a wrong program ends in any exception."""

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise PdparamsError(
                f"names {f'{module}.{name}'!r:.100}, which weights do not need and which could run "
                "code. Refused; write the file again with save_model or paddle.save of a "
                "state_dict."
            )
        return _KNOWN[module, name]

    def _make_dict(self) -> None:
        self.stack.append(_Dict())

    def _build(self) -> None:
        state = self.stack.pop()
        _as((_NumpyType, _NumpyArray), self.stack[-1]).build(state)

    dispatch = _Instructions({code: pickle._Unpickler.dispatch[code] for code in _CODES})
    dispatch |= {pickle.EMPTY_DICT[0]: _make_dict, pickle.BUILD[0]: _build}


class _Dict(dict[Any, Any]):
    """Takes no tuples as keys: Python crashes when it hashes one in one in one, a million deep."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_as((str, int, float, bytes), key), value)


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
    ("collections", "OrderedDict"): lambda: _Dict(),
    ("builtins", "tuple"): lambda items: _as(tuple, items),
    ("__builtin__", "tuple"): lambda items: _as(tuple, items),
    ("__builtin__", "bytes"): _encoded,
    ("_codecs", "encode"): _encoded,
    ("numpy", "ndarray"): lambda: None,  # only named, as an argument of _reconstruct
    ("numpy", "dtype"): lambda text, *_: _NumpyType(text),
    **{(module, "_reconstruct"): lambda *_: _NumpyArray() for module in _NUMPY},
    **{(module, "scalar"): lambda kind, data: _numbers(kind, (), data)[()] for module in _NUMPY},
}
