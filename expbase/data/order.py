"""The order of the samples, and the batches that are cut from it.

It is a function of (seed, epoch), whatever was drawn or read before. Only indices are handled
here: nothing is loaded, and the ranks do not matter yet.

    order = BatchOrder(loader, loader.batch_sampler, seed=0)    # over a data set with indices
    for batch in order.batches(epoch=3, position=170): batch.indices
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    RandomSampler,
    SequenceSampler,
)

from expbase.base import rng
from expbase.base.any_object import attributes_of, has_attributes, state_setter
from expbase.base.generator_states import GENERATORS, generator_state, set_generator_state
from expbase.base.processes import forking
from expbase.state.rollback import Rollback
from expbase.state.value_places import Node, WholeNode

_MOST_LISTED = 1 << 23  # the longest order that a checkpoint holds, in samples or batches
_MOST_KEPT_BYTES = 1 << 26  # the largest attribute of a sampler that is restored after `ask`
_HEAD = 1 << 10  # batches by which the orders of the ranks are compared


class IndexBatch(NamedTuple):
    """A batch before it is loaded. A position is a number of samples of the epoch, from 0."""

    position: int  # of its first sample
    indices: Any = None  # of its samples in the data set; None: unknown
    end: int = 0  # the position behind it, or behind the batches of all ranks of its round
    num_asked: int | None = None  # samples that went into collate_fn; None: as many as indices

    @property
    def asked(self) -> int | None:
        """How many samples went into collate_fn; None: unknown."""
        return self.num_asked if self.indices is None else len(self.indices)


class BatchOrder:
    """The batches of a DataLoader's sampler, with their positions in the epoch.

    There are three kinds of samplers. One of single samples that has `seek(position)` is asked to
    start there. One with a length is listed at the start of an epoch. Any other may be endless:
    its batches are drawn one by one, and those before the start are thrown away. `set_epoch` is
    called on a sampler that has it. A sampler with `state_dict` is part of the checkpoint.

    Args:
        loader: The DataLoader, for its data set.
        sampler: Of batches; None: the samples one by one, in order.
        seed: Of the order, together with the epoch.
    """

    def __init__(self, loader: DataLoader, sampler: Any, seed: int) -> None:
        # None: the loader has batch_size=None, and paddle takes the samples one by one, in order
        # (paddle/io/reader.py, DataLoader.__init__).
        self.sampler = BatchSampler(loader.dataset) if sampler is None else sampler
        self._inner: Any = getattr(self.sampler, "sampler", None)  # of single samples
        self._dataset = loader.dataset
        self._seed = seed
        # The sampler, or that of single samples, if it has a state; None: neither has.
        self.stateful = next(filter(state_setter, (self.sampler, self._inner)), None)
        self._begun: tuple[int, Any] | None = None  # an epoch, and the sampler's state before it
        self._listing: tuple[int, list[Any]] | None = None  # an epoch, and its batches or samples
        self.length: int | None = None  # batches in an epoch; None: the sampler does not know
        # The length of a WeightedRandomSampler fails if its weights are a list:
        # paddle/io/dataloader/sampler.py, WeightedRandomSampler.__len__.
        with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
            self.length = len(self.sampler)
        self.kind = self._find_kind()

    @property
    def num_read(self) -> int | None:
        """How many samples of the data set all ranks read in an epoch; None: unknown."""
        sampler = self.sampler
        if self.length is None:
            return None
        if _is_like(DistributedBatchSampler, sampler, "__iter__", "__len__"):
            whole, ranks = len(sampler.dataset), sampler.nranks
        elif _is_like(BatchSampler, sampler, "__iter__", "__len__"):
            whole, ranks = len(self._inner), 1
        else:
            return None
        return int(min(whole, self.length * sampler.batch_size * ranks))  # less with drop_last

    @property
    def is_read_once(self) -> bool:
        """Whether the sampler is an iterator, or draws from one: asking it would use it up."""
        parts = (self.sampler, self._inner, getattr(self._inner, "generator", None))
        return any(isinstance(part, Iterator) for part in parts)

    def _find_kind(self) -> str:
        if type(self.sampler) is BatchSampler:
            if type(self._inner) is SequenceSampler:
                return "in order"
            if type(self._inner) is RandomSampler and self._inner.generator is None:
                return "shuffled"
        return "own"

    def batches(self, epoch: int, position: int = 0) -> Iterator[IndexBatch]:
        """Returns the batches of an epoch from a position on.

        Args:
            epoch: From 1.
            position: Samples of the epoch that are left out.
        """
        sampler = self.sampler
        inner = self._inner
        self._go_to_start(epoch)
        for listener in (sampler, inner):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)
        seed = rng.derive(self._seed, rng.ORDER, epoch)
        if hasattr(inner, "seek") and type(sampler) is BatchSampler:
            inner.seek(position)
            return numbered(seeded(sampler, seed), position, before=position)
        if self.length is None:
            return numbered(seeded(sampler, seed), position)
        if type(sampler) is BatchSampler:  # cut from one list: millions of lists cost seconds
            return _cut(self._listed(epoch, seed, inner), sampler, position)
        return numbered(self._listed(epoch, seed, sampler), position)

    def head(self) -> tuple[int | None, int | None]:
        """Returns a checksum of the first batches of epoch 1, and their number if these are all.

        Both are None if the sampler can be read only once, or cannot be read yet.
        """
        if self.is_read_once:
            return None, None
        try:
            batches = [batch.indices for batch in self.ask(_HEAD)]
        except Exception:  # the sampler may need an object that setup makes later
            return None, None
        count = len(batches) if len(batches) < _HEAD else None
        return zlib.crc32(repr(batches).encode()), count

    def ask(self, count: int) -> list[IndexBatch]:
        """Returns the first batches of epoch 1, and leaves the sampler as it was.

        A run on one rank does not ask, so the counters, lists and generators of the sampler must
        not change: else its samples would depend on the number of ranks.
        """
        order = copy.copy(self)
        order.length = None  # then it is not listed
        with unmoved(self.stateful), left_as_it_was([self.sampler, self._inner], self._dataset):
            return [*itertools.islice(order.batches(1), count)]

    def _go_to_start(self, epoch: int) -> None:
        # The order of a sampler with a state depends on that state, so the state before the epoch
        # is kept: the same epoch may be opened again, after a resume or to fill a round.
        if self.stateful is None:
            return
        if self._begun is not None and self._begun[0] == epoch:
            state_setter(self.stateful)(self._begun[1])
        else:
            self._begun = (epoch, copy.deepcopy(self.stateful.state_dict()))

    def _listed(self, epoch: int, seed: int, sampler: Iterable[Any]) -> Sequence[Any]:
        if self.kind == "in order":  # there may be more than a list can hold
            return range(len(self._inner))
        if self._listing is None or self._listing[0] != epoch:
            rng.seed_all(seed)
            self._listing = (epoch, list(sampler))
        return self._listing[1]

    def checksum(self) -> int | None:
        """Returns a checksum of the order that was listed for this epoch; None if none was.

        It covers a sample: two orders that a generator draws differ nearly everywhere.
        """
        if self._listing is None:
            return None
        listed = self._listing[1]
        return zlib.crc32(repr(listed[:: max(len(listed) // 1000, 1)]).encode())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler, or else the order that it has listed.

        The order is left out if (seed, epoch) determine it, or if it is too long.
        """
        if self.stateful is not None:
            return {"begun": self._begun, "now": self.stateful.state_dict()}
        is_of_epoch = _is_like(DistributedBatchSampler, self.sampler, "__iter__", "set_epoch")
        is_known = self.kind != "own" or is_of_epoch
        if is_known or self._listing is None or len(self._listing[1]) > _MOST_LISTED:
            return {}
        return {"listing": [*self._listing]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        if "listing" in state:
            epoch, listed = state["listing"]
            self._listing = (epoch, listed)
        if "begun" in state and self.stateful is not None:
            self._begun = state["begun"]
            self._listing = None  # it came from another state
            state_setter(self.stateful)(state["now"])


def is_distributed(sampler: Any) -> bool:
    """Returns whether a sampler gives each rank its part by paddle's DistributedBatchSampler."""
    return _is_like(DistributedBatchSampler, sampler, "__iter__")


def undistributed(sampler: DistributedBatchSampler, *, shuffle: bool = False) -> BatchSampler:
    """Returns a sampler that gives each sample of a distributed sampler once, on every rank.

    Args:
        sampler: The distributed one.
        shuffle: Give them in a random order.
    """
    return BatchSampler(
        sampler.dataset,
        shuffle=shuffle,
        batch_size=sampler.batch_size,
        drop_last=sampler.drop_last,
    )


def _is_like(base: type, value: Any, *methods: str) -> bool:
    """Returns whether a value is of a class, and has these methods from it, not overridden."""
    own = type(value)
    return isinstance(value, base) and all(getattr(own, m) is getattr(base, m) for m in methods)


@contextlib.contextmanager
def left_as_it_was(owners: Sequence[Any], data: Any = None) -> Iterator[None]:
    """Restores the attributes of objects at the end of the block, and removes new ones.

    Args:
        owners: The objects. Restored are numbers, texts, generators, small arrays, and lists of
            numbers.
        data: An attribute that is left alone: the data set.
    """
    nodes = [Node(owner) for owner in owners if has_attributes(owner)]
    values = [value for node in nodes for value in node.places().values() if value is not data]
    before = Rollback([*nodes, *(WholeNode(value) for value in values if _may_move(value))])
    try:
        yield
    finally:
        before.restore()


def _may_move(value: Any) -> bool:
    if isinstance(value, list):
        return not value or isinstance(value[0], (int, float, np.generic))
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _MOST_KEPT_BYTES
    return is_small or isinstance(value, GENERATORS)


@contextlib.contextmanager
def undrawn(owner: Any) -> Iterator[None]:
    """Restores the generators among the attributes of an object at the end of the block."""
    found = [value for value in attributes_of(owner).values() if isinstance(value, GENERATORS)]
    states = [generator_state(generator) for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            set_generator_state(generator, state)


def numbered(batches: Iterable[Any], position: int = 0, *, before: int = 0) -> Iterator[IndexBatch]:
    """Yields batches with their positions.

    Args:
        batches: Lists of indices.
        position: The first position that is yielded; it may lie within a batch.
        before: The position at which the first of `batches` begins.
    """
    for indices in batches:
        end = before + len(indices)
        if end > position:
            if before < position:
                indices = indices[position - before :]
                before = position
            yield IndexBatch(before, indices, end)
        before = end


def _cut(samples: Sequence[Any], sampler: Any, start: int) -> Iterator[IndexBatch]:
    """Yields the batches that paddle's BatchSampler makes of samples, from a position on."""
    size = sampler.batch_size
    end = len(samples) - (len(samples) - start) % size if sampler.drop_last else len(samples)
    for first in range(start, end, size):
        yield IndexBatch(first, [*samples[first : first + size]], min(first + size, end))


def seeded(iterable: Iterable[Any], seed: int, number: int = 0) -> Iterator[Any]:
    """Yields the items of an iterable; each is made with random numbers of (seed, its number).

    Args:
        iterable: `iter` of it is called at the first item.
        seed: Of the random numbers.
        number: That of the first item.
    """
    iterator: Iterator[Any] | None = None
    for item_number in itertools.count(number):
        rng.seed_all(rng.derive(seed, item_number))
        if iterator is None:
            with forking():  # a DataLoader with a way of its own may start workers
                iterator = iter(iterable)
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def unmoved(stateful: Any) -> contextlib.ExitStack:
    """Restores the state of an object, unless it is None, at the end of the block."""
    stack = contextlib.ExitStack()
    if stateful is not None:
        stack.callback(state_setter(stateful), copy.deepcopy(stateful.state_dict()))
    return stack
