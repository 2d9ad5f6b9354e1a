"""A watchdog for each rank: the stacks of all threads when nothing has moved, and perhaps its end.

A thread looks from time to time at what should move; this costs the loop nothing. It names what
hangs, which faulthandler cannot. If the process is to end then, and the thread cannot run, since
Python's lock is held or the disk does not answer, faulthandler's timer ends it. Without an end that
timer, of which a process has one, is left to watch.py.

    with watching(600, progress=lambda: {"iteration": …}, logger=logger, path=log_file): ...
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

from expbase.base.files import regular

_TEXT = "%s. The stacks of all threads are in %s; %s."
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
    """Writes all stacks to a file when nothing moved for so long in the block, once each time.

    `progress` returns what should move, by name; `path` is the logger's file. With `end`, which is
    called with what hangs, the process ends. `parallel`: it may wait for another rank.
    """
    ended = threading.Event()
    pause = min(seconds / 4, 5.0)

    def report(text: str) -> None:
        then = "this rank ends" if end else "the run goes on"
        try:
            logger.warning(_TEXT, text, path.name, then)
            _write_stacks(path)
        finally:
            # Only now: a rank that waits for this one writes its stacks, too. And it ends
            # later, so that the one that it waits for is named.
            patience = 6 * pause if parallel and _waits_for_others() else 2 * pause
            if end and not ended.wait(patience):
                end(text)

    work = ended, pause, seconds, progress, report, end is not None
    # A daemon: an interpreter that ends within the block must not wait for it.
    thread = threading.Thread(target=_watch, args=work, name="expbase-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_stacks(path: Path) -> None:
    # It writes below Python: to a file with a descriptor, not to a logger.
    with open(path, "ab", opener=regular) as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _watch(
    ended: threading.Event,
    pause: float,
    seconds: float,
    progress: Callable[[], dict[str, Any]],
    report: Callable[[str], None],
    ends: bool,
) -> None:
    before: dict[str, Any] = {}
    since = time.monotonic()
    while not ended.wait(pause):
        if ends:
            faulthandler.dump_traceback_later(seconds + _LATER_SECONDS, exit=True, file=2)
        now = progress()
        if now != before:
            before = now
            since = time.monotonic()
        elif time.monotonic() - since >= seconds:
            since = float("inf")  # once, until something moves
            where = " ".join(f"{name}={value}" for name, value in now.items())
            report(f"no progress for {seconds:g} s: {where}")
    if ends:
        faulthandler.cancel_dump_traceback_later()


def _waits_for_others() -> bool:
    """Returns whether the main thread is in paddle, perhaps in a collective, or waits for ranks."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return str(frame.f_globals.get("__name__")).startswith(("paddle.", "expbase.ranks."))
