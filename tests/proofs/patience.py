"""Proof: a rank that waits for another's long write does not run into gloo's 30 s.

    python tests/proofs/patience.py --seconds 40

Two processes; each checkpoint of rank 0 takes that long to write, while training goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import time
from expbase.checkpoint import storage as checkpoint
from expbase import main
from tiny import Tiny

real = checkpoint.write_flushed

def slow(path, parts):
    if path.name == "state.json":
        time.sleep({seconds})
    return real(path, parts)

checkpoint.write_flushed = slow

if __name__ == "__main__":
    main(Tiny)
"""


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.format(seconds=seconds))
        words = ["--nprocs", "2", "--output", f"{folder}/run", "training.max_iteration=4"]
        words += ["training.save_interval=2"]
        result = subprocess.run(
            [sys.executable, str(script), *words],
            env={"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=4 * seconds + 60,
            check=False,
        )
    passed = result.returncode == 0 and "saved step-00000004" in result.stderr
    print(f"exit code {result.returncode}; {passed:d} of 1 waited longer than gloo does")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
