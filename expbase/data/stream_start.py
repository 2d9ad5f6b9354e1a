"""What the attributes of a stream were when its pass began.

A stream is replayed up to a position. If a pass moves its own attributes, as one does that shuffles
a list of files or draws from a generator of its own, it must begin from what stood there then.

    start = StreamStart({"dataset": dataset})     # as setup has made it
    start.note()                                  # a pass begins
    state = start.state_dict()                    # what setup has made otherwise
    start.put_back(state)                         # in another process, before the replay
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from expbase.base.any_object import has_attributes
from expbase.base.generator_states import GENERATORS
from expbase.base.json_values import SIMPLE, checksum
from expbase.state.value_places import WHOLE, Node, WholeNode

_MOST_BYTES = 1 << 26  # of an array; a larger one is data, and no order


class StreamStart:
    """The attributes of a stream that are numbers, texts, arrays, generators, or lists of them.

    Args:
        owners: The objects whose attributes they are, by name.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._nodes = {name: Node(one) for name, one in owners.items() if has_attributes(one)}
        self._made = {path: checksum(value) for path, value in self._values().items()}
        self._begun: dict[str, Any] = {}

    def _values(self) -> dict[str, Any]:
        return {
            f"{name}.{key}": value
            for name, node in self._nodes.items()
            for key, value in node.places().items()
            if _may_move(value)
        }

    def note(self) -> None:
        """Notes what stands there now; at the beginning of a pass."""
        self._begun = {
            path: copy.deepcopy(value) if isinstance(value, GENERATORS) else copy.copy(value)
            for path, value in self._values().items()
            if checksum(value) != self._made.get(path)
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted, by path, but for what setup makes."""
        return self._begun

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` returned."""
        self._begun = dict(state)
        for path, value in state.items():
            name, _, key = path.partition(".")
            node = self._nodes.get(name)
            if node is None or not node.may_have(key):  # by another class, or forged
                continue
            now = node.places().get(key)
            if type(now) is type(value) and _is_like(now, value):
                WholeNode(now).put(WHOLE, value)
            else:
                node.put(key, copy.copy(value))


def _may_move(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES
    return isinstance(value, GENERATORS) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a text, or a list that begins with such."""
    if type(value) in (list, tuple, deque):
        return not value or _is_plain(value[0])
    return type(value) in SIMPLE or isinstance(value, np.generic)


def _is_like(now: Any, value: Any) -> bool:
    """Returns whether one can be put into the other, to which another name may lead."""
    if isinstance(now, np.ndarray):
        return bool(now.shape == value.shape and now.dtype == value.dtype)
    return isinstance(now, (list, deque, *GENERATORS))
