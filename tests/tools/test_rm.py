"""`python -m expbase rm`: what failed before training is removed, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import Broken, Dataless, Tiny, make, trained

from expbase.__main__ import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind; three of them are nothing."""
    tmp_path = tmp_path_factory.mktemp("made")
    for name in ("failed", "deep/failed", "again", "continued"):
        with pytest.raises(ValueError, match="no data"):
            make(Dataless, tmp_path / name).setup()
    with pytest.raises(ValueError, match="no data"):
        make(Dataless, tmp_path / "again").setup()
    trained(Tiny, tmp_path / "continued", max_iteration=2)
    with pytest.raises(ValueError, match="no data"):  # the last start failed, and there is a run
        make(Dataless, tmp_path / "continued", max_iteration=4).setup()
    with pytest.raises(ArithmeticError):
        trained(Broken, tmp_path / "crashed")
    shutil.copytree(tmp_path / "failed", tmp_path / "kept")
    (tmp_path / "kept/checkpoints/damaged-1").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def left(folder: Path) -> set[str]:
    return {str(file.parent.relative_to(folder)) for file in folder.rglob("config.yaml")}


ALL = {"failed", "deep/failed", "again", "continued", "crashed", "kept"}
GONE = {"failed", "deep/failed", "again"}


def test_failed_starts_are_removed_after_a_yes(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "y")
    capsys.readouterr()
    assert main(["rm", str(runs)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert {row.split()[0] for row in table[1:-1]} == GONE
    assert table[-1] == "removed: 3"
    assert questions == ["remove these 3, with all that is in them? [y/N] "]
    assert left(runs) == ALL - GONE
    assert main(["rm", str(runs)]) == 0
    assert capsys.readouterr().out == f"no failed starts in {runs}\n"


def test_another_answer_and_none_are_a_no(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(text: str) -> str:
        raise EOFError

    for answer in (lambda text: "", lambda text: "n", nobody):
        monkeypatch.setattr("builtins.input", answer)
        assert main(["rm", str(runs)]) == 1
        assert capsys.readouterr().out.endswith("nothing was removed\n")
    assert left(runs) == ALL


def test_one_that_cannot_be_removed_is_named_and_the_others_are_removed(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refuse(name: Any, **where: Any) -> None:
        if "deep" in os.readlink(f"/proc/self/fd/{where['dir_fd']}"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(name, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert main(["rm", str(runs), "--yes"]) == 1
    said = capsys.readouterr()
    assert said.err == f"cannot be removed: {runs}/deep/failed: Operation not permitted\n"
    assert said.out.endswith("\nremoved: 2\n")
    assert left(runs) == ALL - GONE | {"deep/failed"}


def test_a_failed_start_in_the_folder_of_runs_takes_no_run_with_it(runs: Path) -> None:
    for file in ("config.yaml", "ledger.jsonl"):
        shutil.copy(runs / "failed" / file, runs)
    assert main(["rm", str(runs), "--yes"]) == 0
    assert left(runs) == ALL - GONE | {"."}


def test_a_script_needs_no_answer_and_what_was_started_meanwhile_stays(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*args: object) -> None:
        raise BlockingIOError("locked")

    with monkeypatch.context() as patched:
        patched.setattr("os.lockf", lambda file, how, size: locked() if size == 0 else None)
        patched.setattr("expbase.tools.runs._read_lock", lambda run, path: None)
        assert main(["rm", str(runs), "--yes"]) == 1
    assert "locked" in capsys.readouterr().err
    assert left(runs) == ALL
    assert main(["rm", str(runs), "--yes"]) == 0
    assert left(runs) == ALL - GONE
