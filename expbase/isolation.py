"""A block that has no effect on training: eval mode, no gradients, random states of its own.

A leaf: which layers and which seed is passed in.

    with isolated_eval(layers, seed=rng.derive(0, rng.VALID, 400)):
        ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import paddle

from expbase.state import rng


@contextlib.contextmanager
def isolated_eval(
    layers: Iterable[Any], seed: int, parameters: Iterable[Any] = ()
) -> Iterator[None]:
    """Eval mode, no gradients, random states of its own; all as before afterwards.

    Args:
        layers: Whose mode is set; each sublayer gets back the one that it had.
        seed: Of the random states inside.
        parameters: That belong to no layer.
    """
    layers = list(layers)
    sublayers = [s for layer in layers for s in layer.sublayers(include_self=True)]
    gradients = _Gradients([*parameters, *(p for layer in layers for p in layer.parameters())])
    modes = [layer.training for layer in sublayers]
    try:
        with rng.isolated(seed), paddle.no_grad():
            for layer in sublayers:
                layer.training = False
            yield
    finally:
        for layer, mode in zip(sublayers, modes, strict=True):
            layer.training = mode
        gradients.put_back()


class _Gradients:
    """The gradients of parameters: a saliency map, say, leaves some, and the next update adds them.

    Those that are none or zeros, as after an update, are not copied.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        known = {id(p): p for p in parameters}.values()
        dense = [p for p in known if p.grad_ is not None and not p.grad_.is_selected_rows()]
        # One question to the device for all of them.
        flags = (
            paddle.stack([p.grad_.astype("bool").any() for p in dense]).tolist() if dense else []
        )
        self._none = [p for p in known if p.grad_ is None]
        self._zero = [p for p, flag in zip(dense, flags, strict=True) if not flag]
        self._some = [(p, p.grad_.clone()) for p, flag in zip(dense, flags, strict=True) if flag]

    def put_back(self) -> None:
        for parameter in self._none:
            if parameter.grad_ is not None:
                parameter.clear_gradient(False)
        for parameter in self._zero:
            if parameter.grad_ is None:
                parameter.grad = paddle.zeros_like(parameter)
            parameter.clear_gradient(True)
        for parameter, gradient in self._some:
            # Not set or copied to: after clear_gradient the next backward would overwrite it.
            parameter._set_grad_ivar(gradient)
