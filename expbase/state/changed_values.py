"""The values that training has changed: an entry of a checkpoint, put back in place.

At the end of setup it is noted what stands in each place. What is no longer what setup has made is
state, and stays state; a resumed run puts it back, into the objects that setup has made. What
nobody has changed is the code's. Of optimizers and schedules also that is noted, so that a resume
can name what is another one now, and find the learning rate anew.

What cannot be saved is told, if it is no longer what stood there after on_train_begin, which makes
files, hooks and functions at each start.

    values = Values(reach, told, warn)
    values.note_setup()                     # at the end of setup
    values.begin()                          # before the first batch
    state = values.state_dict()             # {"epsilon": …, "meter.sum": …}
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.io import DataLoader

from expbase.base.any_object import state_setter
from expbase.base.arrays import describe
from expbase.base.checkpoint_part import Part
from expbase.base.errors import RuntimeMistake
from expbase.base.generator_states import GENERATORS, generator_kind
from expbase.base.json_values import SIMPLE, Decoder, Encoded, Encoder, Names, not_savable
from expbase.state.compare import Named, as_text, is_known, is_same, look
from expbase.state.reachable import Reach
from expbase.state.schedule_constants import constants_in, follow
from expbase.state.unsavable import Told, shown
from expbase.state.value_kinds import ATOMS, is_handle, is_written, talks_to_the_world
from expbase.state.value_places import (
    WHOLE,
    DictNode,
    GroupNode,
    LayerNode,
    LoaderNode,
    Node,
    OptimizerNode,
    ParameterNode,
    WholeNode,
    is_same_key,
)
from expbase.state.walk import (
    MOST,
    Walk,
    WalkedNames,
    no_garbage_collection,
    reference,
    unwrap,
)

_DELETED, _ORDER, _CONSTANTS = "@deleted", "@order", "@constants"
HOOKED = "@on_train_begin"  # paths of values that are as that has set them, in some start
_ROOT = "values."  # what the names of arrays begin with, of this entry
_GLANCE = 10_000  # items: more are looked at by a checksum
_LARGE_BYTES = 1 << 26  # of a value: more is a cache, maybe
_NOT_AS_THEN = (
    "not as it was then. Training has changed it since, and no copy is kept; --evaluate, in a "
    "process of its own, has it as it was."
)
_NOTHING: Any = object()
_PARTS = (paddle.nn.Layer, EagerParamBase)
_FORMED = (paddle.nn.Layer, EagerParamBase, paddle.optimizer.Optimizer)


class Still(NamedTuple):
    """What a node held: simple values themselves, and references to other objects."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


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


class Values(Part):
    """The values that training has changed: an entry of the checkpoint.

    What it knows is set at four moments, and else only read:

    - setup ends (`note_setup`): `_setup`, `_constants`, `_shapes`, `_made`, `_keys`, `_still`.
    - A checkpoint is restored (`problems`, then `load_state_dict`): `_decoded`, `_nodes_then` and
      `_not_made`; `_restored`, `_hooked_then`, and from the checkpoint what the saves before it had
      noted: `_changed`, `_moved`, `_deleted`, `_ordered`.
    - Training begins (`begin`): `_begun`, `_anew`, `_hooked`. `differences` empties `_restored`.
    - A save (`state_dict`) adds to `_changed`, `_moved`, `_deleted`, `_ordered`, `_handled`,
      `_large`.

    Args:
        reach: What the experiment leads to.
        told: Names the values that cannot be restored.
        say: Called with a line about sizes.
    """

    def __init__(self, reach: Reach, told: Told, say: Callable[[str], object]) -> None:
        self._reach = reach
        self._told = told
        self._say = say
        self._setup = WalkedNames(Walk(None, {}))  # by which names another start finds what it has
        self._constants: dict[str, Any] = {}  # of optimizers and schedules, at the end of setup
        self._shapes: dict[str, str] = {}  # of what is changed as a whole, at the end of setup
        self._made: dict[str, Any] = {}  # what stood in each place at that time, by path
        self._keys: dict[str, list[Any]] = {}  # of each node, at that time
        self._still: dict[str, Still] = {}  # what nodes held of which it is seen at a glance
        self._begun: dict[str, Any] = {}  # what stood there when training began, if it moved
        self._hooked: dict[str, Any] = {}  # what on_train_begin has set, by path
        self._hooked_then: set[str] = set()  # paths of what it had set, of the checkpoint
        self._anew: set[str] = set()  # paths of what it has set in this start
        self._moved: set[str] = set()  # nodes of what training has changed
        self._changed: set[str] = set()  # paths of what training has changed, in any start
        self._deleted: list[list[Any]] = []  # places that the checkpoint has none of: node and key
        self._ordered: set[str] = set()  # dicts whose items have another order than setup's
        self._handled: set[str] = set()  # nodes that have opened a handle since setup
        self._restored: dict[str, Any] = {}  # what stood there after a restore, by path
        self._decoded: dict[str, tuple[str, Any, Any]] = {}  # of a checkpoint that fits
        self._nodes_then: dict[str, Node] = {}  # to which that belongs
        self._not_made: list[str] = []  # paths of values of on_train_begin that could not be made
        self._large: set[str] = set()  # of whose size a line was said
        self.lines: list[str] = []  # what a restore has to say

    # --- what there is ---------------------------------------------------------------------

    def note_setup(self) -> WalkedNames:
        """Notes what setup has made, which every start makes; returns the names of all objects."""
        walk = self._reach.walk()
        self._setup = walk.names()
        self._shapes = {p: _shape(n.value) for p, n in walk.nodes.items() if _is_whole(n)}
        self._constants = constants_in(walk)
        with no_garbage_collection():
            _, names, nodes = self._nodes(walk)
            self._keys = {name: [] for name in nodes}
            for place in self._places(nodes, walk):
                self._made[place.path] = place.look(names)
                self._keys[place.name].append(place.key)
            everything = ((name, _still(node, names)) for name, node in nodes.items())
            self._still = {name: held for name, held in everything if held is not None}
        return self._setup

    @no_garbage_collection()
    def begin(self) -> None:
        """Notes what on_train_begin has set: it is state, unless each start sets it anew."""
        walk, names, nodes = self._nodes(self._reach.walk())
        moved = {name: node for name, node in nodes.items() if not self._is_still(name, node)}
        self._begun = {place.path: place.look(names) for place in self._places(moved, walk)}
        for path, look_ in self._begun.items():
            before = self._restored.get(path, self._made.get(path, _NOTHING))
            if not is_same(before, look_):
                self._anew.add(path)
            if path in self._hooked_then or path in self._anew:
                self._hooked[path] = look_
        lasting = [
            path
            for path, there in self._hooked.items()
            if not (is_known(there) or talks_to_the_world(there.thing))
            if not f"{path}.".startswith(tuple(walk.reporting))
        ]
        self._told.note_hooked(lasting)
        if not walk.is_whole:
            self._say(
                f"more than {MOST:,} objects can be reached from self, and what changes in the "
                "others may be in no checkpoint. exclude_from_state what training does not depend "
                "on."
            )

    def names_in(self, walk: Walk) -> WalkedNames:
        """Returns the names that other starts know, of what a walk has met."""
        return self._setup.now(walk)

    def _nodes(self, walk: Walk) -> tuple[Walk, WalkedNames, dict[str, Node]]:
        """Returns a walk, its names, and by name the nodes that every start has."""
        names = self.names_in(walk)
        nodes = {"": walk.nodes[""]}
        for path, node in walk.nodes.items():
            name = path if isinstance(node, GroupNode) else names.name_of(node.value)
            if name is not None and path:
                nodes[name] = node
        return walk, names, nodes

    def _places(self, nodes: Mapping[str, Node], walk: Walk) -> Iterator[Place]:
        """Yields the places of nodes."""
        path_of, is_left_out = walk.path_of, self._reach.is_left_out
        for name, node in nodes.items():
            for key, value in node.places().items():
                where = path_of(name, key)
                if not is_left_out(where):
                    yield Place(where, name, node, key, value)

    def looked(self) -> dict[str, tuple[Any, Any]]:
        """Returns the value in each place, by path: in a form to compare, and itself."""
        walk, names, nodes = self._nodes(self._reach.walk())
        places = self._places(nodes, walk)
        return {place.path: (place.look(names), place.value) for place in places}

    def code(self) -> dict[str, str]:
        """Returns checksums of the values that setup alone has set, by path."""
        return {
            path: as_text(there)
            for path, there in self._made.items()
            if is_known(there) and path not in self._changed and path not in self._hooked
            if path.removesuffix("[:]") not in self._constants
        }

    # --- saving ----------------------------------------------------------------------------

    @no_garbage_collection()
    def state_dict(self) -> dict[str, Any]:
        """Returns the changed values by path, each with its node and key, and the deleted ones."""
        walk, names, nodes = self._nodes(self._reach.walk_just_made())
        encoder = Encoder({}, names)
        quiet = tuple(walk.reporting)
        state: dict[str, Any] = {}
        hooked: list[str] = []
        moved = {name: node for name, node in nodes.items() if not self._is_still(name, node)}
        keys: dict[str, list[Any]] = {name: [] for name in moved}
        for place in self._places(moved, walk):
            keys[place.name].append(place.key)
            if walk.is_whole:  # else it may be behind the bound
                _refuse_unnamed(place, names)
            is_state = self._has_changed(place, names) or self._reach.is_registered(place.path)
            encoded = self._encoded(place, encoder) if is_state else None
            if encoded is not None:
                state[place.path] = encoded
                self._moved.add(place.name)
                if place.path in self._hooked and self._is_as_begun(place, names):
                    hooked.append(place.path)
            elif is_state and not self._is_as_begun(place, names):
                self._tell(place, quiet)
        self._leave_flags(state, nodes)
        self._told.say_all()
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
        if hooked:  # in few runs
            state[HOOKED] = hooked
        return state

    def _leave_flags(self, state: dict[str, Any], nodes: Mapping[str, Node]) -> None:
        """Leaves out flags that say that an object has opened a handle since setup.

        With `if not self.is_open: self._open()` a flag without the handle would end the next start.
        """
        for name in self._handled:
            is_plain = name in nodes and type(nodes[name]) is Node and name
            for key, value in nodes[name].places().items() if is_plain else ():
                path = f"{name}.{key}"
                is_flag = type(value) is bool and state.pop(path, None) is not None
                if is_flag and not is_same(self._stood_at_begin(path), value):
                    self._told.tell_flag(path)

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
        """Returns whether a node holds the very numbers and objects that it held; most do."""
        then = self._still.get(name)
        if then is None or name in self._moved or self._reach.registered:
            return False
        keys, values = _held(node) or ((), ())
        return (
            (len(keys), len(values)) == (len(then.keys), len(then.values))
            and all(map(operator.is_, keys, then.keys))
            and all(map(_is_it, values, then.values))
        )

    def _has_changed(self, place: Place, names: Names) -> bool:
        if place.path in self._changed:
            return True
        before = self._made.get(place.path, _NOTHING)
        if before is place.value and type(before) in SIMPLE:
            return False
        return before is _NOTHING or not is_same(before, place.look(names))

    def _stood_at_begin(self, path: str) -> Any:
        """Returns the look at a place when training began; `_NOTHING` if it was not there."""
        return self._begun.get(path, self._made.get(path, _NOTHING))

    def _is_as_begun(self, place: Place, names: Names) -> bool:
        return is_same(self._stood_at_begin(place.path), place.look(names))

    def _tell(self, place: Place, quiet: tuple[str, ...]) -> None:
        """Names a value that cannot be saved, unless it only talks to the world."""
        is_quiet = f"{place.path}.".startswith(quiet) and not hasattr(place.value, "__next__")
        if not (is_quiet or is_written(place.value) or place.name in self._handled):
            self._told.tell(place.path, place.value)

    def _encoded(self, place: Place, encoder: Encoder) -> Encoded | None:
        """Returns a place's value as a checkpoint has it; None if it cannot be saved."""
        is_whole = place.key is WHOLE
        if type(place.value) in SIMPLE and type(place.key) is str:
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
        is_closed = self._setup.is_closed(place.value) and self._reach.is_registered(place.path)
        if content is None or is_closed:
            if self._reach.is_registered(place.path):
                raise not_savable(where, type(place.value).__name__)
            if self._made.get(place.path) is None and is_handle(place.value):
                self._handled.add(place.name)
            return None
        if isinstance(place.value, set) and len(place.value) > 1:
            is_anew = place.path in self._anew and self._is_as_begun(place, encoder.names)
            if not is_anew:
                self._told.tell_order(place.path)
        encoded = Encoded([place.name, key, content.content], content.arrays)
        if "." in place.path and not self._reach.is_registered(place.path):
            self._say_size(place.path, encoded)
        return encoded

    def _beyond(self, state: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
        """Returns the registered values that the walk does not reach."""
        found = {}
        for path in self._reach.registered:
            spot = self._reach.spot(path)
            is_known = _has_under(path, state) or self._reach.is_left_out(path)
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
                f"on it, as on a cache: exclude_from_state({name!r}). If it does: "
                f"register_stateful({name!r}), which ends this line."
            )

    # --- restoring -------------------------------------------------------------------------

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns one line for each value that is missing in the state or has no place here."""
        walk, names, nodes = self._nodes(self._reach.walk_just_made())
        self._nodes_then = nodes
        encoded = {path: value for path, value in state.items() if isinstance(value, Encoded)}
        decoder = Decoder(next((e.arrays for e in encoded.values()), {}), names)
        problems = [
            f"{path}: missing in the checkpoint."
            for path in self._reach.registered
            if not self._reach.is_left_out(path) and self._is_missing(path, state)
        ]
        self._decoded = {}
        hooked = {*state.get(HOOKED, ())}
        self._not_made = []
        for path, value in encoded.items():
            # What is left out may have something in common with what is not.
            misfit = self._misfit(path, value.content, decoder, nodes, walk)
            if path in hooked and path not in self._decoded and misfit:
                # Its class, say, is imported when on_train_begin makes it.
                self._not_made.append(path)
                continue
            if self._reach.is_left_out(path):
                self._decoded.pop(path, None)
            else:
                problems += misfit
        return problems

    def _is_missing(self, path: str, state: Mapping[str, Any]) -> bool:
        has_own = state_setter(self._reach.spot(path).value) is not None  # then it is no value
        return not has_own and not _has_under(path, state)

    def _misfit(
        self, path: str, content: Any, decoder: Decoder, nodes: Mapping[str, Node], walk: Walk
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
            is_here = path in self._reach.registered and self._reach.spot(path).is_there
            return [] if is_here else [f"{path}: in the checkpoint, and not here."]
        if name not in nodes:
            return [f"{path}: in the checkpoint, and not here."]
        node = nodes[name]
        no_place = [f"{path}: a value in the checkpoint, and no value here."]
        where = walk.path_of(name, key)  # another one than the path, if somebody has written it
        is_forged = self._reach.is_left_out(where) and not self._reach.is_left_out(path)
        is_place = node.may_have(key) or self._reach.is_registered(where)
        if is_forged or not is_place:
            return no_place
        if key is WHOLE:
            there, here = _shape(value), _shape(node.value)
            other = f"{path} is {there} in the checkpoint and {here} here."
            return [other] * (there != here)
        is_taken = not self._reach.is_registered(where) and _is_taken(node, key, value)
        return no_place * is_taken

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a state without `problems`; `differences` says later what is not exact.

        Returns:
            A line about values that are not as they were then, if training has gone on since.
        """
        names, nodes = self._setup, self._nodes_then
        decoded, self._decoded = self._decoded, {}
        lost = self._put_back_setup(self._changed - decoded.keys() - self._anew)
        then = {p: t for p, t in state[_CONSTANTS].items() if not self._reach.is_left_out(p)}
        given = follow(self._constants, then, decoded, nodes)
        self.lines += given.lines
        anew = given.paths
        for path, (name, key, value) in decoded.items():
            if name is None:
                self._reach.spot(path).put(value)
            elif path not in anew:
                # On one process nothing is wrapped, so a checkpoint of it names the layer alone.
                if (wrapper := names.wrapper_of(value)) is not value:
                    there = nodes[name].places().get(key)
                    value = value if unwrap(there) is there else wrapper
                nodes[name].put(key, value)
        for name, key in state[_DELETED]:
            is_out = self._reach.is_left_out(f"{name}.{key}".lstrip("."))
            if name in nodes and nodes[name].may_have(key) and not is_out:
                nodes[name].remove(key)
        decoder = Decoder({}, names)
        for name, keys in state[_ORDER].items():
            node = nodes.get(name)
            if isinstance(node, DictNode) and not self._reach.is_left_out(f"{name}."):
                node.order([decoder.key(key, name) for key in keys])
        self._changed = {path for path in decoded if path not in anew}
        self._moved = {decoded[path][0] for path in self._changed}
        self._deleted = [[name, key] for name, key in state[_DELETED]]
        self._ordered = {*state[_ORDER]}
        self._hooked_then = {*state.get(HOOKED, ())}
        for path, (name, key, _) in decoded.items():
            if name is not None and path in self._changed:
                self._restored[path] = look(
                    nodes[name].places().get(key), names, is_whole=key is WHOLE
                )
        return lost

    def _put_back_setup(self, paths: set[str]) -> list[str]:
        """Puts back what setup has made in places that training has changed after a checkpoint,
        which so has not got them: the best one, say, when on_train_end tests it.
        """
        if not paths:
            return []
        walk, names, nodes = self._nodes(self._reach.walk())
        lost = []
        for place in [p for p in self._places(nodes, walk) if p.path in paths]:
            made = self._made.get(place.path, _NOTHING)
            if type(made) in SIMPLE:
                place.node.put(place.key, made)
            elif made is _NOTHING and place.key is not WHOLE:
                place.node.remove(place.key)
            elif isinstance(made, Named) and made.name in nodes and not made.is_wrapped:
                place.node.put(place.key, nodes[made.name].value)
            elif isinstance(place.node, OptimizerNode):
                continue  # its work is done
            elif not is_same(made, place.look(names)):
                lost.append(shown(place.path))
        return [f"{', '.join(lost)}: {_NOT_AS_THEN}"] * bool(lost)

    def differences(self) -> Iterator[str]:
        """Yields the paths of restored values that had changed again when training began, by
        on_train_begin, say.
        """
        for path, then in self._restored.items():
            if path not in self._hooked_then and not is_same(then, self._stood_at_begin(path)):
                yield path
        self._restored = {}
        yield from (path for path in self._not_made if path not in self._anew)


def _is_long(keys: Iterable[Any]) -> bool:
    """Returns whether a dict has one place for all of its items."""
    return any(key is WHOLE for key in keys)


def _refuse_unnamed(place: Place, names: Names) -> None:
    """Raises a RuntimeError for a part of a layer that no start could load: it has no name."""
    is_part = isinstance(place.node, LayerNode) and isinstance(place.value, _PARTS)
    if is_part and names.name_of(place.value) is None:
        raise RuntimeMistake(
            f"self.{place.path}: appeared after setup, while what was there is used still; a "
            "resumed run would not have it when its state is restored. Make in setup_model all "
            "that training needs, and use a part of it; or exclude_from_state it there."
        )


def _has_under(path: str, state: Mapping[str, Any]) -> bool:
    """Returns whether a state has a path, or a path that goes on from it."""
    return any(p == path or p.startswith((f"{path}.", f"{path}[:]")) for p in state)


def _held(node: Node) -> tuple[Collection[Any], Collection[Any]] | None:
    """Returns the keys of a node and what it holds, if that is seen at a glance."""
    if isinstance(node, (DictNode, WholeNode)):
        is_short = isinstance(node.value, (list, deque, dict)) and len(node.value) < _GLANCE
        if not is_short:
            return None
        if not isinstance(node.value, dict):
            return (), [*node.value]
        held = {**node.value}
    else:
        held = {**(node.flat_places() if isinstance(node, ParameterNode) else node.places())}
    return held.keys(), held.values()


def _still(node: Node, names: WalkedNames) -> Still | None:
    """Returns what a node holds, if that is numbers, texts and objects that have places of their
    own: these are the same as long as they are the same objects.
    """
    held = _held(node)
    if held is None:
        return None
    values: list[Any] = []
    for value in held[1]:
        is_simple = type(value) in SIMPLE
        if not is_simple and names.known(value) is None:
            return None
        values.append(value if is_simple else reference(value))
    return Still((*held[0],), (*values,))


def _is_it(now: Any, then: Any) -> bool:
    """Returns whether a value is the one that was noted, itself or by a reference."""
    return now is then or (type(then) not in SIMPLE and type(now) not in SIMPLE and now is then())


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
    is_code = isinstance(of_class, property) or (
        inspect.isfunction(of_class) and not inspect.isroutine(value)  # which may take its place
    )
    there = node.places().get(key)
    # One of these has state of its own; another one in its place is one that setup has made.
    is_other = isinstance(there, _FORMED) and not isinstance(value, (*_FORMED, type(None)))
    is_of_data = isinstance(there, DataLoader) or isinstance(node, LoaderNode)
    is_no_data = is_of_data and type(value) in ATOMS and value is not None
    return (is_code and not is_there) or is_other or is_no_data
