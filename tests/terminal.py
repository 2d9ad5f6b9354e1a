"""A terminal for tests: a program in it, its keys, and what stands on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pyte
from forks import LONG_SECONDS


class Terminal:
    """A program that runs in a terminal of its own.

    Args:
        words: Its command.
        columns: Of the screen.
        rows: Of the screen; what is above them is lost.
        environment: Changes to this process's variables.
    """

    def __init__(
        self, words: Sequence[str], columns: int, rows: int = 60, **environment: str
    ) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # the program
            kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
            # Not by execv: readline, which pytest loads, has put COLUMNS where python sees it not.
            os.execve(words[0], [*words], {**kept, "TERM": "xterm-256color", **environment})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.exit_code: int | None = None

    @property
    def text(self) -> str:
        """What stands on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def wait(self, until: Callable[[str], object] = lambda text: False) -> str:
        """Reads until the screen is as wanted, or the program has ended; gives the screen."""
        end = time.monotonic() + LONG_SECONDS
        while time.monotonic() < end:
            if not select.select([self._fd], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # the program has closed it
                data = b""
            if not data:
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                return self.text
            self._stream.feed(data)
            if until(self.text):
                return self.text
        raise TimeoutError(f"after {LONG_SECONDS} s the screen was:\n{self.text}")

    def type(self, text: str) -> None:
        """Types."""
        os.write(self._fd, text.encode())


@contextlib.contextmanager
def terminal(
    words: Sequence[str], columns: int = 80, rows: int = 60, **environment: str
) -> Iterator[Terminal]:
    """A terminal whose program is ended with the block."""
    shown = Terminal(words, columns, rows, **environment)
    try:
        yield shown
    finally:
        if shown.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shown.pid, signal.SIGKILL)
            os.waitpid(shown.pid, 0)
        os.close(shown._fd)
