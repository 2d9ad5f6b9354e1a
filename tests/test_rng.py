"""Random states: read, restored, isolated, derived."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from typing import Any

import numpy as np
import paddle
import pytest

from expbase.state import rng

STATES = rng.RandomStates()


def draws() -> list[Any]:
    """Draws from all three libraries, an odd number of normal ones: the second waits inside."""
    return [
        random.random(), random.gauss(0, 1),
        np.random.rand(), np.random.randn(3).tolist(),
        paddle.rand([3]).tolist(), paddle.randperm(5).tolist(),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with rng.isolated(7):
        yield


def test_a_state_that_went_through_json_draws_the_same() -> None:
    draws()
    states = json.loads(json.dumps(STATES.state_dict()))
    assert states["numpy"][3] == 1  # a normal number waits
    expected = draws(), draws()
    assert STATES.load_state_dict(states) == []
    assert (draws(), draws()) == expected


def test_capturing_draws_nothing() -> None:
    expected = draws()
    rng.seed_all(7)
    STATES.state_dict()
    assert draws() == expected


def test_a_device_that_only_one_side_knows_is_a_reason_why_it_is_not_exact() -> None:
    states = STATES.state_dict()
    expected = draws()
    states["gpu:99"] = states["cpu"]
    assert STATES.load_state_dict(states) == ["the random states of gpu:99 are new"]
    assert draws() == expected


def test_one_seed_is_enough_for_all_libraries() -> None:
    rng.seed_all(1 << 62)
    first = draws()
    rng.seed_all(1 << 62)
    assert draws() == first
    rng.seed_cpu(1 << 62)
    assert draws() == first
    rng.seed_all(3)
    assert all(one != other for one, other in zip(draws()[:-1], first[:-1], strict=True))


@pytest.mark.parametrize("seed", [None, 5])
def test_isolated_leaves_no_trace_also_after_an_exception(seed: int | None) -> None:
    draws()
    states = STATES.state_dict()
    expected = draws()
    STATES.load_state_dict(states)
    with rng.isolated(seed):
        inside = draws()
    assert (inside == expected) == (seed is None)
    with contextlib.suppress(RuntimeError), rng.isolated(seed):
        draws()
        raise RuntimeError
    assert draws() == expected


def test_isolated_draws_what_its_seed_says() -> None:
    with rng.isolated(5):
        inside = draws()
    rng.seed_all(5)
    assert draws() == inside


def test_own_states_and_those_outside_do_not_see_each_other() -> None:
    own = rng.DataStates(5)
    states = STATES.state_dict()
    with own.in_use():
        first = draws()
    assert STATES.state_dict() == states
    draws()
    with contextlib.suppress(RuntimeError), own.in_use():
        second = draws()
        raise RuntimeError
    rng.seed_all(5)
    expected = draws()
    rng.drop_waiting_normal()
    assert (first, second) == (expected, draws())
    with own.in_use(6):
        again = draws()
    rng.seed_cpu(6)
    assert draws() == again


def test_batches_made_elsewhere_leave_the_states_that_batches_made_here_leave() -> None:
    draws()  # a normal number waits
    states = STATES.state_dict()
    with rng.DataStates(5).in_use(6):
        draws()
    expected = draws()
    STATES.load_state_dict(states)
    rng.drop_waiting_normal()
    assert draws() == expected


def test_derived_seeds_differ_by_every_number_of_the_path_and_their_order() -> None:
    paths = [path for n in (1, 2, 3) for path in itertools.product(range(6), repeat=n)]
    seeds = {rng.derive(seed, *path) for seed in (0, 1, 2, -1, 1 << 40) for path in paths}
    assert len(seeds) == 5 * len(paths)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 62


def test_a_derived_seed_is_the_same_in_every_version() -> None:
    # A run is continued by a later version, with the order of its data as it was.
    assert rng.derive(0, rng.ORDER, 1) == 6062432504070345550
