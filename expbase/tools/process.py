"""How a tool ends before its time: in order, and with it every process that it started.

with ended_by_signals():
    process = subprocess.Popen(…)
    try:
        process.wait()
    finally:
        kill(process)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

CODES: dict[int, int | None] = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}


@contextlib.contextmanager
def ended_by_signals(codes: Mapping[int, int | None] = CODES) -> Iterator[None]:
    """Has signals raise SystemExit in the block, once.

    Args:
        codes: The exit code for each signal; None: it is for somebody else, and nothing happens.
    """

    def end(number: int, frame: object) -> None:
        if codes[number] is not None:
            for other in before:
                signal.signal(other, signal.SIG_IGN)
            raise SystemExit(codes[number])

    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in codes if not (number == signal.SIGHUP and is_nohup)]
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, if it still runs, with all that it started; they may lead own groups."""
    for pid in [process.pid, *_descendants(process.pid)] if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started, and so on."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (directory / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(directory.name))
    found, queue = [], [pid]
    while queue:
        young = children.get(queue.pop(), [])
        found += young
        queue += young
    return found
