"""Errors that expbase raises on purpose, and notes for the reader of a traceback.

The text of a Mistake says what to do, so it is shown as a sentence, without a traceback. Each is
also an error of Python's, by which it can be caught, and which decides on the exit code.

    raise ValueMistake("--port: 70000 given; expected 0 to 65535.")
"""

from __future__ import annotations


class Mistake(Exception):
    """What expbase raises on purpose, with a text that says what to do."""


class AttributeMistake(Mistake, AttributeError):
    """An AttributeError with what to do."""


class ConfigError(Mistake, ValueError):
    """A value that a user wrote into a config, a file or an option cannot be used."""

    exit_code = 78  # ExitCode.MISTAKE, also if another error is the cause; that file imports this


class KeyMistake(Mistake, KeyError):
    """A KeyError with what to do."""


class NotImplementedMistake(Mistake, NotImplementedError):
    """A NotImplementedError with what to do."""


class OSMistake(Mistake, OSError):
    """An OSError with what to do."""


class RuntimeMistake(Mistake, RuntimeError):
    """A RuntimeError with what to do."""


class TimeoutMistake(Mistake, TimeoutError):
    """A TimeoutError with what to do."""


class TypeMistake(Mistake, TypeError):
    """A TypeError with what to do."""


class ValueMistake(Mistake, ValueError):
    """A ValueError with what to do."""


def is_on_purpose(error: BaseException) -> bool:
    """Returns whether an error is a Mistake, and no other error has led to it."""
    has_other = error.__cause__ or (error.__context__ and not error.__suppress_context__)
    return isinstance(error, Mistake) and not has_other


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an error, such as the samples for which it was raised."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args += (note,)
