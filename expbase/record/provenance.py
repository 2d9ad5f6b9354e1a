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
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase._version import __version__
from expbase.base.device import repeatable_flags
from expbase.record import git

# Or how they begin.
_VARIABLES = ("FLAGS_", "NCCL_", "CUBLAS_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
# Read when CUDA and NCCL begin, and not to be set by paddle.
_REPEATABLE_ON_GPU = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def gather(output_dir: Path, experiment: type, here: Path) -> dict[str, Any]:
    """Returns the facts of a start, as JSON values; saves the changes that are not committed.

    `here` is where it was given.
    """
    words = _command()
    top = _work_tree(experiment)
    return {
        "experiment": experiment.__name__,
        "command": words,  # after the interpreter; None if no script was started
        "script": len(words or ()) - len(sys.argv),  # its place in them, or that of -m's module
        # Where it was given, from the top of the work tree; None: elsewhere.
        "directory": str(here.relative_to(top)) if top and here.is_relative_to(top) else None,
        "git": git.describe(top, output_dir),
        "packages": _packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith("FLAGS_selected_")
        },  # FLAGS_selected_gpus is of the launcher: another one for each process
        "host": platform.node(),
        "pid": os.getpid(),
    }


def _command() -> list[str] | None:
    """Returns what was typed after python; None without a script."""
    if not hasattr(sys.modules["__main__"], "__file__"):  # a notebook, or -c
        return None
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if "PADDLE_LOCAL_SIZE" in os.environ and parent.exists():  # perhaps paddle's launcher
        words = os.fsdecode(parent.read_bytes()).split("\0")[1:-1]
        if "paddle.distributed.launch" in words:
            return words
    if not multiprocessing.parent_process():
        return sys.orig_argv[1:]
    # A rank of --nprocs has other words than those that were typed, but the same script's options.
    module = sys.modules["__main__"].__spec__  # of -m; else None
    return sys.argv if module is None else ["-m", module.name, *sys.argv[1:]]


def _work_tree(experiment: type) -> Path | None:
    """Returns the git work tree of the experiment's class, or of the directory in a notebook."""
    file = getattr(sys.modules.get(experiment.__module__), "__file__", None)
    return git.top_of(Path(file).resolve().parent if file else Path.cwd())


@functools.cache  # a runner starts several experiments in one process
def _packages() -> dict[str, str]:
    """Returns the version of each package by its name."""
    found = [*importlib.metadata.distributions()]
    # From the last on: of two with one name the first is imported.
    return {facts["Name"]: facts["Version"] for facts in (d.metadata for d in reversed(found))}


def versions() -> str:
    """Returns the versions of what computes."""
    ours = f"expbase {__version__}, paddle {paddle.__version__}, numpy {np.__version__}"
    return f"{ours}, python {platform.python_version()}"


def device() -> str:
    """Returns the device that paddle uses, and of a GPU its model."""
    name: str = paddle.device.get_device()
    if not name.startswith("gpu"):
        return name
    return f"{name} ({paddle.device.cuda.get_device_name(name)})"


def repeatable() -> str:
    """Returns what training.deterministic has set for GPUs, and what the environment can set."""
    of_environment = {name: os.environ.get(name, "unset") for name in _REPEATABLE_ON_GPU}
    values = repeatable_flags() | of_environment
    return " ".join(f"{name}={value}" for name, value in values.items())
