"""Where a rank hangs: the stacks of all threads, when nothing has moved for a while.

A thread looks from time to time at what should move; this costs the loop nothing.

    watch = HangWatch(600, progress=lambda: {"iteration": …}, logger=logger, path=log_file)
    watch.stop()
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class HangWatch:
    """Writes all stacks to a file when nothing moved for so long, once for each standstill.

    Args:
        seconds: How long nothing may move.
        progress: Returns what should move, by name.
        logger: Takes the line that comes before the stacks.
        path: The file of that logger, to which the stacks are appended.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], dict[str, Any]],
        logger: logging.Logger,
        path: Path,
    ) -> None:
        self._seconds = seconds
        self._progress = progress
        self._logger = logger
        self._path = path
        self._stopped = threading.Event()
        # A daemon: an interpreter that ends without stop() must not wait for it.
        self._thread = threading.Thread(target=self._watch, name="expbase-hang", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before, since, is_reported = self._progress(), time.monotonic(), False
        while not self._stopped.wait(min(self._seconds / 4, 5.0)):
            now = self._progress()
            if now != before:
                before, since, is_reported = now, time.monotonic(), False
            elif not is_reported and time.monotonic() - since >= self._seconds:
                is_reported = True
                self._report(now)

    def _report(self, progress: dict[str, Any]) -> None:
        self._logger.warning(
            "no progress for %g s: %s. The stacks of all threads are in %s; the run goes on.",
            self._seconds,
            " ".join(f"{name}={value}" for name, value in progress.items()),
            self._path.name,
        )
        # faulthandler writes below Python: to a file with a descriptor, not to a logger.
        with self._path.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def stop(self) -> None:
        """Stops watching. May be called twice."""
        self._stopped.set()
        self._thread.join()
