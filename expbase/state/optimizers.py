"""The state of optimizers and learning rate schedules, under names that every process agrees on.

Paddle keys an optimizer's tensors by automatic names, `linear_0.w_0_moment1_0`, which depend on
what was constructed before; and a schedule's own `state_dict` is not always complete.

    live = accumulators(optimizer, names)        # {"moment1/model.fc.weight": Tensor}
    make_accumulators(optimizer, saved, parameters)
    set_schedule_values(schedule, schedule_values(schedule))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle.base import framework
from paddle.optimizer.lr import LRScheduler

from expbase.base.generators import generator_kind

# A learning rate is saved as such; the other one counts buffers.
_NO_SETTINGS = ("_learning_rate", "_fuse_buffer_version")
_PLAIN = (bool, int, float, str, np.generic, np.ndarray, paddle.Tensor)


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer in fleet's wrappers, which has the accumulators; any other object as it
    is.
    """
    while type(optimizer).__module__.startswith("paddle."):
        own = getattr(optimizer, "__dict__", {})
        if (inner := own.get("_inner_opt", own.get("_optim"))) is None:
            break
        optimizer = inner
    return optimizer


def accumulators(optimizer: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns an optimizer's tensors by `accumulator/name`; `names` has those of parameters by
    paddle's.
    """
    master = getattr(optimizer, "_master_weights", {})
    # A parameter with a master weight: its accumulators go by the automatic name of the latter.
    names = {**names, **{tensor.name: names[name] for name, tensor in master.items()}}
    tensors = {f"master_weight/{names[name]}": tensor for name, tensor in master.items()}
    prefix = f"{optimizer._name}_" if optimizer._name else ""
    for accumulator, of_parameters in optimizer._accumulators.items():
        for parameter, tensor in of_parameters.items():
            tensors[f"{accumulator.removeprefix(prefix)}/{names[parameter]}"] = tensor
    return tensors


def make_accumulators(optimizer: Any, saved: Iterable[str], parameters: Mapping[str, Any]) -> None:
    """Makes the tensors that a first step would make, for the parameters that had one.

    Not for all parameters: one that never had a gradient has no accumulators, and what is made
    must be what was saved, under keys like those of `accumulators`. `parameters` has those that it
    updates, by structured name.
    """
    stepped = dict.fromkeys(key.partition("/")[2] for key in saved)
    made = [parameters[name] for name in stepped if name in parameters]
    if made:
        block = framework.default_main_program().global_block()
        optimizer._create_accumulators(block, made)
        for of_parameters in optimizer._accumulators.values():
            for p in (p for p in made if p.is_dist() and p.name in of_parameters):
                whole = of_parameters[p.name]
                if whole.shape == p.shape and not whole.is_dist():
                    part = paddle.distributed.shard_tensor(whole, p.process_mesh, p.placements)
                    of_parameters[p.name] = part


def schedule_values(schedule: Any) -> dict[str, Any]:
    """Returns every plain value of a schedule, those of the schedules within it too.

    Its own state_dict leaves some out (CosineAnnealingWarmRestarts loses two), and some are
    tensors (ReduceOnPlateau keeps the best loss as it was given).
    """
    values = {}
    for name, value in vars(schedule).items():
        if isinstance(value, LRScheduler):
            values[name] = schedule_values(value)
        elif is_plain(value) and name != "_var_name":  # an automatic name of paddle's
            values[name] = value
    return values


def set_schedule_values(schedule: Any, values: Mapping[str, Any]) -> None:
    """Sets what `schedule_values` returned."""
    for name, value in values.items():
        inner = getattr(schedule, name, None)
        if isinstance(inner, LRScheduler):
            set_schedule_values(inner, value)
        else:
            setattr(schedule, name, value)


def settings(optimizer: Any) -> dict[str, Any]:
    """Returns what an optimizer was made with, and training may change: betas, decay, clipping."""
    return {
        name: value
        for name, value in vars(innermost(optimizer)).items()
        if name not in _NO_SETTINGS
        and (
            (isinstance(value, (int, float)) and not isinstance(value, bool))
            or callable(value)  # set over a method, say
            or name in ("_grad_clip", "regularization")
        )
    }


def kind(stateful: Any) -> str:
    """Returns the class of an object, and of the schedules within it: "SGD of StepDecay"."""
    own = getattr(stateful, "__dict__", {}).values()
    inner = [kind(value) for value in own if isinstance(value, LRScheduler)]
    return " of ".join([generator_kind(stateful), *inner])


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a text, an array or None, or holds nothing else."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, _PLAIN)
