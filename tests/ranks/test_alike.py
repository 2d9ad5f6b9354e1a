"""What the ranks have otherwise than rank 0, by name; a nan is the same as another one."""

from __future__ import annotations

import math

from expbase.ranks.compare_gathered import are_alike, first_difference, unlike

OF_RANKS = [{"a": 1.0, "b": math.nan}, {"a": 1.0, "b": float("nan")}, {"a": 2.0, "c": 0}]


def test_names_of_what_a_rank_has_otherwise_or_alone_are_told() -> None:
    assert unlike(OF_RANKS[:2]) == set()
    assert unlike(OF_RANKS) == {"a", "b", "c"}
    assert unlike(OF_RANKS[:1]) == set()


def test_the_first_difference_is_told_with_both_values() -> None:
    assert first_difference(OF_RANKS[:2]) == ""
    assert first_difference(OF_RANKS) == "a: 1.0 on rank 0, 2.0 on rank 2"
    assert first_difference([{}, {"c": 0}]) == "c: not there on rank 0, 0 on rank 1"


def test_ranks_are_alike_if_all_have_what_rank_0_has() -> None:
    assert are_alike([OF_RANKS[0], OF_RANKS[1]])
    assert not are_alike(OF_RANKS)
    assert are_alike(["x"])
