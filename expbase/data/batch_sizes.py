"""How many samples are in a batch: what a number that is logged in a validation weighs.

Of a loader of paddle's it is known how many samples went into collate_fn, which may leave some out,
or make several of one: then the first axes of the tensors tell, if they agree.

    count_samples([images, labels], asked=4)    # 3 if both have 3 first, and a text that says so
    count_samples({"frames": frames, "label": label}, asked=None)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def count_samples(batch: Any, asked: int | None) -> tuple[int | None, str]:
    """Counts the samples in a batch.

    Args:
        batch: As the loader yields it.
        asked: The samples that went into collate_fn; None: unknown.

    Returns:
        Their number, None if nothing tells it; and what is to be said of it, "" if it is certain.
    """
    shapes = []
    for shape in _shapes(batch):
        if shape[0] == asked:
            return asked, ""
        shapes.append(shape)
    if not shapes or (asked is not None and _is_list_of_samples(batch, asked)):
        return asked, ""
    first = int(shapes[0][0])
    sizes = [*dict.fromkeys(int(shape[0]) for shape in shapes)]
    is_agreed = len(sizes) == 1
    text = f"have {', '.join(map(str, sizes[:4]))} first in their tensors"
    if asked is None:
        return first, "" if is_agreed else text
    is_second = all(asked in shape for shape in shapes)  # as where time comes first
    number = first if is_agreed and not is_second else asked
    return number, f"{text}, and {asked} samples have gone into collate_fn"


def _shapes(batch: Any) -> Iterator[Any]:
    """Yields the shape of each tensor or array with axes in a batch."""
    for part in parts_of(batch):
        yield from _shapes(part)
    shape: Any = getattr(batch, "shape", ())
    if len(shape):
        yield shape


def _is_list_of_samples(batch: Any, asked: int, *, is_inner: bool = False) -> bool:
    """Returns whether a batch, or a part of it, is a list that has each sample as an item.

    A batch of two samples may be a list of two, and so may be one of a tensor and its labels: items
    that are samples are alike.
    """
    is_list = isinstance(batch, (list, tuple)) and len(batch) == asked
    if is_list and (is_inner or len({*map(_kind, batch)}) == 1):
        return True
    return any(_is_list_of_samples(part, asked, is_inner=True) for part in parts_of(batch))


def parts_of(batch: Any) -> Iterable[Any]:
    """Returns what a mapping, a list or a tuple holds; nothing of another value."""
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (list, tuple)) else ()


def _kind(item: Any) -> tuple[Any, ...]:
    return type(item), getattr(item, "ndim", 0), getattr(item, "dtype", None)
