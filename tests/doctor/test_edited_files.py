"""Files that were edited while they were loaded, or after that, are named."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from expbase.doctor.edited_files import edited_files
from expbase.record.sources import Code


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """A class whose module has imported another one; both files are older than this process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    (tmp_path / "edited_train.py").write_text("import edited_nets\nclass Experiment: pass\n")
    (tmp_path / "edited_nets.py").write_text("WIDTH = 8\n")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    importlib.invalidate_caches()
    found: type = importlib.import_module("edited_train").Experiment
    return found


def told(code: Code, experiment: type) -> list[str]:
    """The first words of each line: "edited_nets.py: edited since"."""
    return [" ".join(text.split()[:3]) for text in edited_files(code, experiment)]


def test_a_file_that_is_another_one_now_is_named_once(experiment: type, tmp_path: Path) -> None:
    code = Code.of(experiment)
    assert {*code.files} == {"edited_train.py", "edited_nets.py"}
    assert told(code, experiment) == []
    (tmp_path / "edited_nets.py").write_text("WIDTH = 9\n")
    assert told(code, experiment) == ["edited_nets.py: edited since"]
    assert Code.of(experiment, code).files == code.files != Code.of(experiment).files
    (tmp_path / "edited_nets.py").unlink()
    assert told(code, experiment) == ["edited_nets.py: edited since"]


def test_a_file_that_is_younger_than_the_process_is_named(experiment: type, tmp_path: Path) -> None:
    began = psutil.Process().create_time()
    for seconds, is_told in ((-1, False), (1, True)):
        os.utime(tmp_path / "edited_nets.py", (began + seconds,) * 2)
        lines = told(Code.of(experiment), experiment)
        assert lines == ["edited_nets.py: written after"] * is_told, seconds


def test_so_is_one_that_was_imported_since(experiment: type, tmp_path: Path) -> None:
    code = Code.of(experiment)
    (tmp_path / "edited_late.py").touch()
    importlib.invalidate_caches()
    importlib.import_module("edited_late")
    assert told(code, experiment) == ["edited_late.py: written after"]
    os.utime(tmp_path / "edited_late.py", (time.time() - 10**7,) * 2)
    assert told(code, experiment) == []


def test_a_notebook_imports_when_it_pleases(
    experiment: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edited_nets.py").touch()
    assert told(Code.of(experiment), experiment) == ["edited_nets.py: written after"]
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert told(Code.of(experiment), experiment) == []
