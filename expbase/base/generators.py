"""The states of python's and numpy's generators of random numbers, as plain values.

state = generator_state(generator)
set_generator_state(new_generator(generator_kind(generator), None), state)
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

GENERATORS: Any = (random.Random, np.random.Generator, np.random.RandomState)
_KINDS = {kind.__name__: kind for kind in GENERATORS}
_BITS = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}


def generator_kind(value: Any) -> str:
    """Returns the class of a generator, and of the bits that it has: "Generator of PCG64"."""
    bits = getattr(value, "bit_generator", None)
    return type(value).__name__ + ("" if bits is None else f" of {type(bits).__name__}")


def generator_state(value: Any) -> Any:
    """Returns what a generator draws from next, and how many others it has made."""
    if isinstance(value, np.random.Generator):
        seeds: Any = getattr(value.bit_generator, "seed_seq", None)  # None: it was set by hand
        spawned = getattr(seeds, "n_children_spawned", 0)
        # With the seeds that children are made of: without a seed they are others at each start.
        children = [spawned, seeds.entropy, seeds.spawn_key] if spawned else []
        return {**value.bit_generator.state, "children": children}
    return None if isinstance(value, random.SystemRandom) else value.__getstate__()


def set_generator_state(value: Any, state: Any) -> None:
    """Sets what `generator_state` returned."""
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        bits.state = {name: part for name, part in state.items() if name != "children"}
        for spawned in state["children"][:1]:
            bits.seed_seq.spawn(max(spawned - bits.seed_seq.n_children_spawned, 0))
    elif state is not None:
        value.__setstate__(state)


def new_generator(kind: str, into: Any) -> Any:
    """Returns the generator `into` if it is of that kind, else a new one."""
    if isinstance(into, GENERATORS) and generator_kind(into) == kind:
        return into
    name, _, bits = kind.partition(" of ")
    return _KINDS[name](_BITS[bits]()) if bits else _KINDS[name]()
