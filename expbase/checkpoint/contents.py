"""What a checkpoint holds: its entries, in the order of restoring, and the smaller ones of them.

Entries are captured in the reverse order. What on_save_checkpoint returns is asked for before
anything is looked at, and comes back to on_load_checkpoint after everything is restored.

    entries = in_order(objects=found, loop=loop, data=data, …)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle

from expbase.base.checkpoint_part import Part
from expbase.base.device import kind_of
from expbase.base.errors import TypeMistake
from expbase.base.gradients import are_set, dense_gradient, set_gradient, set_zero_gradient
from expbase.state.parts import StatefulObjects, named_parameters

OBJECTS = "objects"  # the attributes with state: their tensors are files of their own
DIVIDED = "shares"  # of which each rank has a part, by names that no other one has
VALUES = "values"
LOOP = "loop"
USERS = "own"  # what on_save_checkpoint returns


def in_order(
    *,
    objects: StatefulObjects,
    divided: Part,
    loop: Part,
    values: Part,
    data: Part,
    is_stream: bool,
    log: Part,
    listeners: Part,
    own: Mapping[str, Any],
    fire: Callable[..., Any],
) -> dict[str, Part]:
    """Returns the entries of a checkpoint, in the order of restoring.

    `own` is what on_save_checkpoint has returned, and `fire` calls an event.

    Objects come first, since values may stand in them. A sampler must be what it was before the
    data ask it; a stream is replayed by the data, which changes values, so these come after. What
    the user restores comes last, and may override everything.
    """
    position: dict[str, Part] = {VALUES: values, "data": data}
    return {
        OBJECTS: objects,
        DIVIDED: divided,
        LOOP: loop,
        **(dict(reversed(position.items())) if is_stream else position),
        "gradients": Gradients(named_parameters(objects)),
        "log": log,
        "listeners": listeners,
        "environment": Environment(),
        USERS: UserStates(own, fire),
    }


class Gradients(Part):
    """The gradients of `named_parameters`: a user may add them up over several iterations."""

    def __init__(self, parameters: Iterable[tuple[str, Any]]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        """Returns the dense gradients by parameter; None for one that is all zeros.

        A gradient of zeros is not the same as no gradient: with momentum an optimizer moves the
        weights of the one and not those of the other. A parameter without one has no entry.
        """
        found = [(name, dense_gradient(parameter)) for name, parameter in self._parameters]
        found = [(name, grad) for name, grad in found if grad is not None]
        gradients = {}
        for (name, grad), is_set in zip(found, are_set([g for _, g in found]), strict=True):
            if grad.is_dist() and is_set:
                text = "a gradient with placements cannot be saved; clear it after step()."
                raise TypeMistake(f"{name}: {text}")
            gradients[name] = _as_of_backward(grad) if is_set else None
        return gradients

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Sets the gradients from tensors; always exact."""
        for name, parameter in self._parameters:
            if name not in state:
                set_gradient(parameter, None)
            elif state[name] is None:
                set_zero_gradient(parameter)
            else:
                # Its own type: of a parameter in 16 bits it is float32 with amp's master_grad.
                grad = paddle.empty_like(parameter, dtype=state[name].dtype)
                grad.copy_(state[name], True)
                set_gradient(parameter, grad)
        return []


def _as_of_backward(grad: Any) -> Any:
    """Returns a gradient as backward makes it, without stop_gradient, which paddle sets otherwise
    where one is put back.
    """
    seen = grad.detach()
    seen.stop_gradient = False
    return seen


class Environment(Part):
    """What the bits of a run depend on beside its state; compared, not restored."""

    def state_dict(self) -> dict[str, str]:
        """Returns the version of paddle, the kind of device, the number of threads."""
        return {
            "paddle": paddle.__version__,
            "device": kind_of(paddle.device.get_device()),
            "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Compares; returns reasons why continuing is not exact."""
        order = "kernels may sum in another order"
        others = ", and paddle draws other random numbers: random_split holds out other samples"
        return [
            f"{name}: {state.get(name)} there, {now} now: {order}{others * (name == 'device')}"
            for name, now in self.state_dict().items()
            if state.get(name) != now
        ]


class UserStates(Part):
    """What on_save_checkpoint returns and on_load_checkpoint takes; `fire` calls an event."""

    def __init__(self, own: Mapping[str, Any], fire: Callable[..., Any]) -> None:
        self._own = own
        self._fire = fire

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of on_save_checkpoint."""
        return {**self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Hands it to on_load_checkpoint; always exact, as far as we know."""
        self._fire("on_load_checkpoint", dict(state))
        return []
