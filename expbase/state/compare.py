"""What stood in a place, in a form that can be compared later, in another process, too.

then = look(value, names)        # a number or a text itself, a name, or a checksum of it all
is_same(then, look(value, names))
as_text(then)                    # for another process
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from expbase.base.files import checksum_of
from expbase.base.json_values import Names, seen

SIMPLE = {type(None), bool, int, float, str}


class Seen(NamedTuple):
    """The value that stood in a place."""

    content: str  # a checksum of all that would be written
    thing: Any = None  # what cannot be saved, and is the same as long as it is the same object


class Named(NamedTuple):
    """The name of what stood in a place, a layer say, which setup has made at another place."""

    name: str


def look(value: Any, names: Names, *, is_whole: bool = False) -> Any:
    """Returns a place's value to compare later: a simple value itself, else a checksum.

    With `is_whole` it is a checksum of what the object itself holds.
    """
    if type(value) in SIMPLE:
        return value
    if not is_whole and (name := names.name_of(value)) is not None:
        return Named(name)
    found = seen(value, names, is_inside=is_whole)
    return Seen(found.content, None if found.is_savable else value)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two looks at a place saw the same value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Seen):
        return one.thing is other.thing and bool(one.content == other.content)
    return repr(one) == repr(other) if type(one) is float else bool(one == other)


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
