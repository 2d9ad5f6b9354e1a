"""How fast training goes, where the time of a start goes, and how long the rest will take.

Training is what is left of the time when validation, saving and logging are taken away. A leaf
with a clock that is passed in.

    watch.start(iteration)
    with watch.apart("saving"): ...
    watch.speed(iteration, samples_per_batch=64)["steps_per_second"]
    watch.seconds_left(800, {"saving": 2})
    watch.shares()["data"]
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

_REMEMBERED = 31  # windows, and stretches of each kind, over which a median is taken


class Stopwatch:
    """The time of one start.

    Args:
        clock: Gives seconds; only differences count.

    Attributes:
        clock: As given.
        data_seconds: Spent waiting for batches; read_batch adds to it.
        batches: Read so far; read_batch adds to it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.start(0)

    def start(self, iteration: int) -> None:
        """Begins training at an iteration."""
        self.data_seconds = 0.0
        self.batches = 0
        self._began = (iteration, self.clock())
        self._apart_seconds = 0.0
        self._totals: dict[str, float] = {}
        self._lately: dict[str, deque[float]] = {}
        self._is_apart = False
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._begin_window(iteration)

    def _begin_window(self, iteration: int) -> None:
        now = self.clock()
        self._window = (iteration, self.batches, now, self.data_seconds, self._apart_seconds)

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """What the block does is not part of training; within another block it is that one's.

        Args:
            name: "validation", "saving" or "logging".
        """
        if self._is_apart:
            yield
            return
        began, self._is_apart = self.clock(), True
        try:
            yield
        finally:
            self._is_apart = False
            seconds = self.clock() - began
            self._apart_seconds += seconds
            self._totals[name] = self._totals.get(name, 0.0) + seconds
            self._lately.setdefault(name, deque(maxlen=_REMEMBERED)).append(seconds)

    def speed(self, iteration: int, samples_per_batch: int | None) -> dict[str, float]:
        """The speed in the window since the last call; begins the next one.

        Args:
            iteration: Of now.
            samples_per_batch: On all ranks together; None if nobody knows.

        Returns:
            `steps_per_second`, `data_wait` (the share of training's time that waited for data, 0
            to 1), and where known `samples_per_second`.
        """
        began, batches, mark, data, apart = self._window
        seconds = max(self.clock() - mark - (self._apart_seconds - apart), 1e-9)
        steps = iteration - began
        metrics = {
            "steps_per_second": steps / seconds,
            "data_wait": min((self.data_seconds - data) / seconds, 1.0),
        }
        if samples_per_batch:
            metrics["samples_per_second"] = (self.batches - batches) / seconds * samples_per_batch
        if steps:
            self._step_seconds.append(seconds / steps)
        self._begin_window(iteration)
        return metrics

    def step_seconds(self, iteration: int) -> float | None:
        """The median time of a training step in this start; None before the first one.

        Args:
            iteration: Of now. Until a window has ended, it is the mean of the steps so far.
        """
        if self._step_seconds:
            return statistics.median(self._step_seconds)
        began, mark = self._began
        steps = iteration - began
        return (self.clock() - mark - self._apart_seconds) / steps if steps > 0 else None

    def seconds_left(
        self, iteration: int, iterations_left: int, coming: Mapping[str, int]
    ) -> float | None:
        """How long the rest will take; None before the first step.

        Args:
            iteration: Of now.
            iterations_left: Until the end.
            coming: How many validations, saves and so on come until then, by the name that
                `apart` was given. One of a kind that did not come yet counts nothing.
        """
        step = self.step_seconds(iteration)
        if step is None:
            return None
        medians = {name: statistics.median(times) for name, times in [*self._lately.items()]}
        apart = sum(count * medians.get(name, 0.0) for name, count in coming.items())
        return iterations_left * step + apart

    def seconds(self) -> float:
        """Since training began."""
        return self.clock() - self._began[1]

    def shares(self) -> dict[str, float]:
        """Where the time since training began went, 0 to 1, "training" and "data" first."""
        total = max(self.seconds(), 1e-9)
        training = max(total - self._apart_seconds - self.data_seconds, 0.0)
        spent = {"training": training, "data": self.data_seconds, **self._totals}
        return {name: seconds / total for name, seconds in spent.items()}
