"""What ExperimentBase had in 0.1, and where each name is now. This file goes after one version.

A name that left is free for an attribute of the user's; where he reads it and has none, the error
says where it is now.
"""

from __future__ import annotations

from collections.abc import Iterator

from expbase.events import own_methods

_BEHIND_THE_DOOR = (
    *("life", "phase", "read_only", "share", "num_shares", "stepping", "grad_scaler"),
    *("epochs_ended", "batch_in_epoch", "evaluated_loader", "evaluated_indices"),
    *("learning_rates", "stateful_objects", "fire", "closing", "evaluating"),
)
FORMER = {
    **{name: f"It is self.internals.{name} now." for name in _BEHIND_THE_DOOR},
    "load_best": 'It is self.load_checkpoint("best") now.',
    "setup_device": "--device names the device, which is in use from after prepare() on.",
}
# What expbase called on the experiment, so that an override had an effect.
_CALLED = ("learning_rates", "stateful_objects", "fire", "closing", "evaluating")


def check_overrides(experiment: type) -> None:
    """Raises a TypeError if a class overrides what did something in setup."""
    if hasattr(experiment, "setup_device"):
        raise TypeError(
            f"{experiment.__name__}.setup_device: is no method of ExperimentBase any more, so "
            "nothing would call it; expected --device, or args.device, and in prepare() what is "
            "to be done before paddle has a device."
        )


def overrides_nobody_calls(experiment: type) -> Iterator[str]:
    """Yields what to do with methods that expbase called, and no other method of the user's does.

    Args:
        experiment: The class.
    """
    methods = own_methods(experiment)
    for name in _CALLED:
        others = [method for other, method in methods.items() if other != name]
        if name in methods and not any(name in other.__code__.co_names for other in others):
            yield (
                f"{experiment.__name__}.{name}: overrides nothing any more, and expbase does not "
                f"call it. {FORMER[name]}"
            )
