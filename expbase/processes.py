"""What the processes that expbase starts have in common: none of them outlives its parent.

A leaf over the standard library, for Linux; elsewhere `die_with_parent` does nothing, and a
parent that was killed with -9 may leave processes behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def exit_code(returncode: int) -> int:
    """The code that a shell shows for a child's return code: 128 + n for the signal n."""
    return 128 - returncode if returncode < 0 else returncode
