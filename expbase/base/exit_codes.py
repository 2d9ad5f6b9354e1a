"""The exit codes of our processes.

A process that a signal has ended, without a handler, has a negative code, and counts as failed.
"""

from __future__ import annotations

import enum
import os
import re
import traceback

from expbase.base.errors import is_on_purpose


class ExitCode(enum.IntEnum):
    """The exit codes of a process of ours."""

    FINISHED = 0
    ERROR = 1
    MISTAKE = 78  # EX_CONFIG of sysexits.h: no other start would mend it
    TIME_LIMIT = 124  # as the command `timeout` answers
    SIGHUP = 129  # 128 and the number of the signal, as a shell has it
    SIGINT = 130
    SIGTERM = 143

    __str__ = int.__repr__  # as from Python 3.11 on


# After each of these the run was saved, and the same command continues it.
STOPPED = (ExitCode.TIME_LIMIT, ExitCode.SIGHUP, ExitCode.SIGINT, ExitCode.SIGTERM)
# Exceptions that mean a mistake in the experiment, and not in its surroundings, if they are raised
# in setup or by expbase itself.
_MISTAKES = (TypeError, ValueError, AttributeError, NameError)
# Of a path that was given: no other start would find something else there.
_OF_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
# Paddle's words in a ValueError when another rank has ended while they connect:
# paddle/phi/core/distributed/store/tcp_utils.h.
_LOST = re.compile("TCP (receive|send) error|TCP connection reset")


def exit_code_of(error: BaseException, *, in_setup: bool = False) -> int:
    """Returns the exit code of a process that ends by an exception.

    Args:
        error: The exception.
        in_setup: Whether it was raised before training began.
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.ERROR
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, _OF_PATHS):
            return ExitCode.ERROR  # such as a full disk: another start may succeed
        cause = cause.__cause__
    if _LOST.search(str(error)):
        return ExitCode.ERROR
    if isinstance(error, _MISTAKES) and (in_setup or is_on_purpose(error)):
        return ExitCode.MISTAKE
    return getattr(error, "exit_code", ExitCode.ERROR)


def refuse_early_success(error: BaseException) -> None:
    """Turns an exit with code 0 into one with code 1 and a message: the run has not finished.

    Python prints the code of a SystemExit if it is a text, and exits with 1.
    """
    if isinstance(error, SystemExit) and not error.code:
        caller = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{caller.name} ({os.path.basename(caller.filename)}:{caller.lineno})"
        error.code = (
            f"sys.exit({error.code!r}) called in {place}: the run has not finished, so the process "
            "answers 1; expected self.stop(), or an exception."
        )
        error.args = (error.code,)
