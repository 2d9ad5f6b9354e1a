"""Sums of the scalars that are logged. Nothing waits for the device before a line is due.

meter.add(400, {"loss": loss})          # in training; a tensor, copied but not read
metrics = meter.means()                 # numbers; the meter is empty again
samples.add(400, {"loss": loss})        # in a validation, for the mean over samples
metrics = means_over([samples.take()])  # with the sums of all ranks
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expbase.base.checkpoint_part import Part
from expbase.base.errors import TypeMistake

_NAMED = 5  # how many numbers that are not finite are named, at most
_UNITS = 1 << 1074  # 1, in units of the smallest float
_UNREAD = 1000  # numbers of a name that are kept on the device, at most


class Meter(Part):
    """The scalars that were logged since the last line, and their means.

    A tensor is copied without its graph, so a later change in place is not seen. It is read when
    its number is needed, because reading waits for the device.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self.is_used = False  # whether anything was added, since it was made

    def add(
        self,
        iteration: int,
        scalars: Mapping[str, Any],
        weight: int = 1,
        *,
        only_finite: bool = False,
    ) -> None:
        """Adds one value for each name.

        Args:
            iteration: The one under way, for a message.
            scalars: Numbers, or tensors of one element, by name.
            weight: How many times each counts: the number of its samples.
            only_finite: Whether what is not finite is left out of these names, when it is read.

        Raises:
            TypeError: A value is not one number.
        """
        for name, value in scalars.items():
            # `size` of a tensor takes ten times as long as its shape.
            is_number = hasattr(value, "item") or isinstance(value, (int, float))
            if not is_number or math.prod(getattr(value, "shape", ())) != 1:
                shown = f"of shape {[*value.shape]}" if hasattr(value, "shape") else repr(value)
                raise TypeMistake(
                    f"log: {name!r} is {shown}; expected one number. Reduce it first, for example "
                    "with mean()."
                )
            if name not in self._sums:
                self._sums[name] = _Sum()
            one = self._sums[name]
            if only_finite:
                one.only_finite = True
            one.add(iteration, value, weight)
            self.is_used = True

    def note_used(self) -> None:
        """Notes that something was logged elsewhere."""
        self.is_used = True

    def means(self) -> dict[str, float]:
        """Returns the mean of each name since the last line, and empties the meter."""
        means = {name: one.mean() for name, one in self._read().items() if one.count}
        self.clear()
        return means

    def clear(self) -> None:
        """Forgets what was added since the last line."""
        self._sums = {}

    def take_all(self, states: Sequence[Mapping[str, list[Any]]]) -> None:
        """Replaces the sums by those of several meters, added up.

        Args:
            states: The `state_dict` of each.
        """
        self._sums = {}
        for state in states:
            for name, (count, total, bad) in state.items():
                one = self._sums.setdefault(name, _Sum())
                one.count += count
                one.total += total
                one.bad = sorted([*one.bad, *bad], key=operator.itemgetter(0))[:_NAMED]

    def nonfinite(self) -> str:
        """Returns the first numbers that are not finite, with name and iteration; "" if all are."""
        bad = {  # two ranks may have the same one
            f"{name}={value} at iteration {iteration}": None
            for name, one in self._read().items()
            for iteration, value in one.bad
        }
        return ", ".join([*bad][:_NAMED])

    def state_dict(self) -> dict[str, list[Any]]:
        """Returns the sums since the last line, by name: count, sum, non-finite numbers."""
        return {name: [one.count, one.total, one.bad] for name, one in self._read().items()}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> list[str]:
        """Restores the sums of `state_dict`; always exact."""
        self._sums = {name: _Sum(*values) for name, values in state.items()}
        self.is_used = bool(state)
        return []

    def _read(self) -> dict[str, _Sum]:
        _read(self._sums.values())
        return self._sums


class Reading:
    """The samples that the loops over data of one process have read, and the batch in hand."""

    def __init__(self) -> None:
        self.num_samples = 0  # read in all
        # The samples in the batch of each open loop; the innermost loop is the last.
        self._open: dict[object, int] = {}

    @property
    def in_hand(self) -> int | None:
        """Samples in the batch of the innermost open loop; None: no loop is open."""
        return next(reversed(self._open.values()), None)

    def enter(self, loop: object, num_samples: int) -> None:
        """Notes that a loop has read a batch: it is the innermost one, those within it are over."""
        while loop in self._open and next(reversed(self._open)) is not loop:
            self._open.popitem()
        self._open[loop] = num_samples

    def leave(self, loop: object) -> None:
        """Notes that a loop is over. May be called twice."""
        self._open.pop(loop, None)


Taken = tuple[Mapping[str, list[Any]], Mapping[str, list[Any]]]  # of several ranks: means_over


class SampleMeter:
    """The scalars that are logged outside of training, weighted by their numbers of samples.

    The weight of a scalar is the number of samples in the batch in hand; outside of loops the
    number of samples read since the name was last logged there. A scalar without samples counts
    only if its name has none with samples, once each time: a rank without data has no result, but a
    validation without a loader has one.

    Args:
        reading: The samples that this process reads.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._began = reading.num_samples
        # By name: how many samples had been read before and when it was logged.
        self._read: dict[str, tuple[int, int]] = {}
        self._weighed = Meter()
        self._weightless = Meter()

    def add(self, iteration: int, scalars: Mapping[str, Any]) -> None:
        """Adds one value for each name, with the number of its samples as its weight.

        Args:
            iteration: The one under way, for a message.
            scalars: Numbers, or tensors of one element, by name.

        Raises:
            TypeError: A value is not one number.
        """
        for name, value in scalars.items():
            in_hand = self._reading.in_hand
            weight = self._num_read_for(name) if in_hand is None else in_hand
            meter = self._weighed if weight else self._weightless
            meter.add(iteration, {name: value}, weight or 1)

    def _num_read_for(self, name: str) -> int:
        """Returns the samples read since a name was last logged; if none, the number of then."""
        begin, end = self._read.get(name, (self._began, self._began))
        if end < self._reading.num_samples:
            begin, end = end, self._reading.num_samples
            self._read[name] = begin, end
        return end - begin

    def take(self) -> Taken:
        """Returns the sums, for `means_over`, and empties the meter."""
        taken = self._weighed.state_dict(), self._weightless.state_dict()
        self._weighed.clear()
        self._weightless.clear()
        return taken


def means_over(of_ranks: Sequence[Taken]) -> dict[str, float]:
    """Returns the mean of each name over the samples of all ranks; a rank may lack a name."""
    weighed, weightless = Meter(), Meter()
    weighed.take_all([taken[0] for taken in of_ranks])
    weightless.take_all([taken[1] for taken in of_ranks])
    return {**weightless.means(), **weighed.means()}


@dataclass(slots=True)
class _Sum:
    """The sum of the numbers of one name."""

    count: int = 0  # of the numbers, each by its weight
    # In units of the smallest float: so the sum is exact, and does not depend on the order.
    total: int = 0
    # The first numbers that are not finite, with their iterations.
    bad: list[tuple[int, float]] = field(default_factory=list)
    # Iterations, values and weights; they are read now and then, for a line may never come.
    unread: list[tuple[int, Any, int]] = field(default_factory=list)
    only_finite: bool = False  # whether others are left out

    def add(self, iteration: int, value: Any, weight: int) -> None:
        # A copy, because the value may be changed in place before it is read.
        kept = value.detach().clone() if hasattr(value, "detach") else copy.copy(value)
        self.unread.append((iteration, kept, weight))
        if len(self.unread) == _UNREAD:
            _read([self])

    def mean(self) -> float:
        return self.total / (self.count * _UNITS) + sum(number for _, number in self.bad)

    def read(self) -> None:
        """Adds the values that are unread."""
        for iteration, value, weight in self.unread:
            number = float(value.item() if hasattr(value, "item") else value)
            if math.isfinite(number):
                numerator, denominator = number.as_integer_ratio()
                self.total += weight * numerator * (_UNITS // denominator)
            elif self.only_finite:
                continue
            elif len(self.bad) < _NAMED:
                self.bad.append((iteration, number))
            self.count += weight
        self.unread = []


def _read(sums: Collection[_Sum]) -> None:
    """Adds the values that are unread; waits for the device once, if they are there."""
    unread = [one for one in sums if one.unread]
    if not unread:
        return
    from expbase.base.arrays import numbers, on_device  # here: tools read runs without paddle

    # Where the first value of a name is, there are the others, nearly always.
    waiting = [one for one in unread if on_device(one.unread[0][1])]
    if waiting:
        found = iter(numbers(value for one in waiting for _, value, _ in one.unread))
        for one in waiting:
            one.unread = [(at, next(found), weight) for at, _, weight in one.unread]
    for one in unread:
        one.read()
