"""Notes that are added to an exception, for the reader of its traceback."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an error, such as the samples for which it was raised."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args += (note,)
