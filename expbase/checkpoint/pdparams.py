"""The arrays in a `.pdparams` file, read without running anything from it.

Such a file is a pickle, and a pickle is a program: it names functions and calls them. A process of
its own reads it, `unpickler.py`, with limits on memory and time. What comes back are JSON and the
bytes of arrays.

    arrays = read_arrays(path)      # {"fc.weight": Array}
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from expbase.base.arrays import Array
from expbase.base.errors import Mistake
from expbase.base.files import regular

_PROGRAM = [sys.executable, "-I", "-S", str(Path(__file__).with_name("unpickler.py"))]
_LINE_BYTES = 8 << 20  # of JSON; enough for 50,000 arrays
_LIMITS = (
    "takes more memory or time than a file of its size should, or crashes Python. Convert it to "
    "safetensors, if you trust it."
)


class PdparamsError(Mistake, ValueError):
    """A file that is not one of paddle, or one with something else than plain values in it."""


def read_arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays at the top level of a file, by name; errors as of `unpack`."""
    values, _ = unpack(path)
    return {name: _array(item) for name, item in values.items() if isinstance(item, np.ndarray)}


def _array(value: np.ndarray[Any, Any]) -> Array:
    # paddle/framework/io.py, _build_saved_state_dict, writes bfloat16 as uint16, a type that
    # paddle's tensors do not have.
    dtype = "bfloat16" if value.dtype == np.uint16 else value.dtype.name
    return Array(dtype, value.shape, value.reshape(-1).view(np.uint8))


def unpack(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the plain values, dicts and numpy arrays in a file, and the automatic names of
    tensors.

    Raises:
        OSError: It cannot be opened.
        PdparamsError: It is no such file, or holds what such values do not need.
    """
    with (
        open(path, "rb", opener=regular) as file,
        subprocess.Popen(
            _PROGRAM,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a SIGTERM to the group is for the run
        ) as process,
    ):
        try:
            return _received(process.stdout)
        except Exception as error:
            said = process.communicate()[1].decode().strip()
            text = _LIMITS if process.returncode < 0 else said
            raise PdparamsError(text or f"not a file of weights: {error!r:.300}") from error
        finally:
            process.kill()


def _received(stream: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values and the names of tensors that the process writes about a file."""
    table = stream.readline(_LINE_BYTES)
    values = stream.readline(_LINE_BYTES)
    if not values.endswith(b"\n"):
        raise ValueError("it ended early, or has more values than weights do")
    arrays = []
    for dtype, shape, order, length in json.loads(table):
        array = np.frombuffer(stream.read(length), dtype).reshape(shape, order=order)
        arrays.append(array.astype(array.dtype.newbyteorder("="), "C", copy=False))
    return tuple(json.loads(values, object_hook=lambda d: arrays[d[""]] if "" in d else d))
