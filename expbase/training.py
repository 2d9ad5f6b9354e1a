"""One update in parts: micro-batches, backward, step. All of it may be written by hand instead.

`ExperimentBase.micro_batches`, `backward` and `step_optimizers` are these; they add accumulation,
the synchronization of gradients over the ranks, a GradScaler if one stands on the experiment, and
the events in between. Schedules are not stepped here.

    for batch in stepper.micro_batches():
        stepper.backward(loss_of(batch))
    stepper.step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle.amp.grad_scaler import OptimizerState

from expbase.state import objects

if TYPE_CHECKING:
    from expbase.experiment import ExperimentBase


class Stepper:
    """The parts of an update of one experiment.

    Attributes:
        used: The names of the helpers that were called.
        optimizers: Those that step now; empty outside of `step`.
    """

    def __init__(self, experiment: ExperimentBase) -> None:
        self.used: set[str] = set()
        self.optimizers: tuple[Any, ...] = ()
        self._exp = experiment
        self._count = 1  # of the micro-batches of the loop under way
        self._given = 0  # of them; 0 outside of the loop
        self._overflows: list[Any] = []  # of the steps that the scaler has not heard of

    def micro_batches(self) -> Iterator[Any]:
        """The batches of one update.

        Raises:
            RuntimeError: The loop before was left early, in the update under way or the last one.
        """
        self.used.add("micro_batches")
        self.check_complete()
        count = self._exp.config.training.accumulation_steps
        attributes = self._exp._user_attributes()
        parallel = objects.find(attributes).parallel.values() if count > 1 else ()
        self._count, self._given = count, 0
        for number in range(1, count + 1):
            batch = self._exp.read_batch()
            self._given = number
            with contextlib.ExitStack() as unsynchronized:
                if number < count:  # the forward decides whether its backward synchronizes
                    for layer in parallel:
                        unsynchronized.enter_context(layer.no_sync())
                yield batch
        self._count, self._given = 1, 0

    def backward(self, loss: Any) -> None:
        """Adds the gradients of the loss, within micro_batches divided by their number."""
        self.used.add("backward")
        self.finish()
        self._fire("on_before_backward", loss)
        if self._count > 1:
            loss = loss / self._count
        scaler = self.scaler()
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._fire("on_after_backward")

    def step(self, optimizers: Sequence[Any] = ()) -> None:
        """Unscales, steps and clears.

        Args:
            optimizers: All that stand on the experiment by default.

        Raises:
            RuntimeError: The loop over the micro-batches was left early.
            TypeError: Something else is given.
        """
        self.used.add("step_optimizers")
        self.check_complete()
        self._count, self._given = 1, 0
        for optimizer in optimizers:
            if not hasattr(optimizer, "clear_grad"):
                raise TypeError(
                    f"step_optimizers: {optimizer!r} given; expected optimizers, one by one."
                )
        standing = objects.find(self._exp._user_attributes()).optimizers.values()
        self.optimizers = tuple(optimizers or standing)
        scaler = self.scaler()
        if scaler is not None:
            _unscale(scaler, self.optimizers)
        self._fire("on_before_optimizers_step")
        for optimizer in self.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                _step(scaler, optimizer)
                self._overflows.append(scaler._cache_found_inf if scaler.is_enable() else False)
        self._fire("on_after_optimizers_step")
        self._fire("on_before_zero_grad")
        for optimizer in self.optimizers:
            optimizer.clear_grad(set_to_zero=False)  # zeros would move what momentum moves
        self._fire("on_after_zero_grad")
        if {*map(id, standing)} <= {*map(id, self.optimizers)}:
            self.finish()
        self.optimizers = ()

    def finish(self) -> None:
        """Has the scaler take note of the steps since its last update.

        Not with a step of some optimizers: gradients of the same losses may wait for the others,
        and must be unscaled by what they were scaled by.
        """
        overflows, self._overflows = self._overflows, []
        scaler = self.scaler() if overflows else None
        if scaler is not None and scaler.is_enable():
            _update(scaler, any(map(bool, overflows)))

    def check_complete(self) -> None:
        """Checks that the loop over the micro-batches was not left early.

        Raises:
            RuntimeError: It was.
        """
        if 0 < self._given < self._count:
            raise RuntimeError(
                f"micro_batches: the update was made after {self._given} of {self._count} "
                "batches; expected it after the whole loop, and no break in the loop: the ranks "
                "average their gradients with the last one."
            )

    def scaler(self) -> Any:
        """The GradScaler that stands on the experiment, if one does.

        Raises:
            ValueError: There are several.
        """
        scalers = {
            name: value
            for name, value in self._exp._user_attributes().items()
            if isinstance(value, paddle.amp.AmpScaler)
        }
        if len({*map(id, scalers.values())}) > 1:
            raise ValueError(
                f"backward: self.{' and self.'.join(scalers)} are GradScalers; expected at most "
                "one. With several write the step by hand: scale, backward, step, update, clear."
            )
        return next(iter(scalers.values()), None)

    def _fire(self, event: str, *args: Any) -> None:
        if event in self._exp._handlers.subscribed:
            self._exp._handlers.fire(event, *args)


# Paddle's scaler, seen in its source: with several optimizers it remembers of the last one alone
# whether its gradients were finite, and with a fixed scale it forgets with each step whose
# gradients were unscaled.


def _unscale(scaler: Any, optimizers: Sequence[Any]) -> None:
    """Unscales the gradients of all; one that is not finite has none of them step."""
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


def _update(scaler: Any, overflowed: bool) -> None:
    scaler._cache_found_inf = overflowed
    # It prints float(scale), which numpy 2.4 refuses for the shape [1] that the kernels want.
    scaler._scale = scaler._scale.reshape([])
    try:
        scaler.update()
    finally:
        scaler._scale = scaler._scale.reshape([1])
