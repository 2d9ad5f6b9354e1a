"""Speeds, shares of time, and the time that is left, with a clock that the tests move."""

from __future__ import annotations

import contextlib

import pytest

from expbase.record.speed import Stopwatch


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
    clock.now += 1.0
    watch.note_batch(clock.now - 1.0, 200)
    watch.note_batch(clock.now, 56)
    watch.note_batch(clock.now)  # of a size that nobody knows
    clock.now += 3.0
    with contextlib.suppress(RuntimeError), watch.exclude():
        clock.now += 50.0
        raise RuntimeError
    assert watch.speed(14) == {  # 256 samples in 4 s
        "steps_per_second": 1.0, "data_wait": 0.25, "samples_per_second": 64.0,
    }  # fmt: skip
    clock.now += 2.0
    assert watch.speed(18) == {"steps_per_second": 2.0, "data_wait": 0.0}


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
    assert watch.speed(12)["steps_per_second"] == 2.0


def test_a_rank_is_busy_with_its_data_and_until_its_first_backward(
    clock: Clock, watch: Stopwatch
) -> None:
    for _ in range(2):
        began = clock.now
        clock.now += 1.0  # data
        watch.note_batch(began)
        clock.now += 2.0  # forward
        watch.note_backward()
        clock.now += 4.0  # here the ranks wait for each other
        watch.note_backward()  # of a second loss
        clock.now += 8.0
    assert watch.busy(2) == (3.0, 1.0)
    began = clock.now
    clock.now += 5.0
    watch.note_batch(began)  # a backward by hand is not seen
    assert watch.busy(1) == (5.0, 5.0)


def test_the_slowest_rank_is_named_with_its_seconds(clock: Clock, watch: Stopwatch) -> None:
    watch.note_ranks([[3.0, 1.0]])  # one process
    watch.note_ranks([[0.0, 0.0], [0.0, 0.0]])  # nothing was done yet
    clock.now += 1.0
    assert watch.speed(1).keys() == {"steps_per_second", "data_wait"}
    watch.note_ranks([[2.0, 1.9], [3.0, 0.5], [1.0, 0.5]])
    speed = watch.speed(2)
    names = "slowest_rank", "slowest_rank_seconds", "slowest_rank_data_seconds"
    assert [speed[name] for name in names] == [1, 3.0, 0.5]
