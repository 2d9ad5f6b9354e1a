"""Starts the ranks of this machine, and waits for them.

Paddle connects them. This module forwards signals, ends the others when one has failed, and finds
out how they ended. On the CPU they are forked: a fork has paddle already, and its import takes
longer than the rest of a start.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, NamedTuple

import paddle.distributed as dist

from expbase.base.device import default_device, is_custom, kind_of, number_of_devices
from expbase.base.error_text import sentence
from expbase.base.errors import is_on_purpose
from expbase.base.exit_codes import STOPPED, ExitCode, exit_code_of
from expbase.base.processes import (
    die_with_parent,
    ending,
    forking,
    handling,
    hears_signals,
    ignore_signals_at_exit,
    is_others,
    signals_held,
    stop_signals,
)
from expbase.base.terminal import say
from expbase.config import ConfigError

_STOP_SIGNALS = stop_signals()
_GRACE_SECONDS = 10.0  # after a failure, for the other processes to end by themselves


class Outcome(NamedTuple):
    """How the ranks of a start ended."""

    # As a shell shows it: that of the first rank that failed, else of the first stopped, else 0.
    code: int
    deaths: tuple[str, ...] = ()  # "rank 1 was killed by SIGKILL"


class StopSignals:
    """Notes the signals that ask for a stop, and forwards them to the ranks that run."""

    def __init__(self) -> None:
        self.asked = 0  # the first signal that came; 0: none
        self.ranks: Sequence[Any] = ()

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Handles the signals in the block; a ConfigError in a thread, which hears none."""
        if not hears_signals():
            raise ConfigError(
                "--nprocs or --restarts: given to main() in a thread; expected it in the main one, "
                "which alone hears the signals that these processes are to get. Call it there, or "
                "leave the option away."
            )
        # A process that was spawned, not forked, begins by importing the script.
        if vars(multiprocessing.current_process()).get("_inheriting"):
            raise ConfigError(
                "main: called by a rank of --nprocs or --restarts that imports the script; "
                'expected `if __name__ == "__main__":` before the last lines of it.'
            )
        ignore_signals_at_exit(_STOP_SIGNALS)
        return handling(dict.fromkeys(_STOP_SIGNALS, self.note))

    def note(self, signum: int, frame: Any = None) -> None:
        """Notes a signal, and forwards it to the ranks."""
        self.asked = self.asked or signum
        # A terminal sends Ctrl-C to the ranks by itself, and a second one means now; kill does not.
        signum = signal.SIGTERM if signum == signal.SIGINT else signum
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                # Not process.is_alive(): that would collect it, and `ending` asks the system later.
                os.kill(process.pid, signum)


def spawn(
    function: Callable[..., object],
    args: Sequence[Any],
    nprocs: int,
    device: str | None,
    signals: StopSignals,
) -> Outcome:
    """Calls a function in new processes, one per rank, and waits for them.

    Args:
        function: Of a module, so that it can be pickled.
        args: Its arguments.
        nprocs: How many processes. If it is negative: at most -nprocs, a power of two, and no more
            than there are devices.
        device: "cpu" or "gpu", say; None: the one that paddle takes by itself.
        signals: Forwards its signals to the processes.

    Raises:
        ConfigError: There are fewer devices.
    """
    kind = kind_of(device or default_device())
    on_cpu = kind == "cpu"
    if nprocs < 0:
        nprocs = _most_processes(-nprocs, kind)
    if not on_cpu and 0 < (count := number_of_devices(kind)) < nprocs:  # 0: each rank says so
        raise ConfigError(
            f"--nprocs: {nprocs} given; expected at most {count}, one process for each {kind} that "
            "this one sees, or --device cpu."
        )
    # A fork has only one thread of its parent: a lock that another one holds stays held for ever.
    way = "fork" if on_cpu and threading.active_count() == 1 else "spawn"
    words = (_Main(), way, os.getpid(), function, tuple(args))
    with forking(), signals_held(_STOP_SIGNALS), warnings.catch_warnings():
        # Of paddle/distributed/spawn.py: _get_subprocess_env_list warns that gloo means the CPU.
        warnings.simplefilter("ignore")
        if nprocs == 1:  # _set_trainer_env would set its environment as of one of several
            starter: Any = multiprocessing.get_context(way)
            signals.ranks = [starter.Process(target=_run_rank, args=words)]
            signals.ranks[0].start()
        else:
            how = {"join": False, "backend": _backend(kind), "start_method": way}
            context = dist.spawn(_run_rank, words, nprocs=nprocs, **how)
            # The context must live: MultiprocessContext holds queues that the processes open.
            signals.ranks = context.processes
    try:
        if signals.asked:  # before they were there
            signals.note(signals.asked)
        outcome = _join(signals.ranks)
        is_ctrl_c = signals.asked == signal.SIGINT and outcome.code in (
            ExitCode.SIGINT,
            ExitCode.SIGTERM,
        )
        return outcome._replace(code=ExitCode.SIGINT) if is_ctrl_c else outcome
    finally:
        signals.ranks = ()


def _backend(kind: str) -> str:
    """Returns what paddle's spawn prepares the processes for."""
    if not number_of_devices(kind):  # which each rank says in words
        return "auto"
    # Not "auto" where it is known: it is of the device of now, which the script may have set.
    known = {"cpu": "gloo", "gpu": "nccl", "xpu": "bkcl"}
    return "xccl" if is_custom(kind) else known.get(kind, "auto")


def _most_processes(limit: int, kind: str) -> int:
    """Returns the greatest power of two that is at most the limit and the number of devices.

    Counted are the devices of a kind, or on the CPU the cores, that a new process may use.
    """
    if kind == "cpu":
        count = number_of_devices(kind)
    else:  # in a new process: one that has looked before goes on seeing a device that is gone
        # Not in a Pool, which ends its processes by SIGTERM: paddle shows it as a fatal error.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            with signals_held({signal.SIGINT}):  # a terminal's Ctrl-C is for this process
                counted = pool.submit(number_of_devices, kind)
            count = counted.result()
    number = min(1 << count.bit_length() >> 1, limit) or 1
    devices = "cores" if kind == "cpu" else f"{kind} devices"
    say(f"--nprocs auto: {number} ({limit} shares, {count} {devices})")
    return number


def _join(processes: Sequence[Any]) -> Outcome:
    codes: list[int] = []  # return codes, in the order in which the processes ended
    deaths: list[str] = []
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        # Not without a limit: Python handles a signal that comes just before a wait at its end.
        for sentinel in wait(list(running), 1.0):
            rank = running.pop(sentinel)
            code = _code_of(processes[rank])
            codes.append(code)
            if code < 0:  # with another code it has said why itself
                deaths.append(f"rank {rank} {ending(processes[rank].pid)[0]}")
            if code not in (0, *STOPPED):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for rank in running.values():
        deaths.append(f"rank {rank} did not end when another one had failed, and was killed")
        processes[rank].kill()
    for text in deaths:
        say(text)
    for process in processes:  # until then the other ranks look for how it ended, too
        process.join()
    # Who loses a rank that was killed fails as well, and may end at the same moment.
    killed = [code for code in codes if code == -signal.SIGKILL]
    failed = [code for code in codes if code not in (0, *STOPPED)]
    first = [*killed, *failed, *filter(None, codes), 0][0]
    code = 128 - first if first < 0 else first
    return Outcome(ExitCode.MISTAKE if ExitCode.MISTAKE in codes else code, tuple(deaths))


def _code_of(process: Any) -> int:
    """Returns the return code of a process that has ended, without collecting it."""
    try:
        end: Any = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # multiprocessing has, when it started the next one
        return int(process.exitcode)
    code = int(end.si_status)
    return code if end.si_code == os.CLD_EXITED else -code


class _Main:
    """The main module of `python -m package`, for a process that is spawned: it runs the module
    again when it unpickles this, as multiprocessing does for all other scripts.

    Its spawn._fixup_main_from_name leaves out each __main__.py, whose classes nobody would find.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _run_main, (getattr(sys.modules["__main__"].__spec__, "name", ""),)


def _run_main(name: str) -> None:
    if name.endswith(".__main__"):
        main = ModuleType("__mp_main__")
        vars(main).update(runpy.run_module(name, run_name=main.__name__, alter_sys=True))
        sys.modules["__main__"] = sys.modules[main.__name__] = main


def _run_rank(
    _: object, way: str, parent: int, function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    die_with_parent(parent)
    # A fork must not keep what it has from its parent: handlers, blocked signals, and the rank,
    # which paddle caches (paddle/distributed/parallel.py, _get_global_parallel_env).
    for signum in _STOP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN and not is_others(signum):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    vars(importlib.import_module("paddle.distributed.parallel"))["_global_parallel_env"] = None
    # If this process was spawned, its loaders' workers would be, too: an import of paddle for each,
    # at every epoch. Under paddle's launcher they are forked; so they are here.
    multiprocessing.set_start_method("fork", force=True)
    if way == "fork":
        atexit._clear()  # those of its parent
    try:
        code = _code_of_call(function, args)
    except KeyboardInterrupt:  # a second Ctrl-C comes when it pleases
        code = ExitCode.SIGINT
    for signum in _STOP_SIGNALS:  # the exit code is decided
        signal.signal(signum, signal.SIG_IGN)
    if way == "fork":
        atexit._run_exitfuncs()  # multiprocessing calls none in a fork
    sys.exit(code)


def _code_of_call(function: Callable[..., object], args: tuple[Any, ...]) -> int:
    """Calls a function; returns the exit code of this process, and shows an exception at once.

    Paddle exits with 0 after a KeyboardInterrupt, and shows an exception only when all processes
    have ended (paddle/distributed/spawn.py, _func_wrapper).
    """
    try:
        function(*args)
    except SystemExit as end:
        if isinstance(end.code, str):
            say(end.code)
        return exit_code_of(end) if end.code else 0
    except Exception as error:
        # Not by sys.excepthook: a notebook's would show it where nobody looks.
        if is_on_purpose(error):
            say(sentence(os.path.basename(sys.argv[0]), error))
        else:
            say(traceback.format_exc().rstrip())
        return exit_code_of(error)
    return 0
