"""What a start notes (provenance.py), and its code (sources.py), with real git repositories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import TESTS, Tiny, training_config

from expbase.record import git as sources
from expbase.record import provenance

GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "Nobody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "nobody@example.org" for who in ("AUTHOR", "COMMITTER")},
}
WEIRD = [
    "a b.py",
    "new\nline.py",
    os.fsdecode(b"no\xffutf8.py"),
    "-dash.py",
    "ü/ö.py",
    "quote'\".sh",
]

# Writes down what it would note.
LINE = """
import json, pathlib, sys
from tiny import Tiny
from expbase import default_argument_parser, main
from expbase.record import provenance

class Noting(Tiny):
    def setup(self):
        facts = provenance.gather(self.output_dir, type(self), self.config)
        pathlib.Path(f"facts_{self.rank}.json").write_text(json.dumps(facts))
    def run(self):
        pass
if __name__ == "__main__":
    main(Noting)
"""


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(command, env={**os.environ, **GIT}, **options).stdout.strip()


def new_repository(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "trunk")
    (folder / "train.py").write_text("rate = 1\n")
    (folder / ".gitignore").write_text("ignored.py\nfacts_*.json\n")
    (folder / "deep").mkdir()
    (folder / "deep/line.py").write_text(LINE)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit; this process looks like one that runs its train.py."""
    folder = new_repository(tmp_path / "repository")
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False
    )
    for name, value in GIT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    return folder


def gathered(output: Path) -> dict[str, Any]:
    """The facts, after a way through the ledger."""
    output.mkdir(parents=True, exist_ok=True)
    return json.loads(json.dumps(provenance.gather(output, Tiny, training_config())))


def code_of(output: Path) -> dict[str, Any]:
    return gathered(output)["git"]


def saved(output: Path, code: dict[str, Any]) -> dict[str, bytes]:
    """The saved files by their names in the folder of the state."""
    folder = output / "sources" / code["state"]
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tree(folder: Path) -> dict[Path, tuple[bytes, bool]]:
    """The content of each file but git's own, and whether it can be run."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {p.relative_to(folder): (p.read_bytes(), os.access(p, os.X_OK)) for p in files}


def fake_git(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a shell script stand in for git."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout
    folder.mkdir()
    (folder / "git").write_text(f'#!/bin/sh\n{body}\nexec {real.strip()} "$@"\n')
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# --- the code ----------------------------------------------------------------------------------


def test_of_a_clean_repository_the_commit_is_noted_and_nothing_is_saved(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "ignored.py").touch()
    commit = git(repository, "rev-parse", "HEAD")
    clean = {"commit": commit, "branch": "trunk", "dirty": False, "state": None}
    assert code_of(tmp_path / "run") == clean
    assert not (tmp_path / "run/sources").exists()
    git(repository, "checkout", "--quiet", "--detach")
    assert code_of(tmp_path / "run") == {**clean, "branch": None}


def test_each_distinct_state_is_saved_once(repository: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (repository / "train.py").write_text("rate = 2\n")
    (repository / "new.py").write_text("new\n")
    (repository / "go.sh").write_text("true\n")
    (repository / "go.sh").chmod(0o755)
    first = code_of(run)
    files = saved(run, first)
    assert first["dirty"]
    assert set(files) == {"changes.diff", "untracked/new.py", "untracked/go.sh"}
    assert b"+rate = 2\n" in files["changes.diff"]
    assert os.access(run / "sources" / first["state"] / "untracked/go.sh", os.X_OK)
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert code_of(run) == first
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == times
    (repository / "new.py").write_text("newer\n")
    second = code_of(run)
    assert second["state"] != first["state"]
    assert saved(run, second)["untracked/new.py"] == b"newer\n"
    (repository / "new.py").write_text("new\n")
    assert code_of(run)["state"] == first["state"]
    assert len(list((run / "sources").iterdir())) == 2


def test_what_is_saved_makes_a_fresh_clone_the_same(repository: Path, tmp_path: Path) -> None:
    for name, data in (("a.bin", b"\x00\x01"), ("gone.py", b"gone\n"), ("old.py", b"x\n" * 9)):
        (repository / name).write_bytes(data)
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "two")
    (repository / "a.bin").write_bytes(b"\x00\x02" * 99)
    (repository / "gone.py").unlink()
    (repository / "added.py").write_text("added, no newline")
    git(repository, "mv", "old.py", "moved.py")
    git(repository, "add", "added.py")
    (repository / "train.py").chmod(0o755)
    for name in WEIRD:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(name, errors="surrogateescape")
    code = code_of(tmp_path / "run")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(repository), "clone")
    state = tmp_path / "run/sources" / code["state"]
    git(clone, "apply", "--index", str(state / "changes.diff"))
    subprocess.run(["cp", "-R", f"{state}/untracked/.", str(clone)], check=True)
    assert len(tree(clone)) > len(WEIRD)
    assert tree(clone) == tree(repository)


def test_only_small_source_files_that_are_not_of_a_run_are_saved(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repository / "runs/own"
    for name in ("data.bin", "runs/other/ledger.jsonl", "runs/new/.lock-0", "runs/kept.py"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).touch()
    for folder in ("own", "other", "other/deep", "new"):
        (repository / "runs" / folder).mkdir(exist_ok=True)
        (repository / "runs" / folder / "config.yaml").write_text("a: 1\n")
    (repository / "large.py").write_text("#" * 1_000_001)
    (repository / "link.py").symlink_to("train.py")
    subprocess.run(["git", "init", "--quiet", "nested"], cwd=repository, check=True)
    (repository / "nested/inner.py").touch()
    code = code_of(run)
    assert set(saved(run, code)) == {"untracked/runs/kept.py"}
    names = ["data.bin", "large.py", "link.py", "nested/"]
    assert code["left_out"] == {"count": 4, "first": names}
    assert code_of(run)["state"] == code["state"]
    monkeypatch.setattr(sources, "_ALL_FILES_BYTES", 10)
    for number in range(9):
        (repository / f"{number}.py").write_text("four")
    code = code_of(run)
    assert set(saved(run, code)) == {
        f"untracked/{name}" for name in ("0.py", "1.py", "runs/kept.py")
    }
    assert code["left_out"]["count"] == 4 + 7
    assert len(code["left_out"]["first"]) == 5
    monkeypatch.setattr(sources, "_FILES", 1)
    assert set(saved(run, code_of(run))) == {"untracked/0.py"}


def test_a_large_file_that_is_not_saved_makes_the_tree_dirty(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "data.bin").touch()
    assert not code_of(tmp_path / "run")["dirty"]
    (repository / "large.py").write_text("#" * 1_000_001)
    code = code_of(tmp_path / "run")
    assert (code["dirty"], code["state"]) == (True, None)


def test_of_too_many_files_only_those_that_git_knows_are_looked_at(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "train.py").write_text("rate = 3\n")
    for number in range(99):
        (repository / f"{number}.py").touch()
    monkeypatch.setattr(sources, "_STATUS_BYTES", 400)
    code = code_of(tmp_path / "run")
    assert code["note"] == "files that git does not know are not looked at: too many"
    assert set(saved(tmp_path / "run", code)) == {"changes.diff"}


def test_of_a_huge_diff_only_the_summary_is_saved(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "train.py").write_text("rate = 3\n" * 3000)
    monkeypatch.setattr(sources, "_DIFF_BYTES", 1000)
    code = code_of(tmp_path / "run")
    assert code["note"] == "the diff has more than 1000 bytes: only its summary is saved"
    files = saved(tmp_path / "run", code)
    assert list(files) == ["changes.stat"]
    assert b"train.py | 3001" in files["changes.stat"]


def test_what_stands_in_the_configuration_of_git_is_not_run_and_changes_nothing(
    repository: Path, tmp_path: Path
) -> None:
    (repository / ".gitattributes").write_text("*.py diff=mine\n")
    (repository / "train.py").write_text("rate = 2\n")
    plain = saved(tmp_path / "plain", code_of(tmp_path / "plain"))
    touch = f"touch {tmp_path / 'marker'}; false"
    for key in ("diff.external", "diff.mine.textconv", "diff.mine.command", "core.pager"):
        git(repository, "config", key, touch)
    for key, value in {
        "core.fsmonitor": touch, "color.ui": "always", "diff.noprefix": "true",
        "diff.relative": "true", "diff.context": "0", "diff.algorithm": "patience",
        "core.abbrev": "5", "core.quotePath": "false", "diff.mnemonicPrefix": "true",
    }.items():  # fmt: skip
        git(repository, "config", key, value)
    code = code_of(tmp_path / "run")
    assert saved(tmp_path / "run", code) == plain
    assert not (tmp_path / "marker").exists()


def test_the_repository_is_that_of_the_script_whatever_a_git_hook_says(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_repository(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "no_index"))
    monkeypatch.chdir(other)
    monkeypatch.delenv("GIT_DIR", raising=False)
    (repository / "train.py").write_text("rate = 2\n")
    git(repository, "commit", "--quiet", "-am", "two", "--no-verify")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    code = code_of(tmp_path / "run")
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_INDEX_FILE")
    assert code["commit"] == git(repository, "rev-parse", "HEAD") != git(other, "rev-parse", "HEAD")


def test_nothing_is_written_to_the_repository(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("rate = 2\n")
    os.utime(repository / ".gitignore", (1, 1))  # git would like to note that it is the same
    before = {p: p.stat().st_mtime_ns for p in repository.rglob("*") if p.is_file()}
    code_of(tmp_path / "run")
    assert {p: p.stat().st_mtime_ns for p in repository.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("characters", [100_000, 1])
def test_a_file_that_was_only_touched_is_no_change(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    monkeypatch.setattr(sources, "_PATHS_CHARACTERS", characters)
    os.utime(repository / ".gitignore", (1, 1))
    assert not code_of(tmp_path / "run")["dirty"]
    (repository / "[t]*.py").write_text("")
    git(repository, "add", "--", ":(literal)[t]*.py")
    os.utime(repository / "train.py", (1, 1))
    diff = saved(tmp_path / "run", code_of(tmp_path / "run"))["changes.diff"]
    assert diff.count(b"diff --git") == 1


def test_changes_in_a_submodule_are_noted(repository: Path, tmp_path: Path) -> None:
    new_repository(tmp_path / "part")
    git(repository, "submodule", "--quiet", "add", str(tmp_path / "part"), "a part")
    git(repository, "commit", "--quiet", "-m", "two")
    assert not code_of(tmp_path / "run")["dirty"]
    (repository / "a part/train.py").write_text("rate = 2\n")
    code = code_of(tmp_path / "run")
    assert (code["dirty"], code["state"]) == (True, None)
    assert code["note"] == "changes in submodules are not saved: a part"


def test_within_a_submodule_it_is_the_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = new_repository(tmp_path / "part")
    git(repository, "submodule", "--quiet", "add", str(part), "part")
    script = repository / "part/train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script))
    assert code_of(tmp_path / "run")["commit"] == git(part, "rev-parse", "HEAD")
    script.write_text("rate = 2\n")
    assert set(saved(tmp_path / "run", code_of(tmp_path / "run"))) == {"changes.diff"}


def test_a_worktree_of_a_repository_is_its_own_work_tree(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "side/train.py"))
    (tmp_path / "side/new.py").touch()
    code = code_of(tmp_path / "run")
    assert code["branch"] == "side"
    assert set(saved(tmp_path / "run", code)) == {"untracked/new.py"}


def test_a_conflict_is_saved_as_it_stands(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "side")
    (repository / "train.py").write_text("rate = 2\n")
    git(repository, "commit", "--quiet", "-am", "two")
    git(repository, "checkout", "--quiet", "trunk")
    (repository / "train.py").write_text("rate = 3\n")
    git(repository, "commit", "--quiet", "-am", "three")
    with pytest.raises(subprocess.CalledProcessError):
        git(repository, "merge", "side")
    files = saved(tmp_path / "run", code_of(tmp_path / "run"))
    assert b"+<<<<<<< HEAD\n" in files["changes.diff"]


def test_where_there_is_no_repository_or_no_commit_that_is_the_note(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "empty/train.py"))
    monkeypatch.chdir(tmp_path / "empty")
    assert code_of(tmp_path / "run") == {"note": "not in a git repository"}
    (tmp_path / "empty/.git").mkdir()
    code = code_of(tmp_path / "run")
    assert code["note"].startswith("git refuses: fatal: not a git repository")
    (tmp_path / "empty/.git").rmdir()
    git(tmp_path / "empty", "init", "--quiet")
    (tmp_path / "empty/train.py").write_text("rate = 1\n")
    (tmp_path / "empty/net.py").write_text("size = 2\n")
    git(tmp_path / "empty", "add", "net.py")
    code = code_of(tmp_path / "run")
    assert (code["commit"], code["dirty"]) == (None, True)
    assert code["note"] == "the git repository has no commit yet"
    assert saved(tmp_path / "run", code) == {
        "untracked/net.py": b"size = 2\n",
        "untracked/train.py": b"rate = 1\n",
    }


def test_without_git_that_is_the_note(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = code_of(tmp_path / "run")
    assert code == {"note": "git cannot be run: No such file or directory"}


def test_what_git_refuses_is_noted_without_the_path(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"fatal: detected dubious ownership in repository at '{repository}'"
    fake_git(tmp_path / "bin", f'echo "{text}" >&2; exit 128', monkeypatch)
    code = code_of(tmp_path / "run")
    assert code["note"].startswith("git refuses: the repository belongs to somebody else")
    text = f"fatal: bad config file line 1 in {repository}/.git/config"
    (tmp_path / "bin/git").write_text(f'#!/bin/sh\necho "{text}" >&2; exit 128\n')
    code = code_of(tmp_path / "run")
    assert code == {"note": "git refuses: fatal: bad config file line 1 in ./.git/config"}


def test_a_git_that_hangs_is_ended_and_noted(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "train.py").write_text("rate = 2\n")
    monkeypatch.setattr(sources, "_SECONDS", 1.0)
    body = 'case "$*" in *"$HANGS"*) sleep 60 & sleep 60;; esac'  # two that hold the pipe
    fake_git(tmp_path / "bin", body, monkeypatch)
    monkeypatch.setenv("HANGS", "files=all")
    code = code_of(tmp_path / "run")
    assert code["note"] == "files that git does not know are not looked at: too many"
    assert set(saved(tmp_path / "run", code)) == {"changes.diff"}
    monkeypatch.setenv("HANGS", "diff --no-color")
    code = code_of(tmp_path / "run")
    assert code["note"] == "the changes are not saved: git diff took too long"
    assert (len(code["commit"]), code["dirty"], code["state"]) == (40, True, None)
    monkeypatch.setenv("HANGS", "status")
    monkeypatch.setattr(sources, "_SECONDS", 0.1)
    assert code_of(tmp_path / "run") == {"note": "git status took too long"}


def test_a_state_is_saved_whole_or_not_at_all(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    (repository / "train.py").write_text("rate = 2\n")
    monkeypatch.setattr(os, "fsync", full)
    code = code_of(tmp_path / "run")
    assert code["note"] == "the changes are not saved: No space left on device"
    assert code["dirty"]
    assert list((tmp_path / "run/sources").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(repository / "train.py"), raising=False
    )
    torn = tmp_path / "run/sources/.writing-of-a-killed-process"
    torn.mkdir()
    state = code_of(tmp_path / "run")["state"]
    assert [path.name for path in (tmp_path / "run/sources").iterdir()] == [state]


# --- the command -------------------------------------------------------------------------------


def noted(folder: Path, *command: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What rank 0 notes when this command is given in a folder."""
    variables = {**os.environ, **GIT, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=variables | (environment or {}), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "facts_0.json").read_text())


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """A repository with a script in a folder, which writes down what it would note."""
    return new_repository(tmp_path / "repository")


def test_the_words_are_those_that_were_typed(line: Path) -> None:
    words = [
        "-u",
        "deep/line.py",
        "--output",
        "runs/a b",
        "training.seed=1",
        "--opts",
        "training.seed",
        "2",
    ]
    facts = noted(line, *words)
    assert (facts["command"], facts["directory"]) == (words, ".")
    assert set(facts["git"]) == {"commit", "branch", "dirty", "state"}


def test_paths_into_the_work_tree_are_relative_to_where_the_command_was_given(
    line: Path, tmp_path: Path
) -> None:
    words = [str(line / "deep/line.py"), f"--output={line}/runs/a", "--data", str(tmp_path)]
    facts = noted(line / "deep", *words)
    expected = ["line.py", "--output=../runs/a", "--data", str(tmp_path)]
    assert (facts["command"], facts["directory"]) == (expected, "deep")


def test_outside_of_the_work_tree_they_are_relative_to_its_top(line: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    words = ["../repository/deep/line.py", "--output", "a", "--config", f"{line}/c.yaml"]
    (line / "c.yaml").write_text("training: {seed: 3}\n")
    facts = noted(tmp_path / "elsewhere", *words)
    expected = ["deep/line.py", "--output", "a", "--config", "c.yaml"]
    assert (facts["command"], facts["directory"]) == (expected, None)
    assert str(tmp_path) not in json.dumps(facts)


def test_under_paddles_launcher_they_are_the_launchers(line: Path, tmp_path: Path) -> None:
    log = line / "deep/logs"
    words = ["-W", "ignore", "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
    words += ["--log_dir", str(log), "line.py", "--output", "a"]
    facts = noted(line / "deep", *words, environment={"FLAGS_benchmark": "0"})
    expected = [*words[:7], "logs", *words[8:]]
    assert (facts["command"], facts["directory"]) == (expected, "deep")
    assert facts["environment"]["PADDLE_TRAINERS_NUM"] == "2"
    assert facts["environment"]["FLAGS_benchmark"] == "0"
    assert str(tmp_path) not in json.dumps(facts)
    assert (line / "deep/logs/backup_env.0.json").exists()  # paddle writes all of it there
    assert (facts["git"]["dirty"], facts["git"]["state"]) == (False, None)


def test_with_nprocs_they_are_those_of_the_process_that_was_started(line: Path) -> None:
    words = ["deep/line.py", "--nprocs", "2", "--output", "a"]
    facts = noted(line, *words)
    assert (facts["command"], facts["directory"]) == (words, ".")


def test_a_module_is_started_again_as_a_module(line: Path) -> None:
    (line / "deep/__init__.py").touch()
    words = ["-m", "deep.line", "--output", "a"]
    facts = noted(line, *words)
    assert (facts["command"], facts["directory"]) == (words, ".")


def test_a_runner_notes_the_repository_of_its_experiment(line: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (line / "plan.yaml").write_text(
        "experiment: deep/line.py:Noting\nrunner: [{name: one, class: train}]\n"
    )
    words = ["-m", "expbase", "run", f"{line}/plan.yaml", "--output", "a"]
    facts = noted(tmp_path / "elsewhere", *words)
    assert facts["command"] == [*words[:3], "plan.yaml", *words[4:]]
    assert facts["git"]["branch"] == "trunk"


def test_without_a_script_there_is_no_command(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    monkeypatch.chdir(repository)
    facts = gathered(tmp_path / "run")
    assert facts["command"] is None


def test_where_the_system_does_not_tell_the_launch_line_is_put_together(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_words_of", lambda pid: [])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", "--output", "a"])
    assert provenance._words(repository / "train.py") == ["-u", "train.py", "--output", "a"]
    monkeypatch.setenv("PADDLE_LOCAL_SIZE", "4")
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", "4"]
    expected = [*launch, "train.py", "--output", "a"]
    assert provenance._words(repository / "train.py") == expected
    monkeypatch.setattr(
        provenance, "_words_of", lambda pid: ["/bin/fleetrun", "--nnodes", "2", "x.py"]
    )
    assert provenance._words(repository / "train.py") == [*launch[:2], "--nnodes", "2", "x.py"]


def test_a_script_that_went_elsewhere_was_started_where_it_was(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.chdir(tmp_path)
    facts = gathered(tmp_path / "run")
    assert (facts["command"], facts["directory"]) == (["train.py"], ".")


# --- the machine -------------------------------------------------------------------------------


def test_of_the_environment_only_what_steers_paddle_is_noted(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("PADDLE_LOG_DIR", str(tmp_path))
    wanted = {"FLAGS_check_nan_inf": "0", "NCCL_DEBUG": "INFO", "PADDLE_JOB_ID": "7"}
    wanted |= {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1"}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    facts = gathered(tmp_path / "run")
    assert wanted.items() <= facts["environment"].items()
    assert all(n in wanted or n.startswith(("FLAGS_", "PADDLE_")) for n in facts["environment"])
    assert "PADDLE_LOG_DIR" not in facts["environment"]
    assert "secret" not in json.dumps(facts)


def test_packages_and_versions_are_noted(repository: Path, tmp_path: Path) -> None:
    facts = gathered(tmp_path / "run")
    assert facts["packages"]["numpy"]
    assert any(name.startswith("paddlepaddle") for name in facts["packages"])
    assert list(facts["packages"]) == sorted(facts["packages"], key=str.lower)
    assert "numpy" not in facts["local_packages"]
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["device"]["name"] == "cpu"
    assert facts["device"]["model"]
    assert facts["pid"] == os.getpid()


def test_a_fact_that_cannot_be_found_out_is_a_text_and_no_failure(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("importlib.metadata.distributions", refuse)
    monkeypatch.setattr(paddle.device, "get_device", refuse)
    provenance._installed.cache_clear()
    facts = gathered(tmp_path / "run")
    provenance._installed.cache_clear()
    assert facts["packages"] == facts["device"] == "not known: PermissionError, Permission denied"
    assert str(tmp_path) not in json.dumps(facts)


def test_a_gpu_is_noted_with_its_driver(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is none here: what paddle and the driver say stands in the documentation.
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:1")
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda device: f"Name of {device}")
    monkeypatch.setattr(paddle.version, "cuda", lambda: "12.6")
    monkeypatch.setattr(paddle.version, "cudnn", lambda: "9.5.1")
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\nGCC version: 12\n"
    )
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda p, *a, **o: text if "nvidia" in str(p) else read(p, *a, **o)
    )
    assert gathered(tmp_path / "run")["device"] == {
        "name": "gpu:1", "model": "Name of gpu:1", "driver": "535.54.03", "cuda": "12.6",
        "cudnn": "9.5.1",
    }  # fmt: skip
    monkeypatch.setattr(Path, "read_text", read)
    driver = gathered(tmp_path / "run")["device"]["driver"]
    assert driver == "not known: FileNotFoundError, No such file or directory"
