"""What has state among the attributes that a user sets on an experiment, or on any object.

Everything with state is saved with no further code; what changes among plain values is saved, too;
`excluded` leaves something out.

    state = UserState(experiment, warn)
    state.saved()          # the layers, optimizers, … that a checkpoint holds
    state.values           # the plain values among the rest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from expbase.state import objects
from expbase.state.values import Owners, Values, find_owner, own_attributes

# The template's own, and the loaders, whose state is the position in the data.
_NOT_STATE = {
    *("_ExperimentBase__run", "visualizer"),
    *("train_loader", "valid_loader", "test_loader"),
}


class UserState:
    """The attributes of one object that are its user's.

    Args:
        owner: The object.
        warn: Called with a line about a value that cannot be saved.
    """

    def __init__(self, owner: object, warn: Callable[[str], None]) -> None:
        self.everything = vars(owner)  # the template's own, too
        self.registered: list[str] = []  # names of values that are state in any case
        self.excluded: list[str] = []  # names of what is left out
        self.by_share: list[str] = []  # names of values of which each share has its own
        self.is_named = False  # whether it is too late to name more
        self.values = Values(self.owners, self.registered, warn)
        self._owner = owner
        self._optimizers: dict[str, Any] = {}  # as they were found last

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
            if not hasattr(*self.owner_of(name)):
                raise AttributeError(f"self.{name} does not exist; set it before you name it.")
            if name not in noted:
                noted.append(name)

    def owner_of(self, path: str) -> tuple[Any, str]:
        """The object that has the attribute at a path, None if there is none, and its name."""
        return find_owner({"": (self._owner, {})}, path)

    def attributes(self) -> dict[str, Any]:
        """The user's own, by name."""
        return {name: value for name, value in self.everything.items() if name not in _NOT_STATE}

    def found(self) -> objects.StatefulObjects:
        """The objects with state, excluded ones, too."""
        return objects.find(self.attributes())

    def saved(self) -> objects.StatefulObjects:
        """The objects with state that a checkpoint holds."""
        named = [*self.excluded, *self.registered, *self.by_share]
        return objects.find(self.attributes(), named)

    def optimizers(self) -> dict[str, Any]:
        """All of them by name; looked for again unless each is where it was found last."""
        known = self._optimizers
        if not known or any(self.everything.get(name) is not o for name, o in known.items()):
            self._optimizers = known = self.found().optimizers
        return known

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer, excluded ones, too, by the name of its curve."""
        found = self.optimizers()
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in found.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    def owners(self) -> Owners:
        """The object and its layers, with those of their attributes that may be state."""
        found = self.saved()
        left_out = {*self.excluded, *self.by_share, *found.names()}
        own = {n: value for n, value in self.attributes().items() if n not in left_out}
        owners: dict[str, tuple[Any, Mapping[str, Any]]] = {"": (self._owner, own)}
        for path, layer in found.sublayers():
            attributes = own_attributes(layer).items()
            left_out = {*self.excluded, *self.by_share}
            kept = {n: value for n, value in attributes if f"{path}.{n}" not in left_out}
            owners[path] = layer, kept
        return owners | objects.settings_of_parameters(found)
