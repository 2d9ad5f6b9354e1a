"""How fast training is, and how long the rest will take.

Training time is what remains without validation, saving and logging. The clock is passed in.

    with watch.exclude(): ...
    watch.speed(iteration, samples_per_batch=64)["steps_per_second"]
    watch.seconds_left(iteration, iterations_left=800)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


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
        self._is_excluding = False
        self._begin_window(iteration)

    def _begin_window(self, iteration: int) -> None:
        now = self.clock()
        self._window = (iteration, self.batches, now, self.data_seconds, self._excluded_seconds)

    @contextlib.contextmanager
    def exclude(self) -> Iterator[None]:
        """Takes the time of the block out of training; a block within it does not count apart."""
        if self._is_excluding:
            yield
            return
        began = self.clock()
        self._is_excluding = True
        try:
            yield
        finally:
            self._is_excluding = False
            self._excluded_seconds += self.clock() - began

    def speed(self, iteration: int, samples_per_batch: int | None) -> dict[str, float]:
        """The speed of training since the last call; a batch is that of all ranks together."""
        began, batches, mark, data, excluded = self._window
        seconds = max(self.clock() - mark - (self._excluded_seconds - excluded), 1e-9)
        metrics = {
            "steps_per_second": (iteration - began) / seconds,
            "data_wait": min((self.data_seconds - data) / seconds, 1.0),  # a part of it, 0 to 1
        }
        if samples_per_batch:
            metrics["samples_per_second"] = (self.batches - batches) / seconds * samples_per_batch
        self._begin_window(iteration)
        return metrics

    def seconds_left(self, iteration: int, iterations_left: int) -> float | None:
        """How long the rest takes at the pace of this start; None before its first iteration."""
        began, mark = self._began
        done = iteration - began
        return (self.clock() - mark) / done * iterations_left if done else None

    def seconds(self) -> float:
        """Since training began."""
        return self.clock() - self._began[1]
