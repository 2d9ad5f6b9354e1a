"""What an update of shares needs: a number that fits, whole layers, and no value of one rank."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import paddle

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.checkpoint.compare_rank_weights import Name
from expbase.checkpoint.layout import ARRAYS
from expbase.checkpoint.rank_state import trained_names
from expbase.config import ConfigError
from expbase.ranks import collectives
from expbase.state.parts import StatefulObjects


def check_shares(shares: int, world_size: int) -> None:
    """Raises a ConfigError if the processes cannot have equally many shares."""
    if shares and shares % world_size:
        numbers = ", ".join(str(1 << n) for n in range(shares.bit_length()))
        raise ConfigError(
            f"training.shares: {shares} given, and {world_size} processes; expected one of "
            f"{numbers} processes."
        )


def check_whole(found: StatefulObjects) -> None:
    """Raises a ValueError if gradients or statistics go over the ranks in a way of their own."""
    parts = [*found.sublayers(), *(("", wrapper) for wrapper in found.parallel.values())]
    across = (paddle.nn.SyncBatchNorm, paddle.DataParallel)
    names = [f"{type(part).__name__} {name}" for name, part in parts if isinstance(part, across)]
    if names := [*names, *sorted(found.pieces()), *found.sharded()]:
        raise ValueMistake(
            f"training.shares: {names[0].strip()} depends on the number of ranks; expected layers "
            "in self.data_parallel, BatchNorm, of which each share has statistics, and no sharding."
        )


def refuse_different(
    different: Set[Name], values: list[dict[str, Any]], found: StatefulObjects
) -> None:
    """Raises a RuntimeError for what depends on the number of ranks; collective."""
    for rank, of_rank in enumerate(collectives.all_gather_object(sorted(different))):
        names = [name for entry in values[rank].values() for name in entry]
        names += [key.partition(".")[2] for file, key in of_rank if file == ARRAYS]
        frozen = {name for name in of_rank if name[0] != ARRAYS} - trained_names(of_rank, found)
        of_others = [f"{file}.{key}" for file, key in [*sorted(frozen), *of_rank]]
        what = "a weight or its accumulator"
        hint = "gradients of what is done within the loop over micro_batches() alone"
        if frozen:
            what = "a tensor that is not trained"
            hint = "it to be a buffer (register_buffer), of which each share has its own"
        if names:
            what = "a value"
            hint = "the same on all, or register_stateful of it with by_share=True"
        if names or of_others:
            raise RuntimeMistake(
                f"self.{(names or of_others)[0]}: {what} that is another one on rank {rank} than "
                f"on rank 0, and would depend on their number; with training.shares expected "
                f"{hint}, or exclude_from_state, if training does not depend on it."
            )
