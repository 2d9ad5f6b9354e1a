"""What the loop costs: an iteration that does nothing, against a bare loop over the same batches.

    python tests/benchmarks/loop.py

Prints the difference in microseconds per iteration, the median of interleaved rounds in one run,
with logging, triggers, events and the stop flag in place.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings

warnings.simplefilter("ignore")

import paddle  # noqa: E402

from expbase import ExperimentBase  # noqa: E402

ITERATIONS = 200_000


class Empty(ExperimentBase):
    batches: list[int]

    def setup_dataloader(self) -> None:
        self.train_loader = self.batches

    def setup_model(self) -> None:
        self.model = paddle.nn.Linear(1, 1)
        self.optimizer = paddle.optimizer.SGD(parameters=self.model.parameters())

    def train_batch(self) -> None:
        self.read_batch()

    def valid(self) -> dict[str, float]:
        return {}


def bare_loop(batches: list[int]) -> float:
    """Seconds of a loop that a user would write by hand, calling a function per batch."""

    def train_batch(batch: int) -> None:
        pass

    began = time.perf_counter()
    for batch in batches:
        train_batch(batch)
    return time.perf_counter() - began


def our_loop(batches: list[int]) -> float:
    """Seconds of the same in an experiment's train()."""
    Empty.batches = batches
    with tempfile.TemporaryDirectory() as directory:
        config = Empty.default_config()
        config.training.max_iteration = len(batches)
        config.training.valid_interval = config.training.save_interval = 0
        config.training.log_interval = len(batches) // 2
        exp = Empty(config, argparse.Namespace(output=f"{directory}/run", device="cpu"))
        exp.setup()
        exp.resume_or_load()
        began = time.perf_counter()
        exp.train()
        seconds = time.perf_counter() - began
        exp.close()
    return seconds


def main() -> None:
    """Prints the difference."""
    batches = list(range(ITERATIONS))
    bare, ours = [], []
    for _ in range(7):
        bare.append(bare_loop(batches))
        ours.append(our_loop(batches))
    differences = [(b - a) / ITERATIONS * 1e6 for a, b in zip(bare, ours, strict=True)]
    print(f"bare loop:        {statistics.median(bare) / ITERATIONS * 1e6:.3f} µs per iteration")
    print(f"in an experiment: {statistics.median(ours) / ITERATIONS * 1e6:.3f} µs per iteration")
    print(f"difference:       {statistics.median(differences):.3f} µs (allowed: 1)")


if __name__ == "__main__":
    main()
