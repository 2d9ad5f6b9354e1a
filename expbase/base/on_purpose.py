"""Exceptions that expbase raises on purpose: the text says what to do, a traceback would hide it.

Such an exception comes from a `raise` of this package, and has no other exception as its cause. On
the terminal it is a sentence, below the line of the user's code that led to it; a log has its
traceback.

    if is_on_purpose(error): print(sentence("train.py", error))
"""

from __future__ import annotations

import dis
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

_OURS = __name__.partition(".")[0]
# Modules whose lines say nothing to a user.
_OF_OTHERS = {*sys.stdlib_module_names, "paddle"}
_RAISE = dis.opmap["RAISE_VARARGS"]


def is_on_purpose(error: BaseException) -> bool:
    """Returns whether expbase has raised an error by itself: with a text, and without a cause."""
    has_other = error.__cause__ or (error.__context__ and not error.__suppress_context__)
    frames = [*_frames(error)]
    if has_other or not frames or not str(error):
        return False
    last = frames[-1]
    # Else Python or C code has raised it: a mistake in expbase, or an error of another package.
    is_raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
    return is_raised and _module(last) == _OURS


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
