"""ExperimentBase: the life of a training run. The one file of expbase that you must read.

A subclass writes four methods, `setup_dataloader`, `setup_model`, `train_batch` and `valid`; the
rest is done here, and every method without a leading underscore may be overridden. The class does
not know your model, your loss or your batch: forward, backward, step and schedule are in your
`train_batch`, and nothing is moved, wrapped, cast or stepped behind your back.

    setup:  device, processes, output directory, config dump, VisualDL, log, seed, your two
            setup methods, checks
    run:    the state is restored if there is one; on_train_begin, train, on_train_end;
            terminal, then each step of setup is undone
    train:  while self.going_on():
                self.train_batch()
                self.end_iteration()

The words: an iteration is one call of train_batch, one update. An epoch is one pass over the
training data. A batch is what the loader yields. A checkpoint holds the state right after an
update. A start is one process's part of a run; a run may need several. The states of a run and of
its loop are drawn in life.py.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from expbase import checks, schedule
from expbase.checkpoints import Checkpoints
from expbase.config import check_training
from expbase.front import with_mixins
from expbase.life import Life, Step
from expbase.logs import close_log
from expbase.setup_steps import SetupSteps
from expbase.state import rng
from expbase.stopping import StopReason, ValidationLeft

_YOURS = ("setup_dataloader", "setup_model", "train_batch", "valid")


class ExperimentBase(SetupSteps, Checkpoints):
    """One training run, from its config to its last checkpoint.

    Here are its life and its loop. What is due when is in schedule.py, the events are in events.py.
    The other topics: attributes.py (all attributes, what is state), setup_steps.py, training.py
    (the parts of an update), evaluation.py, checkpoints.py (what a checkpoint holds),
    model_files.py, reporting.py (what is logged and recorded; the format is in meter.py).

    Args:
        config: A Config with a `training` section, in which max_iteration, valid_interval and
            save_interval are needed; what else is missing there gets its default.
        args: `output` and `device` are needed; `checkpoint_path`, `init_model_path`, `fresh` and
            `force` are used if there.

    Raises:
        TypeError: One of the four methods is missing, or an attribute was set too early.
        ConfigError: The config, the args or this version of paddle cannot be used.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(with_mixins(cls))  # what a tool that is at work puts in front

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        checks.check_paddle()
        super().__init__(config, args)
        needs_valid = self.read_only or schedule.is_wanted(self.config.training, "valid")
        checks.check_class(type(self), ExperimentBase, _YOURS if needs_valid else _YOURS[:3])
        self._names.template = dict.fromkeys(vars(self).keys() - {"model", "optimizer"})
        checks.check_private_names(type(self), self._names.template)

    # --- yours ---------------------------------------------------------------------------

    def setup_dataloader(self) -> None:
        """Sets self.train_loader, unless training makes its own data and has no epochs, and
        self.valid_loader if valid() uses valid_batches().
        """
        raise NotImplementedError

    def setup_model(self) -> None:
        """Sets the models, the optimizers and whatever else training needs on self."""
        raise NotImplementedError

    def train_batch(self) -> None:
        """One update: reads a batch, forward, backward, step; logs what you want to see."""
        raise NotImplementedError

    def valid(self) -> Mapping[str, Any] | None:
        """One validation, on every rank; in eval mode and without gradients already.

        Returns:
            Numbers by name; those of rank 0 are used. `self.average` makes them the same on all.
        """
        raise NotImplementedError

    # --- the loop ------------------------------------------------------------------------

    def train(self) -> None:
        """The loop. Override it to write your own: going_on() before and end_iteration() after each
        update, or nothing is logged, validated or saved, and no signal is heard.

        If it returns early, the run is saved and counts as stopped.
        """
        while self.going_on():
            self.train_batch()
            self.end_iteration()

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none; false at the end of training.

        Raises:
            RuntimeError: The iteration before was not ended.
        """
        loop = self._loop
        is_ready = loop.step is Step.BETWEEN and not self._iterator.batches.ended
        if not (is_ready or self._begin_loop_or_epoch()):
            return False
        self.iteration += 1
        rng.seed_for(self.config.training.seed, rng.TRAIN, self.iteration, self.rank)
        loop.step = Step.WITHIN
        return True

    def _begin_loop_or_epoch(self) -> bool:
        """What going_on() does before the first iteration and between epochs; false: it is over."""
        loop = self._loop
        if loop.step is Step.OUTSIDE and not loop.is_over:
            self._begin_loop()
        if loop.is_over:
            return False
        loop.need(Step.BETWEEN, "going_on")
        if self._iterator.ended:
            self.new_epoch()
        return True

    def _begin_loop(self) -> None:
        self._need_setup("going_on")
        if self.read_only:
            raise RuntimeError("going_on: --evaluate or --export only look; expected exp.run().")
        loop = self._loop
        if self.life is Life.READY:  # a loop by hand, without run()
            self.resume_or_load()
        self._begin_record()
        self._stop_requests.start(self.iteration)
        self._stopwatch.start(self.iteration)
        self._note_before_first_update()
        if loop.todo:  # what the start before has left
            self._do_what_follows()
        else:
            loop.stopped_by = self._stop_requests.agreed(self.iteration)
            self._plan()

    def end_iteration(self) -> None:
        """Ends the iteration under way: on_train_batch_end, then whatever is due.

        Raises:
            RuntimeError: There is none.
        """
        loop = self._loop
        loop.need(Step.WITHIN, "end_iteration")
        loop.step = Step.ENDING
        self.fire("on_train_batch_end")
        if self.iteration >= loop.next_due or self._iterator.batches.ended:
            self._do_what_is_due()
        else:
            loop.step = Step.BETWEEN

    def _do_what_is_due(self) -> None:
        """Logs and saves, each if due: what was trained is safe, whatever fails afterwards."""
        loop = self._loop
        due = schedule.due_at(
            self.config.training,
            self.iteration,
            loop.epochs_before,
            self.epochs_ended,
            is_epoch_end=self._iterator.batches.ended,
        )
        self._check_first_updates()
        if due.log:
            self._log_line()
        loop.todo = due.follows
        if due.checkpoint or loop.save_requested:
            loop.planned_at = self.iteration
            self._save_now()
        self._do_what_follows()

    def _do_what_follows(self) -> None:
        """Does what is still to be done of an iteration, by the list that its checkpoint holds."""
        loop = self._loop
        loop.step = Step.ENDING
        try:
            while loop.todo:
                self._do(loop.todo[0])
                del loop.todo[0]
        except ValidationLeft:
            self.logger.info("[%d] left the validation; the next start makes it", self.iteration)
        loop.stopped_by = self._stop_requests.agreed(self.iteration, ask_now=bool(loop.todo))
        self._save_if_stopping()
        self._checkpointer.background.raise_failure()
        self._plan()

    def _do(self, what: str) -> None:
        if what == schedule.END_EPOCH:
            self._end_epoch()
        elif what == schedule.VALIDATE or self._is_last:
            self._validate()

    def _plan(self) -> None:
        """Decides whether the loop goes on, and until when it need not look at anything."""
        loop = self._loop
        loop.epochs_before = self.epochs_ended
        loop.is_over = self._is_last or bool(loop.stopped_by)
        loop.step = Step.OUTSIDE if loop.is_over else Step.BETWEEN
        requests = self._stop_requests
        next_due = schedule.next_due(self.config.training, self.iteration)
        self._loop.next_due = min(next_due, requests.next_iteration)
        # A signal since agreed() has called wake(), and the line above has overwritten it. Several
        # ranks stop only where they ask each other.
        if requests.reason and not self.parallel:
            self._loop.wake()

    def stop(self, reason: str = "stop() was called", *, on_all_ranks: bool = False) -> None:
        """Ends training after the iteration under way, with a checkpoint of it.

        Args:
            reason: For the log.
            on_all_ranks: That all ranks call it in this iteration, so that it is the last one.
                Else they ask each other, about twice a second, and end at a later one together.
        """
        self._stop_requests.add(StopReason.CALL, reason, on_all_ranks=on_all_ranks)
        self._loop.wake()

    # --- data ----------------------------------------------------------------------------

    def read_batch(self) -> Any:
        """The next training batch of this rank; goes on into the next epoch by itself.

        Call it in train_batch only; elsewhere it takes data from training.
        """
        if self.phase != "train":
            raise RuntimeError(
                f"read_batch: called in the phase {self.phase!r}, where it would take training "
                "data; expected valid_batches()."
            )
        watch, iterator = self._stopwatch, self._iterator
        began = watch.clock()
        if iterator.batches.ended:
            self._loop.wake()  # an epoch that ends within an update has things due, too
            if self._iterator.epoch:
                self._end_epoch()
            self.new_epoch()
        self.fire("on_fetch_data_begin")
        batch = iterator.read(self.iteration)
        self.fire("on_fetch_data_end")
        training = self.config.training
        share = iterator.share(training.accumulation_steps)
        rng.seed_for(training.seed, rng.TRAIN, self.iteration, *share)
        if "on_train_batch_begin" in self._subscribers.subscribed:  # else nobody needs the indices
            self.fire("on_train_batch_begin", batch, iterator.batches.indices)
        watch.batches += 1
        watch.data_seconds += watch.clock() - began
        return batch

    def new_epoch(self) -> None:
        """Begins an epoch; right after a resume in the middle of one, it goes on with that one."""
        if self._iterator.resumed_within_epoch or self._loop.is_over:
            return
        if self._iterator.epoch and not self._iterator.ended:  # it is left in its middle
            self._end_epoch()
        self.epoch += 1
        self._iterator.open(self.epoch)
        rng.seed_for(self.config.training.seed, rng.EPOCH, self.epoch, self.rank)
        self.fire("on_train_epoch_begin")

    def _end_epoch(self) -> None:
        rng.seed_for(self.config.training.seed, rng.EPOCH, self.epoch, self.rank, 1)
        self.fire("on_train_epoch_end")

    # --- setup ---------------------------------------------------------------------------

    def setup(self) -> None:
        """Everything before the first batch.

        Raises:
            ConfigError: What the config or the args say cannot be done.
            TypeError, ValueError: The experiment lacks something, or something does not fit.
        """
        if "_loop" not in vars(self):
            raise TypeError(
                f"{type(self).__name__}.__init__: did not call super().__init__(config, args)."
            )
        if self.life is not Life.NEW:
            raise RuntimeError("setup: called a second time; make a new experiment.")
        try:
            self._setup()
        except BaseException as error:
            self._fail(error)
            raise

    def _setup(self) -> None:
        check_training(self.config.training)  # it may have been changed since it was made
        self.prepare()
        self.setup_device()
        if self.parallel:
            self.init_parallel()
        self.setup_output_dir()
        self.dump_config()
        self.setup_visualizer()
        self.setup_logger()
        self.setup_checkpointer()
        # The steps until here have made the template's attributes: from now on these stay.
        self._names.template = {name: vars(self)[name] for name in self._names.template}
        rng.seed_for(self.config.training.seed, rng.SETUP)  # the same on all ranks

        self.fire("on_setup_begin")
        self.setup_dataloader()
        self._attach_data()
        self.setup_model()
        self.startup()
        checks.check_names(vars(self), ExperimentBase)
        self.check_setup()
        self.life = Life.READY
        self.fire("on_setup_end")
        self._names.values.begin()

    # --- the run -------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, from wherever the state is, or does --evaluate or --export; closes.

        Raises:
            SystemExit: It was stopped by a signal or a time limit; with the exit code for that.
            BaseException: Whatever training raised, after everything was closed.
        """
        self._need_setup("run")
        if self.life is Life.CLOSED:
            raise RuntimeError("run: this experiment is closed; make a new one.")
        if self.read_only:
            with self.closing():
                return self._inspect()
        loop = self._loop
        with self._stop_requests.installed(loop.wake, self._say_waiting), self.closing():
            if self.life is Life.READY:
                self.resume_or_load()
            self._begin_record()
            self._watch_for_hanging()
            if loop.is_over:
                self.life = Life.ENDED
                self._say_it_is_over()
            else:
                self._say_the_goal()
                with self._live_line():
                    self._train_with_events()
                self._say_the_end()
            self._stop_requests.now_seconds = 0.0  # what is left to do is short, and must be done
        if code := loop.stopped_by.exit_code:  # 0 if nothing stopped it
            sys.exit(code)

    def _train_with_events(self) -> None:
        self.life = Life.TRAINING
        rng.seed_for(self.config.training.seed, rng.SETUP, 1, self.rank)
        self.fire("on_train_begin")
        if self._loop.todo:  # a train() of the user's may not call going_on() again
            self._begin_loop()
        self.train()
        self._check_end_of_train()
        self.life = Life.ENDED
        self.fire("on_train_end")
        if self.finished:
            self._checkpointer.finish(self.iteration, self.epoch)

    def _check_end_of_train(self) -> None:
        """After train(), maybe the user's own: a RuntimeError if it left an iteration open."""
        loop = self._loop
        if loop.step is Step.WITHIN:
            raise RuntimeError(
                f"train: returned within iteration {self.iteration}; expected "
                "self.end_iteration() after each self.train_batch()."
            )
        if loop.step is Step.OUTSIDE and not loop.is_over:
            self.logger.warning(
                f"[{self.iteration}] train() returned without self.going_on(): no signal was "
                "heard, no line written, nothing validated or saved but by hand. Expected `while "
                "self.going_on(): self.train_batch(); self.end_iteration()`."
            )
        elif not loop.is_over:
            self.stop("train() returned")
            loop.stopped_by = StopReason.CALL
            if schedule.is_wanted(self.config.training, "save"):
                self._save_now()
        loop.is_over = True

    # --- the end -------------------------------------------------------------------------

    def terminal(self) -> None:
        """The final step of a start, once, also after a failure. Signals wait for it."""

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes after the block; an error in it is logged first, and nothing hides it."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        self.close()

    def close(self) -> None:
        """Ends what setup began: terminal, then each step of setup backwards. Once."""
        if self.life is Life.CLOSED:
            return
        self.life = Life.CLOSED
        try:
            with self._on_close:
                self._finish()
        except Exception as error:
            error.__suppress_context__ = True
            self.logger.error("while closing: %r", error, exc_info=error)
            raise
        finally:
            close_log(self.logger)

    def _finish(self) -> None:
        try:
            self.terminal()
        except BaseException as error:  # the record of this start must not say that all is well
            self._loop.failure = self._loop.failure or error
            raise

    def _fail(self, error: BaseException) -> None:
        """Every failure goes through here: it is logged, on_exception and on_train_end are fired,
        the other ranks are told, everything is closed, and nothing hides it.
        """
        loop, was_training = self._loop, self.life is Life.TRAINING
        if error is not loop.failure:
            loop.failure = error
            self._say_failure(error)
        loop.is_over = True
        loop.step = Step.OUTSIDE
        if was_training:
            self.life = Life.ENDED
            for event, *args in (("on_exception", error), ("on_train_end",)):
                for name, handler in self._subscribers.each(event, *args):
                    self._quietly(name, handler)
        if self._other_ranks is not None:
            self._quietly("telling the other ranks", self._other_ranks.tell, error)
        self._quietly("close", self.close)
        self._quietly("close", ExperimentBase.close, self)  # if an override failed before super's
