"""Watches the other ranks: whether all have come, and whether one has failed or died.

Every rank is connected to rank 0. The system closes the connections of a process that ends, however
it ends and on whatever machine, so a death is known at once. Keep-alive finds a machine that is
gone. A rank that is stopped, or busy for ever, stays connected; ranks/hang.py finds it. A rank that
waits long says where; one that has passed that place ends the run, which nothing else could.

    watch = Watch(on_failure, say, iteration)    # all ranks have come
    watch.tell(error)                 # this rank ends by an error: the others end, too
    watch.stop()                      # this rank leaves in good order
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
from multiprocessing.connection import wait

import paddle.distributed as dist

from expbase.base.errors import TimeoutMistake
from expbase.base.exit_codes import STOPPED, ExitCode, exit_code_of
from expbase.base.files import DAMAGES
from expbase.base.processes import die_with_parent, ending, machine
from expbase.ranks import collectives, store
from expbase.ranks.collectives import RankZeroError, rank, world_size

LIMIT = "EXPBASE_CONNECT_SECONDS"  # the variable with the seconds for which ranks are waited for
_LIMIT_SECONDS = 300.0
_SAY_SECONDS = 30.0  # between two lines about missing ranks
_POLL_SECONDS = 0.01
_LONGEST = 1 << 16  # bytes over a connection; a stranger that sends more is not listened to
_LONGEST_FAILURE = 5000  # characters, which are six bytes each at most
# After which a rank that fails tells it: by then all make the same mistake, or the cause is known.
_TELL_SECONDS = 1.0
_ABORT_SECONDS = 6.0  # for the thread to hear of the death for which gloo aborts
# A machine that acknowledges nothing for a minute is gone: after an answer, and after a question.
# The last one, in ms, holds for both; keepalive does not ask while data is under way.
_SILENT_MACHINE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 60_000}

_counter = itertools.count()  # numbers the watches of this process: it may run many experiments


class Watch:
    """Tells the other ranks that this one has failed, and ends this one when another has.

    A rank whose peer is gone waits in a collective, where no Python code of its main thread runs.
    So a thread listens: it calls `on_failure` with what is known of the failure, and ends the
    process, with the code of a signal or Ctrl-C if the other rank has ended by one, else with 1.

    Two lines of JSON go over a connection: `[rank, id of the process, machine]` when it is made,
    and `[failure, code]` when it is left, the failure being "" if all is well. They are read when
    it is closed. Between them come objects: where a rank has waited for seconds.

    Args:
        on_failure: Called in the thread, with a text and the exit code.
        say: Called with a line of text while ranks are missing.
        iteration: Returns that of this rank, in a thread.

    Raises:
        TimeoutError: A rank has not come in time.
    """

    def __init__(
        self,
        on_failure: Callable[[str, int], object],
        say: Callable[[str], object],
        iteration: Callable[[], int],
    ) -> None:
        self._on_failure = on_failure
        self._say = say
        self._iteration = iteration
        self._limit = float(os.environ.get(LIMIT) or _LIMIT_SECONDS)
        self._key = f"expbase/watch/{next(_counter)}"  # in the common store
        self._error = ""  # by which this rank has failed
        self._stopped = False
        self._received: dict[socket.socket, bytes] = {}  # over each connection
        # Paddle may wait for rank 0 without limit, with Python's lock held:
        # paddle/phi/core/distributed/store/tcp_store.cc, the constructor of TCPStore.
        faulthandler.dump_traceback_later(self._limit + _TELL_SECONDS, exit=True, file=2)
        try:
            self._door = self._connect()
        finally:
            faulthandler.cancel_dump_traceback_later()
        os.register_at_fork(after_in_child=self._close)  # a child would hold them after a death
        self._thread = threading.Thread(target=self._watch, name="expbase-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._end_notes = collectives.note_long_waits(self._tell_wait)
        store.add(f"{self._key}/{rank()}", 1)
        try:
            self._wait_for(self._missing)
        except BaseException as error:
            self.tell(error)
            raise

    def _connect(self) -> socket.socket:
        """Returns the socket on which rank 0 listens, or a connection to it.

        Its port is in the store that all ranks share.
        """
        if not dist.is_initialized():
            die_with_parent()  # so a launcher that is killed with -9 leaves no rank behind
        host = store.connect(self._wait_for)
        if rank() == 0:
            door = socket.create_server(("", 0))
            store.add(self._key, door.getsockname()[1])
            return door
        self._wait_for(lambda: "" if store.add(self._key, 0) else "rank 0")
        door = socket.create_connection((host, store.add(self._key, 0)))
        self._greet(door)
        return door

    def _wait_for(self, missing: Callable[[], str]) -> None:
        """Waits until no rank is missing.

        Args:
            missing: Returns the names of the ranks that are missing, for lines and errors.

        Raises:
            TimeoutError: The limit is over.
        """
        began = time.monotonic()
        say_at = _SAY_SECONDS
        while names := missing():
            waited = time.monotonic() - began
            if waited > self._limit:
                raise TimeoutMistake(
                    f"{names}: did not come within {self._limit:.0f} s. Look whether its "
                    "process was started, what its log says, and whether its machine can be "
                    f"reached; to wait longer, set {LIMIT}."
                )
            if waited > say_at:
                say_at += _SAY_SECONDS
                limit = f"the limit is {self._limit:.0f} s ({LIMIT})"
                self._say(f"waiting for {names} since {waited:.0f} s; {limit}")
            time.sleep(_POLL_SECONDS)

    def _missing(self) -> str:
        missing = [str(n) for n in range(world_size()) if not store.add(f"{self._key}/{n}", 0)]
        words = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {world_size()}"
        return words if missing else ""

    def _greet(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENT_MACHINE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._received[connection] = b""
        _send(connection, [rank(), os.getpid(), machine()])

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread has them
        door = [self._door] if rank() == 0 else []
        while connections := [*door, *self._received]:
            for connection in wait(connections):
                if self._stopped:
                    return
                if connection in self._received:
                    self._receive(connection)
                else:
                    with contextlib.suppress(OSError):  # it is gone again
                        self._greet(self._door.accept()[0])

    def _receive(self, connection: socket.socket) -> None:
        is_silent = False
        try:
            received = connection.recv(_LONGEST)
        except OSError as error:
            received = b""
            is_silent = not isinstance(error, ConnectionError)
        self._received[connection] = self._without_waits(self._received[connection] + received)
        if received and len(self._received[connection]) <= _LONGEST:
            return
        failure, code = _how_it_left(self._received.pop(connection), is_silent)
        connection.close()
        if failure and not (self._error and failure.endswith(self._error)):  # it says so itself
            self._end(failure, code)

    def _tell_wait(self, place: str, barrier: list[int]) -> None:
        """Tells the others where this rank has waited for seconds; called again and again."""
        wait = {"place": place, "barrier": barrier, "iteration": self._iteration()}
        for connection in [*self._received]:
            _send(connection, {**wait, "rank": rank()})

    def _without_waits(self, received: bytes) -> bytes:
        """Returns what came over a connection without the waits; ends if this rank is past one."""
        *lines, torn = received.split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                with contextlib.suppress(*DAMAGES):  # a stranger
                    self._check_wait(**json.loads(line))
        return b"\n".join([*(line for line in lines if not line.startswith(b"{")), torn])

    def _check_wait(self, *, place: str, barrier: list[int], iteration: int, rank: int) -> None:
        """Ends the run if another rank waits in an iteration that this one has left.

        All ranks make the same barriers: so this one, which waits perhaps in a collective for the
        other one, will never come. Gloo would wait for 30 s, and other libraries longer.
        """
        here = self._iteration()
        if iteration < here and not collectives.has_come_to(barrier):
            self._end(
                f"the ranks wait for each other at different places: rank {rank} at {place} in "
                f"iteration {iteration}, rank {collectives.rank()} in iteration {here}, without "
                f"that call. {collectives.CALL_ON_ALL}",
                ExitCode.MISTAKE,
            )

    def _end(self, failure: str, code: int) -> None:
        """Passes a failure on, and ends this process."""
        code = code if code in (*STOPPED, ExitCode.MISTAKE) else 1
        self._leave(failure, code)
        try:
            self._on_failure(failure, code)
        finally:
            os._exit(code)  # nothing gentler ends a main thread that waits in a collective

    def _leave(self, failure: str, code: int) -> None:
        for connection in self._received:
            _send(connection, [failure[:_LONGEST_FAILURE], code])
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    @contextlib.contextmanager
    def heard_before_abort(self) -> Iterator[None]:
        """Delays an abort in the block until the thread has named the death that is its cause.

        Under gloo an error in a backward's collective ends in abort(), milliseconds after the death
        of another rank (paddle/fluid/distributed/collective/process_group_gloo.cc). Python's lock
        is held then, so that the thread cannot run.
        """
        libc = ctypes.CDLL(None)
        # A handler of Python's would run too late. In a fork, such as a loader's worker, the thread
        # has ended, and joining it takes no time.
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._thread.join(_ABORT_SECONDS))
        libc.signal(signal.SIGABRT, handler)
        try:
            yield
        finally:
            libc.signal(signal.SIGABRT, None)  # after the end of Python the handler would crash

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails by an error.

        If another rank's failure is the cause, this process ends in this call.
        """
        self._error = repr(error)
        self._thread.join(_TELL_SECONDS)
        told = isinstance(error, RankZeroError)  # by rank 0
        self.stop("" if told else f"rank {rank()}: {self._error}", exit_code_of(error))

    def stop(self, failure: str = "", code: int = 0) -> None:
        """Stops watching, and leaves the other ranks. May be called twice.

        Args:
            failure: Why this rank leaves; "": in good order.
            code: Its exit code.
        """
        if self._stopped:
            return
        self._stopped = True
        self._end_notes()
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        self._leave(failure, code)
        self._close()

    def _close(self) -> None:
        for connection in [self._door, *self._received]:
            connection.close()


def _send(connection: socket.socket, words: object) -> None:
    with contextlib.suppress(OSError):  # it is gone, which the thread will find
        connection.sendall(json.dumps(words).encode() + b"\n")


def _how_it_left(received: bytes, is_silent: bool) -> tuple[str, int]:
    """Returns the failure of the rank at the other end, "" if there is none, and its exit code."""
    try:
        lines = [line for line in received.splitlines() if not line.startswith(b"{")]
        (number, pid, where), *last = map(json.loads, lines)
        if last:
            failure, code = last[0]
            return str(failure), int(code)
    except (ArithmeticError, RecursionError, TypeError, ValueError):  # a stranger
        return "", 0
    if is_silent:
        return f"rank {number} fell silent: its machine or its network is gone", 1
    how, code = ending(pid if where == machine() else None)
    return how and f"rank {number} {how}", code
