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

from expbase import state

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

    def micro_batches(self) -> Iterator[Any]:
        """The batches of one update.

        Raises:
            RuntimeError: The loop before was left early, in the update under way or the last one.
        """
        self.used.add("micro_batches")
        self._check_complete()
        count = self._exp.config.training.accumulation_steps
        parallel = parallel_layers(self._exp._user_attributes().values())
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
        exp = self._exp
        self.used.add("backward")
        heard = exp._handlers.heard
        if "on_before_backward" in heard:
            exp._handlers.fire("on_before_backward", loss)
        if self._count > 1:
            loss = loss / self._count
        scaler = self._scaler()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if "on_after_backward" in heard:
            exp._handlers.fire("on_after_backward")

    def step(self, optimizers: Sequence[Any] = ()) -> None:
        """Unscales, steps and clears.

        Args:
            optimizers: All that stand on the experiment by default.
        """
        exp = self._exp
        self.used.add("step_optimizers")
        self._check_complete()
        if not optimizers:
            optimizers = tuple(state.find(exp._user_attributes()).optimizers.values())
        self.optimizers = tuple(optimizers)
        scaler = self._scaler()
        if scaler is not None:
            _unscale(scaler, optimizers)
        self._fire("on_before_optimizers_step")
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self._fire("on_after_optimizers_step")
        self._fire("on_before_zero_grad")
        for optimizer in optimizers:
            optimizer.clear_grad()
        self._fire("on_after_zero_grad")
        self.optimizers = ()

    def _fire(self, event: str) -> None:
        if event in self._exp._handlers.heard:
            self._exp._handlers.fire(event)

    def _check_complete(self) -> None:
        if 0 < self._given < self._count:  # the loop was left, or step called within it
            raise RuntimeError(
                f"micro_batches: the update was made after {self._given} of {self._count} "
                "batches; expected it after the whole loop, and no break in the loop: the ranks "
                "average their gradients with the last one."
            )

    def _scaler(self) -> Any:
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


def parallel_layers(values: Any) -> list[Any]:
    """Every paddle.DataParallel among the values, also in lists and dicts, once."""
    found: dict[int, Any] = {}
    for value in values:
        if isinstance(value, paddle.DataParallel):
            found[id(value)] = value
        elif isinstance(value, (list, tuple)) and len(value) < 1000:  # a long one holds data
            found |= {id(layer): layer for layer in parallel_layers(value)}
        elif isinstance(value, dict):
            found |= {id(layer): layer for layer in parallel_layers(value.values())}
    return list(found.values())


def _unscale(scaler: Any, optimizers: Sequence[Any]) -> None:
    """Unscales the gradients of all optimizers; one that is not finite has none of them step.

    Paddle's scaler remembers of the last optimizer alone whether its gradients were finite, so
    with several it would step the others on infinite ones, and not lower the scale.
    """
    found: list[Any] = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        if scaler.is_enable():
            found.append(scaler._found_inf.reshape([]))
    if len(found) > 1:
        scaler._found_inf = paddle.stack(found).any().reshape([1])
