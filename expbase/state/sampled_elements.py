"""A few elements of tensors, to see later whether one is another than it was.

An optimizer leaves no other trace of a step in a parameter (not in `inplace_version`).

    before = Samples(optimizers)
    before.have_changed()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expbase.state.parts import parameters_of

_ELEMENTS = 64  # of a tensor that are compared, at least


class Samples:
    """Some elements of each parameter that optimizers train."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        parameters = [p for optimizer in optimizers.values() for p in parameters_of(optimizer)]
        # Running statistics, which change in the forward, are frozen parameters.
        trained = [p for p in parameters if p._is_initialized() and not p.stop_gradient]
        self.of = [(parameter, sample(parameter)) for parameter in trained]

    def have_changed(self) -> bool:
        """Returns whether any parameter is another one than it was."""
        return any(is_other(sample(parameter), before) for parameter, before in self.of)


def sample(tensor: Any) -> Any:
    """Returns a copy of some elements, from all over it."""
    step = max(1, int(tensor.size) // _ELEMENTS)
    return tensor.detach().flatten()[::step].clone()


def is_other(one: Any, other: Any) -> bool:
    """Returns whether a sample of a tensor is not what another one is, or a number."""
    return bool((one != other).any())
