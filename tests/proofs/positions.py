"""Proves that a run may be stopped after any batch: it ends with the bits of one that was not.

For each position of two epochs, at their ends and within them, on one process and two,
with the data made in the process and by two workers: a run is stopped there, a new experiment
continues it to the end, and its last checkpoint and its logged numbers must be those of a run
that was never stopped.

    python tests/proofs/positions.py [--count 40] [--processes 1 2] [--workers 0 2]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

warnings.simplefilter("ignore")

from compare import differences, ledger  # noqa: E402
from net import BATCH_SIZE, Net  # noqa: E402

from expbase.ranks import collectives  # noqa: E402
from expbase.ranks.launch import StopSignals, spawn  # noqa: E402

BATCHES = 20  # of an epoch, on each rank
LONGER = 4  # iterations after the last position


class Stopped(Net):
    """Stops by itself after an iteration, in the way that a user's `stop()` does."""

    stop_at = 0

    def on_train_batch_end(self) -> None:
        if self.iteration == self.stop_at:
            self.stop()
            # Several ranks ask each other about twice a second; here they are to do it now.
            self._ExperimentBase__run.stop.next_iteration = self.iteration


def run(output: Path, workers: int, iterations: int, stop_at: int = 0) -> None:
    """One start of a process, as far as the experiment can see."""
    Stopped.stop_at = stop_at
    config = Stopped.default_config()
    size = collectives.world_size()
    # The last batch of an epoch is smaller; two ranks have a round to fill.
    config.data.samples = (BATCHES * size - (size - 1)) * BATCH_SIZE - 2
    config.data.workers = workers
    config.training.update(
        max_iteration=iterations, valid_interval=7, save_interval=7, log_interval=3, keep_last=1
    )
    exp = Stopped(config, argparse.Namespace(output=str(output), device="cpu"))
    with contextlib.redirect_stderr(io.StringIO()):  # worker_0.log has it, too
        exp.setup()
        exp.run()


def check(output: Path, reference: Path, position: int) -> list[str]:
    """What is wrong with a run that was stopped and continued at a position."""
    starts = [start["iteration"] for start in ledger(output, "start")]
    if starts != [0, position]:
        return [f"it started at {starts} and not at 0 and {position}"]
    return differences(output, reference)


def prove(directory: Path, workers: int, positions: Sequence[int]) -> None:
    """Tries the positions on this rank; rank 0 writes a character for each into `verdicts`."""
    reference, iterations = directory / "whole", max(positions) + LONGER
    run(reference, workers, iterations)
    for position in positions:
        output = directory / f"at-{position}"
        run(output, workers, iterations, stop_at=position)
        run(output, workers, iterations)
        collectives.all_gather_object(None)  # rank 0 looks at the files when all have closed them
        if collectives.rank() == 0:
            wrong = check(output, reference, position)
            for text in wrong:
                print(f"position {position}: {text} ({output})", flush=True)
            with (directory / "verdicts").open("a", encoding="utf-8") as file:
                file.write("-" if wrong else "+")
            if not wrong:
                shutil.rmtree(output)


def main() -> None:
    """Prints how many positions were exact; exit code 1 if not all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=40, help="positions")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    args = parser.parse_args()
    exact, positions = 0, range(1, args.count + 1)
    kept = Path(tempfile.mkdtemp(prefix="positions-"))
    for processes in args.processes:
        for workers in args.workers:
            began = time.monotonic()
            directory = kept / f"processes-{processes}-workers-{workers}"
            directory.mkdir()
            if processes == 1:
                prove(directory, workers, positions)
            else:
                spawn(prove, (directory, workers, positions), processes, "cpu", StopSignals())
            verdicts = directory / "verdicts"
            right = verdicts.read_text().count("+") if verdicts.exists() else 0
            exact += right
            print(
                f"{processes} processes, {workers} workers: {right} of {args.count} identical "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    total = args.count * len(args.processes) * len(args.workers)
    if exact == total:
        shutil.rmtree(kept)
    print(f"{exact} of {total} identical")
    sys.exit(exact != total or not total)


if __name__ == "__main__":
    main()
