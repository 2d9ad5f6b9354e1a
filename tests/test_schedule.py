"""What is due: a table."""

from __future__ import annotations

from typing import Any

import pytest

from expbase import get_default_training_config
from expbase.schedule import Due, due_at, iterations_left, next_due


def training(**values: Any) -> Any:
    section = get_default_training_config()
    never = {"log_interval": 0, "valid_interval": 0, "save_interval": 0, "max_iteration": 0}
    section.update({**never, **values})
    return section


def names(due: Due) -> str:
    return " ".join(name for name, value in due._asdict().items() if value)


@pytest.mark.parametrize(
    ("values", "iteration", "epochs", "expected"),
    [
        ({}, 5, (0, 0), ""),
        ({"log_interval": 5}, 4, (0, 0), ""),
        ({"log_interval": 5}, 5, (0, 0), "log"),
        ({"valid_interval": 5, "save_interval": 10}, 5, (0, 0), "validation"),
        ({"valid_interval": 5, "save_interval": 10}, 10, (0, 0), "checkpoint validation"),
        # The last one, whatever the interval; an interval of 0 is never, at the end neither.
        ({"max_iteration": 7}, 7, (0, 0), "last"),
        ({"max_iteration": 7, "log_interval": 5}, 7, (0, 0), "log last"),
        ({"max_iteration": 7, "valid_interval": 5}, 7, (0, 0), "validation last"),
        ({"max_iteration": 7, "save_interval": 5}, 7, (0, 0), "checkpoint last"),
        ({"max_iteration": 7, "save_every_epoch": 9}, 7, (0, 0), "checkpoint last"),
        ({"max_iteration": 7, "valid_every_epoch": 9}, 7, (0, 0), "validation last"),
        ({"max_iteration": 7}, 9, (0, 0), "last"),  # a run whose limit was lowered
        # By epochs; one update that accumulates may end several.
        ({"valid_every_epoch": 2}, 5, (0, 1), ""),
        ({"valid_every_epoch": 2}, 5, (1, 2), "epoch_validation"),
        ({"valid_every_epoch": 2}, 6, (2, 2), ""),
        ({"valid_every_epoch": 2}, 5, (1, 4), "epoch_validation"),
        ({"save_every_epoch": 3}, 5, (1, 4), "checkpoint"),
        ({"max_epoch": 3}, 5, (1, 2), ""),
        ({"max_epoch": 3}, 5, (2, 3), "last"),
        ({"max_epoch": 3, "max_iteration": 9}, 9, (0, 0), "last"),
        # The last epoch's validation comes after the end of the epoch, as all others do.
        ({"max_epoch": 3, "valid_every_epoch": 1}, 9, (2, 3), "epoch_validation last"),
        ({"max_epoch": 3, "valid_every_epoch": 2}, 9, (2, 3), "validation last"),
    ],
)
def test_what_is_due_follows_from_the_config_the_iteration_and_the_epochs(
    values: dict[str, int], iteration: int, epochs: tuple[int, int], expected: str
) -> None:
    assert names(due_at(training(**values), iteration, *epochs)) == expected


def test_nothing_is_due_by_its_number_before_the_next_due_iteration() -> None:
    section = training(log_interval=4, valid_interval=6, save_interval=9, max_iteration=23)
    due = [i for i in range(1, 24) if names(due_at(section, i, 0, 0))]
    for iteration in range(23):
        assert next_due(section, iteration) == next(i for i in due if i > iteration)
    assert next_due(section, 24) <= 25  # of a run whose limit was lowered


def test_a_run_without_intervals_and_limits_has_nothing_due() -> None:
    assert next_due(training(), 7) > 10**9


def test_what_is_left_is_known_from_either_limit() -> None:
    assert iterations_left(training(max_iteration=30), 10, None) == 20
    assert iterations_left(training(max_epoch=3), 10, 10) == 20
    assert iterations_left(training(max_epoch=3, accumulation_steps=2), 10, 10) == 5
    assert iterations_left(training(max_epoch=3), 10, None) is None
    assert iterations_left(training(max_iteration=5), 10, None) == 0
