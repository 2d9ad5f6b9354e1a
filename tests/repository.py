"""What the tests of a run's code and of the package share: git repositories, out of reach of a
person's settings, and setup.cfg.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_NAME": "Nobody" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "nobody@example.org" for who in ("AUTHOR", "COMMITTER")},
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).parents[1] / "setup.cfg")
    return parser


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


def shell(commands: str, folder: Path, code: int = 0) -> str:
    """Gives commands of a page to a shell, in a folder; returns what they print.

    `python` is the interpreter of the tests.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **GIT, "PATH": path, "PYTHONWARNINGS": "ignore"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, env=environment, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout)
