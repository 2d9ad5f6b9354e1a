"""Proves that a run on two ranks heals itself under --restarts, whatever happens to it.

Faults come at random to runs of the net of net.py: kill -9 of rank 0, of rank 1, of both, of a rank
during the start; SIGSTOP; a hang; an edit of the script, which must not be of the run, and a kill.
Each must be named with its rank, in the ledger's next start or
on the terminal, and nobody helps. A disk that is full for a while (where a tmpfs may be mounted)
must be named, and training goes on. Each run must end with the bits of one that nothing happened
to, and with its curves and scores unless the disk was full. Printed are also the seconds from a
fault to the next new iteration, and their ratio to a bare start; with --every the share of time
that goes into new iterations.

    python tests/proofs/faults.py [--faults 200] [--seed 0] [--kinds kill,stop] [--every 15]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from compare import differences, ledger
from net import Net
from watched import Watched

from expbase import main as run_experiment
from expbase.checkpoint import layout

OF_A_RUN = 10  # faults; then it may finish
GAP = 30  # iterations from one fault to the next
STEP_SECONDS = 0.02  # that an iteration takes at least
LONG_SECONDS = 180.0
KINDS = ("kill", "group", "start", "stop", "disk", "hang", "edit")
TRAINING = {"save_interval": 10**6, "valid_interval": 25, "log_interval": 5, "keep_last": 2}
TRAINING |= {"valid_every_epoch": 3, "monitor": "accuracy"}
HEALING = {"save_seconds": 1, "hang_seconds": 2, "hang_action": "end"}


class Patient(Net):
    """Notes each iteration with its time, outside of its output directory, and hangs on request."""

    def train_batch(self) -> None:
        request = self.notes / f"hang-{self.rank}"
        if request.exists():
            request.unlink()
            time.sleep(10 * LONG_SECONDS)
        super().train_batch()
        time.sleep(STEP_SECONDS)
        if self.rank == 0:
            with (self.notes / "beats").open("a") as file:
                file.write(f"{self.iteration} {time.time()}\n")

    @property
    def notes(self) -> Path:
        return Path(self.args.data)


class Run:
    """A run in a directory of its own, or what is mounted there."""

    def __init__(self, output: Path, iterations: int, restarts: int) -> None:
        self.output, self.notes = output, output.with_suffix(".notes")
        self.notes.mkdir()
        # The script is a copy, which may be edited.
        self.script = output.with_suffix(".code") / "faults.py"
        self.script.parent.mkdir()
        for name in ("faults.py", "net.py", "compare.py", "watched.py"):
            shutil.copy(Path(__file__).with_name(name), self.script.with_name(name))
        training = {**TRAINING, **(HEALING if restarts else {}), "max_iteration": iterations}
        command = [
            sys.executable,
            str(self.script),
            "train",
            "--output",
            str(output),
            "--device",
            "cpu",
        ]
        command += ["--nprocs", "2", "--data", str(self.notes), "--restarts", str(restarts)]
        command += [f"training.{key}={value}" for key, value in training.items()]
        self.watched = Watched([*command, "data.samples=154"], output.with_suffix(".txt"))

    def beats(self) -> list[tuple[int, float]]:
        """The iterations that were made, with their times."""
        file = self.notes / "beats"
        lines = file.read_text().splitlines() if file.exists() else []
        pairs = [line.split() for line in lines]
        return [(int(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2]

    def reached(self) -> int:
        """The greatest iteration that was made."""
        return max((iteration for iteration, _ in self.beats()), default=0)

    def reasons(self) -> list[str]:
        """Why it was started again, for each start that says so."""
        return [start["restart"] for start in ledger(self.output, "start") if start["restart"]]

    def codes(self) -> int:
        """How many different codes its starts have noted."""
        return len({json.dumps(start["sources"]) for start in ledger(self.output, "start")})

    def text(self) -> str:
        """What it has printed."""
        return self.output.with_suffix(".txt").read_text()

    def log(self) -> str:
        """The last lines of that."""
        return self.text()[-3000:]


class Ended(Exception):
    """The run ended, or nothing happened for long."""


class Driver:
    """Lets faults happen to a run that works."""

    def __init__(self, run: Run, process: subprocess.Popen[bytes], source: random.Random) -> None:
        self.run, self.process, self.source = run, process, source

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until it came true."""
        deadline = time.monotonic() + LONG_SECONDS
        while not condition():
            if self.process.poll() is not None:
                raise Ended(f"{what}: ended with code {self.process.returncode}\n{self.run.log()}")
            if time.monotonic() > deadline:
                raise Ended(f"{what}: not within {LONG_SECONDS:.0f} s\n{self.run.log()}")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """The ids of the ranks, in their order; fewer while it starts."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children()
            living = [c for c in children if c.is_running() and c.status() != "zombie"]
            return [child.pid for child in sorted(living, key=lambda child: child.pid)]
        return []

    def both(self) -> list[int]:
        """The ids of the two ranks, once they are there."""
        self.wait(lambda: len(self.ranks()) == 2, "two ranks")
        return self.ranks()

    def cause(self, kind: str) -> list[str]:
        """Lets a fault happen; returns what must be said of it."""
        rank, ids = self.source.randrange(2), self.both()
        killed = [f"rank {r} was killed by SIGKILL" for r in (0, 1)]
        if kind == "group":
            os.kill(ids[0], signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(ids[1], signal.SIGKILL)
            return killed[:1]
        if kind == "stop":
            os.kill(ids[rank], signal.SIGSTOP)
            return [f"rank {rank} did not end when another one had failed"]
        if kind == "hang":
            (self.run.notes / f"hang-{rank}").touch()
            return [f"rank {rank}: .*no progress for 2 s"]  # told by the other one
        edited = []
        if kind == "edit":
            with self.run.script.open("a") as file:
                file.write("raise SystemExit('of the next experiment')\n")
            edited = ["faults.py: edited since"]
        os.kill(ids[rank], signal.SIGKILL)
        if kind in ("kill", "edit"):
            return [killed[rank], *edited]
        self.wait(lambda: len(self.ranks()) == 2 and not {*ids} & {*self.ranks()}, "a start")
        time.sleep(self.source.uniform(0, 1))
        other, ids = self.source.randrange(2), self.both()
        os.kill(ids[other], signal.SIGKILL)
        return [killed[rank], killed[other]]

    def fill(self) -> float:
        """Fills the disk for a while; returns the seconds from its end to a new iteration.

        The run goes on, and says what it could not write.
        """
        filler, known = self.run.output / "filler", len(self.run.text())
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        told = re.compile("NO CHECKPOINT: .* free: make room|cannot be written: No space left")
        self.wait(lambda: told.search(self.run.text(), known) is not None, "a full disk")
        time.sleep(self.source.uniform(0, 2))
        filler.unlink()
        began, reached = time.time(), self.run.reached()
        self.wait(lambda: self.run.reached() > reached, "an iteration after a full disk")
        return time.time() - began

    def fault(self, kind: str, goal: int) -> float:
        """One fault at an iteration, named and healed; the seconds to the next new iteration."""
        self.wait(lambda: self.run.reached() >= goal, "training")
        if kind == "disk":
            return self.fill()
        known, written = len(self.run.reasons()), len(self.run.text())
        expected = self.cause(kind)
        began = time.time()  # of a start the second kill

        def is_said() -> bool:
            reasons = self.run.reasons()[known:]
            said = "; ".join([*reasons, self.run.text()[written:]])
            return bool(reasons) and all(re.search(text, said) for text in expected)

        self.wait(is_said, f"{kind}: a restart because of {expected}")
        restarted = ledger(self.run.output, "start")[-1]["time"]  # some went on until then
        reached = max((n for n, at in self.run.beats() if at < restarted), default=0)
        self.wait(lambda: self.run.reached() > reached, f"{kind}: a new iteration")
        seconds = next(at for n, at in self.run.beats() if n > reached) - began
        return seconds


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A tmpfs at a path in the block, if the system lets us."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)]
    is_mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def bare_start(directory: Path) -> float:
    """Seconds from the command to the first iteration, with no supervisor."""
    run = Run(Path(tempfile.mkdtemp(dir=directory)) / "bare", 1, 0)
    began = time.time()
    with run.watched.started() as process:
        process.wait(LONG_SECONDS)
    return run.beats()[0][1] - began


def finish(run: Run) -> None:
    """Runs it to its end, with nothing happening to it."""
    with run.watched.started() as process:
        assert process.wait(LONG_SECONDS) == 0, run.log()


def scores(run: Run) -> list[dict[str, Any]]:
    """The lines of validations.jsonl, without their times."""
    lines = map(json.loads, (run.output / "validations.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def kinds_of(names: str, disk: bool, source: random.Random, count: int) -> list[str]:
    """As many kinds, the same number of each as far as possible, in any order."""
    names_left = [name for name in names.split(",") if disk or name != "disk"]
    kinds = [names_left[number % len(names_left)] for number in range(count)]
    source.shuffle(kinds)
    return kinds


def prove(directory: Path, names: str, count: int, seed: int) -> list[str]:
    """Lets as many faults happen; prints how it went, and returns what was wrong."""
    source, wrong, healed = random.Random(seed), [], 0
    iterations = GAP * (OF_A_RUN + 8)  # while a disk is full, training goes on
    reference = Run(directory / "whole", iterations, 0)
    finish(reference)
    bare, seconds, done = [bare_start(directory)], {}, Counter[str]()
    while sum(done.values()) < count and not wrong:
        output = directory / f"run-{sum(done.values())}"
        with small_disk(output) as is_small:
            run = Run(output, iterations, 8)
            kinds = kinds_of(names, is_small, source, min(OF_A_RUN, count - sum(done.values())))
            with run.watched.started() as process:
                driver = Driver(run, process, source)
                try:
                    for number, kind in enumerate(kinds):
                        goal = number * GAP + source.randrange(1, GAP)
                        took = driver.fault(kind, goal)
                        if kind != "disk":  # no restart
                            seconds.setdefault(kind, []).append(took)
                        done[kind] += 1
                        healed += 1
                    wrong += [f"code {process.returncode}"] if process.wait(LONG_SECONDS) else []
                    different = differences(output, reference.output)
                    different += ["other scores"] if scores(run) != scores(reference) else []
                    # What was logged while the disk was full is lost; the bits are not.
                    if "disk" in kinds:
                        different = [text for text in different if text.endswith(" differs")]
                    wrong += different
                    wrong += ["another code is noted"] if run.codes() != 1 else []
                except Ended as error:
                    wrong.append(str(error))
                left = run.watched.seconds_until_gone(5)
                wrong += ["a process is left"] if left > 5 else []
            folder = output / layout.FOLDER
            wrong += [f"{p.name} is left" for p in folder.iterdir() if p.name[:5] != "step-"]
            print(f"{len(kinds)} faults ({', '.join(kinds)}): {wrong or 'healed, same bits'}",
                  flush=True)  # fmt: skip
        bare.append(bare_start(directory))
    print_times(bare, seconds)
    print(f"{healed} of {count} faults named and healed")
    return wrong if wrong or healed == count else ["not all were healed"]


def print_times(bare: list[float], seconds: dict[str, list[float]]) -> None:
    """Medians from a fault to the next new iteration."""
    start = statistics.median(bare)
    print(f"a bare start: {start:.2f} s (median of {len(bare)})")
    if not seconds:  # a full disk has none
        return
    for kind, times in sorted(seconds.items()):
        median = statistics.median(times)
        print(f"{kind:6} {len(times):3}: {median:.2f} s to a new iteration, {median / start:.2f}")
    median = statistics.median([one for times in seconds.values() for one in times])
    print(f"all: {median:.2f} s, {median / start:.2f} bare starts (asked: at most 2)", flush=True)


def share(directory: Path, names: str, every: float, count: int, seed: int) -> float:
    """The share of the time that went into new iterations, with a fault every so many seconds."""
    source, output = random.Random(seed), directory / "shared"
    with small_disk(output) as is_small:
        run = Run(output, 10**6, 8)
        with run.watched.started() as process:
            driver = Driver(run, process, source)
            driver.wait(lambda: run.reached() > 0, "training")
            for number, kind in enumerate(kinds_of(names, is_small, source, count)):
                due = run.beats()[0][1] + every * (number + 0.5)
                time.sleep(max(0.0, due - time.time()))
                driver.fill() if kind == "disk" else driver.cause(kind)
            elapsed = every * count
            time.sleep(max(0.0, run.beats()[0][1] + elapsed - time.time()))
            worked = seconds_of_new_iterations(run) / elapsed
            print("\n".join(run.reasons()))
    print(f"{count} faults, one each {every:g} s; the load is {os.getloadavg()[0]:.1f}")
    print(f"{worked:.2f} of the time went into new iterations (asked: at least 0.8)")
    return worked


def seconds_of_new_iterations(run: Run) -> float:
    """The time from one iteration to the next, if that was new and no start lies between."""
    starts = [start["time"] for start in ledger(run.output, "start")]
    seconds, reached = 0.0, 0
    for (_, before), (iteration, at) in itertools.pairwise(run.beats()):
        if iteration > reached and not any(before < start < at for start in starts):
            seconds += at - before
        reached = max(reached, iteration)
    return seconds


def main() -> None:
    """Prints what happened and how it went; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of these, with commas")
    parser.add_argument("--every", type=float, help="seconds from a fault to the next")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    if args.every:
        worked = share(directory, args.kinds, args.every, args.faults, args.seed)
        shutil.rmtree(directory)
        sys.exit(worked < 0.8)
    wrong = prove(directory, args.kinds, args.faults, args.seed)
    for text in wrong:
        print(f"FAILED: {text} ({directory})")
    if not wrong:
        shutil.rmtree(directory)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        run_experiment(Patient, argv=sys.argv[2:])
    else:
        main()
