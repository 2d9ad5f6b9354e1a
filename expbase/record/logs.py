"""The text log of a run: loggers that write to a file and to the terminal.

There is a logger from the beginning; it keeps its lines until there is a file.

    logger = early_log()
    open_log(logger, directory / "worker_0.log", echo=True)
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
import warnings
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from expbase.base.files import AppendedFile
from expbase.base.terminal import behind, say

# Before each reason why a resume is not exact; `verify` looks for it in the log.
NOT_EXACT = "not exact: "

_OF_BATCH_NORM = (
    "ignore", re.compile("When training, we now always track global mean"), UserWarning, None, 0,
)  # fmt: skip


def early_log() -> logging.Logger:
    """Returns a logger, named `expbase`, that keeps its lines until `open_log` writes them.

    It is not the one of `logging.getLogger`: two experiments in a process must not write into each
    other's file, and paddle's handler at the root logger must not print every line again.
    """
    logger = logging.Logger("expbase", logging.INFO)
    logger.addHandler(logging.NullHandler())  # without a handler Python prints to stderr
    logger.addHandler(MemoryHandler(0))
    return logger


def open_log(logger: logging.Logger, path: Path | None, *, echo: bool) -> None:
    """Opens a logger of `early_log`, and writes the lines that it has kept.

    Args:
        logger: The logger.
        path: The file to append to; None: no file.
        echo: Also write lines to stderr, without the tracebacks that Python prints there.
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


def is_early(logger: logging.Logger) -> bool:
    """Returns whether a logger still keeps its lines: `open_log` was not called."""
    return any(isinstance(handler, MemoryHandler) for handler in logger.handlers)


def close_log(logger: logging.Logger) -> None:
    """Closes the file; what is logged later is dropped. May be called twice."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.addHandler(logging.NullHandler())


@contextlib.contextmanager
def paddle_repeats_nothing() -> Iterator[None]:
    """Silences, in the block, what paddle would say again and again.

    At its import paddle adds a handler to the root logger (paddle/distributed/utils/log_utils.py,
    get_logger, called with the name "root"), which prints what a handler of the author's prints,
    too. And each BatchNorm warns in training of what everybody expects (paddle/nn/layer/norm.py,
    _BatchNormBase.forward): Python shows that once, but once more
    after whatever touches its filters of warnings, such as a subprocess, a picture, a metric of
    sklearn.
    """
    filters: Any = warnings.filters
    filters.insert(0, _OF_BATCH_NORM)  # filterwarnings() would touch them, too
    handlers = [h for h in logging.getLogger().handlers if _is_paddles(h)]
    for handler in handlers:
        handler.addFilter(_is_printed_by_paddle_alone)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_printed_by_paddle_alone)
        with contextlib.suppress(ValueError):  # somebody has put back those of before
            filters.remove(_OF_BATCH_NORM)


def _is_paddles(handler: logging.Handler) -> bool:
    formatter = handler.formatter
    return formatter is not None and "[%(levelname)8s]" in str(vars(formatter).get("_fmt"))


def _is_printed_by_paddle_alone(record: logging.LogRecord) -> bool:
    """Returns whether no handler but paddle's writes a record to the terminal."""
    terminals = [*map(behind, (sys.stdout, sys.stderr)), sys.__stdout__, sys.__stderr__]
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        for handler in logger.handlers:
            console = getattr(handler, "console", None)  # of rich
            stream = behind(getattr(handler, "stream", None) or getattr(console, "file", None))
            if stream is not None and stream in terminals and not _is_paddles(handler):
                return False
        logger = logger.parent if logger.propagate else None
    return True


class _Lines(logging.Handler):
    """Writes the time and the text of each line, and the level from WARNING on.

    Lines go to a file, or to sys.stderr of the moment, which is rich's while a progress bar is
    shown. Tracebacks, and lines that the bar shows (`extra={"is_shown": True}`), do not go to
    stderr.

    Args:
        file: The file; None: stderr.
    """

    def __init__(self, file: AppendedFile | None) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.file is not None:
                line = _line(record, "%Y-%m-%d %H:%M:%S")
                if record.exc_info:
                    line += f"\n{logging.Formatter().formatException(record.exc_info)}"
                self.file.append(f"{line}\n".encode("utf-8", "backslashreplace"))
            elif not getattr(record, "is_shown", False):
                say(_line(record, "%H:%M:%S"))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()


def _line(record: logging.LogRecord, dates: str) -> str:
    now = time.strftime(dates, time.localtime(record.created))
    mark = f"{record.levelname}: " if record.levelno > logging.INFO else ""
    return f"{now} {mark}{record.getMessage()}"
