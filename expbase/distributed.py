"""Several processes: ranks, reductions over them, starting them.

Starting and connecting is paddle's (`paddle.distributed.launch`, `spawn`, NCCL or gloo); this
module asks it questions. Every function is legal with one process, where it does nothing.
Under gloo a collective whose peer comes more than 30 s late fails, so whatever may take long on
one rank is waited for with `wait_for_all`, which polls and has no such limit.

    rank(), world_size()
    gather_objects(value)        # every rank's value, in rank order, on every rank
    broadcast_object(value)      # rank 0's
    AgreedStop().agreed(400)     # a reason to stop, or ""
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, ParamSpec, TypeVar

import paddle
import paddle.distributed as dist
from paddle.base import core

from expbase.processes import die_with_parent, exit_code

P = ParamSpec("P")
T = TypeVar("T")

# What a process that was asked to stop answers; every other code but 0 is a failure.
STOP_CODES = (124, 130, 143)
_counter = itertools.count()  # of the waits of this process; all ranks make the same ones

_ASK_SECONDS = 0.5  # between two agreements on stopping
_GRACE_SECONDS = 10.0  # that the other processes get to end when one has failed


def rank() -> int:
    """The number of this process, 0 to world_size() - 1. Right before init_parallel, too."""
    return int(dist.get_rank())


def world_size() -> int:
    """The number of processes of the run, however they were started."""
    return int(dist.get_world_size())


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function run on rank 0 alone; it gives None on the others."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if rank() == 0 else None

    return wrapper


def init_parallel(device: str) -> None:
    """Connects the processes, once: by gloo on the CPU, else by the device's own backend."""
    if dist.is_initialized():
        return
    if device == "cpu":
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    dist.init_parallel_env()


def default_device() -> str:
    """The GPU if paddle has one, else the CPU."""
    return "gpu" if paddle.device.cuda.device_count() else "cpu"


def data_parallel(layer: Any, **options: Any) -> Any:
    """The layer in a paddle.DataParallel.

    Raises:
        ValueError: It has a sparse Embedding, which gloo cannot average.
    """
    if paddle.device.get_device() == "cpu":
        for name, sublayer in layer.named_sublayers(include_self=True):
            if isinstance(sublayer, paddle.nn.Embedding) and sublayer._sparse:
                raise ValueError(
                    f"data_parallel: {name or 'the layer'} is an Embedding with sparse=True; "
                    "expected sparse=False on the CPU: gloo cannot average sparse gradients."
                )
    return paddle.DataParallel(layer, **options)


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on every rank; one collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = []
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank; one collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_rank_zero(function: Callable[[], T], doing: str) -> T | None:
    """Calls the function on rank 0; the others wait for its end, however long it takes.

    Args:
        function: Without arguments; its value must be picklable if there are several ranks.
        doing: What it does, for the message of the other ranks: "saving".

    Returns:
        Its value, on every rank.

    Raises:
        RuntimeError: On the other ranks, with the error of rank 0, which goes its own way there.
    """
    if not dist.is_initialized():
        return function()
    value, error = None, None
    if rank() == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised
    wait_for_all(f"expbase/on_rank_zero/{next(_counter)}")
    value, text = broadcast_object((value, repr(error) if error else None))
    if error is not None:
        raise error
    if text is not None:
        raise RuntimeError(f"{doing}: rank 0 failed: {text}")
    return value


def wait_for_all(key: str, poll_seconds: float = 0.05) -> None:
    """Returns when every rank has called it with this key, however late one is.

    Args:
        key: The same on all ranks, and used once in the life of the processes.
        poll_seconds: The time between two looks.
    """
    if not dist.is_initialized():
        return
    store = core.create_or_get_global_tcp_store()
    arrived = store.add(key, 1)
    while arrived < world_size():
        time.sleep(poll_seconds)
        arrived = store.add(key, 0)


def weighted_average(metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
    """The mean of each metric over all ranks, each rank counting as its weight says.

    Args:
        metrics: Numbers or one-element tensors, each a mean over this rank's share.
        weight: The size of the share, in samples say. With 0 the metrics are not looked at, so
            a rank without a sample may give anything, an empty mapping too.

    Returns:
        The same on every rank; empty if all weights are 0.

    Raises:
        ValueError: The weight is negative, or two ranks name different metrics.
    """
    if not weight >= 0:
        raise ValueError(f"average: weight {weight!r} given; expected 0 or more.")
    shares = gather_objects(({k: number(v) for k, v in metrics.items()} if weight else {}, weight))
    shares = [share for share in shares if share[1]]
    if any(share[0].keys() != shares[0][0].keys() for share in shares):
        given = " and ".join(str(sorted(share[0])) for share in shares)
        raise ValueError(f"average: the ranks name different metrics: {given}.")
    total = sum(share[1] for share in shares)
    names = shares[0][0] if shares else {}
    return {k: sum(share[0][k] * (share[1] / total) for share in shares) for k in names}


class AgreedStop:
    """A wish to stop that some rank has, until all ranks act on it at the same iteration.

    The ranks ask each other about every half second, at iterations that all of them know
    beforehand: nobody looks at a clock in between, and no iteration pays for it.

    Args:
        clock: Gives seconds; only differences count.

    Attributes:
        reason: Why to stop; empty: no wish.
        next_iteration: When the ranks ask each other next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self.next_iteration = 0
        self._clock = clock
        self._asked = (clock(), 0)

    def agreed(self, iteration: int) -> str:
        """The reason to stop at this iteration, the same on all ranks; empty: go on."""
        if not dist.is_initialized():
            return self.reason
        if iteration < self.next_iteration:
            return ""
        now = self._clock()
        began, asked_at = self._asked
        self._asked = (now, iteration)
        seconds = (now - began) / max(iteration - asked_at, 1)
        answers = gather_objects((self.reason, seconds))
        slowest = max(seconds for _, seconds in answers)
        self.next_iteration = iteration + max(1, int(_ASK_SECONDS / max(slowest, 1e-9)))
        self.reason = next((reason for reason, _ in answers if reason), "")
        return self.reason


def number(value: Any) -> float:
    """A number or one-element tensor as a float; waits for the device."""
    return float(value.item() if hasattr(value, "item") else value)


def spawn(
    function: Callable[..., object], args: Sequence[Any], nprocs: int, device: str | None
) -> int:
    """Runs the function in as many new processes, one per rank, and waits for them.

    The processes get SIGTERM and SIGUSR1 from this one; Ctrl-C reaches them from the terminal.
    When one fails, the others are ended.

    Args:
        function: A function of a module, given `args`.
        args: Values that can be pickled.
        nprocs: The number of processes.
        device: "cpu", or a device that paddle knows; None: the default one.

    Returns:
        The exit code of the first that failed, else of the first that was stopped, else 0.
    """
    on_cpu = (device or default_device()) == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle warns that gloo means the CPU
        context = dist.spawn(
            _child,
            (function, tuple(args)),
            nprocs=nprocs,
            join=False,
            backend="gloo" if on_cpu else "auto",
        )
    processes = context.processes

    def forward(signum: int, frame: Any) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    handlers: dict[int, Any] = {
        signal.SIGTERM: forward,
        signal.SIGUSR1: forward,
        signal.SIGINT: signal.SIG_IGN,
    }
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        return _join(processes)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _join(processes: Sequence[Any]) -> int:
    codes: list[int] = []
    running = {process.sentinel: process for process in processes}
    deadline: float | None = None
    while running:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait(list(running), timeout)
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            codes.append(exit_code(process.exitcode))
            if codes[-1] and codes[-1] not in STOP_CODES and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and not ended:
            for process in running.values():
                process.kill()
            deadline = None
    failures = [code for code in codes if code and code not in STOP_CODES]
    return next(iter(failures or [code for code in codes if code]), 0)


def _child(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    die_with_parent()
    try:
        function(*args)
    except Exception:  # paddle would hide it until all have ended
        traceback.print_exc()
        sys.exit(1)
