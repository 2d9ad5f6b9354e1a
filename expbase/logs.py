"""The text log of a run: loggers that write to a file and to the terminal.

There is a logger from the beginning; it keeps its lines until there is a file.

    logger = early_log()
    open_log(logger, directory / "worker_0.log", echo=True)
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path


def early_log() -> logging.Logger:
    """A logger, named `expbase`, that keeps its lines until `open_log` writes them.

    It is not the one of `logging.getLogger`: two experiments in a process must not write into each
    other's file, and paddle's handler at the root logger must not print every line again.
    """
    logger = logging.Logger("expbase", logging.INFO)
    logger.addHandler(logging.NullHandler())  # without a handler Python prints to stderr
    logger.addHandler(MemoryHandler(0))
    return logger


def open_log(logger: logging.Logger, path: Path | None, *, echo: bool) -> None:
    """Opens a logger of `early_log`, and writes the lines that it kept.

    Args:
        logger: The logger.
        path: The file to append to; None: no file.
        echo: Whether lines also go to stderr, without the tracebacks that Python prints there.
    """
    early = [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]
    if path is not None:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(_Formatter("%Y-%m-%d %H:%M:%S", tracebacks=True))
        logger.addHandler(file)
    if echo:
        console = _Echo()
        console.setFormatter(_Formatter("%H:%M:%S", tracebacks=False))
        logger.addHandler(console)
    for handler in early:
        logger.removeHandler(handler)
        for record in handler.buffer:
            logger.handle(record)


def close_log(logger: logging.Logger) -> None:
    """Closes the file; what is logged later is dropped. May be called twice."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.addHandler(logging.NullHandler())


@contextlib.contextmanager
def routine_elsewhere(logger: logging.Logger, is_shown: Callable[[], bool]) -> Iterator[None]:
    """Keeps lines of `extra={"is_routine": True}` off the terminal while `is_shown()`.

    They say what the live line shows.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (getattr(record, "is_routine", False) and is_shown())

    echoes = [handler for handler in logger.handlers if isinstance(handler, _Echo)]
    for handler in echoes:
        handler.addFilter(is_wanted)
    try:
        yield
    finally:
        for handler in echoes:
            handler.removeFilter(is_wanted)


class _Echo(logging.Handler):
    """Writes to what is sys.stderr at the moment: while a live line is shown, that is rich's.

    What is shown in another way (`extra={"is_shown": True}`) is left out.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_shown", False):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Time and text; the level only if it is worth attention."""

    def __init__(self, date_format: str, *, tracebacks: bool) -> None:
        super().__init__(datefmt=date_format)
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        # The base class would leave the traceback's text in the record, which all handlers share.
        mark = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        text = f"{self.formatTime(record, self.datefmt)} {mark}{record.getMessage()}"
        if self._tracebacks and record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text
