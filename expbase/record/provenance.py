"""The facts that are noted when a run starts: command, code, packages, device, environment.

No failure here ends a run. Of the environment only the variables of paddle, NCCL, threads and the
libraries that compute are noted. Paths of the machine are noted only where a person has typed them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase._version import __version__
from expbase.base.device import repeatable_flags
from expbase.base.processor import processor
from expbase.record import git
from expbase.record.sources import Code

# The variables that are noted, or how their names begin.
_VARIABLES = (
    *("FLAGS_", "NCCL_", "CUBLAS_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    # By which MKL, OpenBLAS and oneDNN choose their instructions and threads.
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE"),
    *("OPENBLAS_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
)
# cuBLAS and NCCL read these when they are initialized; paddle has no way to set them. Sources: the
# cuBLAS library guide, "Results Reproducibility"; the NCCL user guide, "Environment Variables".
_REPEATABLE_ON_GPU = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


# What a restart goes on with: it is a fork of this process, and has the code that this one has
# loaded, whatever is edited or committed meanwhile.
_held: list[tuple[Code, git.WorkTree]] = []


@contextlib.contextmanager
def held(experiment: type) -> Iterator[None]:
    """Makes what is known of the code now what the forks of this process note, in the block."""
    code = Code.of(experiment)
    packages()
    _held.append((code, look(experiment, code)))
    try:
        yield
    finally:
        _held.pop()


def code_of(experiment: type) -> Code:
    """Returns the code of an experiment as this process has loaded it."""
    return Code.of(experiment, _held[-1][0] if _held else None)


def look(experiment: type, code: Code) -> git.WorkTree:
    """Returns what git knows of the code, or knew when this process had loaded it."""
    if _held and _held[-1][0].folder == code.folder:
        return _held[-1][1]
    return git.look(_work_tree(experiment), code.folder, code.files)


def gather(of_git: Mapping[str, Any], experiment: type, here: Path) -> dict[str, Any]:
    """Returns the facts of a start, as JSON values.

    Args:
        of_git: What git knows of the code.
        experiment: The class.
        here: The directory in which the command was given.
    """
    words = _command()
    top = _work_tree(experiment)
    return {
        "experiment": experiment.__name__,
        "command": words,  # after the interpreter; None if no script was started
        "script": len(words or ()) - len(sys.argv),  # its place in them, or that of -m's module
        # Where it was given, from the top of the work tree; None: elsewhere.
        "directory": str(here.relative_to(top)) if top and here.is_relative_to(top) else None,
        "git": {**of_git},
        "packages": packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device(),
        "processor": processor(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if is_noted(name)
        },
        "host": platform.node(),
        "pid": os.getpid(),
    }


def is_noted(name: str) -> bool:
    """Returns whether a variable of the environment is noted."""
    # FLAGS_selected_gpus is of the launcher: another one for each process.
    return name.startswith(_VARIABLES) and not name.startswith("FLAGS_selected_")


def _command() -> list[str] | None:
    """Returns the words that were typed after `python`; None if no script was started."""
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
    """Returns the git work tree that has the experiment's file; of a notebook, its directory."""
    file = getattr(sys.modules.get(experiment.__module__), "__file__", None)
    return git.top_of(Path(file).resolve().parent if file else Path.cwd())


@functools.cache  # a runner starts several experiments in one process
def packages() -> dict[str, str]:
    """Returns the version of each package by its name."""
    found = [*importlib.metadata.distributions()]
    # From the last on: of two with one name the first is imported.
    return {facts["Name"]: facts["Version"] for facts in (d.metadata for d in reversed(found))}


def versions() -> str:
    """Returns the versions of expbase, paddle, numpy and Python, in words."""
    ours = f"expbase {__version__}, paddle {paddle.__version__}, numpy {np.__version__}"
    return f"{ours}, python {platform.python_version()}"


def device() -> str:
    """Returns the device that paddle uses, and of a GPU its model."""
    name: str = paddle.device.get_device()
    if not name.startswith("gpu"):  # paddle knows no others' (paddle/device/default_backend.py)
        return name
    return f"{name} ({paddle.device.cuda.get_device_name(name)})"


def repeatable() -> str:
    """Returns the flags that training.deterministic has set, and the variables for the rest."""
    of_environment = {name: os.environ.get(name, "unset") for name in _REPEATABLE_ON_GPU}
    values = repeatable_flags() | of_environment
    return " ".join(f"{name}={value}" for name, value in values.items())
