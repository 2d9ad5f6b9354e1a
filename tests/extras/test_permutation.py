"""The computed shuffle: a permutation, at every size, that shuffles, from anywhere at once."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from paddle.io import BatchSampler, DataLoader, Dataset

from expbase.base.rng import derive
from expbase.data.loaders import Shard, adapt_loader
from expbase.extras.permutation import PermutationSampler, permuted


def order(size: int, key: int = 0) -> list[int]:
    return permuted(np.arange(size, dtype=np.uint64), size, key).tolist()


def test_every_index_comes_exactly_once() -> None:
    for size in (*range(1, 40), 255, 256, 257, 4097):
        for key in (0, 1, 2**62 + 5):
            assert sorted(order(size, key)) == list(range(size)), (size, key)


def test_positions_beyond_any_list_stay_inside_and_apart() -> None:
    for size in (2 * 10**9, 2**62, 2**62 - 1):
        for start in (0, size // 2, size - 2000):
            numbers = permuted(np.arange(start, start + 2000, dtype=np.uint64), size, 7)
            assert int(numbers.max()) < size
            assert len(set(numbers.tolist())) == 2000


def test_all_orders_of_a_tiny_size_come_about_equally_often() -> None:
    trials = 1200
    counts = Counter(tuple(order(4, key)) for key in range(trials))
    orders = list(itertools.permutations(range(4)))
    expected = trials / len(orders)
    chi_square = sum((counts[one] - expected) ** 2 / expected for one in orders)
    assert chi_square < 3 * len(orders) + 10  # far above any likely value, far below a bias


@pytest.mark.parametrize("size", [17, 1000])
def test_every_position_gets_every_index_about_equally_often(size: int) -> None:
    keys = range(300)
    bins = min(size, 10)
    orders = np.array([order(size, key) for key in keys])
    for position in (0, size // 2, size - 1):
        counts = np.bincount(orders[:, position] * bins // size, minlength=bins)
        widths = np.bincount(np.arange(size) * bins // size, minlength=bins) / size
        expected = widths * len(keys)
        assert ((counts - expected) ** 2 / expected).sum() < 40


def test_neighbours_are_torn_apart_and_keys_and_epochs_differ() -> None:
    one, two = np.array(order(10000, 1)), np.array(order(10000, 2))
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(one, np.arange(10000))[0, 1]) < 0.05
    assert (one == two).mean() < 0.002
    assert (np.diff(one) == 1).mean() < 0.002


def test_a_sampler_is_continued_from_any_position_and_changes_with_the_epoch() -> None:
    sampler = PermutationSampler(5000, seed=3)
    whole = list(sampler)
    assert len(sampler) == 5000
    sampler.seek(1234)
    assert list(sampler) == whole[1234:]
    sampler.set_epoch(1)
    assert list(sampler) != whole


def test_it_drives_a_loader_of_more_samples_than_a_list_can_hold() -> None:
    class Huge(Dataset):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 2 * 10**9

    sampler = PermutationSampler(Huge())
    loader = DataLoader(Huge(), batch_sampler=BatchSampler(sampler=sampler, batch_size=4))
    adapter = adapt_loader(loader, "self.train_loader", Shard(0))
    assert adapter.batches_per_epoch == 5 * 10**8
    direct = next(adapter.open(1, 4 * 10**8))
    expected = permuted(
        np.arange(4 * 10**8, 4 * 10**8 + 4, dtype=np.uint64), 2 * 10**9, derive(0, 1)
    )
    assert direct.tolist() == expected.tolist()


@pytest.mark.parametrize("size", [0, -1, 2**63])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size {size} given; expected 1 to 2"):
        PermutationSampler(size)
