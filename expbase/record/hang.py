"""Where a rank hangs: every thread's stack, when nothing has moved for a while.

A thread looks from time to time at what should move, and costs the loop nothing. The run goes on;
what is written tells a person where it stands. A leaf: what to look at, and where to write, is
passed in.

    watch = HangWatch(600, progress=lambda: (exp.iteration, …), log=logger, path=log_file)
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
        seconds: Without progress.
        progress: Gives what moves, to be compared; its text goes into the log.
        log: For the line that comes before the stacks.
        path: The file of that log, to which the stacks are appended.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], dict[str, Any]],
        log: logging.Logger,
        path: Path,
    ) -> None:
        self._seconds = seconds
        self._progress = progress
        self._log = log
        self._path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="expbase-hang", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before, since, told = self._progress(), time.monotonic(), False
        while not self._stopped.wait(min(self._seconds / 4, 5.0)):
            now = self._progress()
            if now != before:
                before, since, told = now, time.monotonic(), False
            elif not told and time.monotonic() - since >= self._seconds:
                told = True
                self._tell(now)

    def _tell(self, progress: dict[str, Any]) -> None:
        where = " ".join(f"{name}={value}" for name, value in progress.items())
        self._log.warning(
            "no progress for %g s: %s. The stacks of all threads are in %s; the run goes on.",
            self._seconds,
            where,
            self._path.name,
        )
        with self._path.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def stop(self) -> None:
        """Stops watching. May be called twice."""
        self._stopped.set()
        self._thread.join()
