"""The state of an experiment: which of its attributes belong to a checkpoint.

Whatever training changes in an attribute is restored, with no further code; `exclude` leaves
something out.

    state = UserState(experiment, warn)
    state.saved()          # the layers, optimizers, … that a checkpoint holds
    state.values           # what training has changed beside them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from expbase.base.arrays import fetch
from expbase.base.files import checksum_of
from expbase.base.generator_states import GENERATORS
from expbase.state import parts
from expbase.state.changed_values import Values
from expbase.state.reachable import Reach
from expbase.state.unsavable import Told
from expbase.state.value_places import Node
from expbase.state.walk import Walk, nodes_in_layers, unwrap


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
        self.reach = Reach(owner)
        self.told = Told(self.reach, warn, say)
        self.values = Values(self.reach, self.told, warn)
        self._optimizers: dict[str, Any] = {}  # as they were found last
        self._names_then: list[str] = []  # of the attributes that were something then
        self._noted: parts.Noted | None = None  # what setup has made
        self._sums: dict[str, int] = {}  # of restored tensors, before on_train_begin

    def found(self) -> parts.StatefulObjects:
        """Returns all layers, optimizers and other objects with a state of their own, excluded ones
        included.
        """
        return parts.found_in(self._walked(), self._noted, with_excluded=True)

    def saved(self, *, anew: bool = False) -> parts.StatefulObjects:
        """Returns the layers, optimizers and other objects that a checkpoint holds.

        Args:
            anew: Whether to look also where there was none the last time.
        """
        if anew:
            self.reach.walk_for_all()
            self._names_then = self._names()
        found = parts.found_in(self._walked(), self._noted)
        if self._noted is not None:
            # Copies of weights that training keeps are tensors like others.
            for name in found.parameters.keys() - self._noted.parameters.keys():
                del found.parameters[name]
        return found

    def _walked(self) -> Walk:
        """Returns the last walk if every layer, optimizer and the like still is where it was."""
        walk = self.reach.last_walk
        if walk is not None and self._names_then == self._names():
            stand = (_stands(walk, path, node, key) for path, (node, key) in walk.found_at.items())
            if all(stand):
                return walk
        self._names_then = self._names()
        return self.reach.walk()

    def _names(self) -> list[str]:
        return [name for name, value in self.reach.everything.items() if value is not None]

    def moved_by_forwards(self, layers: Iterable[Any]) -> list[Node]:
        """Returns the nodes that a forward may change: on layers, and generators."""
        nodes = self.reach.walk().nodes.values()
        found = [node for node in nodes if isinstance(node.value, GENERATORS)]
        return [*found, *nodes_in_layers(layers)]

    def optimizers(self) -> dict[str, Any]:
        """Returns all optimizers by name; looks for them again unless each is where it was."""
        known = self._optimizers
        if not known or any(self.reach.everything.get(name) is not o for name, o in known.items()):
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
        names = self.values.note_setup()
        self._noted = self.saved().note(names)

    def note_tensors(self) -> None:
        """Notes the restored tensors before on_train_begin, which may set some to other values."""
        self._sums = self._tensor_sums()

    def _tensor_sums(self) -> dict[str, int]:
        arrays = {f"{f}.{k}": a for f, by in self.saved().arrays().items() for k, a in by.items()}
        fetch(arrays.values())
        return {name: checksum_of([array.data]) for name, array in arrays.items()}

    def begin(self) -> tuple[list[str], list[str]]:
        """Notes the values when training begins, after on_train_begin, which may have set some.

        Returns:
            One line for each value that differs from the restored checkpoint; and further lines
            about it.
        """
        self.values.begin()
        not_restored = [*self.values.differences()]
        before, self._sums = self._sums, {}
        now = self._tensor_sums() if before else {}
        tensors = [name for name, there in before.items() if now.get(name) != there]
        lost, further = self.told.differences(not_restored, tensors)
        lines, self.values.lines = self.values.lines, []
        return lost, [*lines, *further]


def _stands(walk: Walk, path: str, node: Node, key: Any) -> bool:
    """Returns whether a layer, an optimizer or the like still is where a walk has found it."""
    value = node.child(key)
    found = walk.layers[path] if path in walk.layers else walk.nodes[path].value
    return unwrap(value) is found or (value is not None and value is walk.wrapped.get(path))
