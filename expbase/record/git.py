"""The code that a run was made with: its commit, and what git does not have of it.

Over git, which is only asked. Changes that are not committed are saved with the run, once per
distinct state, whole or not at all:

    sources/0a1b2c3d4e5f/changes.diff     of the files that git knows
    sources/0a1b2c3d4e5f/untracked/…      source files that git does not know and does not ignore
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from expbase.record.run_record import LEDGER
from expbase.run_dir import LOCK

SOURCES = "sources"  # in the output directory
CHANGES, UNTRACKED = "changes.diff", "untracked"

_SECONDS = 10.0  # that git has for one answer
_SECONDS_IN_ALL = 15.0  # and for all: under gloo the other ranks wait 30 s at most
_STATUS_BYTES = 20_000_000  # of names
_DIFF_BYTES = 20_000_000  # of a diff that is saved
_FILE_BYTES, _ALL_FILES_BYTES = 1_000_000, 20_000_000  # of files that git does not know
_FILES = 1000
_MARKS = (LEDGER, LOCK.format(rank=0), "workerlog.0")  # of a run, or of a launcher's logs
_PATHS_CHARACTERS = 100_000  # of paths on a command line
_SOURCE_SUFFIXES = {
    *(".py", ".pyi", ".pyx", ".ipynb", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".sh"),
    *(".txt", ".md", ".rst", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
}
# No program of the user's configuration is run, but the filters that decide what a file's content
# is; and what a person likes a diff to look like does not change the one that is saved.
_OPTIONS = {
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "core.safecrlf": "false",
    "status.renames": "false",
    "diff.autoRefreshIndex": "false",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "diff.relative": "false",
    "diff.interHunkContext": "0",
    "diff.suppressBlankEmpty": "false",
}
_DIFF = [
    *("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "-U3", "-O/dev/null"),
    *("--diff-algorithm=default", "--ignore-submodules=all"),
]


_File = tuple[bytes, bool]  # the content of a file, and whether it can be run


class _Unknown(Exception):
    """Git did not tell; the text says why, for the record."""


def top_of(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def look(top: Path | None, output_dir: Path) -> dict[str, Any]:
    """What git knows of a work tree, as JSON values; saves what it does not have.

    Args:
        top: Of the work tree; None: there is none.
        output_dir: Of the run, which takes the changes.

    Returns:
        `commit`, `branch`, `dirty`, the name under which changes are saved (`state`), what is left
        out of them (`left_out`) and a `note` of what is not known.
    """
    if top is None:
        return {"note": "not in a git repository"}
    try:
        return _look_with(_Git(top), output_dir)
    except _Unknown as error:
        return {"note": str(error)}


def _look_with(git: _Git, output_dir: Path) -> dict[str, Any]:
    status = git.status()
    notes = status.notes
    files, left_out = _read_untracked(git.top, status.untracked, output_dir.resolve())
    try:
        changes = git.changes(status) if status.changed else {}
        state = _save(output_dir / SOURCES, {**changes, **files})
    except (_Unknown, OSError) as error:
        notes.append(f"the changes are not saved: {getattr(error, 'strerror', None) or error}")
        state = None
    if status.submodules:
        notes.append(f"changes in submodules are not saved: {', '.join(status.submodules)}")
    dirty = status.changed or status.submodules or files or any(map(_is_source, left_out))
    facts: dict[str, Any] = {"commit": status.commit or None, "branch": status.branch}
    facts |= {"dirty": bool(dirty), "state": state}
    if left_out:
        facts["left_out"] = {"count": len(left_out), "first": left_out[:5]}
    return facts | ({"note": "; ".join(notes)} if notes else {})


class _Status:
    """What `git status` tells.

    Attributes:
        commit: Full; empty if there is none yet.
        branch: None if there is none.
        changed: Files that git knows; submodules apart.
        submodules: Those at another commit, or with changes of their own.
        untracked: What git does not know and does not ignore; a folder ends in `/`.
        notes: What is not known.
    """

    def __init__(self) -> None:
        self.commit = ""
        self.branch: str | None = None
        self.changed: list[str] = []
        self.submodules: list[str] = []
        self.untracked: list[str] = []
        self.notes: list[str] = []


def _parsed(output: bytes) -> _Status:
    # The format is git-status's "porcelain v2"; the third field of a change tells submodules.
    status = _Status()
    entries = iter(os.fsdecode(output).split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            name, _, value = rest.partition(" ")
            if name == "branch.oid":
                status.commit = value
            elif name == "branch.head":
                status.branch = None if value == "(detached)" else value
        elif kind == "?":
            status.untracked.append(rest)
        elif kind in ("1", "2", "u"):
            *facts, path = rest.split(" ", {"1": 7, "2": 8, "u": 9}[kind])
            (status.submodules if facts[1].startswith("S") else status.changed).append(path)
            if kind == "2":
                next(entries)  # what it was called before
    return status


class _Git:
    """Asks git about a work tree; nothing is written to it, and no one is asked for anything.

    Args:
        top: The top of the work tree.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self._deadline = time.monotonic() + _SECONDS_IN_ALL

    def status(self) -> _Status:
        """The commit and what differs from it.

        Raises:
            _Unknown: Git does not tell.
        """
        try:
            status = self._status("all")
        except TimeoutError:
            try:
                status = self._status("no")
            except TimeoutError:
                raise _Unknown("git status took too long") from None
            status.notes.append("files that git does not know are not looked at: too many")
        if status.commit == "(initial)":
            status.commit = ""
            status.untracked += status.changed  # all of it is to be saved
            status.changed = []
            status.notes.append("the git repository has no commit yet")
        return status

    def _status(self, untracked: str) -> _Status:
        words = ["status", "--porcelain=v2", "--branch", "-z", f"--untracked-files={untracked}"]
        output = self._ask(words, _STATUS_BYTES)
        if len(output) > _STATUS_BYTES:
            raise TimeoutError
        return _parsed(output)

    def changes(self, status: _Status) -> dict[str, _File]:
        """The file to save of the differences from the commit.

        Args:
            status: Takes a note of what is not saved.

        Raises:
            _Unknown: Git does not tell.
        """
        words, paths = _DIFF, ["HEAD", "--", *status.changed]
        if sum(map(len, paths)) > _PATHS_CHARACTERS:
            # All files, then; of those that are only touched git must look at the content.
            words, paths = ["-c", "diff.autoRefreshIndex=true", *words], ["HEAD"]
        try:
            diff = self._ask([*words, "--binary", "--full-index", *paths], _DIFF_BYTES)
            if len(diff) <= _DIFF_BYTES:
                return {CHANGES: (diff, False)} if diff else {}
            status.notes.append(
                f"the diff has more than {_DIFF_BYTES} bytes: only its summary is saved"
            )
            return {
                "changes.stat": (self._ask([*words, "--stat=100", *paths], _STATUS_BYTES), False)
            }
        except TimeoutError:
            raise _Unknown("git diff took too long") from None

    def _ask(self, words: list[str], at_most: int) -> bytes:
        """The output of a git command; of one with more bytes only the beginning, one too many.

        Raises:
            TimeoutError: It took too long.
            _Unknown: Git is not there, or refuses.
        """
        options = [word for key, value in _OPTIONS.items() for word in ("-c", f"{key}={value}")]
        command = ["git", "-C", str(self.top), *options, *words]
        seconds = max(min(_SECONDS, self._deadline - time.monotonic()), 0.1)
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment(),
                    start_new_session=True,  # Ctrl-C is for the run
                )
            except OSError as error:
                raise _Unknown(f"git cannot be run: {error.strerror}") from error
            output, in_time = _read(process, at_most, seconds)
            if not in_time:
                raise TimeoutError
            if process.returncode and len(output) <= at_most:
                errors.seek(0)
                raise _Unknown(self._refusal(errors.read().decode("utf-8", "replace")))
        return output

    def _environment(self) -> dict[str, str]:
        # A git hook, say, that runs the tests points git at its own repository and index.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("GIT_") or name.startswith("GIT_CONFIG_")
        }
        own = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
        own["GIT_LITERAL_PATHSPECS"] = "1"
        own["GIT_CEILING_DIRECTORIES"] = str(self.top.parent)  # it is this one, or none
        return {**kept, **own, "LC_ALL": "C", "LANGUAGE": ""}

    def _refusal(self, text: str) -> str:
        if "dubious ownership" in text:
            return "git refuses: the repository belongs to somebody else (its safe.directory)"
        first = next(iter(text.splitlines()), "no reason given")
        return f"git refuses: {first.replace(str(self.top), '.')}"


def _read(process: Any, at_most: int, seconds: float) -> tuple[bytes, bool]:
    """The output of a process up to one byte too many, and whether it came in time; ends it."""
    late = threading.Event()

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def kill_late() -> None:
        late.set()
        kill()

    timer = threading.Timer(seconds, kill_late)
    timer.start()
    try:
        with process.stdout:
            output = process.stdout.read(at_most + 1)
        if len(output) > at_most:
            kill()
    except BaseException:
        kill()
        raise
    finally:
        process.wait()
        timer.cancel()
    return output, not late.is_set()


def _is_source(name: str) -> bool:
    # A backup_env is the whole environment, secrets too, which paddle's launcher writes to its log.
    stem, suffix = os.path.splitext(os.path.basename(name))
    return suffix.lower() in _SOURCE_SUFFIXES and not stem.startswith("backup_env.")


def _read_untracked(
    top: Path, names: Iterable[str], output: Path
) -> tuple[dict[str, _File], list[str]]:
    """The source files among what git does not know, and the names of the rest.

    What lies in the directory of this or another run, or of a launcher's logs, is neither.
    """

    @functools.cache
    def is_of_a_run(folder: str) -> bool:
        path = top / folder
        own = path == output or any((path / mark).exists() for mark in _MARKS)
        return bool(folder) and (own or is_of_a_run(os.path.dirname(folder)))

    files: dict[str, _File] = {}
    left_out, size = [], 0
    for name in sorted(names):
        if is_of_a_run(os.path.dirname(name)):
            continue
        room = min(_FILE_BYTES, _ALL_FILES_BYTES - size) if len(files) < _FILES else -1
        file = _read_source(top / name, room) if _is_source(name) else None
        if file is None:
            left_out.append(name)
        else:
            files[f"{UNTRACKED}/{name}"] = file
            size += len(file[0])
    return files, left_out


def _read_source(path: Path, room: int) -> _File | None:
    """A file of no more bytes than there is room for."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > room:
            return None
        data = path.read_bytes()
    except OSError:  # gone, or not ours to read
        return None
    return (data, bool(facts.st_mode & stat.S_IXUSR)) if len(data) <= room else None


def _save(folder: Path, files: Mapping[str, _File]) -> str | None:
    """Writes the files, whole or not at all, into a folder that is named by what they hold.

    Returns:
        The name; None if there is nothing to save.

    Raises:
        OSError: The system refused.
    """
    if not files:
        return None
    name = _digest(files)
    if not (folder / name).is_dir():
        for torn in folder.glob(".writing-*"):  # by a kill
            shutil.rmtree(torn, ignore_errors=True)
        temporary = folder / f".writing-{name}"
        try:
            for file, (data, is_executable) in files.items():
                path = temporary / file
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, data, is_executable=is_executable)
            temporary.rename(folder / name)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return name


def _write(path: Path, data: bytes, *, is_executable: bool) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if is_executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _digest(files: Mapping[str, _File]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        data, is_executable = files[name]
        for part in (os.fsencode(name), data, b"x" if is_executable else b"-"):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]
