"""What stays in memory: after 20,000 iterations, and while a large state is saved and resumed.

    python tests/benchmarks/memory.py [--iterations 20000] [--loaders indices list stream]

Each row is measured in a process of its own, which has that much memory of its own (resident):

- what grows: a small net with a line each 10 iterations, a validation and a background save each
  100, and an epoch each 100; the size at a tenth of the iterations, and at the end;
- a state of 403 MB: the greatest size while it is saved five times, in sizes of the state: what
  training has without saving counts as the state, and each copy as one more. The same with the
  best kept; and of a resume, counted from what the process has without a model;
- its weights, 134 MB, read by load_model on one and several ranks: the greatest size of each rank,
  counted from what it has with the model, in sizes of the weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.io import DataLoader, Dataset, IterableDataset  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.ranks.launch import StopSignals, spawn  # noqa: E402
from expbase.state.parts import found_in  # noqa: E402
from expbase.state.walk import Walk  # noqa: E402

BATCHES = 100  # in an epoch
BATCH_SIZE = 4
WIDTH, LAYERS = 2048, 8
SAVES = 5


def resident() -> int:
    """Bytes in memory that belong to this process: no pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) << 10


class Peak(threading.Thread):
    """The greatest size from now until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = resident()
        self._is_over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            self.bytes = max(self.bytes, resident())

    def stop(self) -> int:
        """The greatest size, in bytes."""
        self._is_over.set()
        self.join()
        return self.bytes


class Points(Dataset):
    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(8, index, "float32"), index % 2

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        points = Points()
        return (points[index] for index in range(len(points)))


LOADERS: dict[str, Callable[[], Any]] = {
    "indices": lambda: DataLoader(Points(), batch_size=BATCH_SIZE, shuffle=True),
    "list": lambda: [*DataLoader(Points(), batch_size=BATCH_SIZE)],
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH_SIZE),
}


class Small(ExperimentBase):
    loader = "indices"
    epochs_seen = 0

    def setup_dataloader(self) -> None:
        self.train_loader = LOADERS[self.loader]()
        self.valid_loader = DataLoader(Points(), batch_size=32)

    def setup_model(self) -> None:
        self.model = paddle.nn.Sequential(paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 2))
        self.optimizer = paddle.optimizer.Adam(parameters=self.model.parameters())
        self.sizes: list[int] = []

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        loss = paddle.nn.functional.cross_entropy(self.model(points), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self) -> dict[str, float]:
        scores = [self.model(points).mean().item() for points, _ in self.valid_batches()]
        return self.average({"score": sum(scores) / len(scores)}, weight=len(scores))

    def on_train_epoch_end(self) -> None:
        self.epochs_seen += 1

    def on_train_batch_end(self) -> None:
        if self.iteration % (self.config.training.max_iteration // 10) == 0:
            self.sizes.append(resident())


class Large(ExperimentBase):
    def setup_dataloader(self) -> None:
        self.train_loader = [paddle.randn([1, WIDTH])] * 100

    def setup_model(self) -> None:
        layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = paddle.nn.Sequential(*layers)
        self.optimizer = paddle.optimizer.Adam(1e-5, parameters=self.model.parameters())

    def train_batch(self) -> None:
        self.backward(self.model(self.read_batch()).mean())
        self.step_optimizers()

    def valid(self) -> dict[str, float]:
        return {"score": float(self.iteration)}


def make(kind: type[ExperimentBase], output: Path, **training: Any) -> ExperimentBase:
    """An experiment after setup."""
    config = kind.default_config()
    config.training.update(training)
    exp = kind(config, argparse.Namespace(output=str(output), device="cpu"))
    exp.setup()
    return exp


def growth(loader: str, iterations: int) -> str:
    """Trains for long."""
    Small.loader = loader
    with tempfile.TemporaryDirectory(dir=".") as directory:
        training = {"max_iteration": iterations, "valid_interval": 100, "save_interval": 100}
        exp = make(Small, Path(directory) / "run", **training)
        exp.run()
    first, last = exp.sizes[0], exp.sizes[-1]
    at = f"{first / 1e6:.1f} MB at {iterations // 10}, {last / 1e6:.1f} MB at {iterations}"
    return f"loader {loader}: {at}, ratio {last / first:.3f} (allowed: 1.05)"


def state_bytes(exp: ExperimentBase) -> int:
    """Of what a checkpoint of it holds."""
    tensors, _ = found_in(Walk(None, vars(exp))).state_dict()
    return sum(array.data.nbytes for arrays in tensors.values() for array in arrays.values())


def saving(directory: Path, keep_best: int) -> str:
    """Saves several times, each in the background of the updates that follow."""
    exp = make(Large, directory / f"run-{keep_best}", **saved_each(3, keep_best))
    peak = Peak()
    training = 0
    while exp.going_on():
        exp.train_batch()
        training = training or exp.iteration == 2 and peak.bytes  # before the first save
        exp.end_iteration()
        time.sleep(0.1)
    exp.close()
    size = state_bytes(exp)
    most = 1 + (peak.stop() - training) / size
    name = f"saving, the best {keep_best} kept" if keep_best else "saving"
    return f"{name}: {size / 1e6:.0f} MB, at most {most:.2f} of it (allowed: 2.1)"


def saved_each(interval: int, keep_best: int) -> dict[str, Any]:
    """The training section."""
    training = {"max_iteration": interval * SAVES, "save_interval": interval, "keep_last": 1}
    validation = {"monitor": "score", "valid_interval": interval if keep_best else 0}
    return {**training, **validation, "keep_best": keep_best}


def resuming(directory: Path) -> str:
    """Resumes what `saving` has left."""
    paddle.ones([1]).sum()
    before, peak = resident(), Peak()
    exp = make(Large, directory / "run-0", **saved_each(3, 0))
    exp.resume_or_load()
    after, most = resident() - before, peak.stop() - before
    size = state_bytes(exp)
    exp.close()
    text = f"at most {most / size:.2f} of it, {after / size:.2f} afterwards (allowed: 2.1)"
    return f"resuming: {size / 1e6:.0f} MB, {text}"


class Loading(Large):
    def startup(self) -> None:
        self.loaded_from = Path(self.args.weights)
        if self.rank and self.args.only_rank_zero:
            self.loaded_from = Path("elsewhere.safetensors")

    def measure(self) -> str:
        """Loads the weights; returns what each rank needed for it."""
        weights = sum(4 * parameter.size for parameter in self.model.parameters())
        before, peak = resident(), Peak()
        self.load_model(self.loaded_from)
        each = self.gather((peak.stop() - before) / weights)
        ranks = ", ".join(f"{most:.2f}" for most in each)
        how = "by rank 0 and sent" if self.args.only_rank_zero else "by each rank"
        suffix = self.loaded_from.suffix if self.rank == 0 else ""
        return f"load_model, {suffix} read {how}: {ranks} of its size (allowed: 1.3)"


def load_on_a_rank(directory: str, weights: str, only_rank_zero: bool) -> None:
    """One rank."""
    config = Loading.default_config()
    given = {"output": f"{directory}/{os.getppid()}", "device": "cpu"}
    args = argparse.Namespace(**given, weights=weights, only_rank_zero=only_rank_zero)
    exp = Loading(config, args)
    exp.setup()
    text = exp.measure()
    exp.close()
    if exp.rank == 0:
        print(text, flush=True)


def loading(directory: Path) -> str:
    """Loads weights on one rank, and on several."""
    exp = make(Large, directory / "weights")
    files = [directory / f"model.{ending}" for ending in ("safetensors", "pdparams")]
    for file in files:
        exp.save_model(file)
    exp.close()
    for ranks in (1, 2, 4):
        for file in files:
            for only_rank_zero in (False, True)[: 1 + (ranks > 1)]:
                arguments = str(directory / f"of-{ranks}"), str(file), only_rank_zero
                spawn(load_on_a_rank, [*arguments], ranks, "cpu", StopSignals())
    return ""


def _answer(queue: Any, function: Callable[..., str], *args: Any) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    queue.put(function(*args))


def apart(function: Callable[..., str], *args: Any) -> None:
    """Prints what a function returns in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(queue, function, *args))
    process.start()
    process.join()
    print(queue.get(timeout=1), flush=True)


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--loaders", nargs="*", choices=LOADERS, default=["indices", "list"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        for keep_best in (0, 1):
            apart(saving, Path(directory), keep_best)
        apart(resuming, Path(directory))
        apart(loading, Path(directory))
    for loader in args.loaders:
        apart(growth, loader, args.iterations)


if __name__ == "__main__":
    main()
