"""Where a run is in its life, and where its loop is: the two state machines, drawn.

Life:  NEW -- setup --> IN_SETUP --> READY -- resume_or_load --> RESTORED
       RESTORED -- train --> TRAINING --> ENDED; at the end that the config asks for --> FINISHED
       RESTORED -- one that has finished is given again --> TRAINING, without train()
       TRAINING -- a failure --> ENDED, for on_exception and on_train_end
       any of them -- close, or a failure --> CLOSED

Step:  OUTSIDE -- the first going_on --> BETWEEN -- going_on --> WITHIN -- end_iteration -->
       ENDING --> BETWEEN; or, after the last iteration or a stop, OUTSIDE, and it is over
       OUTSIDE -- what the start before has left of an iteration --> ENDING
       any of them -- the end, or a failure --> OUTSIDE
"""

from __future__ import annotations

import enum

from expbase.base.errors import RuntimeMistake
from expbase.events import own_classes


class Life(enum.Enum):
    """What a run has done last."""

    NEW = "made, not set up"
    IN_SETUP = "in setup()"
    READY = "set up"
    RESTORED = "its state is restored, or begun"
    TRAINING = "in train()"
    ENDED = "training is over"
    FINISHED = "it has come to its end, by the config or by stop()"
    CLOSED = "closed"

    def need_setup(self, name: str, experiment: object) -> None:
        """Raises a RuntimeError if a method of the experiment is called before setup()."""
        if self in (Life.NEW, Life.IN_SETUP):
            raise RuntimeMistake(
                f"{name}: called before setup(); expected exp.setup() first."
                f"{_own_setup(type(experiment))}"
            )

    def need_training(self, name: str) -> None:
        """Raises a RuntimeError if a method is called where what it notes would be lost."""
        if self in (Life.NEW, Life.IN_SETUP, Life.READY, Life.CLOSED):
            when = "after the end" if self is Life.CLOSED else "in setup"
            raise RuntimeMistake(
                f"{name}: called {when}, where it would be lost; expected it in training, from "
                "on_train_begin to on_train_end, or in an evaluation."
            )

    def need_open(self, experiment: object) -> None:
        """Raises a RuntimeError if run() is called before setup(), or after the end."""
        self.need_setup("run", experiment)
        if self is Life.CLOSED:
            raise RuntimeMistake("run: this experiment is closed; make a new one.")


def _own_setup(experiment: type) -> str:
    """Says what an overridden setup() must do; nothing if it is not overridden."""
    names = [base.__name__ for base in own_classes(experiment) if "setup" in vars(base)]
    if not names:
        return ""
    return (
        f" {names[0]} overrides setup, and must call super().setup() there: it does all the steps, "
        "from setup_output_dir to setup_model, and more. What is yours goes before or after it."
    )


class Step(enum.Enum):
    """Where the loop is."""

    OUTSIDE = "before the first iteration of this start, or after the last one"
    BETWEEN = "between two iterations"
    WITHIN = "in an iteration that self.end_iteration() has not ended"
    ENDING = "in end_iteration()"
