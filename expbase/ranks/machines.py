"""Several machines: who has the newest checkpoint, and whether all ranks run the same code.

Without a shared disk the checkpoints are with rank 0 alone, so machines that have changed places
would begin anew in silence. A run of one process imports none of this.

    for text in compare(run_directory, newest_checkpoint, type(experiment)): warn(text)

Configs and shapes are compared by checks.check_alike.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import numpy
import paddle

from expbase import _version
from expbase.ranks import world
from expbase.record import sources
from expbase.record.run_dir import RunDirectory
from expbase.state import checkpoint

_NAMED = 8  # differences that a line names at most
_ADVICE = (
    "Start so that the machine with the newest checkpoint is rank 0 (paddle's launcher: --rank 0 "
    "on it), or copy it to rank 0's directory; --fresh begins a new run on purpose."
)


def compare(directory: RunDirectory, newest: Path | None, experiment: type) -> list[str]:
    """One line for each rank whose code is not rank 0's. A collective.

    `newest` is the checkpoint that rank 0 continues.

    Raises:
        CheckpointError: A newer one is in the directory of another rank.
    """
    rank = world.rank()
    if rank:
        listed = checkpoint.listed(directory.path / checkpoint.FOLDER)
        newest = listed[-1] if listed else None
    iteration = checkpoint.iteration_of(newest) if newest else None
    place = f"rank {rank} ({platform.node()}, {directory.path})"
    found = -1 if iteration is None else iteration
    of_ranks = world.gather_objects((found, place, code(experiment)))
    first = of_ranks[0]
    last = max(of_ranks, key=lambda facts: facts[0])
    if last[0] > first[0]:
        raise checkpoint.CheckpointError(
            f"output directory of {first[1]}: the newest checkpoint, of iteration {last[0]}, is "
            f"with {last[1]}. {_ADVICE}"
        )
    return different_code({place: facts for _, place, facts in of_ranks})


def code(experiment: type) -> dict[str, str]:
    """What a rank runs: versions, and checksums of the experiment's files."""
    versions = {"expbase": _version.__version__, "python": platform.python_version()}
    versions |= {"paddle": paddle.__version__, "numpy": numpy.__version__}
    return versions | sources.checksums(experiment)


def different_code(of_ranks: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What each rank runs other than rank 0, the first; what only one of them has is left out."""
    (first_rank, first), *others = of_ranks.items()
    texts = []
    for rank, facts in others:
        names = [name for name in first if facts.get(name, first[name]) != first[name]]
        if names:
            told = ", ".join(f"{name} {facts[name]} (not {first[name]})" for name in names[:_NAMED])
            texts.append(f"{rank} does not run the same as {first_rank}: {told}")
    return texts
