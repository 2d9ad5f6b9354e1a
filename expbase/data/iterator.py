"""Where one rank is in its training data: the epoch, and the place in it.
Which batches an epoch has, a LoaderAdapter decides.

    iterator = TrainIterator()
    iterator.attach(adapt_loader(loader, "self.train_loader", Shard(seed=0)))
    iterator.open(epoch=3)
    state = iterator.state_dict()    # another process continues behind that batch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expbase.data.loaders import Batches, LoaderAdapter, Shard
from expbase.data.workers import Items


class TrainIterator:
    """The training batches of one rank, epoch after epoch.

    Until `attach` is called there are none to be read, and no epoch that could end.
    """

    def __init__(self) -> None:
        self.adapter = LoaderAdapter(None, "self.train_loader", Shard(seed=0))
        self.epoch = 0  # the one that was opened last; 0: none was
        self.batches = Batches(_nothing())  # of this epoch
        self.batch_in_epoch = 0  # batches that this rank has read in it
        self.resumed_within_epoch = False  # `load_state_dict` opened it; no batch was read since
        self._iteration = 0  # for which the last batch was read
        self._reads = 0  # of batches for it

    def attach(self, adapter: LoaderAdapter, *, leaves_epochs: bool = False) -> None:
        """Sets the training data, and whether an epoch of another order is left in its middle."""
        self.adapter = adapter
        self.leaves_epochs = leaves_epochs
        self.batches = Batches(_nothing(), ended=True)

    @property
    def ended(self) -> bool:
        """Whether all batches of the epoch were read, or none was opened yet."""
        return self.batches.ended

    @property
    def samples_per_round(self) -> int | None:
        """Samples of one batch on each rank; None: unknown."""
        size = self.adapter.batch_size
        return size and size * self.adapter.shard.world_size

    def open(self, epoch: int, position: int = 0) -> None:
        """Goes to a position in an epoch; see `LoaderAdapter.open`."""
        self.batches.close()
        self.batches = self.adapter.open(epoch, position)
        self.epoch = epoch
        self.batch_in_epoch = 0
        self.resumed_within_epoch = False

    def read(self, iteration: int = 0) -> Any:
        """The next batch of the epoch, for an iteration.

        Raises:
            ValueError: There is no data.
            RuntimeError: There is no batch.
        """
        self.batch_in_epoch += 1
        self.resumed_within_epoch = False
        if iteration != self._iteration:
            self._iteration = iteration
            self._reads = 0
        self._reads += 1
        try:
            return next(self.batches)
        except StopIteration:
            if self.adapter.loader is None:
                raise self.adapter.not_set() from None
            raise RuntimeError(
                f"{self.adapter.name}: has no more batches in this epoch; expected an epoch that "
                "was opened, and the batches that its length, or the run that is continued, "
                "promised."
            ) from None

    def share(self, count: int) -> tuple[int, int]:
        """Which part of its update the batch read last is, if each rank has `count` of them.

        Returns:
            Its number over all ranks, from 0, and how often this rank had that number before: by
            hand one may read more than these.
        """
        turn, number = divmod(max(self._reads - 1, 0), count)
        return self.adapter.shard.rank * count + number, turn

    @property
    def _layout(self) -> list[Any]:
        """The kind of order, the samples in a data set and in a batch (None: unknown), the ranks.

        A position in an epoch is one in all epochs whose first two are the same.
        """
        adapter = self.adapter
        return [adapter.kind, adapter.num_samples, adapter.batch_size, self._ranks]

    @property
    def _ranks(self) -> int:
        """By which the batches of this rank are counted; with shares by all, however many."""
        shard = self.adapter.shard
        return 1 if shard.has_shares else shard.world_size

    def state_dict(self) -> dict[str, Any]:
        """The place. It counts the samples of all ranks, so that another number may go on."""
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch * self.adapter.shard.world_size // self._ranks,
            "position": self.batches.taken[2],
            "ended": self.batches.ended or not self.epoch,
            "loader": self.adapter.state_dict(),
            "layout": self._layout,
            "has_one_order": self.adapter.has_one_order,
            "order": None if self.batches.ended else self.adapter.checksum(),
        }

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """That there is no loader any more, or one of another order in the middle of an epoch."""
        name = self.adapter.name
        epoch = state["epoch"]
        if self.adapter.loader is None:
            return [f"{name}: not set; the checkpoint is of epoch {epoch}."] if epoch else []
        if state["ended"] or self._has_order_of(state) or self.leaves_epochs:
            return []
        return [
            f"{name}: {_described(state['layout'])} there, {_described(self._layout)} now, in the "
            f"middle of epoch {epoch}; expected the same order, or --force, which goes on with "
            "the next epoch."
        ]

    def _has_order_of(self, state: Mapping[str, Any]) -> bool:
        """Whether the kind of order and the number of samples are those of a state."""
        return bool(state["layout"][:2] == self._layout[:2])

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes to where `state_dict` was called; returns reasons why continuing is not exact.

        With another size of batches or number of ranks, `batch_in_epoch` is the number of batches
        of now that the samples taken amount to, rounded down: never more than batches_per_epoch.
        """
        adapter = self.adapter
        if adapter.loader is None:
            return []
        reasons = adapter.load_state_dict(state["loader"])
        there = state["layout"]
        now = self._layout
        is_known = True
        how = "the next epoch is the first one of the new size"
        if state["ended"] or not self._has_order_of(state):
            # Nothing is opened: the next thing to come is a new epoch.
            self.batches.close()
            self.batches = Batches(_nothing(), state["position"], ended=True)
            self.epoch = state["epoch"]
            self.resumed_within_epoch = False
        else:
            self.open(state["epoch"], state["position"])
            self.resumed_within_epoch = True
            is_known = self._knows_samples(state, reasons)
            how = "the epoch goes on with the samples that it has not had"
        if not is_known:
            how = (
                f"the epoch goes on behind {state['position']} samples, but which ones they were "
                "is unknown: some may come twice in it, others never"
            )
        self.batch_in_epoch = self._batches_of(state)
        # Another number of ranks alone is nothing that the data could make inexact.
        if there[:-1] != now[:-1] or (there != now and not is_known):
            text = f"{_described(there)} there, {_described(now)} now"
            reasons.append(f"{adapter.name}: {text}: {how}")
        return reasons

    def _knows_samples(self, state: Mapping[str, Any], reasons: list[str]) -> bool:
        """Whether the position says which samples were taken; another order of them is a reason."""
        if len({self.adapter.checksum(), state["order"]} - {None}) > 1:
            reasons.append(
                f"{self.adapter.name}: its sampler gives another order of this epoch than before; "
                "expected one that draws from random, numpy or paddle, or has a state_dict"
            )
            return False
        return self.adapter.has_one_order and bool(state["has_one_order"])

    def _batches_of(self, state: Mapping[str, Any]) -> int:
        """How many batches of now the samples amount to that were taken in the epoch."""
        there = state["layout"]
        if self.samples_per_round and there != self._layout:
            return int(state["position"]) // self.samples_per_round
        return int(state["batch_in_epoch"]) * int(there[-1]) // self.adapter.shard.world_size

    def close(self) -> None:
        """Ends worker processes. May be called twice."""
        self.batches.close()
        self.adapter.close()


def _nothing() -> Items:
    yield from ()


def _described(layout: list[Any]) -> str:
    kind, samples, batch_size, world_size = layout
    size = "unknown" if batch_size is None else batch_size
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return f"{samples or '?'} samples, {kind}, in batches of {size} on {ranks}"
