"""docs/bisect.md: `git bisect run` finds the commit that changed the numbers of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import SCRIPT, blocks
from repository import GIT, commit, git, new_repository

MAKE, ASK, ASK_THEN, SEARCH = blocks("bisect", "bash")
CHANGED, SAME, FOUND = blocks("bisect", "text")
# What each commit after the first one replaces.
COMMITS = {
    "a comment": ("def train_batch(self):", "def train_batch(self):  # one update"),
    "a name": ("loss(self.model(x), y)", "loss(self.model(x), label=y)"),
    "more is logged": ("self.log(loss=loss)", "self.log(loss=loss, twice=2 * loss)"),
    "the numbers": ("Adam(0.02,", "Adam(0.021,"),
    "it does not run": ("main(Line)", "main(Line"),
    "it runs again": ("main(Line", "main(Line)"),
    "an epsilon": ("Adam(0.021,", "Adam(0.021, epsilon=1e-8,"),
}


def given(commands: str, folder: Path, code: int | None = 0) -> str:
    """Gives commands of the page to a shell; returns what they say."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **GIT, "PATH": path, "PYTHONWARNINGS": "ignore"}
    words = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done: Any = subprocess.run(["sh", "-ec", commands], check=False, **words)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout)


def without_numbers(said: str) -> str:
    return re.sub(r"\d+\.\d+|\b[0-9a-f]{8}\b", "0", said.strip())


@pytest.mark.long
def test_git_names_the_commit_that_changed_the_numbers(tmp_path: Path) -> None:
    folder = new_repository(tmp_path / "project", SCRIPT)
    (folder / ".gitignore").write_text("runs/\n__pycache__/\n")
    commit(folder, "what is ignored")
    git(folder, "tag", "spring")
    script = SCRIPT
    for message, (old, new) in COMMITS.items():
        assert script.count(old) == 1, message
        script = script.replace(old, new)
        (folder / "train.py").write_text(script)
        commit(folder, message)
    given(MAKE, folder)
    now = given(f"{ASK.strip()} || test $? = 1", folder)
    assert without_numbers(now.splitlines()[-1]) == without_numbers(CHANGED)
    then = given(ASK_THEN, folder)
    assert without_numbers(then.splitlines()[-1]) == without_numbers(SAME)
    said = given(SEARCH, folder)
    named = git(folder, "log", "--format=%H", "--grep", "the numbers")
    assert f"{named} is the first bad commit" in said
    assert FOUND.split(" ", 1)[1].strip() == "is the first bad commit"
    assert git(folder, "status", "--porcelain") == ""
