"""The commit of a run's code, and the changes that are not committed.

It asks the `git` command and never changes the repository or its index. If git fails, a note in the
record says so, and the run goes on.

    state_of(top_of(Path.cwd()), output_dir)   # {"commit": "b2e0…", "dirty": True, …}
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

# For one answer. Under gloo the other ranks wait 30 s at most: gloo/context.cc, kTimeoutDefault.
_SECONDS = 5.0
# Without autoRefreshIndex=false `git diff` writes the index. The user's taste in diffs is
# overruled: `git apply` could not read every kind.
_DIFF = (
    "-c diff.autoRefreshIndex=false diff --binary -U3 --no-color --no-ext-diff --no-textconv "
    "--src-prefix=a/ --dst-prefix=b/ --submodule=short --ignore-submodules=dirty HEAD"
).split()


def top_of(folder: Path) -> Path | None:
    """Returns the top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def state_of(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """Describes a work tree by git, and saves `git diff HEAD` in the output directory.

    The file of the diff is named by its content, so each distinct diff is saved once. Files that
    git does not track are in no diff.

    Args:
        top: The top of the work tree; None: there is none.
        output_dir: Of the run.

    Returns:
        JSON values: `commit`, `branch` ("HEAD" if there is none), `dirty` (whether there are
        changes), `state` (the name under which the diff is saved), and a `note` if git has failed.
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
    """Returns the files, by their paths in a folder, that are in the commit; none if git fails."""
    if top_of(folder) is None:
        return set()
    try:
        answer = _ask(folder, "ls-tree", "-z", "--name-only", "HEAD", *names)
        return {*os.fsdecode(answer).split("\0")}
    except (OSError, subprocess.SubprocessError):
        return set()


def _ask(folder: Path, *words: str) -> bytes:
    """Returns the output of a git command; raises an error if it fails."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    # git runs in a session of its own: Ctrl-C, which is for the run, does not reach it, and it has
    # no terminal on which to ask for a password.
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS,
        start_new_session=True, check=True,
    ).stdout  # fmt: skip
