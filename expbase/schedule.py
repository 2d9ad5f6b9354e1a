"""What is due at the end of an iteration: a pure function of the config and two counters.

"Epochs ended" counts epochs that are used up; one update may end several, when it accumulates.

    due = due_at(config.training, iteration, epochs_before=2, epochs_ended=3)
    if due.checkpoint: ...
    next_due(config.training, iteration)     # nothing is due before, unless an epoch ends
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Due:
    """What is due at the end of one iteration, in the order in which it is done.

    Attributes:
        log: A line with the means since the last one.
        validation: One that is asked for by iterations.
        epoch_validation: One that is asked for by epochs; after the end of the epoch.
        checkpoint: One that is asked for by iterations, by epochs, or because this is the last.
        last: Whether this is the last iteration that the config asks for.
    """

    log: bool
    validation: bool
    epoch_validation: bool
    checkpoint: bool
    last: bool


def due_at(training: Any, iteration: int, epochs_before: int, epochs_ended: int) -> Due:
    """What is due.

    Args:
        training: The `training` section of a config.
        iteration: That has just been made.
        epochs_before: Epochs that were used up when the iteration before ended.
        epochs_ended: Epochs that are used up now.
    """

    def falls_on(interval: int) -> bool:
        return passed(interval, iteration - 1, iteration)

    last = is_last(training, iteration, epochs_ended)
    return Due(
        log=falls_on(training.log_interval) or (last and training.log_interval > 0),
        validation=falls_on(training.valid_interval) or (last and is_wanted(training, "valid")),
        epoch_validation=passed(training.valid_every_epoch, epochs_before, epochs_ended),
        checkpoint=falls_on(training.save_interval)
        or passed(training.save_every_epoch, epochs_before, epochs_ended)
        or (last and is_wanted(training, "save")),
        last=last,
    )


def is_last(training: Any, iteration: int, epochs_ended: int) -> bool:
    """Whether the config asks for nothing after this iteration."""
    by_iterations = bool(training.max_iteration) and iteration >= training.max_iteration
    return by_iterations or (bool(training.max_epoch) and epochs_ended >= training.max_epoch)


def is_wanted(training: Any, what: str) -> bool:
    """Whether validating or saving ("valid", "save") is not switched off altogether."""
    return bool(training[f"{what}_interval"] or training[f"{what}_every_epoch"])


def next_due(training: Any, iteration: int) -> int:
    """The next iteration at which something that is asked for by iterations is due."""
    intervals = (training.log_interval, training.valid_interval, training.save_interval)
    multiples: list[int] = [(iteration // n + 1) * n for n in intervals if n]
    return min([*multiples, training.max_iteration or iteration + _FAR])


def iterations_left(training: Any, iteration: int, batches_per_epoch: int | None) -> int | None:
    """Until the end that the config asks for; None if nobody knows.

    Args:
        training: The `training` section of a config.
        iteration: That has just been made.
        batches_per_epoch: Of one rank; None if nobody knows.
    """
    limits = [training.max_iteration] if training.max_iteration else []
    if training.max_epoch and batches_per_epoch:
        limits.append(training.max_epoch * batches_per_epoch // training.accumulation_steps)
    return max(min(limits) - iteration, 0) if limits else None


def times_left(training: Any, left: int, batches_per_epoch: int | None) -> dict[str, int]:
    """How many lines, validations and checkpoints come in that many iterations.

    Args:
        training: The `training` section of a config.
        left: Iterations.
        batches_per_epoch: Of one rank; None if nobody knows.
    """
    times = {}
    for name, key in (("validation", "valid"), ("saving", "save"), ("logging", "log")):
        interval, epochs = training[f"{key}_interval"], training.get(f"{key}_every_epoch", 0)
        times[name] = left // interval if interval else 0
        if epochs and batches_per_epoch:
            times[name] += left * training.accumulation_steps // (batches_per_epoch * epochs)
    return times


def passed(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of the interval lies after `before` and up to `after`; 0: never."""
    return interval > 0 and before // interval != after // interval


_FAR = 1 << 30  # iterations: nothing is due by their number
