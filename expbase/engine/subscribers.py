"""Calls the events of one experiment: the overridden methods, then the listeners, then the guests.

    events = Subscribers(experiment, warn)
    events.fire("on_train_batch_end")
    leave = events.listen("on_train_batch_end", look)     # a guest: it changes nothing

Which events there are, and how a class subscribes to them: events.py. A guest is told of moments,
too, that are no events: `Internals.listen` has them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from expbase.base.checkpoint_part import Part
from expbase.base.errors import TypeMistake
from expbase.events import CALLED_BY, Events, Filter, acts_at, heard_by, listeners_of, own_classes


class Subscribers(Part):
    """What is called at the events of one experiment.

    Args:
        experiment: Its methods are called, and the listeners of its class.
        warn: Called with a line about a guest that has failed.
    """

    def __init__(self, experiment: Events, warn: Callable[[str], object]) -> None:
        self._experiment = experiment
        self._warn = warn
        self._guests: dict[str, list[Callable[..., object]]] = {}  # by event, or by moment
        self._explain: list[Callable[[BaseException], object]] = []
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
        """Calls the method, the listeners and the guests; returns what the method returned."""
        is_heard = event in self.subscribed
        if not is_heard and event not in self._guests:
            return None
        self.waiting.discard(event)
        returned = [call() for _, call in self.each(event, *args)]
        return returned[0] if is_heard else None

    def each(self, event: str, *args: Any) -> list[tuple[str, Callable[[], Any]]]:
        """Returns the calls that `fire` makes, with names, for a caller that continues when one
        fails.
        """
        calls: list[tuple[str, Callable[[], Any]]] = []
        if event in self.subscribed:
            calls = [(event, functools.partial(getattr(self._experiment, event), *args))]
        calls += [
            (method, functools.partial(self._call_listener, method, filter_, args))
            for method, filter_ in self._listeners.get(event, ())
        ]
        guests = [*self._guests.get(event, ())]
        return calls + [(event, functools.partial(self._call_guest, g, args)) for g in guests]

    # --- guests --------------------------------------------------------------------------

    def listen(self, event: str, function: Callable[..., object]) -> Callable[[], None]:
        """Calls a function at an event or a moment, last; returns what ends that."""
        self._guests.setdefault(event, []).append(function)

        def leave() -> None:
            guests = self._guests.get(event, [])
            if function in guests:
                guests.remove(function)
            if not guests:  # so that firing costs what it cost before
                self._guests.pop(event, None)

        return leave

    def explain(self, function: Callable[[BaseException], object]) -> None:
        """Asks a function, before an error is logged, to add a note to it."""
        self._explain.append(function)

    def add_notes(self, error: BaseException) -> None:
        """Calls what may add a note to an error that has ended the run."""
        for function in self._explain:
            self._call_guest(function, (error,))

    def _call_guest(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception as error:
            name = getattr(function, "__module__", function)
            self._warn(f"{name}: {error!r}, which has no effect on training")

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
