"""Plain values that change are state, and nobody has to name them; what else changes is told.

At the end of setup the inventory is walked: the places of the experiment, of its layers, and of
every object that is reached from it. What is no longer what it was then is state, if it can be
saved (encoding.py); a resumed run puts it back, in place where the thing is still there. For the
rest two lines exist: one at the first checkpoint that does not hold it, one at each resume, when a
place that had changed is not what it was. Nothing changes without one of the three.

    values = PlainValues(state)
    values.begin()                          # at the end of setup
    state = values.state_dict()             # {"epsilon": 0.1, "model.hidden": …}
    before = Rollback(values.places)
    before.restore()                        # what has changed since is as it was
"""

from __future__ import annotations

import ast
import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from paddle.nn import Layer

from expbase.base.arrays import Array
from expbase.base.encoding import Decoder, Encoded, Encoder, is_thing, not_savable
from expbase.base.things import Things, class_name, join
from expbase.state.fingerprint import UNKNOWN, Fingerprinter, checksum
from expbase.state.inventory import (
    BEYOND,
    MOST,
    Inventory,
    has_attributes,
    is_computed,
    is_fixed,
    places,
    put,
    remove,
)
from expbase.state.objects import is_users

_DELETED = "@deleted"  # paths
_ROOT = "values."  # what the names of arrays begin with, of this entry
_SIMPLE = {type(None), bool, int, float}
_MOST_LINES = 20
_LARGE_BYTES = 1 << 26  # of a value: more is a cache, maybe
_WAYS_OUT = (
    "Expected numbers, texts, arrays, tensors and collections of them in attributes, or a "
    "state_dict and set_state_dict, or what on_save_checkpoint returns. If training does not "
    "depend on it: exclude_from_state."
)
_SETS = (
    "sets, to whose items pop() and loops may come in another order than before, while sorted(…) "
    "is the same in every process"
)

Owners = Mapping[str, Any]  # what has places, by path; the experiment's own is ""
Places = Mapping[str, tuple[Any, str, Any]]  # by path: an owner, the name there, what stands there


class Fingerprint(NamedTuple):
    """What stood in a place: the class that a line is to name, and a checksum."""

    kind: str
    content: str


class Reached(Protocol):
    """What can be reached; see attributes.py."""

    registered: list[str]  # paths of attributes that are state in any case

    def walk(self) -> Inventory:
        """Walks from the experiment on."""

    def owners(self) -> Owners:
        """Returns what has places and may be replaced in training: the experiment, layers,
        optimizers.
        """

    def owner_of(self, path: str) -> tuple[Any, str]:
        """Returns the object that has the attribute at a path, and its name."""

    def is_left_out(self, path: str) -> bool:
        """Returns whether what is there is no value, or excluded."""

    def is_registered(self, path: str) -> bool:
        """Returns whether a user has named it, or the object that has it."""

    def is_held(self, path: str) -> bool:
        """Returns whether an object with a state of its own has it."""

    def is_copied(self, path: str, value: Any) -> bool:
        """Returns whether worker processes draw from copies of what is there."""


_GONE = Fingerprint("", "gone")


class PlainValues:
    """The values that have changed since setup, as a part of a checkpoint.

    Args:
        reached: What can be reached.
        say: Takes a line about values that no checkpoint holds.
    """

    def __init__(self, reached: Reached, say: Callable[[str], object]) -> None:
        self._reached = reached
        self._say = say
        self.inventory = ""  # what each place was like when `state_dict` was asked for last
        self._inventory: Any = Things()
        self._before: dict[str, Fingerprint] = {}
        self._begun: dict[str, Fingerprint] = {}  # before the first batch of this start
        self._then: dict[str, Fingerprint] = {}  # of the checkpoint that was restored
        self._trained: set[str] = set()  # what training has changed, in any start
        self._blind: set[str] = set()  # where something is that nobody can look into
        self._warned: set[str] = set()
        self._sets: list[str] = []  # of the checkpoint that was restored

    def begin(self) -> None:
        """Notes what the values are now: that is the code's."""
        self._inventory = self._reached.walk()
        if not self._inventory.is_whole:
            self._say(
                f"more than {MOST:,} objects can be reached from self, and what changes in the "
                "others is in no checkpoint. exclude_from_state what training does not depend on."
            )
        self._before = self.fingerprints(self.places())

    def owners(self) -> Owners:
        """Returns everything that has places."""
        return {**getattr(self._inventory, "owners", {}), **self._reached.owners()}

    def places(self) -> Places:
        """Returns all places."""
        found = {path: (None, path, item) for path, item in self._inventory.opaque().items()}
        found |= {
            join(path, name): (owner, name, value)
            for path, owner in self.owners().items()
            for name, value in places(owner).items()
        }
        return {path: place for path, place in found.items() if not self._reached.is_left_out(path)}

    def fingerprints(self, found: Places) -> dict[str, Fingerprint]:
        """Returns what stands in each of these places."""
        return {path: self._fingerprint(path, value) for path, (*_, value) in found.items()}

    def _fingerprint(self, path: str, value: Any) -> Fingerprint:
        kind = type(value)
        if kind in _SIMPLE or (kind is str and len(value) < 64):
            text = f"{value:x}" if kind is int else repr(value)  # no decimal of 4,300 digits
            number = zlib.crc32(f"{kind.__name__} {text}".encode(errors="replace"))
            return Fingerprint(kind.__name__, f"{number:08x}")
        fingerprinter = Fingerprinter(self._inventory)
        content = fingerprinter.fingerprint(value)
        if fingerprinter.is_blind:
            self._blind.add(path)
        is_copied = self._reached.is_copied(path, value)
        return Fingerprint(kind.__name__, UNKNOWN if is_copied else content)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values by path, and what was deleted."""
        found = self.places()
        now = self.fingerprints(found)
        everywhere = {**now, **self._before}
        # Sorted: in a start that continues, an attribute that came late is among the first.
        changed = sorted(p for p in everywhere if not _is_same(now.get(p), self._before.get(p)))
        self._trained |= {p for p in changed if not _is_same(now.get(p), self._begun.get(p))}
        arrays: dict[str, Array] = {}
        encoder = Encoder(arrays, self._inventory)
        owners = self.owners()
        named = self._named()
        state = {path: getattr(*self._place(owners, path)) for path in named if path not in found}
        lost = []
        for path in sorted({*changed, *filter(self._reached.is_registered, found)} & found.keys()):
            if self._reached.is_held(path) and path not in named:
                continue
            owner, name, value = found[path]
            encoded = None if is_fixed(owner, name) else encoder.attempt(value, _ROOT + path)
            if encoded is not None and not self._is_opaque(path, value, encoded.content):
                state[path] = encoded
                if owner is not owners[""] and not self._reached.is_registered(path):
                    self._warn_of_size(path, encoded)
            elif path in named:
                raise not_savable(_ROOT + path, type(value).__name__)
            elif path in self._trained and path in changed and not is_computed(owner, name):
                # What training has not changed on_train_begin sets at each start.
                lost.append(path)
        self._warn([path for path in lost if path not in self._warned], found)
        state[_DELETED] = [
            path
            for path in changed
            if path not in found and not self._is_elsewhere(path)
            if not is_fixed(*self._place(owners, path))
        ]
        self.inventory = self._as_lines({**dict.fromkeys(changed, _GONE), **now})
        return state

    def _as_lines(self, fingerprints: Mapping[str, Fingerprint]) -> str:
        """Returns what each place is like, and whether training has changed it, as lines."""
        return "\n".join(
            f"{path}\t{at.kind}\t{at.content}\t{path in self._trained:d}"
            for path, at in fingerprints.items()
        )

    def _is_opaque(self, path: str, value: Any, content: Any) -> bool:
        """Returns whether nothing would be saved but that a file, say, is the one that setup has
        opened.
        """
        return content == {"$object": path} and not self._inventory.is_walked(value)

    def _named(self) -> list[str]:
        """Returns the paths that a user has registered, but of objects with a state."""
        return [p for p in self._reached.registered if not self._reached.is_left_out(p)]

    def _place(self, owners: Owners, path: str) -> tuple[Any, str]:
        """Returns the owner of a place, None if there is none, and the name there."""
        found = _find(owners, path)
        is_beyond = found[0] is None and path in self._reached.registered  # what the walk reaches
        return self._reached.owner_of(path) if is_beyond else found

    def _is_elsewhere(self, path: str) -> bool:
        """Returns whether it is a part of another state, or was named."""
        return self._reached.is_held(path) or path in self._reached.registered

    def _is_excluded(self, path: str) -> bool:
        """Returns whether it was state when it was saved, and is not now."""
        return path not in self._reached.registered and self._reached.is_left_out(path)

    def _warn(self, lost: list[str], found: Places) -> None:
        self._warned |= {*lost}
        if lost:
            names = ", ".join(_described(path, *found[path]) for path in lost[:_MOST_LINES])
            self._say(
                f"{names}: changed since setup, and in no checkpoint: a resumed run has what setup "
                f"makes of it. {_WAYS_OUT}"
            )

    def _warn_of_size(self, path: str, encoded: Encoded) -> None:
        if path not in self._warned and (size := encoded.size()) > _LARGE_BYTES:
            self._warned.add(path)
            self._say(
                f"{shown(path)}: {size >> 20} MB in each checkpoint. If training does not depend "
                f"on it, a cache say: exclude_from_state({path!r}). If it does: "
                f"register_stateful({path!r}), which ends this line."
            )

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """One line for each value that was named and is not there, or whose owner is not here."""
        missing = [path for path in self._named() if path not in state]
        values = [path for path in state if not path.startswith("@")]
        owners = self.owners()  # all state is searched for them: once
        lost = [path for path in values if self._place(owners, path)[0] is None]
        others = [p for p in values if not self._is_elsewhere(p) and _is_taken(*_find(owners, p))]
        return [
            *(f"{path}: missing in the checkpoint." for path in missing),
            *(f"{path}: in the checkpoint, and not here." for path in lost),
            *(f"{path}: a value in the checkpoint, and no value here." for path in sorted(others)),
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Sets the values; what that has lost `look` says."""
        owners = self.owners()
        values = {p: v for p, v in state.items() if not (p[0] == "@" or self._is_excluded(p))}
        encoded = [value for value in values.values() if isinstance(value, Encoded)]
        decoder = Decoder(encoded[0].arrays if encoded else {}, self._inventory)
        for path, value in values.items():
            if isinstance(value, Encoded):
                value = decoder.decode(value.content, _ROOT + path)
            put(*self._place(owners, path), value)
        for path in state[_DELETED]:
            if not self._is_excluded(path):
                remove(*_find(owners, path))
        self._sets = [shown(path.removeprefix(_ROOT)) for path in decoder.sets]
        return []

    def expect(self, inventory: str) -> None:
        """Notes the inventory of the checkpoint that a start has restored."""
        lines = [line.split("\t") for line in inventory.split("\n") if line]
        self._then = {path: Fingerprint(kind, content) for path, kind, content, _ in lines}
        self._trained = {path for path, *_, flag in lines if flag == "1"}

    def look(self) -> tuple[list[str], list[str]]:
        """Returns what is not as it was at the checkpoint, before the first batch of a start.

        Returns:
            What is lost, a line each; and what else is to be known.
        """
        now = self.places()
        self._begun = self.fingerprints(now)
        then = self._then
        self._then = {}
        differing = [
            path
            for path, there in then.items()
            if not _is_same(self._begun.get(path, _GONE), there)
            if not self._reached.is_left_out(path)
        ]
        names = {p: _described(p, *now[p]) if p in now else shown(p) for p in differing}
        lost = [
            p for p in differing if p in self._trained and not is_computed(*now.get(p, "  ")[:2])
        ]
        lines = [f"{names[p]}: has changed in training, and is not what it was then" for p in lost]
        more = len(lines) - _MOST_LINES
        anew = [names[path] for path in differing if path not in self._trained]
        said = {
            "set otherwise than at the start of the checkpoint": anew,
            "nobody can look into": [
                _described(path, *now[path])
                for path in sorted(self._blind & now.keys())
                if is_users(type(now[path][0]).__module__)
            ],
            _SETS: self._sets,
        }
        return (
            lines[:_MOST_LINES] + [f"and {more} more values"] * (more > 0),
            [_in_one_line(text, paths) for text, paths in said.items() if paths and then]
            + [f"what a resumed run has not as it was: {_WAYS_OUT}"] * bool(lost),
        )

    def path_of(self, value: Any) -> str:
        """Returns where an object was found after setup."""
        return str(self._inventory.name(value, ""))


class Rollback(Things):
    """The values of some places at a moment, to be put back: those of at most that size."""

    def __init__(self, places: Callable[[], Places], most_bytes: float = math.inf) -> None:
        super().__init__()
        self._places = places
        self._most_bytes = most_bytes
        self._things: dict[str, Any] = {}  # by path
        self._before = self._encoded()
        for value in self._before.values():
            if isinstance(value, Encoded):
                value.arrays = {name: array.copy() for name, array in value.arrays.items()}

    def reference(self, value: Any, path: str) -> str | None:
        return None if is_thing(value) else self.name(value, path)

    def name(self, value: Any, path: str) -> str | None:
        self._things.setdefault(path, value)
        return path

    def get(self, name: str) -> Any:
        return self._things.get(name)

    def knows(self, kind: type) -> bool:
        self.classes[class_name(kind)] = kind
        return True

    def _encoded(self) -> dict[str, Any]:
        """Returns each value; its checksum, if it is too large."""
        encoded: dict[str, Any] = {}
        for path, (_, _, value) in self._places().items():
            arrays: dict[str, Array] = {}
            found = Encoder(arrays, self).attempt(value, path)
            is_kept = found is not None and found.size() <= self._most_bytes
            encoded[path] = found if is_kept else checksum(value)
        return encoded

    def restore(self) -> list[str]:
        """Puts back what has changed; returns the paths of what was too large for that."""
        found = self._places()
        now = self._encoded()
        too_large = []
        for path, before in self._before.items():
            if path not in found or before == now[path]:
                continue
            if isinstance(before, Encoded):
                owner, name, _ = found[path]
                put(owner, name, Decoder(before.arrays, self).decode(before.content, path))
            else:
                too_large.append(path)
        return too_large


def _find(owners: Owners, path: str) -> tuple[Any, str]:
    """Returns the owner of the place at a path, None if there is none, and the name there."""
    ends = [i for i, letter in enumerate(path) if letter == "."]
    for end in (*reversed(ends), 0):
        where = path[:end]
        name = path[end:].lstrip(".")
        if where in owners and (name[:1] in "'\"" or "." not in name):
            return owners[where], str(ast.literal_eval(name)) if "." in name else name
    return None, path


def _is_taken(owner: Any, name: str) -> bool:
    """Returns whether a name is that of a method, a property or an object that has a state."""
    of_class = getattr(type(owner), name, None)
    is_code = isinstance(of_class, property) or inspect.isroutine(of_class)
    is_code = is_code and not is_computed(owner, name)  # which Python takes for a method, too
    return is_code or hasattr(getattr(owner, name, None), "state_dict")


def shown(path: str) -> str:
    """Returns a path in a message."""
    return path if path.startswith(BEYOND) else f"self.{path}"


def _described(path: str, owner: Any, name: str, value: Any) -> str:
    """Returns a path with the class of the object that has it, or of what stands there."""
    is_objects = has_attributes(owner) and path.count(".") and not isinstance(owner, Layer)
    return f"{shown(path)} ({type(owner if is_objects else value).__name__})"


def _in_one_line(text: str, names: list[str]) -> str:
    left = len(names) - _MOST_LINES
    return f"{text}: {', '.join(names[:_MOST_LINES])}" + f" and {left} more" * (left > 0)


def _is_same(one: Fingerprint | None, other: Fingerprint | None) -> bool:
    return one == other and (one is None or one.content != UNKNOWN)
