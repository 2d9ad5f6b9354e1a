"""Why a run should stop before its end: signals, a file, a time limit, a call.

A wish is only noted; the loop ends after the iteration under way, saves, and answers with the
wish's exit code. With several ranks, one rank's wish becomes the decision of all (distributed.py).
Signal handlers stand only while `heard` is open, in the main thread.

    wishes = StopRequests(output_dir / "STOP", time_limit_seconds=3600)
    with wishes.heard(notify): ...         # signals are noted, and notify() is called
    wishes.look()                          # at the file and the clock
    wishes.wish                            # the strongest so far
"""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

_NOW_SECONDS = 1.0  # a second Ctrl-C within this time means now


class StopReason(enum.IntEnum):
    """Why to stop; of several the greatest counts."""

    NONE = 0
    CALL = 1
    FILE = 2
    TIME_LIMIT = 3
    SIGUSR1 = 4
    SIGTERM = 5
    CTRL_C = 6

    @property
    def exit_code(self) -> int:
        """What the process answers after it stopped for this reason."""
        return _EXIT_CODES[self]

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    StopReason.NONE: "nothing",
    StopReason.CALL: "stop() was called",
    StopReason.FILE: "a file named STOP",
    StopReason.TIME_LIMIT: "training.time_limit_seconds",
    StopReason.SIGUSR1: "SIGUSR1",
    StopReason.SIGTERM: "SIGTERM",
    StopReason.CTRL_C: "Ctrl-C",
}
_EXIT_CODES = dict.fromkeys(StopReason, 0) | {
    StopReason.TIME_LIMIT: 124,
    StopReason.SIGUSR1: 143,  # the scheduler's warning that SIGTERM will come
    StopReason.SIGTERM: 143,
    StopReason.CTRL_C: 130,
}
_SIGNALS = {
    signal.SIGUSR1: StopReason.SIGUSR1,
    signal.SIGTERM: StopReason.SIGTERM,
    signal.SIGINT: StopReason.CTRL_C,
}


class StopRequests:
    """What has been wished in this process.

    Args:
        stop_file: Its existence is a wish; None: not looked for (on ranks other than 0).
        time_limit_seconds: From now; 0: none.
        clock: Gives seconds; only differences count.

    Attributes:
        wish: The strongest so far.
    """

    def __init__(
        self,
        stop_file: Path | None,
        time_limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wish = StopReason.NONE
        self._stop_file = stop_file
        self._limit = time_limit_seconds
        self._clock = clock
        self._began = clock()
        self._last_ctrl_c = float("-inf")

    def add(self, wish: StopReason) -> None:
        """Notes one more."""
        self.wish = max(self.wish, wish)

    def look(self) -> None:
        """Looks at the file and the clock."""
        if self._limit and self._clock() - self._began >= self._limit:
            self.add(StopReason.TIME_LIMIT)
        if self._stop_file is not None and self._stop_file.exists():
            self.add(StopReason.FILE)

    def fulfilled(self) -> None:
        """Removes the file, so that the next start does not stop at once."""
        if self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def heard(self, notify: Callable[[], None]) -> Iterator[None]:
        """Notes SIGTERM, SIGUSR1 and Ctrl-C inside the block; the handlers before come back.

        A second Ctrl-C within a second raises KeyboardInterrupt. SIGTERM may come many times:
        paddle's launcher sends it up to three times to every process of a group.

        Args:
            notify: Called after each wish, from the handler: it must only set a value.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can set handlers
            return

        def note(signum: int, frame: Any) -> None:
            now = self._clock()
            if signum == signal.SIGINT and now - self._last_ctrl_c < _NOW_SECONDS:
                raise KeyboardInterrupt
            if signum == signal.SIGINT:
                self._last_ctrl_c = now
            self.add(_SIGNALS[signal.Signals(signum)])
            notify()

        paddle.disable_signal_handler()  # paddle's own would end the process with a C++ trace
        before = {signum: signal.signal(signum, note) for signum in _SIGNALS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
