"""Where a run is in its life, and where its loop is: the two state machines, drawn.

    Life:  NEW -- setup --> READY -- resume_or_load --> RESTORED -- train --> TRAINING --> ENDED
           any of them -- close, or a failure --> CLOSED

    Step:  OUTSIDE -- run --> BETWEEN -- going_on --> WITHIN -- end_iteration --> ENDING
           ENDING -- perhaps SAVING --> BETWEEN, or OVER after the last iteration or a stop

A leaf: nothing is decided here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from expbase.stopping import StopReason


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

    OUTSIDE = "not in train()"
    BETWEEN = "between two iterations"
    WITHIN = "in an iteration: after going_on(), before end_iteration()"
    ENDING = "in end_iteration()"
    SAVING = "writing the checkpoint of an iteration that ends"
    OVER = "no further iteration"


_LOOP = "`while self.going_on(): self.train_batch(); self.end_iteration()` in train()."
_EXPECTED = {
    "going_on": f"expected self.end_iteration() before it, as in {_LOOP}",
    "end_iteration": f"expected self.going_on() before it, as in {_LOOP}",
    "train": f"expected self.end_iteration() before the return, as in {_LOOP}",
}


@dataclass
class LoopState:
    """What the loop remembers from one iteration to the next.

    Attributes:
        step: Where it is.
        next_due: Before this iteration nothing is due, unless the epoch ends; 0: look now.
        epoch_is_open: Whether an epoch began whose on_train_epoch_end has not come yet.
        epochs_ended: Used-up epochs, when the last iteration ended.
        validated_at: The iteration of the last validation.
        saved_at: The iteration of the last checkpoint.
        results: Of the last validation.
        save_requested: Whether save() was called within the iteration.
        score_counts: Whether the checkpoint to be saved may be the best one.
        first_update_checked: Whether what only the first update shows was looked at.
        stopped_by: Why training ends before its end, as all ranks agreed.
        failure: What ended the run, if anything did.
    """

    step: Step = Step.OUTSIDE
    next_due: int = 0
    epoch_is_open: bool = False
    epochs_ended: int = 0
    validated_at: int = -1
    saved_at: int = -1
    results: dict[str, float] = field(default_factory=dict)
    save_requested: bool = False
    score_counts: bool = True
    first_update_checked: bool = False
    stopped_by: StopReason = StopReason.NONE
    failure: BaseException | None = None

    def begin(self, epochs_ended: int, stopped_by: StopReason) -> None:
        """Training begins; a stop may have been asked for already."""
        self.epochs_ended, self.stopped_by = epochs_ended, stopped_by
        self.step = Step.OVER if stopped_by else Step.BETWEEN

    def wake(self) -> None:
        """Makes the loop look at the end of this iteration what is due."""
        self.next_due = 0

    def need(self, step: Step, method: str) -> None:
        """Checks that the loop is where a method may be called.

        Raises:
            RuntimeError: It is not.
        """
        if self.step is not step:
            raise RuntimeError(f"{method}: called {self.step.value}; {_EXPECTED[method]}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the rest belongs to one start."""
        return {"epoch_is_open": self.epoch_is_open}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        self.epoch_is_open = state["epoch_is_open"]
        return []
