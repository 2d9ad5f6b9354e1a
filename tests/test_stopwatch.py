"""Speeds, shares of time, and the time that is left, with a clock that the tests move."""

from __future__ import annotations

import contextlib

import pytest

from expbase.record.stopwatch import Stopwatch


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock)


def test_speeds_count_steps_samples_and_waiting_without_what_is_excluded(
    clock: Clock, watch: Stopwatch
) -> None:
    watch.start(10)
    clock.now += 4.0
    watch.batches += 8
    watch.data_seconds += 1.0
    with contextlib.suppress(RuntimeError), watch.exclude():
        clock.now += 50.0
        raise RuntimeError
    assert watch.speed(14, samples_per_batch=32) == {
        "steps_per_second": 1.0, "data_wait": 0.25, "samples_per_second": 64.0,
    }  # fmt: skip
    clock.now += 2.0
    assert watch.speed(18, None) == {"steps_per_second": 2.0, "data_wait": 0.0}


def test_the_time_left_is_at_the_pace_of_this_start_with_all_that_it_did(
    clock: Clock, watch: Stopwatch
) -> None:
    watch.start(1000)  # after a resume: what was before has no part in it
    assert watch.seconds_left(1000, 10) is None
    clock.now += 6.0
    with watch.exclude():
        clock.now += 2.0
    assert watch.seconds_left(1002, 10) == 40.0


def test_what_is_excluded_within_another_block_is_excluded_once(
    clock: Clock, watch: Stopwatch
) -> None:
    watch.start(0)
    clock.now += 6.0
    with watch.exclude():
        clock.now += 1.0
        with watch.exclude():
            clock.now += 1.0
    assert watch.seconds() == 8.0
    assert watch.speed(12, None)["steps_per_second"] == 2.0
