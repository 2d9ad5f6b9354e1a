"""What the ranks have read, compared: samples that count twice, loops that had nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driving import adapted, loader

from expbase.data.evaluated_samples import (
    Read,
    check_loops,
    check_read,
    counted_twice,
    what_was_read,
)
from expbase.data.loaders import Batches


def loops(kept: list[Any] | None = None) -> list[Batches]:
    """One loop, over a loader with a name."""
    loop = Batches((item for item in ()), adapted(loader()))
    loop.kept = kept
    return [loop]


def test_samples_that_come_more_than_once_are_counted() -> None:
    cases: list[tuple[list[Any], str]] = [
        ([[0, 2, 4], [1, 3, 0]], "1 of 6"),
        ([[0, 2, 0], [1, 3]], "1 of 5"),  # one rank had both
        ([[np.int64(0), 2], [1, 2]], "1 of 4"),
        ([["a", "b"], ["b", "c"]], "1 of 4"),
        ([[(0, 1), (1, 1)], [(0, 1), [2]]], "1 of 4"),
        ([[0, 2], [1, 3]], ""),
        ([["a"], [("a",)]], ""),
        ([[0, 1, 2], []], ""),
    ]
    for of_ranks, again in cases:
        reads = [what_was_read(loops(kept), with_indices=True) for kept in of_ranks]
        found = counted_twice(loops(), reads)
        assert [*found] == ["self.train_loader"] * bool(again), of_ranks
        for text in found.values():
            assert text.startswith(f"{again} samples were counted twice: its sampler gives them to")


def test_indices_are_sent_only_if_a_sampler_shards_by_itself_and_at_the_end() -> None:
    assert what_was_read(loops(None), with_indices=True)[0].indices is None
    assert what_was_read(loops([1, 2]))[0].indices is None


def test_a_loop_is_empty_if_it_came_to_its_end_on_all_ranks_without_a_batch() -> None:
    nothing, some = [Read(has_none=True)], [Read(has_none=False)]
    check_read(loops(), [nothing, some])
    check_read(loops(), [[], nothing])  # that one rank alone has begun
    with pytest.raises(ValueError, match=r"self\.train_loader: has no batch"):
        check_read(loops(), [nothing, nothing])
    with pytest.raises(ValueError, match="used up"):
        check_read(loops(), [some, [Read(has_none=True, used_up="used up")]])


def test_a_loop_that_nobody_ran_to_its_end_is_not_empty() -> None:
    begun = loops()
    assert what_was_read(begun) == [Read(has_none=False)]
    assert [*begun[0]] == []
    assert what_was_read(begun) == [Read(has_none=True)]


def test_a_validation_on_some_ranks_alone_is_an_error_that_names_one_of_each() -> None:
    check_loops([0, 0])
    check_loops([2, 1])
    with pytest.raises(RuntimeError, match=r"was called on rank 1 and not on rank 0"):
        check_loops([0, 3])
