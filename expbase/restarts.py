"""`--restarts N`: a run that failed starts again from its newest checkpoint.

The process that was started supervises, and never trains: it starts the ranks, finds out why they
failed, and starts them again. They tell it over a pipe: a disk may be full.

Not started again is a run that somebody stopped (a signal, STOP, the time limit), one with a
mistake of its user's (a ConfigError; the same exception at the same iteration twice), and one that
N restarts did not bring to a newer checkpoint. What may come from a lack of something (a signal
that kills, an OSError, a MemoryError, a hang) may come again, N times.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from expbase import distributed, launch
from expbase.logs import close_log, early_log, open_log
from expbase.state import checkpoint

# What a rank tells: it goes on from a checkpoint, or begins; and of what kind its failure is.
BEGUN, EXCEPTION, RESOURCE, HANG, OTHER_RANK = "begun", "exception", "resource", "hang", "other"
_LONGEST_SECONDS = 30.0  # between two starts, so that what is full may empty
_POLL_SECONDS = 0.1
_LENGTH = 300  # of a reason: 4096 bytes go into a pipe at once, and are never torn

Told = list[dict[str, Any]]  # what the ranks told, oldest first


@dataclass
class Supervisor:
    """What a rank knows of the process that supervises it: `args.supervisor`."""

    pipe: Any  # to it
    began: float  # its start, by time.monotonic: the time limit counts from there
    reason: str = ""  # why this start is made; "" for the first

    def tell(self, iteration: int, what: str | BaseException, reason: str = "") -> None:
        """Tells an exception, or one of the words above with a reason."""
        if isinstance(what, BaseException):
            what, reason = kind_of(what), repr(what)
        facts = {"rank": distributed.rank(), "iteration": iteration, "kind": what}
        self.pipe.send_bytes(json.dumps({**facts, "reason": reason[:_LENGTH]}).encode())


def kind_of(error: BaseException) -> str:
    """Whether an exception is another rank's, a lack of something, or perhaps a mistake."""
    if isinstance(error, distributed.RankZeroError):
        return OTHER_RANK
    is_resource = isinstance(error, (OSError, MemoryError)) or isinstance(error.__cause__, OSError)
    return RESOURCE if is_resource else EXCEPTION


class Failure(NamedTuple):
    """Why a start failed."""

    text: str  # with the rank and the iteration
    exception: str = ""  # with the iteration, if it may be a mistake of the user's
    is_user_error: bool = False  # a rank has said in one line what is to be done


def failure_of(outcome: launch.Outcome, told: Told) -> Failure:
    """Why a start failed, from how its ranks ended and what they told before.

    A death says more than what the others told because of it. Only SIGABRT may be a consequence:
    gloo ends a rank by it when another one is gone.
    """
    own = [one for one in told if one["kind"] in (EXCEPTION, RESOURCE, HANG)]
    first = [*own, *(one for one in told if one["kind"] == OTHER_RANK), {}][0]
    place = f" at iteration {first['iteration']}" if first.get("iteration") else ""
    if deaths := [death for death in outcome.deaths if not own or "SIGABRT" not in death]:
        return Failure(" and ".join(deaths) + place)
    # A hang that holds Python's lock is ended from outside of Python (hang.py).
    silent = f"a rank ended with code {outcome.code}"
    silent += ", without a word, as after hang_seconds in code that holds Python's lock"
    text = first.get("reason", silent) + place
    is_mistake = first.get("kind", EXCEPTION) == EXCEPTION
    with_rank = f"rank {first['rank']}: {text}" if own else text
    return Failure(with_rank, text * bool(own and is_mistake), outcome.is_user_error and is_mistake)


def supervise(
    start: Callable[[str], tuple[launch.Outcome, Told]],
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
    reason, before, used, saved = "", "", 0, newest()
    failures: list[str] = []  # that no start has noted
    while True:
        outcome, told = start(reason)
        if outcome.code == 0 or outcome.is_stop or signals.asked:
            return outcome.code
        failure, saved_before, saved = failure_of(outcome, told), saved, newest()
        is_same, before = failure.exception == before != "", failure.exception
        used = 0 if saved > saved_before else used
        if failure.is_user_error:
            return outcome.code
        if is_same or used == limit:
            why = "the same as before" if is_same else f"{limit} restarts brought no new checkpoint"
            say(f"ended by {failure.text}; not started again: {why}")
            return outcome.code
        if pause := min(2.0 ** (used - 1), _LONGEST_SECONDS) if used else 0.0:
            say(f"ended by {failure.text}; starts again in {pause:g} s")
        for _ in range(round(pause / _POLL_SECONDS)):
            sleep(_POLL_SECONDS)
            if signals.asked:
                return {signal.SIGINT: 130, signal.SIGHUP: 129}.get(signals.asked, 143)
        used += 1
        failures = [*([] if _has_begun(told) else failures), failure.text]
        reason = f"RESTART {used} of {limit}: {', then '.join(failures)}"


def run(function: Callable[..., object], words: Sequence[Any]) -> int:
    """Supervises `function(*words)` in new processes; returns the exit code.

    The last of the words are the args, with `restarts`, `nprocs`, `device`, `output` and `fresh`.
    """
    args, output, signals = words[-1], Path(words[-1].output), launch.StopSignals()
    reader, writer = multiprocessing.Pipe(duplex=False)
    args.supervisor = Supervisor(writer, time.monotonic())

    def start(reason: str) -> tuple[launch.Outcome, Told]:
        args.supervisor.reason = reason
        outcome = launch.spawn(function, words, args.nprocs, args.device, signals)
        told: Told = []
        while reader.poll():
            told.append(json.loads(reader.recv_bytes()))
        args.fresh = args.fresh and not _has_begun(told)
        return outcome, told

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


def _has_begun(told: Told) -> bool:
    # Rank 0 alone notes a start in the ledger, and may be killed when another one has begun.
    return any(one["kind"] == BEGUN and one["rank"] == 0 for one in told)
