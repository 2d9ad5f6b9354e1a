"""What a value was like: a checksum by which one sees whether it has changed, in any process.

What cannot be saved is described, by its class and by where an iterator or a file stands. Of large
collections and arrays it is of a sample of places.

    content = Fingerprinter(things).fingerprint(value)
"""

from __future__ import annotations

import contextlib
import operator
import subprocess
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from expbase.base.encoding import Encoded, Encoder
from expbase.base.files import checksum_of
from expbase.base.things import NOTHING, Things, class_name

UNKNOWN = "?"  # of what nobody can know
_SAMPLED = 10_000  # items, from which on it is of some of them
_SAMPLED_BYTES = 1 << 26  # the same for an array
# Modules whose objects do not change, or are no state.
_SHOWN = ("re", "numpy", "numpy.dtypes", "paddle", "paddle.base.libpaddle")
_HARMLESS = ("_thread", "weakref", "operator", "functools", *_SHOWN)
_PROCESSES = (BaseProcess, subprocess.Popen)  # whose state is in another memory


class Fingerprinter(Encoder):
    """Takes the fingerprint of one value."""

    def __init__(self, things: Things = NOTHING) -> None:
        super().__init__({}, things)
        self.is_blind = False  # whether there is something that nobody can look into
        self._is_certain = True  # whether the same fingerprint means the same value

    def fingerprint(self, value: Any) -> str:
        """Returns a checksum of what a value holds."""
        content = Encoded(self.encode(value, ""), self.arrays).checksum()
        return f"{content:08x}" if self._is_certain else UNKNOWN

    def encode(self, value: Any, path: str) -> Any:
        """Returns a value, or what is known of it, as JSON."""
        try:
            return super().encode(value, path)
        except Exception:  # of the user's, too: how an object is taken apart
            return {"$opaque": self._described(value)}

    def _reference(self, value: Any, path: str) -> str | None:
        return super()._reference(value, path) if self.things.is_walked(value) else None

    def _parts(self, value: Any, path: str, *, is_known: bool) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(map(repr, value))
        return super()._parts(value, path, is_known=is_known)

    def _name_of(self, maker: Any, path: str) -> str:
        # An iterator cannot be saved, and it can be taken apart.
        is_iterator = getattr(maker, "__module__", "") in ("builtins", "itertools")
        return str(maker.__qualname__) if is_iterator else super()._name_of(maker, path)

    def _items(self, items: Any, path: str) -> Any:
        kinds = {*map(type, items)} if len(items) >= _SAMPLED else {float}
        if kinds in ({float}, {int}):
            return super()._items(items, path)
        if kinds == {str}:
            return [len(items), checksum_of(["\0".join(items).encode(errors="replace")])]
        items = [*items]
        return [len(items), super()._items(items[:: len(items) // 1000], path)]

    def _put(self, data: Any, path: str) -> str:
        step = 1 + data.size // _SAMPLED_BYTES
        return super()._put(np.ascontiguousarray(data[::step]), path)

    def _described(self, value: Any) -> Any:
        """Returns a class, and where an iterator or a file stands, if it can be seen."""
        name = class_name(type(value))
        code = getattr(value, "__qualname__", None)
        if hasattr(value, "gi_code"):
            if (frame := value.gi_frame) is None:
                return f"{code} at its end"
            inside = self.encode([value.gi_yieldfrom, frame.f_locals], "")
            return [f"{code} at {frame.f_lasti}", inside]
        if isinstance(code, str):
            return code
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return f"{name} at {value.tell()}" if value.readable() and value.seekable() else name
        if hasattr(value, "__next__"):
            left = -1 if hasattr(value, "__len__") else operator.length_hint(value, -1)
            self._is_certain = self._is_certain and left >= 0
            return f"{name} {left}"
        with contextlib.suppress(TypeError, ValueError, BufferError):
            return f"{name} {checksum_of([memoryview(value).tobytes()])}"
        module = "" if name.endswith(".Generator") else type(value).__module__
        is_harmless = module in _HARMLESS or type(value) is object
        is_seen = hasattr(value, "__dict__") and not _has_processes(value)
        self.is_blind = self.is_blind or not (is_harmless or is_seen)
        return repr(value) if module in _SHOWN else name


def _has_processes(value: Any, depth: int = 3) -> bool:
    """Returns whether an object is or has a process, as environments or a pool may be."""
    if isinstance(value, _PROCESSES):
        return True
    is_list = isinstance(value, (list, tuple))
    items = value[:1] if is_list else [*getattr(value, "__dict__", {}).values()]
    return depth > 0 and any(_has_processes(item, depth - 1) for item in items)


def checksum(value: Any) -> str:
    """Returns a number that depends on what a value holds; the same in any process."""
    return Fingerprinter().fingerprint(value)
