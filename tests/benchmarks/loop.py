"""What the loop costs: an iteration that does nothing, against a bare loop over the same batches.

    python tests/benchmarks/loop.py

Prints the difference in microseconds per iteration, the median of interleaved rounds in one run:
between lines, with triggers, events and the stop flag in place; and at the default settings, with
everything on, where each tenth iteration writes a line with four curves. The same for
paddle.Model.fit with its own log_freq of 10, whose step is replaced by nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

warnings.simplefilter("ignore")

import paddle  # noqa: E402

from expbase import ExperimentBase  # noqa: E402

ITERATIONS = 100_000
LINES = ITERATIONS // 10  # of them where lines are written
ROUNDS = 7


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


class NoStep(paddle.Model):
    """What Model.fit does round its step."""

    def train_batch(self, *_: object, **__: object) -> list[float]:
        return [0.5]


@contextlib.contextmanager
def nothing_printed() -> Iterator[None]:
    """A terminal that costs nothing."""
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stderr(nothing),
        contextlib.redirect_stdout(nothing),
    ):
        yield


def bare_loop(iterations: int) -> float:
    """Seconds of a loop that a user would write by hand, calling a function per batch."""

    def train_batch(batch: int) -> None:
        pass

    began = time.perf_counter()
    for batch in range(iterations):
        train_batch(batch)
    return time.perf_counter() - began


def our_loop(iterations: int, *, has_lines: bool) -> float:
    """Seconds of the same in an experiment's train()."""
    Empty.batches = list(range(iterations))
    with tempfile.TemporaryDirectory() as directory, nothing_printed():
        config = Empty.default_config()
        config.training.max_iteration = iterations + 1  # which would save and validate
        if not has_lines:
            config.training.update({"log_interval": 0, "valid_interval": 0, "save_interval": 0})
        else:  # neither is part of a line
            config.training.valid_interval = config.training.save_interval = 2 * iterations
        exp = Empty(config, argparse.Namespace(output=f"{directory}/run", device="cpu"))
        exp.setup()
        exp.resume_or_load()
        began = time.perf_counter()
        for _ in range(iterations):
            exp.going_on()
            exp.train_batch()
            exp.end_iteration()
        seconds = time.perf_counter() - began
        exp.close()
    return seconds


def fit_loop(iterations: int) -> float:
    """Seconds of the same in paddle.Model.fit."""
    layer = paddle.nn.Linear(1, 1)
    model = NoStep(layer)
    model.prepare(paddle.optimizer.SGD(parameters=layer.parameters()), paddle.nn.MSELoss())
    number = paddle.zeros([1])
    with nothing_printed():
        began = time.perf_counter()
        model.fit([[number, number]] * iterations, log_freq=10, verbose=2)
        return time.perf_counter() - began


def main() -> None:
    """Prints the differences."""
    sides: dict[str, tuple[Callable[[], float], int, str]] = {
        "between lines": (lambda: our_loop(ITERATIONS, has_lines=False), ITERATIONS, ""),
        "at the default settings": (
            lambda: our_loop(LINES, has_lines=True),
            LINES,
            "3 x Model.fit",
        ),
        "paddle.Model.fit": (lambda: fit_loop(LINES), LINES, ""),
    }
    more: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        bare = bare_loop(ITERATIONS) / ITERATIONS
        for name, (loop, iterations, _allowed) in sides.items():
            more[name].append((loop() / iterations - bare) * 1e6)
    for name, (_, _, allowed) in sides.items():
        text = f" (allowed: {allowed})" if allowed else ""
        low, high = min(more[name]), statistics.median(more[name])
        print(f"{name + ':':25} {high:6.2f} µs more per iteration, at least {low:.2f}{text}")


if __name__ == "__main__":
    main()
