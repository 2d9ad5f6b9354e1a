"""The section `training` of a config: its keys with types, defaults and units, and its checks.

TRAINING["log_interval"]                      # 10
check_training(config.training)               # a ConfigError says what is out of range
resolved(config).training.valid_every_epoch   # as it follows from other keys
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from expbase.base.did_you_mean import did_you_mean
from expbase.base.errors import ConfigError

C = TypeVar("C")

# What follows from other keys; `resolved` puts a number in its place.
BY_DEFAULT: Any = None


class TrainingKeys:
    """The keys of the section `training`: types, defaults, units."""

    # When to end.
    max_iteration: int = 0
    """Iterations until the end; 0: no limit, but 10000 if max_epoch is 0, too."""
    max_epoch: int = 0
    """Epochs until the end; 0: no limit. Training ends at whichever limit comes first."""
    # How often something happens.
    valid_interval: int = BY_DEFAULT
    """Iterations from one validation to the next; 0: never by iterations. By default 1000; 0 if
    valid_every_epoch is given, or if max_epoch alone ends the run: then it is once per epoch."""
    save_interval: int = BY_DEFAULT
    """Iterations from one checkpoint to the next; 0: never by iterations. By default 1000; 0 if
    save_every_epoch is given, or if max_epoch alone ends the run: then it is once per epoch."""
    log_interval: int = 10
    """Iterations from one line of the log to the next; 0: never."""
    valid_every_epoch: int = 0
    """Epochs from one validation to the next; 0: never by epochs."""
    save_every_epoch: int = 0
    """Epochs from one checkpoint to the next; 0: never by epochs."""
    save_seconds: int = 0
    """Seconds from one checkpoint to the next, whatever the iteration is; 0: never by the clock."""
    accumulation_steps: int = 1
    """Batches of an update on each rank."""
    shares: int = 0
    """Batches of an update on all ranks, however many: a power of two; 0: accumulation_steps of
    each rank."""
    skip_updates: list[int] = []  # noqa: RUF012  # each section gets a copy
    """Updates whose batches are left out: their numbers in a run that leaves none out."""
    # Repeatability.
    seed: int = 0
    """Of all random numbers."""
    deterministic: bool = False
    """Whether the device uses repeatable kernels only."""
    # Which checkpoints are kept.
    keep_last: int = 3
    """How many of the newest checkpoints are kept; 0: all."""
    keep_every: int = 0
    """Iterations; a checkpoint whose iteration is a multiple of it is kept, too; 0: none."""
    keep_best: int = 1
    """How many of the best checkpoints by `monitor` are kept, too; 0: none."""
    monitor: str = ""
    """The metric of valid() that says which checkpoint is best, such as "accuracy"; "": none."""
    monitor_mode: str = "max"
    """Whether more of `monitor` is better ("max") or less ("min")."""
    # Limits.
    time_limit_seconds: int = 0
    """Seconds after which a start saves and stops; 0: none."""
    hang_seconds: int = 600
    """Seconds without progress until the stacks of all threads are logged; 0: never."""
    hang_action: str = "report"
    """What a rank does then: "report", or "end", as by a failure."""
    # Checks.
    nonfinite: str = "error"
    """What a logged training scalar that is not finite does: "error", "warn" or "ignore"."""


TRAINING = {key: vars(TrainingKeys)[key] for key in TrainingKeys.__annotations__}
for _key in TRAINING:  # as attributes of the class they would hide the items of a section
    delattr(TrainingKeys, _key)
# What a value is like that is given for one of those whose default does not show it.
EXAMPLES: dict[str, Any] = {
    **{f"training.{key}": 1000 for key, value in TRAINING.items() if value is BY_DEFAULT},
    "training.skip_updates": [4017],
}
# Keys that are gone, or another library's, and what to do instead.
_GONE = {
    "training.num_eval_sanity_batch": "--smoke tries a whole run, valid() included.",
    "training.sanity_batches": "--smoke tries a whole run, valid() included.",
    "training.overfit_batches": "Set self.train_loader to a list of the few batches.",
}
# What holds where nothing is given. As defaults nobody could tell them from values that are meant:
# they would end a run of `training.max_epoch=60` in its middle, and validate it between two epochs.
_LIMIT = 10000
_INTERVAL = 1000
# What `resolved` sets; the intervals first, since an interval of None is what the others wait for.
_FOLLOWING = "valid_interval save_interval valid_every_epoch save_every_epoch max_iteration".split()
_REQUIRED = ("max_iteration", "valid_interval", "save_interval")
# How much like one of ours a key of a user's may be: `max_epcoh` is too much like max_epoch, and
# `plot_interval` is not too much like log_interval.
_TOO_ALIKE = 0.885
_CHOICES = {
    "monitor_mode": ("max", "min"),
    "nonfinite": ("error", "warn", "ignore"),
    "hang_action": ("report", "end"),
}


def refuse_gone(key: str) -> None:
    """Raises a ConfigError for a full key that is gone, which says what to do instead."""
    if key in _GONE:
        raise ConfigError(f"{key}: this key is gone. {_GONE[key]}")


def check_keys(given: Iterable[str]) -> None:
    """Raises a ConfigError if an experiment's own section lacks a key, or has a misspelt one."""
    missing = [key for key in _REQUIRED if key not in given]
    if missing and "max_epoch" not in given:
        raise ConfigError(
            f"config: training.{missing[0]} is missing; expected a section `training` with whole "
            f"numbers for {', '.join(_REQUIRED)}. Begin default_config with `config = "
            "super().default_config()` or get_default_training_config(), and return the config."
        )
    for key in given:
        refuse_gone(f"training.{key}")
        # A user may add keys; one that is all but the name of ours is a mistake.
        meant = did_you_mean(key, TRAINING, _TOO_ALIKE, otherwise="")
        if key not in TRAINING and meant:
            raise ConfigError(
                f"training: unknown key {key!r}.{meant} Put a key of your own into a section of "
                "its own."
            )


def check_training(training: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a value of a training section is out of range or no choice."""
    for key, default in TRAINING.items():
        value = training[key]
        where = f"training.{key}"
        is_number = isinstance(default, int) and not isinstance(default, bool)
        if is_number or (default is BY_DEFAULT and value is not BY_DEFAULT):
            least = 1 if key == "accumulation_steps" else 0
            if value < least:
                raise ConfigError(f"{where}: {value!r} given; expected {least} or more.")
        if key in _CHOICES and value not in _CHOICES[key]:
            choices = ", ".join(map(repr, _CHOICES[key]))
            raise ConfigError(f"{where}: {value!r} given; expected one of {choices}.")
    shares = training["shares"]
    if shares & (shares - 1):
        raise ConfigError(f"training.shares: {shares} given; expected a power of two.")
    skips = training["skip_updates"]
    are_numbers = isinstance(skips, (list, tuple)) and all(type(n) is int and n > 0 for n in skips)
    if not are_numbers:
        raise ConfigError(
            f"training.skip_updates: {skips!r} given; expected a list of whole numbers, each 1 or "
            "more."
        )
    if shares and training["accumulation_steps"] > 1:
        raise ConfigError("training.accumulation_steps: expected 1 with training.shares.")


def resolved(config: C) -> C:
    """Returns a copy with the numbers of the keys of `training` that follow from others.

    In setup the config itself gets them, and not before: a script may still set `max_epoch`.
    """
    whole = copy.deepcopy(config)
    training = cast(Any, whole).training
    is_by_epochs = training.max_epoch > 0  # whichever limit comes first
    if not (training.max_iteration or is_by_epochs):
        training.max_iteration = _LIMIT
    for what in ("valid", "save"):
        interval, every_epoch = f"{what}_interval", f"{what}_every_epoch"
        if training[interval] is BY_DEFAULT:
            if is_by_epochs and not training[every_epoch]:
                training[every_epoch] = 1
            training[interval] = 0 if training[every_epoch] else _INTERVAL
    return whole


def as_given(config: Any, defaults: Any) -> Any:
    """Returns a copy in which keys of `training` have their defaults if the others lead to the same
    numbers: the config.yaml of a run has the numbers, and not who gave them.
    """
    given = copy.deepcopy(config)
    numbers = resolved(given).training
    for key in _FOLLOWING:
        number = given.training[key]
        given.training[key] = defaults.training[key]
        if resolved(given).training != numbers:
            given.training[key] = number
    return given
