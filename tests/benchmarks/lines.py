"""What logging costs: three scalars at every iteration, against an iteration that logs nothing.

    python tests/benchmarks/lines.py

Prints the difference in microseconds per iteration, the median of interleaved rounds in one run:
once with a line for each iteration (log_interval 1: text, JSON, VisualDL), once with the default.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings

warnings.simplefilter("ignore")

import paddle  # noqa: E402

from expbase import ExperimentBase  # noqa: E402

ITERATIONS = 3000


class Logging(ExperimentBase):
    values: list[float] = []  # noqa: RUF012

    def setup_dataloader(self) -> None:
        self.train_loader = range(ITERATIONS)

    def setup_model(self) -> None:
        self.model = paddle.nn.Linear(1, 1)
        self.optimizer = paddle.optimizer.SGD(parameters=self.model.parameters())

    def train_batch(self) -> None:
        self.read_batch()
        if self.values:
            loss, accuracy, norm = self.values
            self.log(loss=loss, accuracy=accuracy, norm=norm)

    def valid(self) -> dict[str, float]:
        return {}


def seconds(values: list[float], log_interval: int) -> float:
    """Of a training, and of closing the logs after it."""
    Logging.values = values
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nothing:
        config = Logging.default_config()
        config.training.update({"max_iteration": ITERATIONS, "log_interval": log_interval})
        config.training.valid_interval = config.training.save_interval = 0
        with contextlib.redirect_stderr(nothing):
            exp = Logging(config, argparse.Namespace(output=f"{directory}/run", device="cpu"))
            exp.setup()
            exp.resume_or_load()
            began = time.perf_counter()
            exp.train()
            exp.close()
            return time.perf_counter() - began


def main() -> None:
    """Prints the differences."""
    for log_interval in (1, 10):
        nothing, three = [], []
        for _ in range(5):
            nothing.append(seconds([], 0))
            three.append(seconds([0.5, 0.25, 0.125], log_interval))
        differences = [(b - a) / ITERATIONS * 1e6 for a, b in zip(nothing, three, strict=True)]
        text = f"{statistics.median(differences):.1f} µs per iteration (allowed: 150)"
        print(f"three scalars, log_interval {log_interval:2}: {text}")


if __name__ == "__main__":
    main()
