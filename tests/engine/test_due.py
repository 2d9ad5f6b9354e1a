"""What is due: a table."""

from __future__ import annotations

import itertools
import operator
from fractions import Fraction
from typing import Any

import pytest

from expbase import get_default_training_config
from expbase.engine.due import Due, due_at, is_last, is_quiet, limits


def training(**values: Any) -> Any:
    section = get_default_training_config()
    never = {"log_interval": 0, "valid_interval": 0, "save_interval": 0, "max_iteration": 0}
    section.update({**never, **values})
    return section


def names(due: Due) -> str:
    return ", ".join(["log"] * due.log + ["save"] * due.checkpoint + due.follows)


@pytest.mark.parametrize(
    ("values", "iteration", "epochs", "expected"),
    [
        ({}, 5, (0, 0), ""),
        ({"log_interval": 5}, 4, (0, 0), ""),
        ({"log_interval": 5}, 5, (0, 0), "log"),
        ({"valid_interval": 5, "save_interval": 10}, 5, (0, 0), "validate"),
        ({"valid_interval": 5, "save_interval": 10}, 10, (0, 0), "save, validate"),
        # The last one, whatever the interval; an interval of 0 is never, at the end neither.
        ({"max_iteration": 7}, 7, (0, 0), ""),
        ({"max_iteration": 7, "log_interval": 5}, 7, (0, 0), "log"),
        ({"max_iteration": 7, "valid_interval": 5}, 7, (0, 0), "validate at the end"),
        ({"max_iteration": 7, "save_interval": 5}, 7, (0, 0), "save"),
        ({"max_iteration": 10, "valid_interval": 5}, 10, (0, 0), "validate"),  # once
        ({"max_iteration": 7, "save_every_epoch": 9}, 7, (0, 0), "save"),
        ({"max_iteration": 7, "valid_every_epoch": 9}, 7, (0, 0), "validate at the end"),
        ({"max_iteration": 7, "save_interval": 5}, 9, (0, 0), "save"),  # its limit was lowered
        # By epochs; one update that accumulates may end several.
        ({"valid_every_epoch": 2}, 5, (0, 1), "end the epoch"),
        ({"valid_every_epoch": 2}, 5, (1, 2), "end the epoch, validate"),
        ({"valid_every_epoch": 2}, 6, (2, 2), ""),
        ({"valid_every_epoch": 2}, 5, (1, 4), "end the epoch, validate"),
        ({"save_every_epoch": 3}, 5, (1, 4), "save, end the epoch"),
        # A validation by iterations comes before the end of the epoch, and there is one only.
        ({"valid_interval": 5, "valid_every_epoch": 1}, 5, (0, 1), "validate, end the epoch"),
        # The last epoch's validation comes after the end of the epoch, as all others do.
        ({"max_epoch": 3, "valid_every_epoch": 1}, 9, (2, 3), "end the epoch, validate"),
        ({"max_epoch": 3, "valid_every_epoch": 2}, 9, (2, 3), "validate at the end, end the epoch"),
    ],
)
def test_what_is_due_follows_from_the_config_the_iteration_and_the_epochs(
    values: dict[str, int], iteration: int, epochs: tuple[int, int], expected: str
) -> None:
    is_end = epochs[1] > epochs[0]
    assert names(due_at(training(**values), iteration, *epochs, is_epoch_end=is_end)) == expected


def test_an_iteration_is_quiet_if_and_only_if_nothing_is_due_after_it() -> None:
    intervals = [(0, 0, 0), (3, 0, 4), (0, 5, 0), (1, 2, 6)]
    ends = [(0, 0), (10, 0), (0, 2), (7, 1)]
    keys = ("log_interval", "valid_interval", "save_interval", "max_iteration", "max_epoch")
    for numbers in itertools.starmap(operator.add, itertools.product(intervals, ends)):
        section = training(**dict(zip(keys, numbers, strict=True)))
        for iteration, epoch in itertools.product(range(1, 13), range(4)):
            due = due_at(section, iteration, epoch, epoch, is_epoch_end=False)
            is_over = is_last(section, iteration, epoch)
            quiet = not names(due) and not is_over
            assert is_quiet(section, iteration, epoch) == quiet, (numbers, iteration, epoch)


def test_an_epoch_that_ended_within_the_update_is_ended_no_second_time() -> None:
    section = training(valid_every_epoch=1)
    assert names(due_at(section, 5, 1, 2, is_epoch_end=False)) == "validate"


@pytest.mark.parametrize(
    ("values", "iteration", "epochs", "expected"),
    [
        ({"max_iteration": 7}, 6, 0, False),
        ({"max_iteration": 7}, 7, 0, True),
        ({"max_iteration": 7}, 9, 0, True),  # a run whose limit was lowered
        ({"max_epoch": 3}, 5, 2, False),
        ({"max_epoch": 3}, 5, 3, True),
        ({"max_epoch": 3, "max_iteration": 9}, 9, 0, True),
        ({}, 10**9, 10**9, False),
    ],
)
def test_the_last_iteration_is_where_either_limit_is_reached(
    values: dict[str, int], iteration: int, epochs: int, expected: bool
) -> None:
    assert is_last(training(**values), iteration, epochs) == expected


def test_the_first_limit_comes_first_and_an_unknown_one_last() -> None:
    assert limits(training(max_iteration=30), None) == [("max_iteration", 30, 30)]
    assert limits(training(max_epoch=3), None) == [("max_epoch", 3, None)]
    both = training(max_epoch=3, max_iteration=8)
    assert limits(both, Fraction(5, 2)) == [("max_epoch", 3, 8), ("max_iteration", 8, 8)][::-1]
    assert [limit.updates for limit in limits(both, Fraction(2))] == [6, 8]
    assert [limit.updates for limit in limits(both, None)] == [8, None]
    assert limits(training(), None) == []


def test_what_is_left_out_ends_the_epochs_earlier_and_no_iterations() -> None:
    both = training(max_epoch=2, max_iteration=8)
    # Of five updates the last ends the epochs; if it is left out, the one that reads past it does.
    for left_out, updates in (([], 5), ([1, 4], 3), ([5], 5), ([4, 5], 4), ([6, 9], 5)):
        found = limits(both, Fraction(5, 2), left_out)
        assert found == [("max_epoch", 2, updates), ("max_iteration", 8, 8)]
    assert limits(both, None, [1]) == [("max_iteration", 8, 8), ("max_epoch", 2, None)]
