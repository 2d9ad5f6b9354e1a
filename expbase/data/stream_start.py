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
from expbase.base.generator_states import GENERATORS, copied_generator, generator_kind
from expbase.base.json_values import SIMPLE, checksum
from expbase.state.value_places import WHOLE, Node, WholeNode

_MOST_BYTES = 1 << 26  # of an array; a larger one is data, and no order


class StreamStart:
    """The attributes of a stream that are numbers, texts, arrays, generators, and lists of numbers,
    of texts, or of tuples of these.

    Args:
        owners: The objects whose attributes they are, by name.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._nodes = {name: Node(one) for name, one in owners.items() if has_attributes(one)}
        self._made = self._copies()
        self._begun: dict[str, Any] = {}

    def _copies(self) -> dict[str, Any]:
        return {
            f"{name}.{key}": _copied(value)
            for name, node in self._nodes.items()
            for key, value in node.places().items()
            if _may_move(value)
        }

    def note(self) -> None:
        """Notes what stands there now; at the beginning of a pass."""
        now = self._copies().items()
        self._begun = {p: v for p, v in now if not (p in self._made and _is_same(v, self._made[p]))}

    def state_dict(self) -> dict[str, Any]:
        """Returns what was noted, by path, but for what setup makes."""
        return self._begun

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` returned, in place where another name may lead to it."""
        self._begun = {path: value for path, value in state.items() if _may_move(value)}
        for path, value in self._begun.items():
            name, _, key = path.partition(".")
            node = self._nodes.get(name)
            if node is None or not node.may_have(key):  # of another class, or forged
                continue
            now = node.places().get(key)
            if _is_like(now, value):
                WholeNode(now).put(WHOLE, value)
            else:
                node.put(key, _copied(value))


def _may_move(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_BYTES and value.dtype != object
    if type(value) in (list, deque):
        return all(_is_fixed(item) for item in value)
    return _is_fixed(value) or isinstance(value, GENERATORS)


def _is_fixed(value: Any) -> bool:
    """Returns whether a value is a number, a text, or a tuple of these: no pass changes it."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in SIMPLE or isinstance(value, np.generic)


def _copied(value: Any) -> Any:
    return copied_generator(value) if isinstance(value, GENERATORS) else copy.copy(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, deque)):  # of items that are mostly the same objects
        return type(one) is type(other) and bool(one == other)
    return checksum(one) == checksum(other)


def _is_like(now: Any, value: Any) -> bool:
    """Returns whether one can be put into the other."""
    if isinstance(now, np.ndarray) and isinstance(value, np.ndarray):
        return bool(now.shape == value.shape and now.dtype == value.dtype and now.flags.writeable)
    if isinstance(now, GENERATORS) and isinstance(value, GENERATORS):
        return generator_kind(now) == generator_kind(value)
    return type(now) is type(value) and isinstance(now, (list, deque))
