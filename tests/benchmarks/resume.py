"""How long a resumed run waits for its first batch, far into a pass.

    python tests/benchmarks/resume.py

Prints medians over fresh adapters: at batch 10^6 of a shuffled data set of 2 * 10^6 samples with
batch size 1, made here and by two workers; and of the first index at position 10^9 of 2 * 10^9 by
PermutationSampler, against numpy's permutation of a size that fits into memory.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
from paddle.io import BatchSampler, DataLoader, Dataset  # noqa: E402

from expbase.data.loaders import Shard, adapt_loader  # noqa: E402
from expbase.extras.permutation import PermutationSampler  # noqa: E402

BATCHES = 2 * 10**6
POSITION = 10**6
HUGE = 2 * 10**9
HUGE_POSITION = 10**9
FITS = 2 * 10**7


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index])

    def __len__(self) -> int:
        return self.size


def first_batch(loader: DataLoader, position: int) -> None:
    """Opens a loader at a position and takes one batch."""
    adapter = adapt_loader(loader, "train_loader", Shard(seed=0))
    batches = adapter.open(1, position)
    next(iter(batches))
    batches.close()
    adapter.close()


def shuffled(workers: int) -> None:
    """The usual loader."""
    data = Numbers(BATCHES)
    first_batch(DataLoader(data, batch_size=1, shuffle=True, num_workers=workers), POSITION)


def computed() -> None:
    """A loader whose order is computed."""
    sampler = BatchSampler(sampler=PermutationSampler(HUGE), batch_size=1)
    first_batch(DataLoader(Numbers(HUGE), batch_sampler=sampler), HUGE_POSITION)


def first_index() -> None:
    """The sampler alone."""
    sampler = PermutationSampler(HUGE)
    sampler.set_epoch(1)
    sampler.seek(HUGE_POSITION)
    next(iter(sampler))


def main() -> None:
    """Prints the medians."""
    measured: dict[str, tuple[Callable[[], object], str]] = {
        "first batch at 10^6 of 2 * 10^6": (lambda: shuffled(0), "allowed: 1000"),
        "the same with two workers": (lambda: shuffled(2), "allowed: 1000"),
        "first batch at 10^9, computed order": (computed, ""),
        "first index at 10^9, computed order": (first_index, "allowed: 10"),
        "numpy.random.permutation(2 * 10^7)": (lambda: np.random.permutation(FITS), ""),
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(5):
        for name, (function, _) in measured.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    for name, (_, allowed) in measured.items():
        median = statistics.median(times[name]) * 1e3
        print(f"{name + ':':38} {median:9.2f} ms {f'({allowed})' if allowed else ''}")
    index, numpys = (statistics.median(t) for t in list(times.values())[-2:])
    ratio = numpys * HUGE / FITS / index
    print(f"numpy for 2 * 10^9, if it took 100 times as long / first index: {ratio:.0f}")


if __name__ == "__main__":
    main()
