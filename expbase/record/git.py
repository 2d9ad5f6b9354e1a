"""The code that a run was made with: its commit, and the changes that are not committed.

Asks the `git` command, each time bounded in time, and never changes the repository or its index.
What git does not answer is a note in the record, never a failure of the run. The changes are saved
with the run as one patch, once per distinct state; `git apply` makes them again:

    sources/0a1b2c3d4e5f.diff     git diff HEAD, and the source files that git does not know

    describe(top_of(Path.cwd()), output_dir)   # {"commit": "b2e0…", "state": "0a1b2c3d4e5f", …}
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from expbase.record.run_record import LEDGER
from expbase.run_dir import LOCK
from expbase.state.checkpoint import write_single_file

SOURCES = "sources"  # in the output directory

_SECONDS = 5.0  # for one answer: under gloo the other ranks wait 30 s at most
_PATCH_BYTES = 20_000_000
_NAMES_CHARACTERS = 2_000_000  # of untracked files; a data set that is not ignored has more
_FILE_BYTES, _FILES = 1_000_000, 50  # of untracked files: many or large ones are rather data
_SOURCE_SUFFIXES = {
    *(".py", ".pyi", ".pyx", ".ipynb", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".sh"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
}
_MARKS = {LEDGER, LOCK.format(rank=0), "workerlog.0"}  # of a run, or of a launcher's logs
# A git hook that starts the tests of a project, say, has these set to its own repository.
_SET_BY_HOOKS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's own name for "no files at all"
# Without autoRefreshIndex=false `git diff` writes the index. The other options overrule the user's
# taste in diffs, because `git apply` could not read every kind.
_DIFF = [
    *("-c", "diff.autoRefreshIndex=false", "diff", "--binary", "-U3", "--no-color"),
    *("--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"),
    *("--submodule=short", "--ignore-submodules=dirty"),
]


class _NoAnswer(Exception):
    """Git did not answer; the text says why, for the record."""


class _Status(NamedTuple):
    commit: str | None  # None: there is none yet
    branch: str | None  # None: HEAD is detached
    changed: list[str]  # tracked files that differ from the commit
    submodules: list[str]  # those with changes inside, which no patch of this repository holds


def top_of(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def describe(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """What git knows about a work tree, as JSON values; saves the changes with the run.

    Args:
        top: The top of the work tree; None: there is none.
        output_dir: The run's, which takes the changes.

    Returns:
        `commit`, `branch`, `dirty`, the name under which the changes are saved (`state`), the
        untracked files that are not saved (`left_out`), and a `note` of what is not known.
    """
    if top is None:
        return {"note": "not in a git repository"}
    try:
        status = _status(top)
    except _NoAnswer as error:
        return {"note": str(error)}
    notes = [] if status.commit else ["the git repository has no commit yet"]
    if status.submodules:
        notes.append(f"changes in submodules are not saved: {', '.join(status.submodules)}")
    untracked, sources, state = [], [], None
    try:
        untracked = _untracked(top)
        sources = [name for name in untracked if _is_source(top / name)][:_FILES]
    except (_NoAnswer, OSError) as error:  # OSError: one of them is gone by now
        notes.append(f"untracked files are not looked at: {error}")
    try:
        state = _save(_patch(top, status, sources), output_dir)
    except (_NoAnswer, OSError) as error:
        notes.append(f"the changes are not saved: {getattr(error, 'strerror', None) or error}")
    facts: dict[str, Any] = {"commit": status.commit, "branch": status.branch}
    facts |= {"dirty": bool(status.changed or sources), "state": state}
    if left_out := [name for name in untracked if name not in sources]:
        facts["left_out"] = {"count": len(left_out), "first": left_out[:5]}
    return facts | ({"note": "; ".join(notes)} if notes else {})


def _status(top: Path) -> _Status:
    # The manual of git-status describes the format as "porcelain v2".
    words = ["--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=no"]
    output = _ask(top, "status", *words, "--ignore-submodules=untracked")
    headers: dict[str, str] = {}
    changed, submodules = [], []
    for entry in os.fsdecode(output).split("\0"):
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            name, _, headers[name] = rest.partition(" ")
        elif kind in ("1", "u"):  # a change, a conflict; the path comes after 7 or 9 fields
            _, submodule, *_, path = rest.split(" ", 7 if kind == "1" else 9)
            changed.append(path)
            submodules += [path] if submodule[0] == "S" and submodule[2] == "M" else []
    commit, branch = headers["branch.oid"], headers["branch.head"]
    return _Status(
        None if commit == "(initial)" else commit,
        None if branch == "(detached)" else branch,
        changed,
        submodules,
    )


def _untracked(top: Path) -> list[str]:
    """Files that git neither knows nor ignores, Python first; without those that a run wrote."""
    output = os.fsdecode(_ask(top, "ls-files", "--others", "--exclude-standard", "-z"))
    if len(output) > _NAMES_CHARACTERS:
        raise _NoAnswer("too many")
    names = [name for name in output.split("\0") if name]
    # The files of runs are no source code, and with them each start would be a state of its own.
    # Beside its logs paddle's launcher writes backup_env.0.json: the whole environment, secrets
    # too. A mark at the top excludes nothing: its directory is "" here, "." among the parents.
    runs = {os.path.dirname(name) for name in names if os.path.basename(name) in _MARKS}
    own = [name for name in names if runs.isdisjoint(map(str, PurePosixPath(name).parents))]
    own = [name for name in own if not os.path.basename(name).startswith("backup_env.")]
    return sorted(own, key=lambda name: (not name.endswith(".py"), name))


def _is_source(path: Path) -> bool:
    is_file = path.suffix.lower() in _SOURCE_SUFFIXES and path.is_file()
    return is_file and path.stat().st_size <= _FILE_BYTES


def _patch(top: Path, status: _Status, untracked: list[str]) -> bytes:
    """All changes against the commit.

    Raises:
        _NoAnswer: Git did not answer, or there is too much.
    """
    # Sizes come first: a tracked file can be of any size, and git would read all of it.
    sizes = [path.stat().st_size for name in status.changed if (path := top / name).is_file()]
    if sum(sizes) > _PATCH_BYTES:
        raise _NoAnswer(f"the changed files have more than {_PATCH_BYTES} bytes")
    patch = b""
    if status.changed:
        patch = _ask(top, *_DIFF, status.commit or _EMPTY_TREE)
    begun = time.monotonic()
    for name in untracked:
        if time.monotonic() - begun > _SECONDS:
            raise _NoAnswer(f"git took more than {_SECONDS:g} s for the untracked files")
        patch += _ask(top, *_DIFF, "--no-index", "--", os.devnull, name)
    if len(patch) > _PATCH_BYTES:
        raise _NoAnswer(f"the diff has more than {_PATCH_BYTES} bytes")
    return patch


def _save(patch: bytes, output_dir: Path) -> str | None:
    """Writes a patch under a name that depends on its content alone, and returns the name."""
    state = hashlib.sha256(patch).hexdigest()[:12]
    path = output_dir / SOURCES / f"{state}.diff"
    if patch and not path.exists():
        write_single_file(path, [patch])
    return state if patch else None


def _ask(top: Path, *words: str) -> bytes:
    """The output of a git command.

    Raises:
        _NoAnswer: Git is not there, refuses, or takes too long.
    """
    command = ["git", "-C", str(top), "--no-optional-locks", *words]
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_HOOKS}
    try:
        # In a session of its own, where Ctrl-C does not reach it (that is for the run), and where
        # it has no terminal on which to ask for a password.
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment,
            timeout=_SECONDS, start_new_session=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise _NoAnswer(f"git cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(f"git took more than {_SECONDS:g} s") from error
    if result.returncode not in (0, 1):  # 1: --no-index found a difference
        lines = result.stderr.decode("utf-8", "replace").replace(str(top), ".").splitlines()
        raise _NoAnswer(f"git refuses: {lines[0] if lines else 'no reason given'}")
    return result.stdout
