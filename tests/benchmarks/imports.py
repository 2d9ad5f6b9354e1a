"""What `import expbase` adds to `import paddle`, in one process after the other.

    python tests/benchmarks/imports.py

Prints the median in milliseconds over fresh processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

CODE = """
import time, warnings
warnings.simplefilter("ignore")
import paddle
began = time.perf_counter()
import expbase
print((time.perf_counter() - began) * 1e3)
"""


def main() -> None:
    """Prints the cost."""
    command = [sys.executable, "-c", CODE]
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    options = {"capture_output": True, "text": True, "check": True, "env": compiled}
    subprocess.run(command, **options)  # compiles
    runs = [subprocess.run(command, **options) for _ in range(5)]
    times = [float(run.stdout.splitlines()[-1]) for run in runs]
    print(f"import expbase adds {statistics.median(times):.1f} ms to import paddle (allowed: 30)")


if __name__ == "__main__":
    main()
