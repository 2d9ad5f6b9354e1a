"""The speed of training, and the time until its end.

The time of validation, saving and logging is not counted for the speed. The clock is passed in.

    with watch.exclude(): ...
    watch.speed(iteration, ranks=2)["steps_per_second"]
    watch.seconds_left(iteration, iterations_left=800)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence


class Stopwatch:
    """The time of one start."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock  # in seconds; only differences count
        self.start(0)

    def start(self, iteration: int) -> None:
        """Begins to measure at an iteration, and forgets everything measured before."""
        self.data_seconds = 0.0  # spent waiting for batches
        self.forward_seconds = 0.0  # from a batch to its first backward; on a device, to queue it
        self.batches = 0  # read so far
        self._samples = 0  # read so far, as far as their number is known
        self.slowest: dict[str, float] = {}  # the rank that the others wait for, and its seconds
        self._read_at: float | None = None  # when the batch was read whose backward is to come
        self._asked = 0.0, 0.0
        self._began = (iteration, self.clock())
        self._excluded_seconds = 0.0
        self._is_excluding = False
        self._begin_window(iteration)

    def _begin_window(self, iteration: int) -> None:
        now = self.clock()
        self._window = (iteration, self._samples, now, self.data_seconds, self._excluded_seconds)

    def note_batch(self, began: float, samples: int | None = None) -> None:
        """Notes that a batch has been read.

        Args:
            began: When reading began, by the clock.
            samples: How many are in it; None: unknown.
        """
        self._samples += samples or 0
        self._read_at = self.clock()
        self.data_seconds += self._read_at - began
        self.batches += 1

    def note_backward(self) -> None:
        """Notes that a backward begins, in which the ranks wait for each other."""
        if self._read_at is not None:
            self.forward_seconds += self.clock() - self._read_at
            self._read_at = None

    def busy(self, iterations: int) -> tuple[float, float]:
        """Returns seconds per iteration since the last call.

        Args:
            iterations: How many there were.

        Returns:
            Seconds until the first backward, and those of them in which this rank waited for data.
            On a device that is not the CPU what is computed is only queued in this time.
        """
        data, forward = self._asked
        self._asked = self.data_seconds, self.forward_seconds
        data_each = (self.data_seconds - data) / iterations
        return data_each + (self.forward_seconds - forward) / iterations, data_each

    def note_ranks(self, busy: Sequence[list[float]]) -> None:
        """Finds the slowest rank.

        Args:
            busy: What `busy` has returned on each rank.
        """
        longest = max(busy)
        if len(busy) > 1 and longest[0]:
            self.slowest = {
                "slowest_rank": busy.index(longest),
                "slowest_rank_seconds": longest[0],
                "slowest_rank_data_seconds": longest[1],
            }

    @contextlib.contextmanager
    def exclude(self) -> Iterator[None]:
        """Excludes the time of the block from training time; blocks may be nested."""
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

    def speed(self, iteration: int, ranks: int = 1) -> dict[str, float]:
        """Returns the speed of training since the last call, by the names of the metrics.

        A device that is not the CPU may compute while `data_wait` counts.

        Args:
            iteration: The one that has ended.
            ranks: How many read as many samples as this one.
        """
        began, samples, mark, data, excluded = self._window
        seconds = max(self.clock() - mark - (self._excluded_seconds - excluded), 1e-9)
        metrics = {
            "steps_per_second": (iteration - began) / seconds,
            "data_wait": min((self.data_seconds - data) / seconds, 1.0),  # a part of it, 0 to 1
        }
        if self._samples > samples:
            metrics["samples_per_second"] = (self._samples - samples) / seconds * ranks
        self._begin_window(iteration)
        return metrics | self.slowest

    def seconds_left(self, iteration: int, iterations_left: int) -> float | None:
        """Returns the seconds until the end, at the mean speed of this start, pauses included.

        None before the first iteration of this start.
        """
        began, mark = self._began
        done = iteration - began
        return (self.clock() - mark) / done * iterations_left if done else None

    def seconds(self) -> float:
        """Returns the seconds since training began."""
        return self.clock() - self._began[1]
