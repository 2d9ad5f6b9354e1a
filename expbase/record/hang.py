"""Where a rank hangs: the stacks of all threads, when nothing has moved for a while.

A thread looks from time to time at what should move; this costs the loop nothing.

    with watching(600, progress=lambda: {"iteration": …}, logger=logger, path=log_file): ...
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TEXT = "no progress for %g s: %s. The stacks of all threads are in %s; the run goes on."


@contextlib.contextmanager
def watching(
    seconds: float, progress: Callable[[], dict[str, Any]], logger: logging.Logger, path: Path
) -> Iterator[None]:
    """In the block all stacks go to a file when nothing moved for so long, once for each time.

    Args:
        seconds: How long nothing may move.
        progress: Returns what should move, by name.
        logger: Takes the line that comes before the stacks.
        path: The file of that logger, to which the stacks are appended.
    """

    def watch() -> None:
        before, since, is_reported = progress(), time.monotonic(), False
        while not ended.wait(min(seconds / 4, 5.0)):
            now = progress()
            if now != before:
                before, since, is_reported = now, time.monotonic(), False
            elif not is_reported and time.monotonic() - since >= seconds:
                is_reported = True
                words = " ".join(f"{name}={value}" for name, value in now.items())
                logger.warning(_TEXT, seconds, words, path.name)
                # It writes below Python: to a file with a descriptor, not to a logger.
                with path.open("a", encoding="utf-8") as file:
                    faulthandler.dump_traceback(file, all_threads=True)

    ended = threading.Event()
    # A daemon: an interpreter that ends within the block must not wait for it.
    thread = threading.Thread(target=watch, name="expbase-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
