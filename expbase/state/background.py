"""Saving while training goes on: a snapshot into reused memory, and a thread that writes it.

The first snapshot allocates the memory and later ones copy into it: memory that was used before
takes a copy several times faster than new memory, and training waits for nothing else. One job
runs at a time, so the memory is never overwritten while it is being read.

    writer = Background()
    writer.wait()                          # for the previous job; raises its error
    arrays = buffer.snapshot(live_arrays)
    writer.start(lambda: write(arrays))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np

from expbase.state.arrays import Array


class Background:
    """One job at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Runs a job in the thread. Call `wait` first, which ends with the previous job."""

        def run() -> None:
            try:
                job()
            except BaseException as error:  # `wait` raises it in the caller's thread
                self._error = error

        self._thread = threading.Thread(target=run, name="expbase-save")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the job has ended.

        Raises:
            BaseException: What the job raised; only the first call raises it.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Like `wait`, but does not wait for a job that still runs."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class SnapshotBuffer:
    """Memory that holds one snapshot and is used again for the next."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def snapshot(self, tensors: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
        """Copies all arrays; the copies are valid until the next snapshot."""
        arrays = [array for of_file in tensors.values() for array in of_file.values()]
        size = sum(array.data.nbytes for array in arrays)
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        copies, end = {}, 0
        for array in arrays:
            start, end = end, end + array.data.nbytes
            np.copyto(self._memory[start:end], array.data)
            copies[id(array)] = Array(array.dtype, array.shape, self._memory[start:end])
        return {
            name: {key: copies[id(array)] for key, array in of_file.items()}
            for name, of_file in tensors.items()
        }
