"""One update in parts: micro-batches, backward, step. All of it may be written by hand instead.

The helpers add accumulation, the averaging of gradients over the ranks, a GradScaler if one is an
attribute of the experiment, and the events in between. Schedules are not stepped here.

    for batch in self.micro_batches():
        self.backward(loss_of(batch))
    self.step_optimizers()
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.amp.grad_scaler import OptimizerState

from expbase import checks
from expbase.attributes import Attributes
from expbase.first_updates import FirstUpdates


@dataclass
class UpdateState:
    """The update under way."""

    accumulates: bool = False  # whether train_batch has asked for micro-batches in this start
    optimizers: tuple[Any, ...] = ()  # that step now
    count: int = 1  # of the micro-batches of the loop under way
    yielded: int = 0  # of them; 0 outside of the loop
    overflows: list[Any] = field(default_factory=list)  # of steps that the scaler was not told of
    first: FirstUpdates = field(default_factory=lambda: FirstUpdates([], 0))  # of this start

    def check_complete(self) -> None:
        """Raises a RuntimeError if the loop over the micro-batches was left early."""
        if 0 < self.yielded < self.count:
            raise RuntimeError(
                f"micro_batches: the update was made after {self.yielded} of {self.count} "
                "batches; expected it after the whole loop, and no break in the loop: the ranks "
                "average their gradients with the last one."
            )


class TrainingSteps(Attributes):
    """The parts of an update that train_batch may call."""

    def __init__(self, config: Mapping[str, Any], args: argparse.Namespace) -> None:
        super().__init__(config, args)
        self._update = UpdateState()

    def read_batch(self) -> Any:
        """The next training batch of this rank; experiment.py has it."""
        raise NotImplementedError

    def micro_batches(self) -> Iterator[Any]:
        """The training.accumulation_steps batches of one update, for a loop in train_batch.

        Among several ranks gradients are averaged with the last one. An epoch may end in between;
        the next one then begins within the update. A by-hand loss.backward() in it divides the
        loss by training.accumulation_steps itself.

        Raises:
            RuntimeError: The loop before was left early, in the update under way or the last one.
        """
        update, count = self._update, self.config.training.accumulation_steps
        update.accumulates = True
        update.check_complete()
        wrappers = self.stateful_objects().parallel.values() if count > 1 else ()
        parallel = [layer for layer in wrappers if hasattr(layer, "no_sync")]  # fleet's lack it
        update.count, update.yielded = count, 0
        for number in range(1, count + 1):
            batch = self.read_batch()
            update.yielded = number
            with contextlib.ExitStack() as unsynchronized:
                if number < count:  # the forward decides whether its backward synchronizes
                    for layer in parallel:
                        unsynchronized.enter_context(layer.no_sync())
                yield batch
        update.count, update.yielded = 1, 0

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss, in micro_batches divided by their number.

        Args:
            loss: Of one batch, a mean over its samples. It goes through the GradScaler, if one is
                an attribute of the experiment.
        """
        self._update_scaler()
        self.fire("on_before_backward", loss)
        if self._update.count > 1:
            loss = loss / self._update.count
        scaler = self.grad_scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.fire("on_after_backward")

    def step_optimizers(self, *optimizers: Any) -> None:
        """Unscales the gradients, steps, clears them. Schedules are yours to step.

        Args:
            *optimizers: By default all that are attributes of the experiment.

        Raises:
            RuntimeError: The loop over the micro-batches was left early.
            TypeError: Something else is given.
        """
        update = self._update
        update.check_complete()
        update.count, update.yielded = 1, 0
        for optimizer in optimizers:
            if not hasattr(optimizer, "clear_grad"):
                raise TypeError(
                    f"step_optimizers: {optimizer!r} given; expected optimizers, one by one."
                )
        own = self._optimizers().values()
        update.optimizers = tuple(optimizers or own)
        self._step_and_clear()
        if {*map(id, own)} <= {*map(id, update.optimizers)}:
            self._update_scaler()
        update.optimizers = ()

    def _step_and_clear(self) -> None:
        update, scaler = self._update, self.grad_scaler
        if scaler is not None:
            _unscale(scaler, update.optimizers)
        self.fire("on_before_optimizers_step")
        for optimizer in update.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                _step(scaler, optimizer)
                update.overflows.append(scaler._cache_found_inf if scaler.is_enable() else False)
        self.fire("on_after_optimizers_step")
        self.fire("on_before_zero_grad")
        for optimizer in update.optimizers:
            # None and not zeros: momentum moves the weights of a gradient of zeros.
            optimizer.clear_grad(set_to_zero=False)
        self.fire("on_after_zero_grad")

    @property
    def stepping(self) -> tuple[Any, ...]:
        """The optimizers that step_optimizers is about; empty outside of it."""
        return self._update.optimizers

    @property
    def grad_scaler(self) -> Any:
        """The GradScaler that is an attribute of the experiment; None if there is none.

        Raises:
            ValueError: There are several.
        """
        found = {n: v for n, v in vars(self).items() if isinstance(v, paddle.amp.AmpScaler)}
        if len({*map(id, found.values())}) > 1:
            raise ValueError(
                f"backward: self.{' and self.'.join(found)} are GradScalers; expected at most "
                "one. With several write the step by hand: scale, backward, step, update, clear."
            )
        return next(iter(found.values()), None)

    def _note_before_first_update(self) -> None:
        self._update.first = FirstUpdates(self._optimizers().values(), self.iteration)

    def _check_first_updates(self) -> None:
        """When something is due: what the updates of a start show, and nothing else would."""
        first = self._update.first
        checks.check_template({"epoch": self._iterator.epoch}, vars(self))
        if not first.was_checked:
            first.was_checked = True
            self._check_first_update()
        has_logged = self._metric_log.is_used or not self.config.training.log_interval
        for text in first.look(self.iteration, is_last=self._is_last, has_logged=has_logged):
            self.logger.warning("[%d] %s", self.iteration, text)

    def _check_first_update(self) -> None:
        counters = {"iteration": self._update.first.began + 1, "epoch": self.epoch}
        checks.check_template({**self._names.template, **counters}, vars(self))
        self._checkpointer.refuse_newcomers(self._saved_objects())
        self._update.check_complete()
        steps = self.config.training.accumulation_steps
        checks.check_accumulation(steps, accumulates=self._update.accumulates)
        if text := checks.unread_data(vars(self), self._stopwatch.batches):
            self.logger.warning("%s", text)

    def _update_scaler(self) -> None:
        """Tells the scaler of the steps since its last update.

        Not with a step of some optimizers: gradients of the same losses may wait for the others,
        and must be unscaled by what they were scaled by.
        """
        overflows, self._update.overflows = self._update.overflows, []
        scaler = self.grad_scaler if overflows else None
        if scaler is not None and scaler.is_enable():
            _tell(scaler, any(map(bool, overflows)))


# Paddle's scaler, seen in its source: with several optimizers it remembers of the last one alone
# whether its gradients were finite, and with a fixed scale it forgets with each step whose
# gradients were unscaled.


def _unscale(scaler: Any, optimizers: Sequence[Any]) -> None:
    """Unscales the gradients of all; one that is not finite keeps all from stepping."""
    found: list[Any] = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        if scaler.is_enable():
            found.append(scaler._found_inf.reshape([]))
    if len(found) > 1:
        scaler._found_inf = paddle.stack(found).any().reshape([1])


def _step(scaler: Any, optimizer: Any) -> None:
    if scaler.is_enable():
        scaler._optimizer_states[id(optimizer)]["state"] = OptimizerState.UNSCALED
    scaler.step(optimizer)


def _tell(scaler: Any, overflowed: bool) -> None:
    scaler._cache_found_inf = overflowed
    # It prints float(scale), which numpy 2.4 refuses for the shape [1] that the kernels want.
    scaler._scale = scaler._scale.reshape([])
    try:
        scaler.update()
    finally:
        scaler._scale = scaler._scale.reshape([1])
