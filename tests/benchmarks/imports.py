"""What `from expbase import main` adds to `import paddle`, in one fresh process after the other.

    python tests/benchmarks/imports.py

Prints the minimum and the median, in milliseconds of the processor: other work on the machine adds
to every run, and never takes away. Printed, too, is what is left without yacs and yaml, which read
the configs: in every other process they are imported before.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

RUNS = 15
CODE = """
import time, warnings
warnings.simplefilter("ignore")
import paddle
{first}
began = time.process_time()
from expbase import main
print((time.process_time() - began) * 1e3)
"""
FIRST = {"from expbase import main adds": "", "of it without yacs and yaml": "import yacs.config"}


def measured(first: str) -> float:
    """Milliseconds in a fresh process, in which something was imported first."""
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CODE.format(first=first)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=compiled)
    return float(run.stdout.splitlines()[-1])


def main() -> None:
    """Prints the cost."""
    measured("")  # compiles
    runs = [{name: measured(first) for name, first in FIRST.items()} for _ in range(RUNS)]
    for name in FIRST:
        times = [run[name] for run in runs]
        print(
            f"{name + ':':31} {min(times):.1f} ms, median {statistics.median(times):.1f} "
            "(allowed: 20)"
        )


if __name__ == "__main__":
    main()
