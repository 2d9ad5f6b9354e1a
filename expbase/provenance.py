"""What a start of a run is worth noting: its command, code, packages, device, environment.

Over git and the standard library. Nothing here ends a run: what cannot be found out is a text in
its place. Of the environment only what tells paddle, NCCL and the threads what to do is noted, and
no path of the machine but in the words that a person typed.

    facts = gather(output_dir, type(experiment), config)     # a JSON object, for the ledger
    facts["git"]     # {"commit": "b2e0…", "branch": "main", "dirty": true, "state": "0a1b2c3d4e5f"}

Changes that are not committed are saved with the run, once per distinct state:

    sources/0a1b2c3d4e5f/changes.diff     of the files that git knows
    sources/0a1b2c3d4e5f/untracked/…      source files that git does not know and does not ignore
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

from expbase.ledger import LEDGER, config_changes
from expbase.output import LOCK

SOURCES = "sources"  # in the output directory
CHANGES, UNTRACKED = "changes.diff", "untracked"
# What paddle's launcher and spawn set for each process, and no person needs to set again.
SET_BY_LAUNCHER = {
    *("PADDLE_MASTER", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE", "PADDLE_GLOBAL_RANK"),
    *("PADDLE_LOCAL_RANK", "PADDLE_NNODES", "PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ID"),
    *("PADDLE_TRAINERS_NUM", "PADDLE_RANK_IN_NODE", "PADDLE_AUTO_CLUSTER", "PADDLE_LOG_DIR"),
    *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_DISTRI_BACKEND", "PADDLE_BACKUP_ENV_PATH"),
    *(f"FLAGS_selected_{name}s" for name in ("cpu", "gpu", "xpu", "ipu")),
}
_PATHS_OF_LAUNCHER = {"PADDLE_LOG_DIR", "PADDLE_BACKUP_ENV_PATH"}  # of this machine
_PREFIXES = ("FLAGS_", "NCCL_", "PADDLE_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_PACKAGE = Path(__file__).resolve().parent
_LAUNCH = "paddle.distributed.launch"


def gather(output_dir: Path, experiment: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a start, as JSON values; saves the changes that are not committed.

    Args:
        output_dir: Of the run.
        experiment: Its class, which tells where the code lies if no script does.
        config: Of this start.

    Returns:
        `command`: the words after the interpreter; None if no script was started.
        `directory`: where it was given, from the top of the git work tree; None outside of it.
        `git`: commit, branch, whether there are changes (`dirty`), the name under which they are
        saved (`state`), what git does not know and is not saved (`left_out`), and a `note` of
        what else is not known or not saved.
        `config_changes`: as ledger.config_changes has them.
        `packages`, `local_packages` (not from an index), `python`, `platform`, `device`,
        `environment`, `host`, `pid`.
    """
    main = _main_file()
    words = _words(main)
    start = _directory(main, words or [])
    top = next((top for place in _places(main, experiment) if (top := _top(place))), None)
    return {
        "command": words and [*_portable(words, start, top, main)],
        "directory": os.path.relpath(start, top) if top and start.is_relative_to(top) else None,
        "git": _code(top, output_dir),
        "config_changes": config_changes(output_dir, config),
        "packages": _noted(lambda: {name: version for name, version, _ in _installed()}),
        "local_packages": _noted(lambda: [name for name, _, is_local in _installed() if is_local]),
        "python": platform.python_version(),
        "platform": _noted(platform.platform),
        "device": _noted(_device),
        "environment": _environment(),
        "host": platform.node(),
        "pid": os.getpid(),
    }


def _noted(find: Callable[[], Any]) -> Any:
    """What is found, or a text that says why not; without the paths that errors name."""
    try:
        return find()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None)
        return f"not known: {type(error).__name__}{f', {why}' if why else ''}"


# --- the command -----------------------------------------------------------------------------


def _main_file() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute() if file else None  # None in a notebook, or with -c


def _words(main: Path | None) -> list[str] | None:
    """The words after the interpreter that would start this again, as they were typed."""
    if main is None:
        return None
    parent = multiprocessing.parent_process()  # of paddle's spawn, which --nprocs uses
    words = _words_of(parent.pid) if parent and parent.pid else sys.orig_argv[1:]
    if not words or "--multiprocessing-fork" in words:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        name = spec.name.removesuffix(".__main__") if spec else ""
        words = [*(["-m", name] if name else [str(main)]), *sys.argv[1:]]
    if "PADDLE_LOCAL_SIZE" in os.environ:
        return _launcher_words() or _launch_line(words)
    return words


def _words_of(pid: int) -> list[str]:
    """The words after the interpreter of another process; none where the system does not tell."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in data.split(b"\0")[1:-1]]


def _launcher_words() -> list[str]:
    """Those of paddle's launcher, if it is what started this process."""
    words = _words_of(os.getppid())
    if _LAUNCH in words:
        return words
    names = [os.path.basename(word) for word in words[:1]]
    return ["-m", _LAUNCH, *words[1:]] if names == ["fleetrun"] else []


def _launch_line(words: list[str]) -> list[str]:
    """What the launcher's words must have been, by what it told its processes."""
    count = os.environ["PADDLE_LOCAL_SIZE"]
    own = words[1:] if words[:1] == ["-u"] else words  # which the launcher adds
    return ["-m", _LAUNCH, "--nproc_per_node", count, *own]


def _directory(main: Path | None, words: Iterable[str]) -> Path:
    """Where the command was given; a script may have gone elsewhere since."""
    for word in words:
        if main is not None and not os.path.isabs(word) and str(main).endswith(f"/{word}"):
            return Path(str(main)[: -len(word) - 1] or "/").resolve()
    return Path.cwd()


def _portable(
    words: Iterable[str], start: Path, top: Path | None, main: Path | None
) -> Iterator[str]:
    """The words; a path into the work tree is relative to where the command was given.

    It is relative to the top if the command was given outside of the work tree.
    """
    root = top or start
    base = start if start.is_relative_to(root) else root
    for word in words:
        if base != start and main is not None and Path(start, word).resolve() == main.resolve():
            word = str(main.resolve())
        match = re.fullmatch(r"([^=/]*=)?(/.*)", word, re.DOTALL)  # /data, or --data=/data
        folder, name = os.path.split(match[2]) if match else ("", "")
        path = os.path.join(os.path.realpath(folder), name)
        if match and Path(path).is_relative_to(root):
            word = (match[1] or "") + os.path.relpath(path, base)
        yield word


# --- the machine -----------------------------------------------------------------------------


@functools.cache
def _installed() -> list[tuple[str, str, bool]]:
    """Name and version of each package, and whether it is from no index."""
    from importlib.metadata import distributions

    found: dict[str, tuple[str, str, bool]] = {}
    for distribution in distributions():
        facts = distribution.metadata
        name = facts["Name"] if "Name" in facts else ""  # noqa: SIM401  # it has no get
        if name and name not in found:  # the first on the path is the one that is imported
            is_local = bool(distribution.read_text("direct_url.json"))  # a folder, a repository
            found[name] = (name, facts["Version"], is_local)
    return sorted(found.values(), key=lambda package: package[0].lower())


def _device() -> dict[str, Any]:
    name: str = paddle.device.get_device()
    if not name.startswith("gpu"):
        return {"name": name, "model": _processor() if name == "cpu" else None}
    return {
        "name": name,
        "model": paddle.device.cuda.get_device_name(name),
        "driver": _noted(_driver),
        "cuda": paddle.version.cuda(),
        "cudnn": paddle.version.cudnn(),
    }


@functools.cache
def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _driver() -> str:
    text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"\s(\d+\.[\d.]+)\s", text)
    return match[1] if match else text.splitlines()[0]


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _PATHS_OF_LAUNCHER
    }


# --- the code --------------------------------------------------------------------------------

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


def _places(main: Path | None, experiment: type) -> Iterator[Path]:
    """The folders that the code may lie in, the likeliest first."""
    if main is not None and _PACKAGE not in main.resolve().parents:
        yield main.resolve().parent
    else:  # python -m expbase run, a notebook
        modules = (sys.modules.get(cls.__module__) for cls in experiment.__mro__)
        files = (Path(file).resolve() for m in modules if (file := getattr(m, "__file__", None)))
        yield from (file.parent for file in [*files][:1] if _PACKAGE not in file.parents)
    yield Path.cwd()


def _top(folder: Path) -> Path | None:
    """The top of the git work tree that a folder lies in."""
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)


def _code(top: Path | None, output_dir: Path) -> dict[str, Any]:
    if top is None:
        return {"note": "not in a git repository"}
    try:
        return _look(_Git(top), output_dir)
    except _Unknown as error:
        return {"note": str(error)}


def _look(git: _Git, output_dir: Path) -> dict[str, Any]:
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
    facts: dict[str, Any] = {"commit": status.commit, "branch": status.branch}
    facts |= {"dirty": bool(dirty), "state": state}
    if left_out:
        facts["left_out"] = {"count": len(left_out), "first": left_out[:5]}
    return facts | ({"note": "; ".join(notes)} if notes else {})


class _Status:
    """What `git status` tells.

    Attributes:
        commit: Full.
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
            _Unknown: There is no commit, or git does not tell.
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
            raise _Unknown("the git repository has no commit yet")
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
