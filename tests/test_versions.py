"""Which versions of Python and of Paddle work: setup.cfg, the pages and the proof say the same."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import paddle
import pytest
from repository import setup_cfg
from tiny import TESTS, Tiny, make

from expbase import ConfigError
from expbase.engine import start

ROOT = TESTS.parent
ROW = re.compile(r"^\| (3\.\d+) \| (\d+\.\d+\.\d+) \| (.*) \| (.*) \| (.*) \|$", re.M)


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TESTS / "proofs"))
    import versions

    return versions


def minors(text: str) -> set[str]:
    """The minor versions of 3 in a range: 3.0 and 3.1 of `>=3.0,<3.2`."""
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", text).groups()  # type: ignore[union-attr]
    return {f"3.{minor}" for minor in range(int(first), int(end))}


def pythons() -> set[str]:
    return minors(setup_cfg()["options"]["python_requires"])


def paddles(proof: Any) -> set[str]:
    return minors(proof.ranges()["paddlepaddle"])


def minor(version: str) -> str:
    return version.rpartition(".")[0]


def test_the_proof_tries_each_version_that_setup_cfg_allows(proof: Any) -> None:
    cells = [cell for cell in proof.CELLS if not cell.refused]
    assert {cell.python for cell in cells} == pythons()
    assert {minor(cell.paddle) for cell in cells} == paddles(proof)
    assert {cell.oldest for cell in cells} == {True, False}
    assert not {minor(cell.paddle) for cell in proof.CELLS if cell.refused} & paddles(proof)
    classifiers = setup_cfg()["metadata"]["classifiers"]
    assert {*re.findall(r"Python :: (3\.\d+)", classifiers)} == pythons()


@pytest.mark.parametrize("page", ["versions.md", "versions.zh.md"])
def test_the_table_has_a_row_for_each_cell_of_the_proof_and_none_is_red(
    proof: Any, page: str
) -> None:
    rows = ROW.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    lowest = proof.oldest()
    for cell, (python, version, packages, used, tested) in zip(proof.CELLS, rows, strict=True):
        assert (python, version) == (cell.python, cell.paddle)
        found = dict(package.split() for package in packages.split(", "))
        is_oldest = all(release(found[name]) == release(lowest[name]) for name in proof.NEEDED)
        assert is_oldest == cell.oldest
        assert used == ("refused" if cell.refused else "11 of 11")
        assert re.fullmatch(r"|\d+ passed(, \d+ skipped)?", tested)
        assert bool(tested) != cell.refused


def release(version: str) -> list[int]:
    """The numbers of a version without zeros at their end: 13 is 13.0.0."""
    return [int(part) for part in re.sub(r"(\.0)+$", "", version).split(".")]


def test_the_readme_and_the_error_name_the_range(
    proof: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def span(of: set[str]) -> str:
        numbers = sorted(int(one.partition(".")[2]) for one in of)
        return f"3.{numbers[0]} to 3.{numbers[-1]}"

    readme = (ROOT / "README.md").read_text()
    assert f"Python {span(pythons())} and PaddlePaddle {span(paddles(proof))}" in readme
    both = [span(of).replace("to", "到") for of in (pythons(), paddles(proof))]
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert "Python {} 和 PaddlePaddle {}".format(*both) in chinese
    monkeypatch.setattr(paddle, "__version__", "2.0.0")
    with pytest.raises(ConfigError, match=f"expected {span(paddles(proof))}, with"):
        start.check_platform()


def test_a_paddle_that_is_too_old_is_refused_by_name_before_anything_else(
    proof: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [refused] = (cell.paddle for cell in proof.CELLS if cell.refused)
    monkeypatch.setattr(paddle, "__version__", refused)
    with pytest.raises(ConfigError, match=f"^paddle {refused}: expected 3.0 to 3.3, .*__dlpack__"):
        make(Tiny, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert refused in (ROOT / "docs/versions.md").read_text()


WINDOWS = """
import os, signal, sys
import paddle, psutil, visualdl  # which know Windows
sys.argv = [*{argv!r}]
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "getuid", "setpgrp", "waitid"):
    delattr(os, name)
for name in ("fcntl", "resource", "termios", "tty"):
    sys.modules[name] = None
sys.platform = "win32"
{body}
"""
SCRIPT = """
from expbase import ExperimentBase, main
class Experiment(ExperimentBase): ...
main(Experiment)
"""
BY_HAND = """
import argparse
from expbase import ConfigError, ExperimentBase
try:
    ExperimentBase({}, argparse.Namespace(output="out"))
except ConfigError as error:
    sys.exit(f"by hand: {error}")
"""
TOOLS = "import runpy; runpy.run_module('expbase', run_name='__main__')"


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "argv", "code", "words"),
    [
        (SCRIPT, ["train.py", "--output", "out"], 78, "train.py: error: Windows"),
        (BY_HAND, ["train.py"], 1, "by hand: Windows"),
        (TOOLS, ["expbase", "new", "mine"], 78, "python -m expbase new: error: Windows"),
    ],
)
def test_windows_is_refused_in_one_line(
    tmp_path: Path, body: str, argv: list[str], code: int, words: str
) -> None:
    text = WINDOWS.format(argv=argv, body=body)
    command = [sys.executable, "-W", "ignore", "-c", text]
    # A new process, and no fork, which would have imported everything.
    result = subprocess.run(
        command, cwd=tmp_path, timeout=forks.LONG_SECONDS, capture_output=True, text=True
    )
    assert result.stderr.splitlines() == [
        f"{words}: expected Linux. Install Python, paddle and paddle-expbase in WSL2."
    ]
    assert result.returncode == code
    assert [*tmp_path.iterdir()] == []


def test_a_paddle_that_was_not_tried_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ["0.0.0", "3.4.0", "3.10.0rc1", "4.0.0"]:
        monkeypatch.setattr(paddle, "__version__", version)
        start.check_platform()


def test_a_part_of_paddle_that_is_missing_is_not_taken_for_paddle(tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("import a_part_that_is_missing")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        for name in ("paddle", "expbase", "expbase.base.import_paddle"):
            patch.delitem(sys.modules, name)
        with pytest.raises(ModuleNotFoundError, match="'a_part_that_is_missing'"):
            _ = importlib.import_module("expbase").main
