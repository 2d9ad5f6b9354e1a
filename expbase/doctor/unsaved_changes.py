"""The audit: what has changed since training began, beyond attributes, and is in no checkpoint.

At some captures it looks at the globals and class attributes of the user's own modules, at cells
and defaults of functions, at hooks, at files, iterators and generators, which cannot be saved, and
at what objects that have a state_dict of their own leave out. A line names each path once, with the
ways out. A file of the run has these paths, so a resume can name what is not as it was. What the
code has set is compared with the start before.

    Audit(experiment, internals)      # it listens from then on
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import gc
import inspect
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paddle.nn import Layer
from paddle.optimizer.lr import LRScheduler

from expbase.base.any_object import (
    attributes_of,
    class_name,
    class_named,
    has_attributes,
    module_of,
)
from expbase.base.arrays import Array, fetch
from expbase.base.files import checksum_of
from expbase.base.generator_states import GENERATORS
from expbase.base.json_values import bytes_of, is_of_a_sample
from expbase.checkpoint import layout
from expbase.doctor import doctor_file
from expbase.engine.internals import Internals
from expbase.record.logs import NOT_EXACT
from expbase.state.compare import as_text, is_same, is_value, look
from expbase.state.reachable import BEYOND, GIVEN
from expbase.state.unsavable import (
    LOST,
    MOST_LINES,
    UNSET,
    changed,
    in_one_line,
    shortened,
    shown,
    ways_out,
)
from expbase.state.value_kinds import CODE, WORLD, holds_handle, is_users, talks_to_the_world
from expbase.state.value_places import WHOLE, LayerNode, Node, StatefulNode, cells_of
from expbase.state.walk import LOADERS, MOST, Walk, WalkedNames

UNKNOWN = "?"  # of what nobody can look into
_MOST_LINKS = 8  # of iterators that read iterators: each one makes the text twice as long
_RUN = "_ExperimentBase__run"
# The content of an array, a list or a tensor in the data set of a loader.
_SAMPLES = re.compile(rf"({'|'.join(LOADERS)})\.(.+\.)?dataset\..*\[:\]")
_OTHER_DATA = (
    "other samples or numbers than at the start before, though code, config and packages are the "
    "same: a split without a seed puts samples of the validation into training, and set(…) gives "
    "the same names other numbers in each process; unless it is the data that have changed. "
    "Expected the same at each start: np.random.default_rng(0).permutation(n), for example, "
    "sorted(…) for names of files, sorted(set(…)) for a vocabulary."
)
_ITEM = re.compile(r"(.+)\.('.*'|[^.']+)")  # of a list or a dict, and where that is
_FEW = 3  # items: two may have changed places by chance
_LONG = 20  # items: fewer may be words of a command line
_DRAWN = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{6,}(-[0-9a-f]{4,})*(?=')")  # the end of a text
_OF_CELLS = re.compile(r"_+|_i*\d*")  # names that IPython gives
_PROXY = "multiprocessing.managers.BaseProxy"  # whose import takes long, and fails on Windows
_DESCRIPTORS = (property, functools.cached_property, types.MemberDescriptorType)


class _Named(Node):
    """An object whose values stand among code, each under a name."""

    def places(self) -> Mapping[Any, Any]:
        return {n: v for n, v in vars(self.value).items() if _is_value(n, v)}


class ClassNode(_Named):
    """A class of the user's."""

    def children(self) -> Iterator[tuple[Any, Any]]:
        yield from self.places().items()
        for name, value in vars(self.value).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType):
                yield name, function
        yield from ((base.__qualname__, base) for base in self.value.__mro__[1:])
        yield "__module__", sys.modules.get(self.value.__module__)


class ModuleNode(_Named):
    """A module of the user's, without the names that IPython has put into a notebook's."""

    def places(self) -> Mapping[Any, Any]:
        return {name: value for name, value in super().places().items() if self._is_own(name)}

    def children(self) -> Iterator[tuple[Any, Any]]:
        for name, value in [*vars(self.value).items()]:
            if not name.startswith("__") and self._is_own(name):
                yield name, value

    def _is_own(self, name: str) -> bool:
        shell = getattr(vars(self.value).get("get_ipython"), "__self__", None)
        # Among them what the cells before have said: `_`, `_i`, `_7`, `_i7`.
        return name not in getattr(shell, "user_ns_hidden", ()) and not (
            shell and _OF_CELLS.fullmatch(name)
        )


class FunctionNode(Node):
    """A function: its cells, its defaults, its attributes."""

    def places(self) -> Mapping[Any, Any]:
        function = self.value
        defaults = {"defaults": function.__defaults__} if function.__defaults__ else {}
        return {**cells_of(function), **defaults, **vars(function)}

    def children(self) -> Iterator[tuple[Any, Any]]:
        yield from self.places().items()
        yield "__module__", sys.modules.get(self.value.__module__)


class CodeWalk(Walk):
    """Everything that an experiment leads to through code: classes, modules, functions, hooks."""

    def __init__(self, inside: Walk) -> None:
        super().__init__(None, {})
        self.nodes.clear()
        self.paths = {id(node.value): path for path, node in inside.nodes.items()}
        root = inside.nodes[""]
        kinds = [type(root.value), *inside.classes.values()]
        functions = [
            (path, value)
            for path, value in inside.closed.items()
            if isinstance(value, CODE) and not _is_of_handle(path, inside)
        ]
        functions += [(f"{path}.hook", h) for path, hooks in _hooks_in(inside) for h in hooks]
        seeds = [*((kind.__qualname__, kind) for kind in kinds), *functions]
        self.enter((path, value, root, None) for path, value in seeds)

    def _node_of(self, path: str, value: Any) -> Node | None:
        if isinstance(value, types.FunctionType):
            is_seen = is_users(module_of(value)) or path.startswith(LOADERS)
            has_places = value.__closure__ or value.__defaults__ or vars(value)
            return FunctionNode(value) if is_seen and has_places else None
        if isinstance(value, type):
            is_enum = issubclass(value, enum.Enum)  # which notes what it has shown
            return ClassNode(value) if is_users(module_of(value)) and not is_enum else None
        if isinstance(value, types.ModuleType):
            return ModuleNode(value) if is_users(value.__name__) else None
        return None if hasattr(value, _RUN) else super()._node_of(path, value)

    def _visit(self, path: str, value: Any, parent: Node, key: Any) -> None:
        if isinstance(value, type):
            is_front = (found := class_named(class_name(value))) is not None and found is not value
            path = f"class {_full_name(value)}" + " with mixins" * is_front
        elif isinstance(value, types.ModuleType):
            path = f"module {value.__name__}"
        elif isinstance(value, types.FunctionType) and isinstance(parent, (ClassNode, ModuleNode)):
            path = f"function {_full_name(value)}"
        super()._visit(path, value, parent, key)

    def values(self) -> dict[str, Any]:
        """Returns what stands in each place, by path."""
        nodes = self.nodes.items()
        return {self.path_of(n, key): v for n, node in nodes for key, v in node.places().items()}

    def _sees_function(self, path: str) -> bool:
        return True

    def _is_open(self, value: Any) -> bool:
        # Those of weak references serve what has nothing to do with training.
        is_weak = module_of(type(value)) in ("weakref", "_weakrefset")
        return not is_weak and super()._is_open(value)


class Audit:
    """Finds values that have changed and are in no checkpoint, and names them.

    Args:
        experiment: Its iteration, rank, log and directory are read; its values by `internals`.
        internals: What can be read of its run.
        conditions: Returns under which conditions setup has made all; "": nobody knows.
    """

    def __init__(
        self, experiment: Any, internals: Internals, conditions: Callable[[], str] = str
    ) -> None:
        self._experiment = experiment
        self._state = internals.state
        self._reach = internals.state.reach
        self._internals = internals
        self._conditions = conditions
        self._made: dict[str, Any] = {}  # what stood there at the end of setup, by path
        self._begun: dict[str, Any] = {}  # what stood there when training began
        self._told: dict[str, str] = {}  # texts of what has changed, by path
        self._asked: dict[str, str] = {}  # what is in objects that are asked, by path
        self._asked_begun: dict[str, str] = {}
        self._kinds: dict[str, str] = {}  # classes of what has no places, by path
        self._code: CodeWalk | None = None  # what is reached through code
        self._num_modules = 0
        self._kept = doctor_file.Kept()
        self._captures = 0
        self._lines = 0
        internals.listen("ready", self._note_setup)
        internals.listen("begin", self._begin)
        internals.listen("capture", self._note_capture)
        internals.listen("inspect", self._look_at_setup)

    def _note_setup(self) -> None:
        self._made = self._begun = self._looked(*self._walked())

    def _look_at_setup(self, run_dir: Path, iteration: int) -> None:
        """Says of a checkpoint that is looked at if its data were others for no reason."""
        if self._experiment.rank:
            return
        then = doctor_file.read(run_dir / layout.FOLDER / layout.name_of(iteration), iteration)
        code = self._set_by_code({})
        self._warn_of_others(self._set_anew(then.code, code), then, code)

    def _walked(self) -> tuple[Walk, WalkedNames]:
        """Returns the last walk over the attributes, and its names."""
        walk = self._reach.last_walk or self._reach.walk()
        return walk, self._state.values.names_in(walk)

    def _begin(self) -> None:
        """Notes the values before the first batch: what is told is compared with these."""
        walk, names = self._walked()
        self._code = None
        self._begun = self._looked(walk, names)
        self._asked_begun = dict(_in_asked(walk, names))
        if self._code is not None and not self._code.is_whole:
            self._warn(
                f"more than {MOST:,} objects can be reached from your classes and modules, and "
                "what changes in the others is not told. exclude_from_state what training does not "
                "depend on."
            )
        then = doctor_file.Kept()
        if self._internals.restored is not None and not self._experiment.rank:
            then = doctor_file.read(self._internals.restored, self._experiment.iteration)
        hooked = self._set_by_hook()
        code = self._set_by_code(hooked)
        unset = self._say_differences(then, hooked, code)
        self._kept = doctor_file.Kept(code, hooked | unset, then.looks, self._conditions())
        self._write()

    def _set_by_hook(self) -> dict[str, str]:
        """Returns texts of what on_train_begin has set beyond attributes."""
        assert self._code is not None
        changed = {
            path: there
            for path, there in self._begun.items()
            if path in self._made and not is_same(self._made[path], there)
        }
        values = self._code.values() if changed else {}
        return {
            path: _as_text(there)
            for path, there in changed.items()
            if is_value(there) or not talks_to_the_world(values.get(path))
        }

    def _note_capture(self) -> None:
        """Looks at the 1st, 2nd, 4th, 8th … capture, and at that of a stop or of the end."""
        self._captures += 1
        if self._captures & (self._captures - 1) and not self._internals.is_ending:
            return
        self._look(*self._walked())
        look = doctor_file.Look({**self._told}, {**self._asked})
        self._kept.looks[self._experiment.iteration] = look
        self._write()

    def _write(self) -> None:
        if not self._experiment.rank:
            doctor_file.write(self._experiment.output_dir, self._kept)

    def _look(self, walk: Walk, names: WalkedNames) -> None:
        """Names each value that has changed since training began, once."""
        pending = []
        for path, seen in self._looked(walk, names).items():
            if path in self._told:
                self._told[path] = _as_text(seen)
            elif self._begun.get(path) is None:
                # A cache is filled; of what is new in an attribute Values tells.
                if path in self._begun or path.startswith(BEYOND):
                    self._begun[path] = seen
            elif not is_same(self._begun[path], seen) and path not in self._state.told.paths:
                self._told[path] = _as_text(seen)
                pending.append(self._shown(path))
        room = max(MOST_LINES - self._lines, 0)
        self._lines += len(pending)
        if pending and room:
            self._warn(changed(pending, room))
        asked = dict(_in_asked(walk, names))
        self._asked = {
            path: text
            for path, text in asked.items()
            if path in self._asked or self._asked_begun.get(path) != text
            if not self._reach.is_left_out(path)
        }

    def _shown(self, path: str) -> str:
        """Returns a path for a message, with the class of an object that nobody can look into."""
        return shown(path) + (f" ({self._kinds[path]})" if path in self._kinds else "")

    def _warn(self, text: str) -> None:
        self._experiment.logger.warning("%s", text)

    def _looked(self, walk: Walk, names: WalkedNames) -> dict[str, Any]:
        """Returns the values outside of checkpoints, by path, in a form that can be compared."""
        if self._code is None or self._num_modules != len(sys.modules):
            # Code is what it was, but for what is imported later.
            self._code = CodeWalk(walk)
            self._num_modules = len(sys.modules)
        code = self._code
        both = names.and_others(code.paths)
        found: dict[str, Any] = {}
        for name, node in code.nodes.items():
            for key, value in node.places().items():
                path = code.path_of(name, key)
                found[path] = look(value, both, is_whole=key is WHOLE)
        for name, node in code.nodes.items():
            if isinstance(node, LayerNode):
                found[f"{name}'s tensors"] = _tensors_of(node.value)
        for path, hooks in _hooks_in(walk):
            found[f"{path}.forward hooks"] = Stand(tuple(map(id, hooks)), f"{len(hooks)} hooks")
        copied = tuple(self._reach.copied())
        for path, value in {**code.closed, **walk.closed}.items():
            if (stand := stands(value)) is not None:
                found[path] = stand
                self._kinds[path] = type(value).__name__
        for path, node in walk.nodes.items() if copied else ():
            if path.startswith(copied) and isinstance(node.value, GENERATORS):
                found[path] = Stand(object(), UNKNOWN)  # workers draw from copies
        return {p: seen for p, seen in found.items() if not self._reach.is_left_out(p)}

    # --- over a resume ---------------------------------------------------------------------

    def _set_by_code(self, hooked: Mapping[str, str]) -> dict[str, str]:
        """Returns checksums of the values that the code has set, by path, without options."""
        given = tuple(f"{name}." for name in GIVEN)
        own = {p: text for p, text in self._state.values.code().items() if not p.startswith(given)}
        made = {path: _as_text(there) for path, there in self._made.items()}
        return own | {path: text for path, text in made.items() if path not in hooked}

    def _say_differences(
        self, then: doctor_file.Kept, hooked: Mapping[str, str], code: Mapping[str, str]
    ) -> dict[str, str]:
        """Names what is not as it was at the checkpoint that was restored.

        Returns:
            Texts of what on_train_begin had set once, and has not set again.
        """
        last, look = next(reversed(then.looks.items()), (-1, doctor_file.Look()))
        is_exact = last == self._experiment.iteration  # else it may have moved on since
        self._told = {**look.told}
        self._asked = {**look.asked} if is_exact else {}
        now = {path: _as_text(there) for path, there in self._begun.items()} | self._asked_begun
        # What on_train_begin sets at each start is as the code wants it.
        once = {path: text for path, text in then.hooked.items() if path not in hooked}
        before = self._told | self._asked | once
        lost = [
            path
            for path in sorted(before)
            if now.get(path, UNKNOWN) != before[path] or before[path] == UNKNOWN
            if is_exact or path in once or self._is_setups(path)
            if not self._reach.is_left_out(path)
        ]
        anew = [path for path in self._set_anew(then.code, code) if path not in before]
        lines = [f"{self._shown(path)}: {UNSET if path in once else LOST}" for path in lost]
        for text in shortened(lines):
            self._warn(NOT_EXACT + text)
        if anew:
            self._say_anew(anew, then, code)
        for text in ways_out(lines):
            self._experiment.logger.info("%s", text)
        return {path: text for path, text in once.items() if path in lost}

    def _set_anew(self, then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
        """Returns the places that setup has set otherwise than then."""
        both = [(path, text) for path, text in then.items() if path in now]
        anew = [path for path, text in both if is_otherwise(now[path], text)]
        return [path for path in anew if not self._reach.is_left_out(path)]

    def _say_anew(self, anew: list[str], then: doctor_file.Kept, code: Mapping[str, str]) -> None:
        """Names what setup has set otherwise than at the start before."""
        others = self._warn_of_others(anew, then, code)
        if names := [*dict.fromkeys(shown(path) for path in anew if path not in others)]:
            text = in_one_line("set otherwise than by the start before", names)
            self._experiment.logger.info("%s", text)

    def _warn_of_others(
        self, anew: list[str], then: doctor_file.Kept, code: Mapping[str, str]
    ) -> Iterable[str]:
        """Names, and returns, the places in which the data are others for no reason."""
        if not then.conditions or then.conditions != self._conditions():
            return ()
        others = {path: path for path in anew if _SAMPLES.fullmatch(path)}
        others |= {path: path for path in anew if self._is_vocabulary(path)}
        others |= _moved(anew, then.code, code)
        if names := [*dict.fromkeys(map(shown, others.values()))]:
            self._warn(f"{', '.join(names[:MOST_LINES])}: {_OTHER_DATA}")
        return others

    def _is_vocabulary(self, path: str) -> bool:
        """Returns whether a place holds a long list of texts, or a long dict of whole numbers."""
        node = self._walked()[0].nodes.get(path.removesuffix("[:]"))
        value = node.value if node is not None and path.endswith("[:]") else None
        if isinstance(value, dict):
            return len(value) >= _LONG and all(type(number) is int for number in value.values())
        if isinstance(value, list):
            return len(value) >= _LONG and all(type(text) is str for text in value)
        return False

    def _is_setups(self, path: str) -> bool:
        """Returns whether nobody has set a value since setup, as on_load_checkpoint may."""
        there = self._begun.get(path)
        return there is None or path not in self._made or is_same(self._made[path], there)


def _moved(anew: Iterable[str], then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Returns the items of lists and dicts that have each other's values, and where they are: they
    have the order of a set.
    """
    items: dict[str, list[str]] = {}
    for path in anew:
        if place := _ITEM.fullmatch(path):
            items.setdefault(place[1], []).append(path)
    return {
        path: whole
        for whole, paths in items.items()
        if len(paths) >= _FEW
        and sorted(then[path] for path in paths) == sorted(now[path] for path in paths)
        for path in paths
    }


class Stand:
    """The position of an object that nobody can look into, to compare within this process."""

    def __init__(self, where: Any, text: str = "") -> None:
        self.where = where
        self.text = text or str(where)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stand) and bool(self.where == other.where)

    __hash__ = None  # type: ignore[assignment]


def stands(value: Any, links: int = _MOST_LINKS) -> Stand | None:
    """Returns the position of an iterator, a file, or the content of a piece of memory, a mapped
    file or what another process holds; None if it has none.

    Args:
        value: Anything.
        links: Of an iterator that reads others, how many of them are looked into, one by one.
    """
    if isinstance(value, CODE):
        return None
    if isinstance(value, types.GeneratorType):
        # Whether it has moved on since cannot be seen.
        is_under_way = inspect.getgeneratorstate(value) in ("GEN_RUNNING", "GEN_SUSPENDED")
        has_ended = value.gi_frame is None
        return Stand(object(), UNKNOWN) if is_under_way else Stand(("ended", has_ended))
    if callable(getattr(value, "readable", None)):
        return _in_file(value)
    if hasattr(value, "__next__"):
        where = _in_iterator(value, links)
        return Stand(object(), UNKNOWN) if where is None else Stand(where)
    if isinstance(value, np.random.BitGenerator):
        return Stand(repr(value.state))
    if module_of(type(value)) == "multiprocessing.sharedctypes":
        value = value.get_obj()
    if any(class_name(base) == _PROXY for base in type(value).__mro__):  # it answers str()
        with contextlib.suppress(Exception):
            return Stand(f"{checksum_of([str(value).encode()]):08x}")
        return Stand(object(), UNKNOWN)
    if isinstance(value, np.memmap):
        is_written = value.mode in ("r+", "w+") and value.flags.writeable
        return Stand(f"{checksum_of([bytes_of(value)]):08x}") if is_written else None
    if isinstance(value, contextvars.ContextVar):
        return Stand(repr(value.get(None)))
    if isinstance(value, WORLD):
        return None
    with contextlib.suppress(TypeError, ValueError, BufferError):
        return Stand(checksum_of([memoryview(value).tobytes()]))
    if has_attributes(value):
        return None
    # An object of C may show what it holds, in its text or in numbers.
    text = repr(value)
    return Stand(_numbers_of(value) if " at 0x" in text else text)


def _numbers_of(value: Any) -> list[Any]:
    """Returns the numbers that an object written in C shows, such as a database's changed rows."""
    found = []
    for name, kind in vars(type(value)).items():
        if isinstance(kind, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            with contextlib.suppress(Exception):
                number = getattr(value, name)
                found += [(name, number)] if isinstance(number, (bool, int)) else []
    return found


def _in_file(file: Any) -> Stand | None:
    """Returns the position at which a file is read; None for a file that is only written."""
    try:
        if not (file.readable() and file.seekable()):
            return None
    except Exception:  # it is closed, say
        return None
    try:
        return Stand(file.tell())
    except OSError:  # a loop reads it
        return Stand("in a loop")


def _in_iterator(iterator: Any, links: int) -> Any:
    """Returns the position of an iterator, from what it holds; None if it does not show it."""
    left = -1 if hasattr(iterator, "__len__") else operator.length_hint(iterator, -1)
    if left >= 0:
        return left
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    found: list[Any] = []
    for item in gc.get_referents(iterator) if links else ():
        for inner in item if isinstance(item, tuple) else (item,):
            if isinstance(inner, int):
                found.append(inner)
            elif isinstance(inner, list):  # what a cycle has kept
                found.append(len(inner))
            elif hasattr(inner, "__next__") and not isinstance(inner, type):
                stand = stands(inner, links - 1)
                if stand is None or stand.text == UNKNOWN:
                    return None
                found.append(stand.text)
    return found or None


def is_otherwise(now: str, then: str) -> bool:
    """Returns whether two texts are of other values, but for what is drawn for each object, as
    uuids are.
    """
    return not is_of_a_sample(now, then) and _DRAWN.sub("", now) != _DRAWN.sub("", then)


def _as_text(seen: Any) -> str:
    return seen.text if isinstance(seen, Stand) else as_text(seen)


def _full_name(value: Any) -> str:
    return f"{module_of(value)}.{value.__qualname__}"


def _is_value(name: str, value: Any) -> bool:
    """Returns whether a name of a class or module stands for a value, not for code."""
    is_code = isinstance(value, (*CODE, *_DESCRIPTORS))
    return not (name.startswith("__") or is_code or hasattr(value, _RUN))


def _in_asked(walk: Walk, names: WalkedNames) -> Iterator[tuple[str, str]]:
    """Yields path and checksum for attributes of objects that have a state_dict of their own."""
    for path, node in walk.nodes.items():
        is_asked = isinstance(node, StatefulNode) and not isinstance(node.value, LRScheduler)
        if is_asked and is_users(type(node.value).__module__):
            for key, value in attributes_of(node.value).items():
                yield walk.path_of(path, key), as_text(look(value, names))


def _tensors_of(layer: Any) -> Stand:
    """Returns a checksum of a layer's own parameters and buffers, without its sublayers'."""
    tensors = (*layer._parameters.values(), *layer._buffers.values())
    arrays = [Array.of(t) for t in tensors if t is not None and t._is_initialized()]
    fetch(arrays)
    return Stand(checksum_of(array.data for array in arrays))


def _is_of_handle(path: str, walk: Walk) -> bool:
    """Returns whether a path leads into an object that holds a file or the like: a progress bar."""
    owner = walk.nodes.get(path.rpartition(".")[0])
    return owner is not None and type(owner) is Node and holds_handle(owner.value)


def _hooks_in(walk: Walk) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the hooks of each layer, by its path."""
    for path, node in walk.nodes.items():
        layer = node.value
        if isinstance(layer, Layer):
            yield path, (*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values())
