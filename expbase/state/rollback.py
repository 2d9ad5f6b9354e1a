"""A copy of what nodes hold, to be put back: so a validation has no effect on training.

before = Rollback(nodes)
before.restore()
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import paddle

from expbase.base.generator_states import GENERATORS, generator_state, set_generator_state
from expbase.base.gradients import gradient, set_gradient
from expbase.state.value_places import WHOLE, Node, WholeNode

_NOTHING: Any = object()


class Rollback:
    """A copy of what nodes hold, to be put back."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._kept = [(node, _kept(node)) for node in nodes if not _is_empty(node.value)]

    def restore(self) -> None:
        """Puts back the values that have changed, and removes those that are new."""
        for node, before in self._kept:
            if isinstance(node.value, GENERATORS):
                set_generator_state(node.value, before)
                continue
            if isinstance(node, WholeNode):
                if before is not None:
                    node.put(WHOLE, before)
                continue
            now = dict(node.places())
            for key in now.keys() - before.keys():
                node.remove(key)
            for key, value in before.items():
                if now.get(key, _NOTHING) is not value:
                    node.put(key, value)


def _is_empty(value: Any) -> bool:
    """Returns whether a value is a tensor without memory, as paddle's recurrent layers have one
    (paddle/nn/layer/rnn.py, RNNBase.flatten_parameters).
    """
    return isinstance(value, paddle.Tensor) and value.size > 0 and not value._is_initialized()


def _kept(node: Node) -> Any:
    value = node.value
    if not isinstance(node, WholeNode):
        return dict(node.places())
    if isinstance(value, GENERATORS):
        return generator_state(value)
    if isinstance(value, paddle.Tensor):
        if not value._is_initialized():
            return None
        kept = value.detach().clone()
        kept.stop_gradient = value.stop_gradient
        if (grad := gradient(value)) is not None:
            set_gradient(kept, grad.clone())
        return kept
    return copy.copy(value)
