"""Several machines: who has the newest checkpoint.

Without a shared disk the checkpoints are with rank 0 alone, so machines that have changed places
would begin anew in silence. A run of one process imports none of this.

    compare(output_dir)

Code, configs and shapes are compared by checks.py.
"""

from __future__ import annotations

import platform
from pathlib import Path

from expbase.checkpoint import storage
from expbase.ranks import collectives

_ADVICE = (
    "Start so that the machine with the newest checkpoint is rank 0 (paddle's launcher: --rank 0 "
    "on it), or copy it to rank 0's directory; --fresh begins a new run on purpose."
)


def newest_iteration(output: Path) -> int:
    """That of the newest checkpoint in an output directory; -1: there is none."""
    saved = storage.listed(output / storage.FOLDER)
    return storage.iteration_of(saved[-1]) or 0 if saved else -1


def compare(output: Path) -> None:
    """Raises a CheckpointError if another rank has a newer checkpoint in its directory.

    A collective.
    """
    position = f"rank {collectives.rank()} ({platform.node()}, {output})"
    of_ranks = collectives.all_gather_object((newest_iteration(output), position))
    first = of_ranks[0]
    last = max(of_ranks, key=lambda found: found[0])
    if last[0] > first[0]:
        raise storage.CheckpointError(
            f"output directory of {first[1]}: the newest checkpoint, of iteration {last[0]}, is "
            f"with {last[1]}. {_ADVICE}"
        )
