"""What predict_batch returned, sample by sample.

split({"logits": logits, "name": names})     # [{"logits": …, "name": …}, …], one per sample
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle

from expbase.state.arrays import to_numpy


def split(outputs: Any) -> list[Any]:
    """The outputs of a batch, sample by sample; tensors become numpy arrays and numbers.

    Args:
        outputs: A tensor or array [B, …], a mapping or tuple of such, or a list of B results.

    Raises:
        TypeError: It is something else.
        ValueError: Its parts have different lengths.
    """
    if isinstance(outputs, Mapping):
        return [dict(zip(outputs, row, strict=True)) for row in _rows(outputs.values())]
    if isinstance(outputs, tuple):
        make = getattr(outputs, "_make", tuple)  # a named one stays so
        return [make(row) for row in _rows(outputs)]
    if isinstance(outputs, list):
        return [_plain(value) for value in outputs]
    array = to_numpy(outputs) if isinstance(outputs, paddle.Tensor) else outputs
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeError(
            f"predict_batch: returned {outputs!r}; expected a tensor or array with the batch as "
            "its first axis, a mapping or tuple of them, or a list with one entry per sample."
        )
    return list(array)


def _rows(parts: Iterable[Any]) -> list[tuple[Any, ...]]:
    columns = [split(part) for part in parts]
    if len({*map(len, columns)}) > 1:
        raise ValueError(
            f"predict_batch: returned parts of {[*map(len, columns)]} results; expected as many "
            "in each as there are samples."
        )
    return list(zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return to_numpy(value).item() if value.size == 1 else to_numpy(value)
    return value
