"""An error as a sentence on the terminal, below the line of the user's code that led to it.

A traceback would hide what the text of a Mistake says; a log has it.

    if is_on_purpose(error): print(sentence("train.py", error))
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

_OURS = __name__.partition(".")[0]
# Modules whose lines say nothing to a user.
_OF_OTHERS = {*sys.stdlib_module_names, "paddle"}


def sentence(prog: str, error: BaseException) -> str:
    """Returns the text for the terminal: the line of the user's code, if any, and the sentence."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{users_line(error)}{prog}: error: {error}{notes}"


def users_line(error: BaseException) -> str:
    """Returns the last line of the user's code in a traceback, as Python shows it; else "".

    The line that has called expbase, such as `main(Experiment)`, does not count.
    """
    found = [traceback.extract_tb(frame, 1) for frame in _inside(error)]
    return "".join(found[-1].format()) if found else ""


def _inside(error: BaseException) -> Iterator[TracebackType]:
    """Yields the frames of the user's code that expbase has called."""
    is_inside = False
    for frame in _frames(error):
        module = _module(frame)
        is_inside |= module == _OURS
        if is_inside and module != _OURS and module not in _OF_OTHERS:
            yield frame


def _frames(error: BaseException) -> Iterator[TracebackType]:
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _module(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
