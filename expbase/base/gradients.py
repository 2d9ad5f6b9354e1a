"""The gradients of parameters and other tensors: asked for, copied, and set, in one way.

kept = copies_of(parameters)           # before what may leave gradients
for parameter, grad in kept: set_gradient(parameter, grad)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from expbase.base.arrays import Array, local, numbers, on_device


def gradient(tensor: Any) -> Any:
    """Returns a tensor's gradient; None if it has none, or, with placements, an empty one."""
    grad = tensor.grad_
    is_empty = grad is not None and grad.is_dist() and not local(grad)._is_initialized()
    return None if is_empty else grad


def dense_gradient(tensor: Any) -> Any:
    """Returns a tensor's gradient; None if there is none, or one of an Embedding's few rows."""
    grad = gradient(tensor)
    return None if grad is None or grad.is_selected_rows() else grad


def are_set(gradients: Iterable[Any]) -> list[bool]:
    """Returns whether each gradient has an element other than zero; waits once for a device."""
    parts = [*map(local, gradients)]
    if not (parts and on_device(parts[0])):  # where one is there are the others, nearly always
        return [bool(Array.of(part).data.any()) for part in parts]
    with paddle.amp.auto_cast(False):  # which would make zeros of small numbers
        return [*map(bool, numbers((g != 0).any() if g.size else False for g in parts))]


def set_gradient(tensor: Any, grad: Any) -> None:
    """Makes a tensor the gradient of another one; None: it has none afterwards, as at first.

    The caller must not use it any more: where there is no gradient yet, it is that one, not a copy.
    None is another thing than zeros: with momentum an optimizer moves the weights of these.
    """
    if grad is not None:
        now = gradient(tensor)
        # Into the memory of the one that is there, which others may share: the buffers that fleet
        # sums up over the ranks, of
        # paddle/distributed/fleet/meta_parallel/sharding/group_sharded_storage.py, GradStorage.
        # Nothing waits for the device.
        if now is not None and (now.dtype, now.shape) == (grad.dtype, grad.shape):
            now.copy_(grad, False)
        elif grad.dtype == tensor.dtype:
            tensor._copy_gradient_from(grad)
        else:
            tensor.grad = grad  # which waits
        tensor._unset_fake_empty()  # if it was cleared, the next backward would overwrite it
    elif gradient(tensor) is not None:
        tensor.clear_gradient(False)  # paddle 3.0 takes no None


def set_zero_gradient(tensor: Any) -> None:
    """Gives a tensor a gradient of zeros, as clear_grad() leaves it: a backward overwrites it."""
    if gradient(tensor) is None:
        tensor.grad = tensor.detach()  # a copy, which is memory for zeros
    tensor.clear_gradient(True)


def copies_of(tensors: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns each tensor once with a copy of its gradient, None if it has none.

    One with the gradient of an Embedding's few rows, which cannot be copied, is left out.
    """
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    found = [(tensor, gradient(tensor)) for tensor in distinct]
    return [
        (tensor, None if grad is None else grad.clone())
        for tensor, grad in found
        if grad is None or not grad.is_selected_rows()
    ]
