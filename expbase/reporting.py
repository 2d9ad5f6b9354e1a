"""What an experiment says: logged scalars, the lines at log_interval, the card, the last lines.

Formats are in metrics.py, meter.py and record/card.py; when something is said is decided here and
in the loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expbase import checks, console, distributed, logs, schedule
from expbase.attributes import Attributes
from expbase.config import differences, flatten
from expbase.life import Life, Step
from expbase.meter import Meter, NonFiniteError, short
from expbase.processes import exit_code_of
from expbase.record import card, hang
from expbase.record.run_record import config_changes
from expbase.stopping import StopReason


class Reporting(Attributes):
    """What an experiment says while it lives."""

    def log(
        self, mapping: Mapping[str, Any] | None = None, /, *misplaced: Any, **scalars: Any
    ) -> None:
        """Notes scalars of this iteration; at log_interval their means become one line.

        Args:
            mapping: Numbers or one-element tensors by name.
            *misplaced: Nothing.
            **scalars: The same as keywords.

        Raises:
            TypeError: It is something else.
        """
        if mapping is not None or misplaced:
            if misplaced or not isinstance(mapping, Mapping):
                raise TypeError(
                    f"log: {mapping!r} given without a name; expected self.log(loss=loss) or "
                    'self.log({"loss": loss}).'
                )
            scalars = {**mapping, **scalars}
        self._meter().add(self.iteration, scalars)

    def _meter(self) -> Meter:
        """What `log` adds to; evaluation.py has another one for its phases."""
        return self._metric_log.meter

    def learning_rates(self) -> dict[str, float]:
        """Of each optimizer among the attributes, by the name of its curve."""
        found = self._optimizers()  # excluded ones, too
        rates = {f"train/lr/{name}": float(o.get_lr()) for name, o in found.items()}
        return rates if len(rates) > 1 else {"train/lr": rate for rate in rates.values()}

    # --- lines of training ---------------------------------------------------------------

    def _log_line(self) -> None:
        """The means of what was logged since the last line, rates and speeds: one event."""
        self._check_finite()  # waits for the device: that is training's time
        batch_size = self._iterator.adapter.batch_size
        samples = batch_size and batch_size * self.world_size
        speed = self._stopwatch.speed(self.iteration, samples)
        with self._stopwatch.exclude("logging"):
            if (seconds := self._left()[1]) is not None:
                speed["seconds_left"] = seconds
            means = self._metric_log.meter.means()
            metrics = {f"train/{name}": mean for name, mean in means.items()}
            metrics |= self.learning_rates() | {f"speed/{name}": n for name, n in speed.items()}
            self.fire("on_log", metrics)
            self._metric_log.last = metrics
            self._metric_log.write(self.iteration, self.epoch, metrics, is_routine=True)
            if not schedule.is_wanted(self.config.training, "valid"):
                self._compare([name for name in metrics if name.startswith("train/")])

    def _compare(self, names: Sequence[str]) -> None:
        """Adds the run to the board's table of runs, with what is not by default in its config."""
        if names and not self._metric_log.is_compared:
            self._metric_log.is_compared = True
            self.visualizer.add_hparams(self._config_changes(), names, keys=flatten(self.config))

    def _config_changes(self) -> dict[str, Any]:
        changes = differences(type(self).default_config(), self.config)
        return {key: now for key, (_, now) in changes.items()}

    def _check_finite(self) -> None:
        """Before a line or a checkpoint: warns, or raises, if a logged scalar is not finite."""
        bad = self._metric_log.meter.nonfinite()
        policy = self.config.training.nonfinite if bad else "ignore"
        if policy == "warn":
            self.logger.warning("[%d] not finite: %s", self.iteration, bad)
        elif policy == "error":
            self._checkpointer.close()  # one may still be under way
            raise NonFiniteError(bad, self._checkpointer.newest_name)

    def _left(self) -> tuple[int | None, float | None]:
        """Iterations and seconds until the end that the config asks for; None if nobody knows."""
        training, iteration = self.config.training, self.iteration
        left = schedule.iterations_left(training, iteration, self.batches_per_epoch)
        return left, None if left is None else self._stopwatch.seconds_left(iteration, left)

    # --- before and after training -------------------------------------------------------

    def _say_what_there_is(self) -> None:
        """The card, and what looks like a mistake."""
        training, saved = self.config.training, self._saved_objects()
        for text in card.card(
            type(self).__name__,
            self._config_changes(),
            saved.layers,
            self._iterator.adapter,
            self.valid_loader,
            self.world_size,
            training.accumulation_steps,
            str(self.args.output),
        ):
            self.logger.info("%s", text)
        if self.read_only:
            return
        found = self.stateful_objects()
        left_out = checks.likely_left_out(found, saved, parallel=self.parallel)
        for text in (*checks.likely_mistakes(training), *left_out):
            self.logger.warning("%s", text)

    def _say_it_is_over(self) -> None:
        place = f"iteration {self.iteration}" + f", epoch {self.epoch}" * (self.epoch > 0)
        self.logger.info(
            f"FINISHED already: {place}. To train on, raise training.max_iteration or max_epoch; "
            "--fresh starts over."
        )

    def _say_the_goal(self) -> None:
        training = self.config.training
        goals = [f"iteration {training.max_iteration}"] if training.max_iteration else []
        goals += [f"the end of epoch {training.max_epoch}"] if training.max_epoch else []
        self.logger.info("training until %s in %s", " or ".join(goals), self.args.output)

    def _live_line(self) -> contextlib.ExitStack:
        """Shows how far it is, while the block runs, to somebody at a terminal."""
        stack = contextlib.ExitStack()
        if self.rank == 0 and console.is_terminal(sys.stderr):
            is_shown = stack.enter_context(console.live_line(self._progress_line))
            stack.enter_context(logs.routine_elsewhere(self.logger, is_shown))
        return stack

    def _progress_line(self) -> console.Line:
        """Called in another thread: it looks, and changes nothing."""
        last, (left, seconds) = self._metric_log.last, self._left()
        loss = next((name for name in ("train/loss", *last) if name in last), None)
        words = [f"epoch {self.epoch}"] if self.epoch else []
        words += [f"{loss.removeprefix('train/')} {last[loss]:.4g}"] if loss else []
        words += [f"{card.clock(seconds)} left"] if seconds is not None else []
        speed = last.get("speed/steps_per_second")
        words += [f"{short(speed)} it/s"] if speed else []
        total = None if left is None else self.iteration + left
        return console.Line(self.phase, self.iteration, total, [*words, console.memory()])

    def _say_the_end(self) -> None:
        """Where the time went, what is best, how to see the curves, and why it ended."""
        # Its last line comes before ours, and all ranks wait for it: when one has ended, paddle's
        # launcher kills the others four seconds later.
        distributed.on_rank_zero(self._checkpointer.close, "the last checkpoint")
        say, watch, output = self.logger.info, self._stopwatch, str(self.args.output)
        times = watch.time_breakdown().items()
        shares = ", ".join(f"{name} {share:.0%}" for name, share in times if share)
        say("time        %s: %s", card.clock(watch.seconds()), shares)
        for iteration, score in self._checkpointer.validations.best[:1]:
            monitor = self.config.training.monitor
            say("best        %s=%.6g at iteration %d", monitor, score, iteration)
        if self.rank == 0 and not getattr(self.args, "smoke", False):
            say("curves      python -m expbase board %s", shlex.quote(output))
        if stopped_by := self._loop.stopped_by:
            hint = "" if stopped_by is StopReason.CALL else "; the same command continues"
            if self._loop.saved_at != self.iteration:
                hint = "; nothing was saved here: no checkpoint was asked for"
            reason = self._stop_requests.text or stopped_by
            return say("[%d] STOPPED by %s%s", self.iteration, reason, hint)
        newest = self._checkpointer.newest_saved
        where = f"{newest.name} in {output}" if newest else "no checkpoint was asked for"
        where = where if self.rank == 0 else "rank 0 has the checkpoints"
        where = f"epoch {self.epoch}, {where}" if self.epoch else where
        say("[%d] FINISHED: %s", self.iteration, where)

    def _say_waiting(self) -> None:
        """A stop is asked for and has not come yet; called in another thread."""
        place = "its next batch, which valid() has not asked for" if self.phase == "valid" else ""
        place = place or "the end of the update under way" * (self._loop.step is Step.WITHIN)
        reason = self._stop_requests.reason
        self.logger.warning(
            f"[{self.iteration}] {reason}: waits for {place or 'the last checkpoint'}"
        )

    def _say_failure(self, error: BaseException) -> None:
        raised = {"is_shown": True}  # whoever catches it shows it on the terminal
        text = "[%d] ended by %r"
        self.logger.error(text, self.iteration, error, exc_info=error, extra=raised)
        if self._loop.step is Step.WITHIN and isinstance(error, Exception):
            self._quietly("the batch", self._say_batch)
        if self.life in (Life.NEW, Life.READY):  # there is no start in the ledger
            self._quietly("ledger", self._note_end)

    def _say_batch(self) -> None:
        """Names the batch of an update that failed: the next start comes to it again."""
        self._quietly("saving", self._checkpointer.close)  # the last one may be under way
        words = [f"batch {self.batch_in_epoch} of epoch {self.epoch}"] if self.epoch else []
        if indices := self._iterator.batches.indices:
            words += [f"samples {textwrap.shorten(repr(indices), 400)} of the data set"]
        self.logger.info(
            f"[{self.iteration}] the update was made of {', '.join(words) or 'no batch'}; the same "
            f"command comes to it again, from {self._checkpointer.newest_name}"
        )

    # --- what stays of a start and an end ------------------------------------------------

    @property
    def _log_path(self) -> Path:
        return self.output_dir / f"worker_{self.rank}.log"

    @property
    def _supervisor(self) -> Any:
        """With --restarts the restarts.Supervisor of this process, else None."""
        return getattr(self.args, "supervisor", None)

    def _begin_record(self) -> None:
        """Notes that this start trains, once, and that its end is to be noted."""
        record = self._run_record
        if record.has_begun:
            return
        record.has_begun = True
        if record.gathered is not None:
            facts = record.gathered.result()
            facts |= {"ranks": self.world_size, "resumed": record.resumed}
            facts["restart"] = self._supervisor and self._supervisor.reason
            facts["config_changes"] = config_changes(self.output_dir, self.config)
            record.write("start", iteration=self.iteration, **facts)
            self._on_close.callback(self._note_end)

    def _note_end(self) -> None:
        failure, stopped_by = self._loop.failure, self._loop.stopped_by
        reason = repr(failure) if failure else str(stopped_by or "finished")
        code = stopped_by.exit_code
        if failure:
            code = exit_code_of(failure, in_setup=not self._run_record.has_begun)
        self._run_record.write("end", iteration=self.iteration, reason=reason, exit_code=code)

    def _say_now(self, text: str, level: int = logging.WARNING) -> None:
        """A line that must be seen, although the log may not be open yet."""
        self.logger.log(level, "%s", text, extra={"is_shown": True})
        print(f"{logging.getLevelName(level)}: {text}", file=sys.stderr)

    def _end_with_another_rank(self, text: str, code: int) -> None:
        """The last thing that this rank does when another one ended; called in a thread."""
        self._run_record.write("end", iteration=self.iteration, reason=text, exit_code=code)
        how, level = ("failed", logging.ERROR) if code == 1 else ("was stopped", logging.WARNING)
        self._say_now(f"[{self.iteration}] ended, because another rank {how}: {text}", level)

    def _watch_for_hanging(self) -> None:
        if self._other_ranks is not None:
            self._on_close.enter_context(self._other_ranks.heard_before_abort())
        if seconds := self.config.training.hang_seconds:
            end = self._end_hanging if self.config.training.hang_action == "end" else None
            watch = hang.watching(
                seconds, self._progress, self.logger, self._log_path, end, parallel=self.parallel
            )
            self._on_close.enter_context(watch)

    def _end_hanging(self, text: str) -> None:
        """Ends this process, in a thread: the main one may be where no Python code runs."""
        try:
            self._run_record.write("end", iteration=self.iteration, reason=text, exit_code=1)
            if self._other_ranks is not None:
                self._other_ranks.tell(TimeoutError(text))
        finally:
            os._exit(1)

    def _progress(self) -> dict[str, Any]:
        """What changes while the run makes progress; called in another thread."""
        place = {"iteration": self.iteration, "batch_in_epoch": self.batch_in_epoch}
        return {"phase": self.phase, **place}

    def _quietly(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Calls it after a failure: what fails now is logged, and hides nothing."""
        try:
            function(*args)
        except BaseException as error:  # a second Ctrl-C ends this step, and not the closing
            error.__suppress_context__ = True  # the original one was logged before
            self.logger.error("in %s, after the failure: %r", name, error, exc_info=error)
