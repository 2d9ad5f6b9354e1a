"""What a checkpoint costs: how long training is held up, and how long until it is on disk.

    python tests/benchmarks/saving.py [--layers 8] [--rounds 7]

A model of 134 MB and its Adam state, together 403 MB, on the CPU. Each round measures one after
the other, so that all of them meet the same machine; printed are medians and their ratios:

- the stall of `save()`, against copying the same bytes into memory that was used before, which is
  the least that a snapshot can cost;
- the copy before a validation (`capture`), against the same;
- the durable save, until its files are on the disk, against writing and flushing the same bytes as
  one plain file for each;
- both against `paddle.save` of the state dicts with a flush.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.checkpoint import storage  # noqa: E402
from expbase.state.parts import found_in  # noqa: E402
from expbase.state.walk import Walk  # noqa: E402

WIDTH = 2048


class Large(ExperimentBase):
    layers = 8

    def setup_dataloader(self) -> None:
        self.train_loader = [paddle.randn([1, WIDTH])]

    def setup_model(self) -> None:
        layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)]
        self.model = paddle.nn.Sequential(*layers)
        self.optimizer = paddle.optimizer.Adam(parameters=self.model.parameters())

    def train_batch(self) -> None:
        self.model(self.read_batch()).mean().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    def valid(self) -> None:
        return None


class Subjects:
    """What is measured, each on the same live tensors."""

    def __init__(self, directory: Path, layers: int) -> None:
        Large.layers = layers
        config = Large.default_config()
        config.training.update(max_iteration=10**6, valid_interval=0, log_interval=0, keep_last=0)
        args = argparse.Namespace(output=str(directory / "run"), device="cpu")
        self.exp = Large(config, args)
        self.exp.setup()
        self.step()
        tensors, _ = found_in(Walk(None, vars(self.exp))).state_dict()
        self.files = {name: [a.data for a in arrays.values()] for name, arrays in tensors.items()}
        self.arrays = [array for arrays in self.files.values() for array in arrays]
        self.bytes = sum(array.nbytes for array in self.arrays)
        self.memory = np.zeros(self.bytes, np.uint8)
        self.directory = directory

    def step(self) -> None:
        """One update, so that there is something new to save."""
        self.exp.going_on()
        self.exp.train_batch()
        self.exp.end_iteration()

    def copy(self) -> None:
        """The bytes into memory that was used before."""
        end = 0
        for array in self.arrays:
            start, end = end, end + array.nbytes
            np.copyto(self.memory[start:end], array)

    def stall(self) -> None:
        """`save()`, whose files a thread writes."""
        self.exp.save()

    def capture(self) -> None:
        """What stands before a validation, in memory."""
        self.exp._ExperimentBase__run.checkpointer.capture(0, {})

    def durable(self) -> None:
        """`save()`, and until its files are on the disk."""
        self.exp.save()
        self.exp._ExperimentBase__run.checkpointer.settle()

    def plain(self) -> None:
        """The same bytes, one file for each tensor file, flushed."""
        for name, arrays in self.files.items():
            with (self.directory / f"plain-{name}").open("wb", buffering=0) as file:
                for array in arrays:
                    file.write(memoryview(array))
                os.fsync(file.fileno())

    def paddle_save(self) -> None:
        """The usual way of paddle, with a flush, which it does not do itself."""
        for name in ("model", "optimizer"):
            path = str(self.directory / f"paddle-{name}")
            paddle.save(getattr(self.exp, name).state_dict(), path)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def tidy(self) -> None:
        """Between two measurements: nothing is being written, and no file is overwritten."""
        self.exp._ExperimentBase__run.checkpointer.close()
        storage.prune(self.exp.checkpoint_dir, keep_last=1)  # deleting is not measured
        for path in [*self.directory.glob("plain-*"), *self.directory.glob("paddle-*")]:
            path.unlink()
        os.sync()


def main() -> None:
    """Prints medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="saving-", dir="."))
    try:
        subjects = Subjects(directory, args.layers)
        measured: dict[str, Callable[[], None]] = {
            "copy into used memory": subjects.copy,
            "stall of a save": subjects.stall,
            "copy before a validation": subjects.capture,
            "write and flush plain files": subjects.plain,
            "durable save": subjects.durable,
            "paddle.save and flush": subjects.paddle_save,
        }
        times: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(args.rounds + 1):
            for name, function in measured.items():
                subjects.step()
                subjects.tidy()
                began = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - began)
        subjects.tidy()
        subjects.exp.close()
    finally:
        shutil.rmtree(directory)
    # The first round makes the memory that the later ones use again.
    medians = [statistics.median(seconds[1:]) for seconds in times.values()]
    copy, stall, captured, plain, durable, paddles = medians
    print(f"{subjects.bytes / 1e6:.0f} MB, medians of {args.rounds} rounds")
    for name, seconds in times.items():
        spread = f"{min(seconds[1:]) * 1e3:.0f} to {max(seconds[1:]) * 1e3:.0f}"
        print(f"{name + ':':28} {statistics.median(seconds[1:]) * 1e3:6.0f} ms ({spread})")
    print(f"stall / copy:                 {stall / copy:.2f} (allowed: 1.5)")
    print(f"before a validation / copy:   {captured / copy:.2f}")
    print(f"durable save / plain files:   {durable / plain:.2f} (allowed: 1.3)")
    print(f"paddle.save / stall:          {paddles / stall:.1f}")
    print(f"paddle.save / durable save:   {paddles / durable:.1f}")


if __name__ == "__main__":
    main()
