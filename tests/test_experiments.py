"""The experiments, in short; proofs/experiments.py runs them whole."""

from __future__ import annotations

import re
import runpy
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from small import SMALL, given_to, make_library
from tiny import curve

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["gallery.md", "gallery.zh.md"])
def test_the_gallery_has_a_row_of_each_claim(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "proofs"))
    from experiments import CLAIMS, holds

    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| \[.*\]\(\.\./experiments/", line)]
    for claimed, found in zip(CLAIMS, rows, strict=True):
        assert holds(claimed, found, chinese=name == "gallery.zh.md"), found
    folders = {path.parent.name for path in ROOT.glob("experiments/*/train.py")}
    assert {claimed.partition(",")[0] for claimed in CLAIMS} == folders


def test_each_module_of_the_experiments_has_a_name_of_its_own() -> None:
    # They are imported by that name alone, of several experiments and tests in one process.
    ours = [path for path in ROOT.glob("experiments/*/*.py") if path.name != "train.py"]
    others = [path for path in ROOT.glob("tests/**/*.py") if path.parent.name != "benchmarks"]
    counts = Counter(path.name for path in ours + others)
    assert [path for path in ours if counts[path.name] > 1] == []


@pytest.fixture
def _small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files of the standard library, of which the experiments take a few."""
    make_library(tmp_path / "library")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))


@pytest.mark.long
@pytest.mark.usefixtures("_small_library")
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        (name, metric)
        for name, (_, metric) in SMALL.items()
        if name not in ("line", "digits", "cifar")  # which have tests of their own
    ],
)
def test_an_experiment_trains_is_continued_and_evaluated(
    tmp_path: Path,
    name: str,
    metric: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "cartpole":
        pytest.importorskip("gymnasium", "1.1", reason="it needs the extra `cartpole`")
    script = ROOT / "experiments" / name / "train.py"
    output = tmp_path / "run"
    monkeypatch.syspath_prepend(str(script.parent))  # as for a script

    def run(*given: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(script), "--output", str(output), *given])
        runpy.run_path(str(script), run_name="__main__")

    given = given_to(name, tmp_path / "data")
    for end in (4, 8):
        run(*given, f"training.max_iteration={end}")
    assert "CONTINUING" in capsys.readouterr().err
    assert sorted(curve(output, metric)) == [4, 8]
    run("--evaluate", "best")
    assert metric.removeprefix("valid/") in capsys.readouterr().out
