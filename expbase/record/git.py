"""The code that a run was made with: its commit, and what differs from it.

Asks the `git` command and never changes the repository or its index. What git does not answer is a
note in the record, never a failure of the run.

    describe(top_of(Path.cwd()), output_dir)   # {"commit": "b2e0…", "dirty": True, …}
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from expbase.state.checkpoint import write_single_file

SOURCES = "sources"  # in the output directory

_SECONDS = 5.0  # for one answer: under gloo the other ranks wait 30 s at most
_DIFF_BYTES = 20_000_000
# Without autoRefreshIndex=false `git diff` writes the index. The user's taste in diffs is
# overruled: `git apply` could not read every kind.
_DIFF = (
    "-c diff.autoRefreshIndex=false diff --binary -U3 --no-color --no-ext-diff --no-textconv "
    "--src-prefix=a/ --dst-prefix=b/ --submodule=short --ignore-submodules=dirty HEAD"
).split()


class _NoAnswer(Exception):
    """Git did not answer; the text says why, for the record."""


def top_of(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def describe(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """What git knows about a work tree, as JSON values; saves `git diff HEAD` with the run.

    The diff is in a file that is named by its content, so that each distinct one is saved once.

    Returns:
        `commit`, `branch`, whether it is `dirty`, the name under which the diff is saved (`state`),
        and a `note` of what is not known. Of files that git does not know it knows nothing.
    """
    if top is None:
        return {"note": "not in a git repository"}
    facts: dict[str, Any] = {}
    try:
        answer = _ask(top, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        commit, branch = os.fsdecode(answer).split()
        facts |= {"commit": commit, "branch": None if branch == "HEAD" else branch}
        diff = _ask(top, *_DIFF)
        facts |= {"dirty": bool(diff), "state": None}
        facts["state"] = _save(diff, output_dir)
    except (_NoAnswer, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        facts["note"] = f"the changes are not saved: {why}" if facts else why
    return facts


def _save(diff: bytes, output_dir: Path) -> str | None:
    """Writes a diff under a name that depends on its content alone, and returns the name."""
    if len(diff) > _DIFF_BYTES:
        raise _NoAnswer(f"they have more than {_DIFF_BYTES} bytes")
    state = hashlib.sha256(diff).hexdigest()[:12]
    path = output_dir / SOURCES / f"{state}.diff"
    if diff and not path.exists():
        write_single_file(path, [diff])
    return state if diff else None


def _ask(top: Path, *words: str) -> bytes:
    """The output of a git command; raises _NoAnswer."""
    command = ["git", "-C", str(top), "--no-optional-locks", *words]
    try:
        # In a session of its own, where Ctrl-C does not reach it (that is for the run), and where
        # it has no terminal on which to ask for a password.
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS,
            start_new_session=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise _NoAnswer(f"git cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(f"git took more than {_SECONDS:g} s") from error
    if result.returncode:
        lines = result.stderr.decode("utf-8", "replace").replace(str(top), ".").splitlines()
        reason = (lines[0] if lines else "no reason given").removesuffix(".")
        raise _NoAnswer(f"git refuses: {reason}")
    return result.stdout
