"""One update in parts: micro-batches, backward, step. All of it may be written by hand instead.

The helpers add accumulation, the averaging of gradients over the ranks, a GradScaler if one is an
attribute of the experiment. Schedules are not stepped here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import paddle
from paddle.amp.grad_scaler import OptimizerState

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.engine.model_wrappers import Wrappers
from expbase.ranks import collectives, compare_gathered
from expbase.record.speed import Stopwatch
from expbase.state.parts import StatefulObjects, parameters_of
from expbase.state.user_state import UserState
from expbase.state.walk import unwrap


class Division(Protocol):
    """What an update is made of on this rank, and who adds up the gradients."""

    batches: int  # of an update on this rank
    divisor: int  # of a loss in the loop over them: so many gradients are added up
    asked_by: str  # what in the config wants that loop, in words; empty: nothing does
    sums_in_backward: bool  # whether DataParallel adds up, and not the end of the loop
    ranks_repeat: bool  # whether outside of it each rank does what rank 0 does

    @property
    def repeats_rank_zero(self) -> bool:
        """Whether this rank computes the same as rank 0 now."""

    def loop(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        """Yields the batches of one update, each by `read`; adds up the gradients."""

    def check(self, found: StatefulObjects) -> None:
        """Raises a ValueError, at the end of setup, if something does not go with it."""


class Accumulation:
    """Updates of accumulation_steps batches on each rank; DataParallel adds up with the last one.

    Args:
        training: That section of the config.
        state: The attributes of the experiment.
    """

    sums_in_backward = True
    ranks_repeat = False
    repeats_rank_zero = False

    def __init__(self, training: Any, state: UserState) -> None:
        self.batches: int = training.accumulation_steps
        self.divisor = self.batches
        is_asked = self.batches > 1
        self.asked_by = f"training.accumulation_steps: {self.batches}" if is_asked else ""
        self._state = state

    def loop(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        """Yields the batches of one update, each by `read`."""
        wrappers = self._state.found().parallel.values() if self.batches > 1 else ()
        parallel = [layer for layer in wrappers if hasattr(layer, "no_sync")]  # fleet's lack it
        for number in range(1, self.batches + 1):
            batch = read()
            with contextlib.ExitStack() as unsynchronized:
                if number < self.batches:  # the forward decides whether its backward synchronizes
                    for layer in parallel:
                        unsynchronized.enter_context(layer.no_sync())
                yield batch

    def check(self, found: StatefulObjects) -> None:
        """Raises nothing."""


class Update:
    """The update under way.

    Args:
        division: What it is made of.
        state: The attributes of the experiment.
        stopwatch: Counts the time until the first backward.
        tell: Tells guests of a moment.
    """

    def __init__(
        self,
        division: Division,
        state: UserState,
        stopwatch: Stopwatch,
        tell: Callable[[str], object],
    ) -> None:
        self._accumulates = False  # whether train_batch has asked for micro-batches in this start
        self.stepping: tuple[Any, ...] = ()  # the optimizers that step now
        self.batches = division.batches
        self.ranks_repeat = division.ranks_repeat
        self.note_ranks()
        self.wrappers = Wrappers(state.found)
        self._division = division
        self._state = state
        self._stopwatch = stopwatch
        self._tell = tell
        self.divisor = 1  # of a loss: in a loop over micro-batches their number
        self._yielded = 0  # micro-batches of the loop under way; 0 outside of it

    def note_ranks(self) -> None:
        """Takes the ranks whose random numbers this one draws; setup_model may connect fleet."""
        self.batch_rank = collectives.drawing_rank()  # after each batch
        self.seed_rank = 0 if self.ranks_repeat else self.batch_rank  # outside of micro-batches

    @property
    def repeats_rank_zero(self) -> bool:
        """Whether this rank computes the same as rank 0 now."""
        return self._division.repeats_rank_zero

    def check_complete(self) -> None:
        """Raises a RuntimeError if the loop over the micro-batches was left early."""
        needed = self.batches + (not self._division.sums_in_backward)  # then the loop must end
        if 0 < self._yielded < needed:
            raise RuntimeMistake(
                f"micro_batches: the update was made after {self._yielded} of {self.batches} "
                "batches; expected it after the whole loop, and no break in the loop: gradients "
                "are averaged at its end."
            )

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """Returns the layer, in a DataParallel if that has to average its gradients."""
        if collectives.world_size() == 1 or not self._division.sums_in_backward:
            return layer
        if isinstance(layer, paddle.DataParallel):  # after something was unfrozen
            options = {"find_unused_parameters": layer.find_unused_parameters, **options}
            layer = unwrap(layer)
        found = StatefulObjects(layers={f"data_parallel({type(layer).__name__})": layer})
        # Else paddle/distributed/parallel.py, sync_params_buffers, would hang, or end the process.
        collectives.barrier("self.data_parallel()")
        compare_gathered.check_alike(found.shapes())
        wrapper = paddle.DataParallel(layer, **options)
        self.wrappers.note(wrapper)
        return wrapper

    def check_first(self) -> None:
        """Raises a ValueError if the first update did not accumulate, and had to."""
        self.check_complete()
        if self._division.asked_by and not self._accumulates:
            raise ValueMistake(
                f"{self._division.asked_by} given, and train_batch did not call "
                "self.micro_batches(); expected `for batch in self.micro_batches():` in it."
            )

    def micro_batches(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        """Yields the batches of one update, each by `read`."""
        self._accumulates = True
        self.check_complete()
        self._end_micro_batches()  # of an update that broke off its loop with the last one
        self.divisor = self._division.divisor
        self._tell("micro_batches")
        yield from self._division.loop(lambda: self._counted(read()), iteration)
        self._end_micro_batches()

    def _counted(self, batch: Any) -> Any:
        self._yielded += 1
        return batch

    def _end_micro_batches(self) -> None:
        self.divisor = 1
        self._yielded = 0

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss; see ExperimentBase."""
        if self.divisor > 1:
            loss = loss / self.divisor
        scaler = self.grad_scaler
        self._stopwatch.note_backward()
        (loss if scaler is None else scaler.scale(loss)).backward()

    @contextlib.contextmanager
    def step_of(self, optimizers: Iterable[Any]) -> Iterator[StepParts]:
        """Begins a step of optimizers, by default of all, for a block; see Internals."""
        self.check_complete()
        self._end_micro_batches()
        self.stepping = tuple(optimizers) or tuple(self._state.optimizers().values())
        yield StepParts(self.stepping, self.grad_scaler)
        self.stepping = ()

    @property
    def grad_scaler(self) -> Any:
        """The first GradScaler among the attributes; None if there is none."""
        attributes = self._state.reach.everything.values()
        return next((a for a in attributes if isinstance(a, paddle.amp.AmpScaler)), None)


class StepParts:
    """The step of some optimizers, in the parts between which something can act.

    Args:
        optimizers: Those that step.
        scaler: A paddle.amp.GradScaler, or None.
    """

    def __init__(self, optimizers: Sequence[Any], scaler: Any) -> None:
        self._optimizers = optimizers
        self._scaler = scaler

    def unscale(self) -> None:
        """Divides the gradients by the scale of the loss, if there is a scaler."""
        if self._scaler is not None:
            _unscale(self._scaler, self._optimizers)

    def step(self) -> None:
        """Steps each optimizer, and updates the scaler."""
        scaler = self._scaler
        for optimizer in self._optimizers:
            if scaler is None:
                optimizer.step()
            else:
                _step(scaler, optimizer)
        if scaler is not None and scaler.is_enable():
            _update(scaler)

    def clear(self) -> None:
        """Clears the gradients."""
        for optimizer in self._optimizers:
            # None and not zeros: momentum moves the weights of a gradient of zeros.
            optimizer.clear_grad(set_to_zero=False)


# Paddle's scaler (paddle/amp/grad_scaler.py: AmpScaler._unscale, GradScaler.step, update) unscales
# the gradients of an optimizer's list, whatever it unscaled before. With several optimizers it
# remembers only of the last one whether its gradients were finite. With a fixed scale it forgets
# with each step whose gradients were unscaled.


def _unscale(scaler: Any, optimizers: Sequence[Any]) -> None:
    """Unscales each gradient once; one that is not finite keeps all from stepping."""
    if not scaler.is_enable():
        return
    found: list[Any] = []
    unscaled: set[int] = set()
    for optimizer in optimizers:
        given = parameters_of(optimizer)
        new = {id(p): p for p in given if id(p) not in unscaled}
        unscaled |= new.keys()
        if len(new) == len(given):
            scaler.unscale_(optimizer)
        else:  # some stand in an optimizer before, or twice in this one, as tied weights may
            others = SimpleNamespace(_param_groups=None, _parameter_list=[*new.values()])
            scaler.unscale_(others)
            del scaler._optimizer_states[id(others)]  # another object may get this id
        found.append(scaler._found_inf.reshape([]))
    if len(found) > 1:
        scaler._found_inf = paddle.stack(found).any().reshape([1])


def _step(scaler: Any, optimizer: Any) -> None:
    if scaler.is_enable():
        scaler._optimizer_states[id(optimizer)]["state"] = OptimizerState.UNSCALED
    scaler.step(optimizer)


def _update(scaler: Any) -> None:
    # AmpScaler._update prints float(scale), which numpy 2.4 refuses for the shape [1] that the
    # kernels want.
    scaler._scale = scaler._scale.reshape([])
    scaler.update()
    scaler._scale = scaler._scale.reshape([1])
