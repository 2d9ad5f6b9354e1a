"""Runs that differ in their seed alone: which ones they are, and the mean over their numbers.

The deviation is the sample's, with n - 1. No test of significance is made.

    for group in groups(runs):
        print(group.name, mean_text([run.loss for run in group.runs]))
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from expbase.record.starts_and_ends import STOP_FILE
from expbase.tools.runs import RunFacts

SEED = "training.seed"


@dataclass(frozen=True)
class Group:
    """Runs of one experiment whose configs are equal but for the seed."""

    runs: list[RunFacts]  # at least two, each with a seed of its own; all have ended by themselves
    num_unfinished: int  # further runs of this config that count nowhere

    @property
    def name(self) -> str:
        rest = f", {self.num_unfinished} unfinished" if self.num_unfinished else ""
        return f"mean of {len(self.runs)} seeds{rest}"

    @property
    def setting(self) -> dict[str, Any]:
        """The config values by which it differs from other runs; see `find_differences`."""
        return {key: value for key, value in self.runs[0].differs.items() if key != SEED}


def groups(runs: Sequence[RunFacts]) -> list[Group]:
    """Returns the groups of runs that differ in their seed alone, in the order of their first runs.

    A run counts if it has finished, or has stopped itself (`self.stop()`, early stopping). Of runs
    with the same seed the one that wrote last counts. A run whose config is unknown is in no group.
    """
    alike: dict[tuple[str, str], list[RunFacts]] = defaultdict(list)
    for run in runs:
        config = {key: repr(value) for key, value in run.config.items() if key != SEED}
        if SEED in run.config:
            alike[run.experiment, repr(sorted(config.items()))].append(run)
    found = []
    for members in alike.values():
        ended = [run for run in members if has_ended(run)]
        newest = {run.config[SEED]: run for run in sorted(ended, key=lambda run: -run.age)}
        if len(newest) > 1:
            counted = [run for run in ended if newest[run.config[SEED]] is run]
            found.append(Group(counted, len(members) - len(ended)))
    return found


def has_ended(run: RunFacts) -> bool:
    """Returns whether a run came to its end, by its config or because it stopped itself."""
    end = run.sessions[-1].end if run.sessions else {}
    stopped_itself = end.get("exit_code") == 0 and end.get("reason") != STOP_FILE
    return run.state == "finished" or (run.state == "stopped" and stopped_itself)


def mean(values: Sequence[Any]) -> float | None:
    """Returns the mean of numbers; None if one of the values is no number.

    The texts by which metrics.jsonl has "nan" and "inf" are numbers.
    """
    numbers = [_as_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known and len(known) == len(numbers) else None


def deviation(values: Sequence[Any]) -> float | None:
    """Returns the sample's standard deviation (n - 1); None unless there are two finite numbers."""
    numbers = [_as_number(value) for value in values]
    finite = [number for number in numbers if number is not None and math.isfinite(number)]
    return statistics.stdev(finite) if len(finite) == len(numbers) > 1 else None


def _as_number(value: Any) -> float | None:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def mean_text(values: Sequence[Any]) -> str:
    """Returns `0.9812 ± 0.0031`: a mean with as many places as its deviation needs for two digits.

    Equal values give that value; those that are no numbers, and differ, give "".
    """
    if all(value == values[0] for value in values):
        return number_text(values[0])
    middle, spread = mean(values), deviation(values)
    if middle is None:
        return ""
    if spread is None:  # one of them is not finite
        return number_text(middle)
    places = max(1 - math.floor(math.log10(spread)), 0) if spread else 0
    if places > 6 or abs(middle) >= 1e6:  # 2.1e-05, 4.3e+07
        return f"{middle:.3g} ± {spread:.2g}"
    return f"{middle:.{places}f} ± {spread:.{places}f}"


def number_text(value: Any) -> str:
    """Returns a value as the cell of a table has it: six digits of a number."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
