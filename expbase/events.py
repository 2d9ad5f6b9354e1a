"""The events of an experiment: methods to override, and listeners beside them.

Each event is a method that does nothing here, with the whole experiment at hand. It fires on every
rank, at the place that DESIGN's order gives it; an override that wants the behaviour of its bases
calls `super()`. An event that nobody overrides or listens to costs nothing in the training loop.

    class Experiment(ExperimentBase):
        def on_train_epoch_end(self): ...             # an event, overridden

        @on("on_train_batch_end", every=100)
        def show_samples(self): ...                   # a listener, any number of them

The method runs first, then the listeners, base classes first, in the order of their definition.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from expbase.config import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


class Events:
    """Every point at which an experiment can act, in the order in which they come."""

    _listeners: ClassVar[dict[str, tuple[ListenerSpec, ...]]] = {}  # by the name of the method

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._listeners = _listeners_of(cls)

    # Setup

    def on_setup_begin(self) -> None:
        """Before setup_dataloader; device, output directory, logger and seed stand."""

    def on_setup_end(self) -> None:
        """After everything was built and checked; the state is not back yet."""

    # Sanity check

    def on_sanity_check_begin(self) -> None:
        """Before the sanity check, once per start, if training.sanity_batches asks for it.

        The check calls valid() alone: on_evaluate_begin does not come, and evaluate is not called.
        What it did to the state, to plain data on self and to VisualDL is undone; files that it
        wrote stay.
        """

    def on_sanity_check_end(self, results: Mapping[str, float]) -> None:
        """After the sanity check.

        Args:
            results: What valid() returned on rank 0 for the first batches.
        """

    # Training

    def on_train_begin(self) -> None:
        """Once per start, after the state was restored, before the first batch.

        Runs under random states of its own: training does not feel what it draws.
        """

    def on_train_end(self) -> None:
        """Once per start, after the last batch, also after a failure, if on_train_begin came.

        `self.finished` tells whether training came to its end. It may not come if the process is
        killed after its last checkpoint; `terminal` comes then at the next start.
        """

    def on_train_epoch_begin(self) -> None:
        """At the start of a pass; not again when a run is resumed within one."""

    def on_train_epoch_end(self) -> None:
        """When the pass is used up, after the validation and before the save of its iteration."""

    def on_fetch_data_begin(self) -> None:
        """Before a training batch is fetched, in read_batch."""

    def on_fetch_data_end(self) -> None:
        """After it was fetched."""

    def on_train_batch_begin(self, batch: Any, indices: Sequence[int] | None) -> None:
        """With every training batch; changes made in place reach train_batch.

        Args:
            batch: What read_batch is about to return.
            indices: Where its samples stand in the data set, if the loader has indices.
        """

    def on_before_backward(self, loss: Any) -> None:
        """In backward(loss), with each micro-batch.

        Args:
            loss: As it was given, neither divided nor scaled.
        """

    def on_after_backward(self) -> None:
        """In backward(loss); among several ranks the gradients are averaged with the last one."""

    def on_before_optimizers_step(self) -> None:
        """In step_optimizers, once per call; gradients are unscaled and may be changed.

        `self.stepping` holds the optimizers.
        """

    def on_after_optimizers_step(self) -> None:
        """In step_optimizers; the gradients are still there."""

    def on_before_zero_grad(self) -> None:
        """In step_optimizers, before the gradients are cleared."""

    def on_after_zero_grad(self) -> None:
        """In step_optimizers, after the gradients were cleared."""

    def on_train_batch_end(self) -> None:
        """After each train_batch: the update is done; whatever it left on self can be read."""

    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Every log_interval iterations, with the numbers that go into the line.

        Args:
            metrics: By full name, `train/loss`; what is changed or added is written.
        """

    # Evaluation

    def on_evaluate_begin(self) -> None:
        """Before valid(); the models are in eval mode."""

    def on_evaluate_end(self, results: Mapping[str, float]) -> None:
        """After valid(); the models are still in eval mode.

        Args:
            results: What valid() returned on rank 0; what is changed or added counts and is
                written, so do the same on every rank.
        """

    def on_predict_begin(self) -> None:
        """Before the first batch of predict; the models are in eval mode."""

    def on_predict_batch_end(self, outputs: Any) -> None:
        """After each predict_batch.

        Args:
            outputs: What it returned.
        """

    def on_predict_end(self, results: Sequence[Any]) -> None:
        """After the results of all ranks were put together.

        Args:
            results: One per sample, in the order of the data.
        """

    # State

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Before a checkpoint is written, under random states of its own.

        Returns:
            Values of your own that come back to on_load_checkpoint: numbers, texts, lists,
            mappings, arrays and tensors.
        """
        return None

    def on_load_checkpoint(self, states: Mapping[str, Any]) -> None:
        """After everything else was restored, under random states of its own.

        Args:
            states: What on_save_checkpoint returned; empty if nothing.
        """

    def on_save_model(self) -> None:
        """Before save_model writes its file."""

    def on_load_model(self) -> None:
        """Before load_model reads its file."""

    # Failure

    def on_exception(self, exception: BaseException) -> None:
        """After an exception in training, which goes on its way afterwards.

        Args:
            exception: The original one. What is raised here is logged and hides nothing.
        """


EVENTS = tuple(name for name in vars(Events) if name.startswith("on_"))

# What fires with every batch that is read; the loop asks once whether anybody hears one of them.
BATCH_EVENTS = frozenset({"on_fetch_data_begin", "on_fetch_data_end", "on_train_batch_begin"})
# What fires in a helper of the training step alone: a step that is written by hand has none.
HELPER_EVENTS = {
    "backward": ("on_before_backward", "on_after_backward"),
    "step_optimizers": (
        *("on_before_optimizers_step", "on_after_optimizers_step"),
        *("on_before_zero_grad", "on_after_zero_grad"),
    ),
}
# Once per start, before the counters are back or after they were saved.
_UNCOUNTED = ("on_setup_begin", "on_setup_end", "on_train_end", "on_exception")
_MARKS = "_expbase_marks"  # the attribute of a marked method


@dataclass(frozen=True)
class ListenerSpec:
    """What `on` was asked for."""

    event: str
    every: int | None = None
    once: int | None = None
    filter_fn: Callable[[Filter, Any], bool] | None = None


def on(
    event: str,
    *,
    every: int | None = None,
    once: int | None = None,
    filter_fn: Callable[[Filter, Any], bool] | None = None,
) -> Callable[[F], F]:
    """Marks a method as a listener: it is called when the event comes, with the same arguments.

    A subclass that overrides the method overrides the listener, marked again or not. What a
    listener counts is part of the checkpoint.

    Args:
        event: The name of a method of Events.
        every: At every n-th time that the event comes.
        once: At the n-th time alone.
        filter_fn: Called with the Filter and the experiment; tells whether to act.

    Raises:
        ValueError: There is no such event, or the filters contradict each other.
        TypeError: filter_fn cannot be called, or no plain method is marked.

    Source: fastNLP's `Trainer.on` and `Filter` (seed 003).
    """
    if event not in EVENTS:
        raise ValueError(f"@on: {event!r} is no event.{_nearest(event)}")
    filters = {"every": every, "once": once, "filter_fn": filter_fn}
    given = [name for name, value in filters.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"@on({event!r}): {' and '.join(given)} given; expected one of them.")
    if given and event in _UNCOUNTED:
        raise ValueError(
            f"@on({event!r}): {given[0]} given; expected none: it comes once per start, where no "
            "checkpoint counts it."
        )
    for name, number in (("every", every), ("once", once)):
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(
                f"@on({event!r}): {name}={number!r} given; expected a whole number from 1 on."
            )
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"@on({event!r}): filter_fn={filter_fn!r} given; expected a function of the filter "
            "and the experiment."
        )

    def mark(method: F) -> F:
        if not inspect.isfunction(method):
            raise TypeError(f"@on({event!r}): marks {method!r}; expected a plain method.")
        marks = (ListenerSpec(event, every, once, filter_fn), *getattr(method, _MARKS, ()))
        setattr(method, _MARKS, marks)
        return method

    return mark


class Filter:
    """Whether a listener acts, this time.

    Attributes:
        num_called: How often its event came, this time included.
        num_executed: How often the listener acted.
    """

    def __init__(self, mark: ListenerSpec) -> None:
        self.num_called = 0
        self.num_executed = 0
        self._mark = mark

    def passes(self, experiment: Any) -> bool:
        """Counts one coming of the event; tells whether the listener acts."""
        self.num_called += 1
        acts = self._acts(experiment)
        self.num_executed += acts
        return acts

    def _acts(self, experiment: Any) -> bool:
        mark = self._mark
        if mark.every is not None:
            return self.num_called % mark.every == 0
        if mark.once is not None:
            return self.num_called == mark.once
        return mark.filter_fn is None or bool(mark.filter_fn(self, experiment))


class Handlers:
    """Whoever hears the events of one experiment: its own methods, then its listeners.

    Args:
        experiment: Whose.

    Attributes:
        heard: The events that are overridden or listened to.
    """

    def __init__(self, experiment: Events) -> None:
        self._exp = experiment
        self._listeners: dict[str, list[tuple[str, Filter]]] = {}
        self._counted: dict[str, Filter] = {}  # those with a filter, by a name for the checkpoint
        for method, marks in type(experiment)._listeners.items():
            for mark in marks:
                filter_ = Filter(mark)
                self._listeners.setdefault(mark.event, []).append((method, filter_))
                if mark != ListenerSpec(mark.event):
                    self._counted[_free(f"{method}:{mark.event}", self._counted)] = filter_
        self.heard = frozenset(event for event in EVENTS if self.subscribers(event))

    def fire(self, event: str, *args: Any) -> Any:
        """Has everybody hear the event.

        Returns:
            What the overridden method gave.
        """
        given = getattr(self._exp, event)(*args)
        for method, filter_ in self._listeners.get(event, ()):
            self._hear(method, filter_, args)
        return given

    def each(self, event: str, *args: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What `fire` would call, with names, for a caller that goes on when one fails."""
        yield event, lambda: getattr(self._exp, event)(*args)
        for method, filter_ in self._listeners.get(event, ()):
            yield method, functools.partial(self._hear, method, filter_, args)

    def subscribers(self, event: str) -> list[str]:
        """The names of the methods that hear an event."""
        own = getattr(type(self._exp), event) is not getattr(Events, event)
        return [event] * own + [method for method, _ in self._listeners.get(event, ())]

    def _hear(self, method: str, filter_: Filter, args: tuple[Any, ...]) -> None:
        if not filter_.passes(self._exp):
            return
        returned = getattr(self._exp, method)(*args)
        if returned is not None:
            raise TypeError(
                f"{type(self._exp).__name__}.{method}: a listener returned {returned!r}, which "
                "goes nowhere; expected None. Override the event's method to return something."
            )

    def counters(self) -> dict[str, list[int]]:
        """How often each filter was called and passed, for a checkpoint."""
        return {n: [f.num_called, f.num_executed] for n, f in self._counted.items()}

    def restore(self, counters: Mapping[str, Sequence[int]]) -> list[str]:
        """Puts back what `counters` gave.

        Returns:
            What differs, in words: a listener that came or went begins at 0 or is forgotten.
        """
        for name, filter_ in self._counted.items():
            if name in counters:
                filter_.num_called, filter_.num_executed = counters[name]
        names = sorted(counters.keys() ^ self._counted.keys())
        return [f"the listener {name} stands on one side only" for name in names]


def _listeners_of(cls: type) -> dict[str, tuple[ListenerSpec, ...]]:
    """The marked methods of a class and its bases, base classes first.

    Raises:
        TypeError: A method's name is nearly that of an event, or a listener cannot be called.
    """
    marks: dict[str, tuple[ListenerSpec, ...]] = {}
    owners: dict[str, type] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            own = getattr(value, _MARKS, ()) if inspect.isfunction(value) else ()
            if name in owners and not issubclass(base, owners[name]):
                raise TypeError(
                    f"{cls.__name__}: the listener {owners[name].__name__}.{name} would be hidden "
                    f"by {base.__name__}.{name}. Give one of them another name."
                )
            if own:
                _check_listener(f"{base.__name__}.{name}", name, value, own)
                marks[name], owners[name] = own, base
            elif name in marks and value is None:  # switched off
                del marks[name]
            elif name not in marks and inspect.isfunction(value):
                _check_name(f"{base.__name__}.{name}", name)
    return marks


def _check_name(place: str, name: str) -> None:
    if name.startswith("on_") and name not in EVENTS:
        raise TypeError(
            f"{place}: is no event, so nothing would call it.{_nearest(name)} A listener is marked "
            "by @on; another method needs a name that does not begin with on_."
        )


def _check_listener(place: str, name: str, method: Any, marks: Sequence[ListenerSpec]) -> None:
    if name in EVENTS:
        raise TypeError(
            f"{place}: is an event itself, and called when it comes; expected another name for a "
            "listener."
        )
    for mark in marks:
        expected = inspect.signature(getattr(Events, mark.event))
        try:
            inspect.signature(method).bind(*expected.parameters)
        except TypeError:
            raise TypeError(
                f"{place}: takes {inspect.signature(method)}; expected {expected}, as "
                f"{mark.event} gives."
            ) from None


def _nearest(name: str) -> str:
    return did_you_mean(name, EVENTS, cutoff=0.6)


def _free(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:  # two filters on one method and event
        name += "'"
    return name
