"""Several processes: ranks, reductions over them, starting them.

Starting and connecting is paddle's (`paddle.distributed.launch`, `spawn`, NCCL or gloo); this
module asks it questions. Every function is legal with one process, where it does nothing.
Under gloo a collective whose peer comes more than 30 s late fails, so whatever may take long on
one rank is waited for with `wait_for_all`, which polls and has no such limit.

    rank(), world_size()
    gather_objects(value)        # every rank's value, in rank order, on every rank
    broadcast_object(value)      # rank 0's
    Agreement(0).greatest(400, 1) # the greatest wish of all ranks
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_WATCH_SECONDS = 0.5  # between two looks for a failure of another rank
_TELL_SECONDS = 3.0  # that a failing rank gives the others to hear of it
_GRACE_SECONDS = 10.0  # that the other processes get to end when one has failed


class RankZeroError(RuntimeError):
    """What was done on rank 0 alone failed there; the other ranks hear of it by this."""


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
    die_with_parent()  # a launcher that was killed with -9 leaves no rank behind
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
        RankZeroError: On the other ranks, with the error of rank 0, which goes its own way there.
    """
    if not dist.is_initialized():
        return function()
    value, error = None, None
    if rank() == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised
    wait_for_all()
    value, text = broadcast_object((value, repr(error) if error else None))
    if error is not None:
        raise error
    if text is not None:
        raise RankZeroError(f"{doing}: rank 0 failed: {text}")
    return value


def wait_for_all(poll_seconds: float = 0.02) -> None:
    """Returns when every rank has called it, however late one is; all ranks make the same calls.

    Args:
        poll_seconds: The time between two looks.
    """
    if not dist.is_initialized():
        return
    store = core.create_or_get_global_tcp_store()
    key = f"expbase/wait/{next(_counter)}"
    with _without_signals():
        arrived = store.add(key, 1)
    while arrived < world_size():
        time.sleep(poll_seconds)
        with _without_signals():
            arrived = store.add(key, 0)


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Has signals wait for the end of the block.

    One that interrupts a question to paddle's store, SIGCHLD of a loader's worker say, makes it
    fail, and its answer the answer to the next question.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


class Agreement:
    """A wish of some rank, until all ranks act on it at the same iteration.

    The ranks ask each other about every half second, at iterations that all of them know
    beforehand: nobody looks at a clock in between, and no iteration pays for it. The question
    goes over the CPU, so no device is waited for.

    Args:
        iteration: At which training starts.
        clock: Gives seconds; only differences count.

    Attributes:
        next_iteration: When to ask next.
    """

    def __init__(self, iteration: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.next_iteration = iteration
        self._clock = clock
        self._asked = (clock(), iteration)

    def greatest(self, iteration: int, wish: int) -> int:
        """The greatest wish of all ranks; the same on each. Plans the next question."""
        now = self._clock()
        began, asked_at = self._asked
        self._asked = (now, iteration)
        done = iteration - asked_at
        greatest, seconds = _greatest(float(wish), (now - began) / max(done, 1))
        # At most twice as far as last time: iterations may become slower than they were.
        ahead = min(int(_ASK_SECONDS / max(seconds, 1e-9)), 2 * done)
        self.next_iteration = iteration + max(ahead, 1)
        return int(greatest)


def _greatest(*numbers: float) -> list[float]:
    if not dist.is_initialized():
        return list(numbers)
    tensor = paddle.to_tensor(numbers, dtype="float64", place=paddle.CPUPlace())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_cpu_group())
    return [float(number) for number in tensor.tolist()]


@functools.cache
def _cpu_group() -> Any:
    """The group for questions over the CPU: the default one if that is gloo's."""
    if paddle.device.get_device() == "cpu":
        return None
    return dist.new_group(backend="gloo")


def number(value: Any) -> float:
    """A number or one-element tensor as a float; waits for the device."""
    return float(value.item() if hasattr(value, "item") else value)


class FailureWatch:
    """Tells the other ranks that this one failed, and ends this one when another did.

    A thread asks the processes' common store twice a second, over a connection of its own, so it
    works while the main thread is stuck in a collective whose peer is gone.

    Args:
        on_failure: Called in the thread with what the other rank said, before the process ends
            with code 1.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._stopped = threading.Event()
        host, port = _store_address()
        self._store = core.TCPStore(host, port, False, world_size(), 900)
        self._thread = threading.Thread(target=self._watch, name="expbase-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for other threads
        while not self._stopped.wait(_WATCH_SECONDS):
            try:
                failed = self._store.add("expbase/failed", 0)
            except Exception:
                return  # the store went with rank 0; whoever waits for it hears of that
            if failed and not self._stopped.is_set():
                self._store.add("expbase/heard", 1)
                self._on_failure(self._store.get("expbase/failure").decode())
                os._exit(1)  # nothing less ends a thread that waits in a collective

    def tell(self, text: str) -> None:
        """Tells the others, and waits a little until they have heard it."""
        self.stop()
        with _without_signals():
            self._store.set("expbase/failure", f"rank {rank()}: {text}")
            self._store.add("expbase/failed", 1)
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline:
            with _without_signals():
                heard = self._store.add("expbase/heard", 0)
            if heard >= world_size() - 1:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops watching. May be called twice."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _store_address() -> tuple[str, int]:
    # As paddle's init_parallel_env finds it.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)


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
            (os.getpid(), function, tuple(args)),
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
            failed = process.exitcode < 0 or (codes[-1] and codes[-1] not in STOP_CODES)
            if failed and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and not ended:
            for process in running.values():
                process.kill()
            deadline = None
    failures = [code for code in codes if code and code not in STOP_CODES]
    return next(iter(failures or [code for code in codes if code]), 0)


def _child(parent: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    try:
        function(*args)
    except Exception:  # paddle would hide it until all have ended
        traceback.print_exc()
        sys.exit(1)
