"""`--restarts N`: a run that failed starts again from its newest checkpoint.

The process that was started supervises, and never trains: it starts the ranks, waits for them, and
starts them again. Not started again is a run that somebody stopped (a signal, STOP, the time
limit), one with a mistake of its user's (exit code 78), and one that N restarts did not bring to a
newer checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expbase.base.exit_codes import STOPPED, ExitCode
from expbase.base.terminal import say
from expbase.checkpoint.layout import newest_iteration
from expbase.engine.run_dir import RunDirectory
from expbase.ranks import launch

_LONGEST_SECONDS = 30  # between two starts, so that what is full may empty


def run(function: Callable[..., object], words: Sequence[Any]) -> int:
    """Supervises `function(*words)` in new processes; returns the exit code of the last start.

    The last of the words are the args, with `restarts`, `nprocs`, `device`, `output` and `fresh`.
    """
    signals = launch.StopSignals()
    with signals.installed():
        return _supervise(function, words, signals)


def _supervise(
    function: Callable[..., object], words: Sequence[Any], signals: launch.StopSignals
) -> int:
    args = words[-1]
    if args.fresh:  # here, because only the first start is to move the old run aside
        directory = RunDirectory(args.output)
        aside = directory.claim({}, fresh=True, force=args.force)
        directory.release()
        args.fresh = False
        if aside:
            say(f"the run that was here is now in {aside}")
    args.supervised_since = time.monotonic()  # from where the time limit counts
    args.restart_reason = ""
    used = 0
    saved = newest_iteration(Path(args.output))
    while True:
        outcome = launch.spawn(function, words, args.nprocs, args.device, signals)
        is_stop = outcome.code in STOPPED and not outcome.deaths
        if outcome.code in (0, ExitCode.MISTAKE) or is_stop or signals.asked:
            return outcome.code
        cause = " and ".join(outcome.deaths) or f"a rank ended with code {outcome.code}"
        last = saved
        saved = newest_iteration(Path(args.output))
        used = 0 if saved > last else used
        if used == args.restarts:
            say(f"{cause}; not started again: {used} restarts brought no new checkpoint")
            return outcome.code
        pause = min(used, _LONGEST_SECONDS)
        say(f"{cause}; starts again in {pause} s")
        for _ in range(pause):
            time.sleep(1)
            if signals.asked:
                return outcome.code
        used += 1
        args.restart_reason = f"RESTART {used} of {args.restarts}: {cause}"
