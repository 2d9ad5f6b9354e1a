"""Several machines: who has the newest checkpoint.

Without a shared disk the checkpoints are with rank 0 alone, so machines that have changed places
would begin anew in silence. A run of one process imports none of this.

    compare(run_directory, newest_checkpoint)

Code, configs and shapes are compared by checks.py.
"""

from __future__ import annotations

import platform
from pathlib import Path

from expbase.ranks import world
from expbase.record.run_dir import RunDirectory
from expbase.state import checkpoint

_ADVICE = (
    "Start so that the machine with the newest checkpoint is rank 0 (paddle's launcher: --rank 0 "
    "on it), or copy it to rank 0's directory; --fresh begins a new run on purpose."
)


def compare(directory: RunDirectory, newest: Path | None) -> None:
    """Raises a CheckpointError if another rank has a newer checkpoint in its directory.

    `newest` is the one that rank 0 continues. A collective.
    """
    rank = world.rank()
    if rank:
        listed = checkpoint.listed(directory.path / checkpoint.FOLDER)
        newest = listed[-1] if listed else None
    iteration = (checkpoint.iteration_of(newest) or 0) if newest else -1
    place = f"rank {rank} ({platform.node()}, {directory.path})"
    of_ranks = world.gather_objects((iteration, place))
    first = of_ranks[0]
    last = max(of_ranks, key=lambda found: found[0])
    if last[0] > first[0]:
        raise checkpoint.CheckpointError(
            f"output directory of {first[1]}: the newest checkpoint, of iteration {last[0]}, is "
            f"with {last[1]}. {_ADVICE}"
        )
