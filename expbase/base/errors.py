"""What is added to an exception on its way, for who reads its traceback."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an error: which samples it was raised for, say."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args += (note,)
