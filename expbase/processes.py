"""Child processes on Linux: none outlives its parent, however that ends.
A leaf over the standard library.

    with forking(): start_children()
    die_with_parent()                          # in a child without files of its own
    end_with_parent("/dev/shm/paddle_77_*")    # in a child whose files are removed, too
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LAUNCHER = "paddle.distributed.launch"


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent, whose id may be known, ends."""
    parent = parent or os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call, so the kernel will send nothing
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


@contextlib.contextmanager
def sigterm_held() -> Iterator[None]:
    """Around the start of processes that call `leave_process_group`: SIGTERM waits meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group() -> None:
    """Makes this process survive the signals of its group, those since `sigterm_held`, too."""
    os.setpgrp()
    while signal.sigtimedwait({signal.SIGTERM}, 0):  # came before, and was for the whole group
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_with_parent(files: str) -> None:
    """Ends this process when its parent ends, and then removes the files of a glob pattern."""
    # Multiprocessing knows who started this process. The system may not any more: when a process
    # dies, its children get another parent, and that is also how they learn of it. The change is
    # seen at once, even if nobody has asked for the dead parent's exit code.
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    threading.Thread(target=_wait_and_end, args=(parent, files), daemon=True).start()


def _wait_and_end(parent: int, files: str) -> None:
    _wait_for_another_parent(parent)
    # This process cannot remove its files by itself: until it is dead, its main thread may make
    # another one. So it starts a child, which waits for that death.
    worker = os.getpid()
    if os.fork():
        os._exit(1)  # ends all threads at once
    _wait_for_another_parent(worker)
    for path in glob.glob(files):
        with contextlib.suppress(FileNotFoundError):  # one gone already must not keep the others
            os.unlink(path)
    os._exit(0)


def _wait_for_another_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.05)


def python(count: int, log_dir: Path) -> list[str]:
    """The command that starts python, in several processes under paddle's launcher."""
    if count == 1:
        return [sys.executable]
    options = ["--nproc_per_node", str(count), "--log_dir", str(log_dir)]
    return [sys.executable, "-m", LAUNCHER, *options]


def exit_code(returncode: int) -> int:
    """The code that a shell shows for a child's return code: 128 + n for the signal n."""
    return 128 - returncode if returncode < 0 else returncode
