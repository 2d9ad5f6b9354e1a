"""Small entries of a checkpoint: the environment, what the user adds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import paddle

from expbase.state import rng


class Environment:
    """What the bits of a run depend on beside its state; compared, not restored."""

    def state_dict(self) -> dict[str, str]:
        """Version of paddle, kind of device, number of threads."""
        return {
            "paddle": paddle.__version__,
            "device": paddle.device.get_device().partition(":")[0],
            "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Compares; returns reasons why continuing is not exact."""
        return [
            f"{name}: {state.get(name)} there, {now} now: kernels may sum in another order"
            for name, now in self.state_dict().items()
            if state.get(name) != now
        ]


class OwnStates:
    """What on_save_checkpoint returns and on_load_checkpoint takes; `fire` calls an event.

    Both run under random states of their own: what they draw has no effect on training.
    """

    def __init__(self, fire: Callable[..., Any]) -> None:
        self._fire = fire

    def state_dict(self) -> dict[str, Any]:
        """What on_save_checkpoint returns."""
        with rng.isolated():
            return dict(self._fire("on_save_checkpoint") or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Hands it to on_load_checkpoint; always exact, as far as we know."""
        with rng.isolated():
            self._fire("on_load_checkpoint", dict(state))
        return []
