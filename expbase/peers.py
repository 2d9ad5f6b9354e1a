"""The other ranks: whether they have come, and whether one of them failed or died.

Every rank is connected to rank 0. The system ends the connection of a process that ends, however it
ends and on whatever machine, and keeps that of one that is stopped or busy: so a death is known at
once, and only a death is taken for one. A rank that fails says so first; rank 0 passes it on.

    watch = FailureWatch(on_failure, say)   # returns when all ranks have come
    watch.tell(error)                       # this rank has failed: the others end, too
    watch.stop()                            # this rank leaves in good order
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import paddle.distributed as dist
from paddle.base import core

from expbase import distributed
from expbase.distributed import add_to_store, rank, world_size
from expbase.processes import die_with_parent, ending, machine

LIMIT = "EXPBASE_CONNECT_SECONDS"  # the variable with the seconds for which ranks are waited for
_LIMIT_SECONDS = 300.0
_SAY_SECONDS = 10.0, 60.0  # until the first line about missing ranks, and until each further one
_POLL_SECONDS = 0.05
_OWN_END_SECONDS = 1.0  # for which a rank that hears of a failure may end by the same one itself
_ECHO_SECONDS = 0.3  # for which a rank that fails listens whether another one is the cause
_SILENT_MACHINE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}  # a minute in all

_counter = itertools.count()  # numbers the watches of this process: it may run many experiments


class FailureWatch:
    """Tells the other ranks that this one has failed, and ends this one when another has.

    A rank whose peer is gone waits in a collective, where no Python code of its main thread runs.
    So a thread listens: it calls `on_failure` with what is known of the failure, and ends the
    process with code 1.

    Args:
        on_failure: Called in the thread.
        say: Called with a line of text while ranks are missing.

    Raises:
        TimeoutError: One has not come in time.
    """

    def __init__(self, on_failure: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._here = {rank()}
        self._error = ""  # by which this rank has failed
        self._ending = threading.Event()
        self._stopped = False
        self._peers: dict[Any, _Peer] = {}  # by connection
        until = functools.partial(_until, say=say, limit=_limit())
        self._door = self._connect(until)
        os.register_at_fork(after_in_child=self._close)  # a child would hold them after a death
        self._thread = threading.Thread(target=self._watch, name="expbase-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        try:
            until(lambda: len(self._here) == world_size(), self._missing)
        except BaseException as error:
            self.tell(error)
            raise

    def _connect(self, until: Callable[..., None]) -> socket.socket:
        """Rank 0's door, or the connection to it; the common store knows its port."""
        host, port = _store_address()
        if not dist.is_initialized():
            die_with_parent()  # so a launcher that is killed with -9 leaves no rank behind
            if rank():
                until(lambda: _listens(host, port), lambda: f"rank 0 at {host}:{port}")
            _make_store()
        key = f"expbase/watch/{next(_counter)}"
        if rank() == 0:
            door = socket.create_server(("", 0))
            add_to_store(key, door.getsockname()[1])
            return door
        until(lambda: add_to_store(key, 0) > 0, lambda: "rank 0")
        door = socket.create_connection((host, add_to_store(key, 0)))
        self._greet(door)
        return door

    def _greet(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENT_MACHINE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers[connection] = peer = _Peer(connection, -1 if rank() == 0 else 0)
        peer.send(rank=rank(), pid=os.getpid(), machine=machine())

    def _missing(self) -> str:
        missing = [str(rank) for rank in range(world_size()) if rank not in self._here]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {world_size()}"

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has them
        door = [self._door] if rank() == 0 else []
        while not self._stopped and (connections := [*door, *self._peers]):
            for connection in wait(connections):
                if self._stopped:
                    return
                if peer := self._peers.get(connection):
                    self._hear(peer)
                else:
                    with contextlib.suppress(OSError):  # it is gone again
                        self._greet(self._door.accept()[0])

    def _hear(self, peer: _Peer) -> None:
        for message in peer.receive():
            if "rank" in message:
                peer.rank, peer.pid, peer.machine = (message[k] for k in ("rank", "pid", "machine"))
                self._here.add(peer.rank)
                for other in self._peers.values() if rank() == 0 else ():
                    other.send(here=[*self._here] if other is peer else [peer.rank])
            self._here.update(message.get("here", ()))
            peer.has_left |= "left" in message
            if text := message.get("failed"):
                peer.has_left = True
                self._ending.wait(_OWN_END_SECONDS)
                says_so_itself = self._error and text.endswith(self._error)
                if not (says_so_itself or self._stopped):
                    self._end_process(text)
        if peer.is_gone:
            self._peers.pop(peer.connection).connection.close()
            if not (peer.has_left or peer.rank < 0) and (how := peer.ending()):
                self._end_process(f"rank {peer.rank} {how}")

    def _end_process(self, text: str) -> None:
        for peer in self._peers.values():
            peer.send(failed=text)
        place = distributed.waiting_at()
        self._on_failure(f"{text}; this one waited for all ranks at {place}" if place else text)
        os._exit(1)  # nothing gentler ends a main thread that waits in a collective

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks by what this one failed.

        If that is the consequence of another one's failure, the process ends in here.
        """
        self._error = repr(error)
        self._ending.set()
        self._thread.join(_ECHO_SECONDS)
        if isinstance(error, distributed.RankZeroError):  # rank 0 tells what happened
            self.stop()
        self._leave(failed=f"rank {rank()}: {self._error}")

    def stop(self) -> None:
        """Stops watching. May be called twice."""
        self._leave(left=True)

    def _leave(self, **message: Any) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._ending.set()
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        for peer in self._peers.values():
            peer.send(**message)
        self._close()

    def _close(self) -> None:
        for connection in [self._door, *self._peers]:
            connection.close()


@dataclass(eq=False)
class _Peer:
    """Who is at the other end of a connection."""

    connection: socket.socket
    rank: int  # -1: not known yet
    pid: int = 0
    machine: str = ""
    unread: bytes = b""
    has_left: bool = False  # in good order, or with a failure that it told
    is_gone: bool = False

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which `receive` will find
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Iterator[dict[str, Any]]:
        """What it has sent; notes whether there will be more."""
        try:
            received = self.connection.recv(1 << 16)
        except OSError:  # also of a machine that is silent
            received = b""
        self.is_gone = not received
        *lines, self.unread = (self.unread + received).split(b"\n")
        for line in lines:
            try:
                yield dict(json.loads(line))
            except (TypeError, ValueError):  # a stranger
                self.is_gone = True

    def ending(self) -> str:
        """How the process ended, as far as this machine knows; empty if nothing is wrong."""
        return ending(self.pid if self.machine == machine() else None)


def _until(
    is_so: Callable[[], bool], missing: Callable[[], str], say: Callable[[str], None], limit: float
) -> None:
    """Waits for ranks; `say` and the error tell which are missing.

    Raises:
        TimeoutError: It took longer than the limit, in seconds.
    """
    began = time.monotonic()
    say_at, pause = _SAY_SECONDS
    while not is_so():
        waited = time.monotonic() - began
        if waited > limit:
            raise TimeoutError(
                f"{missing()}: did not come within {limit:.0f} s. Look whether its process was "
                "started, what its log says, and whether its machine can be reached; to wait "
                f"longer, set {LIMIT}."
            )
        if waited > say_at:
            say_at += pause
            until = "" if limit == float("inf") else f"; the limit is {limit:.0f} s ({LIMIT})"
            say(f"waiting for {missing()} since {waited:.0f} s{until}")
        time.sleep(_POLL_SECONDS)


def _limit() -> float:
    # A process that was connected before may be late for its next experiment.
    return float("inf" if dist.is_initialized() else os.environ.get(LIMIT) or _LIMIT_SECONDS)


def _make_store() -> None:
    """Makes the processes' common store on rank 0; connects to it on the others.

    Paddle would wait in here until all ranks have come, 15 minutes long, and no Python code, no
    signal handler, would run meanwhile. It does not if it believes that there is one only.
    """
    number = os.environ["PADDLE_TRAINERS_NUM"]
    os.environ["PADDLE_TRAINERS_NUM"] = "1"
    try:
        core.create_or_get_global_tcp_store()
    finally:
        os.environ["PADDLE_TRAINERS_NUM"] = number


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3.0).close()
    except OSError:
        return False
    return True


def _store_address() -> tuple[str, int]:
    # Found as paddle's init_parallel_env finds it, which does not tell.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)
