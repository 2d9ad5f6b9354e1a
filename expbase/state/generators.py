"""The states of python's and numpy's generators of random numbers, as plain values.

    state = generator_state(generator)
    set_generator_state(new_generator(generator_kind(generator), into=None), state)
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

GENERATORS: Any = (random.Random, np.random.Generator, np.random.RandomState)
# What draws from nothing itself, but has a state.
SEEDED: Any = (*GENERATORS, np.random.BitGenerator, np.random.SeedSequence)
_SEEDS = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
_BITS = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}
_KINDS = {kind.__name__: kind for kind in (*GENERATORS, np.random.SeedSequence)} | _BITS


def generator_kind(value: Any) -> str:
    """The class of a generator, and of the bits that it has: "Generator of PCG64"."""
    name = type(value).__name__
    bits = getattr(value, "bit_generator", None)
    return name if bits is None else f"{name} of {type(bits).__name__}"


def generator_state(value: Any) -> Any:
    """What a generator draws from next, as plain values; None of one that has no state."""
    if isinstance(value, np.random.SeedSequence):
        return {name: getattr(value, name) for name in _SEEDS}
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.Generator):
        state = dict(value.bit_generator.state)
        seeds = getattr(value.bit_generator, "seed_seq", None)  # None: it was set by hand
        if getattr(seeds, "n_children_spawned", 0):
            state["spawned"] = generator_state(seeds)
        return state
    return None if isinstance(value, random.SystemRandom) else value.__getstate__()


def set_generator_state(value: Any, state: Any) -> None:
    """Sets what `generator_state` returned."""
    if isinstance(value, np.random.SeedSequence):
        if missing := state["n_children_spawned"] - value.n_children_spawned:
            value.spawn(max(missing, 0))
    elif isinstance(value, np.random.BitGenerator):
        value.state = state
    elif isinstance(value, np.random.Generator):
        state = dict(state)
        if spawned := state.pop("spawned", None):
            set_generator_state(value.bit_generator.seed_seq, spawned)
        value.bit_generator.state = state
    elif state is not None:
        value.__setstate__(state)


def new_generator(kind: str, into: Any, state: Any) -> Any:
    """The generator `into`, if it is of that kind and has the seeds of a state, else a new one."""
    if isinstance(into, SEEDED) and generator_kind(into) == kind:
        return into
    name, _, bits = kind.partition(" of ")
    if name == "SeedSequence":
        return np.random.SeedSequence(**state)
    if bits:
        seeds = state.get("spawned")
        source = np.random.SeedSequence(**seeds) if seeds else None
        return np.random.Generator(_BITS[bits](source))
    return _KINDS[name]()
