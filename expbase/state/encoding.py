"""Values as JSON and arrays: what a checkpoint can carry, and back to the same type.

Arrays and tensors go into a mapping beside the JSON, which becomes a file of tensors (arrays.py).
What JSON does not know is a dict with one key that begins with `$`: `{"$tuple": [1, 2]}`.

    arrays = {}
    text = json.dumps(encode(value, "early_stopping", arrays))
    value = decode(json.loads(text), arrays)
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from expbase.state.arrays import Array
from expbase.state.checkpoint import checksum_of

# Collections, which are encoded as the list of their items. A dict whose keys are texts is itself.
_KINDS: dict[str, Any] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": Counter,
}
_TAGS = {kind: tag for tag, kind in _KINDS.items()}
_LONG = 64  # items of a list that is worth a look at their kinds
_JSON = {type(None), bool, int, float, str}  # what Python's JSON has as it is; nan is NaN in it


def encode(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    """A value as JSON, from which `decode` makes the same value of the same type.

    Arrays and tensors are put into `arrays`, by the path where they were found.

    Raises:
        TypeError: Something in it cannot be saved.
    """
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if type(value) in _JSON:
        return value
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, paddle.Tensor):
        name = _put(Array.of(value), path, arrays)
        return {"$tensor": [name, value.place.is_cpu_place(), value.stop_gradient]}
    if isinstance(value, np.ndarray):
        return _encode_ndarray(value, path, arrays)
    if type(value) is dict and all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {key: encode(item, f"{path}.{key}", arrays) for key, item in value.items()}
    if type(value) is list:
        return _encode_list(value, path, arrays)
    if type(value) is deque:
        return {"$deque": [encode([*value], path, arrays), value.maxlen]}
    if type(value) in _TAGS:
        return {_TAGS[type(value)]: encode(_items(value), path, arrays)}
    raise TypeError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; expected "
        "numbers, texts, lists, dicts, arrays or tensors. Save its parts, or exclude_from_state."
    )


def checksum(value: Any) -> int:
    """Of what a value holds; the same in any process. What cannot be saved is left out."""
    arrays: dict[str, Array] = {}
    text = ""
    with contextlib.suppress(TypeError):
        text = json.dumps(encode(value, "", arrays))
    return checksum_of([text.encode(), *(array.data for array in arrays.values())])


def _encode_list(items: list[Any], path: str, arrays: dict[str, Array]) -> Any:
    """A list; a long one of tuples or arrays of one kind, a replay buffer say, by columns."""
    kinds = {*map(type, items)}
    if kinds <= _JSON:
        return items[:]
    is_long = len(items) >= _LONG
    if is_long and kinds == {tuple} and len({*map(len, items)}) == 1 and items[0]:
        return {"$rows": _encode_list([*map(list, zip(*items, strict=True))], path, arrays)}
    if is_long and kinds == {np.ndarray} and len({(item.dtype, item.shape) for item in items}) == 1:
        return {"$stack": encode(np.stack(items), path, arrays)}
    return [encode(item, f"{path}.{i}", arrays) for i, item in enumerate(items)]


def _encode_ndarray(value: np.ndarray[Any, Any], path: str, arrays: dict[str, Array]) -> Any:
    if value.dtype.hasobject:
        raise TypeError(f"{path}: an array of Python objects cannot be saved. Save its parts.")
    # As bytes: a file of tensors lacks many types of numpy (texts, dates, unsigned integers).
    data = bytes_of(value)
    name = _put(Array("uint8", (data.size,), data), path, arrays)
    return {"$array": [name, value.dtype.str, list(value.shape)]}


def bytes_of(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an array of any type but objects, in C order; without a copy if they are so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [list(pair) for pair in value.items()]
    # Sets are sorted: their order differs from process to process, and so would the ranks.
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)


def _put(array: Array, path: str, arrays: dict[str, Array]) -> str:
    """Puts an array into `arrays`; returns its name, which is the path or one like it."""
    while path in arrays:  # in {"a.0": x, "a": [y]} two have the same
        path += "'"
    arrays[path] = array
    return path


def decode(value: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str = next(iter(value), "")
    content: Any = value.get(tag)
    if tag == "$scalar":
        return np.frombuffer(base64.b64decode(content[1]), content[0])[0]
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$tensor":
        name, on_cpu, is_constant = content
        tensor = arrays[name].tensor()
        tensor = tensor if on_cpu else tensor.to(paddle.device.get_device())
        tensor.stop_gradient = is_constant
        return tensor
    if tag == "$array":
        name, dtype, shape = content
        return arrays[name].data.copy().view(np.dtype(dtype)).reshape(shape)
    if tag == "$deque":
        return deque(decode(content[0], arrays), content[1])
    if tag == "$rows":
        return [*zip(*decode(content, arrays), strict=True)]
    if tag == "$stack":
        return [np.array(row) for row in decode(content, arrays)]
    if tag in _KINDS:
        kind = _KINDS[tag]
        items = decode(content, arrays)
        return kind(dict(items) if issubclass(kind, dict) else items)
    return {key: decode(item, arrays) for key, item in value.items()}
