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

from expbase.ranks.processes import LAUNCHER
from expbase.record import git

_VARIABLES = ("FLAGS_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # or how they begin
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGE = Path(__file__).resolve().parents[1]


def gather(output_dir: Path, experiment: type) -> dict[str, Any]:
    """The facts of a start, as JSON values; saves the changes that are not committed.

    The experiment's class tells where the code lies, if no script does.
    """
    top = _work_tree(experiment)
    return {
        "experiment": experiment.__name__,
        "command": _command(),  # after the interpreter; None if no script was started
        "git": git.describe(top, output_dir),
        "packages": _packages(),
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


@functools.cache  # a runner starts several experiments in one process
def _packages() -> dict[str, str]:
    """The version of each package by its name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # Its folder is called by both, in nearly all; to parse the metadata of all takes 0.1 s.
        stem, dist_info, _ = str(getattr(distribution, "_path", "")).rpartition(".dist-info")
        name, _, version = os.path.basename(stem).partition("-")
        if not dist_info:
            name, version = distribution.metadata["Name"], distribution.version
        if name:  # the first on the path is the one that is imported
            found.setdefault(name.replace("_", "-"), version)
    return dict(sorted(found.items(), key=lambda package: package[0].lower()))


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
