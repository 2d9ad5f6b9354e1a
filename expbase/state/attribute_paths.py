"""From a path that a user writes, `"meter.sum"` or `"heads.0.scale"`, to the place that it names.

spot = spot_at(experiment, "meter.sum")
if spot.is_there: spot.put(spot.value + 1)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from expbase.state.value_kinds import ATOMS
from expbase.state.value_places import MANY
from expbase.state.walk import unwrap


class Spot(NamedTuple):
    """A place: an attribute of an object, or an item of a dict or a list."""

    owner: Any  # None: there is none
    key: Any
    is_item: bool

    @property
    def is_there(self) -> bool:
        """Whether it is a place: numbers in a list have none, as that is changed as a whole."""
        if not self.is_item:
            return hasattr(self.owner, self.key)
        is_whole = len(self.owner) >= MANY
        return not is_whole and (isinstance(self.owner, dict) or type(self.value) not in ATOMS)

    @property
    def value(self) -> Any:
        """What stands there; None if there is nothing."""
        return self.owner[self.key] if self.is_item else getattr(self.owner, self.key, None)

    def put(self, value: Any) -> None:
        """Puts a value there."""
        if self.is_item:
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


def spot_at(root: Any, path: str) -> Spot:
    """Returns the place that a path names, from an object on; layers without their wrappers."""
    *above, last = path.split(".")
    owner = root
    for word in above:
        owner = unwrap(_spot_in(owner, word).value)
    return _spot_in(owner, last)


def _spot_in(owner: Any, word: str) -> Spot:
    number = int(word) if word.isdigit() else -1
    if isinstance(owner, dict) and (word in owner or number in owner):
        return Spot(owner, word if word in owner else number, True)
    if isinstance(owner, (list, tuple)) and 0 <= number < len(owner):
        return Spot(owner, number, True)
    return Spot(owner, word, False)
