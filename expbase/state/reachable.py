"""What an experiment leads to, and what of it its user has named: as state in any case, or as none.

reach = Reach(experiment)
reach.exclude(("judge",))
reach.walk()                      # over everything else, too
reach.is_left_out("judge.head")   # True
"""

from __future__ import annotations

import functools
from typing import Any

from paddle.nn import Layer

from expbase.base.errors import AttributeMistake, RuntimeMistake
from expbase.state.attribute_paths import Spot, spot_at
from expbase.state.value_kinds import CODE
from expbase.state.walk import LOADERS, Walk

GIVEN = ("config", "args")  # what a user is given, and may change in training
BEYOND = ("class ", "module ", "function ")  # what the paths of what is no attribute begin with
# The template's own.
_NO_VALUES = {"_ExperimentBase__run", "visualizer", "train_loader"}


class Reach:
    """The attributes that a user has set on an object, and everything that they lead to.

    Args:
        owner: The experiment, or another object with attributes.
    """

    def __init__(self, owner: object) -> None:
        self.everything = vars(owner)  # the template's own, too
        self.registered: list[str] = []  # names of values that are state in any case
        self.excluded: list[str] = []  # names of what is left out
        self.apart: list[str] = []  # names of values that another entry of a checkpoint has
        self.is_named = False  # whether it is too late to name more
        self.last_walk: Walk | None = None
        self._owner = owner
        self._just_made: Walk | None = None  # with which a save or a restore has begun

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

    def end_naming(self) -> None:
        """Makes it an error to name more: setup is over."""
        self.is_named = True

    def _name(self, noted: list[str], names: tuple[str, ...]) -> None:
        """Adds paths to `registered` or `excluded`; an error after setup, or if one is missing."""
        if self.is_named:
            raise RuntimeMistake("state is named in setup_model; a resumed run must know it then.")
        for name in names:
            is_beyond = name.startswith(BEYOND) or self._is_code(name)
            if not (is_beyond or self.spot(name).is_there):
                raise AttributeMistake(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)
        self.last_walk = None

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
        attributes |= {n: getattr(self._owner, n) for n in GIVEN if hasattr(kind, n)}
        excluded = {path: self.spot(path).value for path in (*self.excluded, *self.apart)}
        self.last_walk = Walk(self._owner, attributes, excluded)
        return self.last_walk

    def walk_for_all(self) -> None:
        """Walks for a save or a restore, whose parts are to look at the same things."""
        self._just_made = self.walk()

    def walk_just_made(self) -> Walk:
        """Returns the walk with which a save or a restore has begun, once; else walks."""
        walk, self._just_made = self._just_made, None
        return walk or self.walk()

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
        walk = self.last_walk
        if walk is None or not getattr(loader, "num_workers", 0):
            return []
        parts_of = (loader.dataset, loader.collate_fn)
        return [f"{walk.paths[id(part)]}." for part in parts_of if id(part) in walk.paths]


@functools.lru_cache(8)
def _prefixes(names: tuple[str, ...]) -> tuple[set[str], tuple[str, ...]]:
    """Returns the paths as a set, and the beginnings of all paths that go on from them."""
    return {*names}, tuple(f"{name}." for name in names)
