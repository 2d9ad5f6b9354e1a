"""The states of python's, numpy's and paddle's generators of random numbers, as plain values.

state = generator_state(generator)
set_generator_state(new_generator(generator_kind(generator), state), state)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from paddle.base import core

from expbase.base import read_limits
from expbase.base.errors import ValueMistake

GENERATORS: Any = (random.Random, np.random.Generator, np.random.RandomState, core.Generator)
_KINDS = {kind.__name__: kind for kind in GENERATORS[:-1]} | {"paddle.Generator": core.Generator}
_BITS = {kind.__name__: kind for kind in np.random.BitGenerator.__subclasses__()}
# The greatest seed that paddle.base.core.GeneratorState takes back; a generator that nobody has
# seeded may have a greater one.
_MOST_SEED = (1 << 63) - 1
_MOST_CHILDREN = 10**7  # of a generator: 15 us each
_AT_ONCE = 10_000
_MOST_SEEDS = 10_000  # numbers in one seed
_NUMBERS = {"MT19937": 624, "Philox": 4}  # in the memory of a generator


def generator_kind(value: Any) -> str:
    """Returns the class of a generator and of its bit generator: "Generator of PCG64"."""
    if isinstance(value, core.Generator):
        return "paddle.Generator"
    bits = getattr(value, "bit_generator", None)
    kind = next(kind for kind in GENERATORS if isinstance(value, kind))
    return str(kind.__name__) + ("" if bits is None else f" of {type(bits).__name__}")


def generator_state(value: Any) -> Any:
    """Returns the state of a generator, with the number of generators that it has spawned."""
    if isinstance(value, core.Generator):
        device, seed, offset, letters = value.get_state().__getstate__()
        return [device, seed & _MOST_SEED, offset, bytes(letters).decode()]
    if isinstance(value, np.random.Generator):
        seeds: Any = getattr(value.bit_generator, "seed_seq", None)  # None: it was set by hand
        has_seeds = hasattr(seeds, "n_children_spawned")
        # The seeds of spawned generators: without a seed these differ from start to start.
        children = [seeds.n_children_spawned, seeds.entropy, seeds.spawn_key] if has_seeds else []
        return {**value.bit_generator.state, "children": children}
    return None if isinstance(value, random.SystemRandom) else value.__getstate__()


def set_generator_state(value: Any, state: Any) -> None:
    """Sets a state that `generator_state` has returned."""
    if isinstance(value, core.Generator):
        device, seed, offset, letters = state
        _check_letters(letters)
        made = core.GeneratorState.__new__(core.GeneratorState)
        made.__setstate__((device, seed, offset, [*letters.encode()]))
        value.set_state(made)
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        _check_bits(state)
        bits.state = {name: part for name, part in state.items() if name != "children"}
        for spawned in state["children"][:1]:
            left = spawned - bits.seed_seq.n_children_spawned
            if left > _MOST_CHILDREN:
                raise ValueMistake(f"a generator with {left} children more; expected fewer.")
            for first in range(0, left, _AT_ONCE):  # it makes all of them
                bits.seed_seq.spawn(min(_AT_ONCE, left - first))
    elif state is not None:
        if isinstance(value, np.random.RandomState):
            _check_bits(state)
        value.__setstate__(state)


def copied_generator(value: Any) -> Any:
    """Returns another generator with the state of one: numpy 1.26 copies no seeds of those that one
    is to spawn, and paddle's cannot be copied.
    """
    state = generator_state(value)
    made = new_generator(generator_kind(value), state)
    set_generator_state(made, state)
    return made


def new_generator(kind: str, state: Any) -> Any:
    """Returns a new generator, whose state is still to be set.

    Args:
        kind: As `generator_kind` returns it.
        state: Has the seeds of the generators that it is to spawn.
    """
    name, _, bits = kind.partition(" of ")
    if not bits:
        return _KINDS[name]()
    children = state["children"] if isinstance(state, dict) else ()
    if not children:
        return _KINDS[name](_BITS[bits]())
    spawned, entropy, key = children
    for part in (entropy, key):
        numbers = [part] if isinstance(part, int) else [*(part or ())]
        if len(numbers) > _MOST_SEEDS:
            raise ValueMistake(f"a generator with {len(numbers)} seeds; expected fewer.")
        for number in numbers:
            read_limits.bits(number)
    seeds = np.random.SeedSequence(entropy, spawn_key=tuple(key), n_children_spawned=spawned)
    return _KINDS[name](_BITS[bits](seeds))


def _check_bits(state: Mapping[str, Any]) -> None:
    """Raises a ValueError if numpy would read beyond the memory of a generator; it does not ask."""
    name = state["bit_generator"]
    place = {"MT19937": lambda: state["state"]["pos"], "Philox": lambda: state["buffer_pos"]}
    if name in place and not 0 <= place[name]() <= _NUMBERS[name]:
        raise ValueMistake(f"a {name} at place {place[name]()}; expected 0 to {_NUMBERS[name]}.")


def _check_letters(letters: str) -> None:
    """Raises a ValueError if paddle's generator, std::mt19937_64, would read beyond its memory: its
    last number is the place among the others, and C++ does not ask.
    """
    words = letters.split()
    if not all(map(str.isdecimal, words)) or not int(words[-1]) < len(words):
        raise ValueMistake(f"{letters[-40:]!r} is no state of a generator of paddle.")
