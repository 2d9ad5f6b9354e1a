"""Run: what drives an experiment. The order of setup, of an iteration, and of an end.

    setup:  prepare; device, processes, output directory, config dump, VisualDL, log, this run's
            checkpoint; seed; setup_dataloader, setup_model, startup; checks
    run:    the state is restored if there is one; on_train_begin, train, on_train_end; terminal,
            then each step of setup is undone
    train:  while going_on(): train_batch(); end_iteration()
    end_iteration:  on_train_batch_end, and if they are due: a line, a checkpoint, then what the
            checkpoint says is to be done (validate, end the epoch), and a stop

A Run owns the parts, which do not know it. What a user may override is called by way of the
experiment. Setup is in setup_steps.py, what a checkpoint holds in checkpoints.py, signals are in
engine/stop.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expbase.base import rng
from expbase.base.exit_codes import refuse_early_success
from expbase.checkpoint import storage
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.config import Config
from expbase.data.fetching import explain_dead_worker
from expbase.data.position import DataPosition
from expbase.engine import checks
from expbase.engine.due import END_EPOCH, VALIDATE, VALIDATE_AT_END, due_at, is_last, is_wanted
from expbase.engine.evaluation import Evaluation
from expbase.engine.first_updates import LOOK_AFTER, FirstUpdates
from expbase.engine.loop import Life, LoopState, Step
from expbase.engine.report import Report
from expbase.engine.run_dir import RunDirectory
from expbase.engine.stop import StopReason, StopRequests, ValidationExit, ValidationLeft
from expbase.engine.update import Update
from expbase.events import Subscribers
from expbase.ranks import collectives
from expbase.record import logs
from expbase.record.ledger import Ledger
from expbase.record.speed import Stopwatch
from expbase.state.attributes import UserState

_ALIKE_SECONDS = 10.0  # within which a validation fails on all ranks


class Run:
    """Drives one start of an experiment, and owns the parts that it needs."""

    def __init__(self, experiment: Any, config: Config, args: argparse.Namespace) -> None:
        self.experiment = experiment
        self.config = config
        self.args = args
        self.training = config.training
        self.rank = collectives.rank()
        self.world_size = collectives.world_size()
        self.parallel = self.world_size > 1
        self.read_only = checks.inspected(args) is not None
        self.writes = self.rank == 0 and not self.read_only  # the files that a run has once
        self.seed_rank = 0 if self.training.shares else self.rank  # outside of the shares
        self.output_dir = Path(args.output).absolute()
        self.logger = logs.early_log()  # until setup_logger, which writes its lines
        self.warn = functools.partial(self.logger.warning, "%s")
        self.life = Life.NEW
        self.loop = LoopState()
        self.on_close = contextlib.ExitStack()  # each step of setup adds how it is undone
        self.events = Subscribers(experiment)
        self.state = UserState(experiment, self.warn)
        self.directory = RunDirectory(self.output_dir)
        self.ledger = Ledger(None)
        self.stop = StopRequests()
        self.rank_watch: Any = None  # a Watch, if there are other ranks
        self.guards: list[contextlib.AbstractContextManager[Any]] = []  # round training
        self.stopwatch = Stopwatch()
        self.data = DataPosition()
        self.update = Update(self.training, self.state, self.stopwatch, self.events.fire)
        tools = self.state, self.stopwatch, self.events.fire, self.warn
        self.evaluation = Evaluation(self.training, *tools)
        folder = self.output_dir / storage.FOLDER
        self.checkpointer = Checkpointer(folder, self.training, self.logger)
        facts = config, type(experiment).default_config(), args, self.logger
        self.report = Report(*facts, self.stopwatch, self.data, self.checkpointer)
        self.first_updates = FirstUpdates([])

    iteration = property(lambda self: self.loop.iteration)
    epoch = property(lambda self: self.loop.epoch)

    @property
    def is_last(self) -> bool:
        """Whether the config asks for no iteration after the present one."""
        return is_last(self.training, self.iteration, self.epochs_ended)

    @property
    def epochs_ended(self) -> int:
        """Epochs that are used up: as many as began, but for the one under way."""
        return self.loop.epoch - (self.data.epoch > 0 and not self.data.ended)

    @property
    def finished(self) -> bool:
        """Whether training came to its end, by the config or by stop(); not interrupted."""
        return self.loop.has_finished(is_last=self.is_last)

    def train_to_the_end(self) -> None:
        """Restores, trains, closes; a SystemExit if something stopped it."""
        loop = self.loop
        with self.stop.installed(), self.closing():
            if self.life is Life.READY:
                self.experiment.resume_or_load()
            self.begin_record()
            for guard in self.guards:
                self.on_close.enter_context(guard)
            if loop.is_over:
                self.life = Life.ENDED
                self.report.is_over(self.iteration, self.epoch)
            else:
                with self.report.live(lambda: (self.evaluation.phase, self.iteration, self.epoch)):
                    self._train()
                self._say_the_end()
            self.stop.ignore_second_ctrl_c()  # what is left to do is short, and must be done
        if code := loop.stopped_by.exit_code:  # 0 if nothing stopped it
            sys.exit(code)

    def _train(self) -> None:
        self.life = Life.TRAINING
        rng.seed_for(self.training.seed, rng.SETUP, 1, self.seed_rank)
        self.events.fire("on_train_begin")
        if self.loop.todo:  # else it would be lost if the user's train() calls no going_on()
            self._begin_loop()
        self.experiment.train()
        self._end_loop()
        self.life = Life.ENDED
        self.events.fire("on_train_end")
        if self.finished:
            self.checkpointer.finish(self.iteration, self.epoch)

    def _end_loop(self) -> None:
        """After train(), maybe the user's own; if it returned early, that is a stop()."""
        loop = self.loop
        loop.check_end()
        if not loop.is_over:
            self.stop.add(StopReason.CALL, "train() returned")
            loop.stopped_by = StopReason.CALL
            if is_wanted(self.training, "save"):
                self._save_now()
        loop.end()

    def _say_the_end(self) -> None:
        self.report.end()
        if reason := self.loop.stopped_by:
            is_saved = self.loop.saved_at == self.iteration
            self.report.stopped(self.iteration, reason, self.stop.text, is_saved=is_saved)
        else:
            self.report.finished(self.iteration, self.epoch)

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none; false if it is over."""
        loop = self.loop
        if loop.step is Step.OUTSIDE and not loop.is_over:
            self._begin_loop()
        if loop.is_over:
            return False
        loop.need(Step.BETWEEN, "going_on")
        if self.data.ended:
            self.experiment.new_epoch()
        loop.iteration += 1
        rng.seed_for(self.training["seed"], rng.TRAIN, loop.iteration, self.seed_rank)
        loop.step = Step.WITHIN
        return True

    def _begin_loop(self) -> None:
        self.life.need_setup("going_on")
        if self.read_only:
            raise RuntimeError("going_on: --evaluate or --export only look; expected exp.run().")
        if self.life is Life.READY:  # a loop by hand, without run()
            self.experiment.resume_or_load()
        self.begin_record()
        self.report.differences(*self.state.values.look())
        self.report.leave_log_to_zero()
        self.stop.start(self.iteration)
        self.stopwatch.start(self.iteration)
        self.first_updates = FirstUpdates(self.state.optimizers().values())
        self.loop.began = self.iteration
        if self.loop.todo:  # what the start before has left
            self._do_what_follows()
        else:
            self.loop.stopped_by = self.stop.agreed(self.iteration)
            self._decide()

    def end_iteration(self) -> None:
        """Ends the iteration under way: on_train_batch_end, then whatever is due."""
        loop = self.loop
        loop.need(Step.WITHIN, "end_iteration")
        loop.step = Step.ENDING
        self.events.fire("on_train_batch_end")
        self._log_and_save()
        self._do_what_follows()

    def _log_and_save(self) -> None:
        """Each if it is due: what was trained is safe, whatever fails afterwards."""
        loop = self.loop
        epochs = loop.epochs_before, self.epochs_ended
        is_end = self.data.ended
        due = due_at(self.training, self.iteration, *epochs, is_epoch_end=is_end)
        self._look_at_first_updates(self.iteration - loop.began)
        if due.log:
            rates = self.experiment.learning_rates()
            self.report.line(self.iteration, self.epoch, rates, self.events.fire)
        loop.todo = due.follows
        if due.checkpoint or loop.save_requested:
            loop.may_be_best_at = self.iteration
            self._save_now()

    def _do_what_follows(self) -> None:
        """Does what is still to be done of an iteration, by the list that its checkpoint holds."""
        loop = self.loop
        loop.step = Step.ENDING
        try:
            while loop.todo:
                self._do(loop.todo[0])
                del loop.todo[0]
        except ValidationLeft:
            self.logger.info("[%d] left the validation; the next start makes it", self.iteration)
        loop.stopped_by = self.stop.agreed(self.iteration, ask_now=bool(loop.todo))
        self._save_at_end()
        self.checkpointer.settle(wait=False)
        self._decide()

    def _do(self, what: str) -> None:
        if what == END_EPOCH:
            self._end_epoch()
        elif what == VALIDATE or (what == VALIDATE_AT_END and self.is_last):
            self._validate()

    def _decide(self) -> None:
        loop = self.loop
        loop.epochs_before = self.epochs_ended
        loop.is_over = self.is_last or bool(loop.stopped_by)
        loop.step = Step.OUTSIDE if loop.is_over else Step.BETWEEN

    def _look_at_first_updates(self, updates: int) -> None:
        if updates == 1:
            self.checkpointer.refuse_changes(self.state.saved())
            self.update.check_first()
        is_whole_run = updates == self.iteration and self.is_last
        if updates == LOOK_AFTER or (is_whole_run and updates < LOOK_AFTER):
            has_logged = self.report.metrics.is_used or not self.training.log_interval
            has_read = self.stopwatch.batches > 0 or self.experiment.train_loader is None
            for text in self.first_updates.look(has_logged=has_logged, has_read=has_read):
                self.warn(f"[{self.iteration}] in {updates} updates {text}")

    def read_batch(self) -> Any:
        """The next training batch of this rank."""
        if self.evaluation.phase != "train":
            raise RuntimeError(
                f"read_batch: called in the phase {self.evaluation.phase!r}, where it would take "
                "training data; expected valid_batches()."
            )
        data = self.data
        stopwatch = self.stopwatch
        began = stopwatch.clock()
        if data.ended:
            if data.epoch:
                self._end_epoch()
            self.experiment.new_epoch()
        fire = self.events.fire
        fire("on_fetch_data_begin")
        batch = data.read(self.iteration)
        fire("on_fetch_data_end")
        share = data.share(self.update.batches)
        # As an item: an attribute of a config takes ten times as long.
        rng.seed_for(self.training["seed"], rng.TRAIN, self.iteration, *share)
        fire("on_train_batch_begin", batch, data.batches.indices)
        stopwatch.note_batch(began)
        return batch

    def new_epoch(self) -> None:
        """Begins an epoch; right after a resume in the middle of one, it goes on with that one."""
        data = self.data
        if data.resumed_within_epoch or self.loop.is_over:
            return
        if data.epoch and not data.ended:  # it is left in its middle
            self._end_epoch()
        self.loop.epoch += 1
        data.open(self.epoch)
        rng.seed_for(self.training.seed, rng.EPOCH, self.epoch, self.seed_rank)
        self.events.fire("on_train_epoch_begin")
        data.check_same_loader(self.experiment.train_loader)

    def _end_epoch(self) -> None:
        rng.seed_for(self.training.seed, rng.EPOCH, self.epoch, self.seed_rank, 1)
        self.events.fire("on_train_epoch_end")

    def _validate(self) -> None:
        """The validation of this iteration, unless there was one; a stop may leave it."""
        loop = self.loop
        if loop.validated_at == self.iteration:
            return
        # Their counters are put back if a stop leaves the validation.
        listeners = functools.partial(self.events.load_state_dict, self.events.state_dict())
        may_be_left = self.evaluation.may_be_left(ValidationExit(self.stop), listeners)
        # An evaluate() of the user's may not call super's, so the phase begins here.
        try:
            with may_be_left, self.evaluation.begin("valid", self.iteration):
                loop.results = dict(self.experiment.evaluate() or {})
        except Exception:
            self.report.quietly("saving", self._save_what_was_trained)
            raise
        loop.validated_at = self.iteration

    def _save_what_was_trained(self) -> None:
        """After a validation that failed, if it did on all ranks: one alone would wait for ever."""
        if self.loop.saved_at < self.iteration and is_wanted(self.training, "save"):
            collectives.barrier("a validation that failed", within_seconds=_ALIKE_SECONDS)
            self._save_now()
            # Else a rank that fails first would end rank 0 while it writes.
            collectives.on_rank_zero(self.checkpointer.settle, "saving")

    def save(self) -> None:
        """Writes a checkpoint; within an iteration, at its end."""
        loop = self.loop
        if loop.step in (Step.WITHIN, Step.ENDING):
            loop.save_requested = True
            return
        if loop.saved_at == self.iteration or self.read_only:
            return
        loop.check_savable()
        self.directory.check()
        with self.stopwatch.exclude():
            self.report.check_finite(self.iteration)
            self.update.check_complete()
            self.update.check_wrapped()
            needed = self.is_last or bool(loop.stopped_by)  # there will be no later one
            self.checkpointer.save(self.iteration, self.report.metrics.sizes(), needed=needed)
        self.report.leave_log_to_zero()
        loop.saved_at = self.iteration
        self.stop.note_saved()

    def _save_now(self) -> None:
        """Calls the user's save(), in a step in which save() writes and does not wait."""
        loop = self.loop
        loop.save_requested = False
        before = loop.step
        loop.step = Step.BETWEEN
        self.experiment.save()
        loop.step = before
        if loop.saved_at < 0 and not self.read_only:
            self.report.no_checkpoint(self.iteration)

    def _save_at_end(self) -> None:
        """A checkpoint at the very end of an iteration: the run stops, or it was asked for since.

        The results of the validation are noted first: a run that continues does not validate again.
        """
        loop = self.loop
        # A signal or the clock must not change which checkpoint is the best.
        if loop.save_requested or loop.stopped_by is StopReason.CALL:
            loop.may_be_best_at = self.iteration
        at_stop = bool(loop.stopped_by) and is_wanted(self.training, "save")
        saves = loop.save_requested or at_stop or self.stop.is_save_due
        is_validated = loop.validated_at == self.iteration and not loop.todo
        if is_validated:
            may_be_best = loop.may_be_best_at == self.iteration
            now = self.iteration, self.epoch
            self.checkpointer.validations.add(*now, loop.results, has_checkpoint=may_be_best)
        if saves:
            self._save_now()
        if is_validated:
            checks.check_metric("training.monitor", self.training.monitor, loop.results)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes after the block; an error in it is logged first, and nothing hides it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.experiment.close()

    def close(self) -> None:
        """Ends what setup began: terminal, then each step of setup backwards. Once."""
        if self.life is Life.CLOSED:
            return
        self.life = Life.CLOSED
        try:
            with self.on_close:
                self._finish()
        except Exception as error:
            error.__suppress_context__ = True
            self.logger.error("while closing: %r", error, exc_info=error)
            raise
        finally:
            logs.close_log(self.logger)

    def _finish(self) -> None:
        try:
            self.experiment.terminal()
        except BaseException as error:  # the record of this start must not say that all is well
            refuse_early_success(error)
            self.loop.failure = self.loop.failure or error
            raise

    def fail(self, error: BaseException) -> None:
        """Every failure goes through here: it is logged, on_exception and on_train_end are fired,
        the other ranks hear of it, everything is closed, and nothing hides it.
        """
        refuse_early_success(error)
        loop = self.loop
        quietly = self.report.quietly
        was_training = self.life is Life.TRAINING
        if error is not loop.failure:
            loop.failure = error
            explain_dead_worker(error)
            self._say_failure(error)
        loop.end()
        if was_training:
            self.life = Life.ENDED
            for event, *args in (("on_exception", error), ("on_train_end",)):
                for name, handler in self.events.each(event, *args):
                    quietly(name, handler)
        if self.rank_watch is not None:
            quietly("telling the other ranks", self.rank_watch.tell, error)
        quietly("close", self.experiment.close)
        quietly("close", self.close)  # if an override failed before super's

    def _say_failure(self, error: BaseException) -> None:
        report = self.report
        iteration = self.iteration
        report.failure(iteration, error)
        if self.loop.step is Step.WITHIN and isinstance(error, Exception):
            report.quietly("the batch", report.failed_batch, iteration, self.epoch)
        if not self.ledger.has_begun:
            report.quietly("ledger", self._note_end)

    def begin_record(self) -> None:
        """Notes in the ledger that this start trains, once, and that its end is to be noted."""
        if not self.ledger.has_begun:
            self.directory.check()
            reason = getattr(self.args, "restart_reason", None)
            self.ledger.begin(self.iteration, self.config, reason, self.world_size)
            self.on_close.callback(self._note_end)

    def _note_end(self) -> None:
        stopped_by = self.loop.stopped_by
        reason = str(stopped_by or "finished")
        self.ledger.end(self.iteration, self.loop.failure, reason, stopped_by.exit_code)
