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
from expbase.data.order import LISTED, START, Key, Place
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
        adapter = self.adapter
        changed_order = self.batches.place.key
        return {
            "epoch": self.epoch,
            "batch_in_epoch": self.batch_in_epoch,
            "position": self.batches.taken[2],
            "key": changed_order or adapter.key,
            "is_changed": changed_order is not None,
            "ended": self.batches.ended or not self.epoch,
            "loader": adapter.state_dict(),
            "sizes": self._sizes,
            "has_one_order": adapter.has_one_order,
            "order": None if self.batches.ended else adapter.checksum(),
        }

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """That there is no loader any more, or one of another order in the middle of an epoch."""
        name, epoch = self.adapter.name, state["epoch"]
        if self.adapter.loader is None:
            return [f"{name}: not set; the checkpoint is of epoch {epoch}."] if epoch else []
        if self._goes_on(state) or self.leaves_epochs:
            return []
        return [
            f"{name}: {_order(state['key'])} there, {_order(self.adapter.key)} now, in the middle "
            f"of epoch {epoch}; expected the same, or --force, which goes on with the next epoch."
        ]

    def _goes_on(self, state: Mapping[str, Any]) -> bool:
        """Whether the epoch of a state has ended, or its kind of order and its size are as here."""
        key, own = state["key"], self.adapter.key
        return bool(state["ended"]) or key[:2] == own[:2]

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Goes to where `state_dict` was called; returns reasons why continuing is not exact.

        With another size of batches or number of ranks, `batch_in_epoch` is the number of batches
        of now that the samples taken amount to, rounded down: never more than batches_per_epoch.
        """
        adapter = self.adapter
        if adapter.loader is None:
            return []
        reasons = adapter.load_state_dict(state["loader"])
        has_ended, goes_on = state["ended"], self._goes_on(state)
        if has_ended or not goes_on:  # nothing is opened: the next thing to come is a new epoch
            self.batches.close()
            place = Place(state["position"], self._batches_of(state))
            self._begin(state["epoch"], Batches(_nothing(), place, ended=True))
            how = "the next epoch is the first one of the new size"
        else:
            how = self._go_on(state)
        there, now = state["sizes"], self._sizes
        is_unknown = there != now and not has_ended and not self._is_known(state)
        if there[:2] != now[:2] or is_unknown:
            return [f"{adapter.name}: {_size(there)} there, {_size(now)} now: {how}"]
        if not goes_on:
            reasons.append(f"{adapter.name}: {_order(adapter.key)} now: the next epoch begins")
        elif not has_ended and adapter.checksum() != state["order"]:
            reasons.append(
                f"{adapter.name}: its sampler gives another order of this epoch than before; "
                "expected one that draws from random, numpy or paddle, or has a state_dict"
            )
        return reasons

    def _go_on(self, state: Mapping[str, Any]) -> str:
        """Opens the epoch of a state behind its samples; says with which it goes on."""
        key = state["key"]
        is_changed = state["is_changed"] or [key, state["sizes"]] != [self.adapter.key, self._sizes]
        order = key if key[0] in LISTED and is_changed else None
        position = state["position"]
        self.open(state["epoch"], Place(position, self._batches_of(state), order))
        self._is_resumed = True
        if self._is_known(state):
            return "the epoch goes on with the samples that it has not had"
        return (
            f"the epoch goes on behind {position} samples, but which ones they were is unknown: "
            "some may come twice in it, others never"
        )

    def _is_known(self, state: Mapping[str, Any]) -> bool:
        """Whether the position tells which samples were taken, also where sizes have changed."""
        return self.adapter.has_one_order and bool(state["has_one_order"])

    @property
    def _sizes(self) -> list[int | None]:
        return [self.adapter.num_samples, self.adapter.batch_size, self.adapter.shard.world_size]

    def _batches_of(self, state: Mapping[str, Any]) -> int:
        """How many batches of now the samples amount to that were taken in the epoch."""
        batches: int = state["batch_in_epoch"]
        if state["sizes"] == self._sizes:
            return batches
        world = self.adapter.shard.world_size
        if self.adapter.batch_size:
            return int(state["position"]) // (self.adapter.batch_size * world)
        return batches * int(state["sizes"][2]) // world

    def close(self) -> None:
        """Ends worker processes. May be called twice."""
        self.batches.close()
        self.adapter.close()


def _nothing() -> Items:
    yield from ()


def _order(key: Key) -> str:
    kind, size, *_ = key
    return f"{'?' if size is None else size} samples, {kind}"


def _size(sizes: list[Any]) -> str:
    samples, batch_size = ("unknown" if number is None else number for number in sizes[:2])
    ranks = f"{sizes[2]} rank{'s' if sizes[2] > 1 else ''}"
    return f"{samples} samples in batches of {batch_size} on {ranks}"
