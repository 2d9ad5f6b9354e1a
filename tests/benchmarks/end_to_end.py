"""What an experiment costs in all: its loop, against the same training written by hand.

    python tests/benchmarks/end_to_end.py [--experiments digits] [--workers 0] [--seconds 8]

On experiments/digits, charlm and multitask, with their configs, without workers and with two. By
hand is a loop over paddle.io.DataLoader itself: the same data, model, step and optimizer, a line
with loss and learning rate for a file and for stderr at the same interval, the same validation,
`paddle.save` of model and optimizer. Both live in one process and take turns (A B B A), so that
they meet the same machine:

- "iterations": slices with lines, but without validations and saves;
- "as a user has it": slices of one validation interval, with a validation and a save in the middle,
  so that what is written in the background is paid for within the slice;
- with digits, "paddle.Model.fit": that in place of the loop by hand, in slices of whole epochs.

A loader that waits has read ahead. So before each slice one waits until nothing moves, and the
first iterations of a slice are not measured, more than are ever read ahead. Printed are the medians
of ms per iteration, of the ratios of neighbouring slices, and of the ratios of the CPU time of this
process, all its threads together: what a thread reads ahead is free only while a core is idle.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.nn.functional as F  # noqa: E402
from paddle.io import DataLoader  # noqa: E402

from expbase import on  # noqa: E402
from expbase.base import rng  # noqa: E402

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
UNMEASURED = 8  # iterations at the start of a slice; a DataLoader reads up to 6 ahead
NEVER = 10**6  # iterations
# Iterations of a slice: whole epochs of digits, where each starts its workers anew; 0.5 to 2 s.
SLICES = {"digits": 35, "charlm": 20, "multitask": 20}


# --- by hand -------------------------------------------------------------------------------


class ByHand:
    """The loop of somebody who uses no template; `experiment` only gives data, model and valid."""

    experiment: type

    def __init__(self, config: Any, directory: Path) -> None:
        self.config = config
        self.directory = directory
        self.iteration = 0
        self.file = (directory / "log.txt").open("w")
        self.experiment.setup_dataloader(self)
        self.experiment.setup_model(self)
        self.batches = self.endless()

    def train_batch(self) -> Any:
        """One update; returns the loss."""
        raise NotImplementedError

    def run(self, iterations: int) -> None:
        """So many iterations, and what is due at their ends."""
        training = self.config.training
        for _ in range(iterations):
            self.iteration += 1
            loss = self.train_batch()
            if self.iteration % training.log_interval == 0:
                self.write_line(loss)
            if self.iteration % training.save_interval == 0:
                paddle.save(self.model.state_dict(), str(self.directory / "model.pdparams"))
                paddle.save(self.optimizer.state_dict(), str(self.directory / "model.pdopt"))
            if self.iteration % training.valid_interval == 0:
                self.model.eval()
                with paddle.no_grad():
                    print(self.experiment.valid(self), file=self.file, flush=True)
                self.model.train()

    def endless(self) -> Iterator[Any]:
        """The batches of epoch after epoch."""
        while True:
            iterator = iter(self.train_loader)
            try:
                yield from iterator
            except GeneratorExit:  # else paddle complains of workers that end
                if self.train_loader.num_workers:
                    iterator._try_shutdown_all(1)
                raise

    def write_line(self, loss: Any) -> None:
        """Loss and learning rate."""
        line = f"[{self.iteration}] loss={loss.item():.6g} lr={self.optimizer.get_lr():.6g}"
        print(line, file=self.file, flush=True)
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the workers."""
        self.batches.close()
        self.file.close()

    # What an experiment's setup and valid() use.

    @property
    def total_iterations(self) -> int:
        return self.config.training.max_iteration

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        return layer

    def valid_batches(self) -> Iterator[Any]:
        return iter(self.valid_loader)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def average(self, metrics: dict[str, Any], weight: float) -> dict[str, Any]:
        return metrics


class DigitsByHand(ByHand):
    def build_net(self) -> Any:
        return self.experiment.build_net(self)

    def compute_metrics(self, *arrays: Any) -> Any:
        return self.experiment.compute_metrics(self, *arrays)

    def train_batch(self) -> Any:
        images, labels = next(self.batches)
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return loss


class CharLMByHand(ByHand):
    def train_batch(self) -> Any:
        count = self.config.training.shares or self.config.training.accumulation_steps
        for _ in range(count):
            pairs, following = next(self.batches)
            loss = F.cross_entropy(self.model(pairs)[0], following)
            (loss / count).backward()
        norm = self.config.clipping.max_norm
        paddle.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)
        self.scheduler.step()
        return loss


class StatementsByHand(ByHand):
    def setup_tasks(self, tasks: Any) -> None:
        self.heads = [task.head for task in tasks.values()]
        # The same draws as in MultiHead, because one head costs more than the other.
        self.random = np.random.default_rng(rng.derive(self.config.training.seed, rng.SETUP, 2))

    def unwrap(self, layer: Any) -> Any:
        return layer

    def train_batch(self) -> Any:
        head = self.heads[self.random.choice(len(self.heads), p=[0.5, 0.5])]
        loss = self.model(next(self.batches), head)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)
        self.scheduler.step()
        return loss


BY_HAND = {
    "digits": ("Digits", DigitsByHand),
    "charlm": ("CharLM", CharLMByHand),
    "multitask": ("Statements", StatementsByHand),
}


class ByFit:
    """paddle.Model.fit on what `ByHand` has made; an epoch is the least that it can do."""

    def __init__(self, by_hand: Any) -> None:
        self.model = paddle.Model(by_hand.model)
        self.model.prepare(by_hand.optimizer, paddle.nn.CrossEntropyLoss())
        self.loader, self.log_interval = by_hand.train_loader, by_hand.config.training.log_interval

    def run(self, iterations: int) -> None:
        epochs = max(iterations // len(self.loader), 1)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            self.model.fit(self.loader, epochs=epochs, log_freq=self.log_interval, verbose=2)


# --- an experiment ---------------------------------------------------------------------------


def load_experiment(name: str) -> Any:
    """The class in its train.py."""
    path = EXPERIMENTS / name / "train.py"
    sys.path.insert(0, str(path.parent))
    names = runpy.run_path(str(path), run_name=f"train_{name}")
    sys.path.pop(0)
    return names[BY_HAND[name][0]]


def with_workers(cls: Any, num_workers: int) -> Any:
    """The experiment, with that many workers for its training data."""

    class WithWorkers(cls):
        def setup_dataloader(self) -> None:
            cls.setup_dataloader(self)
            loader = self.train_loader
            data = loader.dataset
            if num_workers and isinstance(
                data, paddle.io.TensorDataset
            ):  # which no worker can send
                data = [tuple(tensor.numpy() for tensor in sample) for sample in data]
            size = loader.batch_sampler.batch_size
            self.train_loader = DataLoader(
                data, batch_size=size, shuffle=True, drop_last=True, num_workers=num_workers
            )

        @on("on_train_batch_end", every=100)  # charlm's writes a page, which is its own idea
        def write_text(self) -> None:
            pass

    if not hasattr(cls, "write_text"):
        WithWorkers.write_text = None
    return WithWorkers


class InExperiment:
    """The experiment's loop, driven by hand."""

    def __init__(self, cls: Any, config: Any, directory: Path) -> None:
        args = argparse.Namespace(output=str(directory), device="cpu")
        self.exp = cls(config, args)
        self.exp.setup()
        self.close = self.exp.close

    def run(self, iterations: int) -> None:
        exp = self.exp
        for _ in range(iterations):
            exp.going_on()
            exp.train_batch()
            exp.end_iteration()


def config_of(cls: Any, name: str, **training: Any) -> Any:
    """As its file has it, but without an end."""
    config = cls.default_config()
    config.merge_from_file(str(EXPERIMENTS / name / "config.yaml"))
    config.training.update({"max_iteration": NEVER, **training})
    if "early_stopping" in config:
        config.early_stopping.patience = 0
    return config


# --- measuring -------------------------------------------------------------------------------


def settle() -> None:
    """Waits until nothing moves: what is read ahead is there, what was saved is written."""
    gc.collect()
    for _ in range(10):
        began = time.process_time()
        time.sleep(0.02)
        if time.process_time() - began < 0.002:
            break


def measure(side: Any, unmeasured: int, iterations: int) -> tuple[float, float]:
    """Seconds and CPU seconds of this process, per iteration."""
    settle()
    side.run(unmeasured)
    began, cpu_began = time.perf_counter(), time.process_time()
    side.run(iterations)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    return seconds / iterations, cpu / iterations


def compare(bare: Any, ours: Any, unmeasured: int, iterations: int, seconds: float) -> str:
    """The medians of slices that take turns, A B B A, for so long; twice at least."""
    pairs: list[dict[Any, tuple[float, float]]] = []
    until = time.perf_counter() + seconds
    while len(pairs) < 2 or time.perf_counter() < until:
        sides = (bare, ours) if len(pairs) % 2 == 0 else (ours, bare)
        pairs.append({side: measure(side, unmeasured, iterations) for side in sides})
    of_bare, of_ours = (statistics.median(pair[s][0] for pair in pairs) * 1e3 for s in (bare, ours))
    wall, cpu = (statistics.median(pair[ours][i] / pair[bare][i] for pair in pairs) for i in (0, 1))
    text = f"{of_bare:8.3f} {of_ours:8.3f} ms   {wall:.3f} (allowed: 1.01)   CPU {cpu:.3f}"
    return f"{text}   {len(pairs):3} pairs"


def both(
    stack: contextlib.ExitStack, name: str, num_workers: int, **training: Any
) -> tuple[Any, Any]:
    """By hand, and the experiment; the stack closes them."""
    base = load_experiment(name)
    cls = with_workers(base, num_workers)
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    ours = InExperiment(cls, config_of(base, name, **training), directory / "ours")
    stack.callback(ours.close)
    config = config_of(base, name, **training)
    for interval in ("valid_interval", "save_interval"):
        config.training[interval] = config.training[interval] or NEVER
    bare = type("Twin", (BY_HAND[name][1],), {"experiment": cls})(config, directory)
    stack.callback(bare.close)
    return bare, ours


def cell(name: str, num_workers: int, seconds: float) -> Iterator[str]:
    """The lines of one experiment with so many workers."""
    what, length = f"{name:9} {num_workers} workers", SLICES[name]
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stderr(nothing))
        alone = {"valid_interval": 0, "save_interval": 0, "monitor": ""}
        bare, ours = both(stack, name, num_workers, **alone)
        yield f"{what}  iterations        {compare(bare, ours, UNMEASURED, length, seconds)}"
        if name == "digits":
            fit = ByFit(bare)
            yield f"{what}  paddle.Model.fit  {compare(fit, ours, 0, length, seconds)}"
        bare, ours = both(stack, name, num_workers)
        interval = ours.exp.config.training.valid_interval
        for side in (bare, ours):
            side.run(interval // 2)
        yield f"{what}  as a user has it  {compare(bare, ours, 0, interval, seconds)}"


def main() -> None:
    """Prints one line for each comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiments", nargs="+", default=[*BY_HAND], choices=[*BY_HAND])
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--seconds", type=float, default=8, help="of each comparison, at least")
    args = parser.parse_args()
    print(f"{'':20}  {'':16}  by hand     ours      ours / by hand")
    for name in args.experiments:
        for num_workers in args.workers:
            for line in cell(name, num_workers, args.seconds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
