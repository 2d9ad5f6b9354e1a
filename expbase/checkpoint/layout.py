"""The names of a checkpoint's files, the number of their format, and the errors about them.

A leaf: nothing is read or written here, but that directories are listed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expbase.base.errors import Mistake
from expbase.base.exit_codes import ExitCode

FOLDER = "checkpoints"  # of a run
MANIFEST = "manifest.json"
FORMAT = 15  # of state.json
STATE_FILE = "state.json"
SUFFIX = ".safetensors"
ARRAYS = "@values"  # the file of the arrays in entries other than the objects
OF_RANK = "@local_"  # what the names of the files of per-rank state begin with; no attribute's can

_NAME = re.compile(r"step-(\d{8,})$")


class CheckpointError(Mistake, RuntimeError):
    """A checkpoint that cannot be written, or is damaged, or does not fit."""

    exit_code = ExitCode.MISTAKE


class FormatError(CheckpointError):
    """A checkpoint that another version of expbase has written."""


class NonFiniteError(Mistake, FloatingPointError):
    """A logged training scalar, a parameter or an accumulator is not finite: none is written."""

    def __init__(self, bad: str, newest: str) -> None:
        good = "there is none yet" if newest == "none yet" else f"the last good one is {newest}"
        super().__init__(
            f"not finite: {bad}. No checkpoint holds it; {good}. Lower the "
            "learning rate or clip gradients; with training.nonfinite=warn the run goes on."
        )


def name_of(iteration: int) -> str:
    """Returns the directory name of an iteration's checkpoint."""
    return f"step-{iteration:08d}"


def iteration_of(path: Path) -> int | None:
    """Returns the iteration in a checkpoint directory's name; None for another name."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else None


def listed(directory: Path) -> list[Path]:
    """Lists the checkpoints of a directory by their names, oldest first. They may be damaged."""
    try:
        names = os.listdir(directory)  # glob takes some ten times as long
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    found = [(int(match[1]), name) for name in names if (match := _NAME.match(name))]
    return [directory / name for _, name in sorted(found)]


def newest_iteration(run: Path) -> int:
    """Returns the iteration of the newest checkpoint in an output directory; -1: there is none."""
    saved = listed(run / FOLDER)
    return iteration_of(saved[-1]) or 0 if saved else -1


def check_format(path: Path, number: int, info: Mapping[str, Any]) -> None:
    """Raises a FormatError if a checkpoint is of another version of expbase, which is named.

    Args:
        path: The checkpoint.
        number: Of its format.
        info: What its manifest says of it.
    """
    if number != FORMAT:
        found = re.search(r"expbase ([^, ]+)", str(info.get("versions", "")))
        # The manifests of the first versions do not say which one it was.
        known = found[1] if found else "0.1" if number < 8 else "that wrote it"
        raise FormatError(
            f"{path}: has format {number}, and this version reads {FORMAT}: finish the run with "
            f"expbase {known}, or begin another one from its weights: --init_model_path."
        )
