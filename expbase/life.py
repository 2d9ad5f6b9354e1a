"""Where a run is in its life, and where its loop is: the two state machines, drawn.

    Life:  NEW -- setup --> READY -- resume_or_load --> RESTORED -- train --> TRAINING --> ENDED
           any of them -- close, or a failure --> CLOSED

    Step:  OUTSIDE -- the first going_on --> BETWEEN -- going_on --> WITHIN -- end_iteration -->
           ENDING --> BETWEEN; or, after the last iteration or a stop, OUTSIDE, and it is over

A leaf: nothing is decided here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from expbase.stopping import StopReason

_SAVED = ("todo", "planned_at")
_LOOP = "`while self.going_on(): self.train_batch(); self.end_iteration()`"


class Life(enum.Enum):
    """What a run has done last."""

    NEW = "made, not set up"
    READY = "set up"
    RESTORED = "its state is restored, or begun"
    TRAINING = "in train()"
    ENDED = "training is over"
    CLOSED = "closed"


class Step(enum.Enum):
    """Where the loop is."""

    OUTSIDE = "before the first iteration of this start, or after the last one"
    BETWEEN = "between two iterations"
    WITHIN = "in an iteration that self.end_iteration() has not ended"
    ENDING = "in end_iteration()"


@dataclass(slots=True)
class LoopState:
    """What the loop remembers from one iteration to the next."""

    step: Step = Step.OUTSIDE
    is_over: bool = False  # there is no iteration after this one
    next_due: int = 0  # before this iteration nothing is due, unless an epoch ends; 0: look now
    todo: list[str] = field(default_factory=list)  # what is to be done before the next iteration
    epochs_before: int = 0  # epochs that were used up when the last iteration ended
    validated_at: int = -1  # the iteration of the last validation
    results: dict[str, float] = field(default_factory=dict)  # of the last validation
    save_requested: bool = False  # save() was called within the iteration
    planned_at: int = -1  # the iteration of the last checkpoint that may be the best one
    saved_at: int = -1  # the iteration of the last checkpoint
    stopped_by: StopReason = StopReason.NONE  # why all ranks end before the end
    failure: BaseException | None = None  # what ended the run, if anything did

    def wake(self) -> None:
        """Makes the loop look at the end of this iteration what is due."""
        self.next_due = 0

    def need(self, step: Step, method: str) -> None:
        """Raises a RuntimeError unless the loop is where a method may be called."""
        if self.step is not step:
            raise RuntimeError(f"{method}: called {self.step.value}; expected {_LOOP} in train().")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the rest belongs to one start."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        for name in _SAVED:
            setattr(self, name, state[name])
        return []
