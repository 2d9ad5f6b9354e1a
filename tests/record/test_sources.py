"""Source files: those that differ between a checkpoint and the start that goes on from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, trained

from expbase.record import sources

TRAIN = """
from tiny import Tiny
import nets

class Experiment(Tiny):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with two modules, which leave with it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_train.py").write_text(TRAIN)
    (tmp_path / "nets.py").write_text("WIDTH = 8\n")
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


def experiment() -> Any:
    importlib.invalidate_caches()
    for name in ("own_train", "nets"):
        sys.modules.pop(name, None)
    return importlib.import_module("own_train").Experiment


def test_they_are_those_of_the_folder_and_no_installed_ones(
    folder: Path,
) -> None:
    assert {*sources.checksums(experiment())} == {"own_train.py", "nets.py"}
    assert "tiny.py" in sources.checksums(Tiny)
    in_notebook = type("Cell", (Tiny,), {"__module__": "no_such_module"})
    assert sources.checksums(in_notebook) == {}


def test_those_that_have_changed_since_the_checkpoint_are_named_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(experiment(), folder / "run", max_iteration=2)
    trained(experiment(), folder / "run", max_iteration=4)
    assert "WARNING" not in capsys.readouterr().err
    (folder / "nets.py").write_text("WIDTH = 9\n")
    (folder / "own_train.py").write_text(f"{TRAIN}\n# another line\n")
    trained(experiment(), folder / "run", max_iteration=6)
    told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(told) == 1
    assert "not exact: nets.py, own_train.py: changed since the checkpoint was written; " in told[0]
    trained(experiment(), folder / "run", max_iteration=8)
    assert "WARNING" not in capsys.readouterr().err


def test_a_file_that_is_edited_while_it_runs_is_the_one_that_was_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Editing(experiment()):  # type: ignore[misc]
        __module__ = "own_train"

        def train_batch(self) -> None:
            super().train_batch()
            (folder / "nets.py").write_text("WIDTH = 10\n")

    trained(Editing, folder / "run", max_iteration=2)
    trained(experiment(), folder / "run", max_iteration=4)
    assert "not exact: nets.py: changed since" in capsys.readouterr().err
