"""What `python -m expbase ls` takes over many runs.

    python tests/benchmarks/many_runs.py [--runs 3000] [--lines 10 4000]

The runs are copies of one in tests/runs, without checkpoints, whose metrics.jsonl has so many
lines: a validation among the first ten, training after it. Printed are seconds of wall time, and of
the processor. The files were written just before, so they are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "runs/1.1/one"
_FILES = ("config.yaml", "ledger.jsonl", "validations.jsonl")


def write(folder: Path, runs: int, lines: int) -> None:
    """Writes the runs."""
    text = "".join(f"{json.dumps(_line(number))}\n" for number in range(1, lines + 1))
    for number in range(runs):
        run = folder / f"run-{number:05}"
        run.mkdir()
        for name in _FILES:
            shutil.copy(SOURCE / name, run)
        (run / "metrics.jsonl").write_text(text)


def _line(number: int) -> dict[str, float]:
    name = "valid/error" if number == 5 else "train/loss"
    rates = {"train/lr": 0.125, "speed/steps_per_second": 123.4, "speed/data_wait": 0.01}
    return {"iteration": number, "epoch": 1, "time": 1.0e9 + number, name: 1 / number, **rates}


def seconds(folder: Path) -> tuple[float, float]:
    """Returns what `ls` takes: wall time, and time of the processor."""
    command = [sys.executable, "-m", "expbase", "ls", str(folder)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--lines", nargs="+", type=int, default=[10, 4000])
    args = parser.parse_args()
    for lines in args.lines:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), args.runs, lines)
            os.sync()
            wall, used = min(seconds(Path(folder)) for _ in range(2))
        print(f"{args.runs} runs of {lines} lines: {wall:.1f} s ({used:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
