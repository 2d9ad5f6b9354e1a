"""What the tests of data share: data sets and samplers, and ways to drive a loader over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader, Dataset, IterableDataset, get_worker_info

from expbase.data.loaders import LoaderAdapter, Shard, adapt_loader
from expbase.data.position import DataPosition


class Noisy(Dataset):
    """Its index, and what each of the three generators draws for it."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.made: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        import random

        self.made.append(index)
        drawn = [random.random(), np.random.randn(), paddle.rand([1]).item()]
        return index, np.array(drawn)

    def __len__(self) -> int:
        return self.size


class Lines(IterableDataset):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __iter__(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.size, step):
            yield np.array([index, np.random.rand()])


class Countdown:
    """An iterable of batches that draws."""

    def __iter__(self) -> Iterator[list[float]]:
        for number in range(5):
            yield [number, np.random.rand()]


class Fragile(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise KeyError("sample 4 is broken")
        return super().__getitem__(index)


class Endless:
    """A batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield np.random.randint(0, 10, 3).tolist()


class RememberingSampler:
    """A batch sampler whose next epoch depends on the one before."""

    def __init__(self) -> None:
        self.shift = 0

    def state_dict(self) -> dict[str, int]:
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shift = state["shift"]

    def __iter__(self) -> Iterator[list[int]]:
        self.shift += 1
        return iter([[(i + self.shift) % 10] for i in range(5)])

    def __len__(self) -> int:
        return 5


def adapted(loader: Any, rank: int = 0, world_size: int = 1, seed: int = 3) -> LoaderAdapter:
    return adapt_loader(loader, "self.train_loader", Shard(seed, rank, world_size))


def plain(batch: Any) -> Any:
    """A batch as lists, for comparing."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def train_iterator(loader: Any) -> DataPosition:
    iterator = DataPosition()
    iterator.attach(adapted(loader))
    return iterator


def drawn(adapter: LoaderAdapter, epoch: int = 1, position: int = 0) -> list[Any]:
    batches = adapter.open(epoch, position)
    result = [plain(batch) for batch in batches]
    assert batches.ended
    return result


def indices(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch[0]]


def loader(**options: Any) -> DataLoader:
    return DataLoader(Noisy(), **{"batch_size": 3, "shuffle": True, **options})
