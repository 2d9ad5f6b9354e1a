"""What is noted and saved of a run's code, with real git repositories."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository import GIT, commit, git, new_repository

from expbase.record import git as record


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in GIT.items():
        monkeypatch.setenv(name, value)
    return new_repository(tmp_path / "repository")


def described(repository: Path) -> dict[str, Any]:
    """What is noted when a run beside the repository starts."""
    return dict(looked(repository).keep(repository.parent / "run").facts)


def looked(repository: Path) -> record.WorkTree:
    return record.look(record.top_of(repository), repository, ["train.py", "new.py"])


def patch_of(repository: Path, code: dict[str, Any]) -> str:
    path = repository.parent / "run/sources" / f"{code['state']}.diff"
    return path.read_bytes().decode("utf-8", "replace")


def names_in(patch: str) -> list[str]:
    lines = [line for line in patch.splitlines() if line.startswith("diff --git ")]
    return [line.split(" b/")[1] for line in lines]


def tree(folder: Path) -> dict[Path, tuple[bytes, bool]]:
    """The content of each file but git's own, and whether it can be run."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {p.relative_to(folder): (p.read_bytes(), os.access(p, os.X_OK)) for p in files}


def test_of_a_clean_repository_the_commit_is_noted_and_nothing_is_saved(repository: Path) -> None:
    (repository / ".gitignore").write_text("ignored.py\n")
    commit(repository, "two")
    (repository / "ignored.py").touch()
    clean = {"commit": git(repository, "rev-parse", "HEAD"), "branch": "trunk"}
    clean |= {"dirty": False, "state": None}
    assert described(repository) == clean
    assert not (repository.parent / "run").exists()
    git(repository, "checkout", "--quiet", "--detach")
    assert described(repository) == {**clean, "branch": "HEAD"}


def test_each_distinct_diff_is_saved_once(repository: Path) -> None:
    run = repository.parent / "run"
    (repository / "train.py").write_text("rate = 2\n")
    first = described(repository)
    assert first["dirty"]
    assert "+rate = 2\n" in patch_of(repository, first)
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert described(repository) == first
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == times
    (repository / "train.py").write_text("rate = 3\n")
    assert described(repository)["state"] != first["state"]
    assert len(list((run / "sources").iterdir())) == 2


def test_git_apply_makes_a_fresh_clone_the_same(repository: Path, tmp_path: Path) -> None:
    for name, data in (("a.bin", b"\x00\x01"), ("gone.py", b"gone\n"), ("old.py", b"x\n" * 9)):
        (repository / name).write_bytes(data)
    (repository / ".gitattributes").write_text("*.py diff=mine\n")
    (repository / "train.py").write_text("".join(f"{line}\n" for line in range(9)))
    commit(repository, "two")
    (repository / "a.bin").write_bytes(b"\x00\x02" * 99)
    (repository / "gone.py").unlink()
    (repository / "staged.py").write_text("no newline at the end")
    git(repository, "mv", "old.py", "moved.py")
    git(repository, "add", "staged.py")
    (repository / "train.py").write_text("".join(f"{line}\n" for line in range(9) if line != 5))
    (repository / "train.py").chmod(0o755)
    # What a person likes a diff to look like; git apply could not read it.
    for key in ("diff.external", "diff.mine.textconv"):
        git(repository, "config", key, f"touch {tmp_path / 'marker'}; false")
    for key, value in {"color.ui": "always", "diff.noprefix": "true", "diff.context": "0"}.items():
        git(repository, "config", key, value)
    state = described(repository)["state"]
    assert not (tmp_path / "marker").exists()
    git(tmp_path, "clone", "--quiet", str(repository), "clone")
    git(tmp_path / "clone", "apply", "--index", str(tmp_path / f"run/sources/{state}.diff"))
    assert len(tree(repository)) == 5
    assert tree(tmp_path / "clone") == tree(repository)


def test_nothing_is_written_to_the_repository(repository: Path) -> None:
    (repository / "other.py").touch()
    commit(repository, "two")
    (repository / "train.py").write_text("rate = 2\n")
    (repository / "new.py").touch()
    os.utime(repository / "other.py", (1, 1))  # git would like to note that it is the same
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file()}
    assert names_in(patch_of(repository, described(repository))) == ["train.py"]
    after = {path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file()}
    assert after == before


def test_a_worktree_of_a_repository_is_a_work_tree_of_its_own(
    repository: Path, tmp_path: Path
) -> None:
    git(repository, "worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
    (tmp_path / "side/train.py").write_text("rate = 2\n")
    assert described(tmp_path / "side")["branch"] == "side"
    assert described(tmp_path / "side")["dirty"]
    assert not described(repository)["dirty"]


def test_a_conflict_is_saved_as_it_stands(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "side")
    for branch, text in (("side", "rate = 2\n"), ("trunk", "rate = 3\n")):
        git(repository, "checkout", "--quiet", branch)
        (repository / "train.py").write_text(text)
        commit(repository, branch)
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "merge", "side")
    assert "+<<<<<<< HEAD\n" in patch_of(repository, described(repository))


def test_without_git_that_is_the_note(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.look(None, repository, []).facts == {"note": "not in a git repository"}
    monkeypatch.setenv("PATH", str(repository))
    note = "no answer of git rev-parse, status, diff: FileNotFoundError"
    assert described(repository) == {"note": note}


def test_that_git_refuses_is_noted_without_the_path(repository: Path) -> None:
    (repository / ".git/HEAD").write_text("nonsense")
    note = "no answer of git rev-parse, status, diff: CalledProcessError"
    assert described(repository) == {"note": note}


LOST = {"rev-parse": {"commit"}, "diff": {"state"}, "status": set(), "cat-file": set()}


@pytest.mark.parametrize(("question", "lost"), [*LOST.items(), ("ls-tree", set())])
def test_a_git_that_hangs_loses_what_it_would_have_answered_and_no_more(
    repository: Path, monkeypatch: pytest.MonkeyPatch, question: str, lost: set[str]
) -> None:
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if question in command:
            return real(["sleep", "60"], **{**options, "timeout": options["timeout"] / 500})
        return real(command, **options)

    (repository / "train.py").write_text("rate = 2\n")
    monkeypatch.setattr(subprocess, "run", run)
    code = described(repository)
    assert looked(repository).has == (set() if lost or question == "ls-tree" else {"train.py"})
    assert code["note"] == f"no answer of git {question}: TimeoutExpired"
    assert {"commit", "dirty", "state"} - {*code} == lost


def test_a_disk_that_is_full_is_a_note_and_leaves_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(repository))

    (repository / "train.py").write_text("rate = 2\n")
    monkeypatch.setattr(os, "fsync", full)
    code = described(repository)
    assert code["note"] == "the diff could not be written: OSError"
    assert (code["dirty"], code["state"]) == (True, None)
    assert list((repository.parent / "run/sources").iterdir()) == []


def test_the_largest_files_are_in_no_diff_and_that_is_said(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("few.txt", 30), ("more.txt", 40), ("gone.bin", 200)):
        (repository / name).write_bytes(b"a" * size)
    commit(repository, "two")
    for name in ("few.txt", "more.txt"):
        (repository / name).write_bytes(b"b" * 10)
    (repository / "gone.bin").unlink()
    (repository / "train.py").write_text("rate = 2\n")
    # Before and after: train.py 9 + 9, few.txt 30 + 10, more.txt 40 + 10, gone.bin 200 + 0.
    for most, left_out in ((308, None), (108, ["gone.bin"]), (107, ["gone.bin", "more.txt"])):
        monkeypatch.setattr(record, "_MOST_BYTES", most)
        code = described(repository)
        assert (code["dirty"], code.get("left_out")) == (True, left_out)
        in_diff = {"few.txt", "gone.bin", "more.txt", "train.py"} - {*(left_out or ())}
        assert {*names_in(patch_of(repository, code))} == in_diff
        assert looked(repository).has == {"train.py"}
        told = record.lacking(code)
        assert told.startswith(f"changes of {', '.join(left_out)} are not" if left_out else "")
        assert bool(told) == bool(left_out)
    monkeypatch.setattr(record, "_MOST_BYTES", 17)  # less than the script has
    assert looked(repository).has == frozenset()


def test_a_submodule_with_changes_of_its_own_is_dirty_and_in_no_diff(
    repository: Path, tmp_path: Path
) -> None:
    new_repository(tmp_path / "lib")
    add = ("-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(tmp_path / "lib"))
    git(repository, *add)
    commit(repository, "two")
    assert not described(repository)["dirty"]
    (repository / "lib/new.txt").touch()  # which git does not track
    assert not described(repository)["dirty"]
    (repository / "lib/train.py").write_text("rate = 2\n")
    code = described(repository)
    assert (code["dirty"], code["state"], code["left_out"]) == (True, None, ["lib"])
    commit(repository / "lib", "two")
    code = described(repository)
    assert names_in(patch_of(repository, code)) == ["lib"]
    assert "left_out" not in code
