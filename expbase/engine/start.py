"""What one start of a run is given, and where it runs: looked at once, and no field is set again.

start = Start.of(type(experiment), ExperimentBase, config, args)
start.training.max_iteration; start.options.fresh; start.writes
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from expbase.base.did_you_mean import did_you_mean
from expbase.base.errors import AttributeMistake, TypeMistake
from expbase.config import Config, ConfigError, defaults_of, fill, fill_in
from expbase.engine import due
from expbase.events import OF_MIXINS, inheriting
from expbase.help_text import check_system
from expbase.mixins_in_front import users_class
from expbase.ranks import collectives
from expbase.record import logs
from expbase.training import check_training, resolved

_NOT_WHEN_LOOKING = ("fresh", "force", "checkpoint_path", "init_model_path", "smoke", "restarts")


@dataclass(frozen=True)
class Options:
    """The options that the template reads; a script may have others, and lack any."""

    output: str | None = None  # as given; None: not at all
    device: str | None = None
    checkpoint_path: str | None = None
    init_model_path: str | None = None
    init_partial: bool = False
    data: Any = None  # the experiment's own; of a script's own option, perhaps no path
    fresh: bool = False
    force: bool = False
    evaluate: Any = None
    export: Any = None
    smoke: bool = False
    advice: bool = True  # whether the doctor looks
    nprocs: int = 1
    restarts: int = 0
    restart_reason: str = ""  # why --restarts makes this start
    supervised_since: float | None = None  # from where the time limit counts, by the clock

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Returns those among the args."""
        names = [field.name for field in dataclasses.fields(cls)]
        there = vars(args)  # to ask the args for `data` is to have read it
        return cls(**{name: there[name] for name in names if name in there})

    @property
    def inspected(self) -> str | None:
        """The checkpoint that --evaluate or --export only look at; None: the run is to train."""
        # "", of a shell variable that is not set, is one that does not exist: nothing must train.
        given = (self.evaluate, self.export)
        return next((str(which) for which in given if which not in (None, False)), None)

    def check(self) -> None:
        """Raises a ConfigError if options exclude each other, or one has no effect."""
        for option in _NOT_WHEN_LOOKING:
            if getattr(self, option) and self.inspected is not None:
                raise ConfigError(
                    f"--{option}: given with --evaluate or --export, which only look at a run."
                )
        if 0 <= self.nprocs != 1 and collectives.world_size() == 1:  # 0: auto
            raise ConfigError(
                "--nprocs: is done by main(Experiment), which this script does not call."
            )


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    config: Config
    args: argparse.Namespace  # as given
    options: Options
    output: str  # as given, with config values filled in
    folder: Path  # where the process was: a library may change it, in setup
    rank: int
    world_size: int
    logger: logging.Logger  # until setup_logger it keeps its lines
    experiment: type
    base: type  # ExperimentBase, whose methods the class may lack
    process: int = dataclasses.field(default_factory=os.getpid)

    @classmethod
    def of(
        cls, experiment: type, base: type, config: Mapping[str, Any], args: argparse.Namespace
    ) -> Start:
        """Returns the start of an experiment that is being made with these.

        Raises:
            TypeError: One of the methods is missing, or cannot be called.
            ConfigError: The config, the args or this version of paddle cannot be used.
        """
        check_platform()
        experiment = users_class(experiment)  # what stands round it has methods that may be missing
        # What mixins add is there, however the config was made.
        completed = fill({**defaults_of(experiment), **config})
        check_training(completed.training)
        options = Options.of(args)
        options.check()
        check_class(experiment, base, completed.training, options)
        output = output_of(experiment, options.output, completed)
        ranks = collectives.rank(), collectives.world_size()
        log = logs.early_log()
        given = completed, args, options, output
        return cls(*given, Path.cwd(), *ranks, log, experiment, base)

    @property
    def training(self) -> Any:
        """The `training` section of the config."""
        return self.config.training

    @property
    def output_dir(self) -> Path:
        """The directory of the run."""
        return self.folder / self.output

    def path(self, given: str) -> Path:
        """Returns a path of an option as it is found from where the process is now."""
        return Path(os.path.relpath(self.folder), given)

    @property
    def log_path(self) -> Path:
        """The file of this rank's text log."""
        return self.output_dir / f"worker_{self.rank}.log"

    @property
    def parallel(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1

    @property
    def read_only(self) -> bool:
        """Whether it only looks at a run."""
        return self.options.inspected is not None

    @property
    def has_valid(self) -> bool:
        """Whether the class defines `valid`; else nothing is validated."""
        return self.has_own("valid")

    def has_own(self, method: str) -> bool:
        """Returns whether the class has written a method, or a base of the user's."""
        return not missing(self.experiment, self.base, [method])

    @property
    def writes(self) -> bool:
        """Whether this process writes the files that a run has once."""
        return self.rank == 0 and not self.read_only

    @property
    def is_in_fork(self) -> bool:
        """Whether this is a process that the user's code has forked: it is not the run."""
        return self.process != os.getpid()

    def warn(self, text: str) -> None:
        """Writes a line that says that something may be a mistake."""
        self.logger.warning("%s", text)


def output_of(experiment: type, given: str | Path | None, config: Config) -> str:
    """Returns the directory of a run, with config values filled in; by default the class names it.

    Raises:
        ConfigError: It is empty, as of a shell variable that is not set, or a `{key}` in it is no
            key of the config.
    """
    if given == "":
        raise ConfigError("--output: '' given; expected the directory of the run, or no --output.")
    output = f"runs/{experiment.__name__}" if given is None else str(given)
    return fill_in(output, resolved(config))


def check_platform() -> None:
    """Raises a ConfigError on Windows, or if this version of paddle is too old."""
    check_system()
    major = int(paddle.__version__.partition(".")[0])  # 0 for a build between two versions
    if 0 < major < 3:
        raise ConfigError(
            f"paddle {paddle.__version__}: expected 3.0 to 3.3, with which expbase was tried. The "
            "tensors of this one cannot be saved: no __dlpack__."
        )


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
        hints.append(habit or did_you_mean(name, others, 0.6, otherwise="", shown=shown))
    return "".join(hints)


def check_valid_loader(loader: Any, start: Start) -> None:
    """Raises a TypeError if there is data to validate with, and no method that does it."""
    if loader is not None and not start.has_valid and due.is_wanted(start.training, "valid"):
        raise TypeMistake(
            f"{start.experiment.__name__}: self.valid_loader is set, and valid not defined; "
            "expected `def valid(self):` with `for batch in self.valid_batches(): self.log(…)`, or "
            "no self.valid_loader, or training.valid_interval=0."
            f"{_meant(start.experiment, start.base, ['valid'])}"
        )


def check_class(experiment: type, base: type, training: Any, options: Options) -> None:
    """Raises if a method is missing, or cannot be called as the base class calls it.

    Raises:
        TypeError: The class is to be changed.
        ConfigError: training.monitor is given, and there is no `valid`.
    """
    required = ["setup_dataloader", "setup_model", "train_batch"]
    if options.evaluate not in (None, False):
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
