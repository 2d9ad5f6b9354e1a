"""Whether the ranks still have the same of what DataParallel keeps equal; if not, what, and why.

That is what is trained, with its accumulators and master weights, and the learning rates. The first
save of a start compares all of it; the later ones the rates and a sample of each tensor, at other
places each time: of an embedding few rows may differ. Where a sample differs, all is compared
again. What differs is named once, with its cause, and is state of each rank from then on, if there
is not too much of it.

    samples = collectives.all_gather_object(parting.sample(watched, found))   # at each save
    if parting.shows(samples):
        different = parting.look(watched, found, samples)    # a collective
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from expbase.base.arrays import Array, Bytes, fetch
from expbase.base.files import checksum_of
from expbase.ranks import alike, collectives
from expbase.state import optimizers
from expbase.state.parts import StatefulObjects, named_parameters, parameter_names, parameters_of

Name = tuple[str, str]  # file and key of a tensor
Arrays = dict[Name, Array]

MOST_BYTES = 1 << 30  # that each rank may have otherwise: it is sent to rank 0 at each save
_ELEMENTS = 128  # of a sample, or nearly twice as many
_STRIDE = 7919  # between the first elements of two samples; a prime
_CLOSER = 4096  # elements by which the size of a difference is told
_TENSORS = 64  # of which so many are looked at
_ROUNDING = 1e-5  # of a tensor's largest element: what rounding makes of it in thousands of updates
_FINEST = {"float16": 2**-10, "bfloat16": 2**-7}  # the last bit, where that is coarser


class Sample(NamedTuple):
    """What a rank tells the others at a save."""

    checksum: int  # of the elements of all tensors
    rates: dict[str, str]  # the learning rate of each optimizer


class Parting:
    """What has parted on the ranks of one start."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kept: set[str] = set()  # parameters that each rank has otherwise, and that are saved
        self._too_large: set[str] = set()  # those that are not
        self._bytes = 0  # of what is kept, with accumulators
        self._rates: set[str] = set()  # optimizers whose rates differ
        self._saves = 0

    def known(self, names: Collection[Name], found: StatefulObjects) -> tuple[set[Name], set[Name]]:
        """Returns the names known to differ: those saved for each rank, and those too large."""
        if not self._kept and not self._too_large:  # as in most runs, which pay nothing
            return set(), set()
        owners = _owners(names, found)
        kept = {name for name, owner in owners.items() if owner in self._kept}
        return kept, {name for name, owner in owners.items() if owner in self._too_large}

    def sample(self, watched: Arrays, found: StatefulObjects) -> Sample:
        """Returns a sample of the tensors not known to differ, in the order of their names."""
        start = self._saves * _STRIDE
        self._saves += 1
        rates = {name: repr(float(o.get_lr())) for name, o in found.optimizers.items()}
        return Sample(
            checksum_of(_elements(watched, sorted(watched), _ELEMENTS, start)),
            {name: rate for name, rate in rates.items() if name not in self._rates},
        )

    def shows(self, samples: Sequence[Sample]) -> bool:
        """Returns whether it is time to look closer: at the first save, or if one differs."""
        return self._saves == 1 or not alike.are_alike(samples)

    def look(self, watched: Arrays, found: StatefulObjects, samples: Sequence[Sample]) -> set[Name]:
        """Compares all that was sampled, and names what differs; a collective.

        Returns:
            What this rank has otherwise than rank 0, if it is to be saved.
        """
        self._tell_rates([sample.rates for sample in samples])
        of_ranks = collectives.all_gather_object(checksums(watched))
        first, here = of_ranks[0], of_ranks[collectives.rank()]
        unequal = alike.unlike(of_ranks) & watched.keys()
        if not unequal:
            return set()
        owners = _owners(watched, found)
        parted = {owners[name] for name in unequal}
        size = sum(array.nbytes for n, array in watched.items() if owners[n] in parted)
        is_kept = self._bytes + size <= MOST_BYTES
        if is_kept:
            self._kept |= parted
            self._bytes += size
            outcome = "From now on it is saved for each rank."
        else:
            self._too_large |= parted
            outcome = (
                "NOT SAVED for each rank, but as rank 0 has it, so a run that goes on has other "
                f"bits: with its accumulators it is {size / 1e9:.1f} GB, and at most "
                f"{MOST_BYTES / 1e9:.1f} GB are."
            )
        for names, cause in self._causes({name: owners[name] for name in unequal}, watched, found):
            more = f", and so do {len(names) - 1} more" if len(names) > 1 else ""
            text = f"{names[0]} differs between the ranks{more}: {cause} {outcome}"
            self._logger.warning("%s", text)
        return unequal & alike.unlike([first, here]) if is_kept else set()

    def _tell_rates(self, of_ranks: Sequence[Mapping[str, str]]) -> None:
        first = of_ranks[0]
        for rank, rates in enumerate(of_ranks):
            for name in sorted(alike.unlike([first, rates]) - self._rates):
                self._rates.add(name)
                self._logger.warning(
                    f"{name}: the learning rate is {first.get(name)} on rank 0 and "
                    f"{rates.get(name)} on rank {rank}. It must come from what all ranks have "
                    "alike: self.average a rank's own number before a schedule's step() or "
                    "set_lr() is given it."
                )

    def _causes(
        self, unequal: Mapping[Name, str], watched: Arrays, found: StatefulObjects
    ) -> list[tuple[list[str], str]]:
        """Returns the parameters that differ, by cause; a collective."""
        parted = set(unequal.values())
        names = parameter_names(found)
        wrapped = {
            names[p.name]
            for wrapper in found.parallel.values()
            for p in wrapper.parameters()
            if p.name in names
        }
        rated = {
            names[p.name]
            for name in self._rates & found.optimizers.keys()
            for p in parameters_of(optimizers.innermost(found.optimizers[name]))
            if p.name in names
        }
        outside = parted - wrapped
        rated &= parted - outside
        rest = parted - outside - rated
        of_rest = {name for name, owner in unequal.items() if owner in rest}
        steps = {unequal[name] for name in of_rest if "_pow_acc" in name[1]}
        by_cause: dict[str, Set[str]] = {
            "each trains a model of its own. Put what you train into self.data_parallel and call "
            "that in train_batch.": outside,
            "each trains with a learning rate of its own.": rated,
        }
        if _is_rounding({name: watched[name] for name in of_rest}):
            cause = (
                "in the last bits alone, as machines round that are not alike: in their "
                "processors, or in OMP_NUM_THREADS."
            )
            by_cause |= {cause: rest}
        else:
            by_cause |= {
                "the ranks have made unlike numbers of its updates. Whether to step must depend on "
                "what all ranks have alike: self.average a loss before you decide by it.": steps,
                "each trains a model of its own, although its layer is in data_parallel. The usual "
                "causes: a loss of the layer itself, not of what data_parallel has returned; a "
                "part that the first forward did not use (find_unused_parameters=True), or that "
                "was unfrozen since (call data_parallel again); an update or a learning rate that "
                "depends on this rank's own numbers (self.average them first).": rest - steps,
            }
        return [(sorted(names), cause) for cause, names in by_cause.items() if names]


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


def _elements(arrays: Arrays, names: Sequence[Name], count: int, start: int) -> list[Bytes]:
    """Returns the bytes of so many elements of each, or nearly twice as many, evenly spread."""
    steps = {name: math.prod(arrays[name].shape) // count for name in names}
    samples = [
        arrays[name] if step < 2 else arrays[name].every(step, start % step)
        for name, step in steps.items()
    ]
    fetch(samples)
    return [sample.data for sample in samples]


def _is_rounding(arrays: Arrays) -> bool:
    """Returns whether arrays differ between the ranks, and so little; a collective."""
    names = sorted(arrays)[:_TENSORS]
    samples = dict(zip(names, _elements(arrays, names, _CLOSER, 0), strict=True))
    of_ranks = collectives.all_gather_object(samples)
    is_unlike = False
    for name in names:
        dtype = arrays[name].dtype
        zero, *others = (_numbers(of_rank[name], dtype) for of_rank in of_ranks)
        largest = np.abs(zero).max(initial=0)
        for other in others:
            difference = np.abs(other - zero).max(initial=0)
            if not difference <= max(_ROUNDING, 4 * _FINEST.get(dtype, 0)) * largest:
                return False
            is_unlike = is_unlike or bool(difference > 0)
    return is_unlike


def _numbers(data: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> np.ndarray[Any, Any]:
    """Returns elements as numbers; what has no form in numpy, as its bytes."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    is_float = dtype in ("float16", "float32", "float64")
    return data.view(dtype if is_float else np.uint8).astype(np.float64)
