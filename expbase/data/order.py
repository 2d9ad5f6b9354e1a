"""The order of the batches: which samples make the n-th batch of an epoch.

It is a function of (seed, epoch), whatever was drawn or read before. Only indices are handled
here: nothing is loaded, and the ranks do not matter yet.

    order = BatchOrder(loader, seed=0)            # a DataLoader over a data set with indices
    for number, indices in order.batches(epoch=3, start=17): ...
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paddle.io import BatchSampler, DataLoader

from expbase.processes import forking
from expbase.state import rng

# The number of a batch in its epoch, from 0, and the indices of its samples.
Numbered = tuple[int, Any]


class BatchOrder:
    """The batches of a DataLoader's sampler, numbered in each epoch.

    There are three kinds of samplers. One with `seek(position)` is asked to start at a position.
    One with a length is listed at the start of an epoch. Any other may be endless: its batches
    are drawn one by one, and those before the start are thrown away. `set_epoch` is called on a
    sampler that has it. A sampler with `state_dict` is part of the checkpoint.
    """

    def __init__(self, loader: DataLoader, seed: int) -> None:
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

    def batches(self, epoch: int, start: int = 0) -> Iterator[Numbered]:
        """The batches of an epoch (counted from 1), from the batch `start` (from 0) on."""
        sampler = self._sampler
        if sampler is None:  # batch_size=None: paddle takes the samples one by one, in order
            return enumerate(range(start, len(self._dataset)), start)
        self._go_to_start(epoch)
        for listener in (sampler, self._inner):
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)
        seed = rng.derive(self._seed, rng.ORDER, epoch)
        if self._seek(start):
            return enumerate(Isolated(seed, sampler), start)
        if self.length is None:
            return itertools.islice(enumerate(Isolated(seed, sampler)), start, None)
        if type(sampler) is BatchSampler:  # cut from one list: millions of lists cost seconds
            return _cut(self._listed(epoch, seed, self._inner), sampler, start)
        return itertools.islice(enumerate(self._listed(epoch, seed, sampler)), start, None)

    def _go_to_start(self, epoch: int) -> None:
        # The order of a sampler with a state depends on that state, so the state before the epoch
        # is kept: the same epoch may be opened again, after a resume or to fill a round.
        if self.stateful is None:
            return
        if self._begun is not None and self._begun[0] == epoch:
            state_setter(self.stateful)(self._begun[1])
        else:
            self._begun = (epoch, copy.deepcopy(self.stateful.state_dict()))

    def _seek(self, start: int) -> bool:
        """Makes the sampler start at a batch; false if it does not know how to."""
        if hasattr(self._sampler, "seek"):
            self._sampler.seek(start)
        elif hasattr(self._inner, "seek") and type(self._sampler) is BatchSampler:
            self._inner.seek(start * self._sampler.batch_size)
        else:
            return False
        return True

    def _listed(self, epoch: int, seed: int, sampler: Iterable[Any]) -> list[Any]:
        if self._listing is None or self._listing[0] != epoch:
            with rng.isolated(seed):
                self._listing = (epoch, list(sampler))
        return self._listing[1]

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


def _cut(indices: list[Any], sampler: BatchSampler, start: int) -> Iterator[Numbered]:
    """The batches that paddle's BatchSampler makes of these indices."""
    size = sampler.batch_size * sampler._acc_steps
    end = len(indices) - len(indices) % size if sampler.drop_last else len(indices)
    places = range(start * size, end, size)
    return enumerate((indices[place : place + size] for place in places), start)


class Isolated:
    """Iterates under random states of its own, which continue from item to item.

    Neither does the iterable see what training draws in between, nor training what it draws. The
    seed is for the states at the first item, and `iter` is called there.
    """

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
                with forking():  # a DataLoader starts its workers now
                    self._iterator = iter(self._iterable)
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(())  # paddle's own iterators fail when they are asked once more
            raise
        finally:
            self._inside = rng.snapshot()
            rng.reset(outside)

    def random_states(self) -> dict[str, Any]:
        """Its random states, as values that JSON can hold."""
        with rng.isolated():
            rng.reset(self._inside)
            return rng.RandomStates().state_dict()

    def set_random_states(self, states: dict[str, Any]) -> None:
        """Restores what `random_states` returned."""
        with rng.isolated():
            rng.RandomStates().load_state_dict(states)
            self._inside = rng.snapshot()


def state_setter(candidate: Any) -> Any:
    """The method that loads a state, by either of its names; None if there is no state to save."""
    if not hasattr(candidate, "state_dict"):
        return None
    return getattr(candidate, "set_state_dict", None) or getattr(candidate, "load_state_dict", None)


@contextlib.contextmanager
def unmoved(stateful: Any) -> Iterator[None]:
    """Puts the state of an object, unless it is None, back when the block ends."""
    with contextlib.ExitStack() as stack:
        if stateful is not None:
            stack.callback(state_setter(stateful), copy.deepcopy(stateful.state_dict()))
        yield
