"""Where one rank stands in its training data: the pass under way, and the place in it.

iterator = TrainIterator(adapt_loader(loader, "self.train_loader", Shard(seed=0)))
iterator.open(epoch=3)
batch = iterator.read()
iterator.batches.ended                      # true as soon as the last one was given
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expbase.data.loaders import Batches, LoaderAdapter


class TrainIterator:
    """Where one rank stands in the passes of its feed.

    Args:
        feed: The training data.

    Attributes:
        batches: Of the pass under way; ended when there is none.
        batch_in_epoch: Batches that this rank has read in it.
        last: The batch that was read last.
    """

    def __init__(self, feed: LoaderAdapter | None = None) -> None:
        self.feed: Any = feed
        self.epoch = 0
        self.last: Any = None
        self.batches = _ended()
        self.batch_in_epoch = 0
        self._next: Iterator[Any] = iter(())
        self._start = 0  # the position at which this rank began

    def attach(self, adapter: LoaderAdapter) -> None:
        self.feed = adapter

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, **self.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        self.epoch = state["epoch"]
        return self.restore(self.epoch, state)

    def open(self, epoch: int, position: int = 0) -> None:
        """Goes to a position of a pass."""
        self.epoch = epoch
        self.batches.close()
        self.batches = self.feed.open(epoch, position)
        self.batch_in_epoch = self.batches.first
        self._next = iter(self.batches)
        self._start = position

    def read(self) -> Any:
        """The next batch of the pass."""
        try:
            batch = next(self._next)
        except StopIteration:
            raise RuntimeError(
                f"{self.feed.name}: ended before the pass did; expected the batches that its "
                "length, or the run that is continued, promised."
            ) from None
        self.batch_in_epoch += 1
        self.last = batch
        return batch

    def state(self) -> dict[str, Any]:
        """The position, counted in batches of all ranks."""
        read = self.batch_in_epoch - self.batches.first
        return {
            "batch_in_epoch": self.batch_in_epoch,
            "position": self._start + read * self.feed.share.world_size,
            "ended": self.batches.ended,
            "loader": self.feed.state(),
            "sizes": [self.feed.num_samples, self.feed.batch_size],
        }

    def restore(self, epoch: int, values: Mapping[str, Any]) -> list[str]:
        """Goes to where `state` was taken; gives what of it costs exactness, in words."""
        self.feed.restore(values["loader"], ended=values["ended"])
        if values["ended"]:
            self.batch_in_epoch = self.batches.first = values["batch_in_epoch"]
            self._start = values["position"]
        else:
            self.open(epoch, values["position"])
        notes = self.feed.inexact_after_resume()
        sizes = [self.feed.num_samples, self.feed.batch_size]
        if values["sizes"] != sizes:
            (samples, size), (samples_now, size_now) = values["sizes"], sizes
            notes.append(
                f"{self.feed.name}: {samples} samples in batches of {size} there, {samples_now} in "
                f"batches of {size_now} now"
            )
        return notes

    def close(self) -> None:
        """Lets go of the loader. May be called twice."""
        self.batches.close()
        self.feed.close()


def _ended() -> Batches:
    batches = Batches(lambda _: iter(()), 0)
    batches.ended = True
    return batches
