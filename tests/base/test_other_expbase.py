"""Another distribution that is imported as expbase, beside ours or over it, is told."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import expbase
from expbase import __main__
from expbase.base import other_expbase

ROOT = Path(__file__).parents[2]
THEIRS = "expbase/__init__.py,sha256=x,3437\nexpbase/util/timer.py,sha256=x,6718\n"
# What `pip install -e .` of a clone of ours has written before 1.0.
CLONE = "__editable__.expbase-0.2.0.pth,sha256=x,9\nexpbase-0.2.0.dist-info/METADATA,sha256=x,9\n"
WAY_OUT = "Run `pip uninstall expbase`, then install paddle-expbase again, with --force-reinstall."


def install(folder: Path, record: str, name: str = "expbase-0.1.0") -> None:
    (folder / f"{name}.dist-info").mkdir()
    (folder / f"{name}.dist-info/RECORD").write_text(record)


def call(folder: Path, init: str | None) -> subprocess.CompletedProcess[str]:
    """Calls `ls` of a copy of the package that has another __init__.py, or none at all."""
    shutil.copytree(ROOT / "expbase", folder / "expbase", ignore=lambda *_: {"experiments"})
    (folder / "expbase/__init__.py").unlink()
    if init is not None:
        (folder / "expbase/__init__.py").write_text(init)
    # Without site the clone is out of reach: a whole package beats one without __init__.py.
    path = os.pathsep.join([str(folder), str(Path(yaml.__file__).parents[1])])
    command = [sys.executable, "-S", "-m", "expbase", "ls", "."]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_name_is_that_of_setup_cfg_and_not_the_one_of_another_project() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    assert parser["metadata"]["name"] == other_expbase.NAME == "paddle-expbase"


@pytest.mark.parametrize(
    ("record", "name", "is_told"),
    [
        (THEIRS, "expbase-0.1.0", True),
        (THEIRS, "expbase-0.2.0", True),  # a wheel of ours that was built under this name
        (CLONE, "expbase-0.2.0", False),
        (THEIRS, "paddle_expbase-1.0.0", False),
    ],
)
def test_a_distribution_that_has_our_files_is_told_once(
    record: str, name: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, record, name)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path), "nowhere"])
    version = name.partition("-")[2]
    said = (
        f"the distribution expbase {version} is installed, too: it is not paddle-expbase, and its "
        f"files have the names of ours; expected one of them. {WAY_OUT}"
    )
    assert [*other_expbase.told()] == [said] * is_told


def test_a_list_of_files_that_cannot_be_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "expbase-0.1.0.dist-info/RECORD").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [*other_expbase.told()] == []


def test_a_tool_tells_it_and_does_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, THEIRS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert __main__.main(["new", str(tmp_path / "mine")]) == 0
    told = capsys.readouterr().err
    assert told.startswith("python -m expbase: the distribution expbase 0.1.0 is installed, too")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("init", "wrong"),
    [
        ('__version__ = "0.1.0"\n', "is another project's"),  # theirs came after ours
        (None, "is not there"),  # and was uninstalled
    ],
)
def test_a_tool_whose_package_is_not_ours_says_so_and_does_nothing(
    init: str | None, wrong: str, tmp_path: Path
) -> None:
    result = call(tmp_path, init)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"python -m expbase: error: expbase/__init__.py {wrong}: the distribution expbase, which "
        f"is not paddle-expbase, has overwritten or taken away files of ours. {WAY_OUT}\n"
    )


def test_a_copy_that_is_ours_is_not_told(tmp_path: Path) -> None:
    assert other_expbase.broken(expbase.__version__) == ""
    result = call(tmp_path, Path(expbase.__file__).read_text())
    assert "error: .: " in result.stderr or result.returncode == 0, result.stderr
    assert "distribution" not in result.stderr
