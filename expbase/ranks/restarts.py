"""`--restarts N`: a run that failed starts again from its newest checkpoint.

The process that was started supervises, and never trains: it starts the ranks, waits for them, and
starts them again. Not started again is a run that somebody stopped (a signal, STOP, the time
limit), one with a mistake of its user's (exit code 78), and one that N restarts did not bring to a
newer checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expbase.ranks import launch
from expbase.ranks.processes import MISTAKE
from expbase.record.logs import close_log, early_log, open_log
from expbase.record.run_dir import CONFIG
from expbase.state import checkpoint

_LONGEST_SECONDS = 30.0  # between two starts, so that what is full may empty
_POLL_SECONDS = 0.1


@dataclass
class Supervisor:
    """What a rank knows of the process that supervises it: `args.supervisor`."""

    began: float  # its start, by time.monotonic: the time limit counts from there
    reason: str = ""  # why this start is made; "" for the first


def supervise(
    start: Callable[[str], launch.Outcome],
    newest: Callable[[], int],
    limit: int,
    signals: launch.StopSignals,
    say: Callable[[str], object],
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Starts a run, again and again; returns the exit code of the last start.

    `start` makes one for a reason, "" at first. `newest` returns the iteration of the newest
    checkpoint, -1 if there is none; there are at most `limit` restarts without a newer one.
    """
    reason = ""
    used = 0
    saved = newest()
    while True:
        outcome = start(reason)
        if outcome.code in (0, MISTAKE) or outcome.is_stop or signals.asked:
            return outcome.code
        cause = " and ".join(outcome.deaths) or f"a rank ended with code {outcome.code}"
        before, saved = saved, newest()
        used = 0 if saved > before else used
        if used == limit:
            say(f"{cause}; not started again: {limit} restarts brought no new checkpoint")
            return outcome.code
        pause = min(2.0 ** (used - 1), _LONGEST_SECONDS) if used else 0.0
        say(f"{cause}; starts again in {pause:g} s")
        for _ in range(round(pause / _POLL_SECONDS)):
            sleep(_POLL_SECONDS)
            if signals.asked:
                return {signal.SIGINT: 130, signal.SIGHUP: 129}.get(signals.asked, 143)
        used += 1
        reason = f"RESTART {used} of {limit}: {cause}"


def run(function: Callable[..., object], words: Sequence[Any]) -> int:
    """Supervises `function(*words)` in new processes; returns the exit code.

    The last of the words are the args, with `restarts`, `nprocs`, `device`, `output` and `fresh`.
    """
    args, output, signals = words[-1], Path(words[-1].output), launch.StopSignals()
    args.supervisor = Supervisor(time.monotonic())
    before = _identity(output)

    def start(reason: str) -> launch.Outcome:
        args.supervisor.reason = reason
        outcome = launch.spawn(function, words, args.nprocs, args.device, signals)
        # What a start has begun is not moved aside by the next one.
        args.fresh = args.fresh and _identity(output) in (None, before)
        return outcome

    def newest() -> int:
        # Until a start has begun, what is there will be moved aside.
        saved = [] if args.fresh else checkpoint.listed(output / checkpoint.FOLDER)
        return (checkpoint.iteration_of(saved[-1]) or 0) if saved else -1

    def say(text: str) -> None:
        logger = early_log()
        with contextlib.suppress(OSError):  # the disk may be gone
            log = output / "worker_0.log"  # no rank is there that writes it
            open_log(logger, log if log.exists() else None, echo=False)
        open_log(logger, None, echo=True)
        logger.error("%s", text)
        close_log(logger)

    with signals.installed():
        return supervise(start, newest, args.restarts, signals, say)


def _identity(output: Path) -> int | None:
    """Another number for another run in this directory; None if there is none."""
    with contextlib.suppress(OSError):
        return (output / CONFIG).stat().st_ino
    return None
