"""An update that is divided into shares: a Division (update.py).

Each share is computed as if it were a process; the tree adds up the gradients when the loop over
the batches of this rank has ended. Outside of the loop each rank does what rank 0 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from expbase.base import rng
from expbase.engine.shares.gradient_tree import GradientTree
from expbase.engine.shares.share_checks import check_whole
from expbase.engine.shares.states import ShareStates
from expbase.ranks import collectives
from expbase.state.parts import StatefulObjects


class SharesOnRanks:
    """The shares that this rank computes of each update.

    Args:
        training: That section of the config.
        states: What each share has alone.
        parameters: Returns all parameters, by their paths.
    """

    ranks_repeat = True
    sums_in_backward = False

    def __init__(
        self,
        training: Any,
        states: ShareStates,
        parameters: Callable[[], Iterable[tuple[str, Any]]],
    ) -> None:
        self.divisor: int = training.shares
        self.batches: int = training.shares // collectives.world_size()
        self.asked_by = f"training.shares: {training.shares}"
        self._seed: int = training.seed
        self._states = states
        self._tree = GradientTree(parameters)

    @property
    def repeats_rank_zero(self) -> bool:
        """Whether this rank computes the same as rank 0 now."""
        return collectives.rank() > 0 and not self._states.is_computing

    def loop(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        """Yields the batches of this rank, each by `read`, while its share is computed."""
        self._states.begin(iteration)
        self._tree.begin()
        for on_rank, number in enumerate(self._states.numbers):
            with self._states.computing(number):
                yield read()
            self._tree.add_share(on_rank)
        self._tree.add_up(self._states.end())
        # The last share's random numbers would go on, and on each rank that is another one.
        rng.seed_for(self._seed, rng.TRAIN, iteration, self.divisor)

    def check(self, found: StatefulObjects) -> None:
        """Raises a ValueError if something goes over the ranks in a way of its own."""
        check_whole(found)
