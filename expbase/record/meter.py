"""What training logs between two lines, summed up: nothing waits for the device before a line.

meter.add(400, {"loss": loss})          # a tensor, copied but not read
metrics = meter.means()                 # numbers; the meter is empty again
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NAMED = 5  # numbers that are not finite, at most
_UNITS = 1 << 1074  # of the smallest float, in 1
_UNREAD = 1000  # numbers of a name, at most


class NonFiniteError(FloatingPointError):
    """A logged training scalar, a parameter or an accumulator is not finite."""

    def __init__(self, bad: str, newest: str) -> None:
        super().__init__(
            f"not finite: {bad}. No checkpoint holds it; the last good one is {newest}. Lower the "
            "learning rate or clip gradients; with training.nonfinite=warn the run goes on."
        )


class Meter:
    """The scalars that were logged since the last line, and their means.

    It keeps no graph and does not see a later change in place: a tensor is copied, and read when
    its number is needed, because that waits for the device.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self.is_used = False  # whether anything was added, since it was made

    def add(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Adds one value for each name; a TypeError if it is not one number."""
        for name, value in scalars.items():
            # `size` of a tensor takes ten times as long as its shape.
            is_number = hasattr(value, "item") or isinstance(value, (int, float))
            if not is_number or math.prod(getattr(value, "shape", ())) != 1:
                shown = f"of shape {[*value.shape]}" if hasattr(value, "shape") else repr(value)
                raise TypeError(
                    f"log: {name!r} is {shown}; expected one number. Reduce it first, for example "
                    "with mean()."
                )
            if name not in self._sums:
                self._sums[name] = _Sum()
            self._sums[name].add(iteration, value)
            self.is_used = True

    def note_used(self) -> None:
        """Notes that something was logged that is not added here."""
        self.is_used = True

    def means(self) -> dict[str, float]:
        """Returns the mean of each name over the times it was logged; the meter is empty
        afterwards.
        """
        means = {name: one.mean() for name, one in self._read().items()}
        self.clear()
        return means

    def clear(self) -> None:
        """Forgets what was added since the last line."""
        self._sums = {}

    def take_all(self, states: Sequence[Mapping[str, list[Any]]]) -> None:
        """Takes what several meters have, of which each gave its `state_dict`, for its own."""
        self._sums = {}
        for state in states:
            for name, (count, total, bad) in state.items():
                one = self._sums.setdefault(name, _Sum())
                one.count += count
                one.total += total
                one.bad = sorted([*one.bad, *bad], key=operator.itemgetter(0))[:_NAMED]

    def nonfinite(self) -> str:
        """Returns the first numbers that are not finite, with name and iteration; "" if all are."""
        bad = {  # the shares of an update may have the same one
            f"{name}={value} at iteration {iteration}": None
            for name, one in self._read().items()
            for iteration, value in one.bad
        }
        return ", ".join([*bad][:_NAMED])

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns what was added since the last line, by name."""
        return {name: [one.count, one.total, one.bad] for name, one in self._read().items()}

    def problems(self, state: Any) -> list[str]:
        """Returns none."""
        return []

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        self._sums = {name: _Sum(*values) for name, values in state.items()}
        self.is_used = bool(state)
        return []

    def _read(self) -> dict[str, _Sum]:
        for one in self._sums.values():
            one.read()
        return self._sums


@dataclass(slots=True)
class _Sum:
    """The numbers of one name, added up: a line may be far away, or never come."""

    count: int = 0
    # In units of the smallest float, so it is exact, and does not depend on the order.
    total: int = 0
    bad: list[tuple[int, float]] = field(default_factory=list)  # the first, with their iterations
    unread: list[tuple[int, Any]] = field(default_factory=list)  # with their iterations, too

    def add(self, iteration: int, value: Any) -> None:
        # A copy, because the value may be changed in place before it is read.
        kept = value.detach().clone() if hasattr(value, "detach") else copy.copy(value)
        self.unread.append((iteration, kept))
        if len(self.unread) == _UNREAD:
            self.read()

    def mean(self) -> float:
        return self.total / (self.count * _UNITS) + sum(number for _, number in self.bad)

    def read(self) -> None:
        """Adds up what is unread; waits for the device if that has something of it."""
        for iteration, value in self.unread:
            number = float(value.item() if hasattr(value, "item") else value)
            self.count += 1
            if math.isfinite(number):
                numerator, denominator = number.as_integer_ratio()
                self.total += numerator * (_UNITS // denominator)
            elif len(self.bad) < _NAMED:
                self.bad.append((iteration, number))
        self.unread = []
