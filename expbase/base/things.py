"""What encoded values may refer to: things and classes that a program has, and what makes the rest.

A file names them and nothing else, so what is not here cannot come out of one.
"""

from __future__ import annotations

import copyreg
import datetime
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

# What is changed in place, and by whose methods: a user's subclass may have others.
MUTABLE: Any = (OrderedDict, dict, list, deque, set, bytearray)
_TIMES = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
# What may make a value, by name.
MAKERS: dict[str, Any] = {
    "new": copyreg.__newobj__,  # type: ignore[attr-defined]
    "scalar": np.float32(0).__reduce__()[0],
    "dtype": np.dtype,
    "array": np.empty(0).__reduce__()[0],
    "masked": np.ma.array(0).__reduce__()[0],
    **{
        kind.__name__: kind
        for kind in (*MUTABLE, Counter, defaultdict, tuple, frozenset, int, float, str, complex)
    },
    **{kind.__name__: kind for kind in (Decimal, Fraction, range, slice, *_TIMES, *_PATHS)},
    **{kind.__name__: kind for kind in (np.ndarray, np.matrix, np.recarray, np.ma.MaskedArray)},
    "SimpleNamespace": types.SimpleNamespace,
}
NAMES = {id(maker): name for name, maker in MAKERS.items()}


class Things:
    """What values may refer to; this one knows of nothing."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}  # the program's own, by name

    def reference(self, value: Any, path: str) -> str | None:
        """Returns the name of an object whose content is not a part of a value."""
        return None

    def name(self, value: Any, path: str) -> str | None:
        """Returns the name of a thing that is to be changed in place."""
        return None

    def get(self, name: str) -> Any:
        """Returns the thing of that name; None if there is none."""
        return None

    def is_walked(self, value: Any) -> bool:
        """Returns whether what an object holds is looked at elsewhere."""
        return True

    def knows(self, kind: type) -> bool:
        """Returns whether a class is one of `classes`."""
        return self.classes.get(class_name(kind)) is kind


NOTHING = Things()


def class_name(kind: type) -> str:
    """Returns what a class is called in a file; one of the script has no module."""
    module = kind.__module__
    return f"{'' if module in ('__main__', '__mp_main__') else module}.{kind.__qualname__}"


def join(path: str, key: Any) -> str:
    """Returns the path of an attribute or of an item; no two have the same."""
    text = key if isinstance(key, str) and "." not in key else repr(key)
    return f"{path}.{text}" if path else text
