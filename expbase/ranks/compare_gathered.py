"""Whether the ranks have the same: the one comparison of what was gathered of them.

check_alike({"config.seed": "0"})          # a collective
are_alike(all_gather_object(checksum))
unlike(of_ranks)                           # {"weight"}, of what each rank has by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expbase.base.errors import ValueMistake
from expbase.ranks.collectives import all_gather_object

_NOTHING = "not there"


def check_alike(facts: Mapping[str, str]) -> None:
    """Raises a ValueError if the ranks have different facts of one name; one collective."""
    if difference := first_difference(all_gather_object(dict(facts))):
        raise ValueMistake(
            f"{difference}; expected the same on all ranks. Start each with the same config and "
            "the same data, and do what makes it on every rank alike."
        )


def are_alike(of_ranks: Sequence[Any]) -> bool:
    """Returns whether all ranks have what rank 0 has."""
    return all(_is_same(of_ranks[0], other) for other in of_ranks)


def unlike(of_ranks: Sequence[Mapping[Any, Any]]) -> set[Any]:
    """Returns the names that a rank lacks, or whose values differ from those of rank 0."""
    first = of_ranks[0]
    return {
        name
        for other in of_ranks[1:]
        for name in first.keys() | other.keys()
        if not _is_same(first.get(name, _NOTHING), other.get(name, _NOTHING))
    }


def first_difference(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the first difference between a rank and rank 0, with both values; "" if none."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        different = unlike([first, other])
        for name in {**first, **other}:
            if name in different:
                ours, theirs = (of.get(name, _NOTHING) for of in (first, other))
                return f"{name}: {ours} on rank 0, {theirs} on rank {rank}"
    return ""


def _is_same(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # a nan, too
