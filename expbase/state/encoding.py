"""Values as JSON and arrays: what a checkpoint can carry, and back to the same type.

This is the one place where a value is encoded. Arrays and tensors go into a mapping beside the
JSON, which becomes a file of tensors (arrays.py). What JSON does not know is a dict with one key
that begins with `$`: `{"$tuple": [1, 2]}`.

    arrays = {}
    text = json.dumps(encode(value, "early_stopping", arrays))
    value = decode(json.loads(text), arrays)
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from expbase.state.arrays import Array

_DICTS = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DICT_TAGS = {f"${tag}": kind for kind, tag in _DICTS.items()}


def encode(value: Any, place: str, arrays: dict[str, Array]) -> Any:
    """A value as JSON, from which `decode` makes the same value of the same type.

    Args:
        value: Numbers, texts, bytes, None, lists, tuples, sets, dicts, arrays and tensors. An
            `Array` is taken for the tensor that it is the content of.
        place: Where the value was found; for messages, and as the key of arrays.
        arrays: The arrays and tensors are put in here.

    Raises:
        TypeError: The value, or something in it, is of another type.
    """
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.str, encode(value.item(), place, arrays)]}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (Array, paddle.Tensor)):
        place = _free(place, arrays)
        arrays[place] = value if isinstance(value, Array) else Array.of(value)
        return {"$tensor": place}
    if isinstance(value, np.ndarray):
        return _encode_ndarray(value, place, arrays)
    if type(value) in _DICTS:
        return _encode_dict(value, place, arrays)
    if type(value) in (list, tuple, set, frozenset):
        # Sets are sorted: their order differs from process to process, and so would the ranks.
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [encode(item, f"{place}.{i}", arrays) for i, item in enumerate(items)]
        return encoded if type(value) is list else {f"${type(value).__name__}": encoded}
    raise TypeError(
        f"{place}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; expected "
        "numbers, texts, lists, dicts, arrays or tensors. Save its parts, or exclude_from_state."
    )


def _encode_ndarray(value: np.ndarray[Any, Any], place: str, arrays: dict[str, Array]) -> Any:
    if value.dtype.hasobject:
        raise TypeError(f"{place}: an array of Python objects cannot be saved. Save its parts.")
    # As bytes: a file of tensors lacks many types of numpy (texts, dates, unsigned integers).
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    place = _free(place, arrays)
    arrays[place] = Array("uint8", (data.size,), data)
    return {"$array": [place, value.dtype.str, list(value.shape)]}


def _encode_dict(value: Mapping[Any, Any], place: str, arrays: dict[str, Array]) -> Any:
    plain = type(value) is dict
    if plain and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{place}.{key}", arrays) for key, item in value.items()}
    pairs = [
        [encode(key, f"{place}.{i}.key", arrays), encode(item, f"{place}.{i}", arrays)]
        for i, (key, item) in enumerate(value.items())
    ]
    return {f"${_DICTS[type(value)]}": pairs}


def _free(place: str, arrays: Mapping[str, Array]) -> str:
    """The place, or one like it that is free: in {"a.0": x, "a": [y]} two have the same."""
    while place in arrays:
        place += "'"
    return place


def decode(value: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str = next(iter(value), "")
    content: Any = value.get(tag)
    if tag == "$float":
        return float(content)
    if tag == "$scalar":
        return np.dtype(content[0]).type(decode(content[1], arrays))
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$tensor":
        return arrays[content].tensor()
    if tag == "$array":
        place, dtype, shape = content
        return arrays[place].data.copy().view(np.dtype(dtype)).reshape(shape)
    if tag == "$tuple":
        return tuple(decode(item, arrays) for item in content)
    if tag == "$set":
        return {decode(item, arrays) for item in content}
    if tag == "$frozenset":
        return frozenset(decode(item, arrays) for item in content)
    if tag in _DICT_TAGS:
        pairs = {decode(key, arrays): decode(item, arrays) for key, item in content}
        return _DICT_TAGS[tag](pairs)
    return {key: decode(item, arrays) for key, item in value.items()}
