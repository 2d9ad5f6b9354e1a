"""Starts the processes of `--nprocs` on this machine, and waits for them.

Paddle spawns and connects them; this module forwards signals, ends the rest when one has failed,
and chooses the exit code.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

import paddle.distributed as dist

from expbase.distributed import default_device
from expbase.processes import die_with_parent, ending, exit_code, handling, returncode

# Finished; stopped by the time limit, Ctrl-C, SIGTERM. A signal that nobody handled is a negative
# code, and a failure.
_NO_FAILURE = (0, 124, 130, 143)
_GRACE_SECONDS = 10.0  # after a failure, for the other processes to end by themselves


def spawn(
    function: Callable[..., object], args: Sequence[Any], nprocs: int, device: str | None
) -> int:
    """Calls a function of a module in new processes, one per rank, and waits for them.

    Returns:
        The exit code of the first that failed, else of the first that was stopped, else 0.
    """
    on_cpu = (device or default_device()) == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle warns that gloo means the CPU
        context = dist.spawn(
            _run_rank,
            (os.getpid(), function, tuple(args)),
            nprocs=nprocs,
            join=False,
            backend="gloo" if on_cpu else "auto",
        )
    processes = context.processes  # the context must live: it holds queues that they open

    def forward(signum: int, frame: Any) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)  # asking whether it lives would collect it

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGUSR1), forward)
    handlers[signal.SIGINT] = signal.SIG_IGN  # the ranks save and end; this process waits for them
    with handling(handlers):
        return _join(processes)


def _join(processes: Sequence[Any]) -> int:
    ended: dict[int, int] = {}  # return codes by rank, in the order in which the processes ended
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline: float | None = None
    while running:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        sentinels = wait(list(running), timeout)
        for sentinel in sentinels:
            rank = running.pop(sentinel)
            os.waitid(os.P_PID, processes[rank].pid, os.WEXITED | os.WNOWAIT)
            ended[rank] = returncode(processes[rank].pid)
            if ended[rank] not in _NO_FAILURE and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and not sentinels:  # the others have had their time
            for rank in running.values():
                processes[rank].kill()
            deadline = None
    failures = [rank for rank, code in ended.items() if code not in _NO_FAILURE]
    stops = [rank for rank, code in ended.items() if code]
    first = [*failures, *stops, 0][0]
    if ended[first] < 0:  # else it has said why itself
        print(f"rank {first} {ending(processes[first].pid)}", file=sys.stderr)
    for process in processes:  # until then the other ranks look for how it ended, too
        process.join()
    return exit_code(ended[first])


def _run_rank(parent: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    # Paddle spawned this process, and its loaders' workers would be spawned, too: an import of
    # paddle for each, at every epoch. Under paddle's launcher they are forked; so they are here.
    multiprocessing.set_start_method("fork", force=True)
    try:
        function(*args)
    except Exception:  # paddle would show it only when all processes have ended
        traceback.print_exc()
        sys.exit(1)
