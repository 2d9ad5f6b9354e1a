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
    """The training batches of one rank, epoch after epoch; empty until `attach` is called."""

    def __init__(self) -> None:
        self.adapter = LoaderAdapter(None, "self.train_loader", Shard(seed=0))
        self.epoch = 0  # the one that was opened last; 0: none was
        self.batches = Batches(_nothing(), ended=True)  # of this epoch
        self.batch_in_epoch = 0  # batches that this rank has read in it
        self.last: Any = None  # the batch that was read last
        self._start = 0  # the position, in batches of all ranks, at which this process began
        self._is_resumed = False

    def attach(self, adapter: LoaderAdapter) -> None:
        """Sets the training data."""
        self.adapter = adapter

    @property
    def ended(self) -> bool:
        """Whether all batches of the epoch were read, or none was opened yet."""
        return self.batches.ended

    @property
    def resumed_within_epoch(self) -> bool:
        """Whether `load_state_dict` opened the epoch, and no batch was read since."""
        return self._is_resumed and self.batch_in_epoch == self.batches.first

    def open(self, epoch: int, position: int = 0) -> None:
        """Goes to a position in an epoch; see `LoaderAdapter.open`."""
        self.batches.close()
        self._begin(epoch, position, self.adapter.open(epoch, position))

    def _begin(self, epoch: int, position: int, batches: Batches) -> None:
        self.epoch = epoch
        self.batches = batches
        self.batch_in_epoch = batches.first
        self._start = position
        self._is_resumed = False

    def read(self) -> Any:
        """The next batch of the epoch.

        Raises:
            RuntimeError: There is none.
        """
        batches = self.batches
        try:
            # As next(batches) does it, without the call: nothing else is read so often.
            batch, batches.indices, batches.ended = next(batches.items)
        except StopIteration:
            raise RuntimeError(
                f"{self.adapter.name}: has no more batches in this epoch; expected an epoch that "
                "was opened, and the batches that its length, or the run that is continued, "
                "promised."
            ) from None
        self.batch_in_epoch += 1
        self.last = batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place. `position` counts batches of all ranks, so their number may change."""
        read = self.batch_in_epoch - self.batches.first  # by this process
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "position": self._start + read * self.adapter.shard.world_size,
            "ended": self.batches.ended,
            "loader": self.adapter.state_dict(),
            "sizes": [self.adapter.num_samples, self.adapter.batch_size],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes to where `state_dict` was called; returns reasons why continuing is not exact."""
        adapter = self.adapter
        reasons = adapter.load_state_dict(state["loader"])
        if state["ended"]:  # nothing is opened: the next thing to come is a new epoch
            self.batches.close()
            no_batches = Batches(_nothing(), first=state["batch_in_epoch"], ended=True)
            self._begin(state["epoch"], state["position"], no_batches)
        else:
            self.open(state["epoch"], state["position"])
            self._is_resumed = True
        samples, size = state["sizes"]
        samples_now, size_now = adapter.num_samples, adapter.batch_size
        if (samples, size) != (samples_now, size_now):
            reasons.append(
                f"{adapter.name}: {samples} samples in batches of {size} there, {samples_now} in "
                f"batches of {size_now} now"
            )
        return reasons

    def close(self) -> None:
        """Ends worker processes. May be called twice."""
        self.batches.close()
        self.adapter.close()


def _nothing() -> Items:
    yield from ()
