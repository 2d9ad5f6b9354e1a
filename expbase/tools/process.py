"""Processes that end with the tool that has started them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import psutil

from expbase.base.processes import handling
from expbase.data.shared_memory import remove_left_files


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes the first signal in the block raise SystemExit; later ones are ignored."""
    signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        for other in signals:  # nothing may interrupt the cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    with handling(dict.fromkeys(signals, end)):
        yield


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, if it still runs, with all that it started, and waits for their ends."""
    if process.poll() is None:
        # One by one: each may lead a process group. Listed before the first one dies:
        # orphans get another parent.
        family = [psutil.Process(process.pid)]
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            family += family[0].children(recursive=True)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        # A rank that is not quite dead still holds the lock of its output directory.
        psutil.wait_procs(family[1:], timeout=10)
    process.wait()
    remove_left_files()
