"""What the tests of a run's code share: git repositories, out of reach of a person's settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "Nobody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "nobody@example.org" for who in ("AUTHOR", "COMMITTER")},
}


def git(folder: Path, *words: str) -> str:
    """Calls git; returns what it prints."""
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(folder), *words]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(command, env={**os.environ, **GIT}, **options).stdout.strip()


def new_repository(folder: Path, script: str = "rate = 1\n") -> Path:
    """A repository with one commit on the branch trunk, which holds a train.py."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    git(folder, "init", "--quiet", "--initial-branch", "trunk")
    commit(folder, "one")
    return folder


def commit(folder: Path, message: str) -> None:
    """Commits all that there is."""
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", message)
