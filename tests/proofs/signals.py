"""Proves that a signal at any moment is answered as promised, the second after FINISHED included.

A run of net.py gets SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU at a random moment, or
right after it has said that it finished, and goes on by the same command, over and over. A start
that finished must answer 0, one that was stopped with the code of its signal; before the run
listens, the signal may kill it. Each run must end with the bits and curves of one that nobody
disturbed.

    python tests/proofs/signals.py [--count 90] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from compare import differences
from watched import Watched

NET = Path(__file__).with_name("net.py")
_SAVED = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
CODES = {**dict.fromkeys(_SAVED, 143), signal.SIGHUP: 129, signal.SIGINT: 130}
LONG_SECONDS = 90.0
LIFE_SECONDS = 4.5  # a start takes about so long


class Run:
    """One output directory, disturbed until it has finished."""

    def __init__(self, output: Path) -> None:
        self.output = output
        command = [sys.executable, str(NET), "--output", str(output), "--device", "cpu"]
        command += ["training.max_iteration=2000", "training.valid_interval=50"]
        command += ["training.save_interval=20", "training.log_interval=10"]
        self.watched = Watched(command, output.with_suffix(".txt"))

    def log(self) -> str:
        """What it has said so far, over all starts."""
        log = self.output / "worker_0.log"
        return log.read_text() if log.exists() else ""

    def finishes(self) -> int:
        """How often its log says that it finished."""
        return self.log().count("FINISHED")

    def disturb(
        self, how: signal.Signals, seconds: float, *, after_finish: bool
    ) -> tuple[int, bool]:
        """Starts it and sends the signal; returns its exit code, and whether it has finished."""
        before = self.finishes()
        with self.watched.started() as process:
            deadline = time.monotonic() + LONG_SECONDS
            while after_finish and self.finishes() == before and process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.output}: does not finish")
                time.sleep(0.002)
            time.sleep(seconds)
            process.send_signal(how)
            code = process.wait(timeout=LONG_SECONDS)
        return code, self.finishes() > before


def main() -> None:
    """Prints how many signals were answered well; exit code 1 if not all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source = random.Random(args.seed)
    directory = Path(tempfile.mkdtemp(prefix="signals-"))
    reference = Run(directory / "straight")
    with reference.watched.started() as process:
        assert process.wait(timeout=LONG_SECONDS) == 0
    answers: collections.Counter[str] = collections.Counter()
    good, number = 0, 0
    run = Run(directory / "run-0")
    for _ in range(args.count):
        how = source.choice([*CODES])
        after_finish = source.random() < 0.4
        seconds = source.uniform(0, 1 if after_finish else LIFE_SECONDS)
        said = len(run.log())
        code, finished = run.disturb(how, seconds, after_finish=after_finish)
        wrong = differences(run.output, reference.output) if finished else []
        # Python answers Ctrl-C with 1 in the middle of the import of paddle's library.
        stopped = [CODES[how], -how] + [1] * (len(run.log()) == said)
        is_good = code in ([0] if finished else stopped) and not wrong
        moment = "after FINISHED" if finished else "before"
        answers[f"{how.name} {moment}: {code}"] += 1
        if not is_good:
            print(f"{run.output}: {how.name} {moment} answered {code}; {wrong}", flush=True)
        good += is_good
        if finished:
            number += 1
            run = Run(directory / f"run-{number}")
    for answer, times in sorted(answers.items()):
        print(f"{times:3} x {answer}")
    if good == args.count:
        shutil.rmtree(directory)
    print(f"{good} of {args.count} signals were answered well")
    sys.exit(good != args.count or not good)


if __name__ == "__main__":
    main()
