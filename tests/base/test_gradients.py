"""Gradients that are set: in whose memory, and what the next backward makes of them."""

from __future__ import annotations

import paddle
import pytest

from expbase.base.gradients import copies_of, gradient, set_gradient, set_zero_gradient

pytestmark = pytest.mark.device


def parameter() -> paddle.Tensor:
    made = paddle.create_parameter([2], "float32")
    (made * 3).sum().backward()
    return made


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_gradient_that_is_set_is_in_the_memory_that_others_share(is_cleared: bool) -> None:
    one = parameter()
    shared = gradient(one)
    [(_, kept)] = copies_of([one])
    one.clear_gradient(is_cleared)
    if is_cleared:
        set_gradient(one, kept)
    else:
        set_zero_gradient(one)
        shared = gradient(one)
        set_gradient(one, kept)
    assert shared.tolist() == [3, 3]
    (one * 4).sum().backward()
    assert gradient(one).tolist() == [7, 7]


def test_a_gradient_that_is_set_where_there_was_none_is_added_to() -> None:
    one = paddle.create_parameter([2], "float32")
    set_gradient(one, paddle.full([2], 5.0))
    (one * 4).sum().backward()
    assert gradient(one).tolist() == [9, 9]
    set_gradient(one, None)
    assert gradient(one) is None
