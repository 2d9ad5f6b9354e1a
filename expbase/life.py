"""The stages in the life of an experiment.

experiment.life is Life.TRAINING
"""

from __future__ import annotations

import enum


class Life(enum.Enum):
    """Where an experiment stands; it only goes forward."""

    NEW = "new"  # made; setup() has not ended
    READY = "ready"  # setup() has ended
    RESTORED = "restored"  # the state of a checkpoint, or none, is in place; see resume_or_load
    TRAINING = "training"  # between the first and the last iteration of this start
    ENDED = "ended"  # training is over, finished or not
    CLOSED = "closed"
