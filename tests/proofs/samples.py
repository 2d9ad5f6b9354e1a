"""Proves that each sample of an epoch is seen exactly once, whatever is changed in its middle.

Batch size, number of ranks, accumulation and drop_last are changed
at random positions of an epoch, once or several times: all ranks stop after an update, others
continue from the checkpointed place. Then the same with real runs of one process and two.

    python tests/proofs/samples.py [--count 20] [--runs 2] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle.io import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
)

from expbase import Config, ExperimentBase, main  # noqa: E402
from expbase.data.loaders import Shard, adapt_loader  # noqa: E402
from expbase.data.position import DataPosition  # noqa: E402

KINDS = ("in order", "shuffled", "own sampler", "own batches", "stream")


class Numbers(Dataset):
    """The sample is its index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index], "float32")

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset):
    """The same, without indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.array([index], "float32") for index in range(self.size))


class Backwards:
    """A sampler of a user's own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class Growing:
    """A batch sampler of a user's own, with batches of many sizes."""

    def __init__(self, size: int, step: int) -> None:
        ends = [0, *np.arange(1, size, step).cumsum().tolist()]
        ends = [end for end in ends if end < size] + [size]
        self.batches = [list(range(i, k)) for i, k in itertools.pairwise(ends)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class Setting:
    """How one start reads the data."""

    kind: str
    samples: int
    batch_size: int
    ranks: int
    accumulation: int
    drop_last: bool

    def loader(self) -> DataLoader:
        """A user's loader, the same on each rank."""
        data, size, drop_last = Numbers(self.samples), self.batch_size, self.drop_last
        sampler: Any
        if self.kind == "stream":
            return DataLoader(Stream(self.samples), batch_size=size)
        if self.kind == "own sampler":
            own = Backwards(self.samples)
            sampler = BatchSampler(sampler=own, batch_size=size, drop_last=drop_last)
        elif self.kind == "own batches":
            sampler = Growing(self.samples, size)
        else:
            shuffle = self.kind == "shuffled"
            sampler = BatchSampler(data, None, shuffle, size, drop_last)
        return DataLoader(data, batch_sampler=sampler)

    def changed(self, choose: random.Random) -> Setting:
        """Another one that can continue it."""
        other = drawn(choose, self.kind)
        if self.kind == "own batches":
            return Setting(self.kind, self.samples, self.batch_size, other.ranks, 1, False)
        return Setting(self.kind, self.samples, *list(vars(other).values())[2:])


def drawn(choose: random.Random, kind: str) -> Setting:
    """A random setting of a kind."""
    ranks = 1 if kind == "stream" else choose.randint(1, 4)
    drop_last = kind != "stream" and choose.random() < 0.3
    sizes = choose.randint(40, 120), choose.randint(1, 9)
    return Setting(kind, *sizes, ranks, choose.randint(1, 3), drop_last)


def start(setting: Setting, state: dict[str, Any] | None, seed: int) -> list[DataPosition]:
    """The ranks' places in the data, at the start of an epoch or where another start was."""
    iterators = []
    for rank in range(setting.ranks):
        iterator = DataPosition()
        shard = Shard(seed, rank, setting.ranks)
        iterator.attach(adapt_loader(setting.loader(), "self.train_loader", shard))
        if state is None:
            iterator.open(2)
        else:
            assert iterator.problems(state) == []
            iterator.load_state_dict(state)
        iterators.append(iterator)
    return iterators


def read(iterators: list[DataPosition], seen: Counter[int]) -> None:
    """One round: a batch of each rank, without those that only fill it up."""
    before, positions = iterators[0].state_dict()["position"], set()
    for iterator in iterators:
        batch = iterator.read()
        position, indices, *_ = iterator.batches.taken
        assert indices is None or batch.reshape([-1]).tolist() == indices
        sampler = iterator.adapter.loader.batch_sampler
        assert not getattr(sampler, "drop_last", False) or len(batch) == sampler.batch_size
        if position >= before and position not in positions:
            seen.update(int(number) for number in batch.reshape([-1]).tolist())
        positions.add(position)


def epoch(choose: random.Random) -> tuple[list[str], str]:
    """Reads an epoch with changes in it; what is wrong with it, and how it was."""
    setting, seen = drawn(choose, choose.choice(KINDS)), Counter[int]()
    story, seed = [str(setting)], choose.randint(0, 99)
    state = None
    for _ in range(choose.randint(1, 3) + 1):
        iterators = start(setting, state, seed)
        updates = choose.randint(0, 8)
        for _ in range(updates * setting.accumulation):
            if not iterators[0].needs_epoch:
                read(iterators, seen)
        assert len({iterator.needs_epoch for iterator in iterators}) == 1
        state = json.loads(json.dumps(iterators[0].state_dict()))
        if iterators[0].needs_epoch:
            break
        setting = setting.changed(choose)
        story.append(f"after {sum(seen.values())} samples: {setting}")
    else:
        iterators = start(setting, state, seed)
        while not iterators[0].needs_epoch:
            read(iterators, seen)
    missing = set(range(setting.samples)) - seen.keys()
    twice = {number for number, count in seen.items() if count > 1}
    batches = iterators[0].batch_in_epoch, iterators[0].adapter.batches_per_epoch
    wrong = []
    # With drop_last paddle leaves out what is not a full batch.
    if len(missing) >= (setting.batch_size if setting.drop_last else 1):
        wrong.append(f"{len(missing)} samples were never seen: {sorted(missing)[:9]}")
    if twice:
        wrong.append(f"{len(twice)} samples were seen twice: {sorted(twice)[:9]}")
    is_longer = sum(seen.values()) > setting.samples  # samples were had that are no more there
    if batches[1] is not None and batches[0] > batches[1] + 1 and not is_longer:
        wrong.append(f"batch {batches[0]} of {batches[1]}")
    return wrong, "\n  ".join(story)


def prove(count: int, seed: int) -> int:
    """Reads so many epochs; returns in how many each sample was seen exactly once."""
    exact = 0
    for number in range(count):
        wrong, story = epoch(random.Random(f"{seed}/{number}"))
        exact += not wrong
        for text in wrong:
            print(f"epoch {number}: {text}\n  {story}", flush=True)
    return exact


# --- real runs -----------------------------------------------------------------------------------


class Counting(ExperimentBase):
    """Writes down which samples each rank reads in which epoch."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"samples": 60, "batch_size": 4, "workers": 0})
        return config

    def setup_dataloader(self) -> None:
        data = self.config.data
        options = {"batch_size": data.batch_size, "num_workers": data.workers}
        self.train_loader = DataLoader(Numbers(data.samples), shuffle=True, **options)

    def setup_model(self) -> None:
        net = paddle.nn.Linear(1, 1)
        self.model = self.data_parallel(net)
        self.optimizer = paddle.optimizer.SGD(1e-6, parameters=net.parameters())

    def train_batch(self) -> None:
        for batch in self.micro_batches():
            position, indices, *_ = self._ExperimentBase__run.data.batches.taken
            with (self.output_dir / f"seen_{self.rank}").open("a") as file:
                file.write(json.dumps([self.epoch, position, indices]) + "\n")
            loss = self.model(batch).mean()
            self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self) -> None:
        return None


def run(choose: random.Random, folder: Path) -> list[str]:
    """A run of several starts in one epoch, each with other sizes; what is wrong with it."""
    iteration, samples = 0, choose.randint(60, 90)
    for number in range(4):
        nprocs = choose.randint(1, 2)
        steps = choose.randint(1, 3)
        iteration += steps
        words = ["--output", str(folder), "--device", "cpu", "--nprocs", str(nprocs), "--force"]
        words += [f"data.samples={samples}", f"data.batch_size={choose.randint(1, 5)}"]
        words += [f"data.workers={2 * (number % 2)}", "training.valid_interval=0"]
        words += [f"training.accumulation_steps={choose.randint(1, 2)}"]
        # The last start ends the epoch.
        limits = (iteration, 0) if number < 3 else (0, 1)
        words += [f"training.max_iteration={limits[0]}"]
        words += [f"training.max_epoch={limits[1]}"]
        result = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "start", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if result.returncode:
            return [f"start {number} failed: {' '.join(words)}\n{result.stderr[-3000:]}"]
    files = sorted(folder.glob("seen_*"))  # a round is filled after rank 0 had its samples
    lines = [line for path in files for line in path.read_text().splitlines()]
    seen, positions = Counter[int](), set()
    for epoch_number, position, indices in map(json.loads, lines):
        if epoch_number == 1 and position not in positions:  # else it filled a round
            positions.add(position)
            seen.update(indices)
    missing = set(range(samples)) - seen.keys()
    twice = [number for number, count in seen.items() if count > 1]
    wrong = [f"never seen: {sorted(missing)}"] if missing else []
    return wrong + ([f"seen twice: {sorted(twice)}"] if twice else [])


def prove_runs(count: int, seed: int) -> int:
    """Makes so many runs; returns in how many each sample of the epoch was seen exactly once."""
    exact = 0
    for number in range(count):
        folder = Path(tempfile.mkdtemp(prefix="samples-"))
        wrong = run(random.Random(f"{seed}/run/{number}"), folder / "run")
        exact += not wrong
        for text in wrong:
            print(f"run {number}: {text} ({folder})", flush=True)
        if not wrong:
            shutil.rmtree(folder)
    return exact


def proof() -> None:
    """Prints in how many epochs each sample was seen exactly once; exit code 1 if not in all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="epochs with changes")
    parser.add_argument("--runs", type=int, default=2, help="runs of four starts each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    exact = prove(args.count, args.seed)
    print(f"{exact} of {args.count} epochs: each sample exactly once", flush=True)
    exact_runs = prove_runs(args.runs, args.seed)
    print(f"{exact_runs} of {args.runs} runs: each sample exactly once")
    sys.exit((exact, exact_runs) != (args.count, args.runs) or not exact + exact_runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        del sys.argv[1]
        main(Counting)
    else:
        proof()
