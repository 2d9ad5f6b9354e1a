"""Why ranks have parted: the causes, from what a save has found to differ."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from starts import layer_and_optimizer

from expbase.base.arrays import Array
from expbase.checkpoint.compare_rank_weights import Difference
from expbase.doctor.why_ranks_differ import advice
from expbase.state.parts import StatefulObjects

OWN = "each rank trains a model of its own"
ROUNDING = "differs in the last bits alone, as machines round that are not alike: in their pro"
WEIGHT, BIAS = ("model", "weight"), ("model", "bias")
OWNERS = {WEIGHT: "model.weight", BIAS: "model.bias"}


def of_ranks(dtype: str, factor: float) -> list[dict[Any, Array]]:
    """Elements of two ranks, of which the other one's are so much greater."""
    values = paddle.linspace(1, 2, 50, "float32")
    return [{n: Array.of((values * by).astype(dtype)) for n in OWNERS} for by in (1, factor)]


def said(found: StatefulObjects, elements: Any, rates: Any = (), **more: Any) -> list[str]:
    return [*advice(Difference(more.get("owners", OWNERS), {*rates}, elements, found))]


@pytest.mark.parametrize(
    ("dtype", "factor", "cause"),
    [
        ("float32", 1 + 2e-7, ROUNDING),
        ("float32", 1.001, f"{OWN}, although its layer is in data_parallel. The usual causes: a"),
        ("float32", float("nan"), OWN),
        ("bfloat16", 1.01, ROUNDING),
        ("int64", 2, OWN),
        ("float32", 1, OWN),  # where other elements differ than these
    ],
)
def test_a_difference_in_the_last_bits_has_another_cause(
    dtype: str, factor: float, cause: str
) -> None:
    [line] = said(layer_and_optimizer(wrapped=True), of_ranks(dtype, factor))
    assert line.startswith(f"model.bias and 1 more: {cause}")


def test_what_is_in_no_wrapper_each_rank_trains_for_itself() -> None:
    assert said(layer_and_optimizer(wrapped=False), of_ranks("float32", 1 + 2e-7)) == [
        f"model.bias and 1 more: {OWN}. Put what you train into self.data_parallel and call that "
        "in train_batch."
    ]


def test_numbers_of_updates_are_seen_by_the_powers_that_adam_keeps() -> None:
    owners = {**OWNERS, ("optimizer", "beta1_pow_acc/model.bias"): "model.bias"}
    lines = said(layer_and_optimizer(wrapped=True), of_ranks("float32", 1.5), owners=owners)
    assert lines[0].startswith("model.bias: the ranks have made unlike numbers of its updates. Wh")
    assert lines[1].startswith(f"model.weight: {OWN}, although its layer is in data_parallel. The")


def test_a_rate_explains_what_its_optimizer_updates_and_is_told_if_it_has_done_nothing_yet() -> (
    None
):
    rate = "must come from what all ranks have alike: self.average a rank's own number before a sc"
    found = layer_and_optimizer(wrapped=True)
    [line] = said(found, of_ranks("float32", 1.5), ["optimizer"])
    assert line.startswith(
        f"model.bias and 1 more: each rank trains with a learning rate of its own, which {rate}"
    )
    [line] = said(found, [], ["optimizer"], owners={})
    assert line.startswith(f"optimizer: the learning rate {rate}")


def test_a_tensor_that_is_in_another_shape_on_one_rank_is_no_rounding() -> None:
    other = {WEIGHT: Array.of(paddle.ones([3])), BIAS: Array.of(paddle.ones([50]))}
    [line] = said(layer_and_optimizer(wrapped=True), [of_ranks("float32", 1)[0], other])
    assert OWN in line
    [line] = said(layer_and_optimizer(wrapped=True), [of_ranks("float32", 1)[0], {}])
    assert OWN in line
