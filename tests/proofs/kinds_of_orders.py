"""Kinds of samplers and streams: orders that depend on what is state; see kinds.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from kinds import EITHER, Points
from kinds_of_data import _OfData
from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

# Orders


class _OwnOrder(Sampler):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = np.random.RandomState(3)

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(12).tolist())

    def __len__(self) -> int:
        return 12


class _OfOrder(_OfData):
    """Over a sampler of single samples."""

    sampler: Any = _OwnOrder

    def loader(self) -> Any:
        batches = BatchSampler(sampler=self.sampler(), batch_size=4)
        return DataLoader(Points(), batch_sampler=batches)

    def order(self) -> Any:
        return self.train_loader.batch_sampler.sampler


class SamplerWithItsGenerator(_OfOrder):
    expected = EITHER


class SamplerWithAState(_OfOrder):
    class sampler(_OwnOrder):
        def state_dict(self) -> Any:
            return {"generator": self.generator.get_state()}

        def set_state_dict(self, state: Any) -> None:
            self.generator.set_state(state["generator"])


class SamplerWithGlobalRandom(_OfOrder):
    class sampler(_OwnOrder):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random


class SamplerThatCountsPasses(_OfOrder):
    expected = EITHER

    class sampler(_OwnOrder):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(np.roll(np.arange(12), self.passes * 5).tolist())


class _ByWeight(_OwnOrder):
    def __init__(self) -> None:
        super().__init__()
        self.weights = np.arange(12.0)

    def __iter__(self) -> Iterator[int]:
        return iter(np.argsort(self.weights, kind="stable").tolist())


class SamplerByLosses(_OfOrder):
    expected = EITHER
    sampler = _ByWeight

    def use(self) -> float:
        self.order().weights[self.iteration % 12] += 10
        return 0.5


class SamplerByLossesOfAnEpoch(_OfOrder):
    sampler = _ByWeight

    def on_train_epoch_end(self) -> None:
        self.order().weights *= -1.1
        self.order().weights += np.arange(12) * self.epoch % 5


class SamplerThatIsToldTheEpoch(_OfOrder):
    class sampler(_ByWeight):
        def set_epoch(self, epoch: int) -> None:
            self.weights = np.sin(np.arange(12) * epoch)


class Curriculum(_OfOrder):
    expected = EITHER

    class sampler(_ByWeight):
        def __init__(self) -> None:
            super().__init__()
            self.most = 4

        def __iter__(self) -> Iterator[int]:
            return itertools.islice(super().__iter__(), self.most)

        def __len__(self) -> int:
            return self.most

    def on_train_epoch_end(self) -> None:
        self.order().most = min(self.order().most + 4, 12)


class OwnBatches(_OfData):
    """Batches of other sizes, cut once, that a cache holds."""

    def loader(self) -> Any:
        return DataLoader(Points(), batch_sampler=_Buckets())


class _Buckets:
    batch_size = 4

    def __init__(self) -> None:
        self.cut: dict[str, Any] = {}

    def __iter__(self) -> Iterator[list[int]]:
        self.cut.setdefault("batches", [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11]])
        batches = [*self.cut["batches"]]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 4


class BatchesFromAPosition(_OfData):
    """A stream of batches that goes on from epoch to epoch."""

    expected = EITHER

    def loader(self) -> Any:
        return DataLoader(Points(), batch_sampler=_Onward())


class _Onward(_Buckets):
    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(3):
            self.place = (self.place + 5) % 12
            yield [self.place, (self.place + 1) % 12]

    def __len__(self) -> int:
        return 3


class GrowingBatch(_OfData):
    def on_train_epoch_begin(self) -> None:
        self.train_loader.batch_sampler.batch_size = 4 + self.epoch


class RandomSamplerWithAGenerator(_OfOrder):
    expected = EITHER

    @staticmethod
    def sampler() -> Any:
        walk = (n * 5 % 12 for n in itertools.count())
        return RandomSampler(Points(), replacement=True, num_samples=12, generator=walk)


class WeightsOfPaddlesSampler(_OfOrder):
    expected = EITHER

    @staticmethod
    def sampler() -> Any:
        return WeightedRandomSampler(np.ones(12), 12)

    def on_train_epoch_end(self) -> None:
        self.order().weights[: self.epoch] = 5.0


class WeightsSetAtBegin(_OfOrder):
    @staticmethod
    def sampler() -> Any:
        return WeightedRandomSampler(np.ones(12), 12)

    def on_train_epoch_begin(self) -> None:
        self.order().weights = np.eye(12)[self.epoch % 12] + 0.1


class DistributedSampler(_OfData):
    def loader(self) -> Any:
        data = Points()
        return DataLoader(data, batch_sampler=DistributedBatchSampler(data, 4, shuffle=True))


class DistributedSamplerThatIsTold(DistributedSampler):
    def on_train_epoch_begin(self) -> None:
        self.train_loader.batch_sampler.set_epoch(self.epoch)
