"""What a process says on its terminal, which may be gone, or may lack the characters.

Whatever a run says goes through here: that nobody can read it must not end the run.

    say("starts again in 3 s")    # on stderr; never an error
    with lasting(): ...           # in the block a print() of the user's is none either
    show_any_character()          # in a program's main: characters that are missing are no error
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

_GONE = (errno.EIO, errno.EPIPE)  # its window was closed; the process that read it has ended
_PLAIN = str.maketrans({"…": "...", "→": "->"})  # for a terminal that lacks these


def say(text: str) -> None:
    """Writes a line to stderr, if somebody can read it."""
    if sys.stderr is not None:  # as after `2>&-`
        stream = Lasting(sys.stderr)
        stream.write(f"{text}\n")
        stream.flush()


def show(text: str, end: str = "\n") -> None:
    """Prints to stdout what was asked for; an OSError if that cannot be."""
    print(shown(text), end=end, flush=True)


def shown(text: str, stream: Any = None) -> str:
    """Returns the text as a stream can show it, by default stdout: what it lacks as an escape."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(UnicodeEncodeError):
        text.encode(encoding)
        return text
    return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


def show_any_character() -> None:
    """Makes stdout and stderr write an escape for each character that they lack."""
    for stream in (sys.stdout, sys.stderr):
        # A notebook's cannot; and what waits in one is written now, for which it may be gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


class Lasting(io.TextIOBase):
    """A stream for text that loses what is written once nobody can read it: no error.

    All else is what the other stream does.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # it is being copied
            raise AttributeError(name)
        return getattr(self._stream, name)

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        return getattr(self._stream, "encoding", None)

    @property
    def errors(self) -> Any:  # type: ignore[override]
        return getattr(self._stream, "errors", None)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # nothing of it was written
            self.write(shown(text, self._stream))
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._let_go(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        """Leads it nowhere if its reader is gone: what waits in it is written at python's end,
        which would answer 120.
        """
        if getattr(error, "errno", None) in _GONE:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


def behind(stream: Any) -> Any:
    """Returns the stream that a Lasting writes to; another one as it is."""
    return vars(stream)["_stream"] if isinstance(stream, Lasting) else stream


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Makes stdout and stderr Lasting in the block."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    ours = {name: Lasting(stream) for name, stream in before.items() if stream is not None}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in ours.items():
            stream.flush()
            if getattr(sys, name) is stream:  # and not one that the user has put there
                setattr(sys, name, before[name])
