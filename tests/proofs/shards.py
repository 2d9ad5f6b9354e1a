"""Proves that what a rank has alone is saved whole or not at all, and restored exactly.

The experiment is parts.py: fleet's sharded optimizer on two ranks, and a part of each rank's own.

    --kills N    kill -9 of rank 0, of rank 1, of both and of all at once, inside saves. After each
                 kill every checkpoint must verify and none may be lost; after each finished run the
                 bits must be those of a run that nobody killed.
    --degrees    What two ranks have saved is continued by one, by two again, by four: every tensor
                 is somewhere, with its bits. (Paddle 3.3 sometimes fails to make gloo's groups of
                 four ranks on a busy machine: then this is tried again.)
    --memory GB  How much more memory a save and a resume take than training, over the bytes that
                 rank 0 writes and that rank 1 has, with that many GB that each rank has alone.

    python tests/proofs/shards.py --kills 200 --degrees --memory 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

from compare import differences, last_checkpoint
from watched import Watched

from expbase.base.arrays import parse
from expbase.checkpoint import layout, storage

PARTS = Path(__file__).with_name("parts.py")
TARGETS = ((0,), (1,), (0, 1), None)  # the ranks that are killed; None: whatever belongs to the run
KILLS_OF_A_RUN = 12  # at most; then it may finish
TIMES = 1.3  # of those bytes: what a rank may need beyond training
_LONG_SECONDS = 300.0  # that nothing here takes
_GONE_SECONDS = 30.0  # within which the others end after a kill


def command(output: Path, nprocs: int, *words: str) -> list[str]:
    """Starts the experiment on so many ranks."""
    start = [sys.executable, str(PARTS), "--output", str(output), "--device", "cpu"]
    return [*start, "--nprocs", str(nprocs), *words]


def run(output: Path, nprocs: int, *words: str) -> str:
    """Runs it to its end; what it said.

    Raises:
        RuntimeError: It failed.
    """
    result = subprocess.run(
        command(output, nprocs, *words),
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONG_SECONDS + 600,
    )
    if result.returncode:
        raise RuntimeError(
            f"{output}: ended with code {result.returncode}: {result.stderr[-3000:]}"
        )
    return result.stderr


def is_saving(output: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((output / layout.FOLDER).glob(".writing-*"))


def strike(output: Path, watched: Watched, ranks: tuple[int, ...] | None, pause: float) -> bool:
    """Starts the run and kills these ranks inside a save; false if it came to its end."""
    for file in output.glob("pid_*"):
        file.unlink()  # of the start before
    with watched.started() as process:
        deadline = time.monotonic() + _LONG_SECONDS
        while not (len([*output.glob("pid_?")]) == 2 and is_saving(output)):
            if process.poll() is not None:
                if process.returncode:
                    raise RuntimeError(f"{output}: ended with code {process.returncode}")
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{output}: no save within {_LONG_SECONDS:.0f} s")
            time.sleep(0.0005)
        time.sleep(pause)
        files = [output / f"pid_{rank}" for rank in ranks] if ranks else []
        pids = [int(file.read_text()) for file in files] or watched.family()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=_GONE_SECONDS)  # the others end by themselves
        if watched.seconds_until_gone(_GONE_SECONDS) > _GONE_SECONDS:
            raise RuntimeError(f"{output}: a process outlives the kill of {ranks}")
    return True


def check(output: Path, newest: int) -> int:
    """The iteration of the newest checkpoint; each must verify, and `newest` must not be lost."""
    found = layout.listed(output / layout.FOLDER)
    for path in found:
        storage.verify(path)
    if list((output / layout.FOLDER).glob("damaged-*")):
        raise RuntimeError(f"{output}: a checkpoint was damaged")
    now = max([-1, *(layout.iteration_of(path) or 0 for path in found)])
    if now < newest:
        raise RuntimeError(f"{output}: the newest checkpoint was of {newest}, and is of {now}")
    return now


def kill(folder: Path, kills: int, seed: int) -> Counter[str]:
    """Kills runs inside saves and lets each finish; returns what was counted."""
    words = ["data.expert=20000", "data.width=200", "training.save_interval=2"]
    words += ["training.max_iteration=60", "training.valid_interval=0", "training.keep_last=2"]
    run(folder / "whole", 2, *words)
    rng, counted, number = random.Random(seed), Counter[str](), 0
    while counted["kills"] < kills:
        output, newest, of_run = folder / f"run-{number}", -1, 0
        watched = Watched(command(output, 2, *words), output.with_suffix(".txt"))
        while counted["kills"] < kills and of_run < KILLS_OF_A_RUN:
            ranks = TARGETS[counted["kills"] % len(TARGETS)]
            if not strike(output, watched, ranks, rng.uniform(0, 0.03)):
                break
            counted["kills"] += 1
            of_run += 1
            counted["half written"] += is_saving(output)
            newest = check(output, newest)
        run(output, 2, *words)
        wrong = differences(output, folder / "whole")
        left = [p.name for p in (output / layout.FOLDER).glob(".*")]
        if wrong or left:
            raise RuntimeError(f"{output}: {wrong} {left}")
        counted["runs identical"] += 1
        print(f"{counted['kills']} of {kills} kills; run {number}: {of_run}, identical", flush=True)
        shutil.rmtree(output)
        number += 1
    return counted


def sums_of(path: Path) -> dict[str, int]:
    """The checksums of the trained tensors and the accumulators of a checkpoint."""
    found: dict[str, int] = {}
    for name, data in storage.opened(path).files.items():
        if not name.endswith(".safetensors") or name.startswith(("@local_", "@values")):
            continue
        file = name.removesuffix(".safetensors")
        found |= {f"{file}/{key}": zlib.crc32(array.data) for key, array in parse(data).items()}
    return found


def continue_with(source: Path, output: Path, nprocs: int, end: int) -> None:
    """Continues a run on other ranks, and compares what they took with what was saved."""
    words = [f"training.max_iteration={end}", "training.save_interval=2", "data.layers=3"]
    for attempt in range(10):
        shutil.rmtree(output, ignore_errors=True)
        try:
            said = run(output, nprocs, *words, "--checkpoint_path", str(source))
            break
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            if nprocs < 4 or attempt == 9 or "gloo" not in str(error):
                raise
    expected = sums_of(last_checkpoint(source))
    taken = [json.loads((output / f"loaded_{rank}").read_text()) for rank in range(nprocs)]
    union = {key: value for of_rank in taken for key, value in of_rank.items()}
    wrong = sorted(key for key in expected if union.get(key) != expected[key])
    sizes = [sum(key.startswith("optimizer/") for key in of_rank) for of_rank in taken]
    if wrong or union.keys() != expected.keys() or "sum in another order" not in said:
        raise RuntimeError(f"{output}: {wrong or union.keys() ^ expected.keys()}")
    print(f"continued by {nprocs}: {len(union)} tensors; accumulators by rank {sizes}", flush=True)


def degrees(folder: Path) -> None:
    """Two ranks, one, two again, and four."""
    run(folder / "two", 2, "training.max_iteration=6", "training.save_interval=2", "data.layers=3")
    continue_with(folder / "two", folder / "one", 1, 8)
    continue_with(folder / "one", folder / "two-again", 2, 10)
    continue_with(folder / "two", folder / "four", 4, 8)


def peaks(output: Path) -> list[float]:
    """The most memory that each rank had, in GB."""
    return [int((output / f"peak_{rank}").read_text()) * 1024 / 1e9 for rank in (0, 1)]


def memory(folder: Path, name: str, *words: str) -> bool:
    """Whether a save and a resume need little more than what a rank has; prints how much."""
    common = [*words, "training.log_interval=1", "training.valid_interval=0"]
    run(folder / "bare", 2, *common, "training.save_interval=0", "training.max_iteration=4")
    run(folder / "saving", 2, *common, "training.save_interval=2", "training.max_iteration=4")
    path, saving = last_checkpoint(folder / "saving"), peaks(folder / "saving")
    sizes = {file.name: file.stat().st_size / 1e9 for file in path.iterdir()}
    again = ["training.save_interval=0", "training.max_iteration=8"]
    run(folder / "saving", 2, *common, *again)
    bare, resumed, is_good = peaks(folder / "bare"), peaks(folder / "saving"), True
    for rank in (0, 1):
        others = sizes.get("@local_0.safetensors", 0) + sizes.get("optimizer.safetensors", 0) / 2
        part = sum(sizes.values()) - (others if rank else 0)
        more = {"save": saving[rank] - bare[rank], "resume": resumed[rank] - bare[rank]}
        is_good = is_good and max(more.values()) <= TIMES * part
        print(
            f"{name}, rank {rank} {'has' if rank else 'writes'} {part:.2f} GB; "
            f"training alone needs {bare[rank]:.2f} GB; beyond that "
            + ", ".join(f"a {k} {v:.2f} GB ({v / part:.2f} times)" for k, v in more.items()),
            flush=True,
        )
    shutil.rmtree(folder)
    return is_good


def main() -> None:
    """Prints what was counted and measured; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--degrees", action="store_true")
    parser.add_argument("--memory", type=float, default=0.0, metavar="GB")
    args = parser.parse_args()
    if not (args.kills or args.degrees or args.memory):
        parser.error("expected --kills, --degrees or --memory: else nothing is proved")
    folder = Path(tempfile.mkdtemp(prefix="shards-"))
    is_good = True
    try:
        if args.kills:
            counted = kill(folder, args.kills, args.seed)
            print(", ".join(f"{name}: {count}" for name, count in counted.items()))
        if args.degrees:
            degrees(folder)
        if args.memory:
            columns = int(args.memory * 1e9 / 4 / 6 / 3)  # weights and two moments
            is_good = memory(folder / "pieces", "pieces", f"data.expert={columns}")
            width = int((args.memory * 1e9 / 4 / 4) ** 0.5)  # half the moments of 4 layers
            words = [f"data.width={width}", "data.layers=4"]
            is_good = memory(folder / "sharded", "sharded optimizer", *words) and is_good
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}")
        sys.exit(1)
    if is_good:
        shutil.rmtree(folder)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
