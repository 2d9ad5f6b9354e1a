"""Checks of the user's class, before and while an experiment of it is made: what it lacks or hides.

check_class(experiment, ExperimentBase, training, evaluates=False)
check_attribute(ExperimentBase, "config", 3)     # an AttributeError, with what to do
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from expbase.base.did_you_mean import did_you_mean
from expbase.base.errors import AttributeMistake, TypeMistake
from expbase.config import ConfigError
from expbase.engine import due
from expbase.events import OF_MIXINS, inheriting


def check_arguments(experiment: type, given: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises a TypeError if `__init__` does not take what the experiment is made with."""
    if sys._getframe(2).f_globals.get("__name__") == "copyreg":  # a copy, which calls no __init__
        return
    try:
        inspect.signature(experiment.__init__).bind(None, *given, **options)  # type: ignore[misc]
    except TypeError as error:
        if not given and not options:
            name = experiment.__name__
            raise TypeMistake(
                f"{name}(): called without a config; expected main({name}), which makes one and "
                f"runs it, or {name}({name}.default_config(), args) with the args of "
                "default_argument_parser().parse_args()."
            ) from None
        raise TypeMistake(
            f"{experiment.__name__}.__init__: {error}; expected `def __init__(self, config, args): "
            "super().__init__(config, args)` or none. A value of your own is a key of "
            "default_config, and what setup_model makes stands on self."
        ) from None


# What the mixins in extras add, by its name. The core does not import them.
_OF_MIXINS = {
    **dict.fromkeys(("predict", "predict_batch"), "expbase.extras.prediction.Prediction"),
    **dict.fromkeys(
        ("early_stopping", "is_better", "begin_count", "stop_when_exhausted"),
        "expbase.extras.mixins.EarlyStopping",
    ),
    **dict.fromkeys(
        ("weight_averages", "begin_averages", "update_averages"),
        "expbase.extras.mixins.ExponentialMovingAverage",
    ),
    "clip_gradients": "expbase.extras.mixins.GradientClipping",
    **OF_MIXINS,
}


def raise_no_attribute(experiment: object, name: str) -> Any:
    """Raises the AttributeError of an experiment that lacks an attribute, with what to do."""
    owner = type(experiment)
    if name in _OF_MIXINS:
        mixin = _OF_MIXINS[name].rpartition(".")[2]
        what = f"It is the mixin {mixin}'s: {inheriting(_OF_MIXINS[name], owner.__name__)}"
    elif name.startswith("_ExperimentBase__"):
        what = "Its __init__ must call super().__init__(config, args) first."
    else:  # Python's own error; of a property, in which another one is missing, that one is named
        return object.__getattribute__(experiment, name)
    text = f"{owner.__name__!r} object has no attribute {name!r}. {what}"
    raise AttributeMistake(text, name=name, obj=experiment)


def need_super(name: str, *, is_done: bool) -> None:
    """Raises a TypeError if an override has not done what the method does."""
    if not is_done:
        raise TypeMistake(f"{name}: does not call super().{name}(); expected it to.")


# What the methods of Parakeet's ExperimentBase set, which somebody may paste as an override.
_SET_BY = {
    "config": "__init__(config, args)",
    "args": "__init__(config, args)",
    "output_dir": "setup_output_dir()",
    "checkpoint_dir": "setup_checkpointer()",
    "logger": "setup_logger()",
}


def check_attribute(base: type, name: str, value: Any) -> None:
    """Raises an AttributeError if an attribute would hide a method, or is only to be read."""
    ours = getattr(base, name, None)
    if isinstance(ours, property) and ours.fset is None:
        raise AttributeMistake(
            f"self.{name}: {value!r:.80} given, and expbase sets it; expected another name"
            + (f", or super().{_SET_BY[name]}, which sets it." if name in _SET_BY else ".")
        )
    # A function may take the place of a method; a layer is called, too, and is none.
    if inspect.isroutine(ours) and (not callable(value) or isinstance(value, paddle.nn.Layer)):
        raise AttributeMistake(
            f"self.{name}: {type(value).__name__} given, which hides the method of that name; "
            "expected another name."
        )


def missing(experiment: type, base: type, methods: Sequence[str]) -> list[str]:
    """Returns which of these methods the class has not written."""
    return [name for name in methods if getattr(experiment, name) is getattr(base, name)]


# What Lightning, PaddleDetection and others call what a user writes.
_ELSEWHERE = {
    "setup_dataloader": ("train_dataloader", "val_dataloader", "build_dataloader"),
    "setup_model": ("configure_optimizers", "build_model"),
    "train_batch": ("training_step", "train_step", "forward_step"),
    "valid": ("validation_step", "eval_step", "test_step"),
}


def _meant(experiment: type, base: type, methods: Sequence[str]) -> str:
    """Returns the end of a message about methods that are missing: names that may mean them."""
    others = [name for name in dir(experiment) if not hasattr(base, name)]
    hints = []
    for name in methods:
        shown = f"{name} by {{}}".format
        theirs = next((other for other in others if other in _ELSEWHERE.get(name, ())), "")
        habit = f" Did you mean {shown(theirs)}?" if theirs else ""
        hints.append(habit or did_you_mean(name, others, otherwise="", shown=shown))
    return "".join(hints)


def check_valid_loader(loader: Any, experiment: type, base: type, training: Any) -> None:
    """Raises a TypeError if there is data to validate with, and no method that does it."""
    lacks = missing(experiment, base, ["valid"])
    if loader is not None and lacks and due.is_wanted(training, "valid"):
        raise TypeMistake(
            f"{experiment.__name__}: self.valid_loader is set, and valid not defined; "
            "expected `def valid(self):` with `for batch in self.valid_batches(): self.log(…)`, or "
            "no self.valid_loader, or training.valid_interval=0."
            f"{_meant(experiment, base, lacks)}"
        )


def check_class(experiment: type, base: type, training: Any, *, evaluates: bool) -> None:
    """Raises if a method is missing, or cannot be called as the base class calls it.

    Raises:
        TypeError: The class is to be changed.
        ConfigError: training.monitor is given, and there is no `valid`.
    """
    required = ["setup_dataloader", "setup_model", "train_batch"]
    if evaluates:
        required += ["valid"]
    if lacks := missing(experiment, base, required):
        raise TypeMistake(
            f"{experiment.__name__}: {', '.join(lacks)} not defined; expected the methods "
            f"{', '.join(required)}.{_meant(experiment, base, lacks)}"
        )
    if training.monitor and missing(experiment, base, ["valid"]):
        raise ConfigError(
            f"training.monitor: {training.monitor!r} given, and {experiment.__name__} has no "
            "method valid, whose metric it is; expected one that logs it, or training.monitor=''."
            f"{_meant(experiment, base, ['valid'])}"
        )
    for name in dir(base):
        ours = getattr(base, name)
        if name.startswith("__") or not inspect.isfunction(ours):
            continue
        # Before a slash, as in log(self, mapping=None, /), even self is positional only.
        given = inspect.signature(ours).parameters.values()
        needed = [p for p in given if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        try:
            inspect.signature(getattr(experiment, name)).bind(*needed)
        except TypeError:
            raise TypeMistake(
                f"{experiment.__name__}.{name}: cannot be called as the method of that name in "
                f"{base.__name__}; expected {inspect.signature(ours)}, or another name."
            ) from None
