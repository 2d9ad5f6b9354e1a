"""How cost grows: with the size of a model, the number of its parameters, of samples, of ranks.

    python tests/benchmarks/scaling.py [--only elements parameters samples ranks] [--ranks 1 2 4 8]

One table each. Behind a time stands the exponent of its growth since the row before, the ratio of
the times as a power of the ratio of the sizes: 1.0 is linear, 2.0 is quadratic, and above 1.2 it is
marked with `!` (a time below a tenth of a millisecond is not).

    setup       setup() of a small experiment with that model
    step        an iteration that does nothing, beyond a bare loop, nothing being due in it
    line        an iteration that does nothing, with a line of the log
    validation  evaluate() with a valid() that does nothing
    stall       save() in the background
    on disk     the same until its files are safe
    resume      resume_or_load()
    paddle      paddle.save of the state dicts, and paddle.load and setting them
    first, middle   from an epoch's begin to its first batch, and from the middle of an epoch
    start, asks, waits   from the command to the first update; what the ranks need to agree, to wait
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import paddle  # noqa: E402
from paddle.io import BatchSampler, DataLoader, Dataset  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.data.loaders import Shard, adapt_loader  # noqa: E402
from expbase.extras.permutation import PermutationSampler  # noqa: E402
from expbase.ranks import collectives  # noqa: E402
from expbase.ranks.launch import StopSignals, spawn  # noqa: E402

ELEMENTS, PARAMETERS = 10**6, 10  # where the other of the two grows
STEPS = 2000
REPEATS = 5


def seconds(function: Callable[[], object], repeats: int = 1) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Model(ExperimentBase):
    elements, parameters = ELEMENTS, PARAMETERS

    def setup_dataloader(self) -> None:
        self.train_loader = [*range(20_000)]  # each save looks at them

    def setup_model(self) -> None:
        layers = self.parameters // 2
        width = max(math.isqrt(self.elements // layers), 1)
        net = paddle.nn.Sequential(*[paddle.nn.Linear(width, width) for _ in range(layers)])
        self.model = self.data_parallel(net)
        self.optimizer = paddle.optimizer.Adam(parameters=net.parameters())
        self.zeros = paddle.zeros([1, width])

    def train_batch(self) -> None:
        self.read_batch()
        if self.iteration == 1:  # makes the optimizer's state
            self.backward(self.model(self.zeros).sum())
            self.step_optimizers()

    def valid(self) -> dict[str, float]:
        return {}


def make(directory: str) -> Model:
    """An experiment before setup, in which nothing is due."""
    config = Model.default_config()
    config.training.update(max_iteration=10**6, valid_interval=0, save_interval=0, log_interval=0)
    config.training.keep_last = 1
    return Model(config, argparse.Namespace(output=f"{directory}/run", device="cpu"))


def iterate(exp: Model, number: int) -> None:
    """Some iterations."""
    for _ in range(number):
        exp.going_on()
        exp.train_batch()
        exp.end_iteration()


def bare(number: int) -> None:
    """As many calls of nothing."""

    def train_batch(batch: int) -> None:
        pass

    for batch in range(number):
        train_batch(batch)


def of_model(elements: int, parameters: int) -> dict[str, float]:
    """What an experiment with such a model costs, in seconds."""
    Model.elements, Model.parameters = elements, parameters
    with tempfile.TemporaryDirectory(dir=".") as directory:
        exp = make(directory)
        times = {"setup": seconds(exp.setup)}
        exp.resume_or_load()
        iterate(exp, 20)
        step, nothing = seconds(lambda: iterate(exp, STEPS), REPEATS), seconds(lambda: bare(STEPS))
        times["step"] = (step - nothing) / STEPS
        exp.config.training.log_interval = 1
        times["line"] = seconds(lambda: iterate(exp, 20), REPEATS) / 20
        exp.config.training.log_interval = 0
        times["validation"] = seconds(exp.evaluate, REPEATS)
        stalls = []
        for _ in range(REPEATS):
            iterate(exp, 1)
            stalls.append((seconds(exp.save), seconds(exp._ExperimentBase__run.checkpointer.close)))
        times["stall"] = statistics.median(stall for stall, _ in stalls)
        times["on disk"] = statistics.median(map(sum, stalls))
        times |= paddles_own(exp, Path(directory))
        exp.close()
        again = make(directory)
        again.setup()
        times["resume"] = seconds(again.resume_or_load)
        again.close()
    return times


def paddles_own(exp: Model, directory: Path) -> dict[str, float]:
    """Paddle's own way, which flushes nothing."""
    names = {"model": exp.model, "optimizer": exp.optimizer}

    def save() -> None:
        for name, stateful in names.items():
            paddle.save(stateful.state_dict(), str(directory / name))

    def load() -> None:
        for name, stateful in names.items():
            stateful.set_state_dict(paddle.load(str(directory / name)))

    return {"paddle saves": seconds(save, 3), "paddle loads": seconds(load, 3)}


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.size


LOADERS: dict[str, tuple[Callable[[Dataset], DataLoader], int]] = {  # and the greatest size
    "in order": (lambda data: DataLoader(data, batch_size=4), 10**9),
    "shuffled": (lambda data: DataLoader(data, batch_size=4, shuffle=True), 10**7),
    "computed": (
        lambda data: DataLoader(
            data, batch_sampler=BatchSampler(sampler=PermutationSampler(len(data)), batch_size=4)
        ),
        10**9,
    ),
}


def of_samples(kind: str, size: int) -> dict[str, float]:
    """The first batch of a data set of that size, in seconds."""
    make_loader, _ = LOADERS[kind]

    def first(position: int) -> None:
        adapter = adapt_loader(make_loader(Numbers(size)), "loader", Shard(seed=0))
        next(adapter.open(1, position))

    return {"first": seconds(lambda: first(0), 3), "middle": seconds(lambda: first(size // 2), 3)}


def of_rank(directory: str, began: float, queue: Any) -> None:
    """One rank; the last one to be ready tells."""
    exp = make(directory)
    exp.setup()
    exp.resume_or_load()
    iterate(exp, 1)
    start = time.time() - began
    times = {
        "asks": seconds(lambda: collectives.max_over_ranks(1.0, 2.0), 50),
        "waits": seconds(lambda: collectives.barrier("here"), 50),
        "stall": seconds(lambda: (iterate(exp, 1), exp.save()), REPEATS),
        "on disk": seconds(
            lambda: (iterate(exp, 1), exp.save(), exp._ExperimentBase__run.checkpointer.close()),
            REPEATS,
        ),
    }
    of_ranks = collectives.all_gather_object({"start": start, **times})
    exp.close()
    if collectives.rank() == 0:
        queue.put({name: max(of_rank[name] for of_rank in of_ranks) for name in of_ranks[0]})


def of_ranks(number: int) -> dict[str, float]:
    """An experiment on that many ranks."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        args = (directory, time.time(), queue)
        if number == 1:
            of_rank(*args)
        else:
            spawn(of_rank, args, number, "cpu", StopSignals())
        return queue.get()


def _answer(queue: Any, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    queue.put(function(*args))


def apart(function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """What a function returns in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(queue, function, args))
    process.start()
    times: dict[str, float] = queue.get(timeout=300)
    process.join()
    return times


def table(title: str, sizes: Iterable[int], measure: Callable[[int], dict[str, float]]) -> None:
    """Prints a row for each size, as soon as it is measured."""
    print(f"\n{title}")
    before: tuple[int, dict[str, float]] | None = None
    for size in sizes:
        times = measure(size)
        if before is None:
            print(" " * 10 + "".join(f"{name:>18}" for name in times))
        print(f"{size:10.0e}" if size >= 10**4 else f"{size:10}", end="")
        for name, taken in times.items():
            growth = ""
            if before is not None and min(taken, before[1][name]) > 1e-6:
                power = math.log(taken / before[1][name]) / math.log(size / before[0])
                growth = f"^{power:.1f}{'!' if power > 1.2 and taken > 1e-4 else ''}"
            print(f"{taken * 1e3:10.3f} ms {growth:5}", end="")
        print(flush=True)
        before = size, times


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser()
    tables = ["elements", "parameters", "samples", "ranks"]
    parser.add_argument("--only", nargs="*", choices=tables, default=tables)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    args = parser.parse_args()
    if "elements" in args.only:
        sizes = [10**5, 10**6, 10**7, 10**8]
        table("elements, in 10 parameters", sizes, lambda n: apart(of_model, n, PARAMETERS))
    if "parameters" in args.only:
        sizes = [10, 100, 500, 2000]
        table("parameters, of 10^6 elements", sizes, lambda n: apart(of_model, ELEMENTS, n))
    if "samples" in args.only:
        for kind, (_, most) in LOADERS.items():
            sizes = [n for n in (10**3, 10**5, 10**7, 10**9) if n <= most]
            table(f"samples, {kind}", sizes, lambda n, kind=kind: apart(of_samples, kind, n))
    if "ranks" in args.only:
        table("ranks", args.ranks, lambda n: apart(of_ranks, n))


if __name__ == "__main__":
    main()
