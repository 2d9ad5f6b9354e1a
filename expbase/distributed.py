"""Several processes: which rank this one is, and what all ranks do together.

Every function also works with one process, where it has nothing to do. Under gloo a collective
fails if a rank is more than 30 s late, so whatever may take long on one rank is waited for with
`wait_for_all`, which has no such limit.

    gather_objects(value)             # the values of all ranks, in rank order, on every rank
    broadcast_object(value)           # the value of rank 0, on every rank
    on_rank_zero(write, "saving")     # the others wait, and fail if it fails
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import paddle
import paddle.distributed as dist
from paddle.base import core

from expbase.processes import die_with_parent

P = ParamSpec("P")
T = TypeVar("T")

_wait = [0, 0]  # the number of this process's next wait, so that each has its own key
_POLL_SECONDS = 0.02  # between two questions of a waiting rank to the processes' common store
_WATCH_SECONDS = 0.5  # between two looks for a failure of another rank
_TELL_SECONDS = 3.0  # for which a failing rank waits until the others know


class RankZeroError(RuntimeError):
    """Raised on the other ranks when something that only rank 0 does has failed there."""


def rank() -> int:
    """The number of this process, 0 to world_size() - 1; known before init_parallel, too."""
    return int(dist.get_rank())


def world_size() -> int:
    """The number of processes of the run, however they were started."""
    return int(dist.get_world_size())


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function run on rank 0 only; on the other ranks it returns None."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if rank() == 0 else None

    return wrapper


def init_parallel(device: str) -> None:
    """Connects the processes, once: with gloo on the CPU, else with the device's own backend."""
    if dist.is_initialized():
        return
    die_with_parent()  # so a launcher that is killed with -9 leaves no rank behind
    if device == "cpu":
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    dist.init_parallel_env()


def default_device() -> str:
    """The GPU if paddle has one, else the CPU."""
    return "gpu" if paddle.device.cuda.device_count() else "cpu"


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in rank order, on every rank; one collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = []
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """The value of rank 0, on every rank; one collective."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def on_rank_zero(function: Callable[[], T], doing: str) -> T | None:
    """Calls the function on rank 0; the others wait, however long it takes, for its value.

    Raises:
        RankZeroError: On the other ranks, that `doing` failed; rank 0 raises the function's error.
    """
    if not dist.is_initialized():
        return function()
    value, error = None, None
    if rank() == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised  # raised below: the others must not wait for a rank that has failed
    wait_for_all()  # and not in broadcast_object, where gloo gives up after 30 s
    value, text = broadcast_object((value, repr(error) if error else None))
    if error is not None:
        raise error
    if text is not None:
        raise RankZeroError(f"{doing}: rank 0 failed: {text}")
    return value


def wait_for_all(meanwhile: Callable[[], object] = lambda: None) -> None:
    """Returns when every rank has called it, however late one is.

    `meanwhile` is called until then. If it raises an exception, it must do so on all ranks that
    wait, and all ranks then call `renumber_waits`.
    """
    if not dist.is_initialized():
        return
    key = "expbase/wait/{}/{}".format(*_wait)  # the same on all ranks, which make the same waits
    _wait[1] += 1
    arrived = add_to_store(key, 1)  # adds this rank to those that are here
    while arrived < world_size():
        meanwhile()
        time.sleep(_POLL_SECONDS)
        arrived = add_to_store(key, 0)


def renumber_waits() -> None:
    """After a wait that not all ranks have come to: they count the next ones from 0 again."""
    _wait[:] = _wait[0] + 1, 0


def add_to_store(key: str, number: int) -> int:
    """Adds to a number that all processes share, 0 at first; returns the sum."""
    if not dist.is_initialized():
        return 0
    with _without_signals():
        return int(core.create_or_get_global_tcp_store().add(key, number))


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Delays signals until the end of the block.

    A signal that interrupts a question to paddle's store, such as the SIGCHLD of a loader's worker,
    makes the question fail; its answer is then taken for the answer to the next question.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def weighted_average(metrics: Mapping[str, Any], weight: float) -> dict[str, float]:
    """The mean of each metric over all ranks, the same on each; one collective.

    `weight` is the number of this rank's samples; if it is 0 the metrics are not used.
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


def max_over_ranks(*numbers: float) -> list[float]:
    """The maximum of each number over all ranks; one collective, which waits for no device."""
    if not dist.is_initialized():
        return list(numbers)
    tensor = paddle.to_tensor(numbers, dtype="float64", place=paddle.CPUPlace())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=_cpu_group())
    return [float(number) for number in tensor.tolist()]


@functools.cache
def _cpu_group() -> Any:
    # On the CPU the default group is gloo's already.
    on_cpu = paddle.device.get_device() == "cpu"
    return None if on_cpu else dist.new_group(backend="gloo")


def number(value: Any) -> float:
    """A number or one-element tensor as a float; waits for the device."""
    return float(value.item() if hasattr(value, "item") else value)


class FailureWatch:
    """Tells the other ranks that this one has failed, and ends this one when another has.

    A rank whose peer is gone waits in a collective, where no Python code of its main thread runs.
    So a thread asks the processes' common store, over a connection of its own. It calls
    `on_failure` with the message of the rank that failed, and ends the process with code 1.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._stopped = threading.Event()
        host, port = _store_address()
        self._store = core.TCPStore(host, port, False, world_size(), 900)
        self._thread = threading.Thread(target=self._watch, name="expbase-watch", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has them
        while not self._stopped.wait(_WATCH_SECONDS):
            try:
                failed = self._store.add("expbase/failed", 0)
            except Exception:
                return  # rank 0, which holds the store, has ended: whoever waits for it fails
            if failed and not self._stopped.is_set():
                self._store.add("expbase/informed", 1)
                self._on_failure(self._store.get("expbase/failure").decode())
                os._exit(1)  # nothing gentler ends a main thread that waits in a collective

    def tell(self, text: str) -> None:
        """Tells the other ranks; waits until all of them know, but not for long."""
        self.stop()
        with _without_signals():
            self._store.set("expbase/failure", f"rank {rank()}: {text}")
            self._store.add("expbase/failed", 1)
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline:
            with _without_signals():
                informed = self._store.add("expbase/informed", 0)
            if informed >= world_size() - 1:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops watching. May be called twice."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _store_address() -> tuple[str, int]:
    # Found as paddle's init_parallel_env finds it, which does not tell.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)
