"""The door to the parts of a run, for authors of mixins and tools: `self.internals`.

A training script needs none of it, but for a loop without run() (closing) and for what is drawn in
eval mode outside of valid (evaluating). Here a mixin that evaluates with other weights:

    class Averaged(ExperimentBase):
        def check_setup(self):
            self.averages = WeightAverages(self.unwrap(self.model))
            self.internals.surround_phases(self.averages.applied)
            super().check_setup()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from expbase.checkpoint.checkpointer import Checkpointer
from expbase.data.position import DataPosition
from expbase.engine.evaluation import Evaluation
from expbase.engine.loop import Loop
from expbase.engine.run_states import Life
from expbase.engine.start import Start
from expbase.engine.subscribers import Subscribers
from expbase.engine.update import StepParts, Update
from expbase.record.sources import Code
from expbase.state.parts import StatefulObjects
from expbase.state.user_state import UserState


class Internals:
    """What authors of mixins and tools read and call; `self.internals` of an experiment.

    Args:
        life: Returns how far the run is.
        closing: Makes the context that closes the run after a block.
    """

    def __init__(
        self,
        start: Start,
        *,
        life: Callable[[], Life],
        closing: Callable[[], contextlib.AbstractContextManager[None]],
        events: Subscribers,
        state: UserState,
        data: DataPosition,
        update: Update,
        evaluation: Evaluation,
        loop: Loop,
        checkpointer: Checkpointer,
    ) -> None:
        self._start = start
        self._life = life
        self._closing = closing
        self._events = events
        self._state = state
        self._data = data
        self._update = update
        self._evaluation = evaluation
        self._loop = loop
        self._checkpointer = checkpointer

    # --- how far the run is ---------------------------------------------------------------

    @property
    def life(self) -> Life:
        """How far the run is: NEW, IN_SETUP, READY, RESTORED, TRAINING, ENDED or CLOSED."""
        return self._life()

    @property
    def phase(self) -> str:
        """The phase under way: "train", "valid" or "predict"."""
        return self._evaluation.phase

    @property
    def read_only(self) -> bool:
        """Whether this start only looks at a run (--evaluate, --export) and writes nothing."""
        return self._start.read_only

    @property
    def advises(self) -> bool:
        """Whether what looks and says is wanted: not with --no_advice."""
        return self._start.options.advice

    @property
    def is_ending(self) -> bool:
        """Whether no iteration comes after the present one, by the config or by a stop."""
        return self._loop.is_ending

    @property
    def has_logged(self) -> bool:
        """Whether a number of training was logged, or drawn, in this start."""
        return self._loop.has_logged

    @property
    def batches_read(self) -> int:
        """Batches of training that this rank has read in this start."""
        return self._loop.batches_read

    @property
    def has_validated(self) -> bool:
        """Whether what is trained was validated in this start."""
        return self._loop.results.has_validated

    @property
    def waiting(self) -> Sequence[str]:
        """Events at which the experiment acts, and that a helper calls which was not called yet."""
        return sorted(self._events.waiting)

    @property
    def inspected(self) -> str:
        """The name of the checkpoint that load_checkpoint has put in; empty if none."""
        return self._checkpointer.inspected

    @property
    def restored(self) -> Path | None:
        """The checkpoint from which this start goes on; None: it begins."""
        return self._checkpointer.restored

    @property
    def code(self) -> Code:
        """The Python files of the experiment, as they were loaded."""
        return self._checkpointer.code

    @property
    def state(self) -> UserState:
        """The attributes of the experiment, as the last walk has seen them."""
        return self._state

    @property
    def saved_at(self) -> int:
        """The iteration of the last checkpoint of this start, which may still be under way; -1."""
        return self._loop.saved_at

    @property
    def epochs_ended(self) -> int:
        """Epochs whose batches are used up: all that have begun, but for the one under way."""
        return self._loop.epochs_ended

    @property
    def updates_per_epoch(self) -> Fraction | None:
        """Updates of an epoch; None if nobody knows."""
        return self._data.updates_per_epoch

    @property
    def batch_in_epoch(self) -> int:
        """The number of batches that this rank has read in the epoch under way."""
        return self._data.batch_in_epoch

    def turn_epoch(self) -> None:
        """Ends an epoch that is used up, and begins the next one; read_batch does it first."""
        self._loop.turn_epoch()

    # --- the update -----------------------------------------------------------------------

    @property
    def num_shares(self) -> int:
        """The number of batches that make one update, over all ranks."""
        return self._update.batches * self._start.world_size

    @property
    def divisor(self) -> int:
        """By what backward() divides a loss now: above 1 in a loop over micro-batches."""
        return self._update.divisor

    @property
    def share(self) -> int:
        """Which of the num_shares batches of an update was read last, from 0 on."""
        return self._data.part_of_update(self._update.batches, self._start.rank)[0]

    @property
    def batch_indices(self) -> list[Any] | None:
        """The data set's indices of the samples in the training batch read last, or None."""
        return self._data.batches.indices

    @property
    def stepping(self) -> Sequence[Any]:
        """The optimizers that step_optimizers is stepping; empty outside of it."""
        return self._update.stepping

    @property
    def grad_scaler(self) -> Any:
        """The paddle.amp.GradScaler among the experiment's attributes; None if there is none."""
        return self._update.grad_scaler

    def step_of(
        self, optimizers: Iterable[Any] = ()
    ) -> contextlib.AbstractContextManager[StepParts]:
        """Begins a step of optimizers, in parts between which something can act.

        step_optimizers is this:

            with self.internals.step_of(optimizers) as parts:
                parts.unscale()
                self.internals.fire("on_before_optimizers_step")
                parts.step()
                parts.clear()

        Args:
            optimizers: Those to step; by default all that are attributes. `stepping` has them.

        Returns:
            A context for the block, which gets a StepParts.
        """
        return self._update.step_of(optimizers)

    def log_finite(self, **scalars: Any) -> None:
        """Logs numbers of training, without those that are not finite, which log takes as errors.

        Whether a tensor is finite is seen when the line is due, so no device is waited for here.

        Args:
            scalars: Numbers or tensors of one element, by name.
        """
        self._loop.log(scalars, only_finite=True)

    # --- validation and prediction --------------------------------------------------------

    @property
    def evaluated_loader(self) -> Any:
        """The loader that valid_batches() reads: the one given to evaluate, else valid_loader."""
        return self._evaluation.evaluated_loader

    @property
    def evaluated_indices(self) -> list[Any] | None:
        """The data set's indices of the samples in the last batch of valid_batches(), or None."""
        return self._evaluation.indices

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Begins the phase "predict": eval mode, no gradients, random numbers of its own.

        What is drawn in it has no effect on training, and log() writes to the text log.

            with self.internals.evaluating():
                picture = self.model(noise)

        Returns:
            A context for the block; within another one it changes nothing.
        """
        return self._loop.results.predicting(self._loop.iteration)

    def surround_phases(
        self, context: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Puts a context round each validation, prediction and evaluating() block to come.

        Args:
            context: Makes the context anew each time, in eval mode already: averaged weights.
        """
        self._evaluation.surround(context)

    # --- state and events -----------------------------------------------------------------

    def stateful_objects(self) -> StatefulObjects:
        """Looks for what has state among the attributes; what is excluded from checkpoints, too.

        Returns:
            The layers, optimizers, schedules and other objects, by the paths of their attributes.
        """
        return self._state.found()

    def learning_rates(self) -> dict[str, float]:
        """Reads the learning rate of each optimizer.

        Returns:
            The rates by the names of their curves: `train/lr`, or of several `train/lr/optimizer`.
        """
        return self._state.learning_rates()

    def fire(self, event: str, *args: Any) -> Any:
        """Calls an event: its method, then its listeners.

        Args:
            event: The name, such as `on_log`.
            args: What the method and the listeners are called with.

        Returns:
            What the method returned; None if nothing hears the event.
        """
        return self._events.fire(event, *args)

    def listen(self, event: str, function: Callable[..., object]) -> Callable[[], None]:
        """Calls a function at each event of a name, after all that the experiment does at it.

        It only looks: it is in no checkpoint, and an error in it is a line of the log.

        Args:
            event: The name of an event, or of a moment that is none: `ready`, when setup has ended,
                and what it has made is noted; `begin`, when training begins, after on_train_begin,
                in a loop without run(), too; `micro_batches`, when a loop over the batches of one
                update begins; `clip_gradients`, when the mixin GradientClipping clips, in a step or
                by hand; `capture`, when the state was copied for a checkpoint, and its walk is at
                hand; `ranks_differ`, when a save finds that what they should have alike is not,
                with what they have exchanged.
            function: It is called with the event's arguments.

        Returns:
            A function that ends it.
        """
        return self._events.listen(event, function)

    def explain(self, function: Callable[[BaseException], object]) -> None:
        """Asks a function, before an error that ends the run is logged, to add a note to it.

        Args:
            function: It is called with the error.
        """
        self._events.explain(function)

    def hears(self, event: str) -> bool:
        """Says whether a method or a listener of the experiment acts at an event.

        Args:
            event: The name.

        Returns:
            True if fire would call something.
        """
        return event in self._events.subscribed

    def wait_for_checkpoint(self) -> None:
        """Waits until no checkpoint is being written any more, on rank 0; not on the others.

        The files of a checkpoint are written in a thread, while training goes on.

        Raises:
            CheckpointError: The checkpoint could not be written.
            NonFiniteError: A trained parameter or an accumulator in it is not finite.
        """
        self._checkpointer.settle()

    def closing(self) -> contextlib.AbstractContextManager[None]:
        """Closes the run after a block, for a script that does not call run().

        An error in the block is logged, and is raised on when everything is closed.

            with exp.internals.closing():
                while exp.going_on():
                    exp.train_batch()
                    exp.end_iteration()

        Returns:
            A context for the block.
        """
        return self._closing()
