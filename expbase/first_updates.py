"""What the first updates of a start did: has a parameter changed, was anything logged?

Nothing is certain after one update: a learning rate may begin at 0, a GradScaler may skip,
gradients may wait for more batches, a replay buffer may be filled first. So it is asked again
whenever twice as many updates were made, where something is due anyway, until it is known. Of a
parameter a few elements are compared: an optimizer leaves no other trace (not in
`inplace_version`).

    first = FirstUpdates(optimizers, iteration)
    for level, text in first.look(iteration, is_last=False, has_logged=True): ...
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from expbase.state.entries import Gradients
from expbase.state.objects import parameters_of

# Updates without a change that are suspicious: while gradients add up, and without any.
PATIENCE, LONG_PATIENCE = 100, 1000
_ELEMENTS = 64  # of a parameter that are compared, at least

_UNCHANGED = (
    "no parameter has changed in {} updates, and there are {}gradients; expected loss.backward() "
    "and optimizer.step() in train_batch, with a learning rate above 0."
)
_LEFT = (
    "{:.3g} MB of gradients are left after the update, and each checkpoint holds them. If you add "
    "them up over iterations, all is well; else call clear_grad() right after step(), or the next "
    "ones are added to them."
)
_NOT_LOGGED = (
    "nothing was logged in {} updates, so there is no curve, and a loss that is not finite is not "
    "noticed; expected self.log(loss=loss) in train_batch."
)


class FirstUpdates:
    """Looks at the parameters of optimizers while the first updates of a start are made."""

    def __init__(self, optimizers: Iterable[Any], iteration: int) -> None:
        self.began = iteration  # of the last update before
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        self._gradients = Gradients([(p.name, p) for p in parameters])
        self._before = [(p, _sample(p)) for p in parameters if p._is_initialized()]
        self._open = {"change", "gradients", "log"}  # what is not known yet
        self._next = 1

    def look(self, iteration: int, *, is_last: bool, has_logged: bool) -> Iterator[tuple[int, str]]:
        """What is to be told after an update, each once, with the level of its line.

        It is the last one if the config asks for no more; `has_logged` is of the whole start.
        """
        updates = iteration - self.began
        if not self._open or (updates < self._next and not is_last):
            return
        self._next = 2 * updates
        # A start that continues a run may be too short for what comes every now and then.
        is_all = is_last and not self.began
        held = self._gradients.state_dict().values()
        left = sum(array.data.nbytes for array in held if array)
        # Running statistics, which change in the forward, are frozen parameters.
        if any(bool((_sample(p) != b).any()) for p, b in self._before if not p.stop_gradient):
            self._open.discard("change")
            self._before = []
        if "change" in self._open and (is_all or updates >= (PATIENCE if left else LONG_PATIENCE)):
            self._open -= {"change", "gradients"}
            yield logging.WARNING, _UNCHANGED.format(updates, "" if left else "no ")
        if left and "gradients" in self._open and "change" not in self._open:
            self._open.remove("gradients")
            yield logging.INFO, _LEFT.format(left / 1e6)
        if "log" in self._open and (has_logged or is_all or updates >= LONG_PATIENCE):
            self._open.remove("log")
            if not has_logged:
                yield logging.WARNING, _NOT_LOGGED.format(updates)


def _sample(parameter: Any) -> Any:
    """A copy of some elements, from all over it."""
    step = max(1, int(parameter.size) // _ELEMENTS)
    return parameter.detach().flatten()[::step].clone()
