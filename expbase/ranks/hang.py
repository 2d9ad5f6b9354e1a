"""Where a rank hangs: the stacks of all threads, when nothing has moved for a while; and its end.

A thread looks from time to time at what should move; this costs the loop nothing.

    with watching(600, progress=lambda: {"iteration": …}, logger=logger, path=log_file): ...

With `end` the process is ended then, whatever its main thread does.

Where the thread cannot act, since C code holds Python's lock, faulthandler's does some seconds
later: the same stacks, under "Timeout". It could not do all of this alone: it cannot save, name
what hangs or wait for other ranks, and if each iteration armed it anew, by a thread of the system,
an iteration that does nothing would take almost three times as long.
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
from typing import Any, BinaryIO

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
    """Writes all stacks to a file when nothing moved for so long in the block, once for each time.

    `progress` returns what should move, by name; `path` is the logger's file. With `end`, which is
    called with what hangs, the process ends. `parallel`: it may wait for another rank.
    """
    ended = threading.Event()
    # Written to below Python: a file with a descriptor, not a logger.
    with open(path, "ab", opener=regular) as file:
        work = (ended, seconds, progress, logger, file, end, parallel)
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
    logger: logging.Logger,
    file: BinaryIO,
    end: Callable[[str], object] | None,
    parallel: bool,
) -> None:
    pause = min(seconds / 4, 5.0)
    before = progress()
    since = time.monotonic()
    is_reported = False
    while True:
        # What ends the process does not wait for a disk that may not answer.
        where: Any = file if end is None else 2
        faulthandler.dump_traceback_later(
            seconds + _LATER_SECONDS, file=where, exit=end is not None
        )
        if ended.wait(pause):
            return faulthandler.cancel_dump_traceback_later()
        now = progress()
        if now != before:
            before = now
            since = time.monotonic()
            is_reported = False
        elif not is_reported and time.monotonic() - since >= seconds:
            is_reported = True
            words = " ".join(f"{name}={value}" for name, value in now.items())
            text = f"no progress for {seconds:g} s: {words}"
            try:
                next_ = "this rank ends" if end is not None else "the run goes on"
                logger.warning(_TEXT, text, Path(file.name).name, next_)
                faulthandler.dump_traceback(file, all_threads=True)
            finally:
                # Only now: a rank that waits for this one writes its stacks, too. And it ends
                # later, so that the one that it waits for is named.
                patience = 6 * pause if parallel and _waits_for_others() else 2 * pause
                if end is not None and not ended.wait(patience):
                    end(text)


def _waits_for_others() -> bool:
    """Returns whether the main thread is in paddle, perhaps in a collective, or waits for all
    ranks.
    """
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return str(frame.f_globals.get("__name__")).startswith(("paddle.", "expbase.ranks."))
