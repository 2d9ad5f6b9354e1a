"""What the first updates of a start did: has a parameter changed, was a loss logged?

Early, nothing is certain: a learning rate may begin at 0, a GradScaler may skip, gradients may wait
for more batches, a replay buffer may be filled first. So there is one look after many updates or
after the last one, and an early one for whom none of this explains; at schedules also after an
epoch, by which many are stepped. Of a parameter a few elements are compared.

It looks after each of the first EARLY updates, and longer if no optimizer has stepped; then at the
lines of the log, so that an update costs what it costs without it.

    FirstUpdates(experiment, internals, warn)     # it listens from then on
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paddle.optimizer.lr import LRScheduler, ReduceOnPlateau

from expbase.base.gradients import gradient
from expbase.doctor.first_gradients import FirstGradients, StepTrace
from expbase.doctor.first_steps import FirstSteps
from expbase.doctor.loaders_by_hand import LoadersByHand
from expbase.engine.internals import Internals
from expbase.engine.loop import LOOP
from expbase.events import CALLED_BY, heard_by, own_classes, own_methods
from expbase.mixins_in_front import is_trial
from expbase.state.optimizers import innermost
from expbase.state.parts import StatefulObjects
from expbase.state.sampled_elements import Samples
from expbase.state.setup_checks import steps_by_itself, trained_in, updated_by

EARLY, LOOK_AFTER = 20, 1000  # updates
READS_NOTHING = (
    "train_batch did not call self.read_batch(): the data it takes is not in the order of the "
    "seed, is not continued after a stop, and ends no epoch."
)
NOTHING_TRAINED = (
    "no parameter has changed; expected self.backward(loss) and self.step_optimizers() in "
    "train_batch, with a learning rate above 0."
)
NO_GRADIENTS = (
    "no gradient has come, and no parameter has changed; expected self.backward(loss) and "
    "self.step_optimizers() in train_batch, unless something has to be filled first."
)
NOTHING_LOGGED = (
    "nothing was logged, so a loss that is not finite is not noticed; expected "
    "self.log(loss=loss) in train_batch."
)
# What an experiment writes that steps a schedule by epochs, or by validations.
_RARE = {"on_train_epoch_begin", "on_train_epoch_end", "on_evaluate_begin", "on_evaluate_end"}
_RARE |= {"new_epoch", "train", "evaluate"}


def unlike_length(experiment: Any, internals: Internals) -> Iterator[str]:
    """Yields, at the end of an epoch, that it had another number of batches than its length."""
    length, read = experiment.batches_per_epoch, internals.batch_in_epoch
    is_whole = internals.epochs_ended == experiment.epoch  # and no batch of the next one was read
    if is_whole and length not in (None, read) and not experiment.config.training.skip_updates:
        yield (
            f"self.train_loader: its length is {length}, and an epoch had {read} batches; expected "
            "that __len__ counts batches, and that each epoch has as many. self.total_iterations "
            "and what is told of the end are wrong."
        )


class FirstUpdates:
    """Looks at the first updates of a start, and then leaves.

    Args:
        experiment: Its counters, config and train_loader are read, and what its class has written.
        internals: What can be read of its run.
        warn: Called with each line.
    """

    def __init__(
        self, experiment: Any, internals: Internals, warn: Callable[[str], object]
    ) -> None:
        self._experiment = experiment
        self._internals = internals
        self._warn = warn
        self._trained: TrainedParameters | None = None  # once training has begun
        self._gradients = FirstGradients(lambda: internals.divisor)
        self._by_hand = LoadersByHand(experiment)
        self._steps = FirstSteps(experiment, internals, self._gradients)
        self._began = 0  # the iteration at which training began
        self._loop_began = -1  # the one at which going_on was called first
        self._epochs_at_begin = self._epochs_before = 0  # epochs that were used up
        self._left_out: list[str] = []  # layers that were told to be trained by nobody
        self._has_looked = False  # whether the late look was taken
        self._told: set[str] = set()  # what was said of many updates
        listen = internals.listen
        self._looked_at = 0  # the number of updates at the last look
        self._leave_updates = listen("on_train_batch_end", self._look_at_update)
        self._leave = [
            listen("on_train_begin", self._note_begin),
            listen("begin", self._note_loop),
            listen("on_log", self._look_at_line),
            listen("on_train_end", self._end),
        ]
        if experiment.config.training.shares:
            self._leave.append(listen("micro_batches", self._gradients.note_put_aside))

    def _note_begin(self) -> None:
        """Notes what there is before the first update."""
        if self._trained is not None or self._internals.is_ending:
            return
        optimizers = self._internals.state.optimizers()
        self._trained = TrainedParameters(optimizers)
        self._gradients.watch(optimizers)
        self._by_hand.watch()
        self._steps.watch(optimizers)
        self._began = self._experiment.iteration
        self._epochs_at_begin = self._epochs_before = self._internals.epochs_ended

    def _note_loop(self) -> None:
        self._note_begin()  # in a loop without run()
        self._loop_began = self._experiment.iteration

    def _end(self) -> None:
        """Looks at a trial, and at a loop that has ended nothing; leaves."""
        experiment = self._experiment
        made = experiment.iteration - self._began
        if self._trained is not None and not experiment.end_reason.startswith("failed"):
            if self._loop_began < 0 and made:
                self._warn(
                    f"train: made {made} iterations without going_on() and end_iteration(): it "
                    "heard no signal and no stop(), wrote no line, called no on_train_batch_end, "
                    f"and saved nothing but by save(); expected {LOOP}."
                )
            if made and not self._has_looked:
                if is_trial():
                    self._say_in(made, self._seen_in_a_trial(self._trained))
                elif self._loop_began >= 0 and not self._internals.inspected:
                    self._look_back(self._trained)
        self._end_visit()

    def _end_visit(self) -> None:
        self._leave_updates()
        self._gradients.close()
        self._steps.close()
        while self._leave:
            self._leave.pop()()

    # --- after an update -------------------------------------------------------------------

    def _look_at_update(self) -> None:
        self._look()
        is_waiting = self._steps.is_waiting or self._gradients.is_watching
        if self._updates >= EARLY and not is_waiting:
            self._leave_updates()

    def _look_at_line(self, metrics: Mapping[str, float]) -> None:
        if self._updates > self._looked_at:  # else it was looked at as an update
            self._look()

    def _look(self) -> None:
        trained = self._trained
        if trained is None:
            return
        self._say(self._steps.look())
        self._say(self._gradients.look())
        self._say(self._by_hand.look(has_validated=self._internals.has_validated))
        self._look_back(trained)
        if self._updates >= LOOK_AFTER and not trained.schedules:
            self._end_visit()

    @property
    def _updates(self) -> int:
        """Those of this start that have ended, with the one that ends."""
        return int(self._experiment.iteration) - self._loop_began

    def _look_back(self, trained: TrainedParameters) -> None:
        """Says what is missing in the updates so far."""
        updates = self._looked_at = self._updates
        is_end = updates == self._experiment.iteration and self._internals.is_ending
        is_late = not self._has_looked and (updates >= LOOK_AFTER or is_end)
        is_early = updates == EARLY and not is_trial() and self._is_each_update_alike()
        self._has_looked |= is_late
        if is_late or updates == 1:
            self._say(self._trained_by_nobody())
        seen = [*self._seen_in_updates(trained, updates, is_late=is_late, is_early=is_early)]
        self._say_in(updates, (text for text in seen if self._is_news(text, updates)))
        self._told |= {*seen}
        self._epochs_before = self._internals.epochs_ended

    def _say(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._warn(f"[{self._experiment.iteration}] {text}")

    def _say_in(self, updates: int, texts: Iterable[str]) -> None:
        self._say(f"in {updates} updates {text}" for text in texts)

    def _is_each_update_alike(self) -> bool:
        """Whether nothing explains that something is missing in the first ones.

        Gradients have come, so no buffer is being filled; the learning rate is above 0; no code
        that an update runs asks for the iteration, or takes a remainder.
        """
        internals = self._internals
        is_training = self._gradients.have_come and any(internals.learning_rates().values())
        return is_training and not acts_now_and_then(type(self._experiment))

    def _is_news(self, text: str, updates: int) -> bool:
        """Whether this was not said yet; the missing step is said again after many updates."""
        return text not in self._told or (text == NOTHING_TRAINED and updates >= LOOK_AFTER)

    def _seen_in_updates(
        self, trained: TrainedParameters, updates: int, *, is_late: bool, is_early: bool
    ) -> Iterator[str]:
        """Yields what is missing, as far as so many updates show it."""
        internals = self._internals
        is_time = is_late or is_early
        if is_time:
            # What is logged is rank 0's, so it alone says that there is nothing.
            is_silent = not internals.has_logged and not self._experiment.rank
            missing = [*trained.look()]
            yield from missing
            if is_silent and self._experiment.config.training.log_interval:
                yield NOTHING_LOGGED
            waiting = {*internals.waiting} - self._steps.told
            for event in sorted(waiting if not missing else ()):  # a missing step explains them
                yield (
                    f"{event} never came, at which the experiment acts; expected "
                    f"self.{CALLED_BY[event]}() in train_batch, which calls it."
                )
        if not internals.batches_read and self._is_time_to_have_read(updates, is_late=is_time):
            yield READS_NOTHING
        is_next_epoch = self._epochs_before > self._epochs_at_begin
        if is_next_epoch or (is_late and not steps_by_epochs(type(self._experiment))):
            yield from trained.look_at_schedules(has_validated=internals.has_validated)

    def _seen_in_a_trial(self, trained: TrainedParameters) -> Iterator[str]:
        """Yields what is missing, as far as the updates of a trial show it."""
        internals = self._internals
        if self._experiment.train_loader is not None and not internals.batches_read:
            yield READS_NOTHING
        if not self._gradients.have_come and any(trained.look()):  # else the trial itself fails
            yield NO_GRADIENTS
        if not steps_by_epochs(type(self._experiment)):  # an epoch is too long for a trial
            yield from trained.look_at_schedules(has_validated=True)

    def _is_time_to_have_read(self, updates: int, *, is_late: bool) -> bool:
        """Whether an update should have read a batch by now.

        If only epochs end the run, one of them should be over; else it would train for ever.
        """
        length = self._internals.updates_per_epoch
        if length is None or self._experiment.config.training.max_iteration:
            return is_late and self._experiment.train_loader is not None
        return updates >= min(math.ceil(length), LOOK_AFTER)

    def _trained_by_nobody(self) -> Iterator[str]:
        """Yields, once, each layer that the loss has given gradients and no optimizer updates."""
        state = self._internals.state
        if any(map(steps_by_itself, state.reach.everything.values())):
            return  # of which nobody knows what it updates
        for name in left_out(state.found()):
            if name not in self._left_out:
                self._left_out.append(name)
                yield (
                    f"self.{name} has got gradients from the loss, and no optimizer updates it; "
                    "expected one that does, or stop_gradient = True of its parameters."
                )


class TrainedParameters:
    """Compares the parameters of optimizers with what they were at the beginning of a start."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self._before = Samples(optimizers)
        rates = {name: innermost(o)._learning_rate for name, o in optimizers.items()}
        # That nobody has stepped, as far as was looked: by their optimizers, and where each stands.
        schedules = {n: r for n, r in rates.items() if isinstance(r, LRScheduler)}
        self.schedules = {name: (rate, _place(rate)) for name, rate in schedules.items()}
        self._traces = {name: StepTrace(optimizers[name]) for name in self.schedules}

    def look(self) -> Iterator[str]:
        """Yields that nothing was trained: how it goes on after "in 1000 updates"."""
        if self._before.of and not self._before.have_changed():  # an optimizer of no base has none
            yield NOTHING_TRAINED

    def look_at_schedules(self, *, has_validated: bool) -> Iterator[str]:
        """Yields which schedule nobody has stepped, once: how it goes on after "in 20 updates"."""
        schedules, self.schedules = self.schedules, {}
        for name, (schedule, before) in schedules.items():
            kind = type(schedule).__name__
            if isinstance(schedule, ReduceOnPlateau) and not has_validated:
                self.schedules[name] = schedule, before
            elif _place(schedule) == before and self._traces[name].has_changed():
                yield (
                    f"nobody has stepped the {kind} of self.{name}: its learning rate is still "
                    f"{schedule.last_lr!s:.10}; expected its step() after each update, or at each "
                    "epoch's end."
                )


def steps_by_epochs(experiment: type) -> bool:
    """Returns whether something of a user's class may step a schedule more rarely than updates."""
    return bool(_RARE & heard_by(experiment).union(*map(vars, own_classes(experiment))))


def acts_now_and_then(experiment: type) -> bool:
    """Returns whether the updates of a user's class may differ: by their number, or a remainder."""
    of_updates = {
        name: method
        for name, method in own_methods(experiment).items()
        if not name.startswith(("on_", "setup", "valid"))
    }
    steps = [one for method in of_updates.values() for one in dis.get_instructions(method)]
    is_remainder = any(s.argrepr in ("%", "%=") or "MODULO" in s.opname for s in steps)
    return is_remainder or any(s.argval == "iteration" for s in steps)


def _place(schedule: Any) -> tuple[Any, Any]:
    return schedule.last_epoch, schedule.last_lr


def left_out(found: StatefulObjects) -> list[str]:
    """Returns the names of layers that have gradients from the loss and are in no optimizer.

    A copy of the model, such as averaged weights, has no gradients.
    """
    updated = updated_by(found)
    return [
        name
        for name, layer in found.layers.items()
        if not any(id(parameter) in updated for parameter in trained_in(layer))
        and any(map(_has_gradient, trained_in(layer)))
    ]


def _has_gradient(parameter: Any) -> bool:
    grad = gradient(parameter)
    return grad is not None and (grad.is_selected_rows() or bool((grad != 0).any()))
