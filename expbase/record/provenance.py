"""What a start of a run is worth noting: its command, code, packages, device, environment.

The code is looked at in sources.py. Nothing here ends a run: what cannot be found out is a text in
its place. Of the environment only what tells paddle, NCCL and the threads what to do is noted, and
no path of the machine but in the words that a person typed.

    facts = gather(output_dir, type(experiment), config)     # a JSON object, for the ledger
    facts["git"]     # {"commit": "b2e0…", "branch": "main", "dirty": true, "state": "0a1b2c3d4e5f"}
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

from expbase.processes import LAUNCHER
from expbase.record import git
from expbase.record.run_record import config_changes

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
_PACKAGE = Path(__file__).resolve().parents[1]


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
    top = next((top for place in _places(main, experiment) if (top := git.top_of(place))), None)
    return {
        "command": words and [*_portable(words, start, top, main)],
        "directory": os.path.relpath(start, top) if top and start.is_relative_to(top) else None,
        "git": git.look(top, output_dir),
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
    if LAUNCHER in words:
        return words
    names = [os.path.basename(word) for word in words[:1]]
    return ["-m", LAUNCHER, *words[1:]] if names == ["fleetrun"] else []


def _launch_line(words: list[str]) -> list[str]:
    """What the launcher's words must have been, by what it told its processes."""
    count = os.environ["PADDLE_LOCAL_SIZE"]
    own = words[1:] if words[:1] == ["-u"] else words  # which the launcher adds
    return ["-m", LAUNCHER, "--nproc_per_node", count, *own]


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


def _places(main: Path | None, experiment: type) -> Iterator[Path]:
    """The folders that the code may lie in, the likeliest first."""
    if main is not None and _PACKAGE not in main.resolve().parents:
        yield main.resolve().parent
    else:  # python -m expbase run, a notebook
        modules = (sys.modules.get(cls.__module__) for cls in experiment.__mro__)
        files = (Path(file).resolve() for m in modules if (file := getattr(m, "__file__", None)))
        yield from (file.parent for file in [*files][:1] if _PACKAGE not in file.parents)
    yield Path.cwd()
