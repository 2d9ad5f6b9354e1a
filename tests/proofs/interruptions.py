"""Proves that what follows a checkpoint in its iteration survives kill -9 and SIGTERM.

A run of the net of net.py, with slow validations and slow ends of epochs, is killed and stopped in
turn in the middle of them, and of the saves beside them, on one process and on two, over and over.
While it validates other weights stand in the model, as averages do, and most validations come
without a checkpoint. After SIGTERM no iteration may be made again, after kill -9 those since the
checkpoint before; two seconds after SIGTERM all ranks must have said that they stopped; and each
run must end with the bits, curves and scores of one that nobody interrupted.

    python tests/proofs/interruptions.py [--count 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from compare import differences, last_checkpoint
from net import Net
from watched import Watched

from expbase import main as run_experiment
from expbase.checkpoint import layout, storage
from expbase.checkpoint.best import FILE
from expbase.extras.all_events import AllEvents

PLACES = ("validation", "epoch end")
ITERATIONS, STOP_SECONDS, LONG_SECONDS = 44, 2.0, 120.0
SAVED = 3  # save_interval
OF_A_RUN = 5  # interruptions; then it may finish


class Slow(AllEvents, Net):
    """Says where it is, and takes its time there; both places change the state."""

    def be(self, place: str) -> None:
        """Notes the place and the iteration, for the one who interrupts."""
        if self.rank == 0:
            temporary = self.output_dir / ".place"
            temporary.write_text(json.dumps([place, self.iteration]))
            temporary.replace(self.output_dir / "place")

    def valid_batches(self, loader: Any = None) -> Any:
        self.be("validation")
        for batch in super().valid_batches(loader):
            yield batch
            time.sleep(0.1)

    def on_evaluate_begin(self) -> None:
        self.trained = [weight.clone() for weight in self.model.parameters()]
        for weight in self.model.parameters():
            weight.set_value(weight / 2)

    def on_evaluate_end(self, results: Any) -> None:
        for weight, trained in zip(self.model.parameters(), self.trained, strict=True):
            weight.set_value(trained)
        del self.trained
        self.smoothed += results["accuracy"] / 100
        self.be("training")

    def on_train_epoch_end(self) -> None:
        self.be("epoch end")
        self.smoothed += float(np.random.rand()) / 100
        time.sleep(0.4)
        self.be("training")


class Run:
    """One output directory, interrupted a few times and then finished."""

    def __init__(self, output: Path, nprocs: int) -> None:
        self.output = output
        training = {"max_iteration": ITERATIONS, "valid_interval": 4, "save_interval": SAVED}
        training |= {"log_interval": 2, "valid_every_epoch": 1}
        command = [sys.executable, __file__, "train", "--output", str(output), "--device", "cpu"]
        command += ["--nprocs", str(nprocs), f"data.samples={30 * nprocs}"]
        command += [f"training.{key}={value}" for key, value in training.items()]
        command += ["training.monitor=accuracy", "training.keep_last=2"]
        self.watched = Watched(command, output.with_suffix(".txt"))
        self.nprocs = nprocs
        self.longest = [0.0, 0.0]  # seconds from SIGTERM to all ranks' last lines, and to the end

    def stops(self) -> int:
        """How often the ranks together have said that they stopped."""
        logs = [self.output / f"worker_{rank}.log" for rank in range(self.nprocs)]
        return sum(log.read_text().count("STOPPED by SIGTERM") for log in logs if log.exists())

    def place(self) -> tuple[str, int]:
        """Where it is, and in which iteration."""
        try:
            name, iteration = json.loads((self.output / "place").read_text())
        except FileNotFoundError:
            return "", 0
        return name, iteration

    def interrupt(self, place: str, how: int, source: random.Random) -> list[str]:
        """Starts it, and interrupts it in a place of this kind; returns what was wrong."""
        begun = self.place()
        with self.watched.started() as process:
            self._wait(lambda: self.place()[0] == place and self.place() != begun, process)
            time.sleep(source.uniform(0, 0.35))
            iteration, stops = self.place()[1], self.stops() + self.nprocs
            process.send_signal(how)
            began = time.monotonic()
            self._wait(lambda: self.stops() == stops, process)
            seconds = time.monotonic() - began
            process.wait(timeout=LONG_SECONDS)
            times = (seconds, time.monotonic() - began) if how == signal.SIGTERM else (0.0, 0.0)
            self.longest = [*map(max, self.longest, times)]
            self.watched.seconds_until_gone(5)
        late = [f"the stop took {times[0]:.1f} s"] if times[0] > STOP_SECONDS else []
        return late + self._lost(iteration, how)

    def _lost(self, iteration: int, how: int) -> list[str]:
        # The last one that was due may not have been on the disk.
        again = 0 if how == signal.SIGTERM else 2 * SAVED - 1
        newest = layout.iteration_of(last_checkpoint(self.output)) or 0
        storage.verify(last_checkpoint(self.output))
        is_there = newest >= iteration - again
        return [] if is_there else [f"{iteration} interrupted, {newest} is there"]

    def finish(self) -> list[str]:
        """Runs it to its end; returns what was wrong."""
        with self.watched.started() as process:
            code = process.wait(timeout=LONG_SECONDS)
        return [f"ended with code {code}"] if code else []

    def _wait(self, condition: Any, process: Any) -> None:
        deadline = time.monotonic() + LONG_SECONDS
        while not condition() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)

    def validations(self) -> list[dict[str, Any]]:
        """The lines of validations.jsonl, without their times."""
        lines = map(json.loads, (self.output / FILE).read_text().splitlines())
        return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def prove(directory: Path, nprocs: int, count: int, seed: int) -> int:
    """Interrupts runs so many times; returns how many interruptions went well."""
    source, good, done = random.Random(seed), 0, 0
    reference = Run(directory / f"straight-{nprocs}", nprocs)
    assert not reference.finish()
    for number in range(-(-count // OF_A_RUN)):
        run = Run(directory / f"interrupted-{nprocs}-{number}", nprocs)
        wrong: list[str] = []
        times = min(OF_A_RUN, count - done)
        for time_ in range(times):
            how = (signal.SIGKILL, signal.SIGTERM)[(number + time_) % 2]
            wrong += run.interrupt(source.choice(PLACES), how, source)
        wrong += run.finish() or differences(run.output, reference.output)
        if run.validations() != reference.validations():
            wrong.append("other validations")
        done, good = done + times, good + times * (not wrong)
        result = "; ".join(map(str, wrong)) or "the same bits, curves and scores"
        stop = "to the lines {:.1f} s, to the end {:.1f} s".format(*run.longest)
        print(f"{nprocs} processes, {times} interruptions, {stop}: {result}", flush=True)
    return good


def main() -> None:
    """Prints how many interruptions went well; exit code 1 if not all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="interruptions-"))
    half = args.count // 2
    good = prove(directory, 1, args.count - half, args.seed)
    good += prove(directory, 2, half, args.seed + 1)
    if good == args.count:
        shutil.rmtree(directory)
    print(f"{good} of {args.count} interruptions went well")
    sys.exit(good != args.count or not good)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        run_experiment(Slow, argv=sys.argv[2:])
    else:
        main()
