"""`python -m expbase new`: a folder to begin from, a copy of one of our experiments."""

from __future__ import annotations

import errno
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from pages import SCRIPT
from tiny import curve, run_script

from expbase.__main__ import main
from expbase.tools import new

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(script.parent.name for script in ROOT.glob("experiments/*/train.py"))
# Of those whose script or config needs more.
NEEDED = {
    "cartpole": ["cart.py"],
    "cifar": ["archive.py", "mistakes.py", "resnet.py", "shapes.py", "small.yaml"],
    "ctr": ["README.md", "README.zh-CN.md", "blocks.py", "startup.py"],
    "flow": ["galaxy.py"],
    "multitask": ["README.md", "README.zh-CN.md", "lines.py"],
    "pinn": ["burgers.py", "pictures.py"],
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(capsys: Capture, *words: str) -> list[list[str]]:
    """The lines of what it prints, in words of a shell."""
    capsys.readouterr()
    assert main(["new", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: Capture, *words: str, code: int = 78) -> str:
    capsys.readouterr()
    assert main(["new", *words]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.removeprefix("python -m expbase new: error: ").strip()


def test_a_new_folder_passes_the_smoke_test_and_trains_by_the_commands_that_are_printed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, smoke, train, change = made(capsys, "a b/x")
    assert files == ["a", "b/x:", "config.yaml,", "train.py"]
    assert [words[0] for words in (smoke, train, change)] == ["try", "train", "change"]
    result = run_script(tmp_path / smoke[2], *smoke[3:], "--device", "cpu")
    assert smoke[1:] == ["python", "a b/x/train.py", "--smoke"]
    assert (result.returncode, "smoke test passed" in result.stdout) == (0, True), result.stderr
    monkeypatch.setattr(sys, "argv", [*train[2:], "--device", "cpu", "training.max_iteration=200"])
    runpy.run_path(train[2], run_name="__main__")
    training = yaml.safe_load((tmp_path / "a b/x/config.yaml").read_text())["training"]
    assert [*curve(tmp_path / "runs/x", "train/loss")] == [100, 200]
    assert training["log_interval"] == 100  # by default it is 10
    assert {"a b/x/train.py", "a b/x/config.yaml"} <= {word.strip(",") for word in change}


def test_what_a_copy_imports_and_is_not_installed_is_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "needs" not in {words[0] for words in made(capsys, "x", "--from", "digits")}
    monkeypatch.setattr(new, "find_spec", lambda name: None)
    lines = [made(capsys, name, "--from", name)[1] for name in ("digits", "cartpole", "line")]
    install = ["needs", "pip", "install"]
    assert lines[0] == [*install, "paddle-expbase[experiments]"]
    assert lines[1] == [*install, "paddle-expbase[cartpole]"]
    assert lines[2][0] == "try"


def test_the_script_to_begin_from_is_that_of_the_readme() -> None:
    assert (ROOT / "experiments/line/train.py").read_text() == SCRIPT


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_copy_holds_the_files_that_the_experiment_needs_and_no_more(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    (_, *steps) = made(capsys, "copy", "--from", name)
    source = ROOT / "experiments" / name
    needed = ["train.py", "config.yaml", *NEEDED.get(name, [])]
    expected = {file: (source / file).read_bytes() for file in needed}
    assert {file.name: file.read_bytes() for file in Path("copy").iterdir()} == expected
    by_runner = ["train", "python", "-m", "expbase", "run", "copy/config.yaml"]
    assert (by_runner in steps) == (name == "ctr")  # whose YAML is for the runner


def test_what_a_run_has_left_in_an_experiment_is_not_copied(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new, "_EXPERIMENTS", tmp_path / "experiments")
    for file in (
        "train.py",
        "config.yaml",
        "nohup.out",
        "notes.md",
        "other.py",
        "other.yaml",
        "runs/a/worker_0.log",
        "__pycache__/x.pyc",
    ):
        (tmp_path / "experiments/line" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "experiments/line" / file).write_text("a: 1\n")
    assert made(capsys, "copy")[0] == ["copy:", "config.yaml,", "train.py"]
    assert sorted(path.name for path in Path("copy").iterdir()) == ["config.yaml", "train.py"]


@pytest.mark.parametrize("folder", ["clone/mine", "clone/experiments/mine", "mine"])
def test_a_folder_in_the_clone_is_one_that_its_git_shows(
    folder: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clone/.git").mkdir(parents=True)
    monkeypatch.setattr(new, "_CLONE", tmp_path / "clone")
    capsys.readouterr()
    assert main(["new", folder]) == 0
    told = f"{folder}: lies in the clone of expbase, whose git shows it as untracked; "
    error = capsys.readouterr().err
    assert error.startswith(told) == folder.startswith("clone/")
    assert error == "" or error.endswith(" for an experiment of your own: new mine\n")


def test_a_folder_for_which_there_is_no_room_is_not_left_half_made(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(new.shutil, "copyfile", full)
    assert "No space left on device: 'line/train.py'" in refused(capsys, "line", code=1)
    assert [*tmp_path.iterdir()] == []


def test_what_is_there_already_is_left_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    Path("folder").mkdir()
    Path("file").write_text("mine")
    Path("link").symlink_to("nowhere")
    for name in ("folder", "file", ".", "link"):
        assert f"{name}: exists already. Delete it, or give another name." in refused(capsys, name)
    assert "Not a directory: 'file/x'" in refused(capsys, "file/x", code=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link"]
    assert Path("file").read_text() == "mine"


def test_a_mistyped_experiment_is_answered_with_all_that_there_are(
    tmp_path: Path, capsys: Capture
) -> None:
    for name in ("digit", "../x"):
        with pytest.raises(SystemExit):
            main(["new", "x", "--from", name])
        error = capsys.readouterr().err
        assert f"invalid choice: '{name}'" in error
        assert all(known in error for known in EXPERIMENTS)
    assert [*tmp_path.iterdir()] == []
