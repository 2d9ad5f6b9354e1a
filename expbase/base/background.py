"""Saving while training goes on: a snapshot in reused memory, and a thread that writes it.

One job runs at a time, so the memory is never overwritten before it is on the disk.

    writer.wait()                          # for the previous job; raises its error
    arrays = buffer.snapshot(live_arrays)
    writer.start(lambda: write(arrays))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures

import numpy as np

from expbase.base.arrays import Array, Bytes, copy_all, pinned
from expbase.base.threads import result_of


class Background:
    """Runs one job at a time, in a thread that is kept.

    A new thread for each job would hold up training until it has begun, and then by the
    interpreter's lock.
    """

    def __init__(self) -> None:
        self._executor = futures.ThreadPoolExecutor(1, "expbase-save")  # makes its thread when used
        self._job: futures.Future[object] | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Runs a job in the thread. Call `wait` first, which ends with the previous job."""
        self._job = self._executor.submit(job)

    def wait(self) -> None:
        """Returns when the job has ended. The first call raises what the job raised."""
        if self._job is not None:
            job = self._job
            try:
                result_of(job, self._executor)
            finally:
                self._job = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not have to wait."""
        return self._job is None or self._job.done()


class SnapshotBuffer:
    """Memory that holds one snapshot and is used again for the next.

    Memory that was used before takes a copy several times faster than new memory.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def room(self, size: int, *, is_pinned: bool = False) -> Bytes:
        """Returns `size` bytes of the memory, with the content of before.

        Args:
            size: Of all that it has to hold.
            is_pinned: Whether it is for copies from a GPU, if new memory is needed.
        """
        if self._memory.nbytes < size:
            self._memory = self._memory[:0].copy()  # both at a time may be too much
            self._memory = pinned(size) if is_pinned else np.empty(size, np.uint8)
        return self._memory[:size]

    def snapshot(self, tensors: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
        """Copies all arrays, once; the copies are valid until the next snapshot.

        When it returns they are complete: what training changes then is not in them.
        """
        everything = [array for arrays in tensors.values() for array in arrays.values()]
        memory = self.room(
            sum(array.nbytes for array in everything),
            is_pinned=not all(array.is_on_host for array in everything),
        )
        copies: dict[str, dict[str, Array]] = {file: {} for file in tensors}
        end = 0
        for file, arrays in tensors.items():
            for key, array in arrays.items():
                start = end
                end += array.nbytes
                copies[file][key] = Array(array.dtype, array.shape, memory[start:end])
        into = (copy.data for of_file in copies.values() for copy in of_file.values())
        copy_all(zip(everything, into, strict=True))
        return copies
