"""What the tests do before they begin, and what their last line says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TESTS

TWO = """
import pytest

def test_short() -> None: ...

@pytest.mark.long
def test_long() -> None: ...
"""
SETTINGS = "[pytest]\nmarkers = long\n    device\n    pretend\naddopts = -q -m 'not long'\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with two tests, and with our conftest.py."""
    (tmp_path / "tests").mkdir()
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests/test_two.py").write_text(TWO)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    return tmp_path


def run(clone: Path, *words: str) -> tuple[int, list[str]]:
    """The exit code of its tests, and the lines that they print."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    how = {"cwd": clone, "env": environment, "timeout": 100}
    result = subprocess.run(command, capture_output=True, text=True, **how)  # type: ignore[call-overload]
    return result.returncode, (result.stdout + result.stderr).splitlines()


def test_the_last_line_says_how_many_are_left_out_and_how_to_run_them(clone: Path) -> None:
    (clone / "expbase").symlink_to(TESTS.parent / "expbase")
    how = 'python -m pytest -m long runs them, python -m pytest -m "" all'
    code, lines = run(clone, "-n", "1")
    assert (code, lines[-1]) == (0, f"left out: 1 long tests; {how}")
    assert lines[-2].startswith("1 passed")


def test_tests_that_would_test_another_clone_end_with_a_sentence(clone: Path) -> None:
    (clone / "expbase").mkdir()
    (clone / "expbase/__init__.py").touch()
    code, lines = run(clone, "-p", "no:xdist")
    assert code == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in lines if "these tests would test" in line)
    assert f"expected {clone / 'expbase/__init__.py'}, beside which they lie. Install" in line
