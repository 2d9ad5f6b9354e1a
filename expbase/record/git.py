"""The code that a run was made with: its commit, and what differs from it.

Asks the `git` command and never changes the repository or its index. What git does not answer is a
note in the record, never a failure of the run.

    describe(top_of(Path.cwd()), output_dir)   # {"commit": "b2e0…", "dirty": True, …}
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from expbase.base.files import write_single_file
from expbase.record.sources import SOURCES

_SECONDS = 5.0  # for one answer: under gloo the other ranks wait 30 s at most
# Without autoRefreshIndex=false `git diff` writes the index. The user's taste in diffs is
# overruled: `git apply` could not read every kind.
_DIFF = (
    "-c diff.autoRefreshIndex=false diff --binary -U3 --no-color --no-ext-diff --no-textconv "
    "--src-prefix=a/ --dst-prefix=b/ --submodule=short --ignore-submodules=dirty HEAD"
).split()


def top_of(folder: Path) -> Path | None:
    """Returns the top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def describe(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """Returns what git knows about a work tree, as JSON values; saves `git diff HEAD` with the run.

    The diff is in a file that is named by its content, so that each distinct one is saved once.

    Returns:
        `commit`, `branch` ("HEAD" if there is none), whether it is `dirty`, the name under which
        the diff is saved (`state`), and a `note` if something is not known.
        Of files that git does not know it knows nothing.
    """
    if top is None:
        return {"note": "not in a git repository"}
    facts: dict[str, Any] = {}
    try:
        answer = _ask(top, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        facts["commit"], facts["branch"] = os.fsdecode(answer).split()
        diff = _ask(top, *_DIFF)
        facts |= {"dirty": bool(diff), "state": None}
        if diff:
            state = hashlib.sha256(diff).hexdigest()[:12]
            path = output_dir / SOURCES / f"{state}.diff"
            if not path.exists():
                write_single_file(path, [diff])
            facts["state"] = state
    except (OSError, subprocess.SubprocessError) as error:  # their texts may hold paths
        facts["note"] = f"no more is known: {type(error).__name__}"
    return facts


def committed(folder: Path, names: Iterable[str]) -> set[str]:
    """Returns those of some files, by path in a folder, that the commit has; in doubt none."""
    if top_of(folder) is None:
        return set()
    try:
        answer = _ask(folder, "ls-tree", "-z", "--name-only", "HEAD", *names)
        return {*os.fsdecode(answer).split("\0")}
    except (OSError, subprocess.SubprocessError):
        return set()


def _ask(folder: Path, *words: str) -> bytes:
    """Returns the output of a git command, or an error."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    # In a session of its own, where Ctrl-C does not reach it (that is for the run), and where it
    # has no terminal on which to ask for a password.
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS,
        start_new_session=True, check=True,
    ).stdout  # fmt: skip
