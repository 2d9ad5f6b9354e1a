"""The events of an experiment: methods to override, and listeners beside them.

The overridden method is called first, then the listeners, those of base classes first, in the order
of their definition. An event without an override or a listener costs nothing. A class has the
events that its bases in expbase declare: Events, and mixins with more of them (`events_of`).

    def on_train_epoch_end(self): ...                # an event, overridden

    @on("on_train_batch_end", every=100)             # a listener; any number of them
    def show_samples(self): ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from expbase.base.any_object import definer, module_of
from expbase.base.did_you_mean import did_you_mean, nearest
from expbase.base.errors import TypeMistake, ValueMistake
from expbase.mixins_in_front import is_trial

F = TypeVar("F", bound=Callable[..., Any])


class Events:
    """The points at which every experiment can act. Override a method; `on_…` may be listened to.

    In setup: prepare first, startup after setup_model. Then on_load_checkpoint if there is a
    checkpoint, and on_train_begin. An epoch begins with on_train_epoch_begin; an update has
    on_train_batch_begin, in step_optimizers on_before_optimizers_step, and on_train_batch_end.
    What is due after it follows in this order: on_log, on_save_checkpoint, on_evaluate_end,
    on_train_epoch_end; then a validation of the epoch. on_train_end and terminal are last, and
    after a failure or a signal in training on_exception comes before them. All are called on every
    rank, but for on_checkpoint_written, and on_exception where one rank alone fails.

    With the mixin AllEvents come on_setup_begin, on_setup_end, on_fetch_data_begin,
    on_fetch_data_end, on_batch_read, on_before_backward, on_after_backward,
    on_after_optimizers_step, on_before_zero_grad, on_after_zero_grad, on_evaluate_begin,
    on_valid_batch_end, on_save_model and on_load_model; with Prediction on_predict_begin,
    on_predict_batch_end and on_predict_end.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        listeners = listeners_of(cls)
        _check_overrides(cls, listeners)
        methods = {name for name in vars(Events) if not name.startswith("_")} | {*events_of(cls)}
        _check_siblings(cls, {*methods, "default_config", "close", *listeners})
        # What help() and notebooks show: without this the words of __new__, which takes any.
        cls.__signature__ = inspect.signature(functools.partial(cls.__init__, None))

    # Setup

    def prepare(self) -> None:
        """The first thing in setup: downloads, the environment."""

    def startup(self) -> None:
        """After setup_model: fills parameters, sets the iteration and the epoch to count from."""

    # Training

    def on_train_begin(self) -> None:
        """Once per start, with the state restored, and random numbers of its own."""

    def on_train_end(self) -> None:
        """Once per start, after a failure, too; `self.finished`: whether the end was reached."""

    def on_train_epoch_begin(self) -> None:
        """At the start of an epoch; not again when a run is resumed within one."""

    def on_train_epoch_end(self) -> None:
        """When an epoch is used up, after a validation by iterations and before one by epochs."""

    def on_train_batch_begin(self) -> None:
        """Once per update, right before train_batch; no batch is read yet.

        `self.iteration` is the number of the update, and its random numbers are set.
        """

    def on_before_optimizers_step(self) -> None:
        """In step_optimizers, before the step; gradients are unscaled and may be changed.

        `self.internals.stepping` has the optimizers that step.

            paddle.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        """

    def on_train_batch_end(self) -> None:
        """Once per update, right after train_batch; what it has set on self can be read."""

    def on_log(self, metrics: Mapping[str, float]) -> None:
        """Before a line of metrics is written.

        Args:
            metrics: By full name, `train/loss`. They may be changed, and others added.
        """

    # Evaluation

    def on_evaluate_end(self, results: Mapping[str, float]) -> None:
        """After valid, still in eval mode.

            precision, recall = results["precision"], results["recall"]
            results["f1"] = 2 * precision * recall / (precision + recall)

        Args:
            results: The means over all ranks of what was logged, and what valid returned on rank 0.
                Changes to them count and are written, so make the same ones on every rank.
        """

    # State

    def on_save_checkpoint(self) -> Mapping[str, Any] | None:
        """Before the state is captured: for a checkpoint, or for the copy before a validation.

        Returns:
            Values of your own for on_load_checkpoint: numbers, texts, lists, mappings, arrays
            and tensors. None is {}.
        """
        return None

    def on_load_checkpoint(self, states: Mapping[str, Any]) -> None:
        """After everything else was restored.

        Args:
            states: What on_save_checkpoint has returned, or {}.
        """

    def on_checkpoint_written(self, path: Path) -> None:
        """On rank 0, when a checkpoint is on the disk; it is not deleted before this returns.

        Training waits for it, so copy links and send them in a thread. What needs all ranks is an
        error here.

        Args:
            path: The directory of the checkpoint.
        """

    def on_exception(self, exception: BaseException) -> None:
        """After an exception in training, before it is raised on; one from here is only logged.

        After a stop by a signal, too; the state is saved all the same.

        Args:
            exception: What was raised; a KeyboardInterrupt for Ctrl-C, for another signal a
                SystemExit with its exit code.
        """

    def terminal(self) -> None:
        """The final step of a start, once, also after a failure. Signals wait for it."""


EVENTS = tuple(name for name in vars(Events) if name.startswith("on_"))  # of every experiment
_ALL = "expbase.extras.all_events.AllEvents"
# Those that mixins declare, by their names: the core does not import the mixins.
OF_MIXINS = {
    **dict.fromkeys(
        (
            "on_setup_begin", "on_setup_end", "on_fetch_data_begin", "on_fetch_data_end",
            "on_batch_read", "on_before_backward", "on_after_backward",
            "on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad",
            "on_evaluate_begin", "on_valid_batch_end", "on_save_model", "on_load_model",
        ),
        _ALL,
    ),
    **dict.fromkeys(
        ("on_predict_begin", "on_predict_batch_end", "on_predict_end"),
        "expbase.extras.prediction.Prediction",
    ),
}  # fmt: skip

# The helper for train_batch that calls an event; who steps by hand calls none.
CALLED_BY = {
    **dict.fromkeys(("on_before_backward", "on_after_backward"), "backward"),
    **dict.fromkeys(
        (
            "on_before_optimizers_step", "on_after_optimizers_step",
            "on_before_zero_grad", "on_after_zero_grad",
        ),
        "step_optimizers",
    ),
}  # fmt: skip


def events_of(cls: type) -> dict[str, Any]:
    """Returns the events of a class, with the methods that declare them.

    They are what the classes of expbase among its bases define as `on_…`.
    """
    declared: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if module_of(base).startswith("expbase."):
            for name, value in vars(base).items():
                if name.startswith("on_"):
                    declared.setdefault(name, value)
    return declared


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
        event: The name of an event of the class.
        every: Act at every n-th time that the event happens.
        once: Act at the n-th time only.
        filter_fn: Called with the Filter and the experiment; returns whether to act.

    Returns:
        A decorator that returns the method.

    Raises:
        ValueError: There is no such event, or the filters contradict each other. Where a mixin of
            the event is missing, the class is a TypeError.

    Source: fastNLP's `Trainer.on` and `Filter`.
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
    if event not in (*EVENTS, *OF_MIXINS):
        raise ValueMistake(f"@on: {event!r} is no event.{_did_you_mean(event)}")
    given = {name: value for name, value in conditions.items() if value is not None}
    if len(given) > 1:
        raise ValueMistake(f"@on({event!r}): {' and '.join(given)} given; expected one of them.")
    for name, value in given.items():
        if name != "filter_fn" and (type(value) is not int or value < 1):
            raise ValueMistake(
                f"@on({event!r}): {name}={value!r} given; expected a whole number from 1 on."
            )


# Events of other libraries, by a part of their names: ours, or what is here instead of them.
_INSTEAD = {
    "sanity_check": "--smoke is that check: it tries a whole run, with all events.",
    "trainer_initialized": "It is 'on_setup_end' here, of AllEvents.",
}
# In the words of Lightning, Keras and transformers a name would be more like another event.
_SAME_WORDS = {
    "_start": "_begin", "validation_epoch": "evaluate", "validation": "evaluate",
    "test_epoch": "evaluate", "on_test_batch": "on_valid_batch", "on_test": "on_evaluate",
    "evaluate_batch": "valid_batch", "on_init": "on_setup", "on_fit": "on_train",
    "on_step": "on_train_batch", "on_batch": "on_train_batch", "on_load_data_end": "on_batch_read",
}  # fmt: skip


def _did_you_mean(name: str) -> str:
    for part, instead in _INSTEAD.items():
        if part in name:
            return f" {instead}"
    for theirs, ours in _SAME_WORDS.items():
        name = name.replace(theirs, ours)
    known = (*EVENTS, *OF_MIXINS)
    of_mixin = [near for near in nearest(name, known) if near in OF_MIXINS]
    return did_you_mean(name, known) + "".join(f" {comes_with(near)}" for near in of_mixin)


def comes_with(event: str, cls: str = "Experiment") -> str:
    """Returns a sentence that says how a class gets an event of a mixin."""
    path = OF_MIXINS[event]
    return f"It comes with {path.rpartition('.')[2]}: {inheriting(path, cls)}"


def inheriting(path: str, cls: str) -> str:
    """Returns what to write so that a class has a mixin, `expbase.extras.mixins.EarlyStopping`."""
    module, _, mixin = path.rpartition(".")
    return f"`from {module} import {mixin}`, and `class {cls}({mixin}, ExperimentBase)`."


def heard_by(cls: type) -> set[str]:
    """Returns the events that a class overrides or has a listener of."""
    declared = events_of(cls)
    overridden = {name for name, ours in declared.items() if getattr(cls, name) is not ours}
    return overridden | {spec.event for specs in listeners_of(cls).values() for spec in specs}


def acts_at(cls: type) -> Iterator[str]:
    """Yields the events that a class overrides or has a listener of, and names of other things."""
    for name, value in vars(cls).items():
        yield name
        yield from (spec.event for spec in getattr(value, _SPECS, ()))


def own_classes(cls: type) -> list[type]:
    """Returns a class and its base classes, but for those of expbase."""
    return [base for base in cls.__mro__ if not module_of(base).startswith("expbase.")]


def own_methods(cls: type) -> dict[str, Any]:
    """Returns the methods that a user has written, by name; those of a base if not overridden."""
    values = {name: v for base in reversed(own_classes(cls)) for name, v in vars(base).items()}
    plain = {n: v.__func__ if isinstance(v, staticmethod) else v for n, v in values.items()}
    return {name: value for name, value in plain.items() if inspect.isfunction(value)}


def listeners_of(cls: type) -> dict[str, tuple[Filter, ...]]:
    """Returns the marked methods of a class and its bases, base classes first, checked."""
    listeners: dict[str, tuple[Filter, ...]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            specs = getattr(value, _SPECS, ()) if inspect.isfunction(value) else ()
            if specs:
                listeners[name] = specs
            elif name in listeners and value is None:  # switched off
                del listeners[name]
    declared = events_of(cls)
    for name, specs in listeners.items():
        for spec in specs:
            if spec.event not in declared:
                raise TypeMistake(
                    f"{definer(cls, name).__name__}.{name}: {cls.__name__} has no event "
                    f"{spec.event!r}. {comes_with(spec.event, cls.__name__)}"
                )
            _check_takes(cls, name, spec.event, declared)
    return listeners


def _check_overrides(cls: type, listeners: Mapping[str, Any]) -> None:
    """Raises a TypeError if a method is named like an event, and would not be called as one."""
    declared = events_of(cls)
    for name in {name for base in own_classes(cls) for name in vars(base)} - {*listeners}:
        owner = definer(cls, name)
        if not name.startswith("on_") or not inspect.isfunction(vars(owner)[name]):
            continue
        if name in declared:
            _check_takes(cls, name, name, declared)
            continue
        if name in OF_MIXINS:
            raise TypeMistake(
                f"{owner.__name__}.{name}: nothing would call it, since {cls.__name__} lacks its "
                f"mixin. {comes_with(name, cls.__name__)}"
            )
        raise TypeMistake(
            f"{owner.__name__}.{name}: is no event, so nothing would call it.{_did_you_mean(name)} "
            "Mark a listener with @on; give another method a name that does not begin with on_."
        )


def _check_takes(cls: type, name: str, event: str, declared: Mapping[str, Any]) -> None:
    """Raises a TypeError if a method cannot be called as an event is."""
    method = getattr(cls, name)
    expected = inspect.signature(declared[event])
    try:
        inspect.signature(method).bind(*expected.parameters)
    except TypeError:
        text = f"cannot be called as {event} is; expected the arguments {expected}."
        if event == "on_train_batch_begin":
            text += (
                " It comes once per update, before train_batch. With each batch that is read comes "
                f"on_batch_read(batch, indices). {comes_with('on_batch_read', cls.__name__)} Or "
                "override read_batch, which returns the batch."
            )
        raise TypeMistake(f"{definer(cls, name).__name__}.{name}: {text}") from None


def _check_siblings(cls: type, names: Iterable[str]) -> None:
    """Raises a TypeError if a method of a base is lost: one before it, of a class that does not
    derive from that base, does not call super(). A class may replace what it derives from.
    """
    declared = events_of(cls)
    for name in sorted(names):
        owners = [base for base in cls.__mro__ if name in vars(base)]
        for number, owner in enumerate(owners):
            called = _names_in(vars(owner)[name])
            if "super" in called:
                continue
            if name in called:  # by the names of the bases
                break
            after = [other for other in owners[number + 1 :] if module_of(other) not in _OURS]
            after = [other for other in after if vars(other)[name] is not declared.get(name)]
            lost = [other for other in after if not issubclass(owner, other)]
            if lost:
                raise TypeMistake(
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
