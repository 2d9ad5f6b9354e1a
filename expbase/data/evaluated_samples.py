"""What the loops of a validation have read, on all ranks: nothing, no batch, or samples twice.

check_loops([1, 1])               # raises if some ranks have begun no loop
read = what_was_read(loops)       # of this rank; those of all ranks are gathered
check_read(loops, of_ranks)       # raises if no rank had a batch
counted_twice(loops, of_ranks)    # {"self.valid_loader": "1 of 14 samples …"}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.data.loaders import Batches

Array = np.ndarray[Any, np.dtype[Any]]


class Read(NamedTuple):
    """A record of what one loop of one rank has read."""

    has_none: bool  # it came to its end without a batch
    used_up: str = ""  # the error, if that is because its loader can be read only once
    indices: Array | None = None  # of its samples, if its sampler shards by itself


def what_was_read(loops: Sequence[Batches], *, with_indices: bool = False) -> list[Read]:
    """Returns a record of each loop of this rank.

    Args:
        loops: The loops over data that have ended.
        with_indices: Also note the indices of the samples, where a sampler shards by itself.
    """
    reads = []
    for loop in loops:
        is_used_up = loop.has_none and loop.adapter.is_used_up
        used_up = str(loop.adapter.no_batch()) if is_used_up else ""
        indices = _as_array(loop.kept) if with_indices and loop.kept else None
        reads.append(Read(loop.has_none, used_up, indices))
    return reads


def check_loops(begun: Sequence[int]) -> None:
    """Raises a RuntimeError if valid() began loops over its data on some ranks only."""
    if 0 in begun and any(begun):
        raise RuntimeMistake(
            f"valid: valid_batches() was called on rank {begun.index(max(begun))} and not on rank "
            f"{begun.index(0)}, whose share of the data nobody validates. Call it on every rank: "
            "look for `if self.rank == 0`, @rank_zero_only or a return before it."
        )


def check_read(loops: Sequence[Batches], of_ranks: Sequence[Sequence[Read]]) -> None:
    """Raises a ValueError on every rank if a loop has read nothing, which gives no result.

    Args:
        loops: The loops of this rank.
        of_ranks: The records of all ranks, in rank order; see `what_was_read`.

    Raises:
        ValueError: A loop had no batch on any rank, or its loader was used up on one of them.
    """
    for loop, reads in zip(loops, zip(*of_ranks, strict=False), strict=False):
        if used_up := next(filter(None, (read.used_up for read in reads)), ""):
            raise ValueMistake(used_up)
        if all(read.has_none for read in reads):
            raise loop.adapter.no_batch()


def counted_twice(loops: Sequence[Batches], of_ranks: Sequence[Sequence[Read]]) -> dict[str, str]:
    """Finds samples that the ranks have read more than once.

    Args:
        loops: The loops of this rank.
        of_ranks: The records of all ranks, in rank order, with indices; see `what_was_read`.

    Returns:
        A text for each loader with such samples, by its name.
    """
    found = {}
    for loop, reads in zip(loops, zip(*of_ranks, strict=False), strict=False):
        arrays = [read.indices for read in reads if read.indices is not None]
        count = sum(map(len, arrays))
        ordered = np.sort(np.concatenate(arrays)) if arrays else np.empty(0)  # unique takes seconds
        again = int((ordered[1:] == ordered[:-1]).sum())
        if again:
            found[loop.adapter.name] = (
                f"{again} of {count} samples were counted twice: its sampler gives them to the "
                "ranks more than once, perhaps to fill the last batches; expected each once. A "
                "sampler that does not look at the rank is dealt out, each sample once."
            )
    return found


def _as_array(indices: Sequence[Any]) -> Array:
    """Returns indices as numbers, or, if they are keys of another kind, as texts."""
    if all(isinstance(index, (int, np.integer)) for index in indices):
        return np.asarray(indices)
    return np.asarray([repr(index) for index in indices])
