"""Whether the ranks have the same, where they must.

check_alike({"config.seed": "0"})    # a collective
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expbase.ranks.collectives import all_gather_object


def check_alike(facts: Mapping[str, str]) -> None:
    """Raises a ValueError if the ranks have different facts of one name; one collective."""
    if difference := first_difference(all_gather_object(dict(facts))):
        raise ValueError(
            f"{difference}; expected the same on all ranks. Start each with the same config and "
            "the same data, and do what makes it on every rank alike."
        )


def first_difference(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns what a rank has other than rank 0, with both values; empty: they have the same."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in {**first, **other}:
            ours, theirs = (of.get(name, "not there") for of in (first, other))
            if repr(ours) != repr(theirs):
                return f"{name}: {ours} on rank 0, {theirs} on rank {rank}"
    return ""


def check_loops(begun: Sequence[int]) -> None:
    """Raises a RuntimeError if valid() began loops over its data on some ranks only."""
    if 0 in begun and any(begun):
        raise RuntimeError(
            f"valid: valid_batches() was called on rank {begun.index(max(begun))} and not on rank "
            f"{begun.index(0)}, whose share of the data nobody validates. Call it on every rank: "
            "look for `if self.rank == 0`, @rank_zero_only or a return before it."
        )
