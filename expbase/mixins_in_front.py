"""Mixins that stand in front of an experiment class: the one way round a user's methods.

What a mixin does is what a subclass could do; nothing is patched, and no script has to be changed.
A tool puts one in front of every experiment of a process:

    with put_in_front(Verified):
        runpy.run_path("train.py")      # each experiment that it makes has the mixin

A mixin of a user's class names what is to stand in front of that class, so that it surrounds what
the class overrides, or behind it, next to ExperimentBase (extras/all_events.py):

    class AllEvents(ExperimentBase):
        stands_in_front = Surrounding
        stands_behind = Between
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_WITHIN = "_within"  # of a class that is made here: the class that the mixins are round
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
    """Returns the class with the mixins round it, under the same name; the tools' are outermost."""
    front = (*_mixins, *_named_by(experiment, "stands_in_front"))
    behind = _named_by(experiment, "stands_behind")
    bases: list[Any] = [*front, experiment, *behind]
    # A copy of an experiment is made by its class, which has them already.
    bases = [base for base in bases if base is experiment or base not in experiment.__mro__]
    return experiment if len(bases) == 1 else _made(tuple(bases), bases.index(experiment))


@functools.lru_cache  # what an experiment notes on type(self) is there for the next one
def _made(bases: tuple[type, ...], place: int) -> Any:
    """Returns a class of these bases, of which the one at a place is the user's."""
    experiment = bases[place]
    names = {name: getattr(experiment, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(experiment.__name__, bases, {**names, _WITHIN: experiment})


def users_class(experiment: type) -> Any:
    """Returns the class that a user has written, without the mixins that stand round it."""
    return vars(experiment).get(_WITHIN, experiment)


def _named_by(experiment: type, name: str) -> tuple[type, ...]:
    return tuple(vars(base)[name] for base in experiment.__mro__ if name in vars(base))
