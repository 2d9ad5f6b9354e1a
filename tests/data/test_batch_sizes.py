"""How many samples are in a batch, and when something is to be said of the number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expbase.data.batch_sizes import count_samples


def a(*shape: int) -> Any:
    return np.zeros(shape, "float32")


IMAGES = [a(3, 8, 8)] * 4  # as they are, in a list


@pytest.mark.parametrize(
    ("batch", "asked", "number", "told"),
    [
        ([a(4, 2), a(4)], 4, 4, ""),
        ({"lengths": a(7), "x": [a(5, 4), a(4)]}, 4, 4, ""),  # one has the samples first
        ([a(3, 2), a(3)], 4, 3, "3"),  # one sample was left out
        ([a(0, 2), a(0)], 4, 0, "0"),
        (a(20, 2), 4, 20, "20"),  # five crops of each
        ([a(9, 4, 2), a(9, 4)], 4, 4, "9"),  # time comes first
        ({"tokens": a(30), "ends": a(5)}, 4, 4, "30, 5"),
        ([a(1, 2), a(1)], 2, 1, "1"),  # a list of two, which are no samples
        ([a(3, 8), a(3, 8)], 2, 2, ""),  # and of two that are
        (IMAGES, 4, 4, ""),
        ([IMAGES, [{"box": a(k, 5)} for k in (1, 2, 0, 6)]], 4, 4, ""),
        (["a", "b", a()], 3, 3, ""),
        ([a(3, 2), a(3)], None, 3, ""),
        ({"frames": a(9, 3, 2), "label": a(3)}, None, 9, "9, 3"),
        (["a", a()], None, None, ""),
    ],
)
def test_the_samples_of_a_batch(batch: Any, asked: int | None, number: int, told: str) -> None:
    what = f"have {told} first in their tensors" if told else ""
    what += f", and {asked} samples have gone into collate_fn" if told and asked is not None else ""
    assert count_samples(batch, asked) == (number, what)
