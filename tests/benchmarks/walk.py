"""What a save costs in the main thread where an experiment holds many small objects.

    python tests/benchmarks/walk.py [--objects 10000] [--rounds 5]

Each experiment has one small net, and beside it one of these crowds:

- meters: a list of meters with three numbers each;
- groups: the same ones, in lists of 100;
- dict: a dict of 900 objects (of fewer with few --objects) with ten numbers each;
- layers: a Sequential of a fifth as many layers, which nothing trains.

Of a crowd nothing moves between two saves, or one number of each object ("moving"). Printed are the
best of the rounds, of a save and of the copy before a validation (`capture`), and how much more
that is than without a crowd, for each 10,000 objects. `double` is the cost of the whole crowd
against that of half of it: 2.0 where the walk is linear. A warning of a run is printed, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import paddle  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.checkpoint import storage  # noqa: E402

MOST_IN_DICT = 900
GROUP = 100
Crowd = Callable[[int], Any]


class Meter:
    def __init__(self) -> None:
        self.count, self.total, self.last = 0, 0.0, 0.0

    def move(self) -> None:
        self.count += 1


class Entry:
    def __init__(self) -> None:
        self.hits = 0
        self.a, self.b, self.c, self.d, self.e, self.f, self.g, self.h, self.i = range(9)

    def move(self) -> None:
        self.hits += 1


def meters(count: int) -> list[Meter]:
    """One long list."""
    return [Meter() for _ in range(count)]


def groups(count: int) -> list[list[Meter]]:
    """Lists in a list."""
    return [meters(min(GROUP, count - start)) for start in range(0, count, GROUP)]


def entries(count: int) -> dict[str, Entry]:
    """A dict of objects."""
    return {f"entry_{number}": Entry() for number in range(count)}


def layers(count: int) -> paddle.nn.Sequential:
    """Layers whose weights stay."""
    found = paddle.nn.Sequential(*(paddle.nn.Linear(2, 2, bias_attr=False) for _ in range(count)))
    for weight in found.parameters():
        weight.stop_gradient = True
    return found


class Crowded(ExperimentBase):
    make: Crowd = staticmethod(lambda count: None)
    count = 0

    def setup_dataloader(self) -> None:
        self.train_loader = [paddle.randn([1, 4])]

    def setup_model(self) -> None:
        self.model = paddle.nn.Linear(4, 4)
        self.optimizer = paddle.optimizer.Adam(parameters=self.model.parameters())
        self.crowd = self.make(self.count)

    def train_batch(self) -> None:
        self.model(self.read_batch()).mean().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    def valid(self) -> None:
        return None


class Subject:
    """One experiment, and the seconds of its saves and copies."""

    def __init__(self, directory: Path, make: Crowd, count: int, *, is_moving: bool) -> None:
        kind = type("Crowded", (Crowded,), {"make": staticmethod(make), "count": count})
        config = kind.default_config()
        config.training.update(max_iteration=10**6, valid_interval=0, log_interval=0, keep_last=0)
        output = tempfile.mkdtemp(dir=directory)
        self.exp = kind(config, argparse.Namespace(output=output, device="cpu"))
        self.exp.setup()
        self.checkpointer = self.exp._ExperimentBase__run.checkpointer
        self.saves: list[float] = []
        self.copies: list[float] = []
        self.is_moving = is_moving

    def move(self, crowd: Any) -> None:
        """Changes a number in each object."""
        if hasattr(crowd, "move"):
            crowd.move()
        elif isinstance(crowd, paddle.nn.Layer):
            for layer in crowd:
                layer.seen = getattr(layer, "seen", 0) + 1
        else:
            for item in crowd.values() if isinstance(crowd, dict) else crowd or ():
                self.move(item)

    def measure(self) -> None:
        """One save and one copy, each after an update and with nothing being written."""
        for times, act in (
            (self.saves, self.exp.save),
            (self.copies, lambda: self.checkpointer.capture(0, {})),
        ):
            self.exp.going_on()
            self.exp.train_batch()
            self.exp.end_iteration()
            if self.is_moving:
                self.move(self.exp.crowd)
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
            self.checkpointer.settle()
            storage.prune(self.exp.checkpoint_dir, keep_last=1)


def best_of(directory: Path, rounds: int, *args: Any, is_moving: bool = False) -> list[float]:
    """The best milliseconds of a save, and of a copy."""
    with contextlib.redirect_stderr(io.StringIO()):
        return _best_of(directory, rounds, *args, is_moving=is_moving)


def _best_of(directory: Path, rounds: int, *args: Any, is_moving: bool) -> list[float]:
    subject = Subject(directory, *args, is_moving=is_moving)
    try:
        for _ in range(rounds):
            subject.measure()
    finally:
        subject.exp.close()
        lines = (subject.exp.output_dir / "worker_0.log").read_text().splitlines()
        shutil.rmtree(subject.exp.output_dir)
    for line in lines:
        if "WARNING" in line:
            print(f"said: {line[:160]}")
    return [min(times) * 1e3 for times in (subject.saves, subject.copies)]


def main() -> None:
    """Prints the costs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    crowds: dict[str, tuple[Crowd, int]] = {
        "meters": (meters, args.objects),
        "groups": (groups, args.objects),
        "dict": (entries, min(MOST_IN_DICT, args.objects)),
        "layers": (layers, args.objects // 5),
    }
    directory = Path(tempfile.mkdtemp(prefix="walk-", dir="."))
    try:
        alone = best_of(directory, max(args.rounds, 5), lambda count: None, 0)
        print(
            f"{'best of ' + str(args.rounds):16} objects    save    copy   more per 10,000  double"
        )
        print(f"{'none':16} {0:7} {alone[0]:7.1f} {alone[1]:7.1f} ms", flush=True)
        for name, (make, count) in crowds.items():
            for is_moving in (False, True):
                half, both = (
                    best_of(directory, args.rounds, make, some, is_moving=is_moving)
                    for some in (count // 2, count)
                )
                more = [
                    (cost - bare) / count * 10_000 for cost, bare in zip(both, alone, strict=True)
                ]
                double = (both[1] - alone[1]) / max(half[1] - alone[1], 1e-3)
                print(
                    f"{name + ' moving' * is_moving:16} {count:7} {both[0]:7.1f} {both[1]:7.1f} ms"
                    f"{more[0]:8.1f} {more[1]:7.1f} {double:7.1f}",
                    flush=True,
                )
    finally:
        shutil.rmtree(directory)
    print("allowed: 100 ms more for each 10,000 objects")


if __name__ == "__main__":
    main()
