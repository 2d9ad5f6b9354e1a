"""The values that training has changed: an entry of a checkpoint, put back in place.

When training begins (after on_train_begin) it is noted what stands in each place. What is no longer
what it was then is state, and stays state; a resumed run puts it back, into the objects that setup
has made. What training does not change is the code's. Of optimizers and schedules also that is
noted, so that a resume can name what is another one now, and find the learning rate anew.

    values = Values(state, audit, warn)
    values.note_setup()                     # at the end of setup
    values.begin()                          # before the first batch
    state = values.state_dict()             # {"epsilon": …, "meter.sum": …}
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle

from expbase.base.arrays import describe
from expbase.base.encoding import (
    SAMPLED,
    Decoder,
    Encoded,
    Encoder,
    Names,
    Summary,
    not_savable,
)
from expbase.base.files import checksum_of
from expbase.base.generators import GENERATORS, generator_kind
from expbase.base.objects import state_setter
from expbase.state.classes import is_handle, is_written
from expbase.state.constants import constants_in, follow
from expbase.state.nodes import (
    WHOLE,
    DictNode,
    GroupNode,
    Node,
    WholeNode,
    is_same_key,
)
from expbase.state.paths import Spot
from expbase.state.walk import Walk, WalkedNames, no_garbage_collection

_DELETED, _ORDER, _CONSTANTS = "@deleted", "@order", "@constants"
_ROOT = "values."  # what the names of arrays begin with, of this entry
_LARGE_BYTES = 1 << 26  # of a value: more is a cache, maybe
_NOTHING: Any = object()
_SIMPLE = {type(None), bool, int, float, str}


class Seen(NamedTuple):
    """The value that stood in a place."""

    content: str  # a checksum
    thing: Any = None  # what cannot be saved, and is the same as long as it is the same object
    items: Any = None  # of a long list, of which a checksum is of some items


class Place(NamedTuple):
    """One place of a node."""

    path: str  # of the place
    name: str  # of the node, in any start
    node: Node
    key: Any
    value: Any

    def look(self, names: Names) -> Any:
        """Returns the value to compare later: a simple value itself, else a checksum."""
        return look(self.value, names, is_whole=self.key is WHOLE)


class Reached(Protocol):
    """The part of UserState that is asked here; see attributes.py."""

    registered: list[str]  # paths of attributes that are state in any case

    def walk(self) -> Walk:
        """Walks from the experiment on."""

    def spot(self, path: str) -> Spot:
        """Returns the place that a path names."""

    def is_registered(self, path: str) -> bool:
        """Returns whether a user has named it, or the object that has it."""

    def is_left_out(self, path: str) -> bool:
        """Returns whether what is there is no value, or excluded."""


class Teller(Protocol):
    """The part of Audit that is used here; see audit.py."""

    def tell(self, path: str, value: Any, why: str) -> None:
        """Names a place that has changed and is in no checkpoint, once."""

    def begin(self, walk: Walk, names: WalkedNames) -> None:
        """Notes the values outside of checkpoints."""

    def look(self, walk: Walk, names: WalkedNames) -> None:
        """Names the values outside of checkpoints that have changed."""


class Values:
    """The values that training has changed: an entry of the checkpoint.

    Args:
        reached: What the experiment leads to.
        audit: Names the values that cannot be restored.
        say: Called with a line about sizes.
    """

    def __init__(self, reached: Reached, audit: Teller, say: Callable[[str], object]) -> None:
        self._reached = reached
        self._audit = audit
        self._say = say
        self._setup = WalkedNames(Walk(None, {}))  # by which names another start finds what it has
        self._constants: dict[str, Any] = {}  # of optimizers and schedules, at the end of setup
        self._shapes: dict[str, str] = {}  # of what is changed as a whole, at the end of setup
        self._begun: dict[str, Any] = {}  # what stood in each place when training began, by path
        self._keys: dict[str, list[Any]] = {}  # of each node, at that time
        self._still: dict[str, dict[Any, Any]] = {}  # of nodes that had numbers and texts alone
        self._texts: dict[str, str] = {}  # checksums of what stood there, by path
        self._moved: set[str] = set()  # nodes of what training has changed
        self._changed: set[str] = set()  # paths of what training has changed, in any start
        self._deleted: list[list[Any]] = []  # places that the checkpoint has none of: node and key
        self._ordered: set[str] = set()  # dicts whose items have another order than setup's
        self._handled: set[str] = set()  # nodes that have opened a handle since setup
        self._restored: dict[str, Any] = {}  # what stood there after a restore, by path
        self._decoded: dict[str, tuple[str, Any, Any]] = {}  # of a checkpoint that fits
        self._large: set[str] = set()  # of whose size a line was said
        self.lines: list[str] = []  # what a restore has to say

    # --- what there is ---------------------------------------------------------------------

    def note_setup(self) -> None:
        """Notes the objects at the end of setup, which every start makes."""
        walk = self._reached.walk()
        self._setup = walk.names()
        self._shapes = {p: _shape(n.value) for p, n in walk.nodes.items() if _is_whole(n)}
        self._constants = constants_in(walk)
        self.begin()  # a loop of the user's own may not say that it begins

    def has_setup_made(self, path: str) -> bool:
        """Returns whether an object was at a path when setup ended."""
        return self._setup.has(path)

    @no_garbage_collection()
    def begin(self) -> None:
        """Notes the value in each place before the first batch: these are the code's."""
        walk, names, nodes = self._nodes()
        self._begun = {}
        self._keys = {name: [] for name in nodes}
        for place in self._places(nodes, walk):
            self._begun[place.path] = place.look(names)
            self._keys[place.name].append(place.key)
        everything = ((name, dict(node.places())) for name, node in nodes.items())
        self._still = {
            n: held for n, held in everything if _SIMPLE.issuperset(map(type, held.values()))
        }
        self._texts = {path: as_text(seen) for path, seen in self._begun.items() if _is_known(seen)}
        self._audit.begin(walk, names)

    def _nodes(self) -> tuple[Walk, WalkedNames, dict[str, Node]]:
        """Returns the walk, its names, and by name the nodes that every start has."""
        walk = self._reached.walk()
        names = self._setup.now(walk)
        nodes = {"": walk.nodes[""]}
        for path, node in walk.nodes.items():
            name = path if isinstance(node, GroupNode) else names.name_of(node.value)
            if name is not None and path:
                nodes[name] = node
        return walk, names, nodes

    def _places(self, nodes: Mapping[str, Node], walk: Walk) -> Iterator[Place]:
        """Yields the places of nodes."""
        path_of, is_left_out = walk.path_of, self._reached.is_left_out
        for name, node in nodes.items():
            for key, value in node.places().items():
                where = path_of(name, key)
                if not is_left_out(where):
                    yield Place(where, name, node, key, value)

    def looked(self) -> dict[str, tuple[Any, Any]]:
        """Returns the value in each place, by path: in a form to compare, and itself."""
        walk, names, nodes = self._nodes()
        places = self._places(nodes, walk)
        return {place.path: (place.look(names), place.value) for place in places}

    def code(self) -> dict[str, str]:
        """Returns checksums of the values that training has not changed, by path."""
        return {
            path: text
            for path, text in self._texts.items()
            if path not in self._changed and path.removesuffix("[:]") not in self._constants
        }

    # --- saving ----------------------------------------------------------------------------

    @no_garbage_collection()
    def state_dict(self) -> dict[str, Any]:
        """Returns the changed values by path, each with its node and key, and the deleted ones."""
        walk, names, nodes = self._nodes()
        encoder = Encoder({}, names)
        state: dict[str, Any] = {}
        moved = {name: node for name, node in nodes.items() if not self._is_still(name, node)}
        keys: dict[str, list[Any]] = {name: [] for name in moved}
        for place in self._places(moved, walk):
            keys[place.name].append(place.key)
            is_state = self._has_changed(place, names) or self._reached.is_registered(place.path)
            if is_state and (encoded := self._encoded(place, encoder)) is not None:
                state[place.path] = encoded
                self._moved.add(place.name)
        self._leave_flags(state, nodes)
        self._audit.look(walk, names)
        state |= self._beyond(state, encoder)
        self._changed |= state.keys()
        self._note_keys(nodes, keys)
        keys |= {name: self._keys[name] for name in self._ordered & nodes.keys() - keys.keys()}
        state[_DELETED] = [[name, key] for name, key in self._deleted if name in nodes]
        state[_ORDER] = {
            name: [encoder.key(key, name) for key in keys[name]]
            for name in sorted(self._ordered & nodes.keys())
            if not _is_long(keys[name])  # it has grown since
        }
        state[_CONSTANTS] = self._constants
        return state

    def _leave_flags(self, state: dict[str, Any], nodes: Mapping[str, Node]) -> None:
        """Leaves out flags that say that an object has opened a handle since setup.

        With `if not self.is_open: self._open()` a flag without the handle would end the next start.
        """
        for name in self._handled:
            is_plain = name in nodes and type(nodes[name]) is Node and name
            for key, value in nodes[name].places().items() if is_plain else ():
                path = f"{name}.{key}"
                if type(value) is bool and state.pop(path, None):
                    self._audit.tell(path, value, "handle")

    def _note_keys(self, nodes: Mapping[str, Node], keys: Mapping[str, list[Any]]) -> None:
        """Notes which places are gone, and which dicts have another order."""
        for name, now in keys.items():
            before = self._keys.get(name)
            is_as_long = before is not None and len(before) == len(now)
            if before is None or (is_as_long and all(map(is_same_key, before, now))):
                continue
            if isinstance(nodes[name], DictNode):
                if len(now) == len(nodes[name].places()) and not _is_long(now):
                    self._ordered.add(name)
            else:
                gone = [[name, key] for key in before if key not in now]
                self._deleted += [place for place in gone if place not in self._deleted]
        self._deleted = [place for place in self._deleted if place[1] not in keys.get(place[0], ())]

    def _is_still(self, name: str, node: Node) -> bool:
        """Returns whether a node has only numbers and texts, unchanged; most nodes do."""
        held = self._still.get(name)
        if held is None or name in self._moved or self._reached.registered:
            return False
        now = node.places()
        both = (now.values(), held.values()), (now, held)
        return len(now) == len(held) and all(all(map(operator.is_, *pair)) for pair in both)

    def _has_changed(self, place: Place, names: Names) -> bool:
        if place.path in self._changed:
            return True
        before = self._begun.get(place.path, _NOTHING)
        if before is place.value and type(before) in _SIMPLE:
            return False
        return before is _NOTHING or not is_same(before, place.look(names))

    def _encoded(self, place: Place, encoder: Encoder) -> Encoded | None:
        """Returns a place's value as a checkpoint has it; None, with a line, if that cannot be."""
        is_whole = place.key is WHOLE
        if type(place.value) in _SIMPLE and type(place.key) is str:
            return Encoded(
                [place.name, [encoder.key(place.key, "")], encoder.encode(place.value, "")], {}
            )
        where = _ROOT + place.path.removesuffix("[:]")
        content = encoder.attempt(place.value, where, is_inside=is_whole)
        if is_whole and _shape(place.value) != self._shapes.get(place.name):
            content = None  # which could be put nowhere
        try:
            key = None if is_whole else [encoder.key(place.key, where)]  # None is a key, too
        except TypeError:
            content = None
        is_closed = self._setup.is_closed(place.value) and self._reached.is_registered(place.path)
        if content is None or is_closed:
            if self._reached.is_registered(place.path):
                raise not_savable(where, type(place.value).__name__)
            is_new = self._begun.get(place.path) is None
            if is_new and is_handle(place.value):
                self._handled.add(place.name)
            elif not is_written(place.value):
                self._audit.tell(place.path, place.value, "cannot be saved")
            return None
        if isinstance(place.value, set) and len(place.value) > 1:
            self._audit.tell(place.path, place.value, "order")
        encoded = Encoded([place.name, key, content.content], content.arrays)
        if "." in place.path and not self._reached.is_registered(place.path):
            self._say_size(place.path, encoded)
        return encoded

    def _beyond(self, state: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
        """Returns the registered values that the walk does not reach."""
        found = {}
        for path in self._reached.registered:
            spot = self._reached.spot(path)
            is_known = _has_under(path, state) or self._reached.is_left_out(path)
            if is_known or not spot.is_there:
                continue
            value = spot.value
            if state_setter(value) is None and self._setup.name_of(value) is None:
                content = encoder.attempt(value, _ROOT + path)
                if content is None:
                    raise not_savable(_ROOT + path, type(value).__name__)
                found[path] = Encoded([None, None, content.content], content.arrays)
        return found

    def _say_size(self, path: str, encoded: Encoded) -> None:
        is_small = not encoded.arrays and not isinstance(encoded.content[2], (list, dict))
        if is_small or path in self._large:
            return
        if (size := encoded.size()) > _LARGE_BYTES:
            self._large.add(path)
            name = path.removesuffix("[:]")
            self._say(
                f"self.{name}: {size >> 20} MB in each checkpoint. If training does not depend "
                f"on it, a cache say: exclude_from_state({name!r}). If it does: "
                f"register_stateful({name!r}), which ends this line."
            )

    # --- restoring -------------------------------------------------------------------------

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns one line for each value that is missing in the state or has no place here."""
        _, names, nodes = self._nodes()
        encoded = {path: value for path, value in state.items() if isinstance(value, Encoded)}
        decoder = Decoder(next((e.arrays for e in encoded.values()), {}), names)
        problems = [
            f"{path}: missing in the checkpoint."
            for path in self._reached.registered
            if not self._reached.is_left_out(path) and self._is_missing(path, state)
        ]
        self._decoded = {}
        for path, value in encoded.items():
            # What is left out may have something in common with what is not.
            misfit = self._misfit(path, value.content, decoder, nodes)
            if self._reached.is_left_out(path):
                self._decoded.pop(path, None)
            else:
                problems += misfit
        return problems

    def _is_missing(self, path: str, state: Mapping[str, Any]) -> bool:
        has_own = state_setter(self._reached.spot(path).value) is not None  # then it is no value
        return not has_own and not _has_under(path, state)

    def _misfit(
        self, path: str, content: Any, decoder: Decoder, nodes: Mapping[str, Node]
    ) -> list[str]:
        """Decodes a value; returns why it cannot be put into its place."""
        name, key, inside = content
        try:
            key = WHOLE if key is None else decoder.key(key[0], path)
            value = decoder.decode(inside, _ROOT + path.removesuffix("[:]"))
        except LookupError as error:
            return [f"{path}: {error.args[0]}."]
        self._decoded[path] = name, key, value
        if name is None:
            is_here = self._reached.spot(path).is_there
            return [] if is_here else [f"{path}: in the checkpoint, and not here."]
        if name not in nodes:
            return [f"{path}: in the checkpoint, and not here."]
        node = nodes[name]
        if key is WHOLE:
            there, here = _shape(value), _shape(node.value)
            other = f"{path} is {there} in the checkpoint and {here} here."
            return [other] * (there != here)
        is_taken = not self._reached.is_registered(path) and _is_taken(node, key, value)
        return [f"{path}: a value in the checkpoint, and no value here."] * is_taken

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a state without `problems`; `differences` says later what is not exact."""
        _, names, nodes = self._nodes()
        decoded, self._decoded = self._decoded, {}
        then = {p: t for p, t in state[_CONSTANTS].items() if not self._reached.is_left_out(p)}
        given = follow(self._constants, then, decoded, nodes)
        self.lines += given.lines
        anew = given.paths
        for path, (name, key, value) in decoded.items():
            if name is None:
                self._reached.spot(path).put(value)
            elif path not in anew:
                nodes[name].put(key, value)
        for name, key in state[_DELETED]:
            if name in nodes and not self._reached.is_left_out(f"{name}.{key}".lstrip(".")):
                nodes[name].remove(key)
        decoder = Decoder({}, names)
        for name, keys in state[_ORDER].items():
            node = nodes.get(name)
            if isinstance(node, DictNode):
                node.order([decoder.key(key, name) for key in keys])
        self._changed = {path for path in decoded if path not in anew}
        self._moved = {decoded[path][0] for path in self._changed}
        self._deleted = [[name, key] for name, key in state[_DELETED]]
        self._ordered = {*state[_ORDER]}
        walk, names, nodes = self._nodes()
        moved = {name: node for name, node in nodes.items() if name in self._moved}
        self._restored = {
            place.path: place.look(names)
            for place in self._places(moved, walk)
            if place.path in self._changed
        }
        return []

    def differences(self) -> Iterator[str]:
        """Yields the paths of restored values that had changed again when training began, by
        on_train_begin, say.
        """
        for path, then in self._restored.items():
            if not is_same(then, self._begun.get(path, _NOTHING)):
                yield path
        self._restored = {}


def _is_long(keys: Iterable[Any]) -> bool:
    """Returns whether a dict has one place for all of its items."""
    return any(key is WHOLE for key in keys)


def look(value: Any, names: Names, *, is_whole: bool = False) -> Any:
    """Returns a place's value to compare later: a simple value itself, else a checksum.

    With `is_whole` it is a checksum of what the object itself holds.
    """
    if type(value) in _SIMPLE:
        return value
    summary = Summary(names)
    content = summary.inside(value, "") if is_whole else summary.encode(value, "")
    number = Encoded(content, summary.arrays).checksum()
    items = None
    if isinstance(value, (list, tuple, deque, dict)) and len(value) >= SAMPLED:
        items = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return Seen(f"{number:08x}", value if summary.is_opaque else None, items)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two looks at a place saw the same value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Seen):
        is_like = one.thing is other.thing and one.content == other.content
        if not is_like or one.items is None:
            return bool(is_like)
        return all(map(operator.is_, one.items, other.items))
    return repr(one) == repr(other) if type(one) is float else bool(one == other)


def _has_under(path: str, state: Mapping[str, Any]) -> bool:
    """Returns whether a state has a path, or a path that goes on from it."""
    return any(p == path or p.startswith((f"{path}.", f"{path}[:]")) for p in state)


def _is_known(seen: Any) -> bool:
    """Returns whether another process can compare a value that was seen."""
    return not (isinstance(seen, Seen) and seen.thing is not None)


def as_text(seen: Any) -> str:
    """Returns a value that was seen as a text, which another process can compare."""
    if isinstance(seen, Seen):
        return seen.content
    is_long = type(seen) is int and seen.bit_length() > 63  # Python shows none of 4,300 digits
    text = f"{type(seen).__name__} {hex(seen) if is_long else repr(seen)}"
    return text if len(text) < 64 else f"{checksum_of([text.encode(errors='replace')]):08x}"


def _is_whole(node: Node) -> bool:
    return isinstance(node, (WholeNode, DictNode))


def _shape(value: Any) -> str:
    """Returns class and shape, which an object must share with one that its content goes into."""
    if isinstance(value, paddle.Tensor):
        return describe(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {[*value.shape]}"
    return generator_kind(value) if isinstance(value, GENERATORS) else type(value).__name__


def _is_taken(node: Node, key: Any, value: Any) -> bool:
    """Returns whether a key is the name of a method, a property or an object with a state."""
    if isinstance(node, DictNode):
        return False
    of_class = getattr(type(node.value), str(key), None)
    is_there = key in node.places()
    is_code = isinstance(of_class, property) or inspect.isfunction(of_class)
    there = node.places().get(key)
    has_form = isinstance(there, (paddle.nn.Layer, paddle.optimizer.Optimizer))
    return (is_code and not is_there) or (has_form and there is not value)
