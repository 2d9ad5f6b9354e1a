"""Proves that SIGTERM to paddle's launcher stops all ranks at one iteration, without an orphan.

A run of net.py on two ranks with two loader workers each is started by
`python -m paddle.distributed.launch`; the launcher gets SIGTERM, as a scheduler sends it, and the
same command goes on, over and over. Each time both ranks must say that they stopped at the same
iteration, the checkpoint of it must stand, and no process may be left.

    python tests/proofs/sigterm.py [--count 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from compare import ledger, logged
from watched import Watched

from expbase.checkpoint import layout, storage

NET = Path(__file__).with_name("net.py")
_LONG_SECONDS = 90.0
_GONE_SECONDS = 5.0


def stops(output: Path, rank: int) -> list[int]:
    """The iterations at which a rank said that it stopped."""
    log = output / f"worker_{rank}.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    return [int(number) for number in re.findall(r"\[(\d+)\] STOPPED by SIGTERM", text)]


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it came true."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > _LONG_SECONDS:
            raise TimeoutError(f"{what}: not within {_LONG_SECONDS} s")
        time.sleep(0.005)
    return time.monotonic() - began


def trains(output: Path, starts: int) -> bool:
    """Whether the newest of so many starts has logged a line."""
    begun = ledger(output, "start")
    if len(begun) < starts:
        return False
    try:
        return logged(output)[-1]["iteration"] > begun[-1]["iteration"]
    except (FileNotFoundError, IndexError, ValueError):
        return False


def stop_once(
    watched: Watched, output: Path, number: int, delay: float
) -> tuple[list[str], float, float]:
    """One start and one signal.

    Returns:
        What was wrong, the seconds from the signal to the last rank's line, and those from the
        signal to the launcher's end.
    """
    before = [len(stops(output, rank)) for rank in (0, 1)]
    with watched.started() as process:
        wait_for(lambda: trains(output, number), "training")
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()

        def have_said_it() -> bool:
            return all(len(stops(output, rank)) > before[rank] for rank in (0, 1))

        to_line = wait_for(lambda: have_said_it() or process.poll() is not None, "both lines")
        process.wait(timeout=_LONG_SECONDS)
        to_end = time.monotonic() - began
        gone = watched.seconds_until_gone(_GONE_SECONDS)
    wrong = [f"a process is there {gone:.0f} s later"] if gone > _GONE_SECONDS else []
    if not have_said_it():
        end = ledger(output, "end")[-1:]
        return [*wrong, f"not both ranks said that they stopped; ledger: {end}"], to_line, to_end
    iterations = [stops(output, rank)[-1] for rank in (0, 1)]
    if iterations[0] != iterations[1]:
        wrong.append(f"the ranks stopped at {iterations}")
    newest = layout.listed(output / layout.FOLDER)[-1]
    storage.verify(newest)
    if layout.iteration_of(newest) != iterations[0]:
        wrong.append(f"stopped at {iterations[0]}, and the newest checkpoint is {newest.name}")
    return wrong, to_line, to_end


def main() -> None:
    """Prints how many stops were right; exit code 1 if not all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    directory = Path(tempfile.mkdtemp(prefix="sigterm-"))
    output = directory / "run"
    command = [
        *(sys.executable, "-m", "paddle.distributed.launch", "--host", "127.0.0.1"),
        *("--nproc_per_node", "2", "--log_dir", str(directory / "launch_log"), str(NET)),
        *("--output", str(output), "--device", "cpu", "data.workers=2", "data.samples=154"),
        *("training.max_iteration=1000000", "training.save_interval=100"),
        *("training.valid_interval=50", "training.log_interval=5"),
    ]
    watched = Watched(command, directory / "run.txt")
    right, lines, ends = 0, [], []
    for number in range(1, args.count + 1):
        wrong, to_line, to_end = stop_once(watched, output, number, rng.uniform(0, 2))
        right += not wrong
        lines.append(to_line)
        ends.append(to_end)
        for text in wrong:
            print(f"stop {number}: {text} ({output})", flush=True)
        at = f"{to_line:.2f} s to both lines, {to_end:.2f} s to the launcher's end"
        print(f"stop {number}, iteration {stops(output, 0)[-1:]}: {at}", flush=True)
    if right == args.count:
        shutil.rmtree(directory)
    print(f"longest: {max(lines):.2f} s to both lines, {max(ends):.2f} s to the launcher's end")
    print(f"{right} of {args.count} stopped at one iteration, with a checkpoint and no orphan")
    sys.exit(right != args.count or not right)


if __name__ == "__main__":
    main()
