"""The code that a run was made with: its commit, and the changes that are not committed.

Asks the `git` command and never changes the repository or its index. What git does not answer is a
note in the record, never a failure of the run.

    describe(top_of(Path.cwd()), output_dir)   # {"commit": "b2e0…", "state": "0a1b2c3d4e5f", …}
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

from expbase.run_dir import LOCK
from expbase.state.checkpoint import write_single_file

SOURCES = "sources"  # in the output directory

_SECONDS = 5.0  # for one answer: under gloo the other ranks wait 30 s at most
_PATCH_BYTES = 20_000_000
_FILE_BYTES, _FILES = 1_000_000, 50  # of untracked files: many or large ones are rather data
_SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
)
# Without autoRefreshIndex=false `git diff` writes the index. The other options overrule the user's
# taste in diffs, because `git apply` could not read every kind.
_DIFF = [
    *("-c", "diff.autoRefreshIndex=false", "diff", "--binary", "-U3", "--no-color"),
    *("--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"),
    *("--submodule=short", "--ignore-submodules=dirty"),
]


class _NoAnswer(Exception):
    """Git did not answer; the text says why, for the record."""


def top_of(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def describe(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """What git knows about a work tree, as JSON values; saves the changes with the run.

    The changes are one patch for `git apply`, in a file that is named by its content, so that each
    distinct state is saved once. It also has the source files that git neither knows nor ignores.

    Returns:
        `commit`, `branch`, `dirty`, the name under which the changes are saved (`state`), and a
        `note` of what is not known or not saved.
    """
    if top is None:
        return {"note": "not in a git repository"}
    facts: dict[str, Any] = {}
    try:
        answer = _ask(top, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        commit, branch = os.fsdecode(answer).split()
        facts |= {"commit": commit, "branch": None if branch == "HEAD" else branch}
        untracked = _untracked(top)
        sources = [name for name in untracked if _is_source(top / name)][:_FILES]
        patch = _ask(top, *_DIFF, "HEAD")
        for name in sources:
            patch += _ask(top, *_DIFF, "--no-index", "--", os.devnull, name)
        state = _save(patch, output_dir)
    except (_NoAnswer, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if not facts:
            return {"note": why}
        return facts | {"dirty": True, "state": None, "note": f"the changes are not saved: {why}"}
    facts |= {"dirty": state is not None, "state": state}
    if left_out := [name for name in untracked if name not in sources]:
        names = ", ".join(left_out[:5]) + (", …" if left_out[5:] else "")
        facts["note"] = f"untracked and not saved: {len(left_out)} ({names})"
    return facts


def _untracked(top: Path) -> list[str]:
    """Files that git neither knows nor ignores, Python first; without those that a run wrote."""
    output = os.fsdecode(_ask(top, "ls-files", "--others", "--exclude-standard", "-z"))
    names = [name for name in output.split("\0") if name]
    # With the files of a run each start would be a state of its own.
    mark = "/" + LOCK.format(rank=0)
    runs = tuple(name.removesuffix(mark) + "/" for name in names if name.endswith(mark))
    own = [name for name in names if not name.startswith(runs)]
    return sorted(own, key=lambda name: (not name.endswith(".py"), name))


def _is_source(path: Path) -> bool:
    is_file = path.suffix in _SOURCE_SUFFIXES and path.is_file()
    return is_file and path.stat().st_size <= _FILE_BYTES


def _save(patch: bytes, output_dir: Path) -> str | None:
    """Writes a patch under a name that depends on its content alone, and returns the name."""
    if len(patch) > _PATCH_BYTES:
        raise _NoAnswer(f"they have more than {_PATCH_BYTES} bytes")
    state = hashlib.sha256(patch).hexdigest()[:12]
    path = output_dir / SOURCES / f"{state}.diff"
    if patch and not path.exists():
        write_single_file(path, [patch])
    return state if patch else None


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
    if result.returncode not in (0, 1):  # 1: --no-index found a difference
        lines = result.stderr.decode("utf-8", "replace").replace(str(top), ".").splitlines()
        reason = (lines[0] if lines else "no reason given").removesuffix(".")
        if "ambiguous argument 'HEAD'" in reason:
            raise _NoAnswer("the repository has no commit yet, so the code is not recorded")
        raise _NoAnswer(f"git refuses: {reason}")
    return result.stdout
