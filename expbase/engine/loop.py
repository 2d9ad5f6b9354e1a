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

from expbase.engine.stop import StopReason

_SAVED = ("iteration", "epoch", "todo", "may_be_best_at")
_LOOP = "`while self.going_on(): self.train_batch(); self.end_iteration()`"


class Life(enum.Enum):
    """What a run has done last."""

    NEW = "made, not set up"
    READY = "set up"
    RESTORED = "its state is restored, or begun"
    TRAINING = "in train()"
    ENDED = "training is over"
    CLOSED = "closed"

    def need_setup(self, name: str) -> None:
        """Raises a RuntimeError if a method is called before setup()."""
        if self is Life.NEW:
            raise RuntimeError(f"{name}: called before setup(); expected exp.setup() first.")

    def need_open(self) -> None:
        """Raises a RuntimeError if run() is called before setup(), or after the end."""
        self.need_setup("run")
        if self is Life.CLOSED:
            raise RuntimeError("run: this experiment is closed; make a new one.")


class Step(enum.Enum):
    """Where the loop is."""

    OUTSIDE = "before the first iteration of this start, or after the last one"
    BETWEEN = "between two iterations"
    WITHIN = "in an iteration that self.end_iteration() has not ended"
    ENDING = "in end_iteration()"


@dataclass(slots=True)
class LoopState:
    """What the loop remembers from one iteration to the next."""

    iteration: int = 0  # updates done, with the one under way
    epoch: int = 0  # epochs begun
    began: int = 0  # the iteration at which this start began
    step: Step = Step.OUTSIDE
    is_over: bool = False  # there is no iteration after this one
    todo: list[str] = field(default_factory=list)  # what is to be done before the next iteration
    epochs_before: int = 0  # epochs that were used up when the last iteration ended
    validated_at: int = -1  # the iteration of the last validation
    results: dict[str, float] = field(default_factory=dict)  # of the last validation
    save_requested: bool = False  # save() was called within the iteration
    may_be_best_at: int = -1  # the iteration of the last checkpoint that may be the best one
    saved_at: int = -1  # the iteration of the last checkpoint
    stopped_by: StopReason = StopReason.NONE  # why all ranks end before the end
    failure: BaseException | None = None  # what ended the run, if anything did

    def end(self) -> None:
        """There is no further iteration."""
        self.is_over = True
        self.step = Step.OUTSIDE

    def has_finished(self, *, is_last: bool) -> bool:
        """Whether training came to its end; is_last: the config asks for no more."""
        is_done = self.is_over and not self.todo  # a stop may have left it
        return is_done and self.failure is None and (is_last or self.stopped_by is StopReason.CALL)

    def count_from(self, name: str, number: int) -> None:
        """Sets the iteration or the epoch; an AttributeError if the loop counts."""
        if self.step is not Step.OUTSIDE:
            raise AttributeError(
                f"self.{name}: {number!r} given; expected it to be set in startup() alone, since "
                "the template counts. Choose another name for yours."
            )
        setattr(self, name, number)

    def need(self, step: Step, method: str) -> None:
        """Raises a RuntimeError unless the loop is where a method may be called."""
        if self.step is not step:
            raise RuntimeError(f"{method}: called {self.step.value}; expected {_LOOP} in train().")

    def check_end(self) -> None:
        """Raises a RuntimeError if train(), maybe the user's own, left an iteration open."""
        if self.step is Step.WITHIN:
            raise RuntimeError(
                f"train: returned within iteration {self.iteration}; expected self.end_iteration() "
                "after each self.train_batch()."
            )

    def check_savable(self) -> None:
        """Raises a RuntimeError if the state is not one to go on from."""
        if self.failure is not None:
            raise RuntimeError(
                f"save: iteration {self.iteration} failed, and the state is half its update; the "
                "run continues from the checkpoint before."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it; the rest belongs to one start."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restores what `state_dict` returned; always exact."""
        for name in _SAVED:
            if type(state[name]) is not type(getattr(self, name)):
                raise TypeError(f"loop.{name}: {state[name]!r:.80}")
            setattr(self, name, state[name])
        return []
