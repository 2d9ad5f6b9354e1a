"""Reading a user's loader: which batches this rank gets in an epoch, from any position.

A `LoaderAdapter` wraps one loader. The random numbers that a data set draws for a batch depend
only on (seed, epoch, position of its first sample). The settings of the loader are never changed.

    adapter = adapt_loader(loader, "train_loader", Shard(seed=0, rank=0, world_size=1))
    batches = adapter.open(epoch=3, position=170)    # 170 samples are not loaded
    for batch in batches: ...
    batches.ended                                        # true together with the last batch
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from paddle import Tensor
from paddle.io import DataLoader, IterableDataset
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterBase

from expbase.base import rng
from expbase.base.any_object import module_of, state_setter
from expbase.base.errors import TypeMistake, ValueMistake
from expbase.base.json_values import checksum
from expbase.data.batch_sizes import count_samples, parts_of
from expbase.data.order import (
    BatchOrder,
    IndexBatch,
    is_distributed,
    numbered,
    seeded,
    undistributed,
    undrawn,
    unmoved,
)
from expbase.data.stream_start import StreamStart
from expbase.data.workers import Fetcher, Items, batched_stream, streamed_by_workers, with_last
from expbase.ranks import compare_gathered
from expbase.ranks.collectives import all_gather_object, barrier, max_over_ranks

_SAY_SECONDS = 10.0  # between two lines while a stream is passed over
_NOTHING = object()  # stands for a batch when there is none


@dataclass(frozen=True)
class Shard:
    """Which batches are a rank's: in round i rank r takes `batches` of them, from the number
    (i * world_size + r) * batches on.
    """

    seed: int  # the order and the random numbers are derived from it
    rank: int = 0
    world_size: int = 1
    batches: int = 1  # of this rank in a round
    one_order: bool = False  # a round is an update, and no bit depends on the number of ranks
    dealt_to: str = "rank"  # what gets a batch of a round, in words

    @property
    def round(self) -> int:
        """Batches in a round, over all ranks."""
        return self.world_size * self.batches

    @property
    def part(self) -> slice:
        """Which batches of a round are this rank's."""
        return slice(self.rank * self.batches, (self.rank + 1) * self.batches)


class Batches:
    """The batches of one rank in one epoch, or in the rest of one."""

    def __init__(
        self,
        items: Items,
        adapter: LoaderAdapter,
        position: int = 0,
        *,
        ended: bool = False,
        keeps_indices: bool = False,
    ) -> None:
        self.ended = ended  # whether the last batch was returned
        self.taken = IndexBatch(position, end=position)  # the batch returned last
        self.adapter = adapter
        self.count = 0  # batches returned
        self.has_none = False  # whether the loop came to its end without a batch
        # The indices of all samples returned, if they are to be compared between the ranks.
        self.kept: list[Any] | None = [] if keeps_indices else None
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # If the data set raises an exception, `taken` must not be the batch before.
        self.taken = IndexBatch(self.taken.end, end=self.taken.end)
        try:
            batch, self.taken, self.ended = next(self._items)
        except StopIteration:
            self.has_none = not self.count
            raise
        self.count += 1
        if self.kept is not None:
            self.kept += self.taken.indices
        return batch

    @property
    def indices(self) -> list[Any] | None:
        """The indices, in the data set, of the samples of the last batch; None: unknown."""
        indices = self.taken.indices
        return None if indices is None else list(indices)

    def close(self) -> None:
        """Stops reading: worker processes end. May be called twice."""
        self._items.close()


class LoaderAdapter:
    """A loader's batches, as one rank gets them.

    Args:
        loader: The user's.
        name: What the user calls it, for messages.
        shard: Which batches are this rank's.
        say: Called with a line about what takes long.
    """

    batches_per_epoch: int | None = None  # on this rank; None: unknown
    num_samples: int | None = None  # in the data set; None: unknown
    num_read: int | None = None  # samples that all ranks read in an epoch; None: unknown
    filled: int = 0  # batches that are read twice in an epoch, to fill its last round
    sharding: str = ""  # how the ranks get their parts, in words; empty on one rank
    kind = ""  # the kind of order of the samples, in words
    is_used_up = False  # whether `once` gave batches before, and none now
    has_one_order = True  # whether all ranks have one: then a position tells the samples before it

    def __init__(
        self, loader: Any, name: str, shard: Shard, say: Callable[[str], object] = id
    ) -> None:
        self.loader = loader
        self.name = name
        self.shard = shard
        self.say = say

    def updates_per_epoch(self, accumulation_steps: int) -> Fraction | None:
        """Returns how many updates an epoch has; None: unknown. One may lie in two epochs."""
        batches = self.batches_per_epoch
        of_an_update = accumulation_steps * self.shard.batches
        return None if batches is None else Fraction(batches, of_an_update)

    @property
    def batch_size(self) -> int | None:
        """Samples in a full batch of this rank; None: unknown."""
        size: int | None = getattr(self.loader, "batch_size", None)
        return size

    def open(self, epoch: int, position: int = 0) -> Batches:
        """Returns the batches of an epoch from a position on.

        Args:
            epoch: From 1.
            position: Samples of the epoch, of all ranks, that are left out.

        Raises:
            ValueError: The loader has no batch.
        """
        raise self.not_set()

    def once(self, purpose: int, number: int) -> Batches:
        """Returns this rank's part of one run over the data that does not train.

        It does not move the data position. Its random numbers depend on the purpose, VALID or
        PREDICT of rng, and on the number.

        Raises:
            ValueError: There is one rank, and it has no batch; maybe at the end of the loop only.
        """
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Returns whether it is known, before anything is read, that `once` gives no batch."""
        return False

    @property
    def is_ready_made(self) -> bool:
        """Whether an item of the data set is a whole batch: batch_size=None."""
        return _is_paddles(self.loader) and self.loader.batch_sampler is None

    def samples_in(self, batch: Any, taken: IndexBatch) -> tuple[int | None, str]:
        """Returns the number of samples in a batch, and what is to be said of it."""
        if self.is_ready_made:
            return None, ""
        return count_samples(batch, taken.asked)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the loader itself, beside the position; {} if it has none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`, before the position is opened."""

    def why_not_exact(self) -> list[str]:
        """Returns reasons why the position that was opened may be another one than then."""
        return []

    def checksum(self) -> int | None:
        """Returns a checksum of the order of the epoch that was opened; None: unknown."""
        return None

    def close(self) -> None:
        """Ends persistent workers. May be called twice."""

    def not_set(self) -> ValueError:
        """Returns the error to raise when there is no loader."""
        return ValueMistake(
            f"{self.name}: not set by setup_dataloader; expected a paddle.io.DataLoader or an "
            "iterable of batches, or no call of read_batch, micro_batches, new_epoch and "
            "valid_batches: an experiment may make its own data."
        )

    def compare_ranks(self, batch: Any) -> None:
        """Raises a ValueError if a batch or a sample is not the same on all ranks; a collective."""
        barrier(f"the first batch of {self.name}")
        if not compare_gathered.are_alike(all_gather_object(checksum(batch))):
            raise self.dealt_by_rank()

    def dealt_by_rank(self) -> ValueError:
        """Returns the error to raise when the ranks have other batches, and one order is wanted."""
        return ValueMistake(
            f"{self.name}: has other data on rank 0 than on another one; expected the same on all, "
            f"to be dealt out over the {self.shard.dealt_to}s of an update. Look for self.rank."
        )

    def no_batch(self) -> ValueError:
        """Returns the error to raise when there is no batch."""
        return ValueMistake(f"{self.name}: has no batch; expected at least one. {self._why_none()}")

    def _why_none(self) -> str:
        return "Look at the data set, batch_size and drop_last."


def adapt_loader(
    loader: Any, name: str, shard: Shard, say: Callable[[str], object] = id
) -> LoaderAdapter:
    """Returns the adapter of a loader. A collective: the ranks may compare their samplers.

    Args:
        loader: A paddle.io.DataLoader, or an iterable of batches that can be iterated again.
        name: What a user calls it, for messages: "self.train_loader".
        shard: Which batches are this rank's.
        say: Called with a line about what takes long.

    Raises:
        TypeError: The loader is something else.
    """
    if is_map_style(loader):
        return MapStyleLoader(loader, name, shard, say)
    if isinstance(loader, Iterable):
        return IterableLoader(loader, name, shard, say)
    raise TypeMistake(
        f"{name}: {loader!r} given; expected a paddle.io.DataLoader or an iterable of batches."
    )


def check_begins_anew(loader: Any, name: str) -> None:
    """Refuses loaders that can be read only once: a second pass would be empty.

    An iterator of the user's own class may begin anew.

    Args:
        loader: The user's.
        name: What the user calls it, for the message.

    Raises:
        TypeError: It is a generator, or an iterator of Python or paddle.
    """
    module = module_of(type(loader)).partition(".")[0]
    if isinstance(loader, _DataLoaderIterBase):
        is_used_up = True
    else:
        is_used_up = isinstance(loader, Iterator) and module in sys.stdlib_module_names
    if is_used_up:
        raise TypeMistake(
            f"{name}: {loader!r} given, which can be read once; expected one that begins anew in "
            "each pass: the DataLoader itself, not iter(loader) or loader(); a list of batches; or "
            "an object whose __iter__ is a generator function, not the generator that it returns."
        )


def several_loaders(loader: Any) -> str:
    """Returns "dict" or "list" if a value has several DataLoaders, which is no loader; else ""."""
    if isinstance(loader, Mapping):
        kind, parts = "dict", iter(loader.values())
    elif isinstance(loader, (list, tuple)):
        kind, parts = "list", iter(loader)
    else:
        return ""
    return kind if isinstance(next(parts, None), DataLoader) else ""


def num_samples(loader: Any) -> int | None:
    """Returns how many samples the data set of a loader has; None: unknown."""
    # RuntimeError: an IterableDataset.
    with contextlib.suppress(AttributeError, TypeError, RuntimeError):
        return len(loader.dataset)
    return None


def num_validated(loader: Any) -> int | None:
    """Returns how many samples all ranks together read in a validation; None: unknown."""
    if not is_map_style(loader):
        return None
    sampler = loader.batch_sampler
    sampler = undistributed(sampler) if is_distributed(sampler) else sampler
    return BatchOrder(loader, sampler, 0).num_read


def _length(loader: Any) -> int | None:
    """Returns how many batches an iterable says that it has; None: it does not say."""
    if not _is_paddles(loader):  # paddle's has none here
        # What a class raises that has a __len__, and no length.
        with contextlib.suppress(AttributeError, TypeError, RuntimeError, ValueError):
            return len(loader) or None
    return None


def _is_paddles(loader: Any) -> bool:
    """Returns whether a loader is a DataLoader with paddle's own `__iter__`."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def is_map_style(loader: Any) -> bool:
    """Returns whether a loader is a DataLoader over a data set with indices."""
    return _is_paddles(loader) and not isinstance(loader.dataset, IterableDataset)


class MapStyleLoader(LoaderAdapter):
    """A DataLoader over a data set with indices: the batches before a position are never made.

    The ranks have one order of batches. A sampler that gives each rank its own part, as paddle's
    DistributedBatchSampler does, is used as it is.
    """

    def __init__(
        self, loader: DataLoader, name: str, shard: Shard, say: Callable[[str], object]
    ) -> None:
        super().__init__(loader, name, shard, say)
        sampler = loader.batch_sampler
        if shard.one_order and is_distributed(sampler):
            sampler = undistributed(sampler, shuffle=sampler.shuffle)
        self._order = BatchOrder(loader, sampler, shard.seed)
        self._fetcher = Fetcher(loader, name, say)
        self.num_samples = num_samples(loader)
        self.num_read = self._order.num_read
        self.batches_per_epoch = self._order.length
        self.kind = self._order.kind
        if shard.round > 1:
            self._find_sharding()

    @property
    def batch_size(self) -> int | None:  # which a user may change for the next epoch
        return getattr(self._order.sampler, "batch_size", None)

    def _find_sharding(self) -> None:
        shard = self.shard
        if self.kind == "own":
            self._compare_ranks()
        if not self.has_one_order:
            if shard.one_order:
                raise self.dealt_by_rank()
            self.sharding = "sharded by its sampler"
            return
        if shard.one_order and shard.world_size > 1:
            first = [] if self._order.is_read_once else self._order.ask(1)
            rng.seed_all(shard.seed)
            indices = [index for batch in first for index in batch.indices][:1]
            with undrawn(self.loader.dataset):
                samples = [self.loader.dataset[index] for index in indices]
            self.compare_ranks(samples)
        self.sharding = f"dealt out over {shard.round} {shard.dealt_to}s"
        if self.batches_per_epoch is not None:
            self.filled = -self.batches_per_epoch % shard.round
            self.batches_per_epoch = -(-self.batches_per_epoch // shard.round) * shard.batches

    def _compare_ranks(self) -> None:
        """Finds out whether the sampler draws the same order on all ranks. A collective."""
        head = self._order.head()
        barrier(f"the sampler of {self.name}")  # not all may come, or late
        checksums = [checksum for checksum, _ in all_gather_object(head)]
        self.has_one_order = None in checksums or compare_gathered.are_alike(checksums)
        self.batches_per_epoch = head[1] or self.batches_per_epoch

    def open(self, epoch: int, position: int = 0) -> Batches:
        if self.has_one_order:
            mine = self._dealt(epoch, position)
        else:
            mine = self._placed(self._order.batches(epoch, position // self.shard.world_size))
        # The first one is asked for now: the sampler runs here, and not at the first batch, and
        # an empty loader is found at once.
        head = list(itertools.islice(mine, 1))
        if not head and position == 0:
            raise self.no_batch()
        base = rng.derive(self.shard.seed, rng.SAMPLE, epoch)
        items = self._fetcher.fetch(itertools.chain(head, mine), base)
        return Batches(items, self, position, ended=not head)

    def _placed(self, batches: Iterable[IndexBatch]) -> Iterator[IndexBatch]:
        """Yields the batches of a sampler that shards, with positions in the epoch of all ranks.

        In each round the batches of the ranks follow each other, and all count as long as this
        rank's.
        """
        world = self.shard.world_size
        rank = self.shard.rank
        for batch in batches:
            first = batch.position * world + rank * (batch.end - batch.position)
            yield IndexBatch(first, batch.indices, batch.end * world)

    def _dealt(self, epoch: int, position: int) -> Iterator[IndexBatch]:
        """Yields this rank's batches of each round, from a position on.

        The last round is filled up with the first batches of the epoch: a rank without a batch
        would leave the others waiting for ever in the collectives of a backward pass.
        """
        size = self.shard.round
        batches = self._order.batches(epoch, position)
        while round_ := list(itertools.islice(batches, size)):
            end = round_[-1].end
            if len(round_) < size:
                with unmoved(self._order.stateful):  # its sampler goes to the start again
                    start = list(itertools.islice(self._order.batches(epoch), size))
                # If the epoch is shorter than the gap, it is repeated.
                round_ += itertools.islice(itertools.cycle(start), size)
            for batch in round_[self.shard.part]:
                yield batch._replace(end=end)

    def once(self, purpose: int, number: int) -> Batches:
        """Returns this rank's part of one pass: each sample once over all ranks; maybe no batch.

        With a sampler that shards by itself the ranks read what it gives them, and the indices are
        kept, to find samples that are read twice.
        """
        order = self._once_order()
        has_one_order = self.has_one_order or order is not self._order
        seed = rng.derive(self.shard.seed, purpose, number)
        rng.seed_all(seed)
        with unmoved(order.stateful):
            # `iter`, because list() asks a sampler for its length, which may fail.
            is_known = order.kind == "in order"  # and may be too long for a list
            batches = order.batches(1) if is_known else numbered(list(iter(order.sampler)))
        if has_one_order:
            batches = itertools.islice(batches, self.shard.rank, None, self.shard.world_size)
        else:
            batches = self._placed(batches)
        head = list(itertools.islice(batches, 1))
        if not head and self.shard.world_size == 1:
            raise self.no_batch()
        items = self._fetcher.fetch(itertools.chain(head, batches), seed)
        return Batches(items, self, keeps_indices=not has_one_order)

    def _once_order(self) -> BatchOrder:
        sampler = self._order.sampler
        if not is_distributed(sampler):
            return self._order
        # It pads, so some samples would count twice.
        return BatchOrder(self.loader, undistributed(sampler), self.shard.seed)

    def is_empty(self) -> bool:
        order = self._once_order()
        # A sampler of one's own may be wrong about its length.
        return order.length == 0 and (order.kind != "own" or order.head()[1] == 0)

    def _why_none(self) -> str:
        order = self._order
        sampler = order.sampler
        settings = {name: getattr(sampler, name, None) for name in ("batch_size", "drop_last")}
        size, drops = settings.values()
        text = f"It has {num_samples(self.loader)} samples, batch_size={size}, drop_last={drops}"
        if order.kind == "own":
            text += f", and its batch_sampler is a {type(sampler).__name__}"
        if order.is_read_once:
            text += ", which draws from an iterator that can be read once"
        return f"{text}."

    def checksum(self) -> int | None:
        # Rank 0 writes it for all ranks.
        return self._order.checksum() if self.has_one_order else None

    def state_dict(self) -> dict[str, Any]:
        state = self._order.state_dict()
        # Each rank has another listing, and another number of ranks would have none.
        return state if self.has_one_order or "listing" not in state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)

    def close(self) -> None:
        self._fetcher.close()


class IterableLoader(LoaderAdapter):
    """A loader that is taken as it comes: an IterableDataset, a generator, one with its own way.

    What it draws for a batch depends on (seed, epoch, rank, number of the batch), and sharding is
    the user's. With several ranks the epoch ends for all when the first has no more. If they must
    have one order each reads all batches, the same, and throws away those of other ranks. A
    position is reached by reading and throwing away, unless the loader has a state of its own; it
    counts batches if their size is unknown.
    """

    def __init__(self, loader: Any, name: str, shard: Shard, say: Callable[[str], object]) -> None:
        super().__init__(loader, name, shard, say)
        self._stateful: Any = loader if state_setter(loader) else None
        self._is_list = isinstance(loader, (list, tuple))
        # It gives itself as its iterator, and may begin anew or not.
        parts = (loader, getattr(loader, "dataset", None))
        self._is_iterator = any(isinstance(part, Iterator) for part in parts)
        self._was_read = False  # whether a pass had a batch
        # Samples that went into collate_fn for the batch made last; None: the loader is no paddle's
        self._asked: int | None = None
        self._state: dict[str, Any] = {}  # of a stateful loader, after the batch returned last
        owners = {"loader": loader, "dataset": getattr(loader, "dataset", None)}
        self._start = StreamStart(owners if self._is_replayed else {})
        self._last: list[tuple[Any, Any]] = []  # parts of the batch returned last, and versions
        self._last_then: Any = None  # a checksum of the last batch before the checkpoint
        if self.is_empty():
            self.batches_per_epoch = 0
        elif shard.one_order or shard.world_size == 1:
            length = _length(loader)
            self.batches_per_epoch = length and length // shard.round * shard.batches
        self._batches_here = _is_paddles(loader) and not loader.num_workers
        workers = getattr(loader, "num_workers", 0)
        self.kind = f"a stream of {workers} workers" if workers else "a stream"
        # With workers it cannot be cut within a batch.
        self.has_one_order = shard.one_order or (shard.world_size == 1 and self._batches_here)

    def open(self, epoch: int, position: int = 0) -> Batches:
        shard = self.shard
        if not position:
            self._start.note()
        # A stream of this rank alone, or the same one on all.
        rank, ranks = (0, 1) if shard.one_order else (shard.rank, shard.world_size)
        number, cut = divmod(position // ranks, self.batch_size or 1)
        seed = rng.derive(shard.seed, rng.STREAM, epoch, rank)
        if self._state:  # it is at the place already
            ahead = self._source(seed, number)
        else:
            ahead = self._behind(self._source(seed, 0, cut), number)
        if shard.one_order:
            ahead = self._dealt(ahead)
        elif ranks > 1:  # one collective per batch
            to_end = itertools.chain(ahead, [_NOTHING])
            ahead = itertools.takewhile(lambda b: not any(max_over_ranks(b is _NOTHING)), to_end)
        # A stream that has become shorter may have no batch left: so the first one is read now.
        looks = position > 0 and self._stateful is None
        head = list(itertools.islice(ahead, 1)) if looks else []
        items = self._read(itertools.chain(head, ahead), position)
        return Batches(items, self, position, ended=looks and not head)

    def _behind(self, source: Iterator[Any], number: int) -> Iterator[Any]:
        """Yields the batches behind the first ones; to read these may take hours."""
        said = time.monotonic()
        for count, batch in enumerate(itertools.islice(source, number), 1):
            self._last = [*_versions(batch)]
            if (now := time.monotonic()) - said >= _SAY_SECONDS:
                said = now
                self.say(f"{self.name}: passing over {count:,} of {number:,} batches")
        if number:
            barrier(f"the position in {self.name}")  # on another rank it may have taken longer
        yield from source

    def _dealt(self, ahead: Iterator[Any]) -> Iterator[Any]:
        """Yields this rank's batches of each whole round."""
        is_first = True
        while len(batches := list(itertools.islice(ahead, self.shard.round))) == self.shard.round:
            if is_first:
                is_first = False
                self.compare_ranks(batches[0])
            yield from batches[self.shard.part]

    def _source(self, seed: int, number: int = 0, cut: int = 0) -> Iterator[Any]:
        iterable = self.loader
        if self._is_list:  # nothing is drawn where nothing is made
            return iter(iterable)
        if self._batches_here:
            iterable = batched_stream(iterable, self._note_asked, cut)
        elif _is_paddles(iterable):
            iterable = streamed_by_workers(iterable, self.name, self._note_asked)
        return seeded(iterable, seed, number)

    def _note_asked(self, asked: int) -> None:
        self._asked = asked

    def _read(self, ahead: Iterator[Any], position: int) -> Items:
        # The loader's state is taken after a batch and before the next one is read ahead: a run
        # that is resumed from a later state would never see that batch.
        placed = ((batch, self._place(), self._asked) for batch in ahead)
        for (batch, state, asked), last in with_last(placed):
            self._was_read = True
            # After the last batch it is the one behind the end, where the next epoch starts.
            self._state = self._place() if last else state
            position += (self.batch_size or 1) * self.shard.world_size
            self._last = [*_versions(batch)]
            yield batch, IndexBatch(position, end=position, num_asked=asked), last
        if position == 0:
            raise self.no_batch()

    def _place(self) -> dict[str, Any]:
        """Returns the state of a stateful loader."""
        stateful = self._stateful
        return {} if stateful is None else {"loader": copy.deepcopy(stateful.state_dict())}

    def once(self, purpose: int, number: int) -> Batches:
        seed = rng.derive(self.shard.seed, purpose, number, self.shard.rank)
        return Batches(self._read_once(self._source(seed)), self)

    def _read_once(self, source: Iterator[Any]) -> Items:
        with unmoved(self._stateful):
            batch = _NOTHING
            was_read = self._was_read
            for number, batch in enumerate(source):
                self._was_read = True
                place = number * self.shard.world_size + self.shard.rank
                yield batch, IndexBatch(place, end=place, num_asked=self._asked), False
            if batch is _NOTHING and self.shard.world_size == 1:
                raise self.no_batch()
            # Of several ranks one may have no batch, but not because its loader was read before.
            self.is_used_up = batch is _NOTHING and self._is_iterator and was_read

    def is_empty(self) -> bool:
        return self._is_list and not len(self.loader)

    def _why_none(self) -> str:
        loader = self.loader
        kind = type(getattr(loader, "dataset", loader)).__name__
        if self._is_list:
            needed = f", and an update takes {self.shard.round}" * self.shard.one_order
            return f"It is a {kind} of {len(loader)} batches{needed}."
        text = f"It is a {kind}"
        if isinstance(loader, DataLoader):
            size, drops = loader.batch_size, loader.drop_last
            text = f"It has a {kind} of unknown length, batch_size={size}, drop_last={drops}"
        if self._is_iterator or self._was_read:
            text += (
                ", and a pass before it may have taken all: expected an __iter__ that begins anew, "
                "such as a generator function, not an iterator that is kept"
            )
        return f"{text}."

    @property
    def _is_replayed(self) -> bool:
        return self._stateful is None and not self._is_list

    def state_dict(self) -> dict[str, Any]:
        if not self._is_replayed:
            return self._state
        return {"attributes": self._start.state_dict(), "last": self._checksum_of_last()}

    def _checksum_of_last(self) -> str | None:
        """Returns a checksum of the batch returned last; None if it is unknown: training has
        changed it in place, or this rank gets a part of each round, which the last one is not in.
        """
        is_known = all(version == _version(part) for part, version in self._last)
        return self._sum_of_last() if is_known and not self.shard.one_order else None

    def _sum_of_last(self) -> str:
        return checksum([part for part, _ in self._last])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and self._stateful is not None:
            state_setter(self._stateful)(state["loader"])
            self._state = dict(state)
        self._last_then = state.get("last")
        if self._is_replayed and isinstance(attributes := state.get("attributes"), dict):
            self._start.put_back(attributes)

    def why_not_exact(self) -> list[str]:
        if not self._is_replayed or self._last_then == self._sum_of_last():
            return []
        why = ", and the last batch is another one than then; expected the same ones at each start"
        if self._last_then is None:
            why = ": exact only if it returns the same batches"
        return [f"{self.name}: replayed up to the position{why}"]


def _versions(batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the parts of a batch, and how often each was changed in place, as paddle counts it."""
    if isinstance(batch, (Mapping, list, tuple)):
        for part in parts_of(batch):
            yield from _versions(part)
    else:
        yield batch, _version(batch)


def _version(part: Any) -> Any:
    return part.inplace_version if isinstance(part, Tensor) else None
