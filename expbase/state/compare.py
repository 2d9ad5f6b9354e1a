"""What stood in a place, in a form that can be compared later, in another process, too.

then = look(value, names)        # a number or a text itself, a name, or a checksum of it all
is_same(then, look(value, names))
as_text(then)                    # for another process
Looked({"train_loader.dataset": data}).first_change({"train_loader.dataset": data})  # its path
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from expbase.base.files import checksum_of
from expbase.base.json_values import SIMPLE, Names, seen
from expbase.state.value_kinds import talks_to_the_world
from expbase.state.value_places import WHOLE, StatefulNode
from expbase.state.walk import Walk, unwrap


class Seen(NamedTuple):
    """The value that stood in a place."""

    content: str  # a checksum of all that would be written
    thing: Any = None  # what cannot be saved, and is the same as long as it is the same object


class Named(NamedTuple):
    """The name of what stood in a place, a layer say, which setup has made at another place."""

    name: str
    is_wrapped: bool = False  # in a DataParallel, say; one that is thawed is wrapped anew


def look(value: Any, names: Names, *, is_whole: bool = False) -> Any:
    """Returns a place's value to compare later: a simple value itself, else a checksum.

    With `is_whole` it is a checksum of what the object itself holds.
    """
    if type(value) in SIMPLE:
        return value
    layer = unwrap(value)
    if not is_whole and (name := names.name_of(layer)) is not None:
        return Named(name, is_wrapped=layer is not value)
    found = seen(value, names, is_inside=is_whole)
    return Seen(found.content, None if found.is_savable else value)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two looks at a place saw the same value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Seen):
        return one.thing is other.thing and bool(one.content == other.content)
    return repr(one) == repr(other) if type(one) is float else bool(one == other)


class Looked:
    """What stood in each place that some values lead to.

    Args:
        values: By the paths at which an experiment has them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {**values}
        walk = Walk(None, values)
        self._names = walk.names()
        self._looks = _looks_in(walk, self._names)

    def first_change(self, values: Mapping[str, Any]) -> str | None:
        """Returns the path of something that is another now; None: all is as it was.

        Args:
            values: Those of now, by the same paths.
        """
        replaced = next((p for p, value in values.items() if value is not self._values[p]), None)
        if replaced is not None:
            return replaced
        before, walk = self._looks, Walk(None, values)
        now = _looks_in(walk, self._names.now(walk))
        paths = {**before, **now}
        same = {p for p in before.keys() & now.keys() if is_same(before[p], now[p])}
        return next((path for path in paths if path not in same), None)


def _looks_in(walk: Walk, names: Names) -> dict[str, Any]:
    """Returns a look at each place by path; a file or the like is as None."""
    looks = {}
    for path, node in walk.nodes.items():
        is_asked = isinstance(node, StatefulNode)
        asked = {"state_dict()": node.value.state_dict()} if is_asked else {}
        for key, value in (*node.places().items(), *asked.items()):
            is_file = type(value) not in SIMPLE and talks_to_the_world(value)
            there = None if is_file else look(value, names, is_whole=key is WHOLE)
            looks[walk.path_of(path, key)] = there
    return looks


def is_known(there: Any) -> bool:
    """Returns whether another process can compare a value that was looked at."""
    return not (isinstance(there, Seen) and there.thing is not None)


def is_value(there: Any) -> bool:
    """Returns whether what was looked at can be saved by itself: it is no thing with a name."""
    return type(there) in SIMPLE or (isinstance(there, Seen) and there.thing is None)


def as_text(there: Any) -> str:
    """Returns a value that was looked at as a text, which another process can compare."""
    if isinstance(there, Seen):
        return there.content
    if isinstance(there, Named):  # as a checkpoint has it
        return f"{checksum_of([json.dumps({'$ref': there.name}).encode()]):08x}"
    is_long = type(there) is int and there.bit_length() > 63  # Python shows none of 4,300 digits
    text = f"{type(there).__name__} {hex(there) if is_long else repr(there)}"
    return text if len(text) < 64 else f"{checksum_of([text.encode(errors='replace')]):08x}"
