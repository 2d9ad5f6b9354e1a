"""Whether the ranks still have the same of what DataParallel keeps equal; if not, what.

That is what is trained, with its accumulators and master weights, and the learning rates. The first
save of a start compares all of it; the later ones the rates and a sample of each tensor, at other
places each time: of an embedding few rows may differ. Where a sample differs, all is compared
again. What differs is told once, is saved as rank 0 has it, and is compared no more. Why it differs
is not asked here: who wants to know is handed what the ranks have exchanged.

    samples = collectives.all_gather_object(comparison.sample(arrays, found))   # at each save
    if comparison.shows(samples):
        comparison.look(arrays, found, samples)    # a collective
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from expbase.base.arrays import Array, fetch
from expbase.base.files import checksum_of
from expbase.ranks import collectives, compare_gathered
from expbase.state.parts import StatefulObjects, named_parameters, parameter_names

Name = tuple[str, str]  # file and key of a tensor
Arrays = dict[Name, Array]

_ELEMENTS = 128  # of a sample, or nearly twice as many
_STRIDE = 7919  # between the first elements of two samples; a prime
_CLOSER = 4096  # elements that are exchanged of a tensor that differs
_TENSORS = 64  # of which so many are exchanged


class Sample(NamedTuple):
    """What a rank tells the others at a save."""

    checksum: int  # of the elements of all tensors
    rates: dict[str, str]  # the learning rate of each optimizer


class Difference(NamedTuple):
    """What a save has found to differ between the ranks; the same on all, but for `found`."""

    owners: Mapping[Name, str]  # of each tensor that differs, or is an accumulator, the parameter
    rates: Set[str]  # the optimizers whose learning rates differ, since any save of this start
    elements: Sequence[Mapping[Name, Array]]  # of each rank, of some of these tensors; flat
    found: StatefulObjects


OnDifference = Callable[[Difference], object]


class RankComparison:
    """What the ranks of one start have been found to have otherwise.

    Args:
        logger: Gets a line for what differs.
        on_difference: Called on every rank, each time that more is found to differ.
    """

    def __init__(self, logger: logging.Logger, on_difference: OnDifference | None = None) -> None:
        self.differing: set[str] = set()  # parameters, also those whose accumulators alone differ
        self._logger = logger
        self._on_difference = on_difference
        self._rates: set[str] = set()  # optimizers whose rates differ
        self._saves = 0

    def not_known(self, names: Set[Name], found: StatefulObjects) -> Set[Name]:
        """Returns the names of what is not known to differ."""
        if not self.differing:  # as in most runs, which pay nothing
            return names
        owners = _owners(names, found)
        return {name for name, owner in owners.items() if owner not in self.differing}

    def sample(self, arrays: Arrays, found: StatefulObjects) -> Sample:
        """Returns a sample of tensors, in the order of their names, and the rates to compare."""
        start = self._saves * _STRIDE
        self._saves += 1
        rates = {name: repr(float(o.get_lr())) for name, o in found.optimizers.items()}
        elements = _elements(arrays, sorted(arrays), _ELEMENTS, start)
        return Sample(
            checksum_of(array.data for array in elements.values()),
            {name: rate for name, rate in rates.items() if name not in self._rates},
        )

    def shows(self, samples: Sequence[Sample]) -> bool:
        """Returns whether it is time to look closer: at the first save, or if one differs."""
        return self._saves == 1 or not compare_gathered.are_alike(samples)

    def look(self, arrays: Arrays, found: StatefulObjects, samples: Sequence[Sample]) -> None:
        """Compares all that was sampled, and tells what differs; a collective."""
        has_rates = self._tell_rates([sample.rates for sample in samples])
        unequal = compare_gathered.unlike(collectives.all_gather_object(checksums(arrays)))
        owners = _owners(unequal, found)
        elements: list[dict[Name, Array]] = []
        if unequal:
            names = sorted(unequal & arrays.keys())[:_TENSORS]  # a rank may train fewer
            elements = collectives.all_gather_object(_elements(arrays, names, _CLOSER, 0))
            parted = {*owners.values()}
            self.differing |= parted
            first, *more = sorted(parted)
            and_more = f", and so do {len(more)} more" if more else ""
            self._logger.warning(
                f"{first} differs between the ranks{and_more}; rank 0's is saved, so a resumed run "
                "has rank 0's on all"
            )
        if self._on_difference is not None and (unequal or has_rates):
            self._on_difference(Difference(owners, {*self._rates}, elements, found))

    def _tell_rates(self, of_ranks: Sequence[Mapping[str, str]]) -> bool:
        """Tells which learning rates differ; returns whether any does."""
        first = of_ranks[0]
        before = len(self._rates)
        for rank, rates in enumerate(of_ranks):
            for name in sorted(compare_gathered.unlike([first, rates]) - self._rates):
                self._rates.add(name)
                self._logger.warning(
                    f"{name}: the learning rate is {first.get(name)} on rank 0 and "
                    f"{rates.get(name)} on rank {rank}"
                )
        return len(self._rates) > before


def not_exact(names: Sequence[str]) -> list[str]:
    """Returns why a run does not continue exactly from where these parameters differed."""
    if not names:
        return []
    more = f", and so did {len(names) - 1} more" if len(names) > 1 else ""
    return [f"{names[0]} differed between the ranks{more}; all have rank 0's now"]


def _owners(names: Iterable[Name], found: StatefulObjects) -> dict[Name, str]:
    """Returns whose each is, a parameter's: by one name, also where several layers have it."""
    one = parameter_names(found)
    canonical = {name: one[parameter.name] for name, parameter in named_parameters(found)}
    owners = {name: found.owner(*name) for name in names}
    return {name: canonical.get(owner, owner) for name, owner in owners.items()}


def checksums(arrays: Arrays) -> dict[Name, tuple[str, int]]:
    """Returns type, shape and checksum of each."""
    fetch(arrays.values())
    return {name: (str(array), checksum_of([array.data])) for name, array in arrays.items()}


def _elements(arrays: Arrays, names: Sequence[Name], count: int, start: int) -> Arrays:
    """Returns so many elements of each, or nearly twice as many, evenly spread."""
    steps = {name: math.prod(arrays[name].shape) // count for name in names}
    samples = {
        name: arrays[name] if step < 2 else arrays[name].every(step, start % step)
        for name, step in steps.items()
    }
    fetch(samples.values())
    return samples
