"""What expbase costs where it is used: between the kernels of a real update, where caches are cold.

    python tests/benchmarks/in_situ.py [--nets linear small conv] [--workers 0 2] [--chunks 100]

Three nets, whose updates take some 0.6, 5 and 10 ms; batches of 32 of a data set with indices, 35
in an epoch. Twenty updates of expbase at the default settings and twenty of a bare loop over
paddle's DataLoader, which logs as often, by turns in one process. Printed are the medians of the
ratios of neighbouring chunks, and of their differences; paddle.Model.fit beside them; then, of a
run of its own, the microseconds of each part of an update. What a hot loop shows (loop.py) is a
fraction of that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402
from paddle.io import DataLoader, Dataset  # noqa: E402

from expbase import ExperimentBase  # noqa: E402

UPDATES = 20  # of a chunk
WARM = 3  # chunks that are not measured
SAMPLES = 35 * 32
NETS = {"linear": 0, "small": 6, "conv": 16}  # channels of its first convolution


class Images(Dataset):
    """Small images, and what is in them."""

    def __init__(self) -> None:
        random = np.random.RandomState(7)
        self.images = random.randn(SAMPLES, 1, 16, 16).astype("float32")
        self.labels = random.randint(0, 10, SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]

    def __len__(self) -> int:
        return SAMPLES


def net(name: str) -> Any:
    """Returns one of the NETS."""
    nn = paddle.nn
    if not (channels := NETS[name]):
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    return nn.Sequential(
        nn.Conv2D(1, channels, 3), nn.BatchNorm2D(channels), nn.ReLU(),
        nn.Conv2D(channels, 2 * channels, 3), nn.ReLU(),
        nn.MaxPool2D(2), nn.Flatten(), nn.Linear(72 * channels, 10),
    )  # fmt: skip


def loader(workers: int) -> DataLoader:
    """What all read."""
    return DataLoader(Images(), batch_size=32, shuffle=True, drop_last=True, num_workers=workers)


class Bare:
    """The loop of somebody who uses no template."""

    def __init__(self, name: str, workers: int, path: str) -> None:
        self.model = net(name)
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=self.model.parameters())
        self.batches = self.forever(loader(workers))
        self.file = open(path, "w")
        self.losses: list[Any] = []
        self.iteration = 0

    def forever(self, batches: DataLoader) -> Iterator[Any]:
        """Yields batch after batch."""
        while True:
            yield from batches

    def update(self) -> None:
        """Makes an update, and writes each tenth time."""
        images, labels = next(self.batches)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.losses.append(loss.detach())
        self.iteration += 1
        if self.iteration % 10 == 0:
            mean = sum(float(loss) for loss in self.losses) / len(self.losses)
            print(self.iteration, mean, self.optimizer.get_lr(), file=self.file, flush=True)
            self.losses = []


class Timed(paddle.callbacks.Callback):
    """Tells the time of twenty updates of paddle.Model.fit."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.number, self.began = 0, 0.0

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Begins to measure, if it is the first of twenty."""
        if self.number % UPDATES == 0:
            self.began = time.perf_counter()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Ends."""
        self.number += 1
        if self.number % UPDATES == 0:
            self.seconds.append(time.perf_counter() - self.began)


class InSitu(ExperimentBase):
    """The same, in expbase."""

    net = ""
    workers = 0
    chunks = 0
    saves = 0
    parts: dict[str, float] | None = None  # seconds of each part, if they are measured
    results: tuple[list[float], list[float]]

    def setup_dataloader(self) -> None:
        self.train_loader = loader(self.workers)

    def setup_model(self) -> None:
        self.model = net(self.net)
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=self.model.parameters())
        self.bare = Bare(self.net, self.workers, str(self.output_dir / "bare.txt"))
        self.results = [], []
        self.exclude_from_state("bare", "results", *(["parts"] if self.parts is not None else []))

    def train_batch(self) -> None:
        images, labels = self.timed("read", self.read_batch)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.timed("log", lambda: self.log(loss=loss))

    def timed(self, part: str, function: Callable[[], Any]) -> Any:
        """Calls a function; notes its seconds if parts are measured."""
        if self.parts is None:
            return function()
        began = time.perf_counter()
        result = function()
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began
        return result

    def update(self) -> None:
        """Makes an update."""
        self.timed("begin", self.going_on)
        self.train_batch()
        self.timed("end", self.end_iteration)

    def train(self) -> None:
        for chunk in range(self.chunks + WARM):
            for seconds, update in zip(self.results, (self.update, self.bare.update), strict=True):
                began = time.perf_counter()
                for _ in range(UPDATES):
                    update()
                seconds.append(time.perf_counter() - began)
            if chunk == WARM and self.parts is not None:
                self.parts.clear()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Lets nothing be printed in the block."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in (1, 2):
            os.dup2(null, fd)
        yield
    finally:
        for fd, before in zip((1, 2), kept, strict=True):
            os.dup2(before, fd)


def experiment(
    name: str, workers: int, chunks: int, save_interval: int, *, by_part: bool = False
) -> InSitu:
    """Runs it; its `results` are the seconds of its chunks, and of those of the bare loop."""
    config = InSitu.default_config()
    config.training.max_iteration = 10**9
    config.training.save_interval = save_interval
    with tempfile.TemporaryDirectory() as folder, silent():
        args = argparse.Namespace(output=str(Path(folder) / "run"), device="cpu")
        exp = InSitu(config, args)
        exp.net, exp.workers, exp.chunks = name, workers, chunks
        exp.parts = {} if by_part else None
        exp.setup()
        exp.run()
    return exp


def fit(name: str, workers: int, chunks: int) -> list[float]:
    """Returns the seconds of chunks of paddle.Model.fit."""
    model = paddle.Model(net(name))
    adam = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    model.prepare(adam, paddle.nn.CrossEntropyLoss())
    timed = Timed()
    data = loader(workers)
    epochs = -(-chunks * UPDATES // len(data))
    with silent():
        model.fit(data, epochs=epochs, verbose=0, callbacks=[timed])
    return timed.seconds


def ratio(one: list[float], other: list[float]) -> float:
    """Returns the median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(one[WARM:], other[WARM:], strict=False))


def more(one: list[float], other: list[float]) -> float:
    """Returns the median of the differences of neighbours, in microseconds of an update."""
    pairs = zip(one[WARM:], other[WARM:], strict=False)
    return statistics.median(a - b for a, b in pairs) / UPDATES * 1e6


def show(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def measure(name: str, workers: int, chunks: int) -> None:
    """Prints what a net shows."""
    what = f"{name}, {workers} workers"
    for saves in (0, 50):
        exp = experiment(name, workers, chunks, saves)
        ours, bare = exp.results
        each = statistics.median(bare[WARM:]) / UPDATES * 1e3
        often = f"a save each {saves} updates" if saves else "no saves"
        show(
            f"{what}, {often}: {ratio(ours, bare):.3f} of {each:.2f} ms, "
            f"{more(ours, bare):.0f} us more"
        )
    of_fit = statistics.median(fit(name, workers, chunks)[WARM:]) / UPDATES * 1e3
    show(f"{what}, paddle.Model.fit: {of_fit / each:.3f} (not by turns)")
    parts = experiment(name, workers, chunks, 0, by_part=True).parts or {}
    number = (chunks - 1) * UPDATES
    show("  ".join(f"{part} {s / number * 1e6:.0f} us" for part, s in parts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=[*NETS], default=[*NETS])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--chunks", type=int, default=100)
    args = parser.parse_args()
    for name in args.nets:
        for workers in args.workers:
            measure(name, workers, args.chunks)


if __name__ == "__main__":
    main()
