"""What the first updates of a start did: has a parameter changed, was anything logged?

Early, nothing is certain: a learning rate may begin at 0, a GradScaler may skip, gradients may wait
for more batches, a replay buffer may be filled first. So there is one look, after many updates or
after the last one. Of a parameter a few elements are compared: an optimizer leaves no other trace
(not in `inplace_version`).

    first = FirstUpdates(optimizers, iteration)
    for text in first.look(iteration, is_last=False, has_logged=True): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from expbase.state.objects import parameters_of

LOOK_AFTER = 1000  # updates
_ELEMENTS = 64  # of a parameter that are compared, at least

_UNCHANGED = (
    "no parameter has changed in {} updates; expected loss.backward() and optimizer.step() in "
    "train_batch, with a learning rate above 0."
)
_NOT_LOGGED = (
    "nothing was logged in {} updates, so a loss that is not finite is not noticed; expected "
    "self.log(loss=loss) in train_batch."
)


class FirstUpdates:
    """Compares the parameters of optimizers with what they were at the beginning of a start."""

    def __init__(self, optimizers: Iterable[Any], iteration: int) -> None:
        self.began = iteration  # of the last update before
        self.was_checked = False  # what the first one alone shows
        self._is_open = True
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        # Running statistics, which change in the forward, are frozen parameters.
        trained = [p for p in parameters if p._is_initialized() and not p.stop_gradient]
        self._before = [(parameter, _sample(parameter)) for parameter in trained]

    def look(self, iteration: int, *, is_last: bool, has_logged: bool) -> Iterator[str]:
        """What is to be told after an update.

        It is the last one if the config asks for no more; `has_logged` is of the whole start.
        """
        updates = iteration - self.began
        # A start that continues a run may be too short for what comes every now and then.
        is_all = is_last and not self.began
        if not self._is_open or not (is_all or updates >= LOOK_AFTER):
            return
        self._is_open = False
        if not any(bool((_sample(p) != before).any()) for p, before in self._before):
            yield _UNCHANGED.format(updates)
        self._before = []
        if not has_logged:
            yield _NOT_LOGGED.format(updates)


def _sample(parameter: Any) -> Any:
    """A copy of some elements, from all over it."""
    step = max(1, int(parameter.size) // _ELEMENTS)
    return parameter.detach().flatten()[::step].clone()
