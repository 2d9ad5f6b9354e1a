"""Saving while training goes on: a snapshot into reused memory, and a thread that writes it.
One job runs at a time, so the memory is never overwritten while it is written.

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
        self._thread = threading.Thread(target=self._run, args=[job], name="expbase-save")
        self._thread.start()

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # `wait` raises it in the caller's thread
            self._error = error

    def wait(self) -> None:
        """Returns when the job has ended. The first call raises what the job raised."""
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
    """Memory that holds one snapshot and is used again for the next.

    Memory that was used before takes a copy several times faster than new memory.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def snapshot(self, tensors: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
        """Copies all arrays; the copies are valid until the next snapshot."""
        size = sum(array.data.nbytes for arrays in tensors.values() for array in arrays.values())
        if self._memory.nbytes < size:
            self._memory = np.empty(size, np.uint8)
        copies: dict[str, dict[str, Array]] = {file: {} for file in tensors}
        end = 0
        for file, arrays in tensors.items():
            for key, array in arrays.items():
                start, end = end, end + array.data.nbytes
                np.copyto(self._memory[start:end], array.data)
                copies[file][key] = Array(array.dtype, array.shape, self._memory[start:end])
        return copies
