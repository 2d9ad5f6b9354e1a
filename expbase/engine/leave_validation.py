"""How all ranks leave a validation together, since the run is to stop: two counters in the store.

way_out = ValidationExit(requests)         # made on all ranks, for one validation
way_out.before_batch()                     # raises ValidationLeft on a rank that leaves
way_out.while_waiting()                    # of a rank that has read all its batches
"""

from __future__ import annotations

import itertools
import time

from expbase.engine.stop import StopReason, StopRequests
from expbase.ranks import store

_LOOK_SECONDS = 0.1  # between two looks for a reason to leave
_exits = itertools.count()  # numbers those of this process


class ValidationLeft(BaseException):
    """A validation was left, since the run stops. Not an Exception: valid() should not catch it."""


class ValidationExit:
    """How all ranks leave a validation, when one of them has a reason to stop from outside.

    A rank leaves before a batch, and says so in the processes' store. One that has read all its
    batches waits for the others; it asks them to leave, and leaves when another one has. So nobody
    leaves once all have come to where they wait for each other: all go on from there, or none does.
    All ranks make the same ones, in the same order.
    """

    def __init__(self, requests: StopRequests) -> None:
        number = next(_exits)
        self._requests = requests
        self._asked = f"expbase/asked/{number}"
        self._left = f"expbase/left/{number}"
        self._next_look = 0.0
        self._is_time = False  # to look; not at each of many quick batches

    def before_batch(self) -> None:
        """Raises ValidationLeft if this rank, or another one, has a reason to stop."""
        if self._has_reason() or self._asks(self._asked) or self._asks(self._left):
            store.add(self._left, 1)
            raise ValidationLeft

    def while_waiting(self) -> None:
        """Raises ValidationLeft if another rank has left; call it again and again."""
        if self._has_reason():
            store.add(self._asked, 1)
        if self._asks(self._left):
            raise ValidationLeft

    def _has_reason(self) -> bool:
        now = time.monotonic()
        self._is_time = now >= self._next_look
        if self._is_time:
            self._next_look = now + _LOOK_SECONDS
            self._requests.poll()
        return self._requests.reason > StopReason.CALL

    def _asks(self, key: str) -> bool:
        return self._is_time and store.add(key, 0) > 0
