"""What any object has: attributes, maybe in slots, a state that it gives and takes, a class.

attributes_of(meter)              # {"sum": 1.5, "count": 3}; set_attribute(meter, "count", 4)
state_setter(meter)               # its set_state_dict or load_state_dict; None: it has no state
class_named(class_name(Meter))    # Meter, in any process that has imported it
"""

from __future__ import annotations

import copyreg
import sys
from typing import Any


def has_attributes(value: Any) -> bool:
    """Returns whether an object may have attributes that Python can set."""
    return hasattr(value, "__dict__") or bool(type(value).__dict__.get("__slots__"))


def state_setter(candidate: Any) -> Any:
    """Returns the method that loads a state, by either of its names; None if there is no state to
    save.
    """
    kind = type(candidate)  # an object itself may answer to any name
    if not hasattr(kind, "state_dict"):
        return None
    names = [name for name in ("set_state_dict", "load_state_dict") if hasattr(kind, name)]
    return getattr(candidate, names[0]) if names else None


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of one object, those in slots, too."""
    own = getattr(value, "__dict__", {})
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    if not names:
        return dict(own)
    return {**{name: getattr(value, name) for name in names if hasattr(value, name)}, **own}


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute as it was read: no code of its class runs, and no property hinders it."""
    own = getattr(owner, "__dict__", None)
    if own is not None and name not in copyreg._slotnames(type(owner)):  # type: ignore[attr-defined]
        own[name] = value
    else:
        object.__setattr__(owner, name, value)


def definer(kind: type, name: str) -> type:
    """Returns the class of which a method is inherited."""
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def class_name(kind: type) -> str:
    """Returns the name of a class in a file: module and class. The script's module is left out."""
    module = kind.__module__
    return f"{'' if module in ('__main__', '__mp_main__') else module}.{kind.__qualname__}"


def class_named(name: str) -> type | None:
    """Returns the class of this name (see `class_name`) in the modules that are loaded, or None."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        module = sys.modules.get(".".join(words[:count]) or "__main__")
        if module is not None:
            found: Any = module
            for word in words[count:]:
                found = vars(found).get(word) if hasattr(found, "__dict__") else None
            return found if isinstance(found, type) else None
    return None
