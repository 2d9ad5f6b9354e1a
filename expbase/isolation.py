"""A block that has no effect on training: eval mode, and no gradients.
A leaf: which layers is passed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import paddle

from expbase.state.arrays import gradient, local


@contextlib.contextmanager
def isolated_eval(layers: Iterable[Any], parameters: Iterable[Any] = ()) -> Iterator[None]:
    """Eval mode, no gradients; all as before afterwards.

    `parameters` are those that belong to no layer; they keep their gradients, too.
    """
    layers = list(layers)
    sublayers = [s for layer in layers for s in layer.sublayers(include_self=True)]
    parameters = [*parameters, *(p for layer in layers for p in layer.parameters())]
    modes = [layer.training for layer in sublayers]
    try:
        with _gradients_kept(parameters), paddle.no_grad():
            for layer in sublayers:
                layer.training = False
            yield
    finally:
        for layer, mode in zip(sublayers, modes, strict=True):
            layer.training = mode


@contextlib.contextmanager
def _gradients_kept(parameters: Iterable[Any]) -> Iterator[None]:
    """A saliency map, say, leaves gradients, and the next update would add them."""
    known = {id(p): p for p in parameters}.values()
    none = [p for p in known if gradient(p) is None]
    dense = [p for p in known if gradient(p) is not None and not p.grad_.is_selected_rows()]
    # One question to the device for all of them. Zeros, as after an update, are not copied.
    any_set = [local(p.grad_).astype("bool").any() for p in dense]
    flags = paddle.stack(any_set).tolist() if dense else []
    zero = [p for p, flag in zip(dense, flags, strict=True) if not flag]
    some = [(p, p.grad_.clone()) for p, flag in zip(dense, flags, strict=True) if flag]
    try:
        yield
    finally:
        for parameter in none:
            if parameter.grad_ is not None:
                parameter.clear_gradient(False)
        for parameter in zero:
            if parameter.grad_ is None:
                parameter.grad = paddle.zeros_like(parameter)
            parameter.clear_gradient(True)
        for parameter, kept in some:
            # Not set or copied to: after clear_gradient the next backward would overwrite it.
            parameter._set_grad_ivar(kept)
