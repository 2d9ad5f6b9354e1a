"""Why a run should stop before its end: signals, a file, a time limit, a call.

A request is only noted; the loop ends after the iteration under way, saves, and the process answers
with the exit code of the reason. Several ranks ask each other about every half second, at
iterations that all of them know beforehand, so no iteration pays for it and all end at the same
one.

    requests = StopRequests(output_dir / "STOP", time_limit_seconds=3600)
    with requests.installed():             # a signal is noted
        requests.start(iteration)
        if requests.agreed(iteration): ... # all ranks stop here
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

from expbase.base.exit_codes import ExitCode
from expbase.base.processes import (
    handling,
    hears_signals,
    ignore_signals_at_exit,
    stop_signals,
)
from expbase.base.terminal import say
from expbase.ranks import collectives
from expbase.record.speed import Stopwatch
from expbase.record.starts_and_ends import STOP_FILE

_NOW_SECONDS = 1.0  # a second Ctrl-C within this time means now
_ASK_SECONDS = 0.5  # between two questions of the ranks to each other
_HEARD = b"\nstops at the end of the update, or at the next batch of the validation\n"


class StopReason(enum.IntEnum):
    """Why to stop; of several the greatest counts. With what the process answers after it."""

    text: str
    exit_code: int

    NONE = 0, "nothing", 0
    CALL = 1, "stop() was called", 0
    FILE = 2, STOP_FILE, 0
    TIME_LIMIT = 3, "training.time_limit_seconds", ExitCode.TIME_LIMIT
    SIGUSR1 = 4, "SIGUSR1", ExitCode.SIGTERM  # the scheduler's warning that SIGTERM will come
    SIGUSR2 = 5, "SIGUSR2", ExitCode.SIGTERM  # the same: of submitit, LSF and SGE
    SIGXCPU = 6, "SIGXCPU", ExitCode.SIGTERM  # the limit of processor time
    SIGHUP = 7, "SIGHUP", ExitCode.SIGHUP  # the terminal is gone
    SIGTERM = 8, "SIGTERM", ExitCode.SIGTERM
    SIGINT = 9, "Ctrl-C", ExitCode.SIGINT

    def __new__(cls, value: int, text: str = "", exit_code: int = 0) -> StopReason:
        reason = int.__new__(cls, value)
        reason._value_ = value
        reason.text = text
        reason.exit_code = exit_code
        return reason

    def __str__(self) -> str:
        return self.text

    @property
    def kind(self) -> str:
        """The word before a reason in `end_reason`."""
        if self.name.startswith("SIG"):
            return "signal"
        return "time limit" if self is StopReason.TIME_LIMIT else "stopped"

    def as_exception(self) -> BaseException | None:
        """Returns a signal as the exception by which other programs end; None if it is none."""
        if self is StopReason.SIGINT:
            return KeyboardInterrupt(self.text)
        return SystemExit(int(self.exit_code)) if self.kind == "signal" else None


class StopRequests:
    """The requests of this process, and what the ranks agree on.

    Args:
        stop_file: Its existence is a request; None on ranks other than 0.
        time_limit_seconds: From now, but heard after the first update; 0: none.
        save_seconds: From a checkpoint to the next one; 0: not by the clock. Rank 0 has the clock.
        parallel: Whether other ranks must agree.
        began: When the time limit began, by the clock, if that was before.
        stopwatch: Gets to know which rank is the slowest.
        check: Called about twice a second; raises what ends the run.
    """

    def __init__(
        self,
        stop_file: Path | None = None,
        time_limit_seconds: float = 0,
        *,
        save_seconds: float = 0,
        parallel: bool = False,
        began: float | None = None,
        stopwatch: Stopwatch | None = None,
        check: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reason = StopReason.NONE  # the strongest request of this process so far
        self.text = ""  # what stop() was given; once all ranks stop for it, the same on all
        self.is_save_due = False  # by the clock, in the iteration in which they asked last
        self._now_seconds = _NOW_SECONDS
        self._stop_file = stop_file
        self._limit = time_limit_seconds
        self._parallel = parallel
        self._on_all_ranks = False
        self._stopwatch = stopwatch or Stopwatch()
        self._clock = clock
        self._check = check
        self._save_seconds = save_seconds
        self._began = clock() if began is None else began
        self._last_ctrl_c = float("-inf")
        self._has_trained = False
        self._late = ""  # what is said of a time limit that was over when training began
        self.start(0)

    def add(self, reason: StopReason, text: str = "", *, on_all_ranks: bool = False) -> None:
        """Notes one more request, which perhaps every rank makes in this iteration."""
        self.reason = max(self.reason, reason)
        self.text = text or self.text
        self._on_all_ranks = self._on_all_ranks or on_all_ranks

    def ignore_second_ctrl_c(self) -> None:
        """Makes a second Ctrl-C mean no more than the first one."""
        self._now_seconds = 0.0

    def poll(self) -> None:
        """Looks at the file and the clock, and whether the run may go on."""
        self._check()
        # Not before the first update of this start: else one that is shorter than setup would stop
        # each start where it begins.
        if self._limit and self._has_trained and self._clock() - self._began >= self._limit:
            self.add(StopReason.TIME_LIMIT)
        if self._stop_file is not None and os.path.exists(self._stop_file):
            self.add(StopReason.FILE)

    def remove_stop_file(self) -> None:
        """Removes the file, so that the next start does not stop at once; or says that it will."""
        if self._stop_file is None:
            return
        try:
            self._stop_file.unlink(missing_ok=True)
        except OSError as error:
            say(f"{self._stop_file}: cannot be removed: {error.strerror}; each start stops at it")

    # What the ranks agree on

    def start(self, iteration: int) -> None:
        """Notes where training begins: there the ranks ask each other at once."""
        now = self._clock()
        if now - self._began >= self._limit > 0:
            self._late = (
                f"training.time_limit_seconds={self._limit:g}, which was over before the first "
                f"update of this start, after {now - self._began:.0f} s; raise it"
            )
        self.next_iteration = iteration  # when the ranks ask each other next
        self._asked = (now, iteration)
        self.note_saved()

    def note_update(self) -> None:
        """Notes that this start has made one."""
        self._has_trained = True

    def note_saved(self) -> None:
        """Notes that a checkpoint holds the state of now."""
        self._saved_at = self._clock()

    def is_quiet(self, iteration: int) -> bool:
        """Whether the ranks need not ask each other, and this one has no request."""
        return iteration < self.next_iteration and not (self.reason or self._on_all_ranks)

    def agreed(self, iteration: int, *, ask_now: bool = False) -> StopReason:
        """Returns why all ranks stop here, if they ask now; else why this one does, if it is alone.

        It sets `is_save_due` anew each time, and where they have asked `next_iteration`, too, at
        which all ranks ask again. They plan the same, so nobody waits in vain.
        """
        self.is_save_due = False
        if self._on_all_ranks and not ask_now:
            self.agree_on_text()
            return StopReason.CALL
        if iteration < self.next_iteration and not ask_now:
            return StopReason.NONE if self._parallel else self.reason
        self.poll()
        now = self._clock()
        began, asked_at = self._asked
        self._asked = (now, iteration)
        done = iteration - asked_at
        steps = max(done, 1)
        is_due = 0 < self._save_seconds <= now - self._saved_at
        busy = self._stopwatch.busy(steps)
        collectives.barrier("the end of an iteration")  # one may wait elsewhere
        rows = collectives.all_gather_numbers(self.reason, (now - began) / steps, is_due, *busy)
        self._stopwatch.note_ranks([row[3:] for row in rows])
        # The slowest rank's time: every rank must plan the same next question.
        greatest, slowest, due, *_ = map(max, zip(*rows, strict=True))
        self.is_save_due = bool(due)
        # At most twice as far as last time: iterations may become slower than they were.
        ahead = min(int(_ASK_SECONDS / max(slowest, 1e-9)), 2 * done)
        self.next_iteration = iteration + max(ahead, 1)
        reason = StopReason(int(greatest))
        if reason is StopReason.CALL:
            self.agree_on_text()
        return reason

    def words(self, reason: StopReason) -> str:
        """Returns why all ranks stop, for the log: what stop() was given, say."""
        more = {StopReason.CALL: self.text, StopReason.TIME_LIMIT: self._late}.get(reason)
        return more or str(reason)

    def agree_on_text(self) -> None:
        """Makes the text of the first rank that has one that of all; they stop for a stop()."""
        collectives.barrier("self.stop()")  # one may be late, where nobody has asked before
        self.text = next(filter(None, collectives.all_gather_object(self.text)), "")

    # Signals

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Notes signals that ask to stop in the block; afterwards the old handlers are back.

        A second Ctrl-C within a second raises KeyboardInterrupt. SIGTERM may come many times:
        paddle's launcher sends it up to three times to every process of a group
        (paddle/distributed/launch/utils/process_context.py, ProcessContext.terminate).
        """
        if not hears_signals():
            yield  # only the main thread can set handlers
            return

        def note(signum: int, frame: Any) -> None:
            if signum == signal.SIGINT:
                before = self._last_ctrl_c
                self._last_ctrl_c = self._clock()
                if self._last_ctrl_c - before < self._now_seconds:
                    raise KeyboardInterrupt
            if not self.reason and sys.stderr is not None:  # else the descriptor may be a file's
                with contextlib.suppress(OSError):  # not by a stream, which may be in use just now
                    os.write(2, _HEARD)
            self.add(StopReason[signal.Signals(signum).name])

        # Paddle's own handler, in C++, would end the process with a trace:
        # paddle/base/framework.py, disable_signal_handler. With it go those for crashes, and with
        # them a faulthandler that was enabled before: Python's tells the line of a crash.
        paddle.disable_signal_handler()
        faulthandler.disable()  # else enable() takes them to be there
        if sys.stderr is not None:
            faulthandler.enable(2)
        ignore_signals_at_exit(stop_signals())
        with handling(dict.fromkeys(stop_signals(), note)):
            yield
