"""What is due at the end of an iteration: a pure function of the config and two counters.

A save by the clock, at a stop or by save() is not: `Loop._save_at_end` decides on it.
Epochs count as ended when they are used up; one update that accumulates may end several. Values are
read as items: an attribute of a config takes ten times as long, and each iteration asks.

    due = due_at(config.training, iteration, epochs_before=2, epochs_ended=3, is_epoch_end=True)
    if due.checkpoint: ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

VALIDATE = "validate"
VALIDATE_IF_LAST = "validate at the end"  # not if a run goes on that has come to its end
END_EPOCH = "end the epoch"
ON_TRAIN_END = "on_train_end"  # which a signal has left; in no checkpoint


class Due(NamedTuple):
    """What is due at the end of one iteration, in the order in which it is done."""

    log: bool  # a line with the means since the last one
    checkpoint: bool
    follows: list[str]  # what comes after the checkpoint


def due_at(
    training: Any, iteration: int, epochs_before: int, epochs_ended: int, *, is_epoch_end: bool
) -> Due:
    """Returns the work that is due at the end of an iteration; `epochs_before` had ended before it.

    Another epoch may have begun in this iteration since; else it is the end of one.
    """
    before = iteration - 1
    log_interval = training["log_interval"]
    last = is_last(training, iteration, epochs_ended)
    of_epoch = passed(training["valid_every_epoch"], epochs_before, epochs_ended)
    by_iterations = passed(training["valid_interval"], before, iteration)
    at_end = last and is_wanted(training, "valid")
    follows = [VALIDATE] if by_iterations else []
    if at_end and not by_iterations and not of_epoch:
        follows = [VALIDATE_IF_LAST]
    if is_epoch_end:
        follows += [END_EPOCH]
    if of_epoch and not by_iterations:
        follows += [VALIDATE]
    return Due(
        log=passed(log_interval, before, iteration) or (last and log_interval > 0),
        checkpoint=passed(training["save_interval"], before, iteration)
        or passed(training["save_every_epoch"], epochs_before, epochs_ended)
        or (last and is_wanted(training, "save")),
        follows=follows,
    )


def is_quiet(training: Any, iteration: int, epochs_ended: int) -> bool:
    """Returns whether nothing is due after an iteration that ends no epoch, as after most.

    Then `due_at` would say so, too; it takes several times as long.
    """
    for key in ("log_interval", "save_interval", "valid_interval"):
        interval = training[key]
        if interval > 0 and iteration % interval == 0:
            return False
    return not is_last(training, iteration, epochs_ended)


def is_last(training: Any, iteration: int, epochs_ended: int) -> bool:
    """Returns whether the config asks for nothing after this iteration."""
    by_iterations = bool(training["max_iteration"]) and iteration >= training["max_iteration"]
    return by_iterations or (bool(training["max_epoch"]) and epochs_ended >= training["max_epoch"])


def is_wanted(training: Any, what: str) -> bool:
    """Returns whether validating or saving ("valid", "save") is not switched off."""
    by_clock = what == "save" and training["save_seconds"]
    return bool(training[f"{what}_interval"] or training[f"{what}_every_epoch"] or by_clock)


class Limit(NamedTuple):
    """One of those that end training; the first one does."""

    key: str  # of the training section
    value: int
    updates: int | None  # after how many training ends by it; None: unknown


def limits(
    training: Any,
    updates_per_epoch: Fraction | None,
    left_out: Iterable[int] = (),
    ahead: Fraction = Fraction(0),
) -> list[Limit]:
    """Returns the limits that the config has, the first one first, and unknown ones last.

    The numbers of updates that are left out count for the epochs, and not for the iterations. So
    does `ahead`: how many more the epochs until this start had than they would have now.
    """
    found = []
    if value := training["max_iteration"]:
        found.append(Limit("max_iteration", value, value))
    if value := training["max_epoch"]:
        updates = None
        if updates_per_epoch is not None:
            updates = math.ceil(value * updates_per_epoch + ahead)
            # If the last one is left out, the update that reads past it is made.
            updates -= sum(number < updates for number in left_out)
        found.append(Limit("max_epoch", value, updates))
    return sorted(found, key=lambda limit: math.inf if limit.updates is None else limit.updates)


def passed(interval: int, before: int, after: int) -> bool:
    """Returns whether a multiple of the interval lies in `before` + 1 to `after`; 0: never."""
    return interval > 0 and before // interval != after // interval
