"""The events of an experiment: methods to override, and listeners beside them.

Each is called on every rank, as docs/events.md shows: the overridden method first,
then the listeners, those of base classes first, in the order of their definition. An event without
an override or a listener costs nothing.

    def on_train_epoch_end(self): ...                # an event, overridden

    @on("on_train_batch_end", every=100)             # a listener; any number of them
    def show_samples(self): ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from expbase.config import did_you_mean
from expbase.front import is_trial

F = TypeVar("F", bound=Callable[..., Any])


class Events:
    """Every point at which an experiment can act, in the order of a run."""

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        events = {name for name in vars(Events) if not name.startswith("_")}
        _check_siblings(cls, {*events, "default_config", "close", *_listeners_of(cls)})
        # What help() and notebooks show: without this the words of __new__, which takes any.
        cls.__signature__ = inspect.signature(functools.partial(cls.__init__, None))

    # Setup

    def prepare(self) -> None:
        """The first thing in setup: downloads, environment."""

    def on_setup_begin(self) -> None:
        """Before setup_dataloader; device, output directory, logger and seed are set up."""

    def startup(self) -> None:
        """After setup_model: fills parameters, sets the iteration to count from."""

    def on_setup_end(self) -> None:
        """After everything was built and checked; the state is not restored yet."""

    # Training

    def on_train_begin(self) -> None:
        """Once per start, with the state restored, and random numbers of its own."""

    def on_train_end(self) -> None:
        """Once per start, after a failure too; `self.finished`: whether the end was reached."""

    def on_train_epoch_begin(self) -> None:
        """At the start of an epoch; not again when a run is resumed within one."""

    def on_train_epoch_end(self) -> None:
        """When an epoch is used up, after a validation by iterations and before one by epochs."""

    def on_fetch_data_begin(self) -> None:
        """Before a training batch is fetched, in read_batch."""

    def on_fetch_data_end(self) -> None:
        """After it was fetched."""

    def on_train_batch_begin(self, batch: Any, indices: Sequence[int] | None) -> None:
        """Before read_batch returns a batch, which may be changed in place.

        `indices` are those of its samples in the data set, None if the loader has none.
        """

    def on_before_backward(self, loss: Any) -> None:
        """In backward(loss), for each micro-batch; the loss is neither divided nor scaled yet."""

    def on_after_backward(self) -> None:
        """In backward(loss); the last micro-batch averages the gradients over the ranks."""

    def on_before_optimizers_step(self) -> None:
        """In step_optimizers, for those in `self.stepping`; unscaled gradients may be changed."""

    def on_after_optimizers_step(self) -> None:
        """In step_optimizers; the gradients are still there."""

    def on_before_zero_grad(self) -> None:
        """In step_optimizers, before the gradients are cleared."""

    def on_after_zero_grad(self) -> None:
        """In step_optimizers, after the gradients were cleared."""

    def on_train_batch_end(self) -> None:
        """After each train_batch: the update is done; attributes that it set can be read."""

    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Before the metrics, by full name, are written; they may be changed, and others added."""

    # Evaluation

    def on_evaluate_begin(self) -> None:
        """Before valid(), in eval mode; `self.evaluated_loader` is what it will read."""

    def on_valid_batch_end(self, batch: Any, indices: Sequence[int] | None) -> None:
        """When a loop over valid_batches() is done with a batch; ranks may have unequal numbers.

        `indices` are as in on_train_batch_begin. Not after a batch at which the loop was left.
        """

    def on_evaluate_end(self, results: Mapping[str, float]) -> None:
        """After valid(), in eval mode; `results` is what it returned on rank 0.

        Changes to it count and are written, so make the same ones on every rank.
        `self.evaluated_loader` is what it was about.
        """

    def on_predict_begin(self) -> None:
        """Before the first batch of predict (a mixin); the models are in eval mode."""

    def on_predict_batch_end(self, outputs: Any) -> None:
        """After each predict_batch, with what it returned."""

    def on_predict_end(self, results: Sequence[Any]) -> None:
        """After predict; the results of all ranks, one per sample, in the order of the data."""

    # State

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Before a checkpoint is written.

        Returns:
            Values of your own for on_load_checkpoint: numbers, texts, lists, mappings, arrays
            and tensors.
        """
        return None

    def on_load_checkpoint(self, states: Mapping[str, Any]) -> None:
        """After everything else was restored, with what on_save_checkpoint returned, or {}."""

    def on_checkpoint_written(self, path: Path) -> None:
        """On rank 0, when a checkpoint is on the disk; it is not deleted before this returns.

        Training waits for it, so copy links and send them in a thread. What needs all ranks is an
        error here.
        """

    def on_save_model(self) -> None:
        """Before save_model writes its file."""

    def on_load_model(self) -> None:
        """Before load_model reads its file."""

    def on_exception(self, exception: BaseException) -> None:
        """After an exception in training, before it is raised on; one from here is only logged.

        After a stop by a signal, too: with a KeyboardInterrupt for Ctrl-C, else a SystemExit with
        the exit code; the state is saved all the same.
        """

    def terminal(self) -> None:
        """The final step of a start, once, also after a failure. Signals wait for it."""


EVENTS = tuple(name for name in vars(Events) if name.startswith("on_"))

_OURS = (__name__, "expbase.experiment")  # where the methods of every experiment are
_SPECS = "_expbase_listener_specs"  # the attribute of a marked method


@dataclasses.dataclass(eq=False)
class Filter:
    """The condition of one `on`: decides whether its listener acts, and counts."""

    event: str
    filter_fn: Callable[[Filter, Any], bool] | None  # None: it acts every time
    num_called: int = 0  # how often its event happened, this time included
    num_executed: int = 0  # how often the listener acted so far

    def is_tried(self) -> bool:
        """Returns whether it acts because it never has: --smoke is too short for every hundredth
        time.
        """
        return self.num_executed == 0 and is_trial()

    def passes(self, experiment: Any) -> bool:
        """Counts the event once more; returns whether the listener acts."""
        self.num_called += 1
        acts = self.filter_fn is None or bool(self.filter_fn(self, experiment))
        self.num_executed += acts
        return acts


def on(
    event: str,
    *,
    every: int | None = None,
    once: int | None = None,
    filter_fn: Callable[[Filter, Any], bool] | None = None,
) -> Callable[[F], F]:
    """Marks a method as a listener: it is called at the event, with the event's arguments.

    A subclass that overrides the method overrides the listener, marked again or not. The counters
    of a listener are part of the checkpoint.

    Args:
        event: The name of a method of Events.
        every: Act at every n-th time that the event happens.
        once: Act at the n-th time only.
        filter_fn: Called with the Filter and the experiment; returns whether to act.

    Raises:
        ValueError: There is no such event, or the filters contradict each other.

    Source: fastNLP's `Trainer.on` and `Filter` (seed 003).
    """
    _check_on(event, {"every": every, "once": once, "filter_fn": filter_fn})
    if every is not None:
        filter_fn = lambda filter_, _: filter_.num_called % every == 0 or filter_.is_tried()  # noqa: E731
    if once is not None:
        filter_fn = lambda filter_, _: filter_.num_called == once or filter_.is_tried()  # noqa: E731
    spec = Filter(event, filter_fn)

    def mark(method: F) -> F:
        setattr(method, _SPECS, (spec, *getattr(method, _SPECS, ())))
        return method

    return mark


def _check_on(event: str, conditions: Mapping[str, Any]) -> None:
    if event not in EVENTS:
        raise ValueError(f"@on: {event!r} is no event.{_did_you_mean(event)}")
    given = {name: value for name, value in conditions.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"@on({event!r}): {' and '.join(given)} given; expected one of them.")
    for name, value in given.items():
        if name != "filter_fn" and (type(value) is not int or value < 1):
            raise ValueError(
                f"@on({event!r}): {name}={value!r} given; expected a whole number from 1 on."
            )


class Subscribers:
    """The methods that are called at the events of one experiment."""

    def __init__(self, experiment: Events) -> None:
        self._experiment = experiment
        self._listeners: dict[str, list[tuple[str, Filter]]] = {}
        self._counted: dict[str, Filter] = {}  # those with a filter, by their name in a checkpoint
        for method, specs in _listeners_of(type(experiment)).items():
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

    def fire(self, event: str, *args: Any) -> Any:
        """Calls the event's method and its listeners; returns what the method returned."""
        if event not in self.subscribed:
            return None
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
            raise TypeError(
                f"{type(self._experiment).__name__}.{method}: a listener returned {returned!r}; "
                "expected None. Override the event's method to return something."
            )

    def state_dict(self) -> dict[str, list[int]]:
        """Returns the counters of each filter: how often its event happened, how often it acted."""
        return {n: [f.num_called, f.num_executed] for n, f in self._counted.items()}

    def problems(self, state: Any) -> list[str]:
        """Returns none."""
        return []

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> list[str]:
        """Restores the counters; a listener that is new begins to count."""
        for name, filter_ in self._counted.items():
            if name in state:
                filter_.num_called, filter_.num_executed = state[name]
        return []


# Events of other libraries, by a part of their names: ours, or what is here instead of them.
_INSTEAD = {
    "sanity_check": "--smoke is that check: it tries a whole run, with all events.",
    "trainer_initialized": "It is 'on_setup_end' here.",
}
# In the words of Lightning, Keras and transformers a name would be more like another event.
_SAME_WORDS = {
    "_start": "_begin", "validation_epoch": "evaluate", "validation": "evaluate",
    "test_epoch": "evaluate", "on_test_batch": "on_valid_batch", "on_test": "on_evaluate",
    "evaluate_batch": "valid_batch", "on_init": "on_setup", "on_fit": "on_train",
    "on_step": "on_train_batch", "on_batch": "on_train_batch",
}  # fmt: skip


def _did_you_mean(name: str) -> str:
    for part, instead in _INSTEAD.items():
        if part in name:
            return f" {instead}"
    for theirs, ours in _SAME_WORDS.items():
        name = name.replace(theirs, ours)
    return did_you_mean(name, EVENTS)


def heard_by(cls: type) -> set[str]:
    """Returns the events that a class overrides or has a listener of."""
    overridden = {name for name in EVENTS if getattr(cls, name) is not getattr(Events, name)}
    return overridden | {spec.event for specs in _listeners_of(cls).values() for spec in specs}


def own_classes(cls: type) -> list[type]:
    """Returns what a class is derived from, with itself, but for what is expbase's."""
    return [base for base in cls.__mro__ if not base.__module__.startswith("expbase.")]


def _listeners_of(cls: type) -> dict[str, tuple[Filter, ...]]:
    """Returns the marked methods of a class and its bases, base classes first, checked."""
    listeners: dict[str, tuple[Filter, ...]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            specs = getattr(value, _SPECS, ()) if inspect.isfunction(value) else ()
            if specs:
                listeners[name] = specs
            elif name in listeners and value is None:  # switched off
                del listeners[name]
            elif name not in listeners and inspect.isfunction(value):
                _check_method(f"{base.__name__}.{name}", name)
    return listeners


def _check_siblings(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError if a method of a base is lost: one before it, of a class that does not
    derive from that base, does not call super(). A class may replace what it derives from.
    """
    for name in sorted(names):
        owners = [base for base in cls.__mro__ if name in vars(base)]
        for number, owner in enumerate(owners):
            called = _names_in(vars(owner)[name])
            if "super" in called:
                continue
            if name in called:  # by the names of the bases
                break
            after = [other for other in owners[number + 1 :] if other.__module__ not in _OURS]
            lost = [other for other in after if not issubclass(owner, other)]
            if lost:
                raise TypeError(
                    f"{cls.__name__}: {lost[0].__name__}.{name} would never be called, because "
                    f"{owner.__name__}.{name} comes before it and does not call super().{name}(); "
                    f"expected it to, or a {name} of {cls.__name__} that calls both."
                )
            break


def _names_in(method: Any) -> set[str]:
    """Returns the names that a method uses, and those that a decorator of it wraps."""
    if method is None:  # a listener that is switched off
        return set()
    names: set[str] = set()
    functions = [inspect.unwrap(getattr(method, "__func__", method))]  # of a classmethod
    for function in functions:  # which grows
        if not inspect.isfunction(function):
            return {"super"}  # a partial, say: nobody knows what it calls
        names |= {*function.__code__.co_names}
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty yet
                content = cell.cell_contents
                if inspect.isfunction(content) and content not in functions:
                    functions.append(content)
    return names


def _check_method(full_name: str, name: str) -> None:
    if name.startswith("on_") and name not in EVENTS:
        raise TypeError(
            f"{full_name}: is no event, so nothing would call it.{_did_you_mean(name)} "
            "Mark a listener with @on; give another method a name that does not begin with on_."
        )
