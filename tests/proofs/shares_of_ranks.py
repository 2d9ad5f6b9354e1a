"""Proves that with training.shares no bit of a run depends on the number of processes.

The experiment is many.py. Each schedule is one run, started on 1, 2 or 4 processes in turn (at
times on 8), and killed by kill -9 of all processes, or of the first alone, at a random moment of
each start but the last. At its end the bytes of its last checkpoint, its lines and its curves must
be those of a run on one process that nobody killed.

    python tests/proofs/shares_of_ranks.py [--schedules 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from compare import differences, ledger
from watched import Watched

MANY = Path(__file__).with_name("many.py")
INTERVALS = ("max_iteration=40", "valid_interval=6", "save_interval=4", "log_interval=3")
KINDS = (
    ("data.net=classifier",),
    ("data.net=classifier", "data.workers=2"),
    ("data.net=classifier", "data.stream=true", "data.workers=1"),
    ("data.net=gan",),
    ("data.net=recurrent",),
)
_LONG_SECONDS = 300.0  # that nothing here takes


class Proof:
    """The runs in a directory, and what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.starts: Counter[int] = Counter()  # by their number of processes
        self.kills = 0

    @functools.cache  # noqa: B019
    def straight(self, words: tuple[str, ...]) -> Path:
        """The output of a run on one process that nobody kills."""
        output = self.folder / f"straight-{len(list(self.folder.glob('straight-*.txt')))}"
        self.start(output, words, 1, kills=False)
        return output

    def start(self, output: Path, words: tuple[str, ...], processes: int, *, kills: bool) -> bool:
        """Starts a run once; whether it came to its end. It may do that before it is killed."""
        command = [sys.executable, str(MANY), "--output", str(output), "--device", "cpu"]
        command += ["--nprocs", str(processes), *words]
        command += [f"training.{setting}" for setting in INTERVALS]
        watched = Watched(command, output.with_suffix(".txt"))
        with watched.started() as process:
            if kills:
                self.strike(watched, process.pid, output)
            code = process.wait(timeout=_LONG_SECONDS)
            watched.seconds_until_gone(30)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"exit code {code}: {output.with_suffix('.txt')}")
        return code == 0

    def strike(self, watched: Watched, pid: int, output: Path) -> None:
        """Waits until this start trains, most of the time, and a while; kills it then."""
        before = len(ledger(output, "start"))
        deadline = time.monotonic() + _LONG_SECONDS
        waits = self.random.random() < 0.8
        while waits and len(ledger(output, "start")) == before and time.monotonic() < deadline:
            time.sleep(0.005)
            if pid not in watched.family():
                return
        time.sleep(self.random.uniform(0, 1.5))
        self.kills += 1
        for victim in {pid, *(watched.family() if self.random.random() < 0.5 else [])}:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def schedule(self, number: int) -> list[str]:
        """One run on other numbers of processes from start to start; what was wrong."""
        has_eight = number % 20 == 19
        words = (*KINDS[number % len(KINDS)], f"training.shares={8 if has_eight else 4}")
        reference = self.straight(words)
        output = self.folder / f"run-{number}"
        numbers = [self.random.choice((1, 2, 4)) for _ in range(self.random.randint(2, 4))]
        numbers += [8] * has_eight
        try:
            for processes in numbers:
                self.starts[processes] += 1
                if self.start(output, words, processes, kills=True):
                    break
            self.start(output, words, self.random.choice((1, 2, 4)), kills=False)
            return differences(output, reference)
        finally:
            print(f"{number}: {words}, {numbers}", flush=True)


def main() -> int:
    """Prints the count; 1 if a run ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shares-"))
    proof = Proof(folder, args.seed)
    exact = 0
    for number in range(args.schedules):
        wrong = proof.schedule(number)
        exact += not wrong
        for text in wrong:
            print(f"FAILED: {folder}/run-{number}: {text}", flush=True)
    print(
        f"{exact} of {args.schedules} runs ended with the bits of one process, {proof.kills} kills"
    )
    print(f"killed starts by processes: {dict(sorted(proof.starts.items()))}")
    return int(exact < args.schedules or not exact)


if __name__ == "__main__":
    sys.exit(main())
