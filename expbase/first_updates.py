"""What the first updates of a start did: has a parameter changed, do gradients add up?

Nothing is certain after one update: a learning rate may begin at 0, a GradScaler may skip,
gradients may wait for more batches, a replay buffer may be filled first. So it is asked again
whenever twice as many updates were made, where something is due anyway, until it is known. Of a
parameter a few elements are compared: an optimizer leaves no other trace (not in
`inplace_version`).

    first = FirstUpdates(optimizers, iteration)
    for text in first.look(iteration, is_last=False): ...      # what is likely a mistake
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from expbase.state.objects import parameters_of

# Updates without a change that are suspicious: while gradients add up, and without any.
PATIENCE, LONG_PATIENCE = 100, 1000
_ELEMENTS = 64  # of a parameter that are compared, at least
_SMALLEST = 8  # parameters of an optimizer whose gradients are looked at


@dataclass
class _Leftover:
    """A gradient that was there at the end of an update."""

    parameter: Any
    weights: Any  # some of its elements then
    gradient: Any  # the live one: its memory is not reused while this is held
    content: Any  # a copy
    version: int  # how often somebody had changed it in place

    def was_added_to(self) -> bool | None:
        """Whether a backward added to it after a step had used it; None: it is not known yet."""
        gradient, now = self.gradient, self.parameter.grad_
        # Cleared to none it is empty; cleared to zeros it is replaced by the next backward.
        if not gradient._is_initialized() or now is None or now.data_ptr() != gradient.data_ptr():
            return False
        if now.inplace_version != self.version or not _is_some(now):
            return False
        is_used = _differ(self.weights, _sample(self.parameter))
        return True if is_used and _differ(self.content, now) else None


class FirstUpdates:
    """Looks at the parameters of optimizers while the first updates of a start are made.

    Args:
        optimizers: By their names.
        iteration: Of the last update before.

    Attributes:
        began: That iteration.
    """

    def __init__(self, optimizers: Mapping[str, Any], iteration: int) -> None:
        self.began = iteration
        self._optimizers = dict(optimizers)
        self._has_logged = False
        self._next = 1
        self._unchanged = {
            name: [(p, _sample(p)) for p in parameters_of(optimizer) if p._is_initialized()]
            for name, optimizer in optimizers.items()
        }
        self._leftovers: dict[str, _Leftover] = {}
        self._unsettled = set(optimizers)  # of them it is not known whether gradients add up

    @property
    def in_doubt(self) -> bool:
        """Whether gradients were left that may add up, or do: that was told."""
        return bool(self._leftovers)

    def look(self, iteration: int, *, is_last: bool, has_logged: bool) -> Iterator[str]:
        """What is likely a mistake, each said once.

        Args:
            iteration: Of the update that was just made.
            is_last: Whether the config asks for no more.
            has_logged: Whether `log` was given anything.
        """
        updates = iteration - self.began
        if updates < self._next and not is_last:
            return
        self._next = 2 * updates
        # A start that continues a run may be too short for what comes every now and then.
        is_all = is_last and not self.began
        for name, noted in list(self._unchanged.items()):
            # Running statistics, which change in the forward, are frozen parameters.
            trained = [(p, before) for p, before in noted if not p.stop_gradient]
            if any(_differ(before, _sample(p)) for p, before in trained):
                del self._unchanged[name]
        for name in sorted(self._unsettled - self._unchanged.keys()):
            yield from self._look_at_gradients(name)
        if self._unchanged.keys() == self._optimizers.keys():
            yield from self._nothing_changed(updates, is_all=is_all)
        elif is_all and updates >= PATIENCE:
            for name in self._unchanged:
                yield (
                    f"self.{name}: none of its parameters has changed in {updates} updates; is "
                    f"self.{name}.step() missing?"
                )
        self._has_logged = self._has_logged or has_logged
        if not self._has_logged and (is_all or updates >= LONG_PATIENCE):
            self._has_logged = True
            yield (
                f"nothing was logged in {updates} updates, so there is no curve, and a loss that "
                "is not finite is not noticed; expected self.log(loss=loss) in train_batch."
            )

    def _nothing_changed(self, updates: int, *, is_all: bool) -> Iterator[str]:
        waiting = any(map(_leftover, self._optimizers.values()))
        if is_all or updates >= (PATIENCE if waiting else LONG_PATIENCE):
            self._unchanged.clear()
            expected = "" if waiting else "loss.backward(), then "
            yield (
                f"no parameter has changed in {updates} updates, and there are "
                f"{'' if waiting else 'no '}gradients; expected {expected}optimizer.step() in "
                "train_batch, with a learning rate above 0."
            )

    def _look_at_gradients(self, name: str) -> Iterator[str]:
        """Of an optimizer that has stepped."""
        if name not in self._leftovers:
            if (leftover := _leftover(self._optimizers[name])) is not None:
                self._leftovers[name] = leftover
            else:
                self._unsettled.remove(name)
            return
        added = self._leftovers[name].was_added_to()
        if added is not None:
            self._unsettled.remove(name)
        if added is False:
            del self._leftovers[name]
        if added:
            yield (
                f"self.{name}: gradients that it has stepped with are still there, and the next "
                f"ones are added to them; expected self.{name}.clear_grad() after each step()."
            )


def _leftover(optimizer: Any) -> _Leftover | None:
    """The smallest gradient that is not all zeros; None if there is none."""
    found = [p for p in parameters_of(optimizer) if p.grad_ is not None]
    dense = [p for p in found if not p.grad_.is_selected_rows()]
    for parameter in sorted(dense, key=lambda p: int(p.size))[:_SMALLEST]:
        gradient = parameter.grad_
        if _is_some(gradient):
            content, version = gradient.detach().clone(), gradient.inplace_version
            return _Leftover(parameter, _sample(parameter), gradient, content, version)
    return None


def _sample(parameter: Any) -> Any:
    """A copy of some elements, from all over it."""
    step = max(1, int(parameter.size) // _ELEMENTS)
    return parameter.detach().flatten()[::step].clone()


def _is_some(gradient: Any) -> bool:
    return bool(gradient.astype("bool").any())


def _differ(one: Any, other: Any) -> bool:
    return bool((one != other).any())
