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
from expbase.data.order import LISTED, START, Place
from expbase.data.workers import TAKEN, Items


class TrainIterator:
    """The training batches of one rank, epoch after epoch.

    Until `attach` is called there are none to be read, and no epoch that could end.
    """

    def __init__(self) -> None:
        self.adapter = LoaderAdapter(None, "self.train_loader", Shard(seed=0))
        self.epoch = 0  # the one that was opened last; 0: none was
        self.batches = Batches(_nothing())  # of this epoch
        self.batch_in_epoch = 0  # batches that this rank has read in it
        self._iteration = 0  # for which the last batch was read
        self._reads = 0  # of batches for it
        self._is_resumed = False

    def attach(self, adapter: LoaderAdapter) -> None:
        """Sets the training data."""
        self.adapter = adapter
        self.batches = Batches(_nothing(), ended=True)

    @property
    def ended(self) -> bool:
        """Whether all batches of the epoch were read, or none was opened yet."""
        return self.batches.ended

    @property
    def resumed_within_epoch(self) -> bool:
        """Whether `load_state_dict` opened the epoch, and no batch was read since."""
        return self._is_resumed and self.batch_in_epoch == self.batches.place.batches

    def open(self, epoch: int, place: Place = START) -> None:
        """Goes to a place in an epoch; see `LoaderAdapter.open`."""
        self.batches.close()
        self._begin(epoch, self.adapter.open(epoch, place))

    def _begin(self, epoch: int, batches: Batches) -> None:
        self.epoch = epoch
        self.batches = batches
        self.batch_in_epoch = batches.place.batches
        self._is_resumed = False

    def read(self, iteration: int = 0) -> Any:
        """The next batch of the epoch, for an iteration.

        Raises:
            ValueError: There is no data.
            RuntimeError: There is no batch.
        """
        batches = self.batches
        try:
            # As next(batches) does it, without the call: nothing else is read so often.
            batch, batches.taken, batches.ended = next(batches.items)
        except StopIteration:
            if self.adapter.loader is None:
                raise self.adapter.not_set() from None
            raise RuntimeError(
                f"{self.adapter.name}: has no more batches in this epoch; expected an epoch that "
                "was opened, and the batches that its length, or the run that is continued, "
                "promised."
            ) from None
        except Exception as error:  # of the data set: there is no batch, but it has indices
            batches.taken = vars(error).get(TAKEN, batches.taken)
            raise
        self.batch_in_epoch += 1
        if iteration != self._iteration:
            self._iteration = iteration
            self._reads = 0
        self._reads += 1
        return batch

    def share(self, count: int) -> tuple[int, int]:
        """Which part of its update the batch read last is, if each rank has `count` of them.

        Returns:
            Its number over all ranks, from 0, and how often this rank had that number before: by
            hand one may read more than these.
        """
        turn, number = divmod(self._reads - 1, count)
        return self.adapter.shard.rank * count + number, turn

    def state_dict(self) -> dict[str, Any]:
        """The place. It counts the samples of all ranks, so that what they share may change."""
        adapter, place = self.adapter, self.batches.place
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "taken": [*map(list, place.earlier), [adapter.key, self.batches.taken[2]]],
            "ended": self.batches.ended or not self.epoch,
            "loader": adapter.state_dict(),
            "sizes": self._sizes,
            "order": None if self.batches.ended else adapter.checksum(),
        }

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """That there is no loader any more."""
        lost = self.adapter.loader is None and state["epoch"]
        return [f"{self.adapter.name}: not set; the checkpoint is of epoch {lost}."] if lost else []

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes to where `state_dict` was called; returns reasons why continuing is not exact.

        With another size of batches or number of ranks, `batch_in_epoch` is the number of batches
        of now that the samples taken amount to, rounded down: never more than batches_per_epoch.
        """
        adapter = self.adapter
        if adapter.loader is None:
            return []
        reasons = adapter.load_state_dict(state["loader"])
        place, is_known = self._place_in(state)
        if state["ended"]:  # nothing is opened: the next thing to come is a new epoch
            self.batches.close()
            self._begin(state["epoch"], Batches(_nothing(), place, ended=True))
            how = "the next epoch is the first one of the new size"
        else:
            self.open(state["epoch"], place)
            self._is_resumed = True
            how = "the epoch goes on with the samples that it has not had"
            if not is_known:
                how = (
                    f"the epoch goes on behind {place.position} samples, but which ones they were "
                    "is unknown: some may come twice in it, others never"
                )
        if state["sizes"][:2] != self._sizes[:2] or not (is_known or state["ended"]):
            there, now = _size(state["sizes"]), _size(self._sizes)
            return [f"{adapter.name}: {there} there, {now} now: {how}"]
        if adapter.key[:2] != state["taken"][-1][0][:2]:
            reasons.append(f"{adapter.name}: another order of its samples than before: {how}")
        elif not state["ended"] and adapter.checksum() != state["order"]:
            reasons.append(
                f"{adapter.name}: its sampler gives another order of this epoch than before; "
                "expected one that draws from random, numpy or paddle, or has a state_dict"
            )
        return reasons

    @property
    def _sizes(self) -> list[int | None]:
        return [self.adapter.num_samples, self.adapter.batch_size, self.adapter.shard.world_size]

    def _place_in(self, state: Mapping[str, Any]) -> tuple[Place, bool]:
        """The place that a state has, and whether it is known which samples were taken before."""
        *earlier, (key, position) = state["taken"]
        adapter, batches = self.adapter, state["batch_in_epoch"]
        *_, world = sizes = state["sizes"]
        is_known = key == adapter.key or {key[0], adapter.key[0]} <= LISTED
        if key != adapter.key:
            earlier = [*earlier, (key, position)] if is_known and position else []
        if sizes != self._sizes:
            batches = batches * world // adapter.shard.world_size
            if adapter.batch_size:
                batches = position // (adapter.batch_size * adapter.shard.world_size)
        return Place(position, batches, earlier), is_known

    def close(self) -> None:
        """Ends worker processes. May be called twice."""
        self.batches.close()
        self.adapter.close()


def _nothing() -> Items:
    yield from ()


def _size(sizes: list[Any]) -> str:
    samples, batch_size = ("unknown" if number is None else number for number in sizes[:2])
    ranks = f"{sizes[2]} rank{'s' if sizes[2] > 1 else ''}"
    return f"{samples} samples in batches of {batch_size} on {ranks}"
