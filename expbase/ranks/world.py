"""Several processes: which rank this one is, and what all ranks do together.

Every function also works with one process, where it has nothing to do. Under gloo a collective
fails if a rank is more than 30 s late, so whatever may take long on one rank is waited for with
`wait_for_all`, which has no such limit, and finds out when they wait at different places.

    gather_objects(value)             # the values of all ranks, in rank order, on every rank
    broadcast_object(value)           # the value of rank 0, on every rank
    on_rank_zero(write, "saving")     # the others wait, and fail if it fails
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import paddle
import paddle.distributed as dist
from paddle.base import core

from expbase.base.processes import signals_held
from expbase.config import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_wait = [0, 0]  # the number of this process's next wait, so that each has its own key
_POLL_SECONDS = 0.0005, 0.02  # between two questions of a waiting rank, at first and at most
_ARRIVED = 1 << 40  # what each rank adds to the counter of a wait, beside the number of its place

# Flags of paddle; not each version and build has all of them. They are in its file
# paddle/common/flags.cc. A search takes the fastest kernel, which may be another one each time.
_REPEATABLE = {
    "FLAGS_cudnn_deterministic": True,
    "FLAGS_embedding_deterministic": 1,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_cublaslt_exhaustive_search_times": 0,
    "FLAGS_enable_blaslt_global_search": False,
    "FLAGS_use_autotune": False,
}

_stores: list[Any] = []  # connections to the common store; the last one is used
_only_here = ContextVar("_only_here", default="")  # the function of rank_zero_only that runs


class RankZeroError(RuntimeError):
    """Raised on the other ranks when something that only rank 0 does has failed there."""


def rank() -> int:
    """The number of this process, 0 to world_size() - 1; known before init_parallel, too."""
    return int(dist.get_rank())


def world_size() -> int:
    """The number of processes of the run, however they were started."""
    return int(dist.get_world_size())


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function run on rank 0 only; on the other ranks it returns None.

    What needs all ranks, `average` or `save_model` say, is an error in it.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if rank():
            return None
        before = _only_here.set(getattr(function, "__qualname__", repr(function)))
        try:
            return function(*args, **kwargs)
        finally:
            _only_here.reset(before)

    return wrapper


def need_all_ranks(place: str) -> None:
    """Raises a RuntimeError in a function that only rank 0 runs: it would wait for ever."""
    if (name := _only_here.get()) and world_size() > 1:
        raise RuntimeError(
            f"{name}: {place} needs all ranks, and @rank_zero_only makes rank 0 alone come here. "
            "Take the decorator away, or call it outside of the function."
        )


def init_parallel(device: str) -> None:
    """Connects the processes, once: with gloo on the CPU, else with the device's own backend."""
    if dist.is_initialized():
        return
    if device == "cpu":
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    dist.init_parallel_env()


def set_device(device: str | None, *, deterministic: bool) -> None:
    """Makes paddle use a device, "cpu" or "gpu:1", by default the GPU if there is one.

    With `deterministic` its kernels are repeatable.

    Raises:
        ConfigError: There is no such device, or the processes would share one.
    """
    device = device or default_device()
    if world_size() > 1 and ":" in device:
        raise ConfigError(
            f"--device: {device!r} given with {world_size()} processes; expected "
            f"{device.partition(':')[0]!r}: each process takes its own."
        )
    try:
        paddle.set_device(device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--device: {device!r} given; expected cpu, gpu, gpu:0 or another device that "
            f"this machine has and this paddle was built for. ({error})"
        ) from error
    if deterministic:
        paddle.set_flags(repeatable_flags())


def repeatable_flags() -> dict[str, int]:
    """The flags that make kernels repeatable, of those that this paddle has."""
    known = core.globals()
    return {name: value for name, value in _REPEATABLE.items() if known.is_public(name)}


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
    # Not paddle's own broadcast: it makes more tensors on rank 0 than on the others, and then the
    # automatic names of all later tensors would differ.
    return gather_objects(cast(T, value if rank() == 0 else None))[0]


def on_rank_zero(function: Callable[[], T], doing: str) -> T | None:
    """Calls the function on rank 0; the others wait, however long it takes, for its value.

    Raises:
        RankZeroError: On the other ranks, that `doing` failed; rank 0 raises the function's error.
    """
    if not dist.is_initialized():
        return function()
    need_all_ranks(doing)
    value = None
    error = None
    if rank() == 0:
        try:
            value = function()
        except Exception as raised:
            error = raised  # raised below: the others must not wait for a rank that has failed
    wait_for_all(doing)  # and not in broadcast_object, where gloo gives up after 30 s
    value, text = broadcast_object((value, repr(error) if error else None))
    if error is not None:
        raise error
    if text is not None:
        raise RankZeroError(f"{doing}: rank 0 failed: {text}")
    return value


def wait_for_all(
    place: str,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    within_seconds: float = math.inf,
) -> None:
    """Returns when every rank has called it, however late one is.

    Args:
        place: Where that is, in words that a user knows.
        meanwhile: Called until then. If it raises an exception, it must do so on all ranks that
            wait, and all ranks then call `renumber_waits`.
        within_seconds: A TimeoutError if another rank is later than that.

    Raises:
        RuntimeError: Another rank waits at another place; on all ranks.
    """
    need_all_ranks(place)
    if not dist.is_initialized():
        return
    key = "expbase/wait/{}/{}".format(*_wait)  # the same on all ranks, which make the same waits
    _wait[1] += 1
    number = zlib.crc32(place.encode()) & 0xFFFF
    arrived = add_to_store(key, _ARRIVED + number)
    pause, longest = _POLL_SECONDS
    deadline = time.monotonic() + within_seconds
    while arrived < _ARRIVED * world_size():
        meanwhile()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks have come to {place}")
        time.sleep(pause)
        pause = min(1.002 * pause, longest)  # so nobody waits more than 0.2 % longer than it must
        arrived = add_to_store(key, 0)
    if arrived % _ARRIVED != number * world_size():
        where = [f"rank {rank} at {at}" for rank, at in enumerate(gather_objects(place))]
        raise RuntimeError(
            f"the ranks wait for each other at different places: {', '.join(where)}. What needs "
            "all ranks must be called on each of them, and as often: look for `if self.rank == 0` "
            "or a return before it."
        )


def renumber_waits() -> None:
    """After a wait that not all ranks have come to: they count the next ones from 0 again."""
    _wait[:] = _wait[0] + 1, 0


def add_to_store(key: str, number: int) -> int:
    """Adds to a number that all processes share, 0 at first; returns the sum."""
    if world_size() == 1:
        return 0
    # A signal that interrupts a question, such as the SIGCHLD of a loader's worker, makes it fail;
    # its answer is then taken for the answer to the next question.
    with signals_held(signal.valid_signals()):
        store = _stores[-1] if _stores else core.create_or_get_global_tcp_store()
        return int(store.add(key, number))


def connect_store(wait_for: Callable[[Callable[[], str]], object]) -> str:
    """Makes the processes' common store on rank 0, connects the others to it; returns its host.

    `wait_for` is called with a function, and returns when that names nobody who is missing.
    """
    host, port = _store_address()
    if not dist.is_initialized():
        if rank():
            wait_for(lambda: "" if _own_address(host, port) else f"rank 0 at {host}:{port}")
        _make_store()
        _ask_at_once(host, port)
        _choose_interface(_own_address(host, port))
    return host


def _store_address() -> tuple[str, int]:
    # Found as paddle's init_parallel_env finds it, which does not tell.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)


def _own_address(host: str, port: int) -> str:
    """By which this machine reaches another one; "" if nobody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 3.0) as connection:
        return str(connection.getsockname()[0])
    return ""


def _make_store() -> None:
    """Paddle would wait in here until all ranks have come, 15 minutes long, and no Python code, no
    signal handler, would run meanwhile. It does not if it believes that there is one only.
    """
    number = os.environ["PADDLE_TRAINERS_NUM"]
    os.environ["PADDLE_TRAINERS_NUM"] = "1"
    try:
        core.create_or_get_global_tcp_store()
    finally:
        os.environ["PADDLE_TRAINERS_NUM"] = number


def _ask_at_once(host: str, port: int) -> None:
    """Makes a question to the store take 0.05 ms and not 44, over a connection of our own.

    Paddle sends it in pieces, and TCP keeps all but the first back until that one has come. Over
    paddle's own connection it must: the addresses of each gloo group replace those of the last one
    there, and a fast rank would read old ones (connection refused, or a crash later).
    """
    before = _sockets()
    _stores.append(core.TCPStore(host, port, False, 1))
    for path in _sockets() - before:
        connection = socket.socket(fileno=int(path.name))
        with contextlib.suppress(OSError):  # not of TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.detach()


def _sockets() -> set[Path]:
    return {path for path in Path("/proc/self/fd").iterdir() if path.is_socket()}


def _choose_interface(address: str) -> None:
    """Gives gloo the interface of this address; it would take the host name's, often 127.0.1.1."""
    if not address.startswith("127."):
        import psutil  # comes with VisualDL; one machine alone need not pay 20 ms for it

        for name, addresses in psutil.net_if_addrs().items():
            if address in [own.address for own in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def weighted_average(
    metrics: Mapping[str, Any], weight: float, gather: Callable[[Any], list[Any]] = gather_objects
) -> dict[str, float]:
    """The mean of each metric over the ranks whose values `gather` returns, the same on each.

    `weight` is the number of this rank's samples; if it is 0 the metrics are not used.
    """
    if not weight >= 0:
        raise ValueError(f"average: weight {weight!r} given; expected 0 or more.")
    numbers = {name: number(value) for name, value in metrics.items()} if weight else {}
    parts = [part for part in gather((numbers, weight)) if part[1]]
    names = parts[0][0].keys() if parts else ()
    if any(part.keys() != names for part, _ in parts):
        given = " and ".join(str(sorted(part)) for part, _ in parts)
        raise ValueError(f"average: the ranks name different metrics: {given}.")
    total = sum(weight for _, weight in parts)
    return {name: sum(part[name] * (weight / total) for part, weight in parts) for name in names}


def gather_numbers(*numbers: float) -> list[list[float]]:
    """The numbers of all ranks, in rank order; one collective, which waits for no device."""
    if not dist.is_initialized():
        return [[*numbers]]
    here = paddle.to_tensor([numbers], dtype="float64", place=paddle.CPUPlace())
    shape = [world_size(), len(numbers)]
    of_ranks = paddle._C_ops.empty(shape, paddle.float64, paddle.CPUPlace())
    dist.stream.all_gather(of_ranks, here, group=_cpu_group())
    rows: list[list[float]] = of_ranks.tolist()
    return rows


def max_over_ranks(*numbers: float) -> list[float]:
    """The maximum of each number over all ranks; one collective, which waits for no device."""
    return [max(column) for column in zip(*gather_numbers(*numbers), strict=True)]


@functools.cache
def _cpu_group() -> Any:
    is_gloo = paddle.device.get_device() == "cpu"  # the default group is
    return None if is_gloo else dist.new_group(backend="gloo")


def peak_memory() -> dict[str, float]:
    """The most memory that this process has had, in GB: on the host, and on its GPU."""
    import resource  # here: Windows has none, and is refused in words

    peak = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9}
    if paddle.device.get_device().startswith("gpu"):
        peak["gpu_memory_gb"] = paddle.device.cuda.max_memory_allocated() * 1e-9
    return peak


def number(value: Any) -> float:
    """A number or one-element tensor as a float; waits for the device."""
    return float(value.item() if hasattr(value, "item") else value)
