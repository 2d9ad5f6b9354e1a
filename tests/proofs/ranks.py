"""Proves that four and eight ranks on one machine are as exact as two.

For each number of ranks: the same command twice gives the same bits; so does one that is killed
with `kill -9`, the process that was started or a rank in turns; so does one that is stopped, by
SIGTERM and by a file STOP in turns, each time at one iteration on all ranks; every batch is dealt
out as docs/data.md says: each sample of an epoch once, but for what fills the last round, each
sample of a validation once, and half as many ranks with twice the batch see the same order, round
by round.

    python tests/proofs/ranks.py [--ranks 4 8] [--kills 3] [--stops 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

from compare import differences, ledger, logged  # noqa: E402
from net import Augmented, Net  # noqa: E402
from paddle.io import DataLoader  # noqa: E402
from players import LONG_SECONDS, children, shown, wait_for  # noqa: E402
from watched import Watched  # noqa: E402

from expbase import Config, main  # noqa: E402
from expbase.checkpoint import layout, storage  # noqa: E402
from expbase.extras.all_events import AllEvents  # noqa: E402

SAMPLES, VALID_SAMPLES = 154, 50
ITERATIONS = 90
GONE_SECONDS = 10.0


class Seen(AllEvents, Net):
    """Writes down which samples each rank takes, in training and in validations."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data.update(samples=SAMPLES, batch_size=4)
        config.training.update(max_iteration=ITERATIONS, save_interval=10, valid_interval=30)
        config.training.log_interval = 5
        return config

    def setup_dataloader(self) -> None:
        size = self.config.data.batch_size
        self.train_loader = DataLoader(Augmented(SAMPLES), batch_size=size, shuffle=True)
        self.valid_loader = DataLoader(Augmented(VALID_SAMPLES), batch_size=size)

    def on_batch_read(self, batch: Any, indices: Any) -> None:
        self.write_down("train", indices)

    def on_valid_batch_end(self, batch: Any, indices: Any) -> None:
        self.write_down("valid", indices)

    def write_down(self, phase: str, indices: Any) -> None:
        """One line for each batch."""
        line = [phase, self.iteration, self.epoch, [int(index) for index in indices]]
        with (self.output_dir / f"seen_{self.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Run:
    """One output directory, and the processes that work in it."""

    def __init__(self, output: Path, ranks: int, *words: str) -> None:
        self.output, self.ranks = output, ranks
        command = [sys.executable, __file__, "start", "--output", str(output), "--device", "cpu"]
        command += ["--nprocs", str(ranks), *words]
        self.watched = Watched(command, output.with_suffix(".txt"))

    @contextmanager
    def started(self) -> Iterator[Any]:
        """The process that starts the ranks; nothing of it is left afterwards."""
        with self.watched.started() as process:
            yield process
            gone = self.watched.seconds_until_gone(GONE_SECONDS)
            assert gone <= GONE_SECONDS, f"a process is there {gone:.0f} s later"

    def finish(self) -> None:
        """Lets it come to its end."""
        with self.started() as process:
            code = process.wait(LONG_SECONDS)
        assert code == 0, (
            f"ended with {code}:\n{self.output.with_suffix('.txt').read_text()[-2000:]}"
        )

    def wait_until_it_trains(self, starts: int) -> None:
        """Until the newest of so many starts has logged a line."""

        def trains() -> bool:
            begun = ledger(self.output, "start")
            try:
                return len(begun) >= starts and (
                    logged(self.output)[-1]["iteration"] > begun[-1]["iteration"]
                )
            except (FileNotFoundError, IndexError, ValueError):
                return False

        wait_for(trains, f"{self.output}: training")

    def stopped_at(self) -> list[int]:
        """The iteration at which each rank said last that it stopped."""
        logs = [(self.output / f"worker_{rank}.log").read_text() for rank in range(self.ranks)]
        found = [re.findall(r"\[(\d+)\] STOPPED by", log) for log in logs]
        return [int(of_rank[-1]) if of_rank else -1 for of_rank in found]

    def seen(self, phase: str) -> dict[int, list[tuple[int, list[list[int]]]]]:
        """By iteration: of each rank the epoch and the batches that it took."""
        table: dict[int, list[Any]] = {}
        for rank in range(self.ranks):
            for line in (self.output / f"seen_{rank}").read_text().splitlines():
                of_phase, iteration, epoch, indices = json.loads(line)
                if of_phase == phase:
                    row = table.setdefault(iteration, [(epoch, []) for _ in range(self.ranks)])
                    row[rank] = (epoch, [*row[rank][1], indices])
        return table


def killed(run: Run, kills: int, rng: random.Random) -> None:
    """Kills the starting process and a rank in turns, then lets the run finish."""
    for number in range(1, kills + 1):
        with run.started() as process:
            run.wait_until_it_trains(number)
            time.sleep(rng.uniform(0, 1))
            ranks = [pid for pid in children(process.pid) if is_rank(pid)]
            os.kill(process.pid if number % 2 else rng.choice(ranks), signal.SIGKILL)
            process.wait(LONG_SECONDS)
    run.finish()


def is_rank(pid: int) -> bool:
    """Whether it is not multiprocessing's resource tracker."""
    return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def stopped(run: Run, stops: int, rng: random.Random) -> None:
    """Stops the run by a signal and by a file in turns; all ranks must stop at one iteration."""
    for number in range(1, stops + 1):
        with run.started() as process:
            run.wait_until_it_trains(number)
            time.sleep(rng.uniform(0, 0.5))
            if number % 2:
                process.terminate()
            else:
                (run.output / "STOP").touch()
            code = shown(process.wait(LONG_SECONDS))
        assert code == (143 if number % 2 else 0), f"stop {number}: code {code}"
        (at,) = {*run.stopped_at()}
        newest = layout.listed(run.output / layout.FOLDER)[-1]
        storage.verify(newest)
        assert layout.iteration_of(newest) == at, f"stopped at {at}, newest {newest.name}"
    run.finish()


def epochs(run: Run) -> dict[int, list[list[list[int]]]]:
    """By epoch: its rounds, each with the batch of every rank."""
    found: dict[int, list[list[list[int]]]] = {}
    for _, row in sorted(run.seen("train").items()):
        (epoch,) = {epoch for epoch, _ in row}
        assert all(len(batches) == 1 for _, batches in row)
        found.setdefault(epoch, []).append([batches[0] for _, batches in row])
    return found


def dealt_out(run: Run, half: Run) -> None:
    """Each sample once per epoch but for what fills it up; once in each validation."""
    dealt, by_half = epochs(run), epochs(half)
    batches = math.ceil(SAMPLES / 4)
    rounds = math.ceil(batches / run.ranks)
    for epoch, of_epoch in dealt.items():
        flat = [batch for round_ in of_epoch for batch in round_]
        if len(of_epoch) == rounds:  # else the run ended in it
            assert Counter(chain(*flat[:batches])) == Counter(range(SAMPLES)), f"epoch {epoch}"
            assert flat[batches:] == flat[: len(flat) - batches], "what fills the last round"
        pairs = zip(of_epoch, by_half[epoch], strict=False)
        for number, (ours, theirs) in enumerate(pairs):
            if number < rounds - 1:  # the last one is filled with batches of another size
                assert [*chain(*ours)] == [*chain(*theirs)], f"epoch {epoch}, round {number}"
    assert len(dealt) > 2
    for iteration, row in run.seen("valid").items():
        counted = Counter(index for _, batches in row for batch in batches for index in batch)
        assert counted == Counter(range(VALID_SAMPLES)), f"validation at {iteration}"


def prove(folder: Path, ranks: int, kills: int, stops: int, seed: int) -> int:
    """Makes the four proofs for a number of ranks; returns how many held."""
    rng = random.Random(f"{seed}/{ranks}")
    whole, half = (
        Run(folder / "whole", ranks),
        Run(folder / "half", ranks // 2, "data.batch_size=8"),
    )
    whole.finish()
    proofs = {
        "the same command twice": lambda run: run.finish(),
        f"{kills} kills": lambda run: killed(run, kills, rng),
        f"{stops} stops": lambda run: stopped(run, stops, rng),
    }
    right = 0
    for number, (name, disturb) in enumerate(proofs.items()):
        run = Run(folder / f"run-{number}", ranks)
        right += tried(f"{ranks} ranks, {name}", partial(disturb, run), run, whole)
    half.finish()
    name = f"{ranks} ranks, dealt out as by {ranks // 2} with twice the batch"
    return right + tried(name, partial(dealt_out, whole, half), whole, whole)


def tried(name: str, function: Any, run: Run, whole: Run) -> bool:
    """Whether it held, and the run ended with the bits of the whole one; a line about it."""
    began, wrong = time.monotonic(), ""
    try:
        function()
        wrong = "; ".join(differences(run.output, whole.output))
    except (AssertionError, TimeoutError, ValueError) as error:
        wrong = f"{error!r} ({run.output})"
    text = f"WRONG: {wrong}" if wrong else "right"
    print(f"{name}: {text}, {time.monotonic() - began:.0f} s", flush=True)
    return not wrong


def proof() -> None:
    """Prints how many proofs held; exit code 1 if not all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, right = Path(tempfile.mkdtemp(prefix="ranks-")), 0
    for ranks in args.ranks:
        (folder / str(ranks)).mkdir()
        right += prove(folder / str(ranks), ranks, args.kills, args.stops, args.seed)
    number = 4 * len(args.ranks)
    if right == number:
        shutil.rmtree(folder)
    print(f"{right} of {number} proofs held")
    sys.exit(right != number or not number)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        del sys.argv[1]
        main(Seen)
    else:
        proof()
