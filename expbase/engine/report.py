"""What a run says in training and at its end: the card, the lines at log_interval, the last ones.

Formats are in metrics.py, meter.py and record/card.py; when something is said, run.py and loop.py
decide. The lines of a resume are resume.py's, but for what on_train_begin has left otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from expbase.base.device import peak_memory
from expbase.base.terminal import say
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.config import defaults_of, differences
from expbase.data.position import DataPosition
from expbase.engine import due
from expbase.engine.start import Start
from expbase.engine.stop import StopReason
from expbase.ranks import collectives
from expbase.record import card
from expbase.record.logs import NOT_EXACT
from expbase.record.metrics import MetricLog, words
from expbase.record.progress_bar import is_terminal, progress_bar
from expbase.record.speed import Stopwatch
from expbase.training import as_given

_MOVE_SECONDS = 0.25  # between two drawings of the progress bar; one takes half a millisecond


class Report:
    """The lines of one rank.

    Args:
        metrics: Where the lines go.
        data: The training data; it knows the size of a batch.
        checkpointer: It knows the newest and the best checkpoint.
        log_is_of_all: Whether a line of training has what all ranks have logged, and not rank 0.
    """

    def __init__(
        self,
        start: Start,
        metrics: MetricLog,
        stopwatch: Stopwatch,
        data: DataPosition,
        checkpointer: Checkpointer,
        *,
        log_is_of_all: bool,
    ) -> None:
        self.metrics = metrics
        self._start = start
        self._own_process = os.getpid()
        self._config = start.config
        self._logger = start.logger
        self._stopwatch = stopwatch
        self._data = data
        self._checkpointer = checkpointer
        self._log_is_of_all = log_is_of_all
        self._changes: dict[str, Any] = {}  # what is not by default in the config
        self._last: Mapping[str, float] = {}  # what the last line of training said
        self._show: Callable[..., None] | None = None  # draws the progress bar, if there is one
        self._moved_at = 0.0  # when it was drawn

    # --- while training ------------------------------------------------------------------

    def leave_log_to_zero(self) -> None:
        """Forgets, after a checkpoint or a resume, what rank 0 has of all ranks."""
        if self._log_is_of_all and collectives.rank():
            self.metrics.meter.clear()

    def line(
        self, iteration: int, epoch: int, rates: Mapping[str, float], fire: Callable[..., Any]
    ) -> None:
        """Writes the means of what was logged since the last line, rates and speeds: one event."""
        speed = self._stopwatch.speed(iteration, self._start.world_size)
        with self._stopwatch.exclude():
            if (seconds := self._left(iteration)[1]) is not None:
                speed["seconds_left"] = seconds
            means = self.metrics.meter.means()
            metrics = {f"train/{name}": mean for name, mean in means.items()}
            metrics |= rates
            metrics |= {f"speed/{n}": number for n, number in (speed | peak_memory()).items()}
            fire("on_log", metrics)
            self._last = metrics
            self.metrics.write(iteration, epoch, metrics, is_shown=self._show is not None)

    def differences(self, lost: Sequence[str], otherwise: Sequence[str]) -> None:
        """Says what is not as it was at the checkpoint that was restored."""
        for text in lost:
            self._logger.warning("%s", NOT_EXACT + text)
        for text in otherwise:
            self._logger.info("%s", text)

    def evaluation(
        self, name: str, iteration: int, epoch: int, results: Mapping[str, float], checkpoint: str
    ) -> None:
        """Writes the results of an evaluation, `valid/…` say, maybe of a checkpoint's weights."""
        metrics = {f"{name}/{key}": number for key, number in results.items()}
        if metrics:
            self.metrics.write(iteration, epoch, metrics, checkpoint=checkpoint)

    def last_line(self, iteration: int, epoch: int, *, is_alone: bool = False) -> None:
        """Writes what was logged after the last line: in training, or by on_train_end.

        It is a collective unless this rank is alone, after a failure.
        """
        if not is_alone:
            self.nonfinite()  # rank 0 may get what all have logged
        means = self.metrics.meter.means()
        if means and self._config.training.log_interval:
            self.metrics.write(iteration, epoch, {f"train/{n}": mean for n, mean in means.items()})

    def means(self, iteration: int, what: str, means: Mapping[str, float]) -> None:
        """Writes numbers that are no point on a curve into the text log only."""
        if means:
            self._logger.info("%s[%d] %s", what, iteration, words(means))

    def note_config(self) -> None:
        """Notes what is given in the config, before what follows from it is in it, too."""
        defaults = defaults_of(self._start.experiment)
        changes = differences(defaults, as_given(self._config, defaults))
        self._changes = {key: now for key, (_, now) in changes.items()}

    def card(self, experiment: Any, layers: Mapping[str, Any], batches: int) -> None:
        """Says what there is."""
        name = type(experiment).__name__
        plan = [] if self._start.read_only else [*self._plan(name)]
        for text in card.card(
            name,
            "" if self._start.options.smoke else self._start.output,
            self._changes,
            layers,
            self._data.adapter,
            experiment.valid_loader,
            self._start.world_size,
            batches,
            plan,
        ):
            self._logger.info("%s", text)

    def _plan(self, name: str) -> Iterator[tuple[str, str]]:
        """Yields when training ends, and how often it is validated and saved."""
        training = self._config.training
        if limits := self._limits():
            yield "end", card.end(limits)
        often = card.how_often(training, "valid")
        yield "valid", often if self._start.has_valid else f"never: {name} has no valid()"
        yield "save", card.how_often(training, "save")

    def nonfinite(self) -> str:
        """Returns the logged numbers that are not finite; a line may be of all ranks."""
        meter = self.metrics.meter
        if self._log_is_of_all:
            collectives.barrier("what was logged")
            meter.take_all(collectives.all_gather_object(meter.state_dict()))
        return meter.nonfinite()

    def _left(self, iteration: int) -> tuple[int | None, float | None]:
        """Returns iterations and seconds until the end by the config; None if nobody knows."""
        total = _first(self._limits())
        if total is None:
            return None, None
        left = max(total - iteration, 0)
        return left, self._stopwatch.seconds_left(iteration, left)

    @property
    def total_iterations(self) -> int | None:
        """The iteration at which the config ends training; None: unknown, or not set up yet.

        It is that of a run that leaves out nothing: else a schedule would change from its start if
        a number is given later.
        """
        return _first(self._limits(leaves_out=False))

    def _limits(self, *, leaves_out: bool = True) -> list[due.Limit]:
        """Returns what ends training; what training.skip_updates leaves out is counted, or not."""
        training = self._config.training
        data = self._data
        left_out = data.skips.numbers if leaves_out else ()
        return due.limits(training, data.updates_per_epoch, left_out, data.ahead)

    @contextlib.contextmanager
    def progress(self, iteration: int) -> Iterator[None]:
        """Shows a progress bar, while the block runs, to somebody at a terminal."""
        if collectives.rank() or not is_terminal(sys.stderr):
            yield
            return
        left, _ = self._left(iteration)
        total = None if left is None else iteration + left
        with progress_bar(iteration, total) as self._show:
            yield
        self._show = None

    def move(self, iteration: int) -> None:
        """Moves the progress bar, if there is one, some times in a second."""
        if self._show is not None and time.monotonic() - self._moved_at > _MOVE_SECONDS:
            self._show(completed=iteration, description=words(self._last))
            self._moved_at = time.monotonic()

    # --- before and after ----------------------------------------------------------------

    def already_finished(self, iteration: int, epoch: int) -> None:
        """Says that nothing is to be trained."""
        position = f"iteration {iteration}" + f", epoch {epoch}" * (epoch > 0)
        limits = self._limits()
        reached = [limit for limit in limits if limit.updates is None or limit.updates <= iteration]
        keys = " and ".join(f"training.{limit.key}" for limit in reached or limits)
        self._logger.info(
            f"FINISHED already: {position}. To train on, raise {keys}; --fresh starts over."
        )

    def end(self, digest: str) -> None:
        """Says how long it took, what is best, the digest, and how to see the curves."""
        # Its last line comes before ours, and all ranks wait for it: when one has ended with a code
        # other than 0, paddle's launcher kills the others four seconds later
        # (paddle/distributed/launch/controllers/controller.py, watch).
        collectives.on_rank_zero(self._checkpointer.close, "the last checkpoint")
        say = self._logger.info
        say("time        %s", card.clock(self._stopwatch.seconds()))
        for iteration, score in self._checkpointer.validations.best[:1]:
            monitor = self._config.training.monitor
            say("best        %s=%.6g at iteration %d", monitor, score, iteration)
        if digest:
            say("digest      %s", digest)
        if not (collectives.rank() or self._start.options.smoke):
            say("curves      python -m expbase board %s", shlex.quote(self._start.output))

    def stopped(self, iteration: int, stopped_by: StopReason, text: str, *, is_saved: bool) -> None:
        """Says why training stopped before its end."""
        hint = "" if stopped_by is StopReason.CALL else "; the same command continues"
        if not is_saved:
            hint = "; nothing was saved here: no checkpoint was asked for"
        self._logger.info("[%d] STOPPED by %s%s", iteration, text, hint)

    def finished(self, iteration: int, epoch: int) -> None:
        """Says that training came to its end."""
        newest = self._checkpointer.newest_saved
        where = f"epoch {epoch}, " if epoch else ""
        where += f"{newest.name} in " if newest else ""
        self._logger.info("[%d] FINISHED: %s%s", iteration, where, self._start.output)

    # --- failures ------------------------------------------------------------------------

    def failure(self, iteration: int, error: BaseException) -> None:
        """Writes what ended the run; whoever catches it shows it on the terminal."""
        raised = {"is_shown": True}
        self._logger.error("[%d] ended by %r", iteration, error, exc_info=error, extra=raised)

    def failed_batch(self, iteration: int, epoch: int) -> None:
        """Names the batch of an update that failed: the next start makes this update again."""
        self.quietly("saving", self._checkpointer.close)  # the last one may be under way
        words = [f"batch {self._data.batch_in_epoch} of epoch {epoch}"] if epoch else []
        if indices := self._data.batches.indices:
            words += [f"samples {textwrap.shorten(repr(indices), 400)} of the data set"]
        self._logger.info(
            f"[{iteration}] the failed update has read {', '.join(words) or 'no batch'}; the same "
            f"command makes this update again (newest checkpoint: {self._checkpointer.newest_name})"
        )

    def now(self, text: str, level: int = logging.WARNING) -> None:
        """Writes a line that must be seen, although the log may not be open yet."""
        self._logger.log(level, "%s", text, extra={"is_shown": True})
        say(f"{logging.getLevelName(level)}: {text}")

    def quietly(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Calls it after a failure: what fails now is logged, and hides nothing.

        In a fork of user code it does nothing: the run has not failed.
        """
        if self._own_process != os.getpid():
            return
        try:
            function(*args)
        except BaseException as error:  # a second Ctrl-C ends this step, and not the closing
            error.__suppress_context__ = True  # the original one was logged before
            self._logger.error("in %s, after the failure: %r", name, error, exc_info=error)


def _first(limits: Sequence[due.Limit]) -> int | None:
    return limits[0].updates if limits else None
