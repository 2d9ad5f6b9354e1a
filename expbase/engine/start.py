"""What one start of a run is given, and where it runs: looked at once, and no field is set again.

start = Start.of(type(experiment), ExperimentBase, config, args)
start.training.max_iteration; start.options.fresh; start.writes
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from expbase.config import Config, ConfigError, defaults_of, fill, fill_in
from expbase.engine.class_checks import check_class, missing
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
        evaluates = options.evaluate not in (None, False)
        check_class(experiment, base, completed.training, evaluates=evaluates)
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
