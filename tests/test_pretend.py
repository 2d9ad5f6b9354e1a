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

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="this is the other pytest"),
    pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing()),
]
# To collect the other files takes longer than a third of what is marked.
_MARK = re.compile(r"mark\.(device|pretend)\b")
# What only a device can have wrong: memory that the host cannot touch, kernels that are queued,
# generators of its own, 16 bits. A name that is gone is an error of pytest.
_CHOSEN = """
    base/test_background.py
    base/test_rng.py::test_a_device_draws_from_a_generator_of_its_own
    checkpoint/test_checkpointer.py::test_a_save_holds_its_iteration_though_kernels_are_queued_and_training_goes_on
    engine/test_amp.py::test_a_run_in_float16_that_skips_updates_continues_to_the_same_bits[O2]
    engine/test_amp.py::test_an_update_waits_for_the_device_only_where_the_scaler_asks_it
    engine/test_resume.py::test_a_continued_run_ends_with_the_bits_of_one_that_was_not_interrupted
    engine/test_waits.py
    ranks/test_set_device.py
""".split()


def hold(*places: object) -> None:
    """Runs what is marked in these files or tests, on the pretend accelerator."""
    options = ["--device", pretend.NAME, "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-rs"]
    words = [*options, "-m", "device or pretend", *map(str, places)]
    command = [sys.executable, "-m", "pytest", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    how = {"env": environment, "cwd": TESTS.parent, "timeout": 2 * LONG_SECONDS}
    result = subprocess.run(command, capture_output=True, text=True, **how)
    if result.returncode:  # the stack of a process that died is on stderr
        pytest.fail(f"{result.stdout[-9000:]}\n{result.stderr[-9000:]}", pytrace=False)


def test_what_only_a_device_can_have_wrong_holds_on_the_pretend_accelerator() -> None:
    hold(*(TESTS / place for place in _CHOSEN))


@pytest.mark.long
def test_what_is_about_a_device_holds_on_the_pretend_accelerator() -> None:
    paths = (path for path in TESTS.rglob("test_*.py") if _MARK.search(path.read_text()))
    hold(*sorted(paths))
