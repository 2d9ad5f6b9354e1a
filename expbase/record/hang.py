"""Where a rank hangs: the stacks of all threads, when nothing has moved for a while; and its end.

A thread looks from time to time at what should move; this costs the loop nothing.

    with watching(600, progress=lambda: {"iteration": …}, logger=logger, path=log_file): ...

With `end` the process is ended then, whatever its main thread does. If this thread cannot do it,
since Python's lock is held or the disk does not answer, faulthandler's does it some seconds later.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TEXT = "%s. The stacks of all threads are in %s; %s."
_WAITS = "; it seems to wait for another rank"
_LATER_SECONDS = 15.0


@contextlib.contextmanager
def watching(
    seconds: float,
    progress: Callable[[], dict[str, Any]],
    logger: logging.Logger,
    path: Path,
    end: Callable[[str], object] | None = None,
    *,
    parallel: bool = False,
) -> Iterator[None]:
    """In the block all stacks go to a file when nothing moved for so long, once for each time.

    `progress` returns what should move, by name; `path` is the logger's file. With `end`, which is
    called with what hangs, the process ends. `parallel`: it may wait for another rank.
    """

    def report(now: dict[str, Any], waits: bool) -> None:
        where = " ".join(f"{name}={value}" for name, value in now.items())
        text = f"no progress for {seconds:g} s: {where}{_WAITS if waits else ''}"
        try:
            logger.warning(_TEXT, text, path.name, "this rank ends" if end else "the run goes on")
            # It writes below Python: to a file with a descriptor, not to a logger.
            with path.open("a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        finally:
            if end is not None:
                end(text)

    ended = threading.Event()
    work = (ended, seconds, progress, report, end is not None, parallel)
    # A daemon: an interpreter that ends within the block must not wait for it.
    thread = threading.Thread(target=_watch, args=work, name="expbase-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(
    ended: threading.Event,
    seconds: float,
    progress: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any], bool], object],
    ends: bool,
    parallel: bool,
) -> None:
    pause = min(seconds / 4, 5.0)
    before = progress()
    since = time.monotonic()
    is_reported = False
    while True:
        if ends:
            faulthandler.dump_traceback_later(seconds + _LATER_SECONDS, exit=True, file=2)
        if ended.wait(pause):
            return faulthandler.cancel_dump_traceback_later() if ends else None
        now = progress()
        waits = parallel and _waits_for_others()
        # More patience, so that the rank that it waits for ends first, and is named.
        patience = 2 * pause if ends and waits else 0.0
        if now != before:
            before = now
            since = time.monotonic()
            is_reported = False
        elif not is_reported and time.monotonic() - since >= seconds + patience:
            is_reported = True
            report(now, waits)


def _waits_for_others() -> bool:
    """Whether the main thread is in paddle, perhaps in a collective, or waits for all ranks."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return str(frame.f_globals.get("__name__")).startswith(("paddle.", "expbase.ranks.world"))
