"""What the processes that expbase starts have in common: none of them outlives its parent.

A leaf over the standard library, for Linux; elsewhere nothing is done, and a parent that was
killed with -9 may leave processes and files behind.

    with forking(): start_children()
    die_with_parent()                          # in a child without files of its own
    end_with_parent("/dev/shm/paddle_77_*")    # in a child whose files go too
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LAUNCHER = "paddle.distributed.launch"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process when its parent ends, however it ends.

    Args:
        parent: Its number, if it is known: it may have ended before this call.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Around the start of processes by fork: the children never collect their parent's garbage.

    Garbage may hold things whose end waits for a thread, such as paddle's readers, and a child has
    none of its parent's threads: it would wait for ever.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_with_parent(files: str) -> None:
    """Ends this process when its parent ends, and then removes files.

    A thread waits for the parent's end, which may have come before this call. The files are
    removed by a process of their own when this one is dead, so that it cannot make another in
    between.

    Args:
        files: A pattern as `glob` has it.
    """
    if not hasattr(os, "pidfd_open"):
        die_with_parent()
        return
    started_by = multiprocessing.parent_process()  # the system gives orphans another parent
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        os._exit(1)
    if os.getppid() != parent:  # the number may be another process's by now
        os._exit(1)
    threading.Thread(target=_wait_for_the_end, args=(descriptor, files), daemon=True).start()


def _wait_for_the_end(descriptor: int, files: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    worker = os.getpid()
    if os.fork():
        os.kill(worker, signal.SIGKILL)
    while os.getppid() == worker:
        time.sleep(0.01)
    for path in glob.glob(files):
        os.unlink(path)
    os._exit(0)


def python(count: int, log_dir: Path) -> list[str]:
    """The words that start python: several times at once under paddle's launcher.

    Args:
        count: Of processes.
        log_dir: For what the launcher writes.
    """
    if count == 1:
        return [sys.executable]
    options = ["--nproc_per_node", str(count), "--log_dir", str(log_dir)]
    return [sys.executable, "-m", LAUNCHER, *options]


def exit_code(returncode: int) -> int:
    """The code that a shell shows for a child's return code: 128 + n for the signal n."""
    return 128 - returncode if returncode < 0 else returncode
