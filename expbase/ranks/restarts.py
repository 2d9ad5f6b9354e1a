"""`--restarts N`: a run that failed starts again from its newest checkpoint.

The process that was started supervises, and never trains: it starts the ranks, waits for them, and
starts them again. Not started again is a run that somebody stopped (a signal, STOP, the time
limit), one with a mistake of its user's (exit code 78), and one that N restarts did not bring to a
newer checkpoint.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expbase.ranks import launch
from expbase.ranks.processes import MISTAKE, STOPPED
from expbase.record.run_dir import CONFIG
from expbase.state import checkpoint

_LONGEST_SECONDS = 30  # between two starts, so that what is full may empty


def run(function: Callable[..., object], words: Sequence[Any]) -> int:
    """Supervises `function(*words)` in new processes; returns the exit code of the last start.

    The last of the words are the args, with `restarts`, `nprocs`, `device`, `output` and `fresh`.
    """
    args = words[-1]
    before = _identity(args)
    args.supervised_since = time.monotonic()  # from where the time limit counts
    args.restart_reason = ""
    used = 0
    saved = _newest(args)
    signals = launch.StopSignals()
    with signals.installed():
        while True:
            outcome = launch.spawn(function, words, args.nprocs, args.device, signals)
            # What a start has begun is not moved aside by the next one.
            args.fresh = args.fresh and _identity(args) in (None, before)
            is_stop = outcome.code in STOPPED and not outcome.deaths
            if outcome.code in (0, MISTAKE) or is_stop or signals.asked:
                return outcome.code
            cause = " and ".join(outcome.deaths) or f"a rank ended with code {outcome.code}"
            last = saved
            saved = _newest(args)
            used = 0 if saved > last else used
            if used == args.restarts:
                text = f"not started again: {used} restarts brought no new checkpoint"
                print(f"{cause}; {text}", file=sys.stderr)
                return outcome.code
            pause = min(used, _LONGEST_SECONDS)
            print(f"{cause}; starts again in {pause} s", file=sys.stderr)
            for _ in range(pause):
                time.sleep(1)
                if signals.asked:
                    return outcome.code
            used += 1
            args.restart_reason = f"RESTART {used} of {args.restarts}: {cause}"


def _newest(args: Any) -> int:
    """The iteration of the newest checkpoint, -1 if there is none."""
    # Until a start has begun, what is there will be moved aside.
    saved = [] if args.fresh else checkpoint.listed(Path(args.output) / checkpoint.FOLDER)
    return (checkpoint.iteration_of(saved[-1]) or 0) if saved else -1


def _identity(args: Any) -> int | None:
    """Another number for another run in this directory; None if there is none."""
    with contextlib.suppress(OSError):
        return (Path(args.output) / CONFIG).stat().st_ino
    return None
