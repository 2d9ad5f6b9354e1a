"""What the gradients of the first updates show: mistakes that give no error, only a worse result.

A `clear_grad()` that is missing: an optimizer steps with a gradient which it has stepped with, and
which nobody has cleared. A `loss.backward()` in the loop over micro-batches, of a loss that is not
divided, or by a smaller number: their gradients are added up. Some parameters of each optimizer are
watched, by a hook that paddle calls before a backward adds to their gradient; it changes nothing.

    first = FirstGradients(lambda: divisor)
    first.watch(optimizers)                            # before the first update
    for text in first.look(): ...                      # after each of them
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import paddle

from expbase.base.arrays import is_piece
from expbase.base.gradients import dense_gradient
from expbase.engine import update
from expbase.state.optimizers import innermost
from expbase.state.parts import parameters_of
from expbase.state.sampled_elements import is_other, sample

_UPDATES = 10  # that are looked at, at most: a gradient that was cleared once is watched no more
_PARTS = 4  # parameters of an optimizer that are looked at
BY_EXPBASE = "self.backward(loss)"  # who has called a backward: it divides and scales
OF_A_PART = "(loss / 4).backward()"  # the user, of a loss that looks divided or scaled
PLAIN = "loss.backward()"  # the user, of another one
_DIVISIONS = ("DivScale", "Divide", "Scale", "Multiply")  # how nodes of paddle's graphs are called


class FirstGradients:
    """Watches the gradients of the first updates of a start.

    Args:
        divisor: Returns by what a loss must be divided now, which backward() does.
    """

    def __init__(self, divisor: Callable[[], int]) -> None:
        self._divisor = divisor
        self._watched: list[_Watched] = []
        self._updates = 0  # that were looked at, since the first backward
        self.backwards: set[str] = set()  # who has called those of the update under way
        self.have_come = False  # whether a backward has reached what is watched
        self._undivided = ""  # what is to be said of a loss
        self._has_told = False  # whether it was said

    def watch(self, optimizers: Mapping[str, Any]) -> None:
        """Begins to watch, before the first update."""
        for name, optimizer in optimizers.items():
            for parameter in some_parameters(optimizer):
                watched = _Watched(name, optimizer, parameter)
                watched.hook = parameter.register_hook(self._hook_of(watched))
                self._watched.append(watched)

    @property
    def is_watching(self) -> bool:
        """Whether there is a gradient of which nobody knows yet who clears it."""
        return bool(self._watched)

    def close(self) -> None:
        """Ends it."""
        self._watch_only([])

    def _watch_only(self, watched: list[_Watched]) -> None:
        for one in self._watched:
            if one not in watched:
                one.hook.remove()
        self._watched = watched

    def _hook_of(self, watched: _Watched) -> Callable[[Any], None]:
        def hook(grad: Any) -> None:
            self.have_come = True
            frame = _backward_frame()
            if frame is not None:
                self.backwards.add(_kind_of(frame))
                if not self._undivided and (divisor := self._divisor()) > 1:
                    self._undivided = _undivided(frame, divisor)
            watched.note_backward(grad)

        return hook

    def note_put_aside(self) -> None:
        """Notes what gradients there are, before they are put aside, to be added at the end."""
        for watched in self._watched:
            watched.note_put_aside()

    def look(self) -> Iterator[str]:
        """Yields each mistake, after an update, once."""
        self.backwards.clear()
        if not self._watched:
            return
        self._updates += self.have_come
        for watched in self._watched:
            watched.end_update()
        forgotten = {watched.name for watched in self._watched if watched.is_forgotten}
        for name in sorted(forgotten):
            yield (
                f"self.{name}: has stepped again with the gradients of an update before, which "
                "nobody has cleared, so they add up; expected clear_grad() after each step()."
            )
        if self._undivided and not self._has_told:
            self._has_told = True
            yield self._undivided
        is_over = forgotten or self._updates == _UPDATES
        self._watch_only([w for w in self._watched if not (w.is_cleared or is_over)])


class _Watched:
    """One parameter, and its gradient."""

    hook: Any = None
    is_forgotten = False  # whether it has stepped with a gradient that was stepped with before
    is_cleared = False  # whether somebody has cleared one that was stepped with

    def __init__(self, name: str, optimizer: Any, parameter: Any) -> None:
        self.name = name  # of the optimizer
        self._optimizer = optimizer
        self._parameter = parameter
        self._uncleared: Any = None  # the gradient, if nobody clears it: one that was stepped with
        self._is_uncleared = False  # whether that was so at the last backward
        self._is_put_aside = False  # whether a backward of this update sees no gradient of before
        self._trace: StepTrace | None = None  # of a step, from the last backward on

    def note_backward(self, new: Any) -> None:
        """Notes what there is before a backward adds a gradient."""
        self._trace = StepTrace(self._optimizer, [self._parameter])
        if not self._is_put_aside:
            self._note_before()
            if self._is_uncleared:
                self._uncleared = self._uncleared + sample(new)

    def note_put_aside(self) -> None:
        """Notes what there is before the first backward of an update, which will see none."""
        self._is_put_aside = True
        self._note_before()

    def _note_before(self) -> None:
        now = self._gradient()
        uncleared = self._uncleared
        self._is_uncleared = now is not None and uncleared is not None
        self._is_uncleared = self._is_uncleared and not is_other(now, uncleared)
        if not self._is_uncleared:
            self.is_cleared |= uncleared is not None
            self._uncleared = None

    def end_update(self) -> None:
        """Notes what an update has done: with what it has stepped, and what it has left."""
        has_stepped = self._trace is not None and self._trace.has_changed()
        self.is_forgotten = has_stepped and self._is_uncleared
        if has_stepped or self._is_put_aside:
            left = self._gradient()
            is_left = left is not None and is_other(left, 0)
            self.is_cleared |= has_stepped and not is_left
            self._uncleared = left if is_left and (has_stepped or self._is_uncleared) else None
        self._trace = None
        self._is_uncleared = self._is_put_aside = False

    def _gradient(self) -> Any:
        grad = dense_gradient(self._parameter)
        return None if grad is None else sample(grad)


class StepTrace:
    """What a step of an optimizer leaves: some parameters are others, and their accumulators.

    With a learning rate of 0 it is accumulators alone.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
        self._parameters = parameters or some_parameters(optimizer)
        self._before = self._samples()

    def has_changed(self) -> bool:
        """Returns whether the optimizer has stepped since this was made."""
        now = self._samples()
        return len(now) != len(self._before) or any(map(is_other, now, self._before))

    def _samples(self) -> list[Any]:
        by_name = getattr(innermost(self._optimizer), "_accumulators", {}).values()
        found = [tensors.get(p.name) for tensors in by_name for p in self._parameters]
        return [sample(t) for t in (*self._parameters, *found) if t is not None]


def some_parameters(optimizer: Any) -> list[Any]:
    """Returns the first and the last trained parameter of an optimizer, and some between."""
    given = [p for p in parameters_of(optimizer) if p._is_initialized() and not p.stop_gradient]
    whole = [p for p in given if not is_piece(p)]
    numbers = {(len(whole) - 1) * part // (_PARTS - 1) for part in range(_PARTS) if whole}
    return [whole[number] for number in sorted(numbers)]


def _backward_frame() -> FrameType | None:
    """Returns the frame of the Tensor.backward() under way; None if another function began it."""
    frame: FrameType | None = sys._getframe(2)  # of the hook, which paddle has called
    while frame is not None and not _is_backward(frame):
        frame = frame.f_back
    return frame


def _is_backward(frame: FrameType) -> bool:
    is_named = frame.f_code.co_name == "backward"
    return is_named and isinstance(frame.f_locals.get("self"), paddle.Tensor)


def _caller_of(frame: FrameType) -> FrameType | None:
    caller = frame.f_back
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("paddle."):
        caller = caller.f_back
    return caller


def _kind_of(frame: FrameType) -> str:
    """Returns who has called a backward, and of which loss: one of the three above."""
    caller = _caller_of(frame)
    if caller is not None and caller.f_globals.get("__name__") == update.__name__:
        return BY_EXPBASE
    return OF_A_PART if _is_divided(frame.f_locals["self"].grad_fn) else PLAIN


def _undivided(frame: FrameType, divisor: int) -> str:
    """Returns a warning that the loss of a backward is not divided; "" if it is."""
    loss = frame.f_locals["self"]
    caller = _caller_of(frame)
    looks = f"does not look divided by {divisor}"
    if _is_divided(loss.grad_fn):
        number = _divided_by(loss, {} if caller is None else caller.f_locals)
        if not 1 < number < divisor:  # a greater one may count the samples of all batches
            return ""
        looks = f"is divided by {number}"
    place = caller and f" ({os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno})"
    return (
        f"loss.backward(){place or ''} in the loop over micro_batches(): {divisor} gradients are "
        f"added up, and the loss {looks}; expected self.backward(loss), "
        f"which divides it, or (loss / {divisor}).backward()."
    )


def _is_divided(node: Any) -> bool:
    """Returns whether what a node has made is a part of something, or a sum of parts."""
    name = "" if node is None else node.name()
    if name.startswith("Add"):
        return all(map(_is_divided, node.next_functions))
    return not name or name.startswith(_DIVISIONS)


def _divided_by(loss: Any, names: Mapping[str, Any]) -> int:
    """Returns the whole number by which a loss was divided; 0 if it cannot be seen.

    No node of paddle's tells its number. But the loss before has often a name where backward() is
    called, as in `(loss / 4).backward()`.
    """
    node = loss.grad_fn
    before = [] if node is None else [n for n in node.next_functions if n is not None]
    if len(before) != 1 or _is_divided(before[0]):  # by two numbers
        return 0
    for value in names.values():
        if isinstance(value, paddle.Tensor) and value.size == 1 and value.grad_fn is before[0]:
            part, whole = loss.item(), value.item()
            ratio = whole / part if part and math.isfinite(whole) else 0.0
            is_whole = math.isfinite(ratio) and math.isclose(ratio, round(ratio), rel_tol=1e-3)
            return round(ratio) if is_whole else 0
    return 0
