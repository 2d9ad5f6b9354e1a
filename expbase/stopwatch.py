"""How fast training is, where the time of a start goes, and how long the rest will take.

Training time is what remains without validation, saving and logging. The clock is passed in.

    with watch.exclude("saving"): ...
    watch.speed(iteration, samples_per_batch=64)["steps_per_second"]
    watch.seconds_left(iteration, 800, {"saving": 2})
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

_REMEMBERED = 31  # windows of training, and times of each other kind, of which a median is taken


class Stopwatch:
    """The time of one start. Whoever reads batches adds to `data_seconds` and `batches`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock  # in seconds; only differences count
        self.start(0)

    def start(self, iteration: int) -> None:
        """Begins training at an iteration; everything measured before is forgotten."""
        self.data_seconds = 0.0  # spent waiting for batches
        self.batches = 0  # read so far
        self._began = (iteration, self.clock())
        self._excluded_seconds = 0.0
        self._totals: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {}
        self._is_excluding = False
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._begin_window(iteration)

    def _begin_window(self, iteration: int) -> None:
        now = self.clock()
        self._window = (iteration, self.batches, now, self.data_seconds, self._excluded_seconds)

    @contextlib.contextmanager
    def exclude(self, name: str) -> Iterator[None]:
        """Takes the time of the block out of training; a block within it does not count apart."""
        if self._is_excluding:
            yield
            return
        began, self._is_excluding = self.clock(), True
        try:
            yield
        finally:
            self._is_excluding = False
            seconds = self.clock() - began
            self._excluded_seconds += seconds
            self._totals[name] = self._totals.get(name, 0.0) + seconds
            self._recent.setdefault(name, deque(maxlen=_REMEMBERED)).append(seconds)

    def speed(self, iteration: int, samples_per_batch: int | None) -> dict[str, float]:
        """The speed of training since the last call; a batch is that of all ranks together."""
        began, batches, mark, data, excluded = self._window
        seconds = max(self.clock() - mark - (self._excluded_seconds - excluded), 1e-9)
        steps = iteration - began
        metrics = {
            "steps_per_second": steps / seconds,
            "data_wait": min((self.data_seconds - data) / seconds, 1.0),  # a share, 0 to 1
        }
        if samples_per_batch:
            metrics["samples_per_second"] = (self.batches - batches) / seconds * samples_per_batch
        if steps:
            self._step_seconds.append(seconds / steps)
        self._begin_window(iteration)
        return metrics

    def step_seconds(self, iteration: int) -> float | None:
        """The median time of a training step in this start; None before the first step."""
        if self._step_seconds:
            return _median(self._step_seconds)
        began, mark = self._began
        steps = iteration - began  # before the first call of `speed` the mean is taken
        return (self.clock() - mark - self._excluded_seconds) / steps if steps > 0 else None

    def seconds_left(
        self, iteration: int, iterations_left: int, coming: Mapping[str, int]
    ) -> float | None:
        """How long the rest will take; None before the first step.

        `coming` is the number of validations, saves and so on until the end, by the name that
        `exclude` gets. A kind that has not happened yet adds no time.
        """
        step = self.step_seconds(iteration)
        if step is None:
            return None
        recent = self._recent.copy()  # the live line asks in another thread; `exclude` adds names
        other = sum(n * _median(recent[name]) for name, n in coming.items() if name in recent)
        return iterations_left * step + other

    def seconds(self) -> float:
        """Since training began."""
        return self.clock() - self._began[1]

    def time_breakdown(self) -> dict[str, float]:
        """The shares of the time since training began, 0 to 1: "training" and "data" first."""
        total = max(self.seconds(), 1e-9)
        training = max(total - self._excluded_seconds - self.data_seconds, 0.0)
        spent = {"training": training, "data": self.data_seconds, **self._totals}
        return {name: seconds / total for name, seconds in spent.items()}


def _median(numbers: Collection[float]) -> float:
    """The upper one of an even count. The module `statistics` takes 1.5 ms to import."""
    return sorted(numbers)[len(numbers) // 2]
