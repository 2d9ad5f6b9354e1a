"""The other ranks: whether they have come, and whether one of them failed, died or fell silent.

Every rank is connected to rank 0. The system ends the connection of a process that ends, however it
ends and on whatever machine: so a death is known at once. One that is stopped, or whose machine or
network is gone, is known by its silence; one that is busy, for however long, is not silent.

    watch = FailureWatch(on_failure, say, place, silence_seconds=600)   # all ranks have come
    watch.others()                          # where they were last, for a message
    watch.tell(error)                       # this rank ends by an error: the others end, too
    watch.stop()                            # this rank leaves in good order
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddle.base import core

from expbase.distributed import RankZeroError, add_to_store, rank, use_store, world_size
from expbase.processes import STOPPED, die_with_parent, ending, exit_code_of, machine

LIMIT = "EXPBASE_CONNECT_SECONDS"  # the variable with the seconds for which ranks are waited for
_LIMIT_SECONDS = 300.0
_SAY_SECONDS = 10.0, 60.0  # until the first line about missing ranks, and until each further one
_POLL_SECONDS = 0.01
# After which a rank that fails tells it: by then all make the same mistake, or the cause is known.
_TELL_SECONDS = 1.0
# A machine that acknowledges nothing for a minute is gone: after an answer, and after a question.
# The last one, in ms, holds for both; keepalive does not ask while data is under way.
_SILENT_MACHINE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 60_000}
_BEAT_SECONDS = 1.0  # between two questions, at most
_ABORT_SECONDS = 6.0  # for the thread to hear of a death, when gloo has aborted for it
_SHOWN = 8  # ranks of many that a message names: those that are silent the longest
_GONE = "it is stopped, or its machine or network is gone"

Say = Callable[[str], None]
_counter = itertools.count()  # numbers the watches of this process: it may run many experiments


@dataclass
class _Peer:
    """The rank at the other end of a connection."""

    rank: int = -1  # until it has said which one it is
    pid: int | None = None  # of its process, if that is on this machine
    rest: bytes = b""  # of a line that has not come whole
    heard: float = field(default_factory=time.monotonic)  # when it said something last


class FailureWatch:
    """Tells the other ranks that this one has failed, and ends this one when another has.

    A rank whose peer is gone waits in a collective, where no Python code of its main thread runs.
    So a thread listens: it calls `on_failure` with what is known of the failure, and ends the
    process, with the code of a signal or Ctrl-C if the other rank has ended by one, else with 1.

    Over a connection goes a line of JSON when it is made, `[rank, id of the process, machine]`, and
    one when it is left: the failure with the code, or "". Between them a rank tells rank 0 where
    it is, `{rank: [place, age]}`, and rank 0 answers likewise, with what it knows of the others.
    Only after an answer comes the next: so nothing piles up before a rank that is stopped.

    Args:
        on_failure: Called in the thread, with a text and that code.
        say: Called with a line of text while ranks are missing.
        place: Where this rank is, in words; called in the thread.
        silence_seconds: After so long a rank that says nothing counts as dead; 0: never.

    Raises:
        TimeoutError: One has not come in time.
    """

    def __init__(
        self,
        on_failure: Callable[[str, int], object],
        say: Say,
        place: Callable[[], str],
        silence_seconds: float,
    ) -> None:
        self._on_failure, self._say, self._place = on_failure, say, place
        self._silence = silence_seconds or float("inf")
        self._pause = min(self._silence / 4, _BEAT_SECONDS)
        self._limit = float(os.environ.get(LIMIT) or _LIMIT_SECONDS)
        if dist.is_initialized():  # it may be late for its next experiment
            self._limit = max(self._limit, silence_seconds)
        self._key = f"expbase/watch/{next(_counter)}"  # in the common store
        self._error = ""  # by which this rank has failed
        self._stopped = False
        self._peers: dict[socket.socket, _Peer] = {}
        self._places: dict[int, tuple[str, float]] = {}  # of each other rank, and when it was there
        self._asks_at = float("inf")  # when rank 0 is asked next, if it has answered
        # Paddle may wait for rank 0 without limit, and holds Python's lock then.
        faulthandler.dump_traceback_later(self._limit + _TELL_SECONDS, exit=True, file=2)
        try:
            self._door = self._connect()
        finally:
            faulthandler.cancel_dump_traceback_later()
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
            _choose_interface(socket.gethostbyname(host))
            door = socket.create_server(("", 0))
            add_to_store(self._key, door.getsockname()[1])
            return door
        self._wait_for(lambda: "" if add_to_store(self._key, 0) else "rank 0")
        door = socket.create_connection((host, add_to_store(self._key, 0)))
        _choose_interface(door.getsockname()[0])
        self._greet(door)
        self._asks_at = 0.0
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
        self._peers[connection] = _Peer()
        _send(connection, [rank(), os.getpid(), machine()])

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has them
        door, looked = [self._door] if rank() == 0 else [], time.monotonic()
        while not self._stopped and (connections := [*door, *self._peers]):
            for connection in wait(connections, self._pause / 2):
                if self._stopped:
                    return
                if connection in self._peers:
                    self._hear(connection, self._peers[connection])
                else:
                    with contextlib.suppress(OSError):  # it is gone again
                        self._greet(self._door.accept()[0])
            now = time.monotonic()
            if now - looked > self._silence / 2:  # it was stopped itself: the others get their time
                for peer in self._peers.values():
                    peer.heard = now
            looked = now
            if now >= self._asks_at:
                self._asks_at = float("inf")  # until rank 0 has answered
                _send(self._door, {rank(): [self._place(), 0]})
            for peer in [*self._peers.values()]:
                if now - peer.heard > self._silence and peer.rank >= 0:
                    self._end(self._about(peer, f"has not answered for {now - peer.heard:.0f} s"))

    def _about(self, peer: _Peer, what: str, why: str = f": {_GONE}") -> str:
        place = self._places.get(peer.rank)
        return f"rank {peer.rank} {what}{f' (last in {place[0]})' if place else ''}{why}"

    def _known(self) -> dict[int, tuple[str, float]]:
        """Place and age of other ranks; of many those that are silent the longest."""
        now = time.monotonic()
        known = sorted((at, n, place) for n, (place, at) in [*self._places.items()])[:_SHOWN]
        return {n: (place, now - at) for at, n, place in known}

    def others(self) -> str:
        """Where the other ranks were last, and how long ago that was, for a message."""
        text, known = "rank {}: last in {}, heard {:.0f} s ago", self._known()
        return "; ".join(text.format(n, place, age) for n, (place, age) in known.items())

    def _hear(self, connection: socket.socket, peer: _Peer) -> None:
        silent = False
        try:
            received = connection.recv(1 << 16)
        except OSError as error:
            received, silent = b"", not isinstance(error, ConnectionError)
        *lines, peer.rest = (peer.rest + received).split(b"\n")
        peer.heard = time.monotonic()
        last_word: tuple[str, int] | None = None
        try:
            for line in lines:
                last_word = self._read(connection, peer, json.loads(line))
        except (TypeError, ValueError, LookupError, AttributeError):  # a stranger
            received, peer.rank = b"", -1
        if received and last_word is None:
            return
        del self._peers[connection]
        connection.close()
        if last_word is None and peer.rank >= 0:
            how, code = ending(peer.pid)
            last_word = self._about(peer, how, "") if how else "", code
            last_word = (self._about(peer, "fell silent"), 1) if silent else last_word
        failure, code = last_word or ("", 0)
        if failure and not (self._error and failure.endswith(self._error)):  # it says so itself
            self._end(failure, code)

    def _read(self, connection: socket.socket, peer: _Peer, line: Any) -> tuple[str, int] | None:
        """Notes what came; its last word, if it is that."""
        if isinstance(line, list) and isinstance(line[0], str):
            return line[0], int(line[1])
        if isinstance(line, list):
            peer.rank, peer.pid = int(line[0]), line[1] if line[2] == machine() else None
            return None
        places = {int(n): (str(place), peer.heard - age) for n, (place, age) in line.items()}
        places.pop(rank(), None)
        self._places |= places
        if rank():
            self._asks_at = peer.heard + self._pause
        else:
            _send(connection, self._known() | {0: (self._place(), 0)})
        return None

    def _end(self, failure: str, code: int = 1) -> None:
        """Passes a failure on, and ends this process."""
        code = code if code in STOPPED else 1
        for other in [*self._peers]:
            _send(other, [failure, code])
        try:
            self._on_failure(failure, code)
        finally:
            os._exit(code)  # nothing gentler ends a main thread that waits in a collective

    @contextlib.contextmanager
    def last_words(self) -> Iterator[None]:
        """Lets this rank speak when gloo, in a backward, aborts because of another one."""

        def speak(signum: int) -> None:
            if os.getpid() != owner:  # a loader's worker, which aborts for a reason of its own
                return
            self._thread.join(_ABORT_SECONDS)  # in which a death ends this process
            why = "aborted, as gloo does when another rank is 30 s late, or gone"
            self._end(f"rank {rank()} {why}; {self.others()}")

        c, owner = ctypes.CDLL(None), os.getpid()
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(speak)  # Python's own would run too late
        c.signal(signal.SIGABRT, handler)
        try:
            yield
        finally:
            c.signal(signal.SIGABRT, None)  # after the end of Python the handler would crash

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks by what this one failed.

        If that is the consequence of another one's failure, the process ends in here.
        """
        self._error = repr(error)
        self._thread.join(_TELL_SECONDS)
        told = isinstance(error, RankZeroError)  # by rank 0
        self.stop("" if told else f"rank {rank()}: {self._error}", exit_code_of(error))

    def stop(self, failure: str = "", code: int = 0) -> None:
        """Stops watching. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        for connection in self._peers:
            _send(connection, [failure, code])
        self._close()

    def _close(self) -> None:
        for connection in [self._door, *self._peers]:
            connection.close()


def _send(connection: socket.socket, words: object) -> None:
    with contextlib.suppress(OSError):  # it is gone, which the thread will find
        connection.sendall(json.dumps(words).encode() + b"\n")


def _choose_interface(address: str) -> None:
    """Gives gloo the interface of this address; it would take the host name's, often 127.0.1.1."""
    if not address.startswith("127."):
        import psutil  # comes with VisualDL; one machine alone need not pay 20 ms for it

        for name, addresses in psutil.net_if_addrs().items():
            if address in [own.address for own in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


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
    before = _sockets()
    use_store(core.TCPStore(host, port, False, 1))
    for path in _sockets() - before:
        connection = socket.socket(fileno=int(path.name))
        with contextlib.suppress(OSError, IndexError):  # not connected; not TCP
            if connection.getpeername()[1] == port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.detach()


def _sockets() -> set[Path]:
    return {path for path in Path("/proc/self/fd").iterdir() if path.is_socket()}


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=3.0).close()
        return True
    return False


def _store_address() -> tuple[str, int]:
    # Found as paddle's init_parallel_env finds it, which does not tell.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)
