"""Checks of an experiment's layers and optimizers at the end of setup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import paddle

from expbase.base.arrays import is_piece
from expbase.base.errors import ValueMistake
from expbase.state.optimizers import is_optimizer
from expbase.state.parts import StatefulObjects, parameter_names, parameters_of
from expbase.state.walk import unwrap


def steps_by_itself(value: Any) -> bool:
    """Returns whether a value is an optimizer that is not derived from paddle's."""
    methods = (getattr(type(value), name, None) for name in ("step", "clear_grad"))
    return not is_optimizer(value) and all(map(callable, methods))


def check_state(found: StatefulObjects, attributes: Iterable[Any]) -> None:
    """Raises a ValueError where training would fail, or would lose something."""
    if not found.layers:
        raise ValueMistake(
            "setup_model: no paddle.nn.Layer is an attribute; expected one, such as self.model."
        )
    there = found.optimizers or found.excluded_optimizers
    if not there and not any(map(steps_by_itself, attributes)):
        raise ValueMistake(
            "setup_model: no optimizer is an attribute; expected one, such as self.optimizer: of "
            "paddle.optimizer or derived from it, or an object with step and clear_grad, which "
            "you call yourself."
        )
    for name, optimizer in found.optimizers.items():
        if isinstance(optimizer, (paddle.optimizer.LBFGS, paddle.incubate.LookAhead)):
            raise ValueMistake(
                f"self.{name}: paddle's {type(optimizer).__name__} does not continue exactly from "
                f"its state. To accept that, call exclude_from_state({name!r}): a resumed run "
                "begins it anew."
            )
    names = parameter_names(found)
    _check_sharding(found)
    for name, optimizer in found.optimizers.items():
        unknown = [p.name for p in parameters_of(optimizer) if p.name not in names]
        if unknown:
            raise ValueMistake(
                f"self.{name}: updates {len(unknown)} parameters of no layer among the attributes "
                f"({unknown[0]} …), so they would not be saved. Make their layer an attribute."
            )


def _check_sharding(found: StatefulObjects) -> None:
    """Raises a ValueError if fleet divides single parameters between ranks."""
    stages = {type(layer).__name__ for layer in found.parallel.values()}
    if "GroupShardedStage3" in stages or any(
        hasattr(optimizer, "_slice_params") for optimizer in found.optimizers.values()
    ):
        raise ValueMistake(
            "setup_model: fleet's split_param and group_sharded_parallel's p_g_os divide single "
            "parameters, which a checkpoint cannot hold; expected split_param=False, or os or os_g."
        )


def not_synchronized(found: StatefulObjects, saved: StatefulObjects) -> Iterator[str]:
    """Yields a line for each layer that each rank trains alone.

    `found` has the excluded attributes, too; `saved` only those that a checkpoint holds.
    """
    updated = updated_by(found)
    wrapped = [unwrap(wrapper) for wrapper in saved.parallel.values()]
    synchronized = {id(part) for layer in wrapped for part in layer.sublayers(True)}
    for name, layer in found.layers.items():
        is_updated = any(id(parameter) in updated for parameter in trained_in(layer))
        if is_updated and name in saved.layers and id(layer) not in synchronized:
            yield (
                f"self.{name} has trainable parameters and is not in self.data_parallel(…): each "
                "rank trains its own."
            )


def updated_by(found: StatefulObjects) -> set[int]:
    """Returns the ids of the parameters that optimizers update."""
    return {id(p) for optimizer in found.optimizers.values() for p in parameters_of(optimizer)}


def trained_in(layer: Any) -> list[Any]:
    """Returns the parameters of a layer that are trained as a whole."""
    return [p for p in layer.parameters() if not p.stop_gradient and not is_piece(p)]
