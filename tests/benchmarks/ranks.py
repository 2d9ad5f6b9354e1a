"""What two ranks pay for being two: a step of 5 ms, a validation of unequal shares, a checkpoint.

    python tests/benchmarks/ranks.py [--loader stream] [--log_interval 0]

Two processes with gloo on the CPU. Printed are medians over slices or repetitions in one run:

- a step that takes 5 ms by the clock and ends in one small all_reduce: in an experiment, with a
  line each 10 iterations, against a loop by hand, in turn in the same processes. Where the machine
  is busy, the CPU time of rank 0's main thread says more than the wall time;
- a validation in which rank 1 needs three times as long as rank 0: from the iteration's end to the
  next update, against what the slowest rank needs by itself;
- a checkpoint of 100 MB: how long each rank is in `save`, and how long until both are through the
  next all_reduce.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

warnings.simplefilter("ignore")

import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle.io import DataLoader, IterableDataset  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.ranks.launch import StopSignals, spawn  # noqa: E402

STEP_SECONDS = 0.005
SLICE = 50  # steps of one side, then of the other
VALID_BATCHES = 20  # of each rank
VALID_SECONDS = (0.01, 0.03)  # of a batch, by rank
WIDTH = 2048
SAMPLES = 10**5


class Stream(IterableDataset):
    """As long as nobody knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


LOADERS = {
    "indices": lambda: DataLoader(range(SAMPLES), batch_size=1),
    "list": lambda: [*range(SAMPLES)],
    "stream": lambda: DataLoader(Stream(), batch_size=1),
}


def step() -> None:
    """What a training step is here, on both sides: work, then a collective."""
    time.sleep(STEP_SECONDS)
    dist.all_reduce(paddle.zeros([1]))


def by_hand() -> None:
    """A slice of a loop without the template."""
    for _ in range(SLICE):
        step()


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    function()
    return time.perf_counter() - wall, time.thread_time() - cpu


def medians(rows: Sequence[Sequence[float]], unit: float = 1e3) -> list[float]:
    """Of each column; in milliseconds."""
    return [statistics.median(column) * unit for column in zip(*rows, strict=True)]


class Timed(ExperimentBase):
    counts: argparse.Namespace  # how often each thing is measured, and more

    def setup_dataloader(self) -> None:
        self.train_loader = LOADERS[self.counts.loader]()
        self.valid_loader = DataLoader(range(2 * VALID_BATCHES), batch_size=1)

    def setup_model(self) -> None:
        net = paddle.nn.Sequential(*[paddle.nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.model = self.data_parallel(net)
        self.optimizer = paddle.optimizer.Adam(parameters=net.parameters())
        self.is_first = True
        self.slept = 0.0  # in the last validation, in seconds
        self.waited = 0.0, 0.0  # from when to when; the ranks of a machine have the same clock

    def train_batch(self) -> None:
        self.read_batch()
        if self.is_first:  # makes the optimizer's state
            self.is_first = False
            self.model(paddle.zeros([1, WIDTH])).sum().backward()
            self.optimizer.step()
            self.optimizer.clear_grad(set_to_zero=False)
        step()
        self.log(loss=0.5)

    def valid(self) -> dict[str, float]:
        self.slept = 0.0
        for _ in self.valid_batches():
            began = time.perf_counter()
            time.sleep(VALID_SECONDS[self.rank])
            self.slept += time.perf_counter() - began
        arrived = time.perf_counter()
        self.average({"score": 1.0}, weight=1)
        self.waited = arrived, time.perf_counter()
        return {}

    def train(self) -> None:
        self.iterations()
        self.measure_steps()
        self.measure_validations()
        self.measure_saves()
        self.stop(on_all_ranks=True)

    def iterations(self) -> None:
        """A slice of the experiment's loop."""
        for _ in range(SLICE):
            self.going_on()
            self.train_batch()
            self.end_iteration()

    def measure_steps(self) -> None:
        """Both loops, in turn."""
        pairs = [(timed(by_hand), timed(self.iterations)) for _ in range(self.counts.slices)]
        for number, clock in enumerate(("wall", "CPU")):
            rows = [(a[number] / SLICE, b[number] / SLICE) for a, b in pairs]
            hand, ours, more = medians([(a, b, b - a) for a, b in rows])
            share = more / STEP_SECONDS / 1e3
            text = f"{ours:.3f} ms, by hand {hand:.3f} ms, more: {share:.2%} of 5 ms"
            self.say(f"a step, {clock} time: {text} (allowed: 1 %)")

    def measure_validations(self) -> None:
        """Each from the update before it to the one behind it."""
        rows = []
        for _ in range(self.counts.validations):
            self.going_on()
            self.train_batch()
            self.config.training.valid_interval = self.iteration
            began = time.perf_counter()
            self.end_iteration()
            dist.all_reduce(paddle.zeros([1]))
            taken = time.perf_counter() - began
            self.config.training.valid_interval = 0
            slept, waits = zip(*self.gather((self.slept, self.waited)), strict=True)
            arrived, went_on = map(max, zip(*waits, strict=True))
            rows.append((taken, max(slept), went_on - arrived))
        taken, slowest, late = medians(rows)
        text = f"{taken:.1f} ms, the slowest rank by itself {slowest:.1f} ms"
        self.say(f"a validation: {text}, ratio {taken / slowest:.3f} (allowed: 1.01)")
        self.say(f"all go on {late:.1f} ms after the slowest has come")

    def measure_saves(self) -> None:
        """The first of several is left out: it makes the memory that the others use again."""
        rows = []
        for _ in range(self.counts.saves + 1):
            self.iterations()
            self._ExperimentBase__run.checkpointer.close()  # not the wait for the one before
            dist.all_reduce(paddle.zeros([1]))
            (inside, _) = timed(self.save)
            (until_step, _) = timed(lambda: dist.all_reduce(paddle.zeros([1])))
            rows.append([*self.gather(inside), inside + until_step])
        first, second, both = medians(rows[1:])
        text = f"rank 0 {first:.1f} ms, rank 1 {second:.1f} ms, both at the next step {both:.1f} ms"
        self.say(f"a save: {text}")

    def say(self, text: str) -> None:
        """Once, not by each rank."""
        if self.rank == 0:
            print(text, flush=True)


def run(directory: str, counts: argparse.Namespace) -> None:
    """One rank."""
    Timed.counts = counts
    config = Timed.default_config()
    config.training.update(max_iteration=10**6, valid_interval=0, save_interval=0)
    config.training.log_interval = counts.log_interval
    exp: Any = Timed(config, argparse.Namespace(output=f"{directory}/run", device="cpu"))
    exp.setup()
    exp.run()


def main() -> None:
    """Starts the ranks; rank 0 prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=LOADERS, default="indices")
    parser.add_argument("--log_interval", type=int, default=10)
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--validations", type=int, default=15)
    parser.add_argument("--saves", type=int, default=7)
    counts = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        spawn(run, [directory, counts], 2, "cpu", StopSignals())


if __name__ == "__main__":
    main()
