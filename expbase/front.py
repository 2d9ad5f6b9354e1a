"""Mixins that a tool puts in front of every experiment class: the one way into a user's class.

What a mixin does is what a subclass could do; nothing is patched, and no script has to be changed.

    with put_in_front(Verified):
        runpy.run_path("train.py")      # each experiment that it makes has the mixin
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_mixins: list[type] = []  # the outermost one first


@contextlib.contextmanager
def put_in_front(mixin: type) -> Iterator[None]:
    """Makes experiments in the block with a mixin of ExperimentBase in front of their class.

    The processes of `--nprocs` import it by its name.
    """
    _mixins.insert(0, mixin)
    try:
        yield
    finally:
        _mixins.remove(mixin)


def in_front() -> tuple[type, ...]:
    """Returns the mixins of now, the outermost one first, for the start of other processes."""
    return tuple(_mixins)


def set_in_front(mixins: Sequence[type]) -> None:
    """Puts mixins in front in a process that was just started."""
    _mixins[:] = mixins


def is_trial() -> bool:
    """Returns whether a mixin wants all to happen once: what is done every 100th time, too."""
    return any(getattr(mixin, "is_trial", False) for mixin in _mixins)


def with_mixins(experiment: type[T]) -> type[T]:
    """Returns the class with the mixins in front of it, under the same name."""
    if not _mixins:
        return experiment
    bases = (*_mixins, experiment)
    return type(experiment.__name__, bases, {"__module__": experiment.__module__})
