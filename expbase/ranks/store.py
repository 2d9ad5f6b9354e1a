"""The store that all ranks share: numbers by key, kept by rank 0.

It is paddle's TCPStore, made so that no process waits in it without end.

    connect(wait_for)            # once, before the first collective
    add("expbase/asked", 1)      # returns the sum over all calls of all ranks
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddle.base import core

from expbase.base.processes import signals_held

_connections: list[Any] = []  # to the store; the last one is used


def add(key: str, number: int) -> int:
    """Adds a number to that of a key, which is 0 at first; returns the sum."""
    if dist.get_world_size() == 1:
        return 0
    # A signal that interrupts a question, such as the SIGCHLD of a loader's worker, makes it fail;
    # its answer is then taken for the answer to the next question
    # (paddle/phi/core/distributed/store/tcp_utils.h, receive_bytes).
    with signals_held(signal.valid_signals()):
        store = _connections[-1] if _connections else core.create_or_get_global_tcp_store()
        return int(store.add(key, number))


def connect(wait_for: Callable[[Callable[[], str]], object]) -> str:
    """Makes the store on rank 0, connects the other ranks to it, and returns its host.

    Args:
        wait_for: Is called with a function that names who is missing, and returns when that returns
            "".
    """
    host, port = _store_address()
    if not dist.is_initialized():
        if dist.get_rank():
            wait_for(lambda: "" if _own_address(host, port) else f"rank 0 at {host}:{port}")
        _make_store()
        _ask_at_once(host, port)
        _choose_interface(_own_address(host, port))
    return host


def _store_address() -> tuple[str, int]:
    # As in paddle/distributed/parallel.py, init_parallel_env, which does not tell the address.
    master = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    address = ":".join(map(str, master)) if all(master) else os.environ.get("PADDLE_MASTER")
    address = address or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    host, _, port = address.rpartition(":")
    return host, int(port)


def _own_address(host: str, port: int) -> str:
    """Returns the address from which this machine reaches another one; "" if nobody listens."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 3.0) as connection:
        return str(connection.getsockname()[0])
    return ""


def _make_store() -> None:
    # Paddle would wait in here until all ranks have come, 15 minutes long and with Python's lock
    # held, so that no signal handler runs. It does not wait if it believes that there is one rank
    # only: paddle/phi/core/distributed/store/store_utils.cc, CreateOrGetGlobalTCPStore.
    number = os.environ["PADDLE_TRAINERS_NUM"]
    os.environ["PADDLE_TRAINERS_NUM"] = "1"
    try:
        core.create_or_get_global_tcp_store()
    finally:
        os.environ["PADDLE_TRAINERS_NUM"] = number


def _ask_at_once(host: str, port: int) -> None:
    """Makes a second connection, over which a question takes 0.05 ms instead of 44 ms.

    Paddle sends a question in pieces, and TCP keeps all but the first back until that one has come
    (paddle/phi/core/distributed/store/tcp_utils.h). Without this a save and a validation of two
    ranks take 0.5 s more. Paddle's first connection stays slow: the addresses of each gloo group
    replace those of the last one in the store, and a fast rank would read old ones (connection
    refused, or a crash later).
    """
    before = _sockets()
    _connections.append(core.TCPStore(host, port, False, 1))
    for path in _sockets() - before:
        with contextlib.suppress(OSError):  # another thread's, which has closed it
            connection = socket.socket(fileno=int(path.name))
            with contextlib.suppress(OSError):  # not of TCP
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.detach()


def _sockets() -> set[Path]:
    return {path for path in Path("/proc/self/fd").iterdir() if path.is_socket()}


def _choose_interface(address: str) -> None:
    """Makes gloo use the interface of an address.

    By default it takes that of the host's name, often 127.0.1.1
    (paddle/fluid/distributed/collective/process_group_gloo.cc, createDefaultDevice).
    """
    if not address.startswith("127."):
        import psutil  # comes with VisualDL; one machine alone need not pay 20 ms for it

        for name, addresses in psutil.net_if_addrs().items():
            if address in [own.address for own in addresses]:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
