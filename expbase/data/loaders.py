"""Reading a user's loader: which batches this rank gets in an epoch, from any position.

A `LoaderAdapter` wraps one loader. What a data set draws while it makes the n-th batch of an
epoch depends on (seed, epoch, n) alone: not on the number of workers, nor on what was drawn
before, nor on whether earlier batches were made. The loader is asked for its settings and never
changed: which batches are trained on is decided here, what is in them by the user's code.

Positions count batches of all ranks together: in round i rank r takes batch i * world_size + r.

    adapter = adapt_loader(loader, "train_loader", Shard(seed=0, rank=0, world_size=1))
    batches = adapter.open(epoch=3, position=17)    # batches 0 to 16 are not loaded
    for batch in batches: ...
    batches.ended                                   # true together with the last batch
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, IterableDataset

from expbase.data.order import BatchOrder, Isolated, Numbered, state_setter, unmoved
from expbase.data.workers import BatchedStream, Fetcher, Item, with_hardened_workers, with_last
from expbase.distributed import gather_objects
from expbase.state import rng

_NOTHING = object()  # in the place of a batch when there is none


@dataclass(frozen=True)
class Shard:
    """Whose batches, and from which random numbers.

    Attributes:
        seed: What the order and the random numbers are derived from.
        rank: This process.
        world_size: The number of processes.
    """

    seed: int
    rank: int = 0
    world_size: int = 1


class Batches:
    """The batches of one rank in one epoch, or in the rest of one.

    Attributes:
        ended: Whether the last batch was returned; false before the first one.
        indices: Where the samples of the batch returned last are in the data set; None: unknown.
        first: The number of batches of this rank that were skipped.
        items: A generator of what is to come, each batch with its `indices` and `ended`.
    """

    def __init__(self, items: Iterator[Item], first: int = 0) -> None:
        self.ended = False
        self.indices: Sequence[Any] | None = None
        self.first = first
        self.items: Any = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, self.indices, self.ended = next(self.items)
        return batch

    def close(self) -> None:
        """Stops reading: worker processes end. May be called twice."""
        self.items.close()


class LoaderAdapter:
    """A loader's batches, as one rank gets them.

    Attributes:
        batches_per_epoch: On this rank; None: unknown.
        batch_size: Samples in a full batch of this rank; None: unknown.
        num_samples: Samples in the data set; None: unknown.
        filled: Batches that are read a second time at the end of an epoch, so that each rank
            has a batch in the last round.
    """

    batches_per_epoch: int | None = None
    batch_size: int | None = None
    num_samples: int | None = None
    filled: int = 0

    def __init__(self, loader: Any, name: str, shard: Shard) -> None:
        self.loader = loader
        self.name = name
        self.shard = shard

    def open(self, epoch: int, position: int = 0) -> Batches:
        """The batches of an epoch from a position on.

        Args:
            epoch: Its number, from 1.
            position: The number of batches that all ranks together took before.

        Raises:
            ValueError: The loader has no batch.
        """
        raise NotImplementedError(f"{self.name}: no loader is attached yet")

    def once(self, purpose: int, number: int) -> Batches:
        """This rank's share of one run over the data that is not for training.

        It may be the training loader: its place in the epoch and its state do not move.

        Args:
            purpose: VALID or PREDICT of rng.
            number: Of the run: the iteration, say.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What the loader itself remembers, beside the position; empty if nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, ended: bool) -> list[str]:
        """Restores what `state_dict` returned; call `open` afterwards if the epoch goes on.

        Args:
            state: Of the loader.
            ended: Whether the epoch had ended, so that the next one begins.

        Returns:
            Reasons why continuing is not exact.
        """
        return []

    def close(self) -> None:
        """Ends what outlives an epoch: persistent workers. May be called twice."""

    def no_batch(self) -> ValueError:
        """The error to raise when there is none."""
        return ValueError(
            f"{self.name}: has no batch; expected at least one. "
            "Look at the data set, batch_size and drop_last."
        )


def adapt_loader(loader: Any, name: str, shard: Shard) -> LoaderAdapter:
    """The adapter that fits the loader.

    Args:
        loader: A paddle.io.DataLoader, or any iterable of batches that can be iterated again.
        name: What the user calls it, for messages.
        shard: This rank's.

    Raises:
        TypeError: It cannot be iterated.
    """
    if _is_paddles(loader) and not isinstance(loader.dataset, IterableDataset):
        return MapStyleLoader(loader, name, shard)
    if isinstance(loader, Iterable):
        return IterableLoader(loader, name, shard)
    raise TypeError(
        f"{name}: {loader!r} given; expected a paddle.io.DataLoader or an iterable of batches."
    )


def _is_paddles(loader: Any) -> bool:
    """Whether paddle iterates over it: a subclass may have an `__iter__` of its own."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


class MapStyleLoader(LoaderAdapter):
    """A DataLoader over a data set with indices: the batches before a position are never made.

    The ranks share one order of batches: each takes every world_size-th one. A
    DistributedBatchSampler shares the data out by itself and is used as it is.
    """

    def __init__(self, loader: DataLoader, name: str, shard: Shard) -> None:
        super().__init__(loader, name, shard)
        sampler = loader.batch_sampler
        self._order = BatchOrder(loader, shard.seed)
        self._fetcher = Fetcher(loader)
        # Whether the batches are dealt out to the ranks here.
        self._deals = shard.world_size > 1 and not isinstance(sampler, DistributedBatchSampler)
        self.num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        self.batch_size = 1 if sampler is None else getattr(sampler, "batch_size", None)
        self.batches_per_epoch = self._order.length
        if self._deals and self._order.length is not None:
            self.batches_per_epoch = -(-self._order.length // shard.world_size)
            self.filled = -self._order.length % shard.world_size

    def open(self, epoch: int, position: int = 0) -> Batches:
        # The position is inside a round if the run had another number of ranks before: that round
        # counts as a batch of this rank.
        first = -(-position // self.shard.world_size)
        numbered = self._dealt(epoch, position) if self._deals else self._own(epoch, position)
        # The first one is asked for now: the sampler runs here, and not at the first batch, and
        # an empty loader is found at once.
        head = list(itertools.islice(numbered, 1))
        if not head and first == 0:
            raise self.no_batch()
        base = rng.derive(self.shard.seed, rng.SAMPLE, epoch)
        return Batches(self._fetcher.fetch(itertools.chain(head, numbered), base), first)

    def _own(self, epoch: int, position: int) -> Iterator[Numbered]:
        """All batches of a sampler that knows its rank, numbered as if they were dealt out."""
        world, rank = self.shard.world_size, self.shard.rank
        for number, indices in self._order.batches(epoch, position // world):
            yield number * world + rank, indices

    def _dealt(self, epoch: int, position: int) -> Iterator[Numbered]:
        """The batches that this rank is dealt, one of each round, beginning at the position.

        Every rank runs through the same order. When the batches do not suffice for the last
        round, the first ones of the epoch fill it: a rank without a batch would leave the others
        waiting in the collectives of a backward pass for ever.
        """
        world, rank = self.shard.world_size, self.shard.rank
        batches = self._order.batches(epoch, position)
        while len(round_ := list(itertools.islice(batches, world))) == world:
            yield round_[rank]
        if round_:
            with unmoved(self._order.stateful):  # the sampler goes to the start of the epoch again
                start = list(itertools.islice(self._order.batches(epoch), world))
            # The start may be shorter than what is missing: then it is repeated.
            yield [*round_, *itertools.islice(itertools.cycle(start), world)][rank]

    def once(self, purpose: int, number: int) -> Batches:
        """Each sample exactly once over all ranks; a rank may get none."""
        world, rank = self.shard.world_size, self.shard.rank
        sampler = self.loader.batch_sampler
        if type(sampler) is DistributedBatchSampler:  # it pads, so some samples would count twice
            sampler = BatchSampler(
                sampler.dataset, batch_size=sampler.batch_size, drop_last=sampler.drop_last
            )
        seed = rng.derive(self.shard.seed, purpose, number)
        with unmoved(self._order.stateful), rng.isolated(seed):
            # `iter`, because list() asks a sampler for its length, which may fail.
            order = list(range(len(self.loader.dataset)) if sampler is None else iter(sampler))
        if not isinstance(sampler, DistributedBatchSampler):  # a subclass of a user's is trusted
            order = order[rank::world]
        numbered = ((i * world + rank, indices) for i, indices in enumerate(order))
        return Batches(self._fetcher.fetch(numbered, seed))

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, ended: bool) -> list[str]:
        self._order.load_state_dict(state)
        return []

    def close(self) -> None:
        self._fetcher.close()


class IterableLoader(LoaderAdapter):
    """A loader that is taken as it comes: an IterableDataset, a generator, one with its own way.

    It runs under random states of its own, which depend on (seed, epoch, rank). One batch is read
    ahead, so that the end of the epoch is known in time; with several ranks the epoch ends for
    all when the first has no more. Sharding is the user's. A position is reached by reading and
    throwing away, unless the loader has `state_dict` and `set_state_dict` or `load_state_dict`.
    """

    def __init__(self, loader: Any, name: str, shard: Shard) -> None:
        super().__init__(loader, name, shard)
        self._stateful = loader if state_setter(loader) else None
        self._is_list = isinstance(loader, (list, tuple)) and self._stateful is None
        self._state: dict[str, Any] = {}  # of a stateful loader, after the batch returned last
        self._resumed: dict[str, Any] | None = None  # what the next `open` continues from
        self._iterable = loader
        if _is_paddles(loader):
            as_it_is_read = with_hardened_workers if loader.num_workers else BatchedStream
            self._iterable = as_it_is_read(loader)
        self.batch_size = getattr(loader, "batch_size", None)
        if self._is_list and shard.world_size == 1:
            self.batches_per_epoch = len(loader)

    def open(self, epoch: int, position: int = 0) -> Batches:
        first = position // self.shard.world_size
        source = self._source(rng.derive(self.shard.seed, rng.STREAM, epoch, self.shard.rank))
        resumed, self._resumed = self._resumed, None
        skip = first
        if resumed is not None and isinstance(source, Isolated):
            source.set_random_states(resumed["random"])
            skip = 0  # its own state has the place
        return Batches(self._read(source, first, skip), first)

    def _source(self, seed: int) -> Iterator[Any]:
        if self._is_list:  # ready batches draw nothing, and swapping random states costs time
            return iter(self.loader)
        return Isolated(seed, self._iterable)

    def _read(self, source: Iterator[Any], first: int, skip: int) -> Iterator[Item]:
        ahead: Iterator[Any] = itertools.islice(source, skip, None)
        if self.shard.world_size > 1:
            ahead = _until_one_ends(ahead)
        batch = next(ahead, _NOTHING)
        if batch is _NOTHING and first == 0:
            raise self.no_batch()
        remembers = self._stateful is not None
        while batch is not _NOTHING:
            # The loader's state is taken now, after this batch and before the next one is read
            # ahead: a run that is resumed from a later state would never see that batch.
            state = self._place(source) if remembers else self._state
            following = next(ahead, _NOTHING)
            ended = following is _NOTHING
            # After the last batch the state is the one behind the end, where the next epoch starts.
            self._state = self._place(source) if ended and remembers else state
            yield batch, None, ended
            batch = following

    def _place(self, source: Iterator[Any]) -> dict[str, Any]:
        """The state of a stateful loader, and the random states that it draws from."""
        if self._stateful is None or not isinstance(source, Isolated):
            return {}
        state = copy.deepcopy(self._stateful.state_dict())
        return {"loader": state, "random": source.random_states()}

    def once(self, purpose: int, number: int) -> Batches:
        seed = rng.derive(self.shard.seed, purpose, number, self.shard.rank)
        return Batches(self._read_once(self._source(seed)))

    def _read_once(self, source: Iterator[Any]) -> Iterator[Item]:
        with unmoved(self._stateful):
            batch = _NOTHING
            for batch, last in with_last(source):
                yield batch, None, last
            if batch is _NOTHING and self.shard.world_size == 1:  # a generator that is used up, say
                raise self.no_batch()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any], *, ended: bool) -> list[str]:
        if state and self._stateful is not None:
            state_setter(self._stateful)(state["loader"])
            self._state = dict(state)
            self._resumed = None if ended else self._state
        if self._stateful is not None or self._is_list:
            return []
        return [
            f"{self.name}: replayed up to the position: exact only if it returns the same batches"
        ]


def _until_one_ends(source: Iterator[Any]) -> Iterator[Any]:
    """Ends on all ranks when one rank has no more; one collective per batch."""
    while True:
        item = next(source, _NOTHING)
        if not all(gather_objects(item is not _NOTHING)):
            return
        yield item


class FirstBatches(LoaderAdapter):
    """The first batches of another adapter again and again: what a model should overfit.

    Args:
        adapter: Whose.
        count: How many of them each rank gets in an epoch.
    """

    def __init__(self, adapter: LoaderAdapter, count: int) -> None:
        super().__init__(adapter.loader, adapter.name, adapter.shard)
        self.batch_size, self.num_samples = adapter.batch_size, adapter.num_samples
        self.batches_per_epoch = min(count, adapter.batches_per_epoch or count)
        self._adapter, self._count = adapter, count
        self._kept: list[tuple[Any, Sequence[Any] | None]] = []

    def open(self, epoch: int, position: int = 0) -> Batches:
        if not self._kept:
            with contextlib.closing(self._adapter.open(1)) as batches:
                for batch in itertools.islice(batches, self._count):
                    self._kept.append((batch, batches.indices))
            self.batches_per_epoch = len(self._kept)
        first = position // self.shard.world_size
        return Batches(self._read(first), first)

    def _read(self, first: int) -> Iterator[Item]:
        for number, (batch, indices) in enumerate(self._kept[first:], first + 1):
            # A copy: train_batch may change the batch in place.
            yield copy.deepcopy(batch), indices, number == len(self._kept)

    def once(self, purpose: int, number: int) -> Batches:
        return self._adapter.once(purpose, number)

    def close(self) -> None:
        self._adapter.close()
