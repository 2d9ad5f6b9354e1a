"""Collectives, and the number of this rank.

Every function also works with one process, where it has nothing to do. Under gloo a collective
fails if a rank is more than 30 s late (gloo/context.cc, kTimeoutDefault). `barrier` has no such
limit, so it stands before work that may take long on one rank. It also finds out when the ranks
wait at different places.

    all_gather_object(value)          # the values of all ranks, in rank order, on every rank
    broadcast_object(value)           # the value of rank 0, on every rank
    on_rank_zero(write, "saving")     # the others wait, and fail if it fails
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.base import topology

from expbase.base.arrays import numbers
from expbase.base.device import is_custom, kind_of
from expbase.base.errors import Mistake, RuntimeMistake, ValueMistake
from expbase.base.exit_codes import ExitCode
from expbase.base.processes import ended_at_once_by_signals
from expbase.config import ConfigError
from expbase.ranks import store

P = ParamSpec("P")
T = TypeVar("T")

_next_barrier = [0, 0]  # the series and the number of the next barrier, which make its key
_meanwhile: list[Callable[[], object]] = [lambda: None]  # a waiting rank calls the last one
_waits_at = [""]  # the place of the barrier at which this rank waits
_long_waits: list[Callable[[str, list[int]], object]] = []  # called in a long wait, again and again
_POLL_SECONDS = 0.0005, 0.02  # between two questions of a waiting rank, at first and at most
_LONG_WAIT_SECONDS = 4.0  # until the others are told of a wait; then each second
_ARRIVED = 1 << 40  # each rank adds it, and the number of its place, to the counter of a barrier

CALL_ON_ALL = (
    "What needs all ranks must be called on each of them, and as often: look for `if self.rank == "
    "0` or a return before it."
)
_only_here = ContextVar("_only_here", default="")  # the function of rank_zero_only that runs


class CallError(RuntimeMistake):
    """Raised where some ranks make a call that needs all; another start would make it again."""

    exit_code = ExitCode.MISTAKE


class RankZeroError(Mistake, RuntimeError):
    """Raised on the other ranks when something that only rank 0 does has failed there."""


def rank() -> int:
    """Returns the number of this process, from 0; it is known before init_parallel, too."""
    return int(dist.get_rank())


def drawing_rank() -> int:
    """Returns the rank whose random numbers this one draws in training: its own.

    Ranks that share layers, by fleet's tensor parallel, draw those of their first one: what each
    of them has whole, it must drop alike.
    """
    groups = topology._HYBRID_PARALLEL_GROUP  # None before fleet.init
    return rank() if groups is None else int(groups.get_model_parallel_group_src_rank())


def world_size() -> int:
    """Returns the number of processes of the run, however they were started."""
    return int(dist.get_world_size())


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function run on rank 0 alone.

        @rank_zero_only
        def write_report(self): ...

    A call that needs all ranks, such as `average` or `save_model`, is an error in it.

    Args:
        function: The function or method; maybe below another decorator.

    Returns:
        A function that does the same on rank 0; on the others it does nothing and returns None.
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
    """Raises a RuntimeError in a function that only rank 0 runs, where rank 0 would wait for ever.

    Args:
        place: The name of the method that needs all ranks.
    """
    if (name := _only_here.get()) and world_size() > 1:
        raise CallError(
            f"{name}: {place} needs all ranks, and @rank_zero_only makes rank 0 alone come here. "
            "Take the decorator away, or call it outside of the function."
        )


def init_parallel(device: str) -> None:
    """Connects the processes, unless they are: by gloo on the CPU, else by the device's backend.

    Raises:
        ConfigError: They are connected on another kind of device.
    """
    kind = kind_of(device)
    if dist.is_initialized():
        backend = str(dist.get_backend()).lower()
        if (backend == "gloo") != (kind == "cpu"):
            raise ConfigError(
                f"--device: {kind!r} given, and the processes are connected by {backend}; expected "
                "one kind of device in all runs of a process, and no other init_parallel_env()."
            )
        return
    # Paddle's launcher sets it for a device that it finds, whatever --device is; its spawn does for
    # the CPU alone (paddle/distributed/utils/launch_utils.py, _prepare_trainer_env). Without it a
    # custom device would wait in gloo's rendezvous for ever; a GPU and an XPU need none.
    if kind == "cpu" or is_custom(kind):
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo" if kind == "cpu" else "xccl"
    with ended_at_once_by_signals():
        dist.init_parallel_env()
    if kind_of(connected := paddle.device.get_device()) != kind:
        raise ConfigError(
            f"--device: {kind!r} given, and paddle has connected the processes on {connected!r}; "
            f"expected --device {kind_of(connected)}, or a start in which paddle finds "
            f"{kind!r} alone: its own backend in PADDLE_DISTRI_BACKEND, no plug-in of another kind."
        )


def meet() -> None:
    """Makes what collectives need, and device libraries make at the first one of each group."""
    with ended_at_once_by_signals():
        all_gather_object(None)
        all_gather_numbers(0.0)


def is_connected() -> bool:
    """Returns whether the processes are connected."""
    return bool(dist.is_initialized())


def all_gather_object(value: T) -> list[T]:
    """Returns the values of all ranks, in rank order; one collective."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = []
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """Returns the value of rank 0 on every rank; one collective."""
    # Not broadcast_object_list of paddle/distributed/communication/broadcast.py: it makes more
    # tensors on rank 0 than on the others, and then the automatic names of all later tensors
    # differ.
    return all_gather_object(cast(T, value if rank() == 0 else None))[0]


def on_rank_zero(function: Callable[[], T], doing: str) -> T | None:
    """Calls a function on rank 0, and returns its value on all ranks, however long it takes.

    Args:
        function: What to call.
        doing: What it does, in words, for the error.

    Raises:
        RankZeroError: On the other ranks, if it fails; rank 0 raises the function's error.
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
    barrier(doing)  # the others wait here, and not in broadcast_object, where gloo has its limit
    value, text = broadcast_object((value, repr(error) if error else None))
    if error is not None:
        raise error
    if text is not None:
        raise RankZeroError(f"{doing}: rank 0 failed: {text}")
    return value


def barrier(place: str) -> None:
    """Waits until every rank has called it, however late one is.

    Args:
        place: The place of the call, in words that a user knows.

    Raises:
        RuntimeError: On all ranks, if one of them waits at another place.
    """
    need_all_ranks(place)
    if not dist.is_initialized():
        return
    number_of_it = [*_next_barrier]
    key = "expbase/barrier/{}/{}".format(*number_of_it)  # all ranks make the same barriers
    _next_barrier[1] += 1
    number = zlib.crc32(place.encode()) & 0xFFFF
    arrived = store.add(key, _ARRIVED + number)
    _waits_at[0] = place
    pause, longest = _POLL_SECONDS
    tell_at = time.monotonic() + _LONG_WAIT_SECONDS
    while arrived < _ARRIVED * world_size():
        _meanwhile[-1]()
        if time.monotonic() > tell_at:
            tell_at += 1
            for tell in _long_waits:
                tell(place, number_of_it)
        time.sleep(pause)
        pause = min(1.002 * pause, longest)  # so nobody waits more than 0.2 % longer than it must
        arrived = store.add(key, 0)
    _waits_at[0] = ""
    if arrived % _ARRIVED != number * world_size():
        where = [f"rank {rank} at {at}" for rank, at in enumerate(all_gather_object(place))]
        raise CallError(
            f"the ranks wait for each other at different places: {', '.join(where)}. {CALL_ON_ALL}"
        )


def note_long_waits(tell: Callable[[str, list[int]], object]) -> Callable[[], object]:
    """Has a function called each second while this rank waits long; returns what ends that.

    It gets the place where this rank waits, and the number of the barrier.
    """
    _long_waits.append(tell)
    return functools.partial(_long_waits.remove, tell)


def waits_at() -> str:
    """Returns the place where this rank waits for the others; "" if it does not; in any thread."""
    return _waits_at[0]


def has_come_to(barrier: list[int]) -> bool:
    """Returns whether this rank waits at a barrier, or has been there; from any thread."""
    return _next_barrier > barrier


@contextlib.contextmanager
def barriers_that_may_be_left(meanwhile: Callable[[], object]) -> Iterator[None]:
    """Makes barriers in the block call a function while they wait; it may leave the block.

    Barriers in the block, and those after it, are numbered anew: not all ranks may have come to the
    last one.

    Args:
        meanwhile: Leaves the block by an exception; then it must do so on all ranks that wait.
    """
    _next_barrier[:] = _next_barrier[0] + 1, 0
    _meanwhile.append(meanwhile)
    try:
        yield
    finally:
        _meanwhile.pop()
        _waits_at[0] = ""
        _next_barrier[:] = _next_barrier[0] + 1, 0


def weighted_average(
    metrics: Mapping[str, Any],
    weight: float,
    gather: Callable[[Any], list[Any]] = all_gather_object,
) -> dict[str, float]:
    """Returns the weighted mean of each metric over the ranks.

    Args:
        metrics: Numbers, or tensors of one element, by name; the same names on all ranks.
        weight: The number of samples that they are the mean of; with 0 they are not used.
        gather: Returns the values of all ranks.

    Raises:
        ValueError: The weight is negative or nan, or the ranks name different metrics.
    """
    if not weight >= 0:
        raise ValueMistake(f"average: weight {weight!r} given; expected 0 or more.")
    here = dict(zip(metrics, numbers(metrics.values()), strict=True)) if weight else {}
    parts = [part for part in gather((here, weight)) if part[1]]
    names = parts[0][0].keys() if parts else ()
    if any(part.keys() != names for part, _ in parts):
        given = " and ".join(str(sorted(part)) for part, _ in parts)
        raise ValueMistake(f"average: the ranks name different metrics: {given}.")
    total = sum(weight for _, weight in parts)
    return {name: sum(part[name] * (weight / total) for part, weight in parts) for name in names}


def all_gather_numbers(*numbers: float) -> list[list[float]]:
    """Returns the numbers of all ranks, in rank order; one collective, without the device."""
    if not dist.is_initialized():
        return [[*numbers]]
    here = paddle.to_tensor([numbers], dtype="float64", place=paddle.CPUPlace())
    shape = [world_size(), len(numbers)]
    of_ranks = paddle._C_ops.empty(shape, paddle.float64, paddle.CPUPlace())
    dist.stream.all_gather(of_ranks, here, group=_cpu_group())
    rows: list[list[float]] = of_ranks.tolist()
    return rows


def max_over_ranks(*numbers: float) -> list[float]:
    """Returns the maximum of each number over all ranks; one collective, without the device."""
    return [max(column) for column in zip(*all_gather_numbers(*numbers), strict=True)]


@functools.cache
def _cpu_group() -> Any:
    is_gloo = paddle.device.get_device() == "cpu"  # the default group is
    return None if is_gloo else dist.new_group(backend="gloo")
