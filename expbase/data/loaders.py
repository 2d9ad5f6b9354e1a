"""Driving a user's loader: the order of its batches, their random numbers, the shares of the ranks.

A `LoaderAdapter` stands in front of one loader and gives its passes, each from any position. What
a data set draws while it makes the n-th batch of a pass depends on (seed, epoch, n) alone: not on
the number of workers, nor on what was drawn before, nor on whether earlier batches were made.
The loader is asked for its settings and never changed; which batches are trained on is decided
here, what they hold is decided by the user's data set and collate_fn.

Positions count batches of all ranks together: in round i rank r takes batch i * world_size + r.

    feed = adapt_loader(loader, "train_loader", Shard(seed=0, rank=0, world_size=1))
    batches = feed.open(epoch=3, position=17)       # batches 0 to 16 are not loaded
    for batch in batches: ...
    batches.ended                                   # true as soon as the last one was given
    cursor = TrainIterator(feed)                           # a feed and the place in it
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, IterableDataset

from expbase.data.workers import BatchedStream, Fetcher, Numbered, with_hardened_workers, with_last
from expbase.distributed import gather_objects
from expbase.processes import forking
from expbase.state import rng


@dataclass(frozen=True)
class Shard:
    """Whose batches, and from which random numbers.

    Attributes:
        seed: What order and random numbers derive from.
        rank: This process.
        world_size: Among how many.
    """

    seed: int
    rank: int = 0
    world_size: int = 1


class Batches:
    """The batches of one pass, or of the rest of one.

    Attributes:
        ended: Whether the last batch was given; false before the first `next`.
        indices: Where the samples of the last given batch stand in the data set; None unknown.
        first: The batches of this rank that were skipped.
    """

    def __init__(self, batches: Callable[[Batches], Iterator[Any]], first: int) -> None:
        self.ended = False
        self.indices: Sequence[int] | None = None
        self.first = first
        self._iterator = batches(self)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        """Lets go of the loader: worker processes end."""
        close = getattr(self._iterator, "close", None)
        if close:
            close()


class LoaderAdapter:
    """A loader's batches, as one rank gets them.

    Attributes:
        batches_per_epoch: On this rank; None if nobody knows.
        batch_size: Samples in a full batch of this rank; None if nobody knows.
        num_samples: In the data set; None if nobody knows.
    """

    batches_per_epoch: int | None = None
    batch_size: int | None = None
    num_samples: int | None = None

    def __init__(self, loader: Any, name: str, share: Shard) -> None:
        self.loader = loader
        self.name = name
        self.share = share

    def open(self, epoch: int, position: int = 0) -> Batches:
        """The batches of a pass from a position on.

        Args:
            epoch: Its number, from 1.
            position: The batches of all ranks that were taken before.

        Raises:
            ValueError: The loader gives no batch.
        """
        raise NotImplementedError

    def once(self, purpose: int, number: int) -> Batches:
        """This rank's share of one run over the data, which is not a training pass.

        Args:
            purpose: VALID or PREDICT of rng.
            number: Of the run: the iteration, say.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What the loader itself remembers, beside the position; empty if nothing."""
        return {}

    def restore(self, state: Mapping[str, Any], *, ended: bool) -> None:
        """Gives back what `state` gave, before `open`.

        Args:
            state: Of the loader.
            ended: Whether the pass was used up, so that the next one begins.
        """

    def inexact_after_resume(self) -> list[str]:
        """What of a resume costs exactness, in words."""
        return []

    def close(self) -> None:
        """Lets go of what outlives a pass. May be called twice."""

    def no_batch(self) -> ValueError:
        """The error to raise when there is none."""
        return ValueError(
            f"{self.name}: gives no batch; expected at least one. "
            "Look at the data set, batch_size and drop_last."
        )


def adapt_loader(loader: Any, name: str, share: Shard) -> LoaderAdapter:
    """The feed that fits the loader.

    Args:
        loader: A paddle.io.DataLoader, or any iterable of batches that can be iterated again.
        name: What the user calls it, for messages.
        share: This rank's.

    Raises:
        TypeError: It cannot be iterated.
    """
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        if not isinstance(loader.dataset, IterableDataset):
            return MapStyleLoader(loader, name, share)
    elif not isinstance(loader, Iterable):
        raise TypeError(
            f"{name}: {loader!r} given; expected a paddle.io.DataLoader or an iterable of batches."
        )
    return IterableLoader(loader, name, share)


class MapStyleLoader(LoaderAdapter):
    """A DataLoader over a data set with indices: the batches before a position are never made.

    The order of a sampler that draws is a function of (seed, epoch); its `set_epoch` is called
    if it has one. A sampler with a length is listed at the start of a pass, one with
    `seek(position)` is asked, and any other is run through without loading anything.
    """

    def __init__(self, loader: DataLoader, name: str, share: Shard) -> None:
        super().__init__(loader, name, share)
        self._sampler = loader.batch_sampler
        self._dealt = share.world_size > 1 and not isinstance(
            self._sampler, DistributedBatchSampler
        )
        self._listing: tuple[int, Any] | None = None
        self._fetcher = Fetcher(loader)
        inner = getattr(self._sampler, "sampler", None)
        self._stateful = next(filter(_has_state, (self._sampler, inner)), None)
        self._begun: tuple[int, Any] | None = None  # a pass, and the sampler's state before it
        self.num_samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        self.batch_size = 1 if self._sampler is None else getattr(self._sampler, "batch_size", None)
        self.global_batches = self._length()
        if self.global_batches is not None:
            ranks = share.world_size if self._dealt else 1
            self.batches_per_epoch = -(-self.global_batches // ranks)

    @property
    def filled(self) -> int:
        """How many batches are taken from the start of a pass again to fill its last round."""
        if not self._dealt or not self.global_batches:
            return 0
        return -self.global_batches % self.share.world_size

    def open(self, epoch: int, position: int = 0) -> Batches:
        first = -(-position // self.share.world_size)
        return self._batches(self._share_of_pass(epoch, position), epoch, rng.SAMPLE, first)

    def once(self, purpose: int, number: int) -> Batches:
        """This rank's share of one run over the data: each sample exactly once over all ranks."""
        sampler = self._sampler
        if type(sampler) is DistributedBatchSampler:  # it pads, so some samples would count twice
            sampler = BatchSampler(
                sampler.dataset, batch_size=sampler.batch_size, drop_last=sampler.drop_last
            )
        own = isinstance(sampler, DistributedBatchSampler)
        seed = rng.derive(self.share.seed, purpose, number)
        with self._sampler_unmoved(), rng.isolated(seed):  # it may be the training loader's
            order = list(range(len(self.loader.dataset)) if sampler is None else sampler)
        if own:
            numbered = [
                (i * self.share.world_size + self.share.rank, o) for i, o in enumerate(order)
            ]
        else:
            numbered = list(enumerate(order))[self.share.rank :: self.share.world_size]
        return self._batches(iter(numbered), number, purpose, 0, may_be_empty=True)

    def _length(self) -> int | None:
        try:
            return len(self.loader.dataset if self._sampler is None else self._sampler)
        except (TypeError, AttributeError, NotImplementedError):
            return None  # paddle's WeightedRandomSampler has a length only for some weights

    def _share_of_pass(self, epoch: int, position: int) -> Iterator[Numbered]:
        world, rank = self.share.world_size, self.share.rank
        if not self._dealt:
            for number, indices in self._numbered(epoch, position // world):
                yield number * world + rank, indices
            return
        round_: list[Numbered] = []
        for numbered in self._numbered(epoch, position):
            round_.append(numbered)
            if len(round_) == world:
                yield round_[rank]
                round_ = []
        if round_:
            with self._sampler_unmoved():
                start = list(itertools.islice(self._numbered(epoch, 0), world))
            yield [*round_, *itertools.islice(itertools.cycle(start), world)][rank]

    def _numbered(self, epoch: int, start: int) -> Iterator[Numbered]:
        """The sampler's batches from a number on, with their numbers."""
        sampler = self._sampler
        if sampler is None:  # batch_size=None: paddle takes the samples one by one, in order
            return zip(itertools.count(start), range(start, len(self.loader.dataset)), strict=False)
        self._go_to_begin(epoch)
        _set_epoch(sampler, epoch)
        seed = rng.derive(self.share.seed, rng.ORDER, epoch)
        if _seek(sampler, start):
            return zip(itertools.count(start), _Isolated(seed, sampler), strict=False)
        if self.global_batches is None:
            return itertools.islice(enumerate(_Isolated(seed, sampler)), start, None)
        if self._listing is None or self._listing[0] != epoch:
            with rng.isolated(seed):
                self._listing = (epoch, _listed(sampler))
        return _from(self._listing[1], start)

    def _go_to_begin(self, epoch: int) -> None:
        """Has a sampler with a state of its own stand before a pass, again if need be."""
        if self._stateful is not None:
            if self._begun is not None and self._begun[0] == epoch:
                _set_state(self._stateful, self._begun[1])
            else:
                self._begun = (epoch, copy.deepcopy(self._stateful.state_dict()))

    @contextlib.contextmanager
    def _sampler_unmoved(self) -> Iterator[None]:
        now = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
        try:
            yield
        finally:
            if self._stateful is not None:
                _set_state(self._stateful, now)

    def state(self) -> dict[str, Any]:
        if self._stateful is None:
            return {}
        return {"begun": self._begun, "now": self._stateful.state_dict()}

    def restore(self, state: Mapping[str, Any], *, ended: bool) -> None:
        if state and self._stateful is not None:
            self._begun = None if ended else state["begun"]
            _set_state(self._stateful, state["now"])

    def close(self) -> None:
        self._fetcher.close()

    def _batches(
        self,
        numbered: Iterator[Numbered],
        epoch: int,
        purpose: int,
        first: int,
        may_be_empty: bool = False,
    ) -> Batches:
        head = list(itertools.islice(numbered, 1))
        if not head and not may_be_empty and first == 0:
            raise self.no_batch()
        items = itertools.chain(head, numbered)
        base = rng.derive(self.share.seed, purpose, epoch)

        def give(batches: Batches) -> Iterator[Any]:
            with contextlib.closing(self._fetcher.fetch(items, base)) as made:  # type: ignore[type-var]
                for batch, batches.indices, batches.ended in made:
                    yield batch

        return Batches(give, first)


class FirstBatches(LoaderAdapter):
    """The first batches of another feed over and over, bit for bit: what a model should overfit.

    Args:
        feed: Whose.
        count: How many of them each rank gets in a pass.
    """

    def __init__(self, feed: LoaderAdapter, count: int) -> None:
        super().__init__(feed.loader, feed.name, feed.share)
        self.batch_size, self.num_samples = feed.batch_size, feed.num_samples
        self.batches_per_epoch = min(count, feed.batches_per_epoch or count)
        self._feed, self._count = feed, count
        self._kept: list[tuple[Any, Sequence[int] | None]] = []

    def open(self, epoch: int, position: int = 0) -> Batches:
        if not self._kept:
            with contextlib.closing(self._feed.open(1)) as batches:
                for batch in itertools.islice(batches, self._count):
                    self._kept.append((batch, batches.indices))
            self.batches_per_epoch = len(self._kept)
        first = position // self.share.world_size

        def give(batches: Batches) -> Iterator[Any]:
            for number in range(first, len(self._kept)):
                batch, batches.indices = self._kept[number]
                batches.ended = number + 1 == len(self._kept)
                yield _copied(batch)  # train_batch may change it in place

        return Batches(give, first)

    def once(self, purpose: int, number: int) -> Batches:
        return self._feed.once(purpose, number)

    def close(self) -> None:
        self._feed.close()


def _copied(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: _copied(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(_copied, batch))
    return batch.clone() if isinstance(batch, paddle.Tensor) else copy.deepcopy(batch)


class IterableLoader(LoaderAdapter):
    """A loader that is taken as it comes: an IterableDataset, a generator, one with its own way.

    It runs under random states of its own, which depend on (seed, epoch, rank). One batch is read
    ahead, so that the end of the pass is known in time; with several ranks the pass ends for all
    when the first has no more. Sharding is the user's. A position is reached by reading and
    throwing away, unless the loader has `state_dict` and `set_state_dict` or `load_state_dict`.
    """

    def __init__(self, loader: Any, name: str, share: Shard) -> None:
        super().__init__(loader, name, share)
        self._is_list = isinstance(loader, (list, tuple))
        self._is_stateful = _has_state(loader)
        self._hardened: Any = None  # the loader that is iterated, if it has workers
        self._state: dict[str, Any] = {}  # of a stateful loader, after the last given batch
        self._resumed: dict[str, Any] | None = None  # what to go on from at the next `open`
        self.batch_size = getattr(loader, "batch_size", None)
        if self._is_list and share.world_size == 1:
            self.batches_per_epoch = len(loader)

    def open(self, epoch: int, position: int = 0) -> Batches:
        first = position // self.share.world_size
        source = self._source(rng.derive(self.share.seed, rng.STREAM, epoch, self.share.rank))
        if not self._is_stateful:
            return Batches(lambda batches: self._read(batches, source, first), first)
        if self._resumed is not None and isinstance(source, _Isolated):
            source.restore(self._resumed["random"])
        self._resumed = None
        return Batches(lambda batches: self._read_stateful(batches, source), first)

    def state(self) -> dict[str, Any]:
        return self._state

    def restore(self, state: Mapping[str, Any], *, ended: bool) -> None:
        if state:
            _set_state(self.loader, state["loader"])
            self._state = dict(state)
            self._resumed = None if ended else self._state

    def once(self, purpose: int, number: int) -> Batches:
        """What the loader gives this rank, once."""
        seed = rng.derive(self.share.seed, purpose, number, self.share.rank)

        def read(batches: Batches) -> Iterator[Any]:
            # It may be the training loader, whose place must not move.
            before = copy.deepcopy(self.loader.state_dict()) if self._is_stateful else None
            none = True
            try:
                for batch, batches.ended in with_last(self._source(seed)):
                    none = False
                    yield batch
                if none and self.share.world_size == 1:  # a generator that is used up, say
                    raise self.no_batch()
            finally:
                if self._is_stateful:
                    _set_state(self.loader, before)

        return Batches(read, 0)

    def _source(self, seed: int) -> Iterator[Any]:
        if self._is_list:  # ready batches draw nothing
            return iter(self.loader)
        if (
            not isinstance(self.loader, DataLoader)
            or type(self.loader).__iter__ is not DataLoader.__iter__
        ):
            return _Isolated(seed, self.loader)
        if self.loader.num_workers:
            if self._hardened is None:
                self._hardened = with_hardened_workers(self.loader)
            return _Isolated(seed, self._hardened)
        return _Isolated(seed, BatchedStream(self.loader))

    def _read(self, batches: Batches, source: Iterator[Any], skip: int) -> Iterator[Any]:
        for _ in itertools.islice(source, skip):
            pass
        if self.share.world_size > 1:
            source = _until_one_ends(source)
        none = True
        for batch, batches.ended in with_last(source):
            none = False
            yield batch
        if none and not skip:
            raise self.no_batch()

    def inexact_after_resume(self) -> list[str]:
        if self._is_stateful or self._is_list:
            return []
        return [f"{self.name}: replayed up to the position: exact only if it gives the same again"]

    def _read_stateful(self, batches: Batches, source: Iterator[Any]) -> Iterator[Any]:
        # Its state is taken before one batch is read ahead, or the resumed run would lose it.
        def note() -> None:
            random = source.capture() if isinstance(source, _Isolated) else {}
            self._state = {"loader": copy.deepcopy(self.loader.state_dict()), "random": random}

        ahead = _until_one_ends(source) if self.share.world_size > 1 else source
        nothing = object()
        batch = next(ahead, nothing)
        while batch is not nothing:
            note()
            following = next(ahead, nothing)
            batches.ended = following is nothing
            if batches.ended:
                note()
            yield batch
            batch = following


class _Isolated:
    """Iterates under random states of its own, which go on from item to item."""

    def __init__(self, seed: int, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None
        with rng.isolated(seed):
            self._inside = rng.snapshot()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        outside = rng.snapshot()
        rng.reset(self._inside)
        try:
            if self._iterator is None:
                with forking():
                    self._iterator = iter(self._iterable)
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(())  # paddle's own fail when they are asked once more
            raise
        finally:
            self._inside = rng.snapshot()
            rng.reset(outside)

    def capture(self) -> dict[str, Any]:
        """Its random states as JSON values."""
        with rng.isolated():
            rng.reset(self._inside)
            return rng.capture()

    def restore(self, states: dict[str, Any]) -> None:
        """Takes back what `capture` gave."""
        with rng.isolated():
            rng.restore(states)
            self._inside = rng.snapshot()


def _has_state(candidate: Any) -> bool:
    return hasattr(candidate, "state_dict") and _setter(candidate) is not None


def _setter(stateful: Any) -> Any:
    return getattr(stateful, "set_state_dict", None) or getattr(stateful, "load_state_dict", None)


def _set_state(stateful: Any, state: Any) -> None:
    _setter(stateful)(state)


def _until_one_ends(source: Iterator[Any]) -> Iterator[Any]:
    """Ends on all ranks when one rank has no more; one collective per batch."""
    nothing = object()
    while True:
        item = next(source, nothing)
        if not all(gather_objects(item is not nothing)):
            return
        yield item


class _Cut:
    """The batches of paddle's BatchSampler, cut from one list: millions of lists cost seconds."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._indices = list(sampler.sampler)
        self._size: int = sampler.batch_size * sampler._acc_steps
        full, rest = divmod(len(self._indices), self._size)
        self._count: int = full + int(rest > 0 and not sampler.drop_last)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> list[Any]:
        return self._indices[number * self._size : (number + 1) * self._size]


def _listed(sampler: Any) -> Any:
    return _Cut(sampler) if type(sampler) is BatchSampler else list(sampler)


def _from(batches: Any, start: int) -> Iterator[Numbered]:
    return ((number, batches[number]) for number in range(start, len(batches)))


def _set_epoch(sampler: Any, epoch: int) -> None:
    candidates: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
    for candidate in candidates:
        if hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)


def _seek(sampler: Any, batch: int) -> bool:
    """Has the sampler start at a batch, if it or the sampler of samples in it knows how to."""
    if hasattr(sampler, "seek"):
        sampler.seek(batch)
        return True
    inner: Any = getattr(sampler, "sampler", None)
    if hasattr(inner, "seek") and type(sampler) is BatchSampler:
        inner.seek(batch * sampler.batch_size)
        return True
    return False
