"""One update in parts: micro-batches, backward, step. All of it may be written by hand instead.

The helpers add accumulation, the averaging of gradients over the ranks, a GradScaler if one is an
attribute of the experiment. Schedules are not stepped here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import paddle
from paddle.amp.grad_scaler import OptimizerState

from expbase.base import rng
from expbase.engine.first_gradients import FirstGradients
from expbase.engine.gradient_tree import GradientTree
from expbase.engine.shares import ShareStates
from expbase.engine.wrappers import Wrappers
from expbase.ranks import alike, collectives
from expbase.record.speed import Stopwatch
from expbase.state.attributes import UserState
from expbase.state.parts import StatefulObjects, named_parameters, parameters_of
from expbase.state.walk import unwrap


class Update:
    """The update under way.

    Args:
        training: That section of the config.
        state: The attributes of the experiment.
        stopwatch: Counts the time until the first backward.
    """

    def __init__(self, training: Any, state: UserState, stopwatch: Stopwatch) -> None:
        self._accumulates = False  # whether train_batch has asked for micro-batches in this start
        self.stepping: tuple[Any, ...] = ()  # the optimizers that step now
        self.has_shares: bool = training.shares > 0
        # Batches of an update on this rank.
        self.batches: int = (
            training.shares // collectives.world_size() or training.accumulation_steps
        )
        self.shares = ShareStates(training, state)
        self.wrappers = Wrappers(state.found)
        self._tree = GradientTree(lambda: named_parameters(state.found()))
        self._training = training
        self._state = state
        self._stopwatch = stopwatch
        self._divisor = 1  # of a loss: in a loop over micro-batches their number
        self._yielded = 0  # micro-batches of the loop under way; 0 outside of it
        self.first_gradients = FirstGradients(lambda: self._divisor)

    @property
    def repeats_rank_zero(self) -> bool:
        """Whether this rank computes the same as rank 0 now: with shares, outside of them."""
        return self.has_shares and collectives.rank() > 0 and not self.shares.is_computing

    def check_complete(self) -> None:
        """Raises a RuntimeError if the loop over the micro-batches was left early."""
        needed = self.batches + self.has_shares  # these are added up when the loop has ended
        if 0 < self._yielded < needed:
            raise RuntimeError(
                f"micro_batches: the update was made after {self._yielded} of {self.batches} "
                "batches; expected it after the whole loop, and no break in the loop: gradients "
                "are averaged at its end."
            )

    def data_parallel(self, layer: Any, **options: Any) -> Any:
        """Returns the layer, in a DataParallel if that has to average its gradients."""
        if collectives.world_size() == 1 or self.has_shares:  # these are added up by micro_batches
            return layer
        if isinstance(layer, paddle.DataParallel):  # after something was unfrozen
            options = {"find_unused_parameters": layer.find_unused_parameters, **options}
            layer = unwrap(layer)
        found = StatefulObjects(layers={f"data_parallel({type(layer).__name__})": layer})
        alike.check_alike(found.shapes())  # paddle's check would hang, or end the process
        wrapper = paddle.DataParallel(layer, **options)
        self.wrappers.note(wrapper)
        return wrapper

    def check_first(self) -> None:
        """Raises a ValueError if the first update did not accumulate, and had to."""
        self.check_complete()
        check_accumulation(self._training, accumulates=self._accumulates)

    def micro_batches(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        """Yields the batches of one update, each by `read`."""
        self._accumulates = True
        self.check_complete()
        self._end_micro_batches()  # of an update that broke off its loop with the last one
        self._divisor = self._training.shares or self.batches
        yield from self._shares(read, iteration) if self.has_shares else self._accumulated(read)
        self._end_micro_batches()

    def _shares(self, read: Callable[[], Any], iteration: int) -> Iterator[Any]:
        self.shares.begin(iteration)
        self.first_gradients.note_put_aside()
        self._tree.begin()
        for on_rank, number in enumerate(self.shares.numbers):
            with self.shares.computing(number):
                batch = read()
                self._yielded += 1
                yield batch
            self._tree.add_share(on_rank)
        self._tree.add_up(self.shares.end())
        # The last share's random numbers would go on, and on each rank that is another one.
        rng.seed_for(self._training.seed, rng.TRAIN, iteration, self._training.shares)

    def _accumulated(self, read: Callable[[], Any]) -> Iterator[Any]:
        count = self.batches
        wrappers = self._state.found().parallel.values() if count > 1 else ()
        parallel = [layer for layer in wrappers if hasattr(layer, "no_sync")]  # fleet's lack it
        for number in range(1, count + 1):
            batch = read()
            self._yielded = number
            with contextlib.ExitStack() as unsynchronized:
                if number < count:  # the forward decides whether its backward synchronizes
                    for layer in parallel:
                        unsynchronized.enter_context(layer.no_sync())
                yield batch

    def _end_micro_batches(self) -> None:
        self._divisor = 1
        self._yielded = 0

    def backward(self, loss: Any) -> None:
        """Adds the gradients of a loss; see ExperimentBase."""
        if self._divisor > 1:
            loss = loss / self._divisor
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
        attributes = self._state.everything.values()
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


# Paddle's scaler, seen in its source: it unscales the gradients of an optimizer's list, whatever it
# unscaled before; with several optimizers it remembers of the last one alone whether its gradients
# were finite; with a fixed scale it forgets with each step whose gradients were unscaled.


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
    # It prints float(scale), which numpy 2.4 refuses for the shape [1] that the kernels want.
    scaler._scale = scaler._scale.reshape([])
    scaler.update()
    scaler._scale = scaler._scale.reshape([1])


def check_accumulation(training: Any, *, accumulates: bool) -> None:
    """Raises a ValueError if train_batch did not use the helper that accumulates batches."""
    key = "shares" if training.shares else "accumulation_steps"
    if (training.shares or training[key] > 1) and not accumulates:
        raise ValueError(
            f"training.{key}: {training[key]} given, and train_batch did not "
            "call self.micro_batches(); expected `for batch in self.micro_batches():` in it."
        )
