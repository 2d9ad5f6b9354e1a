"""Values as JSON and arrays: what a checkpoint can carry, and back to the same value and type.

Arrays and tensors go into a mapping beside the JSON, which becomes a file of tensors (arrays.py).
What JSON does not know is a dict with one key that begins with `$`: `{"$tuple": [1, 2]}`. All other
objects are taken apart as Python's pickle does it: what makes them, its arguments, their state and
their items. But what makes them is named, and can only be of the tables here, or a class that the
program has already (`Things`): so no code comes from a file. A thing that stands in a value twice
is written once.

    arrays = {}
    text = json.dumps(encode(value, "early_stopping", arrays))
    value = decode(json.loads(text), arrays)

Source: https://docs.python.org/3/library/pickle.html, object.__reduce__.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from expbase.base.arrays import Array
from expbase.base.files import checksum_of
from expbase.base.generators import (
    GENERATORS,
    generator_kind,
    generator_state,
    new_generator,
    set_generator_state,
)
from expbase.base.things import MAKERS, MUTABLE, NAMES, NOTHING, Things, class_name, join

_LONG = 64  # items of a list that is worth a look at their kinds
_JSON = {type(None), bool, int, float, str}  # what Python's JSON has as it is; nan is NaN in it
_NUMBERS = {float: "d", int: "q"}  # of which a long list is an array


@dataclass
class Encoded:
    """A value that is decoded by who has the things that it refers to."""

    content: Any
    arrays: Mapping[str, Array]

    def size(self) -> int:
        """Returns how many bytes a checkpoint has of it."""
        arrays = sum(array.data.nbytes for array in self.arrays.values())
        return arrays + len(json.dumps(self.content))

    def checksum(self) -> int:
        """Returns a number that depends on the content alone; the same in any process."""
        text = json.dumps(self.content).encode()
        return checksum_of([text, *(array.data for array in self.arrays.values())])


def encode(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    """Returns a value as JSON, from which `decode` makes the same value of the same type.

    Arrays and tensors are put into `arrays`, by the path where they were found.

    Raises:
        TypeError: Something in it cannot be saved.
    """
    return Encoder(arrays).encode(value, path)


def decode(value: Any, arrays: Mapping[str, Array]) -> Any:
    """Returns the value that `encode` was given."""
    return Decoder(arrays).decode(value, "")


class Encoder:
    """Encodes values that may have things in common; puts their arrays into `arrays`."""

    def __init__(self, arrays: dict[str, Array], things: Things = NOTHING) -> None:
        self.arrays = arrays
        self.things = things
        self._met: dict[int, str] = {}  # where things were met first, by id
        self._alive: list[Any] = []  # so that no id is used again

    def attempt(self, value: Any, path: str) -> Encoded | None:
        """Returns a value as JSON, with its arrays; None, and nothing is noted, if it cannot be
        saved.
        """
        notes: tuple[dict[Any, Any], ...] = (self.arrays, self._met)
        before = [len(note) for note in notes]
        try:
            content = self.encode(value, path)
        except (TypeError, ValueError, RecursionError):
            for note, count in zip(notes, before, strict=True):
                while len(note) > count:
                    note.popitem()
            return None
        # From the end: a checkpoint encodes many values, one after the other, into the same arrays.
        added = islice(reversed(self.arrays.items()), len(self.arrays) - before[0])
        return Encoded(content, dict(reversed([*added])))

    def encode(self, value: Any, path: str) -> Any:
        """Returns a value as JSON.

        Raises:
            TypeError: Something in it cannot be saved.
        """
        kind = type(value)
        if kind is int and not _is_short(value):
            return {"$int": hex(value)}  # JSON has none of 4,300 digits
        if kind in _JSON:
            return value
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Encoded):
            self.arrays.update(value.arrays)
            return {"$encoded": value.content}
        if isinstance(value, type):
            return {"$class": self._name_of(value, path)}
        if (name := self._reference(value, path)) is not None:
            return {"$object": name}
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if id(value) in self._met:
            return {"$same": self._met[id(value)]}
        self._met[id(value)] = path
        self._alive.append(value)
        name = self.things.name(value, path) if _can_be_filled(value) else None
        content = self._content(value, path, is_known=name is not None)
        return content if name is None else {"$at": [name, content]}

    def _reference(self, value: Any, path: str) -> str | None:
        return self.things.reference(value, path)

    def _content(self, value: Any, path: str, *, is_known: bool) -> Any:
        kind = type(value)
        if kind is list:
            items = self._items(value, path)
            return items if isinstance(items, list) else {"$list": items}
        if kind is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {key: self.encode(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, paddle.Tensor):
            return self._tensor(value, path)
        if _is_array(value):
            return self._array(value, path)
        if isinstance(value, GENERATORS):
            state = self.encode(generator_state(value), path)
            return {"$generator": [generator_kind(value), state]}
        return self._parts(value, path, is_known=is_known)

    def _parts(self, value: Any, path: str, *, is_known: bool) -> Any:
        """Returns what makes an object, its arguments, its state and its items."""
        kind = type(value)
        if isinstance(value, enum.Enum):  # else it depends on the version of Python
            return {"$new": [self._name_of(kind, path), [self.encode(value.value, path)]]}
        getattr(value, "fill_value", None)  # which a masked array decides on when it is asked
        try:
            maker, args, *rest = value.__reduce_ex__(4)
        except Exception:  # of a lock, say, or of the user's
            raise not_savable(path, kind.__name__) from None
        state, items, pairs = [*rest, None, None, None][:3]
        if maker is MAKERS["new"]:
            self._name_of(args[0], path)
        if isinstance(value, (set, frozenset)):
            args = [_in_order(value), *args[1:]]
        if isinstance(value, Counter):  # it counts what it is given
            args = ()
            pairs = value.items()
        if is_known and isinstance(value, defaultdict):  # which keeps its own
            args = ()
        return {
            "$new": [
                self._name_of(maker, path),
                self._items([*args], path),
                self.encode(state, path),
                self._items([*(items or ())], path),
                [
                    [self.encode(key, path), self.encode(item, join(path, key))]
                    for key, item in pairs or ()
                ],
            ]
        }

    def _name_of(self, maker: Any, path: str) -> str:
        name = NAMES.get(id(maker))
        if name is None and not (isinstance(maker, type) and self.things.knows(maker)):
            raise not_savable(path, getattr(maker, "__qualname__", maker))
        return class_name(maker) if name is None else name

    def _items(self, items: Any, path: str) -> Any:
        """Returns a list's items, as arrays of a long one of numbers, rows or arrays of a kind."""
        kinds = {*map(type, items)}
        kind = next(iter(kinds)) if len(kinds) == 1 and len(items) >= _LONG else None
        if kind in _NUMBERS:
            with contextlib.suppress(OverflowError):
                data = np.frombuffer(array(_NUMBERS[kind], items), np.uint8)
                return {"$numbers": [_NUMBERS[kind], self._put(data, path)]}
        if kind is np.ndarray and len({(item.dtype, item.shape) for item in items}) == 1:
            return {"$stack": self.encode(np.stack(items), path)}
        if kind is np.int64:  # an order that numpy has drawn
            return {"$stack": self.encode(np.array(items), path)}
        if kind is tuple and len({*map(len, items)}) == 1 and items[0]:
            columns = [[*column] for column in zip(*items, strict=True)]
            return {"$rows": [self._items(c, join(path, i)) for i, c in enumerate(columns)]}
        if kinds <= _JSON - {int}:
            return [*items]
        return [self.encode(item, f"{path}.{i}") for i, item in enumerate(items)]

    def _tensor(self, value: Any, path: str) -> Any:
        is_there = value.size == 0 or value._is_initialized()
        if isinstance(value, EagerParamBase) or not is_there:
            raise TypeError(
                f"{path}: a parameter of no layer among the attributes cannot be saved."
            )
        content = Array.of(value)
        name = self._put(content.data, path)
        on_cpu = value.place.is_cpu_place()
        return {"$tensor": [name, content.dtype, content.shape, on_cpu, value.stop_gradient]}

    def _array(self, value: Any, path: str) -> Any:
        """As bytes: a file of tensors lacks many types of numpy (texts, dates, structures)."""
        # The order of its axes in memory, which decides in what order they are summed.
        axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
        name = self._put(bytes_of(value.transpose(axes)), path)
        dtype = value.dtype.str if value.dtype.names is None else self.encode(value.dtype, path)
        kind = np.ndarray if type(value) is np.memmap else type(value)
        described = self._name_of(kind, path), value.flags.writeable
        return {"$array": [name, dtype, [*value.shape], axes, *described]}

    def _put(self, data: Any, path: str) -> str:
        """Puts bytes into `arrays`; returns their name, which is the path or one like it."""
        while path in self.arrays:  # in {"a.0": x, "a": [y]} two have the same
            path += "'"
        self.arrays[path] = Array("uint8", (data.size,), data)
        return path


class Decoder:
    """Makes values of what an `Encoder` has written; things that are there are changed in place."""

    def __init__(self, arrays: Mapping[str, Array], things: Things = NOTHING) -> None:
        self.arrays = arrays
        self.things = things
        self._made: dict[str, Any] = {}  # by the path where they were met first
        self.sets: list[str] = []  # paths; their order may be another one now

    def decode(self, content: Any, path: str, into: Any = None) -> Any:
        """Returns the value; `into` is the thing that is to have it, if it fits."""
        if isinstance(content, list):
            content = {"$list": content}
        if not isinstance(content, dict):
            return content
        tag: str = next(iter(content), "")
        if not tag.startswith("$"):
            return self._filled({}, path, into, (), content.items())
        return getattr(self, f"_read_{tag[1:]}")(content[tag], path, into)

    def _filled(
        self, made: Any, path: str, into: Any, items: Any, pairs: Any, state: Any = None
    ) -> Any:
        """Returns a new object with its items; if it is like the thing that is there, that with
        them.
        """
        is_there = isinstance(into, MUTABLE) and type(into) is type(made)
        target = into if is_there else made
        self._made[path] = target  # before its items: it may contain itself
        keys = [key if isinstance(key, str) else self.decode(key, path) for key, _ in pairs]
        values = [item for _, item in pairs]
        mapping = [(k, self.decode(v, join(path, k))) for k, v in zip(keys, values, strict=True)]
        listed = self._items(items, path) if items else []
        base = _base(target)
        if is_there:  # and emptied only now: nobody else may hold what is in it
            base.clear(target)
            (base.extend if hasattr(base, "extend") else base.update)(target, made)
        if listed:
            base.extend(target, listed)
        for key, value in mapping:
            base.__setitem__(target, key, value)
        if state is not None:
            _set_state(target, self.decode(state, path))
        return target

    def _read_int(self, inside: Any, path: str, into: Any) -> Any:
        return int(inside, 16)

    def _read_bytes(self, inside: Any, path: str, into: Any) -> Any:
        return base64.b64decode(inside)

    def _read_encoded(self, inside: Any, path: str, into: Any) -> Any:
        return Encoded(inside, self.arrays)

    def _read_class(self, inside: Any, path: str, into: Any) -> Any:
        return MAKERS[inside] if inside in MAKERS else self.things.classes[inside]

    def _read_same(self, inside: Any, path: str, into: Any) -> Any:
        return self._made[inside]

    def _read_at(self, inside: Any, path: str, into: Any) -> Any:
        name, content = inside
        return self.decode(content, path, self.things.get(name))

    def _read_object(self, inside: Any, path: str, into: Any) -> Any:
        if (found := self.things.get(inside)) is None:
            raise LookupError(f"{path}: there is no {inside}")
        return found

    def _read_tuple(self, inside: Any, path: str, into: Any) -> Any:
        return tuple(self._items(inside, path))

    def _read_list(self, inside: Any, path: str, into: Any) -> Any:
        return self._filled([], path, into, inside, ())

    def _read_new(self, inside: Any, path: str, into: Any) -> Any:
        name, args, state, items, pairs = [*inside, None, (), ()][:5]
        made = self._read_class(name, path, None)(*self._items(args, path))
        if isinstance(made, set) and len(made) > 1:  # pop() goes on where nobody sees
            self.sets.append(path)
        return self._filled(made, path, into, items, pairs, state)

    def _items(self, content: Any, path: str) -> list[Any]:
        if isinstance(content, list):
            return [self.decode(item, f"{path}.{i}") for i, item in enumerate(content)]
        ((tag, inside),) = content.items()
        if tag == "$numbers":
            return array(inside[0], self.arrays[inside[1]].data.tobytes()).tolist()
        if tag == "$stack":
            return [row.copy() if row.ndim else row[()] for row in self.decode(inside, path)]
        columns = [self._items(column, join(path, i)) for i, column in enumerate(inside)]
        return [*zip(*columns, strict=True)]

    def _read_generator(self, inside: Any, path: str, into: Any) -> Any:
        kind, state = inside
        made = self._made[path] = new_generator(kind, into)
        set_generator_state(made, self.decode(state, path))
        return made

    def _read_tensor(self, inside: Any, path: str, into: Any) -> Any:
        name, dtype, shape, on_cpu, is_constant = inside
        source = Array(dtype, tuple(shape), self.arrays[name].data)
        made = into
        if isinstance(into, paddle.Tensor) and str(Array.of(into)) == str(source):
            source.copy_to(into)
        else:
            made = source.tensor()
            made = made if on_cpu else made.to(paddle.device.get_device())
        made.stop_gradient = is_constant
        self._made[path] = made
        return made

    def _read_array(self, inside: Any, path: str, into: Any) -> Any:
        name, described, shape, axes, kind, is_writeable = inside
        dtype = np.dtype(self.decode(described, path))
        flat = self.arrays[name].data.view(dtype)
        made = flat.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
        is_same = isinstance(into, np.ndarray) and (into.dtype, into.shape) == (dtype, made.shape)
        if is_same and into.flags.writeable:
            into[...] = made
            made = into
        else:
            made = made.copy("K").view(self._read_class(kind, path, None))
        made.flags.writeable = is_writeable
        self._made[path] = made
        return made


def is_thing(value: Any) -> bool:
    """Returns whether it is a collection, an array, a tensor or a generator, and no parameter."""
    kinds = (*MUTABLE, tuple, frozenset, np.ndarray, paddle.Tensor, *GENERATORS)
    return isinstance(value, kinds) and not isinstance(value, EagerParamBase)


def bytes_of(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of an array of any type but objects, in C order; without a copy if they are
    so.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def not_savable(path: str, what: object) -> TypeError:
    return TypeError(
        f"{path}: a {what} cannot be saved; expected numbers, texts, lists, dicts, arrays or "
        "tensors. Save its parts, or exclude_from_state."
    )


def _can_be_filled(value: Any) -> bool:
    return _is_array(value) or isinstance(value, (*MUTABLE, paddle.Tensor, *GENERATORS))


def _is_array(value: Any) -> bool:
    """Returns whether it is an array of numbers, and no more than that."""
    is_more = isinstance(value, np.ma.MaskedArray)
    return isinstance(value, np.ndarray) and not (is_more or value.dtype.hasobject)


def _base(value: Any) -> Any:
    return next((base for base in MUTABLE if isinstance(value, base)), None)


def _set_state(made: Any, state: Any) -> None:
    """As pickle does it."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for name, value in {**(attributes or {}), **(slots or {})}.items():
        object.__setattr__(made, name, value)


def _is_short(number: int) -> bool:
    return -1 << 63 <= number < 1 << 63


def _in_order(items: Iterable[Any]) -> list[Any]:
    # Numbers stand in an order that the next process has, too, if they are put in again; all else
    # in another one in every process, so that ranks would differ.
    is_same = {*map(type, items)} <= {int, bool, type(None)}
    return [*items] if is_same else sorted(items, key=repr)
