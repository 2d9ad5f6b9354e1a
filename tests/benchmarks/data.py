"""What driving a loader costs: a batch through expbase, against paddle's DataLoader by itself.

    python tests/benchmarks/data.py

Without workers, over the same small data set, shuffled; medians of interleaved epochs. And what
of it are the random states: taken, set for the batch, put back.
"""

from __future__ import annotations

import statistics
import time
import warnings

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from paddle.io import DataLoader, Dataset  # noqa: E402

from expbase.base import rng  # noqa: E402
from expbase.data.loaders import Shard, adapt_loader  # noqa: E402

BATCHES = 1000
BATCH_SIZE = 16
ROUNDS = 7


class Small(Dataset):
    def __init__(self) -> None:
        self.values = np.random.RandomState(0).randn(BATCHES * BATCH_SIZE, 32).astype("float32")

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.values[index], index % 10

    def __len__(self) -> int:
        return len(self.values)


def by_expbase(data: Dataset, epoch: int) -> float:
    """Seconds per batch."""
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    adapter = adapt_loader(loader, "train_loader", Shard(seed=0))
    began = time.perf_counter()
    for _ in adapter.open(epoch):
        pass
    return (time.perf_counter() - began) / BATCHES


def by_paddle(data: Dataset) -> float:
    """Seconds per batch."""
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    began = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - began) / BATCHES


def seeding() -> float:
    """Seconds per batch."""
    began = time.perf_counter()
    for number in range(BATCHES):
        rng.seed_cpu(rng.derive(0, number))
    return (time.perf_counter() - began) / BATCHES


def main() -> None:
    """Prints medians and ratios."""
    data = Small()
    ours, paddles, seeds = [], [], []
    for epoch in range(1, ROUNDS + 1):
        ours.append(by_expbase(data, epoch))
        paddles.append(by_paddle(data))
        seeds.append(seeding())
    our, paddles_own = statistics.median(ours), statistics.median(paddles)
    print(f"a batch of {BATCH_SIZE} through expbase:  {our * 1e6:7.1f} µs")
    print(f"a batch by paddle's DataLoader: {paddles_own * 1e6:7.1f} µs")
    print(f"expbase / paddle:                 {our / paddles_own:.2f}")
    print(f"seeding for a batch:            {statistics.median(seeds) * 1e6:7.1f} µs")


if __name__ == "__main__":
    main()
