"""The text log of a run: loggers that write to a file and to the terminal.

There is a logger from the beginning; it keeps its lines until there is a file.

    logger = early_log()
    open_log(logger, directory / "worker_0.log", echo=True)
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from expbase.appended import AppendedFile


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
    """Opens a logger of `early_log`: appends to the file, if any, also the lines that it kept.

    With `echo` lines also go to stderr, without the tracebacks that Python prints there.
    """
    early = [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]
    if path is not None:
        file = AppendedFile(path)
        file.open()  # if that cannot be, it is an error now
        logger.addHandler(_Lines(file))
    if echo:
        logger.addHandler(_Lines(None))
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


def log_routine(logger: logging.Logger, text: str) -> None:
    """A line of training: `logger.info(text)` in a third of the time.

    No record is made for what needs none, and a terminal with a live line does not get it.
    """
    for handler in logger.handlers if logger.isEnabledFor(logging.INFO) else []:
        if isinstance(handler, _Lines):
            handler.write_routine(text)
        elif not isinstance(handler, logging.NullHandler):
            handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))


@contextlib.contextmanager
def routine_elsewhere(logger: logging.Logger, is_shown: Callable[[], bool]) -> Iterator[None]:
    """Keeps lines of `log_routine` off the terminal while `is_shown()`.

    They say what the live line shows.
    """
    echoes = [h for h in logger.handlers if isinstance(h, _Lines) and h.file is None]
    for handler in echoes:
        handler.is_shown_elsewhere = is_shown
    try:
        yield
    finally:
        for handler in echoes:
            handler.is_shown_elsewhere = None


class _Lines(logging.Handler):
    """Writes time and text of each line; the level only if it is worth attention.

    Into a file; or to what is sys.stderr at the moment, which is rich's while a live line is shown.
    There what is shown in another way (`extra={"is_shown": True}`) is left out, and tracebacks.
    """

    def __init__(self, file: AppendedFile | None) -> None:
        super().__init__()
        self.file = file
        self.is_shown_elsewhere: Callable[[], bool] | None = None  # a routine line
        self._time_format = "%H:%M:%S " if file is None else "%Y-%m-%d %H:%M:%S "
        self._second, self._time = -1, ""  # of the line before: to format a time takes long

    def emit(self, record: logging.LogRecord) -> None:
        if self.file is None and getattr(record, "is_shown", False):
            return
        try:
            mark = f"{record.levelname}: " if record.levelno > logging.INFO else ""
            text = f"{mark}{record.getMessage()}"
            if self.file is not None and record.exc_info:
                text += "\n" + logging.Formatter().formatException(record.exc_info)
            self._write(text, record.created)
        except Exception:
            self.handleError(record)

    def write_routine(self, text: str) -> None:
        if self.is_shown_elsewhere is None or not self.is_shown_elsewhere():
            try:
                with self.lock:  # type: ignore[union-attr]  # the base class makes it
                    self._write(text, time.time())
            except Exception:
                self.handleError(logging.makeLogRecord({"msg": text}))

    def _write(self, text: str, now: float) -> None:
        if self._second != (second := int(now)):
            self._second, self._time = second, time.strftime(self._time_format, time.localtime(now))
        line = f"{self._time}{text}\n"
        if self.file is not None:
            self.file.append(line.encode("utf-8", "backslashreplace"))
        elif sys.stderr is not None:  # it was closed: 2>&-
            sys.stderr.write(line)
            sys.stderr.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()
