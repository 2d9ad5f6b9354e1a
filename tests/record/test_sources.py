"""Source files: those that differ between a checkpoint and the start that goes on from it."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import pytest
from repository import git
from tiny import Tiny, make, trained

from expbase.__main__ import main
from expbase.record.sources import Code

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
    for name in ("own_train.py", "nets.py"):
        os.utime(tmp_path / name, (1, 1))  # else what this process imports is younger than it
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
    assert {*Code.of(experiment()).files} == {"own_train.py", "nets.py"}
    assert "tiny.py" in Code.of(Tiny).files
    in_notebook = Code.of(type("Cell", (Tiny,), {"__module__": "no_such_module"}))
    assert (in_notebook.experiment, in_notebook.files) == ("Cell", {})


def test_those_that_have_changed_since_the_checkpoint_are_named_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(experiment(), folder / "run", max_iteration=1)
    trained(experiment(), folder / "run", max_iteration=2)
    assert "WARNING" not in capsys.readouterr().err
    (folder / "nets.py").write_text("WIDTH = 9\n")
    (folder / "own_train.py").write_text(f"{TRAIN}\n# another line\n")
    trained(experiment(), folder / "run", max_iteration=3)
    told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(told) == 1
    assert "not exact: nets.py, own_train.py: changed since the checkpoint was written; " in told[0]
    trained(experiment(), folder / "run", max_iteration=4)
    assert "WARNING" not in capsys.readouterr().err


def test_a_file_that_is_edited_while_it_runs_is_the_one_that_was_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Experiment(experiment()):  # type: ignore[misc]
        __module__ = "own_train"

        def train_batch(self) -> None:
            super().train_batch()
            (folder / "nets.py").write_text("WIDTH = 10\n")

    trained(Experiment, folder / "run", max_iteration=2)
    trained(experiment(), folder / "run", max_iteration=4)
    assert "not exact: nets.py: changed since" in capsys.readouterr().err


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]


def evaluated(args: dict[str, str], folder: Path) -> None:
    exp = make(experiment(), folder / "run", args)
    exp.input_spec = [paddle.static.InputSpec([None, 4])]  # type: ignore[attr-defined]
    exp.setup()
    exp.run()


def with_weights(path: str, folder: Path) -> None:
    trained(experiment(), folder / "new", {"init_model_path": path}, max_iteration=1)


def loaded(folder: Path) -> None:
    exp = make(experiment(), folder / "new")
    exp.setup()
    exp.load_checkpoint("last", run=folder / "run")
    exp.close()


def test_whatever_loads_a_checkpoint_names_what_has_changed_since(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    trained(experiment(), folder / "run", max_iteration=2)
    loads = [
        partial(evaluated, {"evaluate": "last"}),
        partial(evaluated, {"export": "last"}),
        loaded,
        partial(with_weights, "run"),
        partial(with_weights, "run/2"),
    ]
    for text in ("WIDTH = 8\n", "WIDTH = 9\n"):
        (folder / "nets.py").write_text(text)
        for load in loads:
            shutil.rmtree(folder / "new", ignore_errors=True)
            load(folder)
            told = warnings(capsys)
            assert len(told) == ("9" in text), load
            for line in told:
                name = "step-00000002: nets.py: changed since the checkpoint was written; what tra"
                assert name in line, load


def test_weights_of_another_class_and_bare_files_are_of_other_code_and_nothing_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exp = trained(type("Teacher", (experiment(),), {}), folder / "run", max_iteration=2)
    exp.save_model(folder / "model.safetensors")
    (folder / "nets.py").write_text("WIDTH = 9\n")
    for name in ("run", "model.safetensors"):
        with_weights(str(folder / name), folder)
        shutil.rmtree(folder / "new")
    assert warnings(capsys) == []


def test_another_class_that_goes_on_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(experiment(), folder / "run", max_iteration=2)
    other = type("Other", (experiment(),), {"__module__": "own_train"})
    trained(other, folder / "run", max_iteration=4)
    [told] = warnings(capsys)
    text = "was written by Experiment (own_train.py), and this is Other (own_train.py); what"
    assert f"not exact: the checkpoint {text}" in told
    assert main(["show", str(folder / "run")]) == 0
    text = "code: Experiment (own_train.py) → Other (own_train.py)\n"
    assert text in capsys.readouterr().out


def test_a_finished_run_that_is_given_other_code_says_so_before_it_says_that_it_has_finished(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = type("Other", (experiment(),), {"__module__": "own_train"})
    trained(experiment(), folder / "run", max_iteration=2)
    told = []
    for kind in (experiment(), other):
        capsys.readouterr()
        trained(kind, folder / "run", max_iteration=2)
        lines = capsys.readouterr().err.splitlines()
        told.append([line.split(": ", 2)[-1] for line in lines if "WARN" in line or "FINI" in line])
    (folder / "nets.py").write_text("WIDTH = 9\n")
    evaluated({"evaluate": "last"}, folder)
    trained(experiment(), folder / "run", max_iteration=2)
    of_evaluation, of_start = warnings(capsys)
    assert "step-00000002: nets.py: changed since the checkpoint was written" in of_evaluation
    assert "not exact: nets.py: changed since the checkpoint was written" in of_start
    ended = "iteration 2, epoch 1. To train on, raise training.max_iteration; --fresh starts over."
    rest = "what training has changed comes from the checkpoint, all else from the code of now"
    text = "was written by Experiment (own_train.py), and this is Other (own_train.py)"
    assert told == [[ended], [f"the checkpoint {text}; {rest}", ended]]


def test_of_a_package_it_is_the_folder_of_the_outermost_one(folder: Path) -> None:
    inner = folder / "package/scripts"
    inner.mkdir(parents=True)
    (folder / "package/nets.py").write_text("WIDTH = 8\n")
    (inner / "train.py").write_text(TRAIN.replace("import nets", "from .. import nets"))
    code = Code.of(importlib.import_module("package.scripts.train").Experiment)
    assert {*code.files} == {"scripts/train.py", "nets.py"}
    assert code.experiment == "Experiment (scripts/train.py)"


# --- what is kept of it --------------------------------------------------------------------------


def kept(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run / "sources").glob("*.py")}


def test_a_run_outside_of_git_keeps_each_distinct_file_and_show_names_those_that_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    trained(experiment(), run, max_iteration=2)
    first = kept(run)
    assert {*first.values()} == {TRAIN, "WIDTH = 8\n"}
    (folder / "nets.py").write_text("WIDTH = 9\n")
    trained(experiment(), run, max_iteration=4)
    assert {*kept(run).values()} == {TRAIN, "WIDTH = 8\n", "WIDTH = 9\n"}
    assert main(["show", str(run)]) == 0
    first_part, second_part = capsys.readouterr().out.split("session 2 of 2")
    [change] = [line for line in second_part.splitlines() if line.startswith("sources")]
    before, after = change.removeprefix("sources.nets.py: ").split(" → ")
    assert first[f"nets.{before}.py"] == "WIDTH = 8\n"
    assert kept(run)[f"nets.{after}.py"] == "WIDTH = 9\n"
    assert "\nsources" not in first_part


def test_in_git_it_keeps_what_the_commit_lacks(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "nets.py")
    trained(experiment(), folder / "run", max_iteration=1)
    assert {*kept(folder / "run").values()} == {TRAIN, "WIDTH = 8\n"}  # there is no commit yet
    shutil.rmtree(folder / "run")
    git(folder, "commit", "-qm", "One")
    trained(experiment(), folder / "run", max_iteration=2)
    assert {*kept(folder / "run").values()} == {TRAIN}


def test_more_than_a_megabyte_is_not_kept_and_that_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "nets.py").write_text("#" * 1_200_000)
    trained(experiment(), folder / "run", max_iteration=2)
    [told] = warnings(capsys)
    assert "are 1.2 MB, and a run keeps a copy of up to 1 MB: it keeps none. Commit them" in told
    assert not (folder / "run/sources").exists()


def test_a_file_that_cannot_be_copied_ends_no_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    (folder / "run/sources").write_text("in the way")
    assert trained(experiment(), folder / "run", max_iteration=2).iteration == 2
    assert "could not be copied into the run: " in warnings(capsys)[0]


def test_without_a_diff_the_run_keeps_its_changed_script_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "nets.py", "own_train.py")
    git(folder, "commit", "-qm", "One")
    (folder / "nets.py").write_text("WIDTH = 9\n")
    stub = folder / "bin/git"
    stub.parent.mkdir()
    real = shutil.which("git")
    stub.write_text(f'#!/bin/sh\ncase "$*" in *" diff "*) exit 1;; esac\nexec {real} "$@"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(stub.parent), prepend=os.pathsep)
    trained(experiment(), folder / "run", max_iteration=1)
    assert {*kept(folder / "run").values()} == {TRAIN, "WIDTH = 9\n"}
    [told] = warnings(capsys)
    assert (
        "no answer of git diff: CalledProcessError; the record of this start lacks that, " in told
    )
