"""The order of the samples, and the batches that are cut from it.

It is a function of (seed, epoch), whatever was drawn or read before. Only indices are handled
here: nothing is loaded, and the ranks do not matter yet.

    order = BatchOrder(loader, seed=0)            # a DataLoader over a data set with indices
    for position, indices, end in order.batches(epoch=3, place=Place(170)): ...
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle.base import core
from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    RandomSampler,
    SequenceSampler,
)

from expbase.ranks.processes import forking, remove_left_files
from expbase.state import rng
from expbase.state.objects import state_setter

# The position of a batch's first sample in its epoch, from 0, the indices of its samples, and the
# position behind it; with several ranks, behind the batches that all of them read together.
Numbered = tuple[int, Any, int]

# What an order of samples depends on beside the epoch, as JSON values: its kind, the number of
# samples, and more. Equal keys are the same order.
Key = list[Any]
LISTED = ("shuffled", "distributed")  # kinds whose samples are known by the key alone
_HEAD = 1 << 14  # samples of an order by which the ranks are compared


@dataclass(frozen=True)
class Place:
    """Where all ranks together are in an epoch."""

    position: int = 0  # samples taken of it
    batches: int = 0  # of one rank, that these amount to
    # The order of the epoch, if the sampler of now would make another one: a shuffled one depends
    # on the seed, that of a DistributedBatchSampler on the number of ranks.
    key: Key | None = None


START = Place()


class BatchOrder:
    """The batches of a DataLoader's sampler, with their positions in the epoch.

    There are three kinds of samplers. One with `seek(position)` is asked to start at a position.
    One with a length is listed at the start of an epoch. Any other may be endless: its batches
    are drawn one by one, and those before the start are thrown away. `set_epoch` is called on a
    sampler that has it. A sampler with `state_dict` is part of the checkpoint.
    """

    def __init__(self, loader: DataLoader, seed: int, world_size: int = 1) -> None:
        self._dataset = loader.dataset
        self._sampler = loader.batch_sampler
        self._inner: Any = getattr(self._sampler, "sampler", None)  # of single samples
        self._seed = seed
        # The one of the two that has a state; None: neither has.
        self.stateful = next(filter(state_setter, (self._sampler, self._inner)), None)
        self._begun: tuple[int, Any] | None = None  # an epoch, and the sampler's state before it
        self._listing: tuple[int, list[Any]] | None = None  # an epoch, and what was listed for it
        self.length: int | None = None  # batches in an epoch; None: the sampler does not know
        # Paddle's WeightedRandomSampler has a length only for some weights.
        with contextlib.suppress(TypeError, AttributeError, NotImplementedError):
            self.length = len(self._dataset if self._sampler is None else self._sampler)
        self.num_samples = len(self._dataset) if hasattr(self._dataset, "__len__") else None
        size = 1 if self._sampler is None else getattr(self._sampler, "batch_size", None)
        self.batch_size: int | None = size
        self.key = self._find_key(world_size)

    def _find_key(self, world_size: int) -> Key:
        sampler, inner = self._sampler, self._inner
        cuts = type(sampler) is BatchSampler  # then the order does not depend on the batch size
        if sampler is None:
            return ["ready batches", self.num_samples]
        if cuts and type(inner) is SequenceSampler:
            return ["in order", len(inner)]
        if cuts and type(inner) is RandomSampler:
            size = len(inner.data_source)
            if not inner.replacement and inner.generator is None and inner.num_samples == size:
                return ["shuffled", size, self._seed]
        if type(sampler) is DistributedBatchSampler and sampler.nranks == world_size:
            size = len(sampler.dataset)
            return ["distributed", size, sampler.shuffle, sampler.total_size]
        return ["own", self.num_samples]

    def batches(self, epoch: int, place: Place = START) -> Iterator[Numbered]:
        """The batches of an epoch (counted from 1), from a place on."""
        sampler, inner, size, start = self._sampler, self._inner, self.batch_size, place.position
        if place.key:
            return _cut(_samples(place.key, epoch), sampler, start)
        if sampler is None:  # batch_size=None: paddle takes the samples one by one, in order
            return ((number, number, number + 1) for number in range(start, len(self._dataset)))
        self._go_to_start(epoch)
        for listener in (sampler, inner):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)
        seed = rng.derive(self._seed, rng.ORDER, epoch)
        drawn = Seeded(sampler, seed)
        if hasattr(sampler, "seek") and size:
            sampler.seek(start // size)
            return numbered(drawn, start, before=start - start % size)
        if hasattr(inner, "seek") and type(sampler) is BatchSampler:
            inner.seek(start)
            return numbered(drawn, start, before=start)
        if self.length is None:
            return numbered(drawn, start)
        if type(sampler) is BatchSampler:  # cut from one list: millions of lists cost seconds
            return _cut(self._listed(epoch, seed, inner), sampler, start)
        return numbered(self._listed(epoch, seed, sampler), start)

    def head(self) -> tuple[int | None, int | None]:
        """A checksum of the first samples of epoch 1, and the number of batches if these are all.

        None of a sampler that can be read only once, or not yet.
        """
        if isinstance(self._sampler, Iterator) or isinstance(self._inner, Iterator):
            return None, None
        samples: list[str] = []
        count: int | None = 0
        order = copy.copy(self)
        order.length = None  # then it is not listed
        try:
            with unmoved(self.stateful):
                for count, (_, indices, _) in enumerate(order.batches(1), 1):
                    if len(samples) >= _HEAD:
                        count = None
                        break
                    samples += map(repr, indices)
        except Exception:  # it may need what a later step makes
            return None, None
        return zlib.crc32(" ".join(samples).encode()), count

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
        if self.key[0] == "in order":  # there may be more than a list can hold
            return range(self.key[1])
        if self._listing is None or self._listing[0] != epoch:
            rng.seed_cpu(seed)
            self._listing = (epoch, list(sampler))
        return self._listing[1]

    def checksum(self) -> int | None:
        """Of the order that a sampler of the user's has given for this epoch; None: no list of it.

        Of some places in it: two orders that a generator draws differ nearly everywhere.
        """
        if self._listing is None or self.key[0] != "own":
            return None
        listed = self._listing[1]
        return zlib.crc32(repr(listed[:: max(len(listed) // 1000, 1)]).encode())

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler; empty if it has none."""
        if self.stateful is None:
            return {}
        return {"begun": self._begun, "now": self.stateful.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        if state and self.stateful is not None:
            self._begun = state["begun"]
            self._listing = None  # it came from another state
            state_setter(self.stateful)(state["now"])


def numbered(batches: Iterable[Any], position: int = 0, *, before: int = 0) -> Iterator[Numbered]:
    """Batches with their positions, from a position on, which may be within one of them.

    The first of `batches`, which are lists of indices, begins at `before`.
    """
    for indices in batches:
        end = before + len(indices)
        if end > position:
            if before < position:
                indices, before = indices[position - before :], position
            yield before, indices, end
        before = end


def _cut(samples: Sequence[Any], sampler: Any, start: int) -> Iterator[Numbered]:
    """The batches that paddle's samplers make of samples, from a position on."""
    size = sampler.batch_size
    end = len(samples) - (len(samples) - start) % size if sampler.drop_last else len(samples)
    return ((i, [*samples[i : i + size]], min(i + size, end)) for i in range(start, end, size))


def _samples(key: Key, epoch: int) -> list[int]:
    """All samples of an epoch of an order that its key tells, with those that paddle adds."""
    kind, size, *rest = key
    if kind == "shuffled":
        rng.seed_cpu(rng.derive(rest[0], rng.ORDER, epoch))
        return [*RandomSampler(range(size))]
    is_shuffled, padded = rest
    # One rank whose one batch is the epoch; in round i rank r has batch i * ranks + r of it.
    sampler = DistributedBatchSampler(range(padded), padded, 1, 0, shuffle=is_shuffled)
    sampler.set_epoch(epoch)
    return [place % size for place in next(iter(sampler))]


def end_by_kill(iterator: Any) -> None:
    """Makes multiprocessing end paddle's workers by SIGKILL at exit: they survive its SIGTERM."""
    for worker in getattr(iterator, "_workers", ()):
        worker._popen.terminate = functools.partial(_kill, worker.pid, id(iterator))


def _kill(pid: int, iterator: int) -> None:
    # Else paddle raises an error for a worker that was killed.
    core._erase_process_pids(iterator)  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)


def end_workers(iterator: Any) -> None:
    """Ends the workers of paddle's iterator, and what they made and nobody has taken."""
    iterator._try_shutdown_all(1)
    for worker in iterator._workers:
        worker.kill()  # that one is still busy
        worker.join()
    remove_left_files()


class Seeded:
    """Iterates with random numbers of (seed, number of the item), from a number on.

    `iter` is called at the first item. Workers end with it.
    """

    def __init__(self, iterable: Iterable[Any], seed: int, number: int = 0) -> None:
        self._iterable = iterable
        self._batches: Iterator[Any] | None = None
        self._seed = seed
        self._number = number

    def __del__(self) -> None:
        if hasattr(self._batches, "_workers"):  # a thread of paddle's holds it: its own never runs
            end_workers(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        rng.seed_cpu(rng.derive(self._seed, self._number))
        self._number += 1
        try:
            if self._batches is None:
                with forking():  # a DataLoader starts its workers now
                    self._batches = iter(self._iterable)
                end_by_kill(self._batches)
            return next(self._batches)
        except StopIteration:
            self._batches = iter(())  # paddle's own fail when they are asked once more
            raise


def unmoved(stateful: Any) -> contextlib.ExitStack:
    """Puts the state of an object, unless it is None, back when the block ends."""
    stack = contextlib.ExitStack()
    if stateful is not None:
        stack.callback(state_setter(stateful), copy.deepcopy(stateful.state_dict()))
    return stack
