"""The sum of the gradients of all shares of an update, in one order on any number of processes.

They are added in a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)): on a rank, which has 2^n shares in a
row, by a stack of partial sums; between the ranks in the order of their numbers. So every sum has
the same two parts, whoever computes it.

    tree = GradientTree(parameters)
    tree.begin()
    for number in range(4): ...; tree.add_share(number)    # forward and backward of one share
    tree.add_up({})                                        # each parameter has the sum

Source: the tree of a reduction that can be repeated, as in Demmel and Nguyen, Parallel Reproducible
Summation, 2013. DataParallel sums in the order that its backend likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle
import paddle.distributed as dist

from expbase.base.arrays import LABELS, dtype_name
from expbase.base.errors import TypeMistake
from expbase.base.gradients import gradient, set_gradient
from expbase.ranks import collectives

Gradients = dict[str, Any]  # tensors by the path of their parameter

_BUCKET = 1 << 23  # numbers that the ranks send at a time
_TYPES = [*LABELS]  # by whose places the ranks tell each other of what type a gradient is


class GradientTree:
    """The gradients of `parameters`, which are named by their paths."""

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._find = parameters
        self._parameters: list[tuple[str, Any]] = []
        self._before: Gradients = {}  # what there was before the first share
        self._sums: list[Gradients] = []  # of 2^n shares each, the largest first

    def begin(self) -> None:
        """Puts aside what there is already: a user may add up several iterations."""
        self._parameters = [*self._find()]
        self._before = self._take()
        self._sums = []

    def add_share(self, number: int) -> None:
        """Takes the gradients of a share, counted on this rank from 0; they are cleared."""
        self._sums.append(self._take())
        while number % 2:  # two sums of equally many shares are there
            last = self._sums.pop()
            self._sums.append(_sum(self._sums.pop(), last))
            number //= 2

    def add_up(self, from_zero: Mapping[str, Any]) -> None:
        """Ends an update, after the last share of this rank: sets the sum over all ranks.

        The tensors `from_zero`, by names that no parameter has, become on each rank what they are
        on rank 0. They are sent together with the gradients.
        """
        parameters = dict(self._parameters)
        own = self._sums.pop()
        if collectives.rank() == 0:
            own |= from_zero
        with paddle.no_grad():
            total = _over_ranks(own, {**parameters, **from_zero})
            for path, tensor in from_zero.items():
                tensor.copy_(total.pop(path), False)
            for path, grad in _sum(self._before, total).items():
                set_gradient(parameters[path], grad)

    def _take(self) -> Gradients:
        taken = {}
        for path, parameter in self._parameters:
            grad = gradient(parameter)
            if grad is None:
                continue
            if grad.is_selected_rows():
                raise TypeMistake(
                    f"self.{path}: has a sparse gradient, which training.shares cannot add; "
                    "expected an Embedding with sparse=False."
                )
            taken[path] = grad.clone()  # the memory of the other one is freed
            set_gradient(parameter, None)
        return taken


def _sum(left: Gradients, right: Gradients) -> Gradients:
    """Adds to the left ones in place; a parameter may have a gradient in one of them only."""
    with paddle.no_grad():
        return right | {p: g.add_(right[p]) if p in right else g for p, g in left.items()}


def _over_ranks(own: Gradients, parameters: Mapping[str, Any]) -> Gradients:
    if collectives.world_size() == 1:
        return own
    # 0: no gradient on this rank. Another one may have one.
    here = [_TYPES.index(dtype_name(own[p])) + 1 if p in own else 0 for p in parameters]
    types = collectives.max_over_ranks(*here)
    total: Gradients = {}
    for number in sorted({*types} - {0}):
        paths = [p for p, of in zip(parameters, types, strict=True) if of == number]
        dtype = _TYPES[int(number) - 1]
        sums = _tree_sum(paddle.concat([_flat(own.get(p), parameters[p], dtype) for p in paths]))
        parts = sums.split([math.prod(parameters[p].shape) for p in paths])
        shaped = {
            p: part.reshape(parameters[p].shape) for p, part in zip(paths, parts, strict=True)
        }
        total |= shaped
    return total


def _flat(grad: Any, parameter: Any, dtype: str) -> Any:
    if grad is not None:
        return grad.reshape([-1])
    # Minus zero is what changes no number that it is added to, a zero of either sign included.
    return paddle.full([math.prod(parameter.shape)], -0.0, dtype)


def _tree_sum(flat: Any) -> Any:
    """Returns the sum over the ranks, which send each other all parts: any backend moves bytes."""
    sums = []
    for start in range(0, flat.shape[0], _BUCKET):
        own = flat[start : start + _BUCKET].contiguous()
        received = paddle.empty([own.shape[0] * collectives.world_size()], own.dtype)
        dist.stream.all_gather(received, own)
        parts = received.split(collectives.world_size())
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        sums += parts
    return paddle.concat(sums)
