"""What is worth noting when a run starts: its command, code, packages, device, environment.

Nothing here ends a run: what cannot be found out is a text in its place. Of the environment only
what steers paddle, NCCL and the threads is noted, and no path of the machine but in the words that
a person typed.

    facts = gather(output_dir, type(experiment), config)     # a JSON object, for the ledger
    facts["git"]     # {"commit": "b2e0…", "branch": "main", "dirty": true, "state": "0a1b2c3d4e5f"}
"""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

from expbase.processes import LAUNCHER
from expbase.record import git
from expbase.record.run_record import config_changes

_VARIABLES = ("FLAGS_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # or how they begin
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE = Path(__file__).resolve().parents[1]


def gather(output_dir: Path, experiment: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a start, as JSON values; saves the changes that are not committed.

    Args:
        output_dir: The run's.
        experiment: Its class, which tells where the code lies if no script does.
        config: The config of this start.

    Returns:
        `command`: the words after the interpreter; None if no script was started.
        `directory`: where it was given, from the top of the git work tree; None outside of it.
        `git`: what `git.describe` returns.
        `config_changes`: what `run_record.config_changes` returns.
        `packages`, `local_packages` (not from an index), `python`, `platform`, `device`,
        `environment`, `host`, `pid`.
    """
    top = _work_tree(experiment)
    words, directory = _portable(_command(), top) if top else (_command(), None)
    return {
        "command": words,
        "directory": directory,
        "git": git.describe(top, output_dir),
        "config_changes": config_changes(output_dir, config),
        "packages": _noted(lambda: {name: version for name, version, _ in _packages()}),
        "local_packages": _noted(lambda: [name for name, _, is_local in _packages() if is_local]),
        "python": platform.python_version(),
        "platform": _noted(platform.platform),
        "device": _noted(_device),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith("FLAGS_selected_")
        },  # FLAGS_selected_gpus is of the launcher: another one for each process
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


def _script() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None  # None in a notebook, or with -c


def _command() -> list[str] | None:
    """The words after the interpreter that would start this again, as they were typed."""
    if _script() is None:
        return None
    if "PADDLE_LOCAL_SIZE" in os.environ:  # under paddle's launcher, or something like it
        words = _words_of(os.getppid())
        names = set(map(os.path.basename, words))
        return words if names & {LAUNCHER, "fleetrun"} else sys.orig_argv[1:]
    parent = multiprocessing.parent_process()  # of paddle's spawn, which --nprocs uses
    return _words_of(parent.pid) if parent and parent.pid else sys.orig_argv[1:]


def _words_of(pid: int) -> list[str]:
    """The words after the interpreter of another process; none if the system does not tell."""
    import psutil  # here, so that a start without a launcher does not wait for its import

    try:
        words: list[str] = psutil.Process(pid).cmdline()[1:]
    except psutil.Error:
        return []
    return words


def _work_tree(experiment: type) -> Path | None:
    """The git work tree of the script; of the class with `python -m expbase run`; else of here."""
    modules = [sys.modules.get(cls.__module__) for cls in experiment.__mro__]
    files = [Path(file).resolve() for m in modules if (file := getattr(m, "__file__", None))]
    files = [file for file in (_script(), *files) if file and _PACKAGE not in file.parents]
    folders = [*(file.parent for file in files[:1]), Path.cwd()]
    return next((top for folder in folders if (top := git.top_of(folder))), None)


def _portable(words: list[str] | None, top: Path) -> tuple[list[str] | None, str | None]:
    """The words as one would type them in a clone, and where in it.

    A path into the work tree becomes relative to where the command was given, or to the top if
    that was outside of it.
    """
    here = Path.cwd().resolve()
    is_inside = here.is_relative_to(top)
    base = here if is_inside else top

    def portable(word: str) -> str:
        option, equals, text = word.rpartition("=")  # /data, or --data=/data
        path = Path(here, text).resolve()
        is_path = os.path.isabs(text) or (not is_inside and path == _script())
        if not is_path or not path.is_relative_to(top):
            return word
        return f"{option}{equals}{os.path.relpath(path, base)}"

    directory = os.path.relpath(here, top) if is_inside else None
    return words and [*map(portable, words)], directory


# --- the machine -----------------------------------------------------------------------------


@functools.cache  # a runner starts several experiments in one process
def _packages() -> list[tuple[str, str, bool]]:
    """Name and version of each package, and whether it comes from a folder or a repository."""
    found: dict[str, tuple[str, str, bool]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name not in found:  # the first on the path is the one that is imported
            is_local = bool(distribution.read_text("direct_url.json"))
            found[name] = (name, distribution.version, is_local)
    return sorted(found.values(), key=lambda package: package[0].lower())


def _device() -> dict[str, Any]:
    name: str = paddle.device.get_device()
    if not name.startswith("gpu"):
        return {"name": name, "model": _processor() if name == "cpu" else None}
    return {
        "name": name,
        "model": paddle.device.cuda.get_device_name(name),
        "driver": _noted(lambda: _DRIVER.read_text(encoding="utf-8").splitlines()[0]),
        "cuda": paddle.version.cuda(),
        "cudnn": paddle.version.cudnn(),
    }


@functools.cache
def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
