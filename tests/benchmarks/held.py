"""What a save takes by what an attribute holds, and nothing of which has changed but one number.

    python tests/benchmarks/held.py [--saves 8]

A save compares all that the attributes hold with what was there at the last one. Printed are the
seconds that training waits, in medians; the writing itself, which goes on beside training, has
ended before the next save begins.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from in_situ import silent  # noqa: E402

from expbase import ExperimentBase  # noqa: E402


class Record:
    """One of many that a data set keeps."""

    def __init__(self, number: int) -> None:
        self.name = f"image-{number}"
        self.box = [number, number + 1, number + 2]
        self.label = number % 7


def parameters(number: int) -> Any:
    """Returns a layer with so many small parameters."""
    layer = paddle.nn.Layer()
    for each in range(number):
        layer.add_parameter(f"p{each}", layer.create_parameter([4]))
    return layer


HELD: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "an array of 1 GB": lambda: np.zeros(1 << 27),
    "a list of 100,000 dicts of two numbers": lambda: [{"x": n, "y": n % 7} for n in range(10**5)],
    "5,000 records, each an object with a list": lambda: [Record(n) for n in range(5000)],
    "20,000 small parameters": lambda: parameters(20_000),
    "a dict of 10^6 whole numbers, of which one changes": lambda: {n: n for n in range(10**6)},
}


class Held(ExperimentBase):
    """Keeps one of them."""

    what = ""

    def setup_dataloader(self) -> None:
        self.train_loader = range(100)

    def setup_model(self) -> None:
        self.model = paddle.nn.Linear(1, 1)
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=self.model.parameters())
        self.held = HELD[self.what]()

    def train_batch(self) -> None:
        self.read_batch()
        if isinstance(self.held, dict):
            self.held[5] += 1


def seconds(what: str, saves: int) -> list[float]:
    """Returns how long training waits for each save but the first."""
    config = Held.default_config()
    config.training.update(max_iteration=100, valid_interval=0, save_interval=0)
    waits = []
    with tempfile.TemporaryDirectory() as folder, silent():
        exp = Held(config, argparse.Namespace(output=str(Path(folder, "run")), device="cpu"))
        exp.what = what
        exp.setup()
        for _ in range(saves + 1):
            assert exp.going_on()
            exp.train_batch()
            exp.end_iteration()
            began = time.perf_counter()
            exp.save()
            waits.append(time.perf_counter() - began)
            exp.internals.wait_for_checkpoint()
        exp.close()
    return waits[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=8)
    saves = parser.parse_args().saves
    for what in HELD:
        print(f"{what}: {statistics.median(seconds(what, saves)):.3f} s", flush=True)


if __name__ == "__main__":
    main()
