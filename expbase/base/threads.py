"""The result of a job in a thread, also when the thread dies.

with ThreadPoolExecutor(1) as executor:
    value = result_of(executor.submit(function), executor)
"""

from __future__ import annotations

from concurrent import futures
from typing import TypeVar

from expbase.base.errors import RuntimeMistake

T = TypeVar("T")

_LOOK_SECONDS = 1.0


def result_of(job: futures.Future[T], executor: futures.ThreadPoolExecutor) -> T:
    """Waits for a job; returns its result, or raises its exception.

    Raises:
        RuntimeError: A thread of the executor has died. Python would wait for its job for ever.
    """
    while not futures.wait([job], _LOOK_SECONDS).done:
        if not all(thread.is_alive() for thread in executor._threads):
            raise RuntimeMistake(
                "a thread that reads or writes checkpoints has died, as one does for want of "
                "memory. The checkpoints before are intact: make room in memory, and run the same "
                "command again."
            )
    return job.result()
