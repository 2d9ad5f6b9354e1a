"""Output to a terminal that may be gone, or that may lack characters.

Everything that a run prints goes through this file: a run must not end because nobody can read it.

    say("starts again in 3 s")    # on stderr; never an error
    with lasting(): ...           # in the block a print() of the user raises none either
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
    """Prints a text to stdout, for which the user has asked; an OSError if that fails."""
    print(shown(text), end=end, flush=True)


def escaped(text: str) -> str:
    """Returns a text with escapes for line ends and other characters that are not printed."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(text: str, stream: Any = None) -> str:
    """Returns a text with escapes for the characters that a stream lacks.

    Args:
        text: The text.
        stream: By default stdout.
    """
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(UnicodeEncodeError):
        text.encode(encoding)
        return text
    return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


def show_any_character() -> None:
    """Makes stdout and stderr write an escape for each character that they lack."""
    for stream in (sys.stdout, sys.stderr):
        # A notebook's stream has no such method. And the call writes the buffer, so it fails if the
        # terminal is gone.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


class Lasting(io.TextIOBase):
    """A text stream that drops what is written, without an error, when nobody can read it.

    All other attributes are those of the stream behind it.
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
        except UnicodeEncodeError:  # and nothing was written yet
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
        """Redirects the stream to /dev/null if its reader is gone.

        Else Python would fail to write its buffer at exit, and the exit code would be 120.
        """
        if getattr(error, "errno", None) in _GONE:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


def behind(stream: Any) -> Any:
    """Returns the stream behind a Lasting; any other stream itself."""
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
            if getattr(sys, name) is stream:  # else the user has set another one
                setattr(sys, name, before[name])
