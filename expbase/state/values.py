"""Plain values that change: state that nobody has to name.

Of the attributes of an experiment and of its layers it is those whose values are numbers, texts,
arrays, tensors or collections of them, and which are no longer what they were at the end of setup.
What is equal stays the code's. Objects of other classes in a collection count by their identity.
Parameters, too: a list of them says which they are, and what is in them is saved with the layer.

    values = Values(lambda: {"": (experiment, attributes), "model": (layer, own_attributes(layer))})
    values.begin()                          # at the end of setup
    state = values.state_dict()             # {"epsilon": 0.1, "model.hidden": …}
    before = Snapshot(values.owners)
    before.restore()                        # what has changed since is as it was
"""

from __future__ import annotations

import inspect
import io
import math
import pickle
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import framework

from expbase.state import encoding
from expbase.state.arrays import Array
from expbase.state.objects import OF_PADDLE, StatefulObjects, unwrap

_COLLECTIONS = {list, tuple, dict, set, frozenset, deque, OrderedDict, Counter}
_PLAIN = _COLLECTIONS | {type(None), bool, int, float, str, bytes}

# Objects, or mappings, and those of their attributes, or items, that count, by their paths:
# "model.0"; the experiment's own is "".
Owners = Mapping[str, tuple[Any, Mapping[str, Any]]]


class Values:
    """The plain values of `owners()` that have changed, as a part of a checkpoint.

    Args:
        owners: The objects, and those of their attributes that count.
        named: Paths of attributes that are state in any case; the list may grow.
        say: Takes a line about a value that cannot be saved.
    """

    def __init__(
        self, owners: Callable[[], Owners], named: Sequence[str], say: Callable[[str], object]
    ) -> None:
        self.owners = owners
        self._named = named
        self._say = say
        self._warned: set[str] = set()
        self._before: dict[str, int] = {}  # fingerprints, by path

    def begin(self) -> None:
        """What the values are now is the code's."""
        values = plain_values(self.owners())
        self._before = {path: fingerprint(value) for path, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """The values by path."""
        changed = {
            path: value
            for path, value in plain_values(self.owners()).items()
            if self._before.get(path) != fingerprint(value) and self._can_be_saved(path, value)
        }
        named = {path: getattr(*find_owner(self.owners(), path)) for path in self._named}
        return changed | named

    def _can_be_saved(self, path: str, value: Any) -> bool:
        _, parts = _dump(value)
        objects = [part for part in parts if _content(part) is None]
        # The pickler comes by the class of a collection, too.
        others = [type(o).__name__ for o in objects if not any(o is kind for kind in _COLLECTIONS)]
        if others and path not in self._warned:
            self._warned.add(path)
            self._say(
                f"self.{path}: a {others[0]} in it cannot be saved; expected numbers, texts, "
                "arrays, tensors and collections of them. It has changed since setup, and a "
                "resumed run has not that."
            )
        return not others

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """One line for each value that was named and is not there, or whose owner is not here."""
        owners = self.owners()
        missing = [path for path in self._named if path not in state]
        lost = [path for path in state if find_owner(owners, path)[0] is None]
        others = [path for path in {*state}.difference(self._named) if _is_taken(owners, path)]
        return [
            *(f"{path}: missing in the checkpoint." for path in missing),
            *(f"{path}: in the checkpoint, and not here." for path in lost),
            *(f"{path}: a value in the checkpoint, and no value here." for path in sorted(others)),
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Sets the values; always exact."""
        owners = self.owners()
        for path, value in state.items():
            _set(*find_owner(owners, path), value)
        return []


class Snapshot:
    """The plain values of `owners()` at a moment, to be put back: those of at most that size."""

    def __init__(self, owners: Callable[[], Owners], most_bytes: float = math.inf) -> None:
        self._owners = owners
        values = plain_values(owners())
        self._frozen = {path: _Frozen(value, most_bytes) for path, value in values.items()}

    def restore(self) -> list[str]:
        """Puts back what has changed; returns the paths of what was too large for that."""
        owners = self._owners()
        values = plain_values(owners)
        too_large = []
        for path, frozen in self._frozen.items():
            if path not in values or fingerprint(values[path]) == frozen.fingerprint:
                continue
            if frozen.data is None:
                too_large.append(path)
            else:
                _set(*find_owner(owners, path), frozen.value())
        return too_large


def plain_values(owners: Owners) -> dict[str, Any]:
    """The plain values of the owners, by path: "model.0.calls"."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, (_, attributes) in owners.items()
        for name, value in attributes.items()
        if is_plain(value)
    }


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def own_attributes(layer: Any) -> dict[str, Any]:
    """What a user, or the layer's class, has set on it: no parameters, no sublayers, no hooks.

    Of the buffers those that a checkpoint does not hold anyway.
    """
    own = {name: value for name, value in vars(layer).items() if name not in OF_PADDLE}
    passing = layer._non_persistable_buffer_names_set
    return own | {name: value for name, value in layer._buffers.items() if name in passing}


def layers_with_buffers(found: StatefulObjects) -> Owners:
    """All layers with their own attributes and all of their buffers."""
    return {
        path: (layer, {**own_attributes(layer), **layer._buffers})
        for path, layer in found.sublayers()
    }


def find_owner(owners: Owners, path: str) -> tuple[Any, str]:
    """The object that has the attribute at a path, None if there is none, and the last name."""
    where, _, name = path.rpartition(".")
    if where in owners:
        return owners[where][0], name
    owner, _ = owners[""]
    for part in where.split("."):
        if isinstance(owner, (list, tuple)) and part.isdigit():
            owner = {str(number): item for number, item in enumerate(owner)}
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
        owner = unwrap(owner)
    return owner, name


def _is_taken(owners: Owners, path: str) -> bool:
    """Whether a path is that of a method, a property or an object with a state of its own."""
    owner, name = find_owner(owners, path)
    if isinstance(owner, dict):
        return False
    of_class = getattr(type(owner), name, None)
    if isinstance(of_class, property) or inspect.isroutine(of_class):
        return True
    return hasattr(getattr(owner, name, None), "state_dict")


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, an array, a tensor or a collection, of anything."""
    return type(value) in _PLAIN or isinstance(value, (np.generic, np.ndarray, paddle.Tensor))


def fingerprint(value: Any) -> int:
    """A number that is another one when a plain value has changed; of this process alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return hash((type(value), repr(value)))
    data, parts = _dump(value)
    return hash((data, *map(_print_of, parts)))


class _Frozen:
    """A value at a moment; without data if it has more bytes than that."""

    def __init__(self, value: Any, most_bytes: float) -> None:
        self.fingerprint = fingerprint(value)
        self.data: bytes | None = None
        data, parts = _dump(value)
        contents = [_content(part) for part in parts]
        if len(data) + sum(c.nbytes for c in contents if c is not None) <= most_bytes:
            self.data = data
            pairs = zip(parts, contents, strict=True)
            self._parts = [part if c is None else _copied(part) for part, c in pairs]

    def value(self) -> Any:
        unpickler = pickle.Unpickler(io.BytesIO(self.data or b""))
        unpickler.persistent_load = self._parts.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


class _Pickler(pickle.Pickler):
    """Takes out what is no plain value. What it writes is read in this process, or not at all."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.parts: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _PLAIN:
            return None
        self.parts.append(value)
        return len(self.parts) - 1


def _dump(value: Any) -> tuple[bytes, list[Any]]:
    """A value as it is pickled, and the parts of it that are no plain values."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.parts


def _content(part: Any) -> Any:
    """The bytes of a tensor, an array or a scalar of numpy; None of others, and of a parameter."""
    if isinstance(part, framework.EagerParamBase):
        return None
    if isinstance(part, paddle.Tensor) and part._is_initialized():
        return Array.of(part).data
    if isinstance(part, (np.ndarray, np.generic)) and not part.dtype.hasobject:
        return encoding.bytes_of(part)
    return None


def _print_of(part: Any) -> Any:
    content = _content(part)
    if content is None:
        return id(part)  # whether it is the same object
    return str(part.shape), str(part.dtype), zlib.crc32(content)


def _copied(part: Any) -> Any:
    return part.detach().clone() if isinstance(part, paddle.Tensor) else part.copy()
