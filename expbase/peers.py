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
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import paddle.distributed as dist
from paddle.base import core

from expbase.distributed import RankZeroError, add_to_store, rank, use_store, world_size
from expbase.processes import die_with_parent, ending, machine

LIMIT = "EXPBASE_CONNECT_SECONDS"  # the variable with the seconds for which ranks are waited for
_LIMIT_SECONDS = 300.0
_SAY_SECONDS = 10.0, 60.0  # until the first line about missing ranks, and until each further one
_POLL_SECONDS = 0.01
# After which a rank that fails tells it: by then all make the same mistake, or the cause is known.
_TELL_SECONDS = 1.0
_SILENT_MACHINE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}  # a minute in all

_counter = itertools.count()  # numbers the watches of this process: it may run many experiments


class FailureWatch:
    """Tells the other ranks that this one has failed, and ends this one when another has.

    A rank whose peer is gone waits in a collective, where no Python code of its main thread runs.
    So a thread listens: it calls `on_failure` with what is known of the failure, and ends the
    process with code 1.

    Over a connection goes a line of JSON when it is made, `[rank, id of the process, machine]`, and
    one when it is left: the failure, "" if there was none.

    Args:
        on_failure: Called in the thread.
        say: Called with a line of text while ranks are missing.

    Raises:
        TimeoutError: One has not come in time.
    """

    def __init__(self, on_failure: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._say = say
        # A process that was connected before may be late for its next experiment.
        known = dist.is_initialized()
        self._limit = float("inf" if known else os.environ.get(LIMIT) or _LIMIT_SECONDS)
        self._key = f"expbase/watch/{next(_counter)}"  # in the common store
        self._error = ""  # by which this rank has failed
        self._stopped = False
        self._heard: dict[socket.socket, bytes] = {}  # all that came over each connection
        self._door = self._connect()
        os.register_at_fork(after_in_child=self._close)  # a child would hold them after a death
        self._thread = threading.Thread(target=self._watch, name="expbase-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        add_to_store(f"{self._key}/{rank()}", 1)
        try:
            self._wait_for(self._missing)
        except BaseException as error:
            self.tell(error)
            raise

    def _connect(self) -> socket.socket:
        """Rank 0's door, or the connection to it; the common store knows its port."""
        host, port = _store_address()
        if not dist.is_initialized():
            die_with_parent()  # so a launcher that is killed with -9 leaves no rank behind
            if rank():
                self._wait_for(lambda: "" if _listens(host, port) else f"rank 0 at {host}:{port}")
            _make_store()
            _ask_at_once(host, port)
        if rank() == 0:
            door = socket.create_server(("", 0))
            add_to_store(self._key, door.getsockname()[1])
            return door
        self._wait_for(lambda: "" if add_to_store(self._key, 0) else "rank 0")
        door = socket.create_connection((host, add_to_store(self._key, 0)))
        self._greet(door)
        return door

    def _wait_for(self, missing: Callable[[], str]) -> None:
        """Waits until no rank is missing; the lines and the error tell which are."""
        began = time.monotonic()
        say_at, pause = _SAY_SECONDS
        while names := missing():
            waited = time.monotonic() - began
            if waited > self._limit:
                raise TimeoutError(
                    f"{names}: did not come within {self._limit:.0f} s. Look whether its "
                    "process was started, what its log says, and whether its machine can be "
                    f"reached; to wait longer, set {LIMIT}."
                )
            if waited > say_at:
                say_at += pause
                limit = f"the limit is {self._limit:.0f} s ({LIMIT})"
                self._say(f"waiting for {names} since {waited:.0f} s; {limit}")
            time.sleep(_POLL_SECONDS)

    def _missing(self) -> str:
        missing = [str(n) for n in range(world_size()) if not add_to_store(f"{self._key}/{n}", 0)]
        words = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {world_size()}"
        return words if missing else ""

    def _greet(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENT_MACHINE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._heard[connection] = b""
        _send(connection, [rank(), os.getpid(), machine()])

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has them
        door = [self._door] if rank() == 0 else []
        while not self._stopped and (connections := [*door, *self._heard]):
            for connection in wait(connections):
                if self._stopped:
                    return
                if connection in self._heard:
                    self._hear(connection)
                else:
                    with contextlib.suppress(OSError):  # it is gone again
                        self._greet(self._door.accept()[0])

    def _hear(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(1 << 16)
        except OSError:  # also of a machine that is silent
            received = b""
        self._heard[connection] += received
        *lines, _ = self._heard[connection].split(b"\n")
        if received and len(lines) < 2:
            return
        del self._heard[connection]
        connection.close()
        try:
            (number, pid, its_machine), *last_words = map(json.loads, lines)
        except (TypeError, ValueError):  # a stranger
            return
        if not last_words:
            how = ending(pid if its_machine == machine() else None)
            last_words = [how and f"rank {number} {how}"]
        says_so_itself = self._error and last_words[0].endswith(self._error)
        if last_words[0] and not says_so_itself:
            for other in self._heard:
                _send(other, last_words[0])
            try:
                self._on_failure(last_words[0])
            finally:
                os._exit(1)  # nothing gentler ends a main thread that waits in a collective

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks by what this one failed.

        If that is the consequence of another one's failure, the process ends in here.
        """
        self._error = repr(error)
        self._thread.join(_TELL_SECONDS)
        told = isinstance(error, RankZeroError)  # by rank 0
        self.stop("" if told else f"rank {rank()}: {self._error}")

    def stop(self, last_word: str = "") -> None:
        """Stops watching. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        for connection in self._heard:
            _send(connection, last_word)
        self._close()

    def _close(self) -> None:
        for connection in [self._door, *self._heard]:
            connection.close()


def _send(connection: socket.socket, words: object) -> None:
    with contextlib.suppress(OSError):  # it is gone, which the thread will find
        connection.sendall(json.dumps(words).encode() + b"\n")


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


def _ask_at_once(host: str, port: int) -> None:
    """Makes a question to the store take 0.05 ms and not 44, over a connection of our own.

    Paddle sends it in pieces, and TCP keeps all but the first back until that one has come. Over
    paddle's own connection it must: the addresses of each gloo group replace those of the last one
    there, and a fast rank would read old ones (connection refused, or a crash later).
    """
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    use_store(core.TCPStore(host, port, False, 1))
    for path in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
        if path.name in before:
            continue
        connection = socket.socket(fileno=int(path.name))
        with contextlib.suppress(OSError, IndexError):  # not connected; not TCP
            if connection.getpeername()[1] == port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.detach()


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
