"""A part of a checkpoint: it gives its state, says what of a state does not fit, and takes one.

state = part.state_dict()
if not part.problems(state):
reasons = part.load_state_dict(state)    # why continuing is not exact
"""

from __future__ import annotations

from typing import Any


class Part:
    """What every part of a checkpoint has."""

    def state_dict(self) -> Any:
        """Returns its state for a checkpoint; tensors may be live views."""
        raise NotImplementedError

    def problems(self, state: Any) -> list[str]:
        """Returns the reasons why a state cannot be restored: none. Changes nothing."""
        return []

    def load_state_dict(self, state: Any) -> list[str]:
        """Restores a state; returns reasons why continuing is not exact."""
        raise NotImplementedError
