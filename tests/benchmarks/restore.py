"""What a resume costs, against reading the same bytes and copying them into the tensors.

    python tests/benchmarks/restore.py [--layers 24] [--rounds 3] [--nprocs 1]

A model of 403 MB and its Adam state, together 1.2 GB, on the CPU, saved once. Each round resumes it
in one fresh process after the other, of which only the resume is timed: the model is there, the
files are in the page cache, and the tensors of Adam, which a first step would make, are still to be
made by all. Printed are medians, and ratios to the first two:

- reading each file into new memory, and copying it into the tensors from there;
- the least: reading the bytes into the tensors themselves, none of them verified;
- expbase: choosing the newest checkpoint, verifying it and restoring it;
- `paddle.load` and `set_state_dict`, the usual way.

Wall time, and the time of processors in brackets: new memory costs much of both, on some machines.
With --nprocs 2 two processes resume at a time, and the slower one counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.base import framework  # noqa: E402

from expbase import ExperimentBase  # noqa: E402
from expbase.base import arrays  # noqa: E402
from expbase.state import parts  # noqa: E402

WIDTH = 2048


class Large(ExperimentBase):
    layers = 24
    seconds = np.zeros(2)  # that the resume took

    def setup_dataloader(self) -> None:
        self.train_loader = [paddle.ones([1, WIDTH])]

    def setup_model(self) -> None:
        self.model = paddle.nn.Sequential(*(linear() for _ in range(self.layers)))
        self.optimizer = paddle.optimizer.Adam(parameters=self.model.parameters())

    def setup_checkpointer(self) -> None:
        began = clocks()
        super().setup_checkpointer()
        self.seconds = self.seconds + clocks() - began

    def resume_or_load(self) -> None:
        began = clocks()
        super().resume_or_load()
        self.seconds = self.seconds + clocks() - began

    def train_batch(self) -> None:
        self.model(self.read_batch()).mean().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    def valid(self) -> None:
        return None


def clocks() -> Any:
    """Wall time and the time of processors, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def linear() -> paddle.nn.Linear:
    """A layer whose memory is there, without the time that random numbers take."""
    constant = paddle.nn.initializer.Constant(1 / WIDTH)
    return paddle.nn.Linear(WIDTH, WIDTH, weight_attr=constant)


def experiment(directory: Path, layers: int, iterations: int) -> Large:
    """The one that is resumed."""
    Large.layers = layers
    config = Large.default_config()
    config.training.update(max_iteration=iterations, valid_interval=0, log_interval=0)
    exp = Large(config, argparse.Namespace(output=str(directory / "run"), device="cpu"))
    exp.setup()
    return exp


def live_views(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    """The memory of all tensors by file, with Adam's made; as they are in the files."""
    block = framework.default_main_program().global_block()
    optimizer._create_accumulators(block, model.parameters())
    found = parts.StatefulObjects({"model": model}, {"optimizer": optimizer})
    live = found._live_tensors()
    return {
        name: [arrays.Array.of(t).data for t in live[name].values()]
        for name in ("model", "optimizer")
    }


def least(directory: Path, model: Any, optimizer: Any) -> None:
    """Reads into the tensors."""
    for name, views in live_views(model, optimizer).items():
        with (directory / f"{name}.bin").open("rb", buffering=0) as file:
            for view in views:
                assert file.readinto(memoryview(view)) == view.size


def read_and_copy(directory: Path, model: Any, optimizer: Any) -> None:
    """Reads files, and copies the content."""
    for name, views in live_views(model, optimizer).items():
        content, end = np.fromfile(directory / f"{name}.bin", np.uint8), 0
        for view in views:
            start, end = end, end + view.size
            np.copyto(view, content[start:end])


def paddle_load(directory: Path, model: Any, optimizer: Any) -> None:
    """The usual way."""
    model.set_state_dict(paddle.load(str(directory / "model.pdparams")))
    optimizer.set_state_dict(paddle.load(str(directory / "optimizer.pdopt")))
    block = framework.default_main_program().global_block()
    optimizer._create_accumulators(block, model.parameters())  # which takes what was loaded


BY_HAND: dict[str, Callable[[Path, Any, Any], None]] = {
    "read and copy": read_and_copy,
    "the least": least,
    "paddle.load": paddle_load,
}


def save(directory: Path, layers: int) -> None:
    """Writes what is resumed, in each way."""
    exp = experiment(directory, layers, 1)
    exp.run()
    paddle.save(exp.model.state_dict(), str(directory / "model.pdparams"))
    paddle.save(exp.optimizer.state_dict(), str(directory / "optimizer.pdopt"))
    for name, views in live_views(exp.model, exp.optimizer).items():
        with (directory / f"{name}.bin").open("wb") as file:
            file.writelines(map(memoryview, views))


def resume(way: str, directory: Path, layers: int) -> None:
    """In this process, in one way; prints how long that took."""
    if way == "expbase":
        exp = experiment(directory, layers, 2)
        exp.resume_or_load()
        seconds = exp.seconds
        exp.close()
    else:
        if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
            paddle.distributed.init_parallel_env()
            paddle.distributed.barrier()
        model = paddle.nn.Sequential(*(linear() for _ in range(layers)))
        optimizer = paddle.optimizer.Adam(parameters=model.parameters())
        began = clocks()
        BY_HAND[way](directory, model, optimizer)
        seconds = clocks() - began
    print("SECONDS", *seconds, flush=True)


def measured(way: str, directory: Path, layers: int, nprocs: int) -> Any:
    """Milliseconds of a resume in fresh processes, wall and processor; of the slowest of them."""
    words = [__file__, "--layers", str(layers), "--resume", way, "--directory", str(directory)]
    logs = directory / "logs"
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(nprocs)]
    launcher = [*launch, "--log_dir", str(logs)] if nprocs > 1 else []
    run = subprocess.run(
        [sys.executable, *launcher, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "PADDLE_DISTRI_BACKEND": "gloo"},
    )
    texts = [path.read_text() for path in sorted(logs.glob("workerlog.*"))] or [run.stdout]
    shutil.rmtree(logs, ignore_errors=True)
    lines = [line.split() for text in texts for line in text.splitlines()]
    seconds = [np.array([*map(float, line[1:])]) for line in lines if line[:1] == ["SECONDS"]]
    assert len(seconds) == nprocs
    return 1e3 * np.max(seconds, axis=0)


def main() -> None:
    """Prints medians and ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nprocs", type=int, default=1)
    parser.add_argument("--resume", help="for the processes that this one starts")
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    if args.resume:
        return resume(args.resume, args.directory, args.layers)
    directory = Path(tempfile.mkdtemp(prefix="restore-", dir=".")).absolute()
    try:
        save(directory, args.layers)
        ways = [*BY_HAND, "expbase"]
        rounds = [
            {way: measured(way, directory, args.layers, args.nprocs) for way in ways}
            for _ in range(args.rounds)
        ]
    finally:
        shutil.rmtree(directory)
    megabytes = args.layers * WIDTH * (WIDTH + 1) * 4 * 3 / 1e6
    print(f"{megabytes:.0f} MB, {args.nprocs} processes, medians of {args.rounds} rounds")
    for way in ways:
        times = np.array([each[way] for each in rounds])
        (wall, cpu), best = np.median(times, axis=0), times[:, 0].min()
        print(f"{way + ':':15} {wall:6.0f} ms ({cpu:.0f}), {best:.0f} at best")
    for way, allowed in (("read and copy", "(allowed: 1.3)"), ("the least", "")):
        wall, cpu = np.median([each["expbase"] / each[way] for each in rounds], axis=0)
        print(f"expbase / {way + ':':15} {wall:.2f} ({cpu:.2f}) {allowed}")


if __name__ == "__main__":
    main()
