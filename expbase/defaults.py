"""The `training` section of a config: filled with its defaults, checked, resolved.

Its keys, their defaults and units: TrainingConfig, in config.py.

config = fill({"training": {"max_iteration": 400, "valid_interval": 100, "save_interval": 100}})
check_training(config.training)
resolved(config).training.valid_every_epoch
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from expbase.config import (
    BY_DEFAULT,
    TRAINING,
    Config,
    ConfigError,
    TrainingConfig,
    coerced,
    nearest,
    refuse_gone,
)

# What holds where nothing is given. As defaults nobody could tell them from values that are meant:
# they would end a run of `training.max_epoch=60` in its middle, and validate it between two epochs.
_LIMIT = 10000
_INTERVAL = 1000
_REQUIRED = ("max_iteration", "valid_interval", "save_interval")
# How much like one of ours a key of a user's may be: `max_epcoh` is too much like max_epoch, and
# `plot_interval` is not too much like log_interval.
_TOO_ALIKE = 0.885
_CHOICES = {
    "monitor_mode": ("max", "min"),
    "nonfinite": ("error", "warn", "ignore"),
    "hang_action": ("report", "end"),
}


def get_default_training_config() -> TrainingConfig:
    """Makes the `training` section that every experiment has.

    Returns:
        Its keys with their defaults.
    """
    return TrainingConfig(TRAINING)


def fill(config: Mapping[str, Any]) -> Config:
    """Returns a copy of an experiment's config with the training keys that it leaves out.

    Raises:
        ConfigError: One of its three required keys is missing (max_epoch alone is enough), a key is
            misspelt, or a value has a wrong type.
    """
    given = (config or {}).get("training") or {}
    missing = [key for key in _REQUIRED if key not in given]
    if missing and "max_epoch" not in given:
        raise ConfigError(
            f"config: training.{missing[0]} is missing; expected a section `training` with whole "
            f"numbers for {', '.join(_REQUIRED)}. Begin default_config with `config = "
            "super().default_config()` or get_default_training_config(), and return the config."
        )
    training: dict[str, Any] = {**TRAINING}
    for key, value in given.items():
        refuse_gone(f"training.{key}")
        near = [] if key in training else nearest(key, TRAINING, _TOO_ALIKE)
        if near:  # a user may add keys; one that is all but the name of ours is a mistake
            raise ConfigError(
                f"training: unknown key {key!r}. Did you mean {near[0]!r}? "
                "Put a key of your own into a section of its own."
            )
        training[key] = coerced(value, training.get(key), f"training.{key}", "config")
    return Config({**config, "training": training})


def defaults_of(experiment: Any) -> Config:
    """Returns the completed config that an experiment class has by default.

    Raises:
        ConfigError: Its `default_config` cannot be called on the class, or `fill` raises it.
    """
    for base in experiment.__mro__:  # a mixin's, too
        found = vars(base).get("default_config")
        try:
            if not isinstance(found, (classmethod, staticmethod, type(None))):
                inspect.signature(found).bind()
        except TypeError:
            raise ConfigError(
                f"{base.__name__}.default_config: cannot be called on the class, before there is "
                "an experiment; expected @classmethod above `def default_config(cls):`."
            ) from None
    return fill(experiment.default_config())


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


def resolved(config: Config) -> Config:
    """Returns a copy with the numbers of the keys of `training` that follow from others.

    In setup the config itself gets them, and not before: a script may still set `max_epoch`.
    """
    copy: Config = config.clone()
    training: Any = copy.training
    is_by_epochs = training.max_epoch > 0  # whichever limit comes first
    if not (training.max_iteration or is_by_epochs):
        training.max_iteration = _LIMIT
    for what in ("valid", "save"):
        interval, every_epoch = f"{what}_interval", f"{what}_every_epoch"
        if training[interval] is BY_DEFAULT:
            if is_by_epochs and not training[every_epoch]:
                training[every_epoch] = 1
            training[interval] = 0 if training[every_epoch] else _INTERVAL
    return copy
