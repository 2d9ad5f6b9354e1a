"""The state of optimizers, under names that every process agrees on.

Paddle keys an optimizer's tensors by automatic names, `linear_0.w_0_moment1_0`, which depend on
what was constructed before. What else an optimizer has is walked (walk.py): its settings, and what
a class of the user's adds to paddle's.

    live = accumulators(optimizer, names)        # {"moment1/model.fc.weight": Tensor}
    make_accumulators(optimizer, saved, parameters)
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle
from paddle.base import framework
from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler

from expbase.base.any_object import module_of
from expbase.base.arrays import Array

_MASTER = "master_weight"  # the accumulator in the files
_RATE = "learning_rate"  # the place of paddle's `_learning_rate`
# Of parameters; the first two are the same list as a rule, the last is that of a group.
LISTS = ("_parameter_list", "_param_groups", "params")
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_FUNCTIONS = (types.FunctionType, types.MethodType)
_MADE_WITH = ("_grad_clip", "regularization")  # what a user gives to an optimizer of paddle's


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer in fleet's wrappers, which has the accumulators; any other object as it
    is.
    """
    while module_of(type(optimizer)).startswith("paddle."):
        own = getattr(optimizer, "__dict__", {})
        if (inner := own.get("_inner_opt", own.get("_optim"))) is None:
            break
        optimizer = inner
    return optimizer


def is_optimizer(value: Any) -> bool:
    """Returns whether it is an optimizer of paddle's, or derived from one, or a wrapper of one."""
    return isinstance(innermost(value), Optimizer)


def accumulators(optimizer: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns an optimizer's tensors by `accumulator/name`; `names` has those of parameters by
    paddle's.
    """
    master = getattr(optimizer, "_master_weights", {})
    # A parameter with a master weight: its accumulators go by the automatic name of the latter.
    names = {**names, **{tensor.name: names[name] for name, tensor in master.items()}}
    tensors = {f"{_MASTER}/{names[name]}": tensor for name, tensor in master.items()}
    prefix = _prefix(optimizer)
    for accumulator, of_parameters in optimizer._accumulators.items():
        for parameter, tensor in of_parameters.items():
            tensors[f"{accumulator.removeprefix(prefix)}/{names[parameter]}"] = tensor
    return tensors


def set_masters(optimizer: Any, weights: Mapping[str, Array]) -> None:
    """Sets the master weights of parameters that were set, by paddle's names of those.

    Else the next step would bring back what the parameters were before.
    """
    for name, master in getattr(innermost(optimizer), "_master_weights", {}).items():
        if name in weights:
            weights[name].converted("float32").copy_to(master)


def _prefix(optimizer: Any) -> str:
    return f"{optimizer._name}_" if optimizer._name else ""


def make_accumulators(
    optimizer: Any, saved: Mapping[str, Array], parameters: Mapping[str, Any]
) -> None:
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
        _make_others(optimizer, saved, parameters)
        for of_parameters in optimizer._accumulators.values():
            for p in (p for p in made if p.is_dist() and p.name in of_parameters):
                whole = of_parameters[p.name]
                if whole.shape == p.shape and not whole.is_dist():
                    part = paddle.distributed.shard_tensor(whole, p.process_mesh, p.placements)
                    of_parameters[p.name] = part


def _make_others(optimizer: Any, saved: Mapping[str, Array], parameters: Mapping[str, Any]) -> None:
    """Makes the accumulators that a class of the user's adds in its `step`."""
    if module_of(type(optimizer)).startswith("paddle."):
        return
    for key, array in saved.items():
        accumulator, _, name = key.partition("/")
        if accumulator != _MASTER and name in parameters:
            parameter = parameters[name]
            master = optimizer._master_weights.get(parameter.name, parameter)
            known = optimizer._accumulators.get(_prefix(optimizer) + accumulator, {})
            if parameter.name not in known and master.name not in known:
                optimizer._add_accumulator(
                    accumulator, master, dtype=array.dtype, shape=[*array.shape]
                )


def settings(optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's settings by name: rate, parameters, betas, decay, clipping; and the
    attributes of a class of the user's, unless its `state_dict` has them.
    """
    theirs = stored_by(type(optimizer), _is_paddles)
    has_own = not writes_state(optimizer)
    rate = optimizer._learning_rate
    return {_RATE: rate, **_lists(optimizer)} | {
        name: value
        for name, value in vars(optimizer).items()
        if (has_own if name not in theirs else _is_setting(name, value))
    }


def may_have_setting(optimizer: Any, name: str) -> bool:
    """Returns whether a name is that of one of `settings`, now or later."""
    if name in (_RATE, *LISTS[:2], *_MADE_WITH):
        return True
    if name not in stored_by(type(optimizer), _is_paddles):
        return not writes_state(optimizer)
    there = vars(optimizer).get(name)
    return there is None or isinstance(there, (bool, int, float))


def _lists(optimizer: Any) -> dict[str, Any]:
    """Returns the lists of parameters by which it steps, if these are in no groups."""
    found = {name: getattr(optimizer, name) for name in LISTS[:2]}
    return {n: given for n, given in found.items() if given and not isinstance(given[0], dict)}


def _is_setting(name: str, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # _fuse_buffer_version counts the buffers of paddle/optimizer/optimizer.py.
    return (is_number and name not in ("_learning_rate", "_fuse_buffer_version")) or (
        name in _MADE_WITH
    )


def set_setting(optimizer: Any, name: str, value: Any) -> None:
    """Sets one of `settings`."""
    if name != _RATE:
        vars(optimizer)[name] = value
    elif isinstance(value, (int, float)) and not isinstance(optimizer._learning_rate, LRScheduler):
        optimizer.set_lr(value)  # which changes a tensor, too
    else:
        optimizer._learning_rate = value


def groups(optimizer: Any) -> list[Any]:
    """Returns the parameter groups, a dict each; empty if the optimizer has none."""
    return [group for group in optimizer._param_groups or [] if isinstance(group, dict)]


def writes_state(optimizer: Any) -> bool:
    """Returns whether the optimizer's class, one of the user's, defines its own `state_dict`."""
    kind = type(optimizer)
    methods = (getattr(kind, "state_dict", None), getattr(kind, "set_state_dict", None))
    return methods[0] is not Optimizer.state_dict and methods[1] is not Optimizer.set_state_dict


def own_state(optimizer: Any) -> dict[str, Any]:
    """Returns the entries that a class of the user's adds to the state of paddle's optimizer."""
    of_paddle = Optimizer.state_dict(optimizer)
    return {key: v for key, v in optimizer.state_dict().items() if key not in of_paddle}


def set_own_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Sets the entries of `own_state`, together with paddle's own part as it is now."""
    optimizer.set_state_dict({**Optimizer.state_dict(optimizer), **state})
    # What paddle keeps of it would be asked for the tensors of each parameter that steps first:
    # paddle/optimizer/optimizer.py, Optimizer._add_accumulator.
    optimizer._accumulators_holder = {}


def stored_by(kind: type, is_theirs: Callable[[type], bool]) -> frozenset[str]:
    """Returns the names of the attributes that some of a class's bases set in their code."""
    return frozenset(n for base in kind.__mro__ if is_theirs(base) for n in _stored(base))


def _is_paddles(kind: type) -> bool:
    return module_of(kind).startswith("paddle.")


@functools.cache
def _stored(kind: type) -> frozenset[str]:
    functions = [inspect.unwrap(f) for f in vars(kind).values() if isinstance(f, _FUNCTIONS)]
    found = (name for f in functions if hasattr(f, "__code__") for name in _set_in(f.__code__))
    return frozenset(found)


def _set_in(code: Any) -> Iterator[str]:
    """Yields the names of attributes that code sets; dis.get_instructions takes 16 ms for Adam."""
    high = 0  # of an argument above 255
    for opcode, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high << 8 | low
        high = argument if opcode == dis.EXTENDED_ARG else 0
        if opcode == _STORE_ATTR:
            yield code.co_names[argument]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_in(constant)
