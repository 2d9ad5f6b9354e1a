"""The loop: an iteration begins and ends, and at its end what is due is done.

    while loop.going_on():          # on_train_batch_begin
        train_batch()               # reads its batches with loop.read_batch
        loop.end_iteration()        # on_train_batch_end; a line, a checkpoint, then the to-do list

What follows an update is done after its state was captured: in a checkpoint if one is due, else
before a validation in memory, as a copy that is written if the results are among the best, or if
the validation is left or fails. What is captured holds what follows as a to-do list: the validation
by iterations, or the last one; the end of the epoch; the validation by epochs. So a start that
continues it does what the one before has left. A run that stops saves once more, when the list is
done. What is due when: due.py; why all ranks stop: stop.py; what a failure does: Run.fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from expbase.base import rng
from expbase.base.checkpoint_part import Part
from expbase.base.errors import AttributeMistake, RuntimeMistake, TypeMistake
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.checkpoint.layout import NonFiniteError
from expbase.data.position import DataPosition
from expbase.engine.class_checks import need_super
from expbase.engine.due import (
    END_EPOCH,
    ON_TRAIN_END,
    VALIDATE,
    VALIDATE_IF_LAST,
    Due,
    due_at,
    is_last,
    is_quiet,
    is_wanted,
)
from expbase.engine.leave_validation import ValidationLeft
from expbase.engine.report import Report
from expbase.engine.results import Results
from expbase.engine.run_states import Life, Step
from expbase.engine.start import Start
from expbase.engine.stop import StopReason, StopRequests
from expbase.engine.subscribers import Subscribers
from expbase.engine.update import Update
from expbase.ranks import collectives
from expbase.record.speed import Stopwatch
from expbase.state.sampled_elements import Samples
from expbase.state.user_state import UserState

LOOP = "`while self.going_on(): self.train_batch(); self.end_iteration()`"
_SAVED = ("iteration", "epoch", "epochs_before", "todo")


class Loop(Part):
    """The loop of one start.

    `is_last`: the config asks for no iteration after the present one, which may be under way.
    `is_over`: no iteration begins any more in this start, whatever the reason.
    `has_finished`: it is over, by the config or by stop(), and nothing is left to do.

    Args:
        experiment: Its methods are called, as a user may have overridden them.
        life: Returns where the run is in its life.
        ensure_restored: Called before the first iteration: restores, if run() has not yet.
    """

    iteration = 0  # updates done, with the one under way
    epoch = 0  # epochs begun
    step = Step.OUTSIDE
    is_over = False  # there is no iteration after this one
    stopped_by = StopReason.NONE  # why all ranks end before the end
    failure: BaseException | None = None  # what ended the run, if anything did
    saved_at = -1  # the iteration of the last checkpoint
    _save_requested = False  # save() was called within the iteration
    epochs_before = 0  # epochs that were used up when the last iteration began
    _training_began_at = -1  # the iteration at which this start begins to train
    _loop_began_at = -1  # the one at which going_on was called first; a user's loop may never

    def __init__(
        self,
        experiment: Any,
        start: Start,
        *,
        life: Callable[[], Life],
        ensure_restored: Callable[[], None],
        events: Subscribers,
        state: UserState,
        stopwatch: Stopwatch,
        data: DataPosition,
        update: Update,
        results: Results,
        report: Report,
        checkpointer: Checkpointer,
        stop: StopRequests,
    ) -> None:
        self.todo: list[str] = []  # what is to be done before the next iteration
        self._experiment = experiment
        self._start = start
        self._training = start.training
        self._life = life
        self._ensure_restored = ensure_restored
        self._events = events
        self._state = state
        self._stopwatch = stopwatch
        self._data = data
        self._update = update
        self.results = results
        self._report = report
        self._checkpointer = checkpointer
        self._stop = stop

    # --- where it is ---------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether the config asks for no iteration after the present one."""
        return is_last(self._training, self.iteration, self.epochs_ended)

    @property
    def epochs_ended(self) -> int:
        """Epochs that are used up: as many as began, but for the one under way."""
        return self.epoch - (self._data.epoch > 0 and not self._data.needs_epoch)

    @property
    def shown_epoch(self) -> int:
        """The epoch under way; after an update that has ended one, how many have ended."""
        ended = self.epochs_ended
        return ended if ended > self.epochs_before else self.epoch

    @property
    def has_finished(self) -> bool:
        """Whether training came to its end, by the config or by stop(); not interrupted."""
        is_done = self.is_over and not self.todo and self.failure is None
        return is_done and (self.is_last or self.stopped_by is StopReason.CALL)

    @property
    def is_ending(self) -> bool:
        """Whether no iteration comes after the present one, by the config or by a stop."""
        return self.is_last or self.is_over or bool(self.stopped_by)

    @property
    def has_logged(self) -> bool:
        """Whether a number of training was logged, or drawn, in this start."""
        return self._report.metrics.is_used

    @property
    def batches_read(self) -> int:
        """Batches of training that this rank has read in this start."""
        return self._stopwatch.batches

    @property
    def end_reason(self) -> str:
        """Why training has ended; "" before. See ExperimentBase."""
        reason = self.stopped_by
        if isinstance(self.failure, KeyboardInterrupt):  # the second Ctrl-C
            reason = StopReason.SIGINT
        elif self.failure is not None:
            return f"failed: {self.failure!r}"
        if not reason:
            return "finished" if self.is_over else ""
        alike = {"signal": reason.name, "time limit": str(reason)}  # on all ranks
        return f"{reason.kind}: {alike.get(reason.kind) or self.stop_text}"

    @property
    def stop_text(self) -> str:
        """Why training was stopped, in words for the log."""
        return self._stop.words(self.stopped_by)

    def place_at(self, iteration: int, epoch: int) -> None:
        """Sets the counters to those of a checkpoint that is only looked at."""
        self.iteration = iteration
        self.epoch = epoch

    def count_from(self, name: str, number: int) -> None:
        """Sets the iteration or the epoch; an AttributeError if the loop counts."""
        if self.step is not Step.OUTSIDE:
            raise AttributeMistake(
                f"self.{name}: {number!r} given; expected it to be set in startup() alone, since "
                "the template counts. Choose another name for yours."
            )
        setattr(self, name, number)

    def need(self, step: Step, method: str) -> None:
        """Raises a RuntimeError unless the loop is where a method may be called."""
        if self.step is not step:
            raise RuntimeMistake(f"{method}: called {self.step.value}; expected {LOOP} in train().")

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters that a checkpoint holds; the others belong to one start."""
        return {name: getattr(self, name) for name in _SAVED}

    def problems(self, state: Mapping[str, Any]) -> list[str]:
        """Returns none, but raises what a damaged file deserves, before anything is changed."""
        for name in _SAVED:
            if type(state[name]) is not type(getattr(self, name)):
                raise TypeMistake(f"loop.{name}: {state[name]!r:.80}")
        return []

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        for name in _SAVED:
            setattr(self, name, state[name])
        return []

    # --- one iteration -------------------------------------------------------------------

    def going_on(self) -> bool:
        """Begins the next iteration, and an epoch if there is none; false if it is over.

        The last thing is on_train_batch_begin.
        """
        if self.step is Step.OUTSIDE and not self.is_over:
            self.begin()
        if self.is_over:
            return False
        self.need(Step.BETWEEN, "going_on")
        self.epochs_before = self.epochs_ended
        if self._data.needs_epoch:
            self._open_epoch()
        self.iteration += 1
        self._seed(rng.TRAIN, self.iteration)
        self.step = Step.WITHIN
        self._events.fire("on_train_batch_begin")
        return True

    def end_iteration(self) -> None:
        """Ends the iteration under way: on_train_batch_end, then whatever is due."""
        self.need(Step.WITHIN, "end_iteration")
        self.step = Step.ENDING
        self._stop.note_update()
        self._events.fire("on_train_batch_end")
        if self.iteration == self._loop_began_at + 1:
            self._check_first_update()
        if self._has_nothing_to_do():  # as after most iterations
            self._report.move(self.iteration)
            self._checkpointer.settle(wait=False)
            self.step = Step.BETWEEN
            return
        due = self._due()
        if due.log:
            self._check_finite()  # waits for the device: that is training's time
            rates = self._state.learning_rates()
            self._report.line(self.iteration, self.epoch, rates, self._events.fire)
        self.todo = self._without_validations(due.follows)
        if self.results.is_recorded(self.iteration):  # by an evaluate() in on_train_batch_end
            self._note_validation()
        if due.checkpoint or self._save_requested:  # before what follows, which may fail
            self._save_now()
        self._report.move(self.iteration)
        self._do_what_follows()

    def log(self, scalars: Mapping[str, Any], *, only_finite: bool = False) -> None:
        """Notes numbers of training for the next line; a rank that repeats rank 0's adds none."""
        meter = self._report.metrics.meter
        if self._update.repeats_rank_zero:
            meter.note_used()
        else:
            meter.add(self.iteration, scalars, only_finite=only_finite)

    def begin(self) -> None:
        """Prepares the first iteration of this start, and does what the one before has left."""
        self._ensure_restored()
        self._report.differences(*self._state.begin())
        self._report.leave_log_to_zero()
        self._stop.start(self.iteration)
        self._stopwatch.start(self.iteration)
        if self._training_began_at < 0:  # without run()
            self.note_begin()
        self._loop_began_at = self.iteration
        self._events.fire("begin")
        self.todo = self._without_validations(self.todo)  # the code may have no valid() any more
        if self.todo:
            self._do_what_follows()
        else:
            self.stopped_by = self._stop.agreed(self.iteration)
            self._decide_if_over()

    def _has_nothing_to_do(self) -> bool:
        """Whether nothing is due, and nobody has asked for anything."""
        epochs_ended = self.epochs_ended
        return (
            not self._data.needs_epoch
            and epochs_ended == self.epochs_before
            and is_quiet(self._training, self.iteration, epochs_ended)
            and self._stop.is_quiet(self.iteration)
            and not self._save_requested
            and not self.results.is_recorded(self.iteration)
        )

    def _due(self) -> Due:
        epochs = self.epochs_before, self.epochs_ended
        is_end = self._data.needs_epoch
        return due_at(self._training, self.iteration, *epochs, is_epoch_end=is_end)

    def _check_finite(self) -> None:
        """Warns or raises, before a line or a checkpoint, if a logged scalar is not finite."""
        bad = self._report.nonfinite()
        policy = self._training.nonfinite if bad else "ignore"
        if policy == "warn":
            self._start.warn(f"[{self.iteration}] not finite: {bad}")
        elif policy == "error":
            self._checkpointer.close()  # one may still be under way
            raise NonFiniteError(bad, self._checkpointer.newest_name)

    def _do_what_follows(self) -> None:
        """Does what is still to be done of an iteration, by the list that its checkpoint holds."""
        self.step = Step.ENDING
        self._keep_copy()
        try:
            self._do_all()
        except BaseException:
            # On rank 0 alone, whichever ranks have failed: nobody is waited for.
            self._report.quietly("saving", self._checkpointer.write_now)
            raise
        self._checkpointer.let_go()
        self.stopped_by = self._stop.agreed(self.iteration, ask_now=bool(self.todo))
        self._save_at_end()
        self._checkpointer.settle(wait=False)
        self._decide_if_over()

    def _do_all(self) -> None:
        try:
            while self.todo:
                self._do(self.todo[0])
                del self.todo[0]
            self._note_validation()
        except ValidationLeft:
            self._write_what_was_trained()

    def _without_validations(self, todo: list[str]) -> list[str]:
        """Returns the list as it is, unless this iteration has its validation, or there is none."""
        if not todo or (self._start.has_valid and not self.results.is_recorded(self.iteration)):
            return todo
        return [what for what in todo if what == END_EPOCH]

    def _do(self, what: str) -> None:
        if what == END_EPOCH:
            self._end_epoch()
        elif what == VALIDATE or (what == VALIDATE_IF_LAST and self.is_last):
            self._validate()

    def _decide_if_over(self) -> None:
        if self.is_last and self.stopped_by is StopReason.CALL:
            self.stopped_by = StopReason.NONE  # it ended nothing: the next start says "finished"
        self.is_over = self.is_last or bool(self.stopped_by)
        self.step = Step.OUTSIDE if self.is_over else Step.BETWEEN

    def _check_first_update(self) -> None:
        """Raises if no start could load what the first update has left, or if it is half of one."""
        self._state.reach.walk()
        self._checkpointer.refuse_changes(self._state.saved())
        self._update.check_first()

    def _seed(self, purpose: int, *numbers: int) -> None:
        """Seeds what is drawn outside of micro-batches: on each rank, or on all alike."""
        # As an item: an attribute of a config takes ten times as long.
        rng.seed_for(self._training["seed"], purpose, *numbers, self._update.seed_rank)

    # --- data ----------------------------------------------------------------------------

    def read_batch(self) -> Any:
        """Returns the next training batch of this rank."""
        data = self._data
        began = self._stopwatch.clock()
        if data.skips.to_come:
            self._read_past()
        self.turn_epoch()
        batch = data.read(self.iteration)
        part = data.part_of_update(self._update.batches, self._update.batch_rank)
        rng.seed_for(self._training["seed"], rng.TRAIN, self.iteration, *part)
        self._stopwatch.note_batch(began, data.samples_in(batch))
        return batch

    def _read_past(self) -> None:
        """Reads past the batches that are left out before those of the iteration under way."""
        data = self._data
        slots = data.skips.before(self.iteration)
        for _ in range(len(slots) * self._update.batches):
            self.turn_epoch()
            data.read_for_none()
        if slots:
            data.skips.note(slots)
            self._start.logger.info(
                f"[{self.iteration}] training.skip_updates: left out the batches of {slots}"
            )

    def turn_epoch(self) -> None:
        """Ends an epoch that is used up, and begins the next one, as read_batch does first."""
        self.results.need_training()
        if self._data.needs_epoch:
            if self._data.epoch:
                self._end_epoch()
            self._open_epoch()

    def new_epoch(self) -> None:
        """Begins an epoch; right after a resume in the middle of one, it goes on with that one."""
        data = self._data
        if data.resumed_within_epoch or self.is_over:
            return
        if data.epoch and not data.needs_epoch:  # it is left in its middle
            self._end_epoch()
        self.epoch += 1
        data.begin(self.epoch)
        self._seed(rng.EPOCH, self.epoch)
        self._events.fire("on_train_epoch_begin")  # which may set what the order is made of
        data.check_same_loader(self._experiment.train_loader)
        data.open_begun()

    def _open_epoch(self) -> None:
        before = self.epoch
        self._experiment.new_epoch()
        has_none = self._data.needs_epoch and self._data.adapter.loader is not None
        is_lacking = has_none and self.epoch == before and not self.is_over
        need_super("new_epoch", is_done=not is_lacking)

    def _end_epoch(self) -> None:
        rng.seed_for(self._training.seed, rng.EPOCH, self.epoch, self._update.seed_rank, 1)
        self._events.fire("on_train_epoch_end")

    # --- validation ----------------------------------------------------------------------

    def _keep_copy(self) -> None:
        """Copies the state before a validation, unless a checkpoint holds it."""
        # What an epoch's end calls may validate, and be the best.
        at_end = END_EPOCH in self.todo and "on_train_epoch_end" in self._events.subscribed
        is_due = VALIDATE in self.todo or (VALIDATE_IF_LAST in self.todo and self.is_last)
        is_due = is_due or (at_end and bool(self._training.monitor))
        if is_due and self._lacks_checkpoint:
            with self._capturing() as sizes:
                self._checkpointer.capture(self.iteration, sizes)

    @property
    def _lacks_checkpoint(self) -> bool:
        """Whether this iteration has none, and saving is not switched off."""
        return self.saved_at < self.iteration and is_wanted(self._training, "save")

    def _validate(self) -> None:
        """Makes the validation of this iteration, unless there was one; a stop may leave it."""
        if self.results.is_recorded(self.iteration):
            return
        if self._save_requested:  # before what may fail, as what is due
            self._save_now()
        self.results.validate(self.iteration)

    def _write_what_was_trained(self) -> None:
        """Writes the copy from before a validation that all ranks have left."""
        text = f"[{self.iteration}] left the validation; the next start makes it"
        self._start.logger.info(text)
        if self._lacks_checkpoint:
            collectives.on_rank_zero(self._checkpointer.write, "saving")
            self._note_saved()

    def _note_validation(self) -> None:
        """Notes the results of this iteration's validation, if there was one; once."""
        if self.results.note(self.iteration, self.shown_epoch):
            self._note_saved()

    def evaluate(self, loader: Any, name: str) -> dict[str, float]:
        """Returns the results of a validation, and records them; see ExperimentBase."""
        now = self.iteration, self.shown_epoch
        return self.results.evaluate(loader, name, *now, is_point=self._is_at_a_point)

    @property
    def _is_at_a_point(self) -> bool:
        """Whether the weights are those after an update, or those that a new run begins with.

        Within an iteration its update is not done. With what a continued run goes on from its
        start before was done.
        """
        is_closed = self._life() is Life.CLOSED  # another process may have the run
        if self.step is Step.WITHIN or self.failure is not None or is_closed:
            return False
        is_at_end = self.is_over and self.results.under_way < 0 and self._training_began_at >= 0
        is_at_begin = self.iteration == self._training_began_at and self.saved_at < 0
        return self.step is Step.ENDING or is_at_end or is_at_begin

    # --- checkpoints ---------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint; within an iteration, at its end."""
        if self.step in (Step.WITHIN, Step.ENDING):
            self._save_requested = True
            return
        if self.saved_at == self.iteration or self._start.read_only:
            return
        if self.failure is not None:
            raise RuntimeMistake(
                f"save: iteration {self.iteration} failed, and the state is half its update; the "
                "run continues from the checkpoint before."
            )
        if self.results.under_way >= 0:
            self._start.warn(
                f"save: the validation of iteration {self.results.under_way} was left, and the "
                "weights in the model may not be the trained ones; they are not saved."
            )
            return
        needed = self.is_last or bool(self.stopped_by)  # there will be no later one
        checkpointer = self._checkpointer
        with self._capturing() as sizes:
            collectives.on_rank_zero(checkpointer.settle, "self.save()")  # the one before
            checkpointer.capture(self.iteration, sizes)
            checkpointer.write(needed=needed)
        self._note_saved()

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[dict[str, int]]:
        """Checks the state before the block copies it; gives the sizes of the logs, in bytes."""
        with self._stopwatch.exclude():
            self._check_finite()
            self._update.check_complete()
            yield self._report.metrics.sizes()
            self._events.fire("capture")
        self._report.leave_log_to_zero()

    def _note_saved(self) -> None:
        self.saved_at = self.iteration
        self._stop.note_saved()

    def _save_now(self) -> None:
        """Calls the user's save(), in a step in which save() writes and does not wait."""
        self._save_requested = False
        before = self.step
        self.step = Step.BETWEEN
        self._experiment.save()
        self.step = before
        if self.saved_at < 0 and self.results.under_way < 0 and not self._start.read_only:
            self._start.warn(f"[{self.iteration}] save: made no checkpoint; expected super's call.")

    def _save_at_end(self) -> None:
        """Saves at the very end of an iteration: the run stops, or it was asked for since.

        If this is the first save of the iteration, a run that continues it does not validate again:
        nothing is left on the list.
        """
        at_stop = bool(self.stopped_by) and is_wanted(self._training, "save")
        if self._save_requested or at_stop or self._stop.is_save_due:
            self._save_now()

    # --- the end -------------------------------------------------------------------------

    def end(self) -> None:
        """Notes that there is no further iteration."""
        self.is_over = True
        self.step = Step.OUTSIDE

    def leave_on_train_end(self) -> None:
        """Notes why all ranks have left a loop over data in on_train_end."""
        self.todo = [ON_TRAIN_END]
        self.stopped_by = self._stop.agreed(self.iteration, ask_now=True)
        text = f"[{self.iteration}] left on_train_end; the next start calls it again"
        self._start.logger.info(text)

    def end_with_nothing_left(self) -> None:
        """Ends a loop that has nothing left to do: the run that is given again has finished."""
        self.end()
        self.todo = []

    def note_failure(self, error: BaseException) -> None:
        """Notes what ended the run."""
        self.failure = error

    def note_checkpoint(self, *, is_own: bool) -> None:
        """Notes that the state is that of a checkpoint, of this run or of another one."""
        self.saved_at = self.iteration if is_own else -1

    def note_begin(self) -> None:
        """Notes from where training begins in this start."""
        self._training_began_at = self.iteration

    def end_training(self, before: Samples) -> None:
        """Ends the loop after train(), maybe the user's; if it returned early, that is a stop().

        Args:
            before: Of what a loop of the user's own trains.

        Raises:
            RuntimeError: It has counted no iteration, or has not ended one.
        """
        if self.step is Step.WITHIN:
            raise RuntimeMistake(
                f"train: returned within iteration {self.iteration}; expected self.end_iteration() "
                "after each self.train_batch()."
            )
        is_uncounted = self._loop_began_at < 0 and self.iteration == self._training_began_at
        if is_uncounted and before.have_changed():
            raise RuntimeMistake(
                f"train: made updates and counted no iteration, so nothing can be saved of them; "
                f"expected {LOOP}, or `self.iteration += 1` before each self.train_batch()."
            )
        if not self.is_over:
            self._stop.add(StopReason.CALL, self._stop.text or "train() returned")
            self._stop.agree_on_text()
            self.stopped_by = StopReason.CALL
            if is_wanted(self._training, "save"):
                self._save_now()
        self.end()
