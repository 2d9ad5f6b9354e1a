"""Which checkpoint a user means: a path, the newest of a run, the best one, or an iteration's.

path = find_named(Path("runs/lr0.01/best"))
path = find_in_run(Path("runs/lr0.01"), "400")
"""

from __future__ import annotations

import re
from pathlib import Path

from expbase.checkpoint import best, storage
from expbase.checkpoint.layout import FOLDER, MANIFEST, CheckpointError, listed, name_of

_NAMES = re.compile("best|last|(step-)?[0-9]+")  # what stands for a checkpoint of a run


def find_named(path: Path) -> Path:
    """Returns the checkpoint at a path, the newest of the run there, or `RUN/best`, `RUN/400`.

    Raises:
        CheckpointError: There is none.
    """
    is_name = _NAMES.fullmatch(path.name) and not path.exists()
    return find_in_run(path.parent, path.name) if is_name else find_at(path)


def find_at(path: Path) -> Path:
    """Returns the checkpoint at a path, or the newest intact one of a run; changes nothing there.

    Raises:
        CheckpointError: There is none.
    """
    if (path / MANIFEST).exists():
        storage.verify(path)
        return path
    for directory in (path, path / FOLDER):
        if newest := storage.newest_verified(directory):
            return newest
    what = "no intact checkpoint there" if path.exists() else "no such directory"
    raise CheckpointError(
        f"{path}: {what}; expected the output directory of a run, or with it "
        f"the checkpoint that is meant: RUN/best, RUN/400, RUN/{FOLDER}/{name_of(400)}."
    )


def find_in_run(run: Path, which: str) -> Path:
    """Returns the checkpoint of a run that is "best", "last" or an iteration's, `400`, `step-400`.

    If `run` is not an output directory, but a checkpoint itself, it is that one.

    Raises:
        CheckpointError: There is none.
    """
    if which == "last" or (run / MANIFEST).exists():
        return find_at(run)
    run = run.parent if run.name == FOLDER else run
    if not run.is_dir():
        raise CheckpointError(
            f"{run}: there is no such directory; expected the output directory of a run."
        )
    number = which.removeprefix("step-")
    if which == "best":
        number = str(_best(run))
    if not number.isdecimal():
        raise CheckpointError(f"{which!r} given; expected best, last or an iteration.")
    path = run / FOLDER / name_of(int(number))
    if not path.exists():
        there = ", ".join(p.name for p in listed(path.parent)) or "none"
        raise CheckpointError(f"{path}: does not exist; there are: {there}.")
    storage.verify(path)
    return path


def _best(run: Path) -> int:
    with storage.reading(run / best.FILE):
        for iteration, _ in best.best_of(run):
            return iteration
    raise CheckpointError(
        f"{run}: no checkpoint is the best one; expected a run whose training.monitor names a "
        "metric of valid(), and that was validated."
    )
