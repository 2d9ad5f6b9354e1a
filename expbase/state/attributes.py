"""The state of an experiment: which of its attributes belong to a checkpoint.

Whatever training changes in an attribute is restored, with no further code; `exclude` leaves
something out.

    state = UserState(experiment, warn)
    state.saved()          # the layers, optimizers, … that a checkpoint holds
    state.values           # what training has changed beside them
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from paddle.nn import Layer

from expbase.base.generators import GENERATORS
from expbase.state import parts
from expbase.state.audit import BEYOND, Audit
from expbase.state.classes import CODE
from expbase.state.nodes import Node
from expbase.state.paths import Spot, spot_at
from expbase.state.values import Values
from expbase.state.walk import LOADERS, Walk, nodes_in_layers, unwrap

# The template's own.
_GIVEN = ("config", "args")  # what a user is given, and may change in training
_NO_VALUES = {"_ExperimentBase__run", "visualizer", "train_loader"}


class UserState:
    """The attributes that a user has set on an object, and everything that they lead to.

    Args:
        owner: The experiment, or another object with attributes.
        warn: Called with a line about a value that no checkpoint holds.
        say: Called with a line that is no warning.
    """

    def __init__(
        self, owner: object, warn: Callable[[str], None], say: Callable[[str], object] = id
    ) -> None:
        self.everything = vars(owner)  # the template's own, too
        self.registered: list[str] = []  # names of values that are state in any case
        self.excluded: list[str] = []  # names of what is left out
        self.apart: list[str] = []  # names of values that another entry of a checkpoint has
        self.is_named = False  # whether it is too late to name more
        self.audit = Audit(self, warn, say)
        self.values = Values(self, self.audit, warn)
        self._owner = owner
        self._optimizers: dict[str, Any] = {}  # as they were found last
        self._walk: Walk | None = None  # the last one, by which what has a form is found
        self._names_then: list[str] = []  # of the attributes that were something at that walk

    def register(self, names: tuple[str, ...], *, apart: bool = False) -> None:
        """Notes paths whose values are always saved; see ExperimentBase.register_stateful.

        Args:
            names: The paths.
            apart: Whether their values are saved in an entry of their own: one of each share.
        """
        self._name(self.apart if apart else self.registered, names)

    def exclude(self, names: tuple[str, ...]) -> None:
        """Notes paths that are never saved; see ExperimentBase.exclude_from_state."""
        self._name(self.excluded, names)

    def _name(self, noted: list[str], names: tuple[str, ...]) -> None:
        """Adds paths to `registered` or `excluded`; an error after setup, or if one is missing."""
        if self.is_named:
            raise RuntimeError("state is named in setup_model; a resumed run must know it then.")
        for name in names:
            is_beyond = name.startswith(BEYOND) or self._is_code(name)
            if not (is_beyond or self.spot(name).is_there):
                raise AttributeError(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)
        self._walk = None

    def _is_code(self, path: str) -> bool:
        """Returns whether a path goes on from a function, or to the hooks of a layer."""
        above = self.spot(path).owner if "." in path else None
        return isinstance(above, CODE) or (isinstance(above, Layer) and path.endswith(" hooks"))

    def spot(self, path: str) -> Spot:
        """Returns the place that a path names."""
        return spot_at(self._owner, path)

    def walk(self) -> Walk:
        """Walks over everything that the experiment holds."""
        own = self.everything.items()
        attributes = {n: v for n, v in own if n not in _NO_VALUES or n in LOADERS}
        kind = type(self._owner)
        attributes |= {n: getattr(self._owner, n) for n in _GIVEN if hasattr(kind, n)}
        excluded = {path: self.spot(path).value for path in (*self.excluded, *self.apart)}
        self._names_then = self._names()
        self._walk = Walk(self._owner, attributes, excluded)
        return self._walk

    def found(self) -> parts.StatefulObjects:
        """Returns all layers, optimizers and other objects with a state of their own, excluded ones
        included.
        """
        return parts.found_in(self._walked(), with_excluded=True)

    def saved(self, *, anew: bool = False) -> parts.StatefulObjects:
        """Returns the layers, optimizers and other objects that a checkpoint holds.

        Args:
            anew: Whether to look also where there was none the last time.
        """
        found = parts.found_in(self.walk() if anew else self._walked())
        if self.is_named:
            # Copies of weights that training keeps are tensors like others.
            new = [name for name in found.parameters if not self.values.has_setup_made(name)]
            for name in new:
                del found.parameters[name]
        return found

    def _walked(self) -> Walk:
        """Returns the last walk if every layer, optimizer and the like still is where it was."""
        walk = self._walk
        if walk is None or self._names_then != self._names():
            return self.walk()
        stand = (_stands(walk, path, node, key) for path, (node, key) in walk.found_at.items())
        return walk if all(stand) else self.walk()

    def _names(self) -> list[str]:
        return [name for name, value in self.everything.items() if value is not None]

    def moved_by_forwards(self, layers: Iterable[Any]) -> list[Node]:
        """Returns the nodes that a forward may change: on layers, and generators."""
        found = [node for node in self.walk().nodes.values() if isinstance(node.value, GENERATORS)]
        return [*found, *nodes_in_layers(layers)]

    def optimizers(self) -> dict[str, Any]:
        """Returns all optimizers by name; looks for them again unless each is where it was."""
        known = self._optimizers
        if not known or any(self.everything.get(name) is not o for name, o in known.items()):
            self._optimizers = known = self.found().optimizers
        return known

    def learning_rates(self) -> dict[str, float]:
        """Returns the rate of each optimizer by the name of its curve, excluded ones included."""
        found = self.optimizers()
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in found.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    # --- over a run ------------------------------------------------------------------------

    def note_setup(self) -> None:
        """Notes the values at the end of setup, which every start makes."""
        self.values.note_setup()

    def begin(self) -> tuple[list[str], list[str]]:
        """Notes the values when training begins, after on_train_begin: these are the code's.

        Returns:
            One line for each value that differs from the restored checkpoint; and further lines
            about it.
        """
        self.values.begin()
        not_restored = [*self.values.differences()]
        lost, otherwise = self.audit.differences(self._code(), not_restored)
        lines, self.values.lines = self.values.lines, []
        return lost, [*lines, *otherwise]

    def inventory(self) -> dict[str, Any]:
        """Returns the manifest's entry on values that are in no checkpoint."""
        return self.audit.inventory(self._code())

    def _code(self) -> dict[str, str]:
        """Returns checksums of the values that the code has set, by path, without options."""
        given = tuple(f"{name}." for name in _GIVEN)
        return {p: text for p, text in self.values.code().items() if not p.startswith(given)}

    def is_registered(self, path: str) -> bool:
        """Returns whether a path, or a path that it goes on from, was registered."""
        if not self.registered:
            return False
        names, beginnings = _prefixes((*self.registered,))
        return path.removesuffix("[:]") in names or path.startswith(beginnings)

    def is_left_out(self, path: str) -> bool:
        """Returns whether the value at a path is never saved: it is code, or excluded."""
        if path in _NO_VALUES or path.startswith("config.training."):
            return True
        if not (self.excluded or self.apart):  # it is asked of each place
            return False
        names, beginnings = _prefixes((*self.excluded,))
        name = path.removesuffix("[:]")
        return name in names or name in self.apart or path.startswith(beginnings)

    def copied(self) -> list[str]:
        """Returns the paths of objects of which worker processes use copies: a data set's."""
        loader: Any = self.everything.get("train_loader")
        walk = self._walk
        if walk is None or not getattr(loader, "num_workers", 0):
            return []
        parts_of = (loader.dataset, loader.collate_fn)
        return [f"{walk.paths[id(part)]}." for part in parts_of if id(part) in walk.paths]


def _stands(walk: Walk, path: str, node: Node, key: Any) -> bool:
    """Returns whether a layer, an optimizer or the like still is where a walk has found it."""
    value = node.child(key)
    found = walk.layers[path] if path in walk.layers else walk.nodes[path].value
    return unwrap(value) is found or (value is not None and value is walk.wrapped.get(path))


@functools.lru_cache(8)
def _prefixes(names: tuple[str, ...]) -> tuple[set[str], tuple[str, ...]]:
    """Returns the paths as a set, and the beginnings of all paths that go on from them."""
    return {*names}, tuple(f"{name}." for name in names)
