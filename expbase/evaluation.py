"""Evaluating without a trace: what the models do inside is not felt by the training after it.

A leaf: which models, and under which seed, is passed in.

    with without_a_trace(layers, seed):
        results = valid()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import paddle

from expbase import rng


@contextlib.contextmanager
def without_a_trace(layers: Iterable[Any], seed: int) -> Iterator[None]:
    """Eval mode, no gradients, random states of its own; all as before afterwards.

    Args:
        layers: Whose mode is set; each sublayer gets back the one that it had.
        seed: Of the random states inside.
    """
    sublayers = [s for layer in layers for s in layer.sublayers(include_self=True)]
    modes = [layer.training for layer in sublayers]
    try:
        with rng.isolated(seed), paddle.no_grad():
            for layer in sublayers:
                layer.training = False
            yield
    finally:
        for layer, mode in zip(sublayers, modes, strict=True):
            layer.training = mode
