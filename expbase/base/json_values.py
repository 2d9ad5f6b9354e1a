"""Values as JSON and arrays, for a checkpoint, and back to the same value of the same type.

Arrays and tensors go into a mapping beside the JSON, which becomes a file of tensors (arrays.py).
A type that JSON lacks is a dict with one key that begins with `$`: `{"$tuple": [1, 2]}`. How each
type is written and read stands in one table, FORMS. An object of another class is its attributes,
under the name of a class that the program has already: no class and no code comes from a file, and
nothing of the class is called, no `__init__` either. A thing that stands in a value twice is
written once; one that has a name (`Names`) is written as that name.

    arrays = {}
    text = json.dumps(Encoder(arrays).encode(value, "early_stopping"))
    value = Decoder(arrays).decode(json.loads(text), "early_stopping")
    checksum(value)                          # over all that would be written
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import enum
import json
import marshal
import pathlib
import sys
import time
import types
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from expbase.base import read_limits
from expbase.base.any_object import (
    attributes_of,
    class_name,
    class_named,
    function_named,
    is_function,
    method_named,
    module_of,
    set_attribute,
)
from expbase.base.arrays import ITEM_SIZES, LABELS, Array, fetch
from expbase.base.errors import TypeMistake
from expbase.base.files import checksum_of
from expbase.base.generator_states import (
    GENERATORS,
    generator_kind,
    generator_state,
    new_generator,
    set_generator_state,
)
from expbase.base.gradients import gradient, set_gradient

_LONG = 64  # a list with so many items may become an array
SIMPLE = {type(None), bool, int, float, str}  # types that Python's JSON has; nan is NaN in it
_NUMBERS = {float: "d", int: "q"}  # types of numbers, a long list of which becomes an array
_MANY = 1000  # a dict with so many items is written as keys and items, a list each
_COLUMNS = "$columns"
_LARGE = 10_000  # items of a collection whose checksum Python itself makes, if they are plain
_LARGE_BYTES = 1 << 26  # of an array
_MOST_USES = 16  # of an array that a file has once
_WHOLE = "all: "  # before the checksum of what is large
_PLAIN = {type(None), bool, int, float, complex, str, bytes}  # that marshal writes to the letter
# Classes from which a user's class may be derived; their items are written beside the attributes.
_BASES: Any = (OrderedDict, Counter, defaultdict, dict, list, deque, set, tuple, frozenset)
_BASES += (int, float, str, bytes, SimpleNamespace, object)


# Modules of Python's own whose classes hold data, and start nothing when they are called.
_OF_DATA = {"builtins", "collections", "array", "datetime", "decimal", "fractions", "uuid", "enum"}
_OF_DATA |= {"pathlib", "types", "random", "time", "numbers", "string", "queue", "_queue"}


class Names:
    """Names of things that values refer to. This class has none; others are derived from it."""

    def name_of(self, value: Any) -> str | None:
        """Returns the name by which another start finds the same thing; None if it has none."""
        return None

    def get(self, name: str) -> Any:
        """Returns the thing of that name; None if there is none."""
        return None

    def key_of(self, key: Any) -> Any:
        """Returns JSON for a key that is valid in this process only, such as an id; else None."""
        return None

    def may_be_keys(self, keys: Mapping[Any, Any]) -> bool:
        """Returns whether `key_of` may have something for one of many numbers or texts."""
        return False

    def key(self, content: Any) -> Any:
        """Returns the key that `key_of` has encoded, as it is in this process."""
        raise LookupError(content)

    def class_named(self, name: str) -> type | None:
        """Returns a class that the program has; None if it has none of that name."""
        return class_named(name)


NOTHING = Names()


@dataclass
class Encoded:
    """An encoded value. It is decoded later, where the things that it refers to are known."""

    content: Any
    arrays: Mapping[str, Array]

    def size(self) -> int:
        """Returns its size in a checkpoint, in bytes."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        return arrays + len(json.dumps(self.content))

    def checksum(self) -> int:
        """Returns a checksum of the content, which is the same in any process."""
        text = json.dumps(self.content).encode()
        fetch(self.arrays.values())
        return checksum_of([text, *(array.data for array in self.arrays.values())])


def checksum(value: Any) -> str:
    """Returns a checksum of a value, in hex, which is the same in any process.

    It covers the whole content; of what cannot be saved, the class.
    """
    return seen(value).content


class ContentSum(NamedTuple):
    """What is to be compared later of a value."""

    content: str  # a checksum of all that would be written, in hex
    is_savable: bool


def seen(value: Any, names: Names = NOTHING, *, is_inside: bool = False) -> ContentSum:
    """Looks at a value, to find out later whether it has changed.

    Args:
        value: Any value.
        names: Of things that are written as their names.
        is_inside: Look at the content, also of a value that has a name.
    """
    if type(value) in (list, tuple, dict) and len(value) >= _LARGE and _is_plain(value):
        # As it would be written it takes ten times as long. Version 2 writes no references and no
        # interned strings, so equal values give equal bytes.
        return ContentSum(f"{_WHOLE}{checksum_of([marshal.dumps(value, 2)]):08x}", True)
    encoder = Encoder({}, names, is_tolerant=True)
    content = encoder.inside(value, "") if is_inside else encoder.encode(value, "")
    number = Encoded(content, encoder.arrays).checksum()
    is_long = isinstance(value, (list, tuple, dict)) and len(value) >= _LARGE
    is_large = is_long or any(a.nbytes >= _LARGE_BYTES for a in encoder.arrays.values())
    return ContentSum(f"{_WHOLE * is_large}{number:08x}", not encoder.has_opaque)


def is_of_a_sample(one: str, other: str) -> bool:
    """Returns whether one of two checksums is of all of a large value, and the other one is not:
    expbase 1.0 took samples of long collections and large arrays, and so they cannot be compared.
    """
    return one.startswith(_WHOLE) != other.startswith(_WHOLE)


def _is_plain(value: Any, met: set[int] | None = None) -> bool:
    """Returns whether a collection has nothing but numbers, texts and collections of them."""
    items = [*value, *value.values()] if type(value) is dict else value
    kinds = {*map(type, items)} - _PLAIN
    if not kinds or kinds - {list, tuple, dict}:
        return not kinds
    met = set() if met is None else met
    held = [item for item in items if type(item) not in _PLAIN]
    num_before, shared = len(met), [id(item) for item in held if type(item) is not tuple]
    met.update(shared)
    # One that stands in several places would be written in each, with all that it holds.
    is_once = len(met) == num_before + len(shared)
    return is_once and all(_is_plain(item, met) for item in held)


class Encoder:
    """Encodes values that may share things.

    Args:
        arrays: Gets the arrays and tensors of the values.
        names: Of things that are written as their names.
        is_tolerant: Write the class of what cannot be saved, instead of an error.
    """

    def __init__(
        self, arrays: dict[str, Array], names: Names = NOTHING, *, is_tolerant: bool = False
    ) -> None:
        self.arrays = arrays
        self.names = names
        self.has_opaque = False  # whether something could not be saved
        self._is_tolerant = is_tolerant
        self._met: dict[int, str] = {}  # the path where each thing was met first, by its id
        self._alive: list[Any] = []  # the things met, so that no id is used again

    def attempt(self, value: Any, path: str, *, is_inside: bool = False) -> Encoded | None:
        """Returns a value as JSON, with its arrays; None, and notes nothing, if it cannot be saved.

        Args:
            value: Any value.
            path: Its place, under which the arrays are put.
            is_inside: Encode the content, also of a value that has a name.
        """
        notes: tuple[dict[Any, Any], ...] = (self.arrays, self._met)
        before = [len(note) for note in notes]
        try:
            content = self.inside(value, path) if is_inside else self.encode(value, path)
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
            TypeError: A part of the value cannot be saved.
        """
        is_simple = not self._is_tolerant or type(value) in SIMPLE
        return self._encode(value, path) if is_simple else self._or_class(self._encode, value, path)

    def _or_class(self, write: Callable[[Any, str], Any], value: Any, path: str) -> Any:
        """Returns a value as JSON; its class if it cannot be saved."""
        try:
            return write(value, path)
        except Exception:  # of the user's code, too, such as a property
            self.has_opaque = True
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # a file, say
                self.put(Array.of_bytes(bytes_of(np.asarray(value))), path)
            return {"$opaque": getattr(value, "__qualname__", class_name(type(value)))}

    def _encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in SIMPLE and (kind is not int or -1 << 63 <= value < 1 << 63):
            return value
        if kind is Encoded:
            self.arrays.update(value.arrays)
            return {"$encoded": value.content}
        if (name := self.names.name_of(value)) is not None:
            return {"$ref": name}
        form = FORMS.get(kind) or _form_of(value)
        if form is _GENERATOR and kind not in FORMS:  # another class could not be made again
            raise not_savable(path, kind.__qualname__)
        if not form.is_shared:
            return {form.tag: form.write(self, value, path)}
        if id(value) in self._met:
            return {"$same": self._met[id(value)]}
        self._met[id(value)] = path
        self._alive.append(value)
        return self._inside(value, path)

    def inside(self, value: Any, path: str) -> Any:
        """Returns the content of a value as JSON, also if the value has a name."""
        if not self._is_tolerant:
            return self._inside(value, path)
        return self._or_class(self._inside, value, path)

    def _inside(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is list:
            items = self.items(value, path)
            return items if isinstance(items, list) else {"$list": items}
        held = [*value.items()] if kind is dict else ()
        is_plain = kind is dict and all(type(k) is str and k[:1] != "$" for k, _ in held)
        is_short = is_plain and len(held) < _MANY
        if is_short and (self.names is NOTHING or not any(self.names.key_of(k) for k, _ in held)):
            return {k: self.encode(item, join(path, k)) for k, item in held}
        form = FORMS.get(kind) or _form_of(value)
        return {form.tag: form.write(self, value, path)}

    def items(self, items: Any, path: str) -> Any:
        """Returns the items of a list as JSON.

        A long list of numbers, of tuples of one length, or of arrays of one shape becomes arrays.
        """
        items = [*items]  # at once: a thread may add some
        kinds = {*map(type, items)}
        kind = next(iter(kinds)) if len(kinds) == 1 and len(items) >= _LONG else None
        if kind in _NUMBERS:
            with contextlib.suppress(OverflowError):
                data = np.frombuffer(array(_NUMBERS[kind], items), np.uint8)
                return {"$numbers": [_NUMBERS[kind], self.put(Array.of_bytes(data), path)]}
        if kind is np.ndarray and self._is_of_a_kind(items):
            self._met |= {id(item): f"{path}.{i}" for i, item in enumerate(items)}
            self._alive.append(items)
            return {"$stack": self.encode(np.stack(items), path)}
        if kind is np.int64:  # an order that numpy has drawn
            return {"$stack": self.encode(np.array(items), path)}
        if kind is tuple and len({*map(len, items)}) == 1 and items[0]:
            columns = [[*column] for column in zip(*items, strict=True)]
            return {"$rows": [self.items(c, join(path, i)) for i, c in enumerate(columns)]}
        if kinds <= SIMPLE - {int}:
            return [*items]
        return [self.encode(item, f"{path}.{i}") for i, item in enumerate(items)]

    def _is_of_a_kind(self, arrays: list[Any]) -> bool:
        is_known = any(self.names.name_of(a) is not None or id(a) in self._met for a in arrays)
        kinds = {(array.dtype, array.shape) for array in arrays}
        is_once = len({*map(id, arrays)}) == len(arrays)
        return len(kinds) == 1 and is_once and not is_known and not arrays[0].dtype.hasobject

    def pairs(self, mapping: Mapping[Any, Any], path: str) -> Any:
        """Returns the keys and items of a dict as JSON, in their order."""
        held = {**mapping}  # at once: a thread may add some
        kinds = {*map(type, held)} if len(held) >= _MANY else set()
        if kinds in ({int}, {str}) and not self.names.may_be_keys(held):
            return {_COLUMNS: [self.items([*held], f"{path}#"), self.items([*held.values()], path)]}
        return [
            [self.key(key, path), self.encode(item, join(path, key))] for key, item in held.items()
        ]

    def key(self, key: Any, path: str) -> Any:
        """Returns the key of a dict."""
        content = self.names.key_of(key)
        if content is not None:
            return {"$key": content}
        if isinstance(key, paddle.Tensor) and self.names.name_of(key) is None:
            raise not_savable(path, "key that is a tensor of no layer among the attributes")
        return self.encode(key, f"{path}#")

    def class_name(self, kind: type, path: str) -> str:
        """Returns the name by which another start finds a class; a TypeError if it cannot."""
        name = class_name(kind)
        if self.names.class_named(name) is not kind:
            raise not_savable(path, kind.__qualname__)
        return name

    def function_name(self, function: Any, path: str) -> str:
        """Returns the name by which another start finds a function; a TypeError if it cannot."""
        name = class_name(function)
        if function_named(name) is not function:
            raise not_savable(path, getattr(function, "__qualname__", "function"))
        return name

    def method(self, method: Any, path: str) -> list[str]:
        """Returns the names of an object and of its method; a TypeError if the object has none."""
        owner = self.names.name_of(method.__self__)
        if owner is None or method_named(method.__self__, method.__name__) != method:
            raise not_savable(path, method.__qualname__)
        return [owner, method.__name__]

    def put(self, content: Array, path: str) -> str:
        """Puts an array into `arrays`; returns its name, which is the path or one like it."""
        while path in self.arrays:
            path += "'"
        self.arrays[path] = content
        return path


class Decoder:
    """Decodes what an `Encoder` has encoded.

    Args:
        arrays: Those of the `Encoder`.
        names: Of things that the values refer to.
    """

    def __init__(self, arrays: Mapping[str, Array], names: Names = NOTHING) -> None:
        self.names = names
        self._arrays = arrays
        self._uses: Counter[str] = Counter()  # of arrays
        self._made: dict[str, Any] = {}  # by the path where they were met first

    def array(self, name: str) -> Array:
        """Returns an array; a LookupError if there is none, or if it is used again and again."""
        self._uses[name] += 1
        if self._uses[name] > _MOST_USES:
            raise LookupError(f"the array {name!r:.80} is used more than {_MOST_USES} times")
        return self._arrays[name]

    def encoded(self, content: Any) -> Encoded:
        """Returns a value that is to be decoded later."""
        return Encoded(content, self._arrays)

    def decode(self, content: Any, path: str) -> Any:
        """Returns the value that JSON stands for; a LookupError if something of it is unknown."""
        if isinstance(content, list):
            made = self.note(path, [])
            made.extend(self.items(content, path))
            return made
        if not isinstance(content, dict):
            return content
        tag: str = next(iter(content), "")
        if tag[:1] == "$":
            read = _READERS.get(tag)
            if read is None:
                raise LookupError(f"{path}: there is no type {tag}")
            return read(self, content[tag], path)
        made = self.note(path, {})
        for key, item in content.items():
            made[key] = self.decode(item, join(path, key))
        return made

    def note(self, path: str, made: Any) -> Any:
        """Notes a value before its items are decoded, which may contain it; returns it."""
        self._made[path] = made
        return made

    def items(self, content: Any, path: str) -> list[Any]:
        """Returns the items that `Encoder.items` has encoded."""
        if isinstance(content, list):
            return [self.decode(item, f"{path}.{i}") for i, item in enumerate(content)]
        ((tag, inside),) = content.items()
        if tag == "$numbers":
            kind, name = inside
            if kind not in _NUMBERS.values():  # those of one byte would be eight times as large
                raise LookupError(f"{path}: there are no numbers {kind!r:.20}")
            return array(kind, self.array(name).data.tobytes()).tolist()
        if tag == "$stack":
            stack = self.decode(inside, path)
            read_limits.few(0 if stack.nbytes else len(stack))
            rows = [row.copy() if row.ndim else row[()] for row in stack]
            return [self.note(f"{path}.{i}", row) for i, row in enumerate(rows)]
        columns = [self.items(column, join(path, i)) for i, column in enumerate(inside)]
        return [*zip(*columns, strict=True)]

    def num_items(self, content: Any) -> int:
        """Returns how many items `items` would make."""
        if isinstance(content, list):
            return len(content)
        ((tag, inside),) = content.items()
        if tag == "$numbers":
            return self._arrays[inside[1]].nbytes // 8
        return int(inside["$array"][2][0]) if tag == "$stack" else self.num_items(inside[0])

    def fill_dict(self, made: Any, pairs: Any, path: str, base: Any = dict) -> Any:
        """Adds the items that `Encoder.pairs` has encoded to a dict; returns the dict."""
        if isinstance(pairs, dict):
            keys, items = pairs[_COLUMNS]
            base.update(
                made, zip(self.items(keys, f"{path}#"), self.items(items, path), strict=True)
            )
            return made
        for content, item in pairs:
            key = self.key(content, path)
            base.__setitem__(made, key, self.decode(item, join(path, key)))
        return made

    def key(self, content: Any, path: str) -> Any:
        """Returns the key of a dict."""
        is_named = isinstance(content, dict) and "$key" in content
        return self.names.key(content["$key"]) if is_named else self.decode(content, f"{path}#")

    def class_named(self, name: str, path: str) -> type:
        """Returns a class of the program; a LookupError if it has none of that name."""
        found = self.names.class_named(name)
        if found is None:
            raise LookupError(f"{path}: there is no class {name} that a value can be made of")
        return found

    def class_as_value(self, name: str, path: str) -> type:
        """Returns a class that may be called: of Python's own those of data alone."""
        found = self.class_named(name, path)
        if _is_of_python(found) and module_of(found) not in _OF_DATA:
            raise LookupError(f"{path}: no {name} comes from a file")
        return found

    def function_named(self, name: str, path: str) -> Any:
        """Returns a function of the program; a LookupError if it has none of that name."""
        if (found := function_named(name)) is None:
            raise LookupError(f"{path}: there is no function {name}")
        return found

    def method(self, content: Any, path: str) -> Any:
        """Returns a method of a named object; a LookupError if there is none."""
        owner, name = content
        if (found := method_named(self.named(owner, path), name)) is None:
            raise LookupError(f"{path}: {owner or 'the experiment'} has no method {name}")
        return found

    def same(self, where: str) -> Any:
        """Returns the value that was decoded first at another path."""
        return self._made[where]

    def named(self, name: str, path: str) -> Any:
        """Returns the thing of a name; a LookupError if there is none."""
        if (found := self.names.get(name)) is None:
            raise LookupError(f"{path}: there is no {name}")
        return found


class Form(NamedTuple):
    """How values of a type are written and read."""

    tag: str
    write: Callable[[Encoder, Any, str], Any]
    read: Callable[[Decoder, Any, str], Any]
    is_shared: bool = True  # whether one object under two names differs from two equal objects


def _plain(tag: str, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Form:
    """Returns the form of a type that holds no other values."""
    return Form(
        tag, lambda e, value, path: write(value), lambda d, content, path: read(content), False
    )


def _in_order(items: Iterable[Any]) -> list[Any]:
    """Returns items of a set in an order that does not depend on the process, if there is one."""
    items = [*items]
    if all(isinstance(item, (int, float)) for item in items):
        return items  # their hashes are the same in every process
    return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def _read_list(d: Decoder, content: Any, path: str) -> Any:
    made = d.note(path, [])
    made.extend(d.items(content, path))
    return made


def _read_set(d: Decoder, content: Any, path: str) -> Any:
    made = d.note(path, set())
    for item in d.items(content, path):
        made.add(item)
    return made


def _read_deque(d: Decoder, content: Any, path: str) -> Any:
    made = d.note(path, deque(maxlen=content[1]))
    made.extend(d.items(content[0], path))
    return made


def _write_defaultdict(e: Encoder, value: Any, path: str) -> Any:
    factory = value.default_factory
    name = None if factory is None else e.class_name(factory, path)
    return [name, e.pairs(value, path)]


def _read_defaultdict(d: Decoder, content: Any, path: str) -> Any:
    name, pairs = content
    factory = None if name is None else d.class_named(name, path)
    is_built_in = module_of(factory) in ("builtins", "collections")
    if factory is not None and _is_of_python(factory) and not is_built_in:  # it would be called
        raise LookupError(f"{path}: no {name} is made from a file")
    made = d.note(path, defaultdict(factory))
    return d.fill_dict(made, pairs, path)


def _write_array(e: Encoder, value: Any, path: str) -> Any:
    """As bytes: a file of tensors lacks many types of numpy (texts, dates, structures)."""
    if value.dtype.hasobject:
        return [None, [*value.shape], e.items([*value.flat], path)]
    # The order of its axes in memory, which decides in what order they are summed.
    axes = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
    name = e.put(Array.of_bytes(bytes_of(value.transpose(axes))), path)
    return [name, _described(value.dtype), [*value.shape], axes, value.flags.writeable]


def _read_array(d: Decoder, content: Any, path: str) -> Any:
    if content[0] is None:  # an array of objects
        shape = read_limits.sized(content[1], 1, d.num_items(content[2]))
        made = d.note(path, np.empty(shape, object))
        for index, item in zip(np.ndindex(made.shape), d.items(content[2], path), strict=True):
            made[index] = item
        return made
    name, described, shape, axes, is_writeable = content
    dtype, data = read_limits.of_bytes(_dtype(described)), d.array(name).data
    read_limits.sized(shape, dtype.itemsize, data.nbytes)
    whole = data.view(dtype).reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
    made = d.note(path, whole.copy("K"))
    made.flags.writeable = is_writeable
    return made


def _described(dtype: Any) -> Any:
    return [*map(list, dtype.descr)] if dtype.names else dtype.str


def _dtype(described: Any) -> Any:
    is_fields = isinstance(described, list)
    return np.dtype([_field(f) for f in described] if is_fields else described)


def _read_scalar(dtype: Any, text: str) -> Any:
    return np.ndarray((), dtype, bytearray.fromhex(text))[()]


def _field(field: Any) -> Any:
    name, kind, *shape = field
    kind = [_field(inner) for inner in kind] if isinstance(kind, list) else kind
    return (name, kind, *map(tuple, shape))


def _write_tensor(e: Encoder, value: Any, path: str) -> Any:
    is_there = value.size == 0 or value._is_initialized()
    if not is_there:
        raise TypeMistake(f"{path}: a tensor without memory cannot be saved.")
    content = Array.of(value)
    name = e.put(content.as_bytes(), path)
    on_cpu = value.place.is_cpu_place()
    grad = gradient(value) if value.is_leaf and not value.stop_gradient else None
    # Detached: whether a gradient has one of its own is not kept.
    of_grad = [] if grad is None else [_write_tensor(e, grad.detach(), f"{path}.grad")]
    return [name, content.dtype, content.shape, on_cpu, value.stop_gradient, *of_grad]


def _read_tensor(d: Decoder, content: Any, path: str) -> Any:
    name, dtype, shape, on_cpu, is_constant, *of_grad = content
    array = Array(dtype, tuple(shape), d.array(name).data)
    read_limits.sized(shape, ITEM_SIZES[dtype], array.nbytes)
    made = array.tensor()
    made = d.note(path, made if on_cpu else made.to(paddle.device.get_device()))
    made.stop_gradient = is_constant
    for grad in of_grad[:1]:
        read_limits.same(grad[2], shape)
        set_gradient(made, _read_tensor(d, grad, f"{path}.grad"))
    return made


def _write_generator(e: Encoder, value: Any, path: str) -> Any:
    return [generator_kind(value), e.encode(generator_state(value), path)]


def _read_generator(d: Decoder, content: Any, path: str) -> Any:
    state = d.decode(content[1], path)
    made = d.note(path, new_generator(content[0], state))
    set_generator_state(made, state)
    return made


def _write_object(e: Encoder, value: Any, path: str) -> Any:
    """An object of a user's class, or of a package's: its attributes, and its items."""
    kind = type(value)
    base = next(base for base in _BASES if isinstance(value, base))
    if not _can_be_made(kind, base):
        raise not_savable(path, kind.__qualname__)
    attributes = {key: e.encode(v, join(path, key)) for key, v in attributes_of(value).items()}
    items = None if base is object else _as_base(e, value, base, path)
    return [e.class_name(kind, path), attributes, items]


def _as_base(e: Encoder, value: Any, base: Any, path: str) -> Any:
    """Returns the items of an object as if it were of a base of Python's own."""
    if issubclass(base, dict):
        return e.pairs({key: base.__getitem__(value, key) for key in base.__iter__(value)}, path)
    if base in (int, float, str, bytes):
        return e.encode(base(value), path)
    if base is SimpleNamespace:
        return None
    items = [*base.__iter__(value)]
    if base is deque:
        return [e.items(items, path), value.maxlen]
    return e.items(_in_order(items) if base in (set, frozenset) else items, path)


def _read_object(d: Decoder, content: Any, path: str) -> Any:
    name, attributes, items = content
    kind = d.class_named(name, path)
    base: Any = next(base for base in _BASES if issubclass(kind, base))
    if not _can_be_made(kind, base):
        raise LookupError(f"{path}: no {name} is made from a file")
    if base in (tuple, frozenset):
        made = base.__new__(kind, d.items(items, path))
    elif base in (int, float, str, bytes):
        made = base.__new__(kind, d.decode(items, path))
    else:
        made = base.__new__(kind)
    d.note(path, made)
    if issubclass(base, dict):
        d.fill_dict(made, items, path, base)
    elif base is deque:
        deque.__init__(made, (), items[1])
        deque.extend(made, d.items(items[0], path))
    elif base is list:
        list.extend(made, d.items(items, path))
    elif base is set:
        base.update(made, d.items(items, path))
    for key, value in attributes.items():
        set_attribute(made, key, d.decode(value, join(path, key)))
    return made


def _write_enum(e: Encoder, value: Any, path: str) -> Any:
    return [e.class_name(type(value), path), e.encode(value.value, path)]


def _read_enum(d: Decoder, content: Any, path: str) -> Any:
    kind = d.class_named(content[0], path)
    if not issubclass(kind, enum.Enum):
        raise LookupError(f"{path}: {content[0]} is no Enum")
    return kind(read_limits.bits(d.decode(content[1], path)))


_OBJECT = Form("$object", _write_object, _read_object)
_ENUM = Form("$enum", _write_enum, _read_enum, False)
_CLASS = Form("$class", Encoder.class_name, Decoder.class_as_value, False)
# What the program has under a name is found there again: no code comes from a file.
_FUNCTION = Form("$function", Encoder.function_name, Decoder.function_named, False)
_METHOD = Form("$method", Encoder.method, Decoder.method, False)
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath)}
_PATH = _plain("$path", lambda v: [type(v).__name__, str(v)], lambda c: _PATHS[c[0]](c[1]))
_ARRAY = Form("$array", _write_array, _read_array)
_GENERATOR = Form("$generator", _write_generator, _read_generator)
_SCALAR = Form(  # in JSON, as it may be a key
    "$scalar",
    lambda e, v, path: [_described(v.dtype), np.array(v).tobytes().hex()],
    lambda d, c, path: _read_scalar(read_limits.of_bytes(_dtype(c[0])), c[1]),
    False,
)
_NEVER = (type, paddle.nn.Layer, paddle.io.DataLoader, np.ndarray)  # is made from a file
_DTYPES = {name: getattr(paddle, name) for name in LABELS if hasattr(paddle, name)}
FORMS: dict[type, Form] = {
    int: _plain("$int", hex, lambda text: int(text, 16)),  # JSON has none of 4,300 digits
    complex: _plain("$complex", lambda v: [v.real, v.imag], lambda c: complex(*c)),
    bytes: _plain("$bytes", lambda v: base64.b64encode(v).decode(), base64.b64decode),
    bytearray: Form(
        "$bytearray",
        lambda e, v, path: base64.b64encode(v).decode(),
        lambda d, c, path: d.note(path, bytearray(base64.b64decode(c))),
    ),
    array: Form(
        "$numbers_of",
        lambda e, v, path: [v.typecode, e.put(Array.of_bytes(np.frombuffer(v, np.uint8)), path)],
        lambda d, c, path: d.note(path, array(c[0], d.array(c[1]).data.tobytes())),
    ),
    tuple: Form("$tuple", Encoder.items, lambda d, c, path: tuple(d.items(c, path)), False),
    list: Form("$list", Encoder.items, _read_list),
    dict: Form("$dict", Encoder.pairs, lambda d, c, p: d.fill_dict(d.note(p, {}), c, p)),
    OrderedDict: Form(
        "$ordered",
        Encoder.pairs,
        lambda d, c, p: d.fill_dict(d.note(p, OrderedDict()), c, p, OrderedDict),
    ),
    Counter: Form(
        "$counter", Encoder.pairs, lambda d, c, p: d.fill_dict(d.note(p, Counter()), c, p)
    ),
    defaultdict: Form("$defaultdict", _write_defaultdict, _read_defaultdict),
    deque: Form("$deque", lambda e, v, path: [e.items(v, path), v.maxlen], _read_deque),
    set: Form("$set", lambda e, v, path: e.items(_in_order(v), path), _read_set),
    frozenset: Form(
        "$frozenset",
        lambda e, v, path: e.items(_in_order(v), path),
        lambda d, c, path: frozenset(d.items(c, path)),
        False,
    ),
    range: _plain(
        "$range", lambda v: [v.start, v.stop, v.step], lambda c: range(*map(read_limits.word, c))
    ),
    slice: _plain("$slice", lambda v: [v.start, v.stop, v.step], lambda c: slice(*c)),
    Decimal: _plain("$decimal", str, read_limits.decimal),
    Fraction: _plain("$fraction", str, read_limits.fraction),
    datetime.date: _plain("$date", str, datetime.date.fromisoformat),
    datetime.time: _plain("$time", str, datetime.time.fromisoformat),
    datetime.datetime: _plain("$datetime", str, datetime.datetime.fromisoformat),
    datetime.timedelta: _plain(
        "$timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda c: datetime.timedelta(*c),
    ),
    datetime.timezone: _plain(
        "$timezone",
        lambda v: v.utcoffset(None).total_seconds(),
        lambda c: datetime.timezone(datetime.timedelta(seconds=c)),
    ),
    pathlib.PosixPath: _PATH,
    pathlib.PurePosixPath: _PATH,
    np.dtype: _plain("$dtype", _described, _dtype),
    paddle.dtype: _plain("$paddle", lambda v: str(v).rpartition(".")[2], lambda c: _DTYPES[c]),
    uuid.UUID: _plain("$uuid", lambda v: v.hex, uuid.UUID),
    time.struct_time: _plain("$moment", list, time.struct_time),
    np.ndarray: _ARRAY,
    paddle.Tensor: Form("$tensor", _write_tensor, _read_tensor),
    **dict.fromkeys(GENERATORS, _GENERATOR),
    Encoded: Form("", lambda e, v, path: None, lambda d, c, path: d.encoded(c)),
}
_NAMED = _OBJECT, _ENUM, _CLASS, _FUNCTION, _METHOD, _SCALAR  # which are found by no type
_READERS: dict[str, Callable[[Decoder, Any, str], Any]] = {
    **{form.tag: form.read for form in (*FORMS.values(), *_NAMED)},
    "$encoded": FORMS[Encoded].read,
    "$ref": Decoder.named,
    "$same": lambda d, where, path: d.same(where),
}


_SIZE = getattr(paddle.base.libpaddle, "Size", list)  # of a shape: a class derived from list


def _form_of(value: Any) -> Form:
    """Returns the form of a value whose type is not in the table."""
    if isinstance(value, np.generic):
        return _SCALAR
    if isinstance(value, np.dtype):
        return FORMS[np.dtype]
    if isinstance(value, enum.Enum):
        return _ENUM
    if isinstance(value, type):
        return _CLASS
    if is_function(value):
        return _FUNCTION
    if isinstance(value, types.MethodType):
        return _METHOD
    if isinstance(value, EagerParamBase):
        return FORMS[paddle.Tensor]
    if isinstance(value, GENERATORS):
        return _GENERATOR
    return FORMS[list] if type(value) is _SIZE else _OBJECT


def _can_be_made(kind: Any, base: Any) -> bool:
    """Returns whether an object is its attributes and items, and can be made without a call."""
    if (_is_of_python(kind) and kind is not SimpleNamespace) or hasattr(kind, "__del__"):
        return False
    if isinstance(kind, type) and issubclass(kind, _NEVER):
        return False
    with contextlib.suppress(TypeError):  # a class in C wants its own __new__
        return base in (tuple, frozenset, int, float, str, bytes) or bool([base.__new__(kind)])
    return False


def _is_of_python(kind: type) -> bool:
    """Returns whether a class is Python's own."""
    root = module_of(kind).partition(".")[0]
    return root in sys.stdlib_module_names and root != "__main__"


def join(path: str, key: Any) -> str:
    """Returns the path of an attribute or of an item; no two have the same."""
    is_word = isinstance(key, str) and "." not in key and not key[:1].isdigit() and key != ""
    text = key if is_word else repr(key)
    return f"{path}.{text}" if path else text


def bytes_of(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of an array, in C order: a view if they are in that order already.

    The array may have any type but objects.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def not_savable(path: str, what: object) -> TypeError:
    return TypeMistake(
        f"{path}: a {what} cannot be saved; expected numbers, texts, lists, dicts, arrays or "
        "tensors. Save its parts, or exclude_from_state."
    )
