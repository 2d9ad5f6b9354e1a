"""What has state among the attributes that a user sets on an experiment, or on any object.

Everything with state is saved with no further code; what changes among plain values is saved, too;
`excluded` leaves something out.

    state = UserState(experiment, warn)
    state.saved()          # the layers, optimizers, … that a checkpoint holds
    state.values           # the plain values among the rest
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.nn import Layer

from expbase.base.generators import GENERATORS
from expbase.base.things import join
from expbase.state import objects
from expbase.state.inventory import BEYOND, LOADERS, Inventory, places
from expbase.state.plain_values import Owners, PlainValues

# The template's own, and the loaders, whose state is the position in the data.
_NO_VALUES = {"_ExperimentBase__run", "visualizer", "train_loader"}
_NOT_STATE = {*_NO_VALUES, *LOADERS}


class UserState:
    """The attributes of one object that are its user's, and what is reached from them.

    Args:
        owner: The object.
        warn: Called with a line about values that no checkpoint holds.
    """

    def __init__(self, owner: object, warn: Callable[[str], None]) -> None:
        self.everything = vars(owner)  # the template's own, too
        self.registered: list[str] = []  # names of values that are state in any case
        self.excluded: list[str] = []  # names of what is left out
        self.by_share: list[str] = []  # names of values of which each share has its own
        self.is_named = False  # whether it is too late to name more
        self.values = PlainValues(self, warn)
        self._owner = owner
        self._optimizers: dict[str, Any] = {}  # as they were found last
        # Objects in whose attributes something with state is: an agent with its net.
        self._holders: dict[str, Any] = {}
        self._held: set[str] = set()  # paths of what has state, when it was asked for last
        self._held_by: tuple[str, ...] = ()  # what paths in such objects begin with

    def register(self, names: tuple[str, ...], *, by_share: bool = False) -> None:
        """Names values that are state, maybe one of each share; see ExperimentBase."""
        self._name(self.by_share if by_share else self.registered, names)

    def exclude(self, names: tuple[str, ...]) -> None:
        """Names what is no state; see ExperimentBase."""
        self._name(self.excluded, names)

    def _name(self, noted: list[str], names: tuple[str, ...]) -> None:
        """Adds names to `registered` or `excluded`; errors if it is too late or there is none."""
        if self.is_named:
            raise RuntimeError("state is named in setup_model; a resumed run must know it then.")
        for name in names:
            if not (name.startswith(BEYOND) or hasattr(*self.owner_of(name))):
                raise AttributeError(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)

    def owner_of(self, path: str) -> tuple[Any, str]:
        """Returns the object that has the attribute at a path, None: there is none; its name."""
        where, _, name = path.rpartition(".")
        owner: Any = self._owner
        for part in where.split(".") if where else ():
            if isinstance(owner, (list, tuple)) and part.isdigit():
                owner = {str(number): item for number, item in enumerate(owner)}
            owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
            owner = objects.unwrap(owner)
        return owner, name

    def attributes(self) -> dict[str, Any]:
        """Returns the user's own, by name."""
        return {name: value for name, value in self.everything.items() if name not in _NOT_STATE}

    def look_into_objects(self) -> None:
        """Finds the objects of the user's that hold something with state: once, in setup."""
        reached = self.walk().owners
        self._holders = {p: o for p, o in reached.items() if not isinstance(o, Layer)}
        names = self.found().names()
        for path in [*self._holders]:
            if not any(name.startswith(f"{path}.") for name in names):
                del self._holders[path]

    def _in_objects(self) -> dict[str, Any]:
        return {
            join(path, name): value
            for path, holder in self._holders.items()
            for name, value in places(holder).items()
            if isinstance(value, Layer) or not path.startswith(LOADERS) or ".dataset" in path
        }

    def found(self) -> objects.StatefulObjects:
        """Returns the objects with state, excluded ones, too."""
        return objects.find(self.attributes(), (), self._in_objects())

    def saved(self) -> objects.StatefulObjects:
        """Returns the objects with state that a checkpoint holds."""
        named = [*self.excluded, *self.by_share]
        return objects.find(self.attributes(), named, self._in_objects())

    def optimizers(self) -> dict[str, Any]:
        """Returns all of them by name; looked for again unless each is where it was found last."""
        known = self._optimizers
        if not known or any(self.everything.get(name) is not o for name, o in known.items()):
            self._optimizers = known = self.found().optimizers
        return known

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer, excluded ones, too, by the name of its curve."""
        found = self.optimizers()
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in found.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    def walk(self) -> Inventory:
        """Walks from the experiment on, and from its loaders."""
        loaders = {name: self.everything[name] for name in LOADERS if name in self.everything}
        return Inventory(self._owner, {**self.attributes(), **loaders}, self._is_excluded)

    def owners(self) -> Owners:
        """Returns what has places and may be replaced in training: the experiment, layers,
        optimizers.
        """
        found = self.saved()
        self._held = {*found.names()}
        self._held_by = tuple(f"{name}." for name in found.objects)
        settings = objects.settings_of_parameters(found)
        return {"": self._owner, **dict(found.sublayers()), **found.optimizers, **settings}

    def _is_excluded(self, path: str) -> bool:
        return _is_under(path, self.excluded)

    def is_registered(self, path: str) -> bool:
        """Returns whether a user has named it, or the object that has it."""
        return _is_under(path, self.registered)

    def is_left_out(self, path: str) -> bool:
        """Returns whether what is there is no value, or excluded."""
        is_elsewhere = path in _NO_VALUES or path in self._held or path in self.by_share
        return is_elsewhere or self._is_excluded(path)

    def is_held(self, path: str) -> bool:
        """Returns whether an object with a state of its own has it."""
        return path.startswith(self._held_by)

    def is_copied(self, path: str, value: Any) -> bool:
        """Returns whether worker processes draw from copies of what is there."""
        if not isinstance(value, GENERATORS):
            return False
        loader: Any = self.everything.get("train_loader")
        if not getattr(loader, "num_workers", 0):
            return False
        copied = [self.values.path_of(part) for part in (loader.dataset, loader.collate_fn)]
        return any(path.startswith(f"{where}.") for where in copied)


def _is_under(path: str, names: list[str]) -> bool:
    """Returns whether a path is one of the names, or goes on from one."""
    return any(path == name or path.startswith(f"{name}.") for name in names)
