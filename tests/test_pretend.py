"""What is about a device holds on the pretend accelerator, too, in a pytest of its own: a process
has the device from its import of paddle on, or never.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pretend
import pytest
from forks import LONG_SECONDS
from tiny import DEVICE, TESTS

# To collect the other files takes longer than a third of what is marked.
_MARK = re.compile(r"mark\.(device|pretend)\b")


@pytest.mark.skipif(DEVICE != "cpu", reason="this is the other pytest")
@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_what_is_about_a_device_holds_on_the_pretend_accelerator() -> None:
    paths = [path for path in TESTS.rglob("test_*.py") if _MARK.search(path.read_text())]
    options = ["--device", pretend.NAME, "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-rs"]
    words = [*options, "-m", "(device or pretend) and not long", *map(str, sorted(paths))]
    command = [sys.executable, "-m", "pytest", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    how = {"env": environment, "cwd": TESTS.parent, "timeout": LONG_SECONDS}
    result = subprocess.run(command, capture_output=True, text=True, **how)
    if result.returncode:  # the stack of a process that died is on stderr
        pytest.fail(f"{result.stdout[-9000:]}\n{result.stderr[-9000:]}", pytrace=False)
