"""Why the ranks have parted: a line for each cause, from what a save has found to differ.

It asks no rank anything: what they have exchanged is handed to it.

    lines = [*advice(difference)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from expbase.base.arrays import Array
from expbase.checkpoint.compare_rank_weights import Difference, Name
from expbase.state import optimizers
from expbase.state.parts import StatefulObjects, parameter_names, parameters_of

_ROUNDING = 1e-5  # of a tensor's largest element: what rounding makes of it in thousands of updates
_FINEST = {"float16": 2**-10, "bfloat16": 2**-7}  # the last bit, where that is coarser

_OUTSIDE = (
    "each rank trains a model of its own. Put what you train into self.data_parallel and call that "
    "in train_batch."
)
_RATE = (
    "must come from what all ranks have alike: self.average a rank's own number before a "
    "schedule's step() or set_lr() is given it."
)
_ROUNDED = (
    "differs in the last bits alone, as machines round that are not alike: in their processors, or "
    "in OMP_NUM_THREADS."
)
_UPDATES = (
    "the ranks have made unlike numbers of its updates. Whether to step must depend on what all "
    "ranks have alike: self.average a loss before you decide by it."
)
_UNSHARED = (
    "each rank trains a model of its own, although its layer is in data_parallel. The usual "
    "causes: a loss of the layer itself, not of what data_parallel has returned; a part that the "
    "first forward did not use (find_unused_parameters=True), or that was unfrozen since (call "
    "data_parallel again); an update or a learning rate that depends on this rank's own numbers "
    "(self.average them first)."
)


def advice(difference: Difference) -> Iterator[str]:
    """Yields the likely causes, each with what it explains and what to do."""
    owners, rates, elements, found = difference
    parted = {*owners.values()}
    outside = parted - _wrapped(found)
    rated = (parted - outside) & _updated_by(rates, found)
    rest = parted - outside - rated
    of_rest = {name for name, owner in owners.items() if owner in rest}
    by_cause: dict[str, Set[str]] = {_OUTSIDE: outside}
    by_cause[f"each rank trains with a learning rate of its own, which {_RATE}"] = rated
    if _is_rounding([{n: a for n, a in of.items() if n in of_rest} for of in elements]):
        by_cause[_ROUNDED] = rest
    else:
        steps = {owners[name] for name in of_rest if "_pow_acc" in name[1]}
        by_cause |= {_UPDATES: steps, _UNSHARED: rest - steps}
    if rates and not rated:
        by_cause = {f"the learning rate {_RATE}": rates} | by_cause
    for cause, names in by_cause.items():
        if names:
            first, *more = sorted(names)
            yield f"{first}{f' and {len(more)} more' * bool(more)}: {cause}"


def _wrapped(found: StatefulObjects) -> set[str]:
    """Returns the parameters of what is in a wrapper."""
    names = parameter_names(found)
    wrapped = (p for wrapper in found.parallel.values() for p in wrapper.parameters())
    return {names[p.name] for p in wrapped if p.name in names}


def _updated_by(optimizer_names: Set[str], found: StatefulObjects) -> set[str]:
    """Returns the parameters that optimizers update."""
    names = parameter_names(found)
    those = [found.optimizers[name] for name in optimizer_names & found.optimizers.keys()]
    updated = (p for one in those for p in parameters_of(optimizers.innermost(one)))
    return {names[p.name] for p in updated if p.name in names}


def _is_rounding(of_ranks: Sequence[Mapping[Name, Array]]) -> bool:
    """Returns whether tensors differ, and so little as rounding makes them."""
    if not of_ranks or any(of_rank.keys() != of_ranks[0].keys() for of_rank in of_ranks):
        return False
    is_unlike = False
    for name, array in of_ranks[0].items():
        arrays = [of_rank[name] for of_rank in of_ranks]
        if len({(a.dtype, a.nbytes) for a in arrays}) > 1:
            return False
        zero, *others = map(_numbers, arrays)
        largest = np.abs(zero).max(initial=0)
        for other in others:
            unlike = np.abs(other - zero).max(initial=0)
            if not unlike <= max(_ROUNDING, 4 * _FINEST.get(array.dtype, 0)) * largest:
                return False
            is_unlike = is_unlike or bool(unlike > 0)
    return is_unlike


def _numbers(array: Array) -> np.ndarray[Any, Any]:
    """Returns elements as numbers; what has no form in numpy, as its bytes."""
    data, dtype = array.data, array.dtype
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    is_float = dtype in ("float16", "float32", "float64")
    return data.view(dtype if is_float else np.uint8).astype(np.float64)
