"""Child processes on Linux: none outlives its parent, however that ends.
A leaf over the standard library and terminal.py.

    with forking(): start_children()
    die_with_parent()                     # in the child: the kernel kills it
    end_with_parent(os.getppid(), tidy)   # in the child: it tidies up first
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from expbase.base.terminal import say

# Schedulers send them as a warning, and the user's code may have a use of its own for them.
_OFTEN_THE_USERS = ("SIGUSR2", "SIGXCPU")
_ours: list[Any] = []  # the handlers that `handling` has set
_LOOK_SECONDS = 0.2  # how often a child looks whether its parent is there
# Gloo's limit is kTimeoutDefault of gloo/context.cc, and paddle does not change it.
_ABORTED = " (gloo aborts a rank when another one is 30 s late, or gone)"
# Loaded before a worker is forked, which would take ten times as long for it. Not on Windows.
_C: Any = ctypes.CDLL(None) if os.name == "posix" else None


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent ends.

    Args:
        parent: The id of the parent; None: the parent of now.
    """
    parent = parent or os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    _C.prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call, so the kernel will send nothing
        os._exit(1)


def end_with_parent(parent: int, finish: Callable[[], object]) -> None:
    """Ends this process when its parent has ended, by a thread.

    Unlike `die_with_parent` it leaves time to tidy up, and it waits for the end of the whole
    parent, not of the thread that has started this process. It cannot interrupt code in C that
    keeps Python's lock.

    Args:
        parent: The id of the parent.
        finish: Called before the end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        try:
            finish()
        finally:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to stop: those of schedulers, systems and terminals."""
    warnings = signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
    return *warnings, signal.SIGHUP, signal.SIGTERM, signal.SIGINT


def hears_signals() -> bool:
    """Returns whether this is the main thread, to which alone Python gives signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Surrounds the start of processes by fork, so that they never collect their parent's garbage.

    Garbage may hold objects whose end waits for a thread, such as paddle's readers
    (paddle/io/dataloader/dataloader_iter.py, _shutdown_thread). A child has none of its parent's
    threads: it would wait for ever.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def signals_held(signums: Iterable[int]) -> Iterator[None]:
    """Delays these signals until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Handles signals in the block, but those that are others'; restores the handlers at its
    end.
    """
    ours = {signum: handler for signum, handler in handlers.items() if not is_others(signum)}
    _ours.extend(ours.values())
    before = {signum: signal.signal(signum, handler) for signum, handler in ours.items()}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, signal.SIG_DFL if old is None else old)
            _ours.remove(ours[signum])


def is_others(signum: int) -> bool:
    """Returns whether a signal stays as it is: SIGHUP under nohup, and SIGUSR2 or SIGXCPU if the
    user's code handles it, or whoever started this process ignores it.
    """
    if signum == signal.SIGHUP:
        return signal.getsignal(signum) == signal.SIG_IGN
    if signal.Signals(signum).name not in _OFTEN_THE_USERS or signal.getsignal(signum) in _ours:
        return False
    # Not by getsignal: it does not know the handlers in C, such as faulthandler.register's.
    masks = re.findall(r"Sig(?:Ign|Cgt):\t(\w+)", Path("/proc/self/status").read_text())
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def ended_by_sigterm() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM end this process in the block, with code 143, also as a container's first.

    That process has the id 1, for which the system ignores signals without a handler. Only the main
    thread can set a handler; in another thread nothing changes.
    """
    end: dict[int, Any] = {signal.SIGTERM: lambda signum, frame: sys.exit(128 + signum)}
    return handling(end if hears_signals() else {})


def ended_at_once_by_signals() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM and Ctrl-C end this process at once in the block, also while it waits in C++.

    A handler of Python's would run only when that returns, which it may never do. Nothing is
    tidied up then. A signal that is ignored stays so, and a container's first process, for which
    the system ignores signals without a handler, keeps its own.
    """
    signums = (signal.SIGTERM, signal.SIGINT) if hears_signals() and os.getpid() != 1 else ()
    heard = [signum for signum in signums if signal.getsignal(signum) != signal.SIG_IGN]
    return handling(dict.fromkeys(heard, signal.SIG_DFL))


@functools.cache  # once in a process
def ignore_signals_at_exit(signums: Iterable[int]) -> None:
    """Ignores signals once the program has ended, when the exit code is decided already.

    Python and paddle take a second to unload, in which a signal would change it.
    """
    atexit.register(lambda: [signal.signal(signum, signal.SIG_IGN) for signum in signums])


def survive_signals() -> None:
    """Makes this process survive SIGTERM, blocked or not, and the signals of its process group.

    Some schedulers send them to every process that they know. The parent decides when this process
    ends.
    """
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_fork(error: BaseException) -> NoReturn:
    """Ends this process, a fork of user code, by what was raised in it; nothing is tidied up.

    What its parent has is not its own: locks whose threads it lacks, files, workers, connections.
    """
    code: Any = error.code if isinstance(error, SystemExit) else ""
    if not isinstance(code, int | None):
        say(str(code) or "".join(traceback.format_exception(error)).rstrip())
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def machine() -> str:
    """Returns an id of this machine and its namespace of processes.

    Two processes with the same one can look each other up by their process ids.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot.strip() + os.readlink("/proc/self/ns/pid")


def began(pid: int) -> float:
    """Returns when a process began, in seconds since 1970; infinity if it does not run."""
    state, *fields = _stat(pid)
    if state in "ZX":
        return float("inf")
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + int(fields[18]) / os.sysconf("SC_CLK_TCK")  # starttime, of man proc


def ending(pid: int | None) -> tuple[str, int]:
    """Returns how another process ended, in words, and its exit code as a shell shows it.

    The system knows it until the parent of that process has asked for it.

    Args:
        pid: The id of the process; None if it is on another machine.

    Returns:
        `("was killed by SIGKILL", 137)`, say; `("", 0)` if it still runs or ended well.
    """
    for _ in range(100):  # it takes a moment to end
        state, *fields = _stat(pid)
        if not fields:
            return "died without a word", 1
        if state in "ZX":
            code = os.waitstatus_to_exitcode(int(fields[48]))
            if code < 0:
                cause = _ABORTED if -code == signal.SIGABRT else ""
                return f"was killed by {signal.Signals(-code).name}{cause}", 128 - code
            return (f"ended with code {code}, without a word", code) if code else ("", 0)
        time.sleep(0.02)
    return "", 0


def _stat(pid: int | None) -> list[str]:
    """Returns the state of a process and the fields behind it, of man proc; "X" alone if it is
    gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]
