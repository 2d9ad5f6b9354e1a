"""Proves that a run survives kill -9 at any moment, over and over.

A run of net.py is killed at random moments of training, inside saves, inside validations and
while it starts, and started again until it is finished; then the next one begins. Only the first
process is killed: whatever it started has to end by itself. After each kill every checkpoint
must verify and none may be lost; after each finished run the bits and the logged numbers must be
those of a run that nobody killed, and nothing may be left over: no process, no half written
directory, no file in shared memory.

    python tests/proofs/chaos.py [--kills 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from compare import differences, ledger, logged
from watched import Watched

from expbase.checkpoint import layout, storage

NET = Path(__file__).with_name("net.py")
SHARED_MEMORY = Path("/dev/shm")
VALID_INTERVAL = 10
TRAINING = ["save_interval=3", f"valid_interval={VALID_INTERVAL}", "log_interval=2"]
TRAINING += ["keep_last=2", "monitor=accuracy"]
KILLS_OF_A_RUN = 12  # at most; then it may finish
_LONG_SECONDS = 300.0  # that nothing here takes
_GONE_SECONDS = 60.0  # that what a dead process leaves behind may still be there


@dataclass(frozen=True)
class Setup:
    """How a run is started."""

    nprocs: int
    workers: int

    def __str__(self) -> str:
        return f"{self.nprocs} processes, {self.workers} workers"


SETUPS = (Setup(nprocs=1, workers=2), Setup(nprocs=1, workers=0), Setup(nprocs=2, workers=1))


@dataclass
class Report:
    """What was done, and what was wrong.

    Attributes:
        kills: How many of which kind.
        survived: Those after which all was well.
        hits: What the files say about the moment of a kill.
        finished: Runs that came to their end.
        exact: Those of them that ended like the one that nobody killed.
        gone_seconds: The longest that a process outlived the one that was killed.
        failures: Everything that should not be.
    """

    kills: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    exact: int = 0
    gone_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def fail(self, texts: Iterable[str]) -> None:
        """Notes and prints them."""
        for text in texts:
            self.failures.append(text)
            print(f"FAILED: {text}", flush=True)


class Run:
    """One output directory, and the process that works in it, if any."""

    def __init__(self, output: Path, setup: Setup, iterations: int) -> None:
        self.output = output
        self.setup = setup
        self.checkpoints = output / layout.FOLDER
        self.newest = -1  # iteration of the newest checkpoint that is known to be good
        command = [
            *(sys.executable, str(NET), "--output", str(output), "--device", "cpu"),
            *("--nprocs", str(setup.nprocs)),
            *(f"data.workers={setup.workers}", f"data.samples={76 * setup.nprocs + 2}"),
            *(f"training.{words}" for words in [*TRAINING, f"max_iteration={iterations}"]),
        ]
        self.shared: set[int] = set()  # inodes of what its processes share
        self.watched = Watched(command, output.with_suffix(".txt"))
        self._starts = 0

    def __str__(self) -> str:
        return f"{self.output} ({self.setup})"

    def start(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """The next process."""
        self._starts = len(ledger(self.output, "start"))
        return self.watched.started()

    def note_shared(self) -> None:
        """Notes which files in shared memory its processes have open now."""
        for pid in self.watched.family():
            with suppress(OSError):
                text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
                lines = [line.split() for line in text.splitlines() if f" {SHARED_MEMORY}/" in line]
                self.shared |= {int(words[4]) for words in lines}

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
        """Whether it came true before the process ended."""
        deadline = time.monotonic() + _LONG_SECONDS
        while not condition():
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.output}: nothing happened for {_LONG_SECONDS} s")
            time.sleep(0.002)
        return True

    def trains(self) -> bool:
        """Whether this start has logged a line."""
        starts = ledger(self.output, "start")
        if len(starts) <= self._starts:
            return False
        return any(line["iteration"] > starts[-1]["iteration"] for line in self.lines()[-1:])

    def lines(self) -> list[dict[str, float]]:
        """What was logged; a line that is being written is left out."""
        try:
            return logged(self.output)
        except (FileNotFoundError, ValueError):
            return []

    def saves(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".writing-*"))

    def validates(self) -> bool:
        """Whether a validation has begun and its line is not there."""
        last = (self.lines() or [{}])[-1]
        return "train/loss" in last and last["iteration"] % VALID_INTERVAL == 0

    def strike(self, process: subprocess.Popen[bytes], kind: str, rng: random.Random) -> bool:
        """Kills the process at a moment of this kind; false if it had ended before."""
        if kind == "starting":
            time.sleep(rng.uniform(0, 3))
        elif not self.wait_for(self.trains, process):
            return False
        self.note_shared()
        if kind == "saving":
            self.wait_for(self.saves, process)
        elif kind == "validating":
            self.wait_for(self.validates, process)
        elif kind == "training":
            time.sleep(rng.uniform(0, 0.3 if self.setup.nprocs == 1 else 1.0))
        if process.poll() is not None:
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return True

    def check_checkpoints(self) -> list[str]:
        """What is wrong with them, and whether one was lost since the last look."""
        wrong = [f"{path.name} is there" for path in self.checkpoints.glob("damaged-*")]
        for start in ledger(self.output, "start")[self._starts :]:
            if start["iteration"] != max(self.newest, 0):
                wrong.append(f"started at {start['iteration']} with one of {self.newest}")
        intact = [-1]
        for path in layout.listed(self.checkpoints):
            try:
                storage.verify(path)
                intact.append(layout.iteration_of(path) or 0)
            except layout.CheckpointError as error:
                wrong.append(str(error))
        log = self.output / "worker_0.log"
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        told = [int(n) for n in re.findall(r"\[(\d+)\] saved step-", text)]
        expected = max([self.newest, *told[-1:]])
        self.newest = max(intact)
        if self.newest < expected:
            wrong.append(f"the newest checkpoint is of {self.newest} and was of {expected}")
        return wrong

    def left_over(self) -> list[str]:
        """What a finished run should not have left in its directory."""
        return sorted(p.name for p in self.checkpoints.iterdir() if not p.name.startswith("step-"))


def finish(run: Run) -> None:
    """Runs it to its end, with nobody killing it.

    Raises:
        RuntimeError: It failed.
    """
    with run.start() as process:
        code = process.wait(timeout=_LONG_SECONDS)
    if code:
        text = run.output.with_suffix(".txt").read_text()[-3000:]
        raise RuntimeError(f"{run.output}: ended with code {code}:\n{text}")


def kind_of(number: int) -> str:
    """Of the n-th kill, from 1."""
    if number % 5 == 0:
        return "saving"
    if number % 7 == 0:
        return "validating"
    return "starting" if number % 11 == 0 else "training"


def chaos(
    directory: Path,
    *,
    kinds: Sequence[str],
    seed: int,
    iterations: int = 150,
    setups: Sequence[Setup] = SETUPS,
    say: Callable[[str], None] = print,
) -> Report:
    """Kills runs in these ways, one after the other, and lets the last one finish.

    Args:
        directory: Takes the runs; those that went well are removed.
        kinds: "training", "saving", "validating" or "starting", for each kill.
        seed: Of the moments.
        iterations: Of each run.
        setups: That take turns.
        say: Takes lines about the progress.
    """
    rng, report = random.Random(seed), Report()
    references: dict[Setup, Path] = {}
    left, number = list(kinds), 0
    while left:
        setup = setups[number % len(setups)]
        if setup not in references:
            reference = Run(directory / f"whole-{number}", setup, iterations)
            finish(reference)
            references[setup] = reference.output
        run, failures = Run(directory / f"run-{number}", setup, iterations), len(report.failures)
        made, code = kill_until_finished(run, left[:KILLS_OF_A_RUN], rng, report)
        left = left[made:]
        wrong = [f"ended with code {code}"] if code else differences(run.output, references[setup])
        report.finished += 1
        report.exact += not wrong
        say(f"{run}: {made} kills, then {'WRONG' if wrong else 'identical'}; {len(left)} to go")
        wrong += [f"{name} is left" for name in [*run.left_over(), *left_in_shared_memory(run)]]
        report.fail(f"{run}, after its end: {text}" for text in wrong)
        if len(report.failures) == failures:
            shutil.rmtree(run.output)
        number += 1
    return report


def kill_until_finished(
    run: Run, kinds: Sequence[str], rng: random.Random, report: Report
) -> tuple[int, int]:
    """Starts a run and kills it, over and over; then lets it finish.

    Returns:
        How many kills it took, and the code of its end.
    """
    made = 0
    while True:
        with run.start() as process:
            struck = made < len(kinds) and run.strike(process, kinds[made], rng)
            if struck:
                report.kills[kinds[made]] += 1
                report.hits["inside a save"] += run.saves()
                report.hits["inside a validation"] += run.validates()
            else:
                process.wait(timeout=_LONG_SECONDS)
            seconds = run.watched.seconds_until_gone(_GONE_SECONDS)
        report.gone_seconds = max(report.gone_seconds, seconds)
        wrong = [f"a process is there {seconds:.0f} s later"] * (seconds > _GONE_SECONDS)
        wrong += run.check_checkpoints()
        moment = f"killed while {kinds[made]}" if struck else "ended"
        report.fail(f"{run}, {moment}: {text}" for text in wrong)
        if not struck:
            return made, process.returncode
        made += 1
        report.survived += not wrong


def left_in_shared_memory(run: Run) -> list[str]:
    """The files of a run that are there after its end and do not go away.

    Others on this machine have files there, too: a run's own are told by the process in their
    name, and semaphores, whose names say nothing, by their number in the file system.
    """
    pids = set((run.output / "pids").read_text(encoding="utf-8").split())
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        left = []
        for path in SHARED_MEMORY.iterdir():
            maker = re.match(r"paddle_(\d+)_", path.name)
            with suppress(FileNotFoundError):
                if (maker and maker[1] in pids) or path.stat().st_ino in run.shared:
                    left.append(str(path))
        if not left or time.monotonic() > deadline:
            return sorted(left)
        time.sleep(0.1)


def main() -> None:
    """Prints what was killed and how it went; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=150, help="of each run")
    parser.add_argument("--nprocs", type=int, help="only the setups with as many processes")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    setups = [setup for setup in SETUPS if args.nprocs in (None, setup.nprocs)]
    print(f"seed {args.seed}", flush=True)
    report = chaos(
        directory,
        kinds=[kind_of(number) for number in range(1, args.kills + 1)],
        seed=args.seed,
        iterations=args.iterations,
        setups=setups,
        say=lambda text: print(text, flush=True),
    )
    if not report.failures:
        shutil.rmtree(directory)
    print("kills while", ", ".join(f"{kind}: {n}" for kind, n in sorted(report.kills.items())))
    print("of all kills,", ", ".join(f"{n} {what}" for what, n in sorted(report.hits.items())))
    print(f"the last process was gone {report.gone_seconds:.1f} s after the killed one, at most")
    print(
        f"{report.survived} of {args.kills} kills survived, "
        f"{report.exact} of {report.finished} finished runs identical"
    )
    sys.exit(bool(report.failures) or report.survived != args.kills or not args.kills)


if __name__ == "__main__":
    main()
