"""What any object has: attributes, maybe in slots, a state that it gives and takes, a class.

attributes_of(meter)              # {"sum": 1.5, "count": 3}; set_attribute(meter, "count", 4)
state_setter(meter)               # its set_state_dict or load_state_dict; None: it has no state
class_named(class_name(Meter))    # Meter, in any process that has imported it
function_named(class_name(function)); method_named(meter, "reset")
"""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import sys
import types
from typing import Any

_SLOT = types.MemberDescriptorType
_slots: dict[int, tuple[type, dict[str, Any]]] = {}  # by the id of a class, which it keeps
# Of Python's own modules those whose functions compute; of others none comes by a name from a file.
_COMPUTING = {"math", "cmath", "operator", "statistics", "__main__"}


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
    found = {}
    for name, slot in slots_of(type(value)).items():
        with contextlib.suppress(AttributeError):  # it is empty
            found[name] = slot.__get__(value)
    return {**found, **own}


def slots_of(kind: type) -> dict[str, Any]:
    """Returns the slots of a class by name, also those that a property hides."""
    known = _slots.get(id(kind))
    if known is None:
        found = {
            name: next(
                (
                    vars(base)[name]
                    for base in kind.__mro__
                    if isinstance(vars(base).get(name), _SLOT)
                ),
                None,
            )
            for name in copyreg._slotnames(kind)  # type: ignore[attr-defined]
        }
        known = kind, {name: slot for name, slot in found.items() if slot is not None}
        _slots[id(kind)] = known
    return known[1]


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute as it was read: no code of its class runs, and no property hinders it.

    Raises:
        LookupError: It has no place for one of that name.
    """
    slot = slots_of(type(owner)).get(name)
    own = getattr(owner, "__dict__", None)
    if slot is not None:
        slot.__set__(owner, value)
    elif own is not None:
        own[name] = value
    else:
        raise LookupError(f"a {type(owner).__qualname__} has no attribute {name!r:.80}")


def remove_attribute(owner: Any, name: str) -> None:
    """Removes an attribute that is there; no code of its class runs."""
    slot = slots_of(type(owner)).get(name)
    if slot is not None:
        slot.__delete__(owner)
    else:
        del owner.__dict__[name]


def definer(kind: type, name: str) -> type:
    """Returns the class of which a method is inherited."""
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


def module_of(thing: Any) -> str:
    """Returns the name of the module of a class or a function; "" if it has none.

    A function that `exec` makes in a bare namespace has None there, as has a class of `type()`.
    """
    module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) else ""


def class_name(kind: Any) -> str:
    """Returns the name of a class or a function in a file: module and name. The script's module is
    left out.
    """
    module = "numpy" if _is_of_numpy(kind) else module_of(kind)
    name = getattr(kind, "__qualname__", kind.__name__)
    return f"{'' if module in ('__main__', '__mp_main__') else module}.{name}"


def class_named(name: str) -> type | None:
    """Returns the class of this name (see `class_name`) in the modules that are loaded, or None."""
    found = _named(name)
    return found if isinstance(found, type) else None


def is_function(value: Any) -> bool:
    """Returns whether a value is a function that a module may have by a name."""
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    return isinstance(value, kinds) or _is_of_numpy(value)


def _is_of_numpy(value: Any) -> bool:
    # Not by its class: whoever imports this file needs no numpy.
    return type(value).__name__ == "ufunc" and type(value).__module__ == "numpy"


def function_named(name: str) -> Any:
    """Returns the function of this name in the modules that are loaded, or None."""
    found = _named(name)
    root = name.partition(".")[0]
    is_open = root not in sys.stdlib_module_names or root in _COMPUTING
    return found if is_function(found) and is_open else None


def method_named(owner: Any, name: str) -> Any:
    """Returns a method of an object, or a class method of its class; None if it has none."""
    function = inspect.getattr_static(type(owner), name, None)
    if isinstance(function, classmethod):
        return types.MethodType(function.__func__, type(owner))
    return types.MethodType(function, owner) if isinstance(function, types.FunctionType) else None


def _named(name: str) -> Any:
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        module = sys.modules.get(".".join(words[:count]) or "__main__")
        if module is not None:
            found: Any = module
            for word in words[count:]:
                found = vars(found).get(word) if hasattr(found, "__dict__") else None
            if isinstance(found, staticmethod):
                return found.__func__
            return found
    return None
