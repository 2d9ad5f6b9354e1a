"""The sum of the gradients of all shares of an update, in one order on any number of processes.

They are added in a binary tree, ((0+1)+(2+3))+((4+5)+(6+7)): on a rank, which has 2^n shares in a
row, by a stack of partial sums; between the ranks in the order of their numbers. So every sum has
the same two parts, whoever computes it.

    tree = GradientTree(parameters)
    tree.begin()
    for number in range(4): ...; tree.add_share(number)    # forward and backward of one share
    tree.add_up()                                          # each parameter has the sum

Source: the tree of a reduction that can be repeated, as in Demmel and Nguyen, Parallel Reproducible
Summation, 2013. DataParallel sums in the order that its backend likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle
import paddle.distributed as dist

from expbase.ranks import world
from expbase.state.arrays import gradient

Gradients = dict[str, Any]  # tensors by the path of their parameter

_BUCKET = 1 << 23  # numbers that the ranks send at a time


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

    def add_up(self) -> None:
        """After the last share of this rank: sets the sum over all ranks."""
        parameters = dict(self._parameters)
        with paddle.no_grad():
            total = _over_ranks(self._sums.pop(), parameters)
        for path, grad in _sum(self._before, total).items():
            parameters[path]._set_grad_ivar(grad)

    def _take(self) -> Gradients:
        taken = {}
        for path, parameter in self._parameters:
            grad = gradient(parameter)
            if grad is None:
                continue
            if grad.is_selected_rows():
                raise TypeError(
                    f"self.{path}: has a sparse gradient, which training.shares cannot add; "
                    "expected an Embedding with sparse=False."
                )
            taken[path] = grad.clone()  # the memory of the other one is freed
            parameter.clear_gradient(False)
        return taken


def _sum(left: Gradients, right: Gradients) -> Gradients:
    """Adds to the left ones in place; a parameter may have a gradient in one of them only."""
    with paddle.no_grad():
        return right | {p: g.add_(right[p]) if p in right else g for p, g in left.items()}


def _over_ranks(here: Gradients, parameters: Mapping[str, Any]) -> Gradients:
    if world.world_size() == 1:
        return here
    # A rank may have no gradient where another one has one.
    has_any = world.max_over_ranks(*(path in here for path in parameters))
    by_type: dict[Any, dict[str, Any]] = {}
    for (path, parameter), has in zip(parameters.items(), has_any, strict=True):
        if has:
            by_type.setdefault(parameter.dtype, {})[path] = parameter
    total: Gradients = {}
    for of_type in by_type.values():  # in the order of the parameters, so the same on all ranks
        flat = paddle.concat([_flat(here.get(path), p) for path, p in of_type.items()])
        parts = _tree_sum(flat).split([math.prod(p.shape) for p in of_type.values()])
        for (path, parameter), part in zip(of_type.items(), parts, strict=True):
            total[path] = part.reshape(parameter.shape)
    return total


def _flat(grad: Any, parameter: Any) -> Any:
    if grad is not None:
        return grad.reshape([-1])
    # Minus zero is what changes no number that it is added to, a zero of either sign included.
    return paddle.full([math.prod(parameter.shape)], -0.0, parameter.dtype)


def _tree_sum(flat: Any) -> Any:
    """The sum over the ranks. They send each other all parts: any backend can, and moves bytes."""
    sums = []
    for start in range(0, flat.shape[0], _BUCKET):
        part = flat[start : start + _BUCKET].contiguous()
        received = paddle.empty([part.shape[0] * world.world_size()], part.dtype)
        dist.stream.all_gather(received, part)
        parts = received.split(world.world_size())
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        sums += parts
    return paddle.concat(sums)
