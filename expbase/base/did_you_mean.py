"""What somebody may have meant by a name that is not known.

did_you_mean("modle", ["model", "optim"])    # " Did you mean 'model'?"
did_you_mean("zzz", ["model", "optim"])      # " Expected one of model, optim."
did_you_mean("optim.rate", ["optim.lr", "model.rates"])    # " Expected one of optim.lr."
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_LIKENESS = 0.6  # 0 to 1


def did_you_mean(
    name: str,
    known: Iterable[object],
    likeness: float = _LIKENESS,
    *,
    otherwise: str | None = None,
    shown: Callable[[str], str] = repr,
) -> str:
    """Returns the end of a message about an unknown name: the known one that is most like it.

    Args:
        name: The unknown name.
        known: The known names.
        likeness: How much like it a name must be: 0 to 1.
        otherwise: The end if none is like it; by default all names, or those of its section.
        shown: Returns what is shown of a known name.
    """
    texts = [*map(str, known)]
    # The last part alone finds a key that was written without its section or under a wrong one.
    near = [text for text in texts if text.split(".")[-1] == name.split(".")[-1]]
    # A key of a known section is compared within it: the name of the section, which all of them
    # have, would make any two alike.
    section = name[: name.rfind(".") + 1]
    if not any(text.startswith(section) for text in texts):
        section = ""
    texts = [text for text in texts if text.startswith(section)]
    keys = [text.removeprefix(section) for text in texts]
    near = near or [section + key for key in nearest(name.removeprefix(section), keys, likeness)]
    if near:
        return f" Did you mean {shown(near[0])}?"
    return f" Expected one of {', '.join(texts)}." if otherwise is None else otherwise


def nearest(name: str, known: Iterable[str], likeness: float = _LIKENESS) -> list[str]:
    """Returns the known name that is most like another one, if one is so much like it, 0 to 1."""
    import difflib  # here: only a mistake needs it

    return difflib.get_close_matches(name, known, 1, likeness)
