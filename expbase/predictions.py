"""What predict_batch returned, sample by sample. A leaf.

split({"logits": logits, "name": names})     # [{"logits": …, "name": …}, …], one per sample
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from expbase.state.arrays import to_numpy


def split(outputs: Any) -> list[Any]:
    """The outputs of a batch, sample by sample; tensors become numpy arrays and numbers.

    Args:
        outputs: A tensor or array [B, …], a mapping or tuple of such (each sample gets one of
            the same kind), or a list with one entry for each sample.

    Raises:
        TypeError: It is something else.
        ValueError: Its parts have different lengths.
    """
    if isinstance(outputs, Mapping):
        parts = {name: split(part) for name, part in outputs.items()}
        rows = _together(list(parts.values()))
        return [dict(zip(parts, row, strict=True)) for row in rows]
    if isinstance(outputs, tuple):
        rows = _together([split(part) for part in outputs])
        make = getattr(outputs, "_make", tuple)  # a named one stays so
        return [make(row) for row in rows]
    if isinstance(outputs, list):
        return [_without_paddle(value) for value in outputs]
    array = to_numpy(outputs) if isinstance(outputs, paddle.Tensor) else outputs
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeError(
            f"predict_batch: returned {outputs!r}; expected a tensor or array with the batch as "
            "its first axis, a mapping or tuple of them, or a list with one entry per sample."
        )
    return list(array)


def _together(columns: list[list[Any]]) -> list[tuple[Any, ...]]:
    if len({*map(len, columns)}) > 1:
        raise ValueError(
            f"predict_batch: returned parts of {[*map(len, columns)]} results; expected as many "
            "in each as there are samples."
        )
    return list(zip(*columns, strict=True))


def _without_paddle(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return to_numpy(value).item() if value.size == 1 else to_numpy(value)
    return value
