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
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from expbase.base import rng
from expbase.base.errors import AttributeMistake, RuntimeMistake, TypeMistake
from expbase.base.json_values import checksum
from expbase.base.part import Part
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.checkpoint.layout import NonFiniteError
from expbase.data.position import DataPosition
from expbase.engine.due import (
    END_EPOCH,
    VALIDATE,
    VALIDATE_IF_LAST,
    Due,
    due_at,
    is_last,
    is_quiet,
    is_wanted,
)
from expbase.engine.evaluation import Evaluation, check_group, check_metric
from expbase.engine.first_updates import (
    LOOK_AFTER,
    READS_NOTHING,
    FirstUpdates,
    steps_by_epochs,
)
from expbase.engine.life import Life, Step
from expbase.engine.report import Report
from expbase.engine.start import Start, need_super
from expbase.engine.stop import StopReason, StopRequests, ValidationExit, ValidationLeft
from expbase.engine.subscribers import Subscribers
from expbase.engine.update import Update
from expbase.events import CALLED_BY
from expbase.ranks import collectives
from expbase.record import code_values
from expbase.record.meter import means_over
from expbase.record.speed import Stopwatch
from expbase.state.attributes import UserState
from expbase.state.checks import left_out, steps_by_itself

_LOOP = "`while self.going_on(): self.train_batch(); self.end_iteration()`"
_SAVED = ("iteration", "epoch", "epochs_before", "todo")


class Loop(Part):
    """The loop of one start.

    Args:
        experiment: Its methods are called, as a user may have overridden them.
        ensure_restored: Called before the first iteration: restores, if run() has not yet.
        note: Writes a line of the ledger.
        check_directory: Raises if the run has lost its directory.
    """

    iteration = 0  # updates done, with the one under way
    epoch = 0  # epochs begun
    step = Step.OUTSIDE
    is_over = False  # there is no iteration after this one
    stopped_by = StopReason.NONE  # why all ranks end before the end
    failure: BaseException | None = None  # what ended the run, if anything did
    saved_at = -1  # the iteration of the last checkpoint
    validating_at = -1  # the iteration of a validation that has begun, and not ended
    _save_requested = False  # save() was called within the iteration
    epochs_before = 0  # epochs that were used up when the last iteration began
    _epochs_at_begin = 0  # epochs that were used up when training began in this start
    _began = -1  # the iteration at which training began in this start
    _noted_at = -1  # the iteration of the last validation whose results were noted
    _loop_began = -1  # the one at which going_on was called first

    def __init__(
        self,
        experiment: Any,
        start: Start,
        *,
        ensure_restored: Callable[[], None],
        note: Callable[..., None],
        check_directory: Callable[[], None],
        events: Subscribers,
        state: UserState,
        stopwatch: Stopwatch,
        data: DataPosition,
        update: Update,
        evaluation: Evaluation,
        report: Report,
        checkpointer: Checkpointer,
        stop: StopRequests,
    ) -> None:
        self.todo: list[str] = []  # what is to be done before the next iteration
        self._results: dict[str, float] = {}  # of the last validation
        # The last iteration, by the word, "valid" or "test", and the checkpoint of the weights.
        self._recorded_at: dict[tuple[str, str], int] = {}
        self._first_updates = FirstUpdates({})
        self._left_out: list[str] = []  # layers that were told to be trained by nobody
        self._experiment = experiment
        self._start = start
        self._training = start.training
        self._ensure_restored = ensure_restored
        self._note = note
        self._check_directory = check_directory
        self._events = events
        self._state = state
        self._stopwatch = stopwatch
        self._data = data
        self._update = update
        self._evaluation = evaluation
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
            raise RuntimeMistake(
                f"{method}: called {self.step.value}; expected {_LOOP} in train()."
            )

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
        self._look_at_first_updates(self.iteration - self._loop_began)
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
        if self._is_recorded("valid"):  # by an evaluate() in on_train_batch_end
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
        if self._start.writes and not self._start.rank:
            code_values.write(self._start.output_dir, self._state.code())
        self._report.leave_log_to_zero()
        self._stop.start(self.iteration)
        self._stopwatch.start(self.iteration)
        if self._began < 0:  # without run()
            self.note_begin()
            self.note_parameters()
        self._loop_began = self.iteration
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
            and not self._is_recorded("valid")
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
        if not todo or (self._start.has_valid and not self._is_recorded("valid")):
            return todo
        return [what for what in todo if what == END_EPOCH]

    def _do(self, what: str) -> None:
        if what == END_EPOCH:
            self._end_epoch()
        elif what == VALIDATE or (what == VALIDATE_IF_LAST and self.is_last):
            self._validate()

    def _decide_if_over(self) -> None:
        self.is_over = self.is_last or bool(self.stopped_by)
        self.step = Step.OUTSIDE if self.is_over else Step.BETWEEN

    def _look_at_first_updates(self, updates: int) -> None:
        if updates > LOOK_AFTER and not self._first_updates.schedules:
            return  # as in most of a run
        if updates == 1:
            self._state.reach.walk()
            self._checkpointer.refuse_changes(self._state.saved())
            self._update.check_first()
        is_whole_run = updates == self.iteration and self.is_last
        is_late = updates == LOOK_AFTER or (is_whole_run and updates < LOOK_AFTER)
        for text in self._update.first_gradients.look():
            self._start.warn(f"[{self.iteration}] {text}")
        for text in self._trained_by_nobody() if is_late or updates == 1 else ():
            self._start.warn(f"[{self.iteration}] {text}")
        for text in self._seen_in_updates(updates, is_late=is_late):
            self._start.warn(f"[{self.iteration}] in {updates} updates {text}")

    def _seen_in_updates(self, updates: int, *, is_late: bool) -> Iterator[str]:
        """Yields what is missing, as far as so many updates show it."""
        first = self._first_updates
        if is_late:
            # What is logged is rank 0's, so it alone says that there is nothing.
            is_silent = not self._report.metrics.is_used and not self._start.rank
            has_logged = not (is_silent and self._training.log_interval)
            yield from first.look(has_logged=has_logged)
            for event in sorted(self._events.waiting):
                yield (
                    f"{event} never came, at which the experiment acts; expected "
                    f"self.{CALLED_BY[event]}() in train_batch, which calls it."
                )
        if self._is_time_to_have_read(updates, is_late=is_late) and not self._stopwatch.batches:
            yield READS_NOTHING
        is_next_epoch = self.epochs_before > self._epochs_at_begin
        if is_next_epoch or (is_late and not steps_by_epochs(type(self._experiment))):
            yield from first.look_at_schedules(has_validated=("valid", "") in self._recorded_at)

    def _is_time_to_have_read(self, updates: int, *, is_late: bool) -> bool:
        """Whether an update should have read a batch by now.

        If only epochs end the run, one of them should be over; else it would train for ever.
        """
        length = self._data.updates_per_epoch
        if length is None or self._training["max_iteration"]:
            return is_late and self._experiment.train_loader is not None
        return updates == min(math.ceil(length), LOOK_AFTER)

    def _trained_by_nobody(self) -> Iterator[str]:
        """Yields, once, each layer that the loss has given gradients and no optimizer updates."""
        if any(map(steps_by_itself, self._state.reach.everything.values())):
            return  # of which nobody knows what it updates
        for name in left_out(self._state.found()):
            if name not in self._left_out:
                self._left_out.append(name)
                yield (
                    f"self.{name} has got gradients from the loss, and no optimizer updates it; "
                    "expected one that does, or stop_gradient = True of its parameters."
                )

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
        if not self._stopwatch.batches:
            self._note("data", iteration=self.iteration, first_batch=checksum(batch))
        part = data.part_of_update(self._update.batches, self._update.batch_rank)
        rng.seed_for(self._training["seed"], rng.TRAIN, self.iteration, *part)
        self._stopwatch.note_batch(began)
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
        self._evaluation.need_training()
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
        data.open(self.epoch)
        self._seed(rng.EPOCH, self.epoch)
        self._events.fire("on_train_epoch_begin")
        data.check_same_loader(self._experiment.train_loader)

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
        if self._is_recorded("valid"):
            return
        if self._save_requested:  # before what may fail, as what is due
            self._save_now()
        self.validating_at = self.iteration
        # An evaluate() of the user's may not call super's, so the phase begins here.
        with (
            self._evaluation.begin("valid", self.iteration),
            self._evaluation.may_be_left_by(ValidationExit(self._stop)),
        ):
            self._results = dict(self._experiment.evaluate() or {})
        self.validating_at = -1
        self._recorded_at["valid", ""] = self.iteration

    def _write_what_was_trained(self) -> None:
        """Writes the copy from before a validation that all ranks have left."""
        text = f"[{self.iteration}] left the validation; the next start makes it"
        self._start.logger.info(text)
        if self._lacks_checkpoint:
            collectives.on_rank_zero(self._checkpointer.write, "saving")
            self._note_saved()

    def _note_validation(self) -> None:
        """Notes the results of this iteration's validation, if there was one; once."""
        if self._is_recorded("valid") and self._noted_at < self.iteration:
            self._noted_at = self.iteration
            check_metric("training.monitor", self._training.monitor, self._results)
            now = self.iteration, self.shown_epoch
            if self._checkpointer.note_validation(*now, self._results):
                self._note_saved()

    def evaluate(self, loader: Any, name: str) -> dict[str, float]:
        """Returns the results of a validation, and records them; see ExperimentBase."""
        experiment = self._experiment
        evaluation = self._evaluation
        if not self._start.has_valid:
            raise TypeMistake(
                f"evaluate: calls valid, and {type(experiment).__name__} has none; expected "
                "`def valid(self):` with `for batch in self.valid_batches(): self.log(…)`."
            )
        name = self._name_of(loader, name)
        with evaluation.begin("valid", self.iteration, loader):
            results = evaluation.validate(
                experiment.valid, lambda: int(experiment.visualizer.num_scalars), self.iteration
            )
            self._events.fire("on_evaluate_end", results)
            if "on_evaluate_end" in self._events.subscribed:
                results |= evaluation.logged_since()
        inspected = self._checkpointer.inspected
        # Of weights that were loaded the curve of those that are trained has no point.
        is_point = self._is_at_a_point and not (name == "valid" and inspected)
        if name and is_point and not self._is_recorded(name, inspected):
            self._recorded_at[name, inspected] = self.iteration
            self._results = results if name == "valid" else self._results
            now = self.iteration, self.shown_epoch
            self._report.evaluation(name, *now, results, checkpoint=inspected)
        else:
            # Which data: self.test_loader that was never set is None, and means the validation's.
            has_data = loader is not None or experiment.valid_loader is not None
            data = self._data_of(loader) if has_data else ""
            what = ["evaluated", inspected, data and f"on self.{data}_loader"]
            self._report.means(self.iteration, f"{' '.join(filter(None, what))}: ", results)
        return results

    def _is_recorded(self, name: str, inspected: str = "") -> bool:
        return self._recorded_at.get((name, inspected), -1) == self.iteration

    def _name_of(self, loader: Any, name: str) -> str:
        """Returns the word under which results are recorded; empty: nobody gave them one."""
        if name:
            check_group(name)
            return name
        return self._data_of(loader)

    def _data_of(self, loader: Any) -> str:
        """Returns which of the experiment's data a loader has, a word; empty: none of it."""
        if loader is None:
            return "valid"
        if loader is self._experiment.test_loader:
            return "test"
        return "valid" if loader is self._experiment.valid_loader else ""

    @property
    def _is_at_a_point(self) -> bool:
        """Whether the weights are those after an update, or those that a new run begins with.

        Within an iteration its update is not done. With what a continued run goes on from its
        start before was done.
        """
        is_closed = (
            self._experiment.internals.life is Life.CLOSED
        )  # another process may have the run
        if self.step is Step.WITHIN or self.failure is not None or is_closed:
            return False
        is_at_end = self.is_over and self.validating_at < 0 and self._began >= 0
        is_at_begin = self.iteration == self._began and self.saved_at < 0
        return self.step is Step.ENDING or is_at_end or is_at_begin

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Makes the block a phase "predict"; what is logged in it goes into the text log."""
        with self._evaluation.begin("predict", self.iteration):
            yield
            self._report.means(self.iteration, "", means_over([self._evaluation.logged.take()]))

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
        if self.validating_at >= 0:
            self._start.warn(
                f"save: the validation of iteration {self.validating_at} was left, and what stands "
                "in the model may not be what was trained; nothing is saved of it."
            )
            return
        self._check_directory()
        needed = self.is_last or bool(self.stopped_by)  # there will be no later one
        checkpointer = self._checkpointer
        with self._capturing() as sizes:
            collectives.on_rank_zero(checkpointer.settle, "saving")  # the one before
            checkpointer.capture(self.iteration, sizes)
            checkpointer.write(needed=needed)
        self._note_saved()

    def before_writing(self, path: object) -> None:
        """Raises if the run has lost its directory; warns if the weights that are about to be
        written may not be what was trained: valid() may have put it aside.
        """
        self._check_directory()
        if self.validating_at >= 0 and self.is_over:
            self._start.warn(
                f"{path}: written after the validation of iteration {self.validating_at} was left, "
                "with the weights that it had then: averages, if it had swapped them in. What was "
                "trained is in the checkpoint."
            )

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[dict[str, int]]:
        """Checks the state before the block copies it; gives the sizes of the logs, in bytes."""
        with self._stopwatch.exclude():
            self._check_finite()
            self._update.check_complete()
            yield self._report.metrics.sizes()
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
        if self.saved_at < 0 and self.validating_at < 0 and not self._start.read_only:
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
        self._update.first_gradients.close()

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
        self._began = self.iteration

    def note_parameters(self) -> None:
        """Notes what there is before the first update of this start, to see what that changes."""
        optimizers = self._state.optimizers()
        self._first_updates = FirstUpdates(optimizers)
        self._update.first_gradients.watch(optimizers)
        self._epochs_at_begin = self.epochs_ended

    def end_training(self) -> None:
        """Ends the loop after train(), maybe the user's; if it returned early, that is a stop().

        Raises:
            RuntimeError: It has counted no iteration, or has not ended one.
        """
        if self.step is Step.WITHIN:
            raise RuntimeMistake(
                f"train: returned within iteration {self.iteration}; expected self.end_iteration() "
                "after each self.train_batch()."
            )
        if self._loop_began < 0:
            self._check_own_loop(self.iteration - self._began)
        if not self.is_over:
            self._stop.add(StopReason.CALL, self._stop.text or "train() returned")
            self._stop.agree_on_text()
            self.stopped_by = StopReason.CALL
            if is_wanted(self._training, "save"):
                self._save_now()
        self.end()

    def _check_own_loop(self, made: int) -> None:
        """Warns of a loop without going_on and end_iteration; an error if it does not count."""
        if made:
            self._start.warn(
                f"train: made {made} iterations without going_on() and end_iteration(): it heard "
                "no signal and no stop(), wrote no line, called no on_train_batch_end, and saved "
                f"nothing but by save(); expected {_LOOP}."
            )
        elif self._first_updates.has_changed():
            raise RuntimeMistake(
                f"train: made updates and counted no iteration, so nothing can be saved of them; "
                f"expected {_LOOP}, or `self.iteration += 1` before each self.train_batch()."
            )
