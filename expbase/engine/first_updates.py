"""What the first updates of a start did: has a parameter changed, was a batch read, a loss logged?

Early, nothing is certain: a learning rate may begin at 0, a GradScaler may skip, gradients may wait
for more batches, a replay buffer may be filled first. So there is one look, after many updates or
after the last one. Of a parameter a few elements are compared: an optimizer leaves no other trace
(not in `inplace_version`).

    first = FirstUpdates(optimizers)
    for text in first.look(has_logged=True, has_read=True): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from expbase.state.parts import parameters_of

LOOK_AFTER = 1000  # updates
_ELEMENTS = 64  # of a parameter that are compared, at least


class FirstUpdates:
    """Compares the parameters of optimizers with what they were at the beginning of a start."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        # Running statistics, which change in the forward, are frozen parameters.
        trained = [p for p in parameters if p._is_initialized() and not p.stop_gradient]
        self._before = [(parameter, _sample(parameter)) for parameter in trained]

    def has_changed(self) -> bool:
        """Returns whether any parameter is another one than at the beginning."""
        return any(bool((_sample(p) != before).any()) for p, before in self._before)

    def look(self, *, has_logged: bool, has_read: bool) -> Iterator[str]:
        """Yields each thing that is missing: how it goes on after "in 1000 updates"."""
        if self._before and not self.has_changed():  # an optimizer of no base has none
            yield (
                "no parameter has changed; expected loss.backward() and optimizer.step() in "
                "train_batch, with a learning rate above 0."
            )
        if not has_logged:
            yield (
                "nothing was logged, so a loss that is not finite is not noticed; expected "
                "self.log(loss=loss) in train_batch."
            )
        if not has_read:
            yield (
                "train_batch did not call self.read_batch(): the data it takes is not in the "
                "order of the seed, is not continued after a stop, and ends no epoch."
            )


def _sample(parameter: Any) -> Any:
    """Returns a copy of some elements, from all over it."""
    step = max(1, int(parameter.size) // _ELEMENTS)
    return parameter.detach().flatten()[::step].clone()
