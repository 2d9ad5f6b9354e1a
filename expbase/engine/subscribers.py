"""Calls the events of one experiment: the overridden methods, then the listeners.

    events = Subscribers(experiment)
    events.fire("on_train_batch_end")

Which events there are, and how a class subscribes to them: events.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from expbase.base.errors import TypeMistake
from expbase.base.part import Part
from expbase.events import CALLED_BY, Events, Filter, acts_at, heard_by, listeners_of, own_classes


class Subscribers(Part):
    """The methods that are called at the events of one experiment."""

    def __init__(self, experiment: Events) -> None:
        self._experiment = experiment
        self._listeners: dict[str, list[tuple[str, Filter]]] = {}
        self._counted: dict[str, Filter] = {}  # those with a filter, by their name in a checkpoint
        for method, specs in listeners_of(type(experiment)).items():
            for spec in specs:
                filter_ = dataclasses.replace(spec)  # each experiment counts for itself
                self._listeners.setdefault(spec.event, []).append((method, filter_))
                # When rank 0 has heard of a checkpoint depends on the disk, so that is no state.
                if spec.filter_fn is not None and spec.event != "on_checkpoint_written":
                    name = f"{method}:{spec.event}"
                    while name in self._counted:  # two filters on one method and event
                        name += "'"
                    self._counted[name] = filter_
        self.subscribed = heard_by(type(experiment))
        # At what the user's classes act, and has not come, since a helper calls it.
        self.waiting = {e for base in own_classes(type(experiment)) for e in acts_at(base)}
        self.waiting &= CALLED_BY.keys()

    def fire(self, event: str, *args: Any) -> Any:
        """Calls the event's method and its listeners; returns what the method returned."""
        if event not in self.subscribed:
            return None
        self.waiting.discard(event)
        returned = [call() for _, call in self.each(event, *args)]
        return returned[0]

    def each(self, event: str, *args: Any) -> list[tuple[str, Callable[[], Any]]]:
        """Returns the calls that `fire` makes, with names, for a caller that continues when one
        fails.
        """
        overridden = functools.partial(getattr(self._experiment, event), *args)
        listeners = [
            (method, functools.partial(self._call_listener, method, filter_, args))
            for method, filter_ in self._listeners.get(event, ())
        ]
        return [(event, overridden), *listeners]

    def _call_listener(self, method: str, filter_: Filter, args: tuple[Any, ...]) -> None:
        if not filter_.passes(self._experiment):
            return
        returned = getattr(self._experiment, method)(*args)
        if returned is not None:
            raise TypeMistake(
                f"{type(self._experiment).__name__}.{method}: a listener returned {returned!r}; "
                "expected None. Override the event's method to return something."
            )

    def state_dict(self) -> dict[str, list[int]]:
        """Returns the counters of each filter: how often its event happened, how often it acted."""
        return {n: [f.num_called, f.num_executed] for n, f in self._counted.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> list[str]:
        """Restores the counters; a listener that is new begins to count."""
        for name, filter_ in self._counted.items():
            if name in state:
                filter_.num_called, filter_.num_executed = state[name]
        return []
