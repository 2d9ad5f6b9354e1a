"""Loaders that a training script reads by hand: paddle's thread makes their batches.

That thread draws from the generators of numpy and Python while training draws from them, so runs of
one seed differ, without a kill; and nobody knows the position. While it makes batches it is among
the threads of the process, and it knows its loader's iterator.

    by_hand = LoadersByHand(experiment)
    by_hand.watch()                                      # before the first update
    for text in by_hand.look(has_validated=False): ...    # after each of the first updates
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from paddle.io import DataLoader
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterBase

from expbase.data import workers

_WRAPPERS = (zip, enumerate, map, filter, list, tuple)


class LoadersByHand:
    """Names what is read by hand, after an update.

    Args:
        experiment: Its attributes are looked at.
    """

    def __init__(self, experiment: Any) -> None:
        self._owner = experiment
        self._made_before: weakref.WeakSet[Any] = weakref.WeakSet()  # perhaps for a picture
        self._named: set[str] = set()

    def watch(self) -> None:
        """Begins to watch, before the first update."""
        self._made_before.update(_in_threads())

    def look(self, *, has_validated: bool) -> Iterator[str]:
        """Yields a line for each loader that is read, once.

        Args:
            has_validated: A loop over a loader that was left early may be that of a validation.
        """
        attributes = vars(self._owner)
        kept = {id(i): f"self.{name}" for name, value in attributes.items() for i in _in(value)}
        found = [*kept.values()]
        if not has_validated and _is_read_by_us(attributes.get("train_loader")):
            others = (i for i in _in_threads() if id(i) not in kept and i not in self._made_before)
            found += map(self._name_of, others)
        for name in found:
            if name not in self._named:
                self._named.add(name)
                yield (
                    f"{name} is read by hand: paddle's thread makes its batches beside training, "
                    "so runs of one seed differ if they draw, and its position is in no "
                    "checkpoint. Expected self.read_batch() of self.train_loader; for another data "
                    "set see docs/recipes/two_loaders.py."
                )

    def _name_of(self, iterator: Any) -> str:
        """Returns the attribute that is the loader of an iterator; else its data set's class."""
        data = vars(iterator).get("_dataset")
        for name, value in vars(self._owner).items():
            if isinstance(value, DataLoader) and value.dataset is data:
                return f"self.{name}"
        return f"a DataLoader of {type(data).__name__}"


def _is_read_by_us(loader: Any) -> bool:
    """Returns whether nothing but a loop of the user's own makes an iterator of paddle's."""
    is_paddles = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return loader is None or isinstance(loader, list) or is_paddles


def _in_threads() -> Iterator[Any]:
    """Yields the iterators of loaders that make batches now, without those of expbase's own."""
    for thread in threading.enumerate():
        iterator = getattr(getattr(thread, "_target", None), "__self__", None)
        is_paddles = isinstance(iterator, _DataLoaderIterBase)
        if is_paddles and type(vars(iterator).get("_dataset")).__module__ != workers.__name__:
            yield iterator


def _in(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yields the iterators of loaders in a value: itself, or in a zip() or a short list of them."""
    if isinstance(value, _DataLoaderIterBase):
        yield value
    elif depth and isinstance(value, _WRAPPERS) and len(parts := gc.get_referents(value)) < 10:
        for part in parts:
            yield from _in(part, depth - 1)
