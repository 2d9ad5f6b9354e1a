"""A shuffled order of numbers that no list can hold: computed index by index, from any position.

    sampler = PermutationSampler(2 * 10**9, seed=0)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler=sampler, batch_size=256))

A keyed permutation of range(size): a Feistel network over the smallest even number of bits that
holds the size, walked in cycles until the number falls inside. Source: Luby and Rackoff, How to
construct pseudorandom permutations (1988); cycle walking: Black and Rogaway, Ciphers with
arbitrary finite domains (2002). Rounds and mixing were chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from paddle.io import Sampler

from expbase.base.errors import ValueMistake
from expbase.base.rng import derive

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
_ROUNDS = 12  # 8 suffice for large sizes; small ones have few bits to mix
_BLOCK = 1024  # indices that are computed at a time


class PermutationSampler(Sampler):  # type: ignore[misc]  # paddle has no types
    """All indices of a data set in a shuffled order, in constant memory.

    expbase calls `set_epoch` and `seek`; by hand they must be called before iterating.

    Args:
        data: A data set, or the number of its samples, at most 2^62.
        seed: Of the order, together with the epoch.

    Raises:
        ValueError: The size is not between 1 and 2^62.
    """

    def __init__(self, data: Sized | int, seed: int = 0) -> None:
        self.size = data if isinstance(data, int) else len(data)
        if not 1 <= self.size <= 1 << 62:
            raise ValueMistake(f"PermutationSampler: size {self.size} given; expected 1 to 2^62.")
        self._seed = seed
        self._epoch = 0
        self._start = 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch.

        Args:
            epoch: Its number.
        """
        self._epoch = epoch

    def seek(self, position: int) -> None:
        """Makes the next iteration begin within the order.

        Args:
            position: How many of its indices are left out.
        """
        self._start = position

    def __iter__(self) -> Iterator[int]:
        start = self._start
        self._start = 0
        for first in range(start, self.size, _BLOCK):
            positions = np.arange(first, min(first + _BLOCK, self.size), dtype=np.uint64)
            yield from permuted(positions, self.size, derive(self._seed, self._epoch)).tolist()


def permuted(positions: Numbers, size: int, key: int) -> Numbers:
    """Computes where positions of range(size) go under a permutation.

    Args:
        positions: [N], from 0 on, below the size.
        size: At most 2^62.
        key: Chooses the permutation.

    Returns:
        [N] numbers, from 0 on, below the size.
    """
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    keys = [np.uint64(derive(key, number)) for number in range(_ROUNDS)]
    numbers = _encrypted(positions, half_bits, keys)
    outside = np.flatnonzero(numbers >= size)
    while outside.size:  # at most 3 of 4 numbers are outside, so few rounds of this
        numbers[outside] = _encrypted(numbers[outside], half_bits, keys)
        outside = outside[numbers[outside] >= size]
    return numbers


def _encrypted(numbers: Numbers, half_bits: int, keys: list[np.uint64]) -> Numbers:
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = numbers >> bits
    right = numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(numbers: Numbers) -> Numbers:
    # The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): high bits depend on all bits.
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
