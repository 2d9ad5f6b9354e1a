"""Reads a pickle of paddle.save in a process of its own: the program that `pdparams.py` starts.

Nothing is run of the file: whatever it names is one of the stand-ins below. What it can still do
is to use up time or memory, or to crash Python. So this process has limits, and nothing in it that
another one would miss. It imports the standard library alone, and so it starts in some 25 ms.

It writes a line with what the arrays are; a line with all values, and with the automatic names of
tensors; and the bytes of the arrays. Or it ends with what is wrong, on stderr.

    python -I -S unpickler.py < model.pdparams
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import sys
from typing import Any

# bool, integers, floats and complex numbers of 1 to 16 bytes; no objects, records, texts or dates
_NUMERIC = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c(8|16))")
# What memoryview calls a type
_SCALARS: dict[str, Any] = {"|b1": "?", "<i4": "i", "<i8": "q", "<f2": "e", "<f4": "f", "<f8": "d"}


class _Refused(Exception):
    """Something that weights do not need, in words for the user."""


# What a file may name: stand-ins that only hold what they are given. If a file has one of them
# where another one is needed, an attribute is missing, which is an error like any other.


class _Type:
    """Stands for a numpy.dtype."""

    text = ""

    def __init__(self, text: str, *_: Any) -> None:
        self.__setstate__((3, text))

    def __setstate__(self, state: Any) -> None:
        self.text = state[1] + self.text  # the byte order, and what it was made from
        if not _NUMERIC.fullmatch(self.text):
            raise _Refused(f"has an array of type {self.text!r:.80}; expected a type of numbers.")


class _Array:
    """Stands for a numpy.ndarray, and for a tensor if it has an automatic name."""

    name = ""
    entry: Any = None
    data = b""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, self.data = state
        self.entry = [kind.text, [*shape], "F" if is_fortran else "C", len(self.data)]


def _scalar(kind: Any, data: bytes) -> Any:
    return memoryview(data).cast(_SCALARS[kind.text])[0]


def _tensor(pair: Any) -> Any:
    name, array = pair
    array.name = name
    return array


_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": dict,
    "builtins.tuple": _tensor,
    "__builtin__.tuple": _tensor,
    # Protocol 2 has no bytes: it writes them as a text and the name of its encoding.
    "__builtin__.bytes": bytes,
    "_codecs.encode": str.encode,
    "numpy.ndarray": None,  # only named, as an argument of _reconstruct
    "numpy.dtype": _Type,
    "numpy.core.multiarray._reconstruct": _Array,  # before numpy 2
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in _KNOWN:
            raise _Refused(
                f"names {full_name!r:.100}, which weights do not need and which could run code. "
                "Refused; write the file again with save_model or paddle.save of a state_dict."
            )
        return _KNOWN[full_name]


def _convert(size: int) -> None:
    value = _Unpickler(sys.stdin.buffer).load()
    # paddle/framework/io.py writes a tensor as an array, with a table of names
    # (_build_saved_state_dict), or as (automatic name, array) (_pickle_save).
    names = value.pop("StructuredToParameterName@@", {})
    names |= {key: item.name for key, item in value.items() if getattr(item, "name", "")}
    arrays: dict[_Array, int] = {}
    values = json.dumps(
        [value, names],
        default=lambda item: {"": arrays.setdefault(item, len(arrays))},
    )
    if sum(len(array.data) for array in arrays) > size:
        raise _Refused("holds more arrays than it has bytes for.")
    print(json.dumps([array.entry for array in arrays]), values, sep="\n", flush=True)
    for array in arrays:
        sys.stdout.buffer.write(array.data)


def main() -> None:
    """Reads stdin within limits that follow from its size."""
    size = os.fstat(0).st_size
    # Protocol 2 needs three times the size: a text as it is in the file, decoded, and as bytes. The
    # rest is for Python, and for what it makes of many small arrays. One second of CPU time is for
    # each 5 MB of small arrays; of great ones it reads 200 MB in it.
    memory = 3 * size + (100 << 20)
    seconds = 3 + size // (5 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        _convert(size)
    except MemoryError:
        os.abort()
    except _Refused as error:
        sys.exit(str(error))
    except Exception as error:  # a file that is cut off or made to harm raises anything
        sys.exit(f"not a file of weights: {error!r:.300}")


if __name__ == "__main__":
    main()
