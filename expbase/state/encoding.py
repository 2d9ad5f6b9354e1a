"""Values as JSON and arrays: what a checkpoint can carry, and back to the same value of the same type.

Arrays and tensors go into a mapping beside the JSON, which becomes a file of tensors (arrays.py).
What JSON does not know is a dict with one key that begins with `$`: `{"$tuple": [1, 2]}`. A thing
that stands in a value twice is written once. `Things` has what a program knows already: what is to
be changed in place, what is only referred to, and the classes of its own. So no class and no code
comes from a file, which can only name what is there.

    arrays = {}
    text = json.dumps(Encoder(arrays).encode(value, "early_stopping"))
    value = Decoder(arrays).decode(json.loads(text), "early_stopping")
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import functools
import json
import math
import operator
import pathlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from expbase.state.arrays import LABELS, Array, dtype_name
from expbase.state.checkpoint import checksum_of
from expbase.state.generators import (
    SEEDED,
    generator_kind,
    generator_state,
    new_generator,
    set_generator_state,
)

_LONG = 64  # items of a list that is worth a look at their kinds
_SAMPLED = 10_000  # items, from which on a print is of some of them
_SAMPLED_BYTES = 1 << 26  # the same for an array
_JSON = {type(None), bool, int, float, str}  # what Python's JSON has as it is; nan is NaN in it
_NUMBERS = {float: "d", int: "q"}  # of which a long list is an array

# Collections: their items are written, and put into an empty one of the same class. A subclass of
# the user's own is one of these, with attributes.
_COLLECTIONS: dict[str, Any] = {
    "$tuple": tuple,
    "$frozenset": frozenset,
    "$list": list,
    "$deque": deque,
    "$set": set,
    "$ordered": OrderedDict,
    "$counter": Counter,
    "$default": defaultdict,
    "$dict": dict,
    "$bytearray": bytearray,
}
_TAGS = {kind: tag for tag, kind in _COLLECTIONS.items()}
_FIXED = (tuple, frozenset)  # which cannot be changed in place
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set, str)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# What cannot be changed either, by its name: how it is written and read.
_ATOMS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),  # JSON has none of 4,300 digits
    "float": (float, float, float),
    "str": (str, str, str),
    "bytes": (bytes, _base64, base64.b64decode),
    "complex": (complex, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (
        datetime.datetime,
        datetime.datetime.isoformat,
        datetime.datetime.fromisoformat,
    ),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda t: [t.days, t.seconds, t.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    "Path": (pathlib.PurePath, str, pathlib.Path),
}
_ARRAY_CLASSES = {kind.__name__: kind for kind in (np.ndarray, np.matrix, np.recarray)}


# Modules whose objects do not change, or are no state.
_HARMLESS = ("_thread", "re", "numpy", "numpy.dtypes", "weakref", "paddle.base.libpaddle")


class Things:
    """What values may refer to; this one knows of nothing."""

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}  # the program's own, by name

    def reference(self, value: Any, path: str) -> str | None:
        """The name of an object whose content is not a part of a value."""
        return None

    def name(self, value: Any, path: str) -> str | None:
        """The name of a thing that is to be changed in place."""
        return None

    def get(self, name: str) -> Any:
        """The thing of that name; None if there is none."""
        return None

    def is_walked(self, value: Any) -> bool:
        """Whether what an object holds is looked at elsewhere."""
        return True

    def knows(self, kind: type) -> bool:
        """Whether a class is one of `classes`."""
        return self.classes.get(class_name(kind)) is kind


NOTHING = Things()


@dataclass
class Encoded:
    """A value that is decoded by who has the things that it refers to."""

    content: Any
    arrays: Mapping[str, Array]

    def checksum(self) -> int:
        """Of the content; the same in any process."""
        text = json.dumps(self.content).encode()
        return checksum_of([text, *(array.data for array in self.arrays.values())])


def encode(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    """A value as JSON, from which `decode` makes the same value of the same type.

    Arrays and tensors are put into `arrays`, by the path where they were found.

    Raises:
        TypeError: Something in it cannot be saved.
    """
    return Encoder(arrays).encode(value, path)


def decode(value: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `encode` was given."""
    return Decoder(arrays).decode(value, "")


def checksum(value: Any) -> int:
    """Of what a value holds; the same in any process. What cannot be saved is named by its class."""
    arrays: dict[str, Array] = {}
    return Encoded(Printer(arrays).encode(value, ""), arrays).checksum()


class Encoder:
    """Encodes values that may have things in common; puts their arrays into `arrays`."""

    def __init__(self, arrays: dict[str, Array], things: Things = NOTHING) -> None:
        self._arrays = arrays
        self._things = things
        self._met: dict[int, str] = {}  # where things were met first, by id
        self._alive: list[Any] = []  # so that no id is used again

    def encode(self, value: Any, path: str) -> Any:
        """A value as JSON.

        Raises:
            TypeError: Something in it cannot be saved.
        """
        kind = type(value)
        if kind in _JSON and (kind is not int or abs(value) < 1 << 63):
            return value
        if isinstance(value, Encoded):
            self._arrays.update(value.arrays)
            return {"$encoded": value.content}
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
            return {"$scalar": [value.dtype.str, _base64(value.tobytes())]}
        if isinstance(value, enum.Enum):
            return {"$enum": [self._class(value, path), self.encode(value.value, path)]}
        atom = next((name for name, (of, _, _) in _ATOMS.items() if isinstance(value, of)), None)
        if atom is not None:
            content = {f"${atom}": _ATOMS[atom][1](value)}
            is_plain = kind is _ATOMS[atom][0] or isinstance(value, pathlib.PurePath)
            return content if is_plain else self._of_subclass(value, content, path)
        if (name := self._reference(value, path)) is not None:
            return {"$object": name}
        return self._thing(value, path)

    def _reference(self, value: Any, path: str) -> str | None:
        return self._things.reference(value, path)

    def attempt(self, value: Any, path: str, most_bytes: float) -> Any:
        """A list with a value as JSON, and its arrays; None, and nothing is noted, if it cannot be
        saved or is larger than that.
        """
        notes: tuple[dict[Any, Any], ...] = (self._arrays, self._met)
        before = [len(note) for note in notes]
        try:
            content = self.encode(value, path)
            arrays = [*self._arrays.values()][before[0] :]
            is_short = most_bytes == math.inf or isinstance(content, (int, float, type(None)))
            size = sum(array.data.nbytes for array in arrays)
            if size + (0 if is_short else len(json.dumps(content))) <= most_bytes:
                return [content]
        except (TypeError, ValueError, RecursionError):
            pass
        for note, count in zip(notes, before, strict=True):
            while len(note) > count:
                note.popitem()
        return None

    def _thing(self, value: Any, path: str) -> Any:
        """What may stand in several places, and may be changed in place."""
        if isinstance(value, _FIXED):
            return self._collection(value, path)
        if id(value) in self._met:
            return {"$same": self._met[id(value)]}
        self._met[id(value)] = path
        self._alive.append(value)
        name = self._things.name(value, path)
        if name is None:
            self._need_factory(value, path)
        content = self._content(value, path)
        return content if name is None else {"$at": [name, content]}

    def _content(self, value: Any, path: str) -> Any:
        if isinstance(value, paddle.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, SEEDED):
            return {"$generator": [generator_kind(value), self._state(value, path)]}
        if isinstance(value, tuple(_TAGS)):
            return self._collection(value, path)
        return self._new(value, path)

    def _state(self, value: Any, path: str) -> Any:
        return self.encode(generator_state(value), path)

    def _new(self, value: Any, path: str) -> Any:
        """An object that nobody knows, of a class that has attributes."""
        name = self._class(value, path)
        if not has_attributes(value):
            raise TypeError(f"{path}: a {name} has no attributes, and cannot be saved.")
        return {"$new": [name, self._attributes(value, path)]}

    def _need_factory(self, value: Any, path: str) -> None:
        factory = getattr(value, "default_factory", None)
        if isinstance(value, defaultdict) and factory not in (None, *_FACTORIES.values()):
            raise TypeError(f"{path}: a defaultdict of {factory} that was made after setup.")

    def _class(self, value: Any, path: str) -> str:
        """The name of a class of the program's own; a TypeError for any other."""
        kind = type(value)
        name = class_name(kind)
        if not self._things.knows(kind):
            raise TypeError(
                f"{path}: a {name} cannot be saved; expected numbers, texts, lists, dicts, arrays "
                "or tensors. Save its parts, or exclude_from_state."
            )
        return name

    def _attributes(self, value: Any, path: str) -> dict[str, Any]:
        attributes = attributes_of(value)
        return {name: self.encode(item, join(path, name)) for name, item in attributes.items()}

    def _of_subclass(self, value: Any, content: Any, path: str) -> Any:
        return {"$of": [self._class(value, path), content, self._attributes(value, path)]}

    def _collection(self, value: Any, path: str) -> Any:
        kind = type(value)
        tag = next(tag for tag, base in _COLLECTIONS.items() if isinstance(value, base))
        content: Any
        if isinstance(value, dict):
            content = self._pairs(value, tag, path)
        elif isinstance(value, bytearray):
            content = _base64(value)
        elif isinstance(value, (set, frozenset)):
            content = self._items(self._in_order(value), path)
        else:
            content = self._items(value, path)
        if tag == "$deque":
            content = [content, value.maxlen]
        if tag == "$default":
            factory = value.default_factory
            name = getattr(factory, "__name__", None)
            content = [content, name if _FACTORIES.get(name) is factory else None]
        is_json = isinstance(content, kind) and kind in (list, dict)
        content = content if is_json else {tag: content}
        return content if kind in _TAGS else self._of_subclass(value, content, path)

    def _in_order(self, items: Any) -> list[Any]:
        # What is hashed by its value stands in an order that the next process has, too, if it is
        # put in again; all else in another one in every process, so that ranks would differ.
        is_numbers = {*map(type, items)} <= {int, bool, type(None)}
        return [*items] if is_numbers else sorted(items, key=repr)

    def _pairs(self, value: Mapping[Any, Any], tag: str, path: str) -> Any:
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return {key: self.encode(item, join(path, key)) for key, item in value.items()}
        return [
            [self.encode(key, path), self.encode(item, join(path, key))]
            for key, item in value.items()
        ]

    def _items(self, items: Any, path: str) -> Any:
        """The items of a list; of a long one of numbers, or of rows of one kind, as arrays."""
        kinds = {*map(type, items)}
        if kinds <= _JSON and (int not in kinds or _is_short(items)):
            is_long = len(items) >= _LONG and len(kinds) == 1
            code = _NUMBERS.get(kinds.pop()) if is_long else None
            if code is None:
                return [*items]
            data = np.frombuffer(array(code, items), np.uint8)
            return {"$numbers": [code, self._put_bytes(data, path)]}
        if len(items) >= _LONG and kinds == {np.int64}:  # an order that numpy has drawn
            return {"$numbers": [None, self._put_bytes(bytes_of(np.array(items)), path)]}
        return [self.encode(item, f"{path}.{i}") for i, item in enumerate(items)]

    def _tensor(self, value: Any, path: str) -> Any:
        is_empty = value.size == 0
        if isinstance(value, EagerParamBase) or not (is_empty or value._is_initialized()):
            raise TypeError(f"{path}: a parameter of no layer among the attributes cannot be saved.")
        if dtype_name(value) not in LABELS:  # complex128
            return {"$of_numpy": [self._array(value.numpy(), path), value.stop_gradient]}
        name = self._put(Array.of(value), path)
        return {"$tensor": [name, value.place.is_cpu_place(), value.stop_gradient]}

    def _array(self, value: Any, path: str) -> Any:
        """As bytes: a file of tensors lacks many types of numpy (texts, dates, structures)."""
        if isinstance(value, np.ma.MaskedArray):
            parts = [value.data, np.ma.getmaskarray(value), np.asarray(value.fill_value)]
            return {"$masked": [self._array(part, path) for part in parts]}
        kind = type(value)
        if kind.__name__ not in _ARRAY_CLASSES and kind is not np.memmap:
            self._class(value, path)
        if value.dtype.hasobject:
            items = self._items([*value.reshape(-1)], path)
            return {"$objects": [items, [*value.shape]]}
        # The order of its axes in memory, which decides in what order they are summed.
        axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
        name = self._put_bytes(bytes_of(value.transpose(axes)), path)
        described = self.encode(np.lib.format.dtype_to_descr(value.dtype), path)
        return {
            "$array": [name, described, [*value.shape], axes, kind.__name__, value.flags.writeable]
        }

    def _put_bytes(self, data: Any, path: str) -> str:
        return self._put(Array("uint8", (data.size,), data), path)

    def _put(self, array: Array, path: str) -> str:
        """Puts an array into `arrays`; returns its name, which is the path or one like it."""
        while path in self._arrays:  # in {"a.0": x, "a": [y]} two have the same
            path += "'"
        self._arrays[path] = array
        return path


class Printer(Encoder):
    """Encodes any value, to see whether it has changed: what cannot be saved is described.

    Of large collections and arrays it takes a sample of places.
    """

    is_certain = True  # whether the same print means the same value
    is_blind = False  # whether there is something that nobody can look into

    def encode(self, value: Any, path: str) -> Any:
        """A value, or what is known of it, as JSON."""
        try:
            return super().encode(value, path)
        except (TypeError, ValueError, RecursionError):
            return {"$opaque": self._described(value)}

    def _reference(self, value: Any, path: str) -> str | None:
        return super()._reference(value, path) if self._things.is_walked(value) else None

    def _need_factory(self, value: Any, path: str) -> None:
        pass

    def _in_order(self, items: Any) -> list[Any]:
        return sorted(items, key=repr)

    def _items(self, items: Any, path: str) -> Any:
        if len(items) < _SAMPLED:
            return super()._items(items, path)
        kinds = {*map(type, items)}
        if kinds == {str}:
            return [len(items), checksum_of(["\0".join(items).encode(errors="replace")])]
        if kinds <= {*_NUMBERS} and len(kinds) == 1:
            return super()._items(items, path)
        items = [*items]
        return [len(items), super()._items(items[:: len(items) // 1000], path)]

    def _put_bytes(self, data: Any, path: str) -> str:
        step = 1 + data.size // _SAMPLED_BYTES
        return super()._put_bytes(np.ascontiguousarray(data[::step]), path)

    def _described(self, value: Any) -> str:
        """A class, and where an iterator, a file or a queue stands, if it can be seen."""
        name = class_name(type(value))
        code = getattr(value, "__qualname__", None)
        if hasattr(value, "gi_code"):
            frame = value.gi_frame
            return f"{code} at {'its end' if frame is None else frame.f_lasti}"
        if isinstance(code, str):
            return code
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if value.readable() and value.seekable():
                return f"{name} at {value.tell()}"
            return name
        if hasattr(value, "__next__"):
            text = repr(value)
            left = -1 if hasattr(value, "__len__") else operator.length_hint(value, -1)
            is_shown = text.startswith("count(") or left >= 0
            self.is_certain = self.is_certain and is_shown
            return f"{name} {text if text.startswith('count(') else left}"
        with contextlib.suppress(TypeError, ValueError, BufferError):
            return f"{name} {checksum_of([memoryview(value).tobytes()])}"
        self.is_blind = self.is_blind or not (has_attributes(value) or _is_harmless(value))
        return name


class Decoder:
    """Makes values of what an `Encoder` has written; things that are there are changed in place."""

    def __init__(self, arrays: Mapping[str, Array], things: Things = NOTHING) -> None:
        self._arrays = arrays
        self._things = things
        self._made: dict[str, Any] = {}  # by the path where they were met first
        self.reordered: list[str] = []  # paths of sets whose order is another one now

    def decode(self, content: Any, path: str, into: Any = None) -> Any:
        """The value; `into` is the thing that is to have it, if it fits."""
        if isinstance(content, list):
            return self._collection("$list", content, path, into)
        if not isinstance(content, dict):
            return content
        tag: str = next(iter(content), "")
        if not tag.startswith("$"):
            return self._collection("$dict", content, path, into)
        inside: Any = content[tag]
        if tag == "$encoded":
            return Encoded(inside, self._arrays)
        if tag == "$same":
            return self._made[inside]
        if tag == "$object":
            if (found := self._things.get(inside)) is None:
                raise LookupError(f"{path}: there is no {inside}")
            return found
        if tag == "$at":
            return self.decode(inside[1], path, self._things.get(inside[0]))
        if tag[1:] in _ATOMS:
            return _ATOMS[tag[1:]][2](inside)
        if tag in _COLLECTIONS:
            return self._collection(tag, inside, path, into)
        return getattr(self, f"_read_{tag[1:]}")(inside, path, into)

    def _collection(
        self, tag: str, content: Any, path: str, into: Any, kind: Any = None, attributes: Any = ()
    ) -> Any:
        base = _COLLECTIONS[tag]
        kind = kind or base
        if base in _FIXED:
            made = base.__new__(kind, self._items(content, path))
            self._set_attributes(made, attributes, path)
            return made
        limit = factory = None
        if tag == "$deque":
            content, limit = content
        if tag == "$default":
            content, factory = content
        made = into
        if type(into) is not kind or (tag == "$deque" and into.maxlen != limit):
            into = None
            made = base.__new__(kind)
            if tag == "$deque":
                deque.__init__(made, (), limit)
            if tag == "$default":
                made.default_factory = _FACTORIES.get(factory)
        self._made[path] = made
        if isinstance(made, dict):
            pairs = self._pairs(content, path)
            base.clear(made)
            (base if tag == "$ordered" else dict).update(made, pairs)
        elif tag == "$bytearray":
            made[:] = base64.b64decode(content)
        else:
            items = self._items(content, path)
            base.clear(made)
            {"$set": set.update, "$list": list.extend, "$deque": deque.extend}[tag](made, items)
            if tag == "$set" and len(items) > 1:  # pop() goes on where it was, which nobody sees
                self.reordered.append(path)
        self._set_attributes(made, attributes, path)
        return made

    def _items(self, content: Any, path: str) -> list[Any]:
        if isinstance(content, dict):
            code, name = content["$numbers"]
            data = self._arrays[name].data
            return [*data.view(np.int64)] if code is None else array(code, data.tobytes()).tolist()
        return [self.decode(item, f"{path}.{i}") for i, item in enumerate(content)]

    def _pairs(self, content: Any, path: str) -> list[tuple[Any, Any]]:
        pairs: Iterable[Any] = content.items() if isinstance(content, dict) else content
        keyed = [(self.decode(key, path), item) for key, item in pairs]
        return [(key, self.decode(item, join(path, key))) for key, item in keyed]

    def _set_attributes(self, made: Any, attributes: Any, path: str) -> None:
        for name, item in dict(attributes).items():
            object.__setattr__(made, name, self.decode(item, join(path, name)))

    def _read_of(self, inside: Any, path: str, into: Any) -> Any:
        name, content, attributes = inside
        kind = self._things.classes[name]
        tag = "$list" if isinstance(content, list) else next(iter(content), "")
        if tag in _COLLECTIONS:
            inner = content if isinstance(content, list) else content[tag]
            return self._collection(tag, inner, path, into, kind, attributes)
        if not tag.startswith("$"):
            return self._collection("$dict", content, path, into, kind, attributes)
        of = _ATOMS[tag[1:]][0]
        made = of.__new__(kind, self.decode(content, path))
        self._set_attributes(made, attributes, path)
        return made

    def _read_enum(self, inside: Any, path: str, into: Any) -> Any:
        return self._things.classes[inside[0]](self.decode(inside[1], path))

    def _read_new(self, inside: Any, path: str, into: Any) -> Any:
        made = self._made[path] = object.__new__(self._things.classes[inside[0]])
        self._set_attributes(made, inside[1], path)
        return made

    def _read_generator(self, inside: Any, path: str, into: Any) -> Any:
        kind, encoded = inside
        state = self.decode(encoded, path)
        made = self._made[path] = new_generator(kind, into, state)
        set_generator_state(made, state)
        return made

    def _read_scalar(self, inside: Any, path: str, into: Any) -> Any:
        return np.frombuffer(base64.b64decode(inside[1]), inside[0])[0]

    def _read_tensor(self, inside: Any, path: str, into: Any) -> Any:
        name, on_cpu, is_constant = inside
        source = self._arrays[name]
        if _fits(into, source.dtype, source.shape):
            source.copy_to(into)
            made = into
        else:
            made = source.tensor()
            made = made if on_cpu else made.to(paddle.device.get_device())
        made.stop_gradient = is_constant
        self._made[path] = made
        return made

    def _read_of_numpy(self, inside: Any, path: str, into: Any) -> Any:
        made = paddle.to_tensor(self.decode(inside[0], path), stop_gradient=inside[1])
        if _fits(into, dtype_name(made), tuple(made.shape)):
            into.copy_(made, True)
            made = into
        self._made[path] = made
        return made

    def _read_array(self, inside: Any, path: str, into: Any) -> Any:
        name, described, shape, axes, kind, is_writeable = inside
        dtype = np.lib.format.descr_to_dtype(self.decode(described, path))
        data = self._arrays[name].data.view(dtype)
        there = data.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
        is_same = isinstance(into, np.ndarray) and type(into).__name__ == kind
        if is_same and into.dtype == dtype and into.shape == there.shape and into.flags.writeable:
            into[...] = there
            made = into
        else:
            made = there.copy("K").view(_ARRAY_CLASSES.get(kind, np.ndarray))
        made.flags.writeable = is_writeable
        self._made[path] = made
        return made

    def _read_masked(self, inside: Any, path: str, into: Any) -> Any:
        data, mask, fill = (self.decode(part, path) for part in inside)
        if isinstance(into, np.ma.MaskedArray) and into.shape == data.shape:
            into.data[...] = data
            into.mask = mask
            made = into
        else:
            made = np.ma.MaskedArray(data, mask)
        made.fill_value = fill[()]
        self._made[path] = made
        return made

    def _read_objects(self, inside: Any, path: str, into: Any) -> Any:
        items = self._items(inside[0], path)
        is_same = type(into) is np.ndarray and into.dtype == object and into.size == len(items)
        made = into if is_same else np.empty(inside[1], object)
        made.reshape(-1)[:] = [*items, None][:-1]
        self._made[path] = made
        return made


def is_thing(value: Any) -> bool:
    """Whether it is a collection, an array, a tensor or a generator, and no parameter."""
    kinds = (*_TAGS, np.ndarray, paddle.Tensor, *SEEDED)
    return isinstance(value, kinds) and not isinstance(value, EagerParamBase)


def class_name(kind: type) -> str:
    """As a class is called in a file; one of the script has no module."""
    module = kind.__module__
    return f"{'' if module in ('__main__', '__mp_main__') else module}.{kind.__qualname__}"


def join(path: str, key: Any) -> str:
    """The path of an attribute or of an item; no two have the same."""
    text = key if isinstance(key, str) and "." not in key else repr(key)
    return f"{path}.{text}" if path else text


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of one object, those in slots, too."""
    found = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _is_harmless(value: Any) -> bool:
    """Whether it has no state: code, a lock, a type of numbers, a pattern."""
    kind = type(value)
    is_known = kind.__module__ in _HARMLESS and kind.__name__ != "Generator"
    return callable(value) or kind is object or is_known


def has_attributes(value: Any) -> bool:
    """Whether an object may have attributes that Python can set."""
    return hasattr(value, "__dict__") or bool(_slots(type(value)))


@functools.cache
def _slots(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        named = vars(base).get("__slots__", ())
        for name in [named] if isinstance(named, str) else named:
            is_mangled = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_short(items: Iterable[Any]) -> bool:
    return all(type(item) is not int or -1 << 63 <= item < 1 << 63 for item in items)


def _fits(tensor: Any, dtype: str, shape: tuple[int, ...]) -> bool:
    return isinstance(tensor, paddle.Tensor) and dtype_name(tensor) == dtype and tuple(tensor.shape) == shape


def bytes_of(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an array of any type but objects, in C order; without a copy if they are so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
