"""Proves that ranks which part are told so, at the save and at the resume, and others nothing.

The experiment is parted.py, which freezes and thaws, sets rates and leaves out updates in the ways
that people do; on one process, on two, and on two with training.shares=2. Each run is made without
an interruption, and again with a kill -9 of all processes after a checkpoint. A way in which ranks
part must have a line or an error. Where there is none, the second run must end with the bits of the
first; where there is a line, it must say "not exact", and go on with the bits of rank 0 on all.

    python tests/proofs/parting.py [--only "raw loss" plateau] [--keep folder]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from compare import differences
from parted import FREEZING, OTHERS, RATES, begins_with

from expbase.checkpoint.layout import FOLDER

SCRIPT = Path(__file__).with_name("parted.py")
SETUPS = {  # how many processes, and what else is given
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "shares=2": (2, ["training.shares=2"]),
}
KILLED_AT = 27  # the checkpoint before is of 24, or of 20 if that was not written yet
LINES = {  # what a log may say, in short
    r"WARNING: .* differs between the ranks.*; rank 0's is saved": "line: differs",
    r"WARNING: \w+: the learning rate is": "line: rates",
    r"(?:Error|Mistake): .*was frozen when its layer was given": "error: wrap it again",
    r"(?:Error|Mistake): .*find_unused_parameters=True": "error: Paddle's, find_unused_parameters",
    r"(?:Error|Mistake): .*training.shares expected": "error: differs with shares",
    r"(?:Error|Mistake): .*has changed within the loop over": "error: changed within the loop",
}
NOT_EXACT = r"WARNING: not exact: .* differed between the ranks.*; all have rank 0's now"
# What must be said, by way and setup; elsewhere nothing may be.
THAWED = {"2 ranks": {"error: wrap it again"}}
BY_RATE = {
    "2 ranks": {"line: rates", "line: differs"},
    "shares=2": {"error: differs with shares"},
}
EXPECTED: dict[str, dict[str, set[str]]] = {
    "frozen before": THAWED,
    "frozen after": THAWED,
    **dict.fromkeys(RATES, BY_RATE),
    "plateau": {"2 ranks": BY_RATE["2 ranks"]},  # with shares each rank validates all of the data
    "raw loss": {"2 ranks": {"line: differs"}},
    "embedding": {"2 ranks": {"line: differs"}},
    "left out": {
        "2 ranks": {"line: differs"},
        "shares=2": {"error: differs with shares"},
    },
    "used late": {"2 ranks": {"error: Paddle's, find_unused_parameters"}},
}


def run(output: Path, way: str, setup: str, killed_at: int = 0) -> int:
    """Starts the experiment; the code with which it ends."""
    nprocs, words = SETUPS[setup]
    command = [sys.executable, str(SCRIPT), "--output", str(output), "--device", "cpu"]
    environment = {**os.environ, "PARTED_KILLED_AT": str(killed_at), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [*command, "--nprocs", str(nprocs), f"data.way={way}", *words],
        env=environment,
        capture_output=True,
        check=False,
        timeout=600,
    )
    return result.returncode


def log_of(output: Path) -> str:
    """Rank 0's log."""
    return (output / "worker_0.log").read_text(encoding="utf-8")


def said(output: Path) -> Counter[str]:
    """What rank 0's log says of the ranks, and how often."""
    log = log_of(output)
    return Counter({short: n for line, short in LINES.items() if (n := len(re.findall(line, log)))})


def verdict(folder: Path, way: str, setup: str) -> tuple[str, bool]:
    """What happens in one way on so many processes, and whether it may."""
    whole, killed = folder / "whole", folder / "killed"
    code = run(whole, way, setup)
    lines = said(whole)
    told = ", ".join(sorted(lines))
    expected = EXPECTED.get(way, {}).get(setup, set())
    is_error = any(text.startswith("error") for text in expected)
    is_good = set(lines) == expected and (code != 0) == is_error
    if code:
        return told or f"error {code}", is_good
    # A start says it once; an error stands in the log twice, with its place.
    is_good = is_good and set(lines.values()) <= {1}
    if run(killed, way, setup, KILLED_AT) == 0:
        return "not killed", False
    if run(killed, way, setup):
        return "does not go on", False
    not_exact = len(re.findall(NOT_EXACT, log_of(killed)))
    [name] = re.findall(r"resumed (step-\d+)", log_of(killed))
    if "line: differs" in lines:
        has_zeros = begins_with(killed, killed / FOLDER / name)
        text = f"told {not_exact} time at the resume, rank 0's bits on {sum(has_zeros)} ranks"
        return f"{text}; {told}", is_good and not_exact == 1 and has_zeros == [True, True]
    if wrong := differences(killed, whole):
        return f"OTHER BITS ({wrong[0]:.60}); {told or 'no line'}", False
    return f"exact; {told or 'no line'}", is_good and not not_exact


def main() -> None:
    """Prints the table and its count; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    ways = [*OTHERS, *FREEZING, *RATES]
    parser.add_argument("--only", nargs="+", choices=ways, default=ways, metavar="WAY")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    args = parser.parse_args()
    results = []
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        for way in args.only:
            for setup in SETUPS:
                folder = (args.keep or Path(temporary)) / way.replace(" ", "_") / setup[:6].strip()
                folder.mkdir(parents=True)
                text, is_good = verdict(folder, way, setup)
                results.append(is_good)
                counts[text.partition(" ")[0].strip(";,:")] += 1
                print(f"{'' if is_good else 'WRONG '}{way:32} {setup:9} {text}", flush=True)
    of_these = ", ".join(f"{n} {text}" for text, n in counts.items())
    print(f"{sum(results)} of {len(results)} as they should be: {of_these}")
    sys.exit(not results or not all(results))


if __name__ == "__main__":
    main()
