"""Processes that end with the tool that has started them, the scripts in them, and their notes."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from expbase.base.processes import handling
from expbase.data.shared_memory import remove_left_files
from expbase.mixins_in_front import put_in_front


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
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            family += psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        # A rank that is not quite dead still holds the lock of its output directory.
        psutil.wait_procs(family, timeout=10)
    process.wait()
    remove_left_files()


def run_script(mixin: type, words: list[str]) -> None:
    """Runs a script, or `-m` and a module, with a mixin in front of its experiments.

    Args:
        mixin: The class.
        words: The script, or -m and the module, and its options.
    """
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    script = sys.argv[0]
    with put_in_front(mixin):
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # A link is followed, but links among its folders are not: a folder may be linked into a
            # copy of the code.
            target = os.path.realpath(script) if os.path.islink(script) else script
            sys.path[0] = os.path.dirname(os.path.abspath(target))
            runpy.run_path(os.path.abspath(script), run_name="__main__")  # as python names it


def updates_path(output: str | Path, rank: int | str) -> Path:
    """Returns where a rank's lines about updates are, beside the output directory; "*": all."""
    return Path(f"{output}.updates.rank_{rank}.jsonl")
