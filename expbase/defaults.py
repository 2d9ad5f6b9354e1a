"""The `training` section of a config: its keys, their defaults, units and choices.

config = fill({"training": {"max_iteration": 400, "valid_interval": 100, "save_interval": 100}})
check_training(config.training)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from expbase.config import Config, ConfigError, coerced, nearest, refuse_gone

_TRAINING: dict[str, Any] = {
    # When to end.
    "max_iteration": 0,  # iterations; 0: no limit, but 10000 if max_epoch is 0, too
    "max_epoch": 0,  # epochs; 0: no limit
    # How often something happens.
    "valid_interval": 1000,  # iterations; 0: never
    "save_interval": 1000,  # iterations; 0: never
    "log_interval": 10,  # iterations; 0: never
    "valid_every_epoch": 0,  # epochs; 0: never
    "save_every_epoch": 0,  # epochs; 0: never
    "save_seconds": 0,  # seconds since the newest checkpoint; 0: never
    "accumulation_steps": 1,  # batches of an update on each rank
    "shares": 0,  # batches of an update on all ranks, however many: a power of two; 0: as above
    # Repeatability.
    "seed": 0,  # of all random numbers
    "deterministic": False,  # whether the device uses repeatable kernels only
    # Which checkpoints are kept.
    "keep_last": 3,  # the newest n; 0: all
    "keep_every": 0,  # and the one at every n-th iteration; 0: none
    "keep_best": 1,  # and the best n by `monitor`; 0: none
    "monitor": "",  # a metric of valid(), for example "accuracy"; "": none
    "monitor_mode": "max",  # whether more is better ("max") or less ("min")
    # Limits.
    "time_limit_seconds": 0,  # seconds after which a start saves and stops; 0: none
    "hang_seconds": 600,  # seconds without progress until stacks are logged; 0: never
    "hang_action": "report",  # what a rank does then: "report", or "end", as by a failure
    # Checks.
    "nonfinite": "error",  # if a loss is not finite: "error", "warn" or "ignore"
}

# Where nothing else limits training. As a default nobody could tell it from a value that is meant,
# and it would end a run of `training.max_epoch=60` in its middle.
_LIMIT = 10000
_REQUIRED = ("max_iteration", "valid_interval", "save_interval")
# How much like one of ours a key of a user's may be: `max_epcoh` is too much like max_epoch, and
# `plot_interval` is not too much like log_interval.
_TOO_ALIKE = 0.885
_CHOICES = {
    "monitor_mode": ("max", "min"),
    "nonfinite": ("error", "warn", "ignore"),
    "hang_action": ("report", "end"),
}


def get_default_training_config() -> Config:
    """Makes the `training` section that every experiment has.

    Returns:
        A new one, with the default values.
    """
    return Config(_TRAINING)


def fill(config: Mapping[str, Any]) -> Config:
    """Returns a copy of an experiment's config with the training keys that it leaves out.

    Raises:
        ConfigError: One of its three required keys is missing (of max_iteration and max_epoch one
            is enough), a key is misspelt, or a value has a wrong type.
    """
    given = (config or {}).get("training") or {}
    there = {"max_iteration", *given} if "max_epoch" in given else given
    if missing := [key for key in _REQUIRED if key not in there]:
        raise ConfigError(
            f"config: training.{missing[0]} is missing; expected a section `training` with whole "
            f"numbers for {', '.join(_REQUIRED)}. Begin default_config with `config = "
            "super().default_config()` or get_default_training_config(), and return the config."
        )
    training: dict[str, Any] = {**_TRAINING}
    for key, value in given.items():
        refuse_gone(f"training.{key}")
        near = [] if key in training else nearest(key, _TRAINING, _TOO_ALIKE)
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
    for key, default in _TRAINING.items():
        value = training[key]
        where = f"training.{key}"
        if isinstance(default, int) and not isinstance(default, bool):
            least = 1 if key == "accumulation_steps" else 0
            if value < least:
                raise ConfigError(f"{where}: {value!r} given; expected {least} or more.")
        if key in _CHOICES and value not in _CHOICES[key]:
            choices = ", ".join(map(repr, _CHOICES[key]))
            raise ConfigError(f"{where}: {value!r} given; expected one of {choices}.")
    shares = training["shares"]
    if shares & (shares - 1):
        raise ConfigError(f"training.shares: {shares} given; expected a power of two.")
    if shares and training["accumulation_steps"] > 1:
        raise ConfigError("training.accumulation_steps: expected 1 with training.shares.")


def limited(config: Config) -> Config:
    """Returns a copy whose limit is 10000 iterations if it has none.

    In setup the config itself gets it, and not before: a script may still set `max_epoch`.
    """
    copy: Config = config.clone()
    if not copy.training["max_iteration"] and not copy.training["max_epoch"]:
        copy.training["max_iteration"] = _LIMIT
    return copy
