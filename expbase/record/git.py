"""The commit of a run's code, and the changes that are not committed.

It asks the `git` command and never changes the repository or its index. A command that fails loses
what it would have answered, a note in the record says so, and the run goes on.

    work_tree = look(top_of(folder), folder, ["train.py"]).keep(output_dir)
    work_tree.facts              # {"commit": "b2e0…", "dirty": True, …}
    work_tree.has                # {"train.py"}: the commit or the diff has it
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.base.files import write_single_file
from expbase.record.sources import SOURCES

# For one answer of five. Under gloo the other ranks wait 30 s at most: gloo/context.cc,
# kTimeoutDefault.
_SECONDS = 4.0
_NO_GIT = "not in a git repository"
_MOST_BYTES = 10_000_000  # of the files in a diff: of large ones git compresses both contents
# Without renames an entry has one name, and git need not look for them.
_STATUS = "status --porcelain=v2 -z -uno --no-renames --ignore-submodules=untracked".split()
# Without autoRefreshIndex=false `git diff` writes the index. The user's taste in diffs is
# overruled: `git apply` could not read every kind.
_DIFF = (
    "diff --binary -U3 --no-color --no-ext-diff --no-textconv "
    "--src-prefix=a/ --dst-prefix=b/ --submodule=short --ignore-submodules=dirty HEAD"
).split()


@dataclass(frozen=True)
class WorkTree:
    """What git knows of the code of a start, when it was asked.

    `facts` are JSON values: `commit`, `branch` ("HEAD" if there is none), `dirty` (whether there
    are changes), `state` (the name under which the diff is saved), `left_out` (what has changes
    that the diff lacks), and a `note` if git has failed: then some are missing.
    """

    facts: Mapping[str, Any]
    diff: bytes = b""
    has: frozenset[str] = frozenset()  # names of files of the code that commit and diff have

    def keep(self, output_dir: Path) -> WorkTree:
        """Saves the diff, named by its content, in a run, each once; returns what is kept."""
        path = output_dir / SOURCES / f"{self.facts.get('state')}.diff"
        try:
            if self.diff and not path.exists():
                write_single_file(path, [self.diff])
        except OSError as error:  # its text may hold paths
            note = f"the diff could not be written: {type(error).__name__}"
            return WorkTree({**self.facts, "state": None, "note": note})
        return self


def top_of(folder: Path) -> Path | None:
    """Returns the top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def look(top: Path | None, folder: Path, names: Iterable[str]) -> WorkTree:
    """Asks git for the commit, and for the changes since. Files that it does not track are in none.

    Args:
        top: The top of the work tree; None: there is none.
        folder: That of the code.
        names: The files of the code, by their paths in it.
    """
    if top is None:
        return WorkTree({"note": _NO_GIT})
    git = _Git()
    facts: dict[str, Any] = {}
    if answer := git.ask(top, "rev-parse", "HEAD", "--abbrev-ref", "HEAD"):
        facts["commit"], facts["branch"] = os.fsdecode(answer).split()
    changed = git.ask(top, *_STATUS)
    left_out = _left_out(git, top, os.fsdecode(changed or b""))
    but = [f":(top,exclude,literal){name}" for name in left_out]
    diff = git.ask(top, "-c", "diff.autoRefreshIndex=false", *_DIFF, "--", ":(top)", *but)
    if changed is not None or diff is not None:
        facts["dirty"] = bool(changed or diff)
    if diff is not None:
        facts["state"] = hashlib.sha256(diff).hexdigest()[:12] if diff else None
    if left_out:
        facts["left_out"] = left_out
    in_commit: Iterable[str] = ()
    if {"commit", "state"} <= facts.keys() and top_of(folder) is not None:
        answer = git.ask(folder, "ls-tree", "-z", "--name-only", "HEAD", *names)
        lacks = {top / name for name in left_out}
        there = os.fsdecode(answer or b"").split("\0")[:-1]
        in_commit = (name for name in there if (folder / name).resolve() not in lacks)
    if git.failed:
        of_each = (f"{', '.join(names)}: {error}" for error, names in git.failed.items())
        facts["note"] = f"no answer of git {'; '.join(of_each)}"
    return WorkTree(facts, diff or b"", frozenset(in_commit))


def lacking(facts: Mapping[str, Any]) -> str:
    """Returns a sentence on what git did not say, or the diff lacks; "" if there is nothing."""
    note = facts.get("note", _NO_GIT)
    found = [note] if note != _NO_GIT else []
    if names := facts.get("left_out"):
        shown = textwrap.shorten(", ".join(names), 200, placeholder=" …")
        found.append(f"changes of {shown} are not committed, and too large or of a submodule's own")
    rest = "the record of this start lacks that, but not the script's Python files"
    return "; ".join([*found, rest]) if found else ""


def _left_out(git: _Git, top: Path, status: str) -> list[str]:
    """Returns what is to be in no diff, by the answer of git status: the largest files, if all are
    too large together, and submodules with changes of their own, which `git apply` cannot make.
    """
    entries = [one.split(" ", 10 if one[0] == "u" else 8) for one in status.split("\0")[:-1]]
    blobs = {one[-1]: one[-3] for one in entries}  # in the commit; of a conflict, ours
    submodules = [one[-1] for one in entries if one[2].startswith("S") and "M" in one[2]]
    ids = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    answer = git.ask(top, "cat-file", "--batch-check=%(objectsize)", given=ids) if blobs else b""
    before = [int(size) if size.isdigit() else 0 for size in (answer or b"").splitlines()]
    sizes = dict.fromkeys(blobs, 0) | dict(zip(blobs, before, strict=False))
    for name in sizes:
        if not (file := top / name).is_dir() and os.path.lexists(file):
            sizes[name] += file.lstat().st_size
    total, large = 0, []
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        total += size
        large += [name] * (total > _MOST_BYTES)
    return sorted({*large, *submodules})


class _Git:
    """The git command."""

    def __init__(self) -> None:
        self.failed: dict[str, list[str]] = {}  # by error, whose text may hold paths

    def ask(self, folder: Path, *words: str, given: bytes = b"") -> bytes | None:
        """Returns the output of a command; None if it fails."""
        command = ["git", "-C", str(folder), "--no-optional-locks", *words]
        try:
            # git runs in a session of its own: Ctrl-C, which is for the run, does not reach it, and
            # it has no terminal on which to ask for a password.
            return subprocess.run(
                command, input=given, capture_output=True, timeout=_SECONDS,
                start_new_session=True, check=True,
            ).stdout  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            name = next(word for word in words if word != "-c" and "=" not in word)
            self.failed.setdefault(type(error).__name__, []).append(name)
            return None
