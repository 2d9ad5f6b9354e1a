"""What is worth noting when a run starts: its command, code, packages, device, environment.

Nothing here ends a run. Of the environment only what steers paddle, NCCL and the threads is noted,
and no path of the machine but in the words that a person typed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import paddle

from expbase.processes import LAUNCHER
from expbase.record import git

_VARIABLES = ("FLAGS_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # or how they begin
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE = Path(__file__).resolve().parents[1]


def gather(output_dir: Path, experiment: type) -> dict[str, Any]:
    """The facts of a start, as JSON values; saves the changes that are not committed.

    The experiment's class tells where the code lies, if no script does.
    """
    top = _work_tree(experiment)
    words, directory = _portable(_command(), top) if top else (_command(), None)
    packages = _packages()
    return {
        "experiment": experiment.__name__,
        "command": words,  # after the interpreter; None if no script was started
        "directory": directory,  # where it was given, from the top of the work tree, if within it
        "git": git.describe(top, output_dir),
        "packages": {name: version for name, version, _ in packages},
        "local_packages": [name for name, _, is_local in packages if is_local],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith("FLAGS_selected_")
        },  # FLAGS_selected_gpus is of the launcher: another one for each process
        "host": platform.node(),
        "pid": os.getpid(),
    }


def _script() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None  # None in a notebook, or with -c


def _command() -> list[str] | None:
    """The words after the interpreter that would start this again, as they were typed."""
    if _script() is None:
        return None
    if parent := multiprocessing.parent_process():  # of paddle's spawn, which --nprocs uses
        return _words_of(parent.pid)
    words = _words_of(os.getppid())
    return words if LAUNCHER in words else sys.orig_argv[1:]


def _words_of(pid: int | None) -> list[str]:
    """The words after the interpreter of another process; none if the system does not tell."""
    with suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[1:-1]
    return []


def _work_tree(experiment: type) -> Path | None:
    """The git work tree of the script; of the class with `python -m expbase run`; else of here."""
    file = getattr(sys.modules.get(experiment.__module__), "__file__", None)
    files = [path for path in (_script(), Path(file).resolve() if file else None) if path]
    folders = [path.parent for path in files if _PACKAGE not in path.parents][:1]
    return next((top for folder in (*folders, Path.cwd()) if (top := git.top_of(folder))), None)


def _portable(words: list[str] | None, top: Path) -> tuple[list[str] | None, str | None]:
    """The words as one would type them in a clone, and where in it; None: in its top."""
    here = Path.cwd().resolve()
    is_inside = here.is_relative_to(top)

    def portable(word: str) -> str:
        option, equals, text = word.rpartition("=")  # /data, or --data=/data
        path = Path(here, text).resolve()
        is_path = os.path.isabs(text) or (not is_inside and path == _script())
        if not is_path or not path.is_relative_to(top):
            return word
        return f"{option}{equals}{os.path.relpath(path, here if is_inside else top)}"

    directory = os.path.relpath(here, top) if is_inside else None
    return words and [*map(portable, words)], directory


@functools.cache  # a runner starts several experiments in one process
def _packages() -> list[tuple[str, str, bool]]:
    """Name and version of each package, and whether it comes from a folder or a repository."""
    found: dict[str, tuple[str, str, bool]] = {}
    for distribution in importlib.metadata.distributions():
        # Its folder is called by both, in nearly all; to parse the metadata of all takes 0.1 s.
        stem, dist_info, _ = str(getattr(distribution, "_path", "")).rpartition(".dist-info")
        name, _, version = os.path.basename(stem).partition("-")
        if not dist_info:
            name, version = distribution.metadata["Name"], distribution.version
        if name and name not in found:  # the first on the path is the one that is imported
            is_local = bool(distribution.read_text("direct_url.json"))
            found[name] = (name.replace("_", "-"), version, is_local)
    return sorted(found.values(), key=lambda package: package[0].lower())


def _device() -> dict[str, Any]:
    name: str = paddle.device.get_device()
    facts: dict[str, Any] = {"name": name, "model": _processor() if name == "cpu" else None}
    if name.startswith("gpu"):
        with suppress(Exception):  # seen by no test, and it must not end a run
            facts["model"] = paddle.device.cuda.get_device_name(name)
            facts |= {"cuda": paddle.version.cuda(), "cudnn": paddle.version.cudnn()}
            facts["driver"] = _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    return facts


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
