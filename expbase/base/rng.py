"""Random numbers that are derived from (seed, purpose, place), so that no state has to be stored.

A draw in one place does not change the numbers of a later place, because the generators of python,
numpy and paddle are seeded anew there: for an iteration and each of its batches, for the events of
an epoch, for a validation and each of its batches, and for each batch that a data set makes.

    seed_for(0, TRAIN, iteration, number)      # one seed for all three libraries
    with unmoved(): ...                        # draws in the block change nothing after it

Generators that a user makes (`np.random.default_rng`) are not seeded. One that is an attribute of
the experiment is saved with it (state/changed_values.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from paddle.base import core, framework
from paddle.distributed.fleet.layers.mpu.random import RNG_STATE_TRACKER

from expbase.base.device import as_place

# The purpose of a derived seed. It is the first number of its path, so that no two purposes draw
# the same numbers. Checkpoints depend on the values: append, never reorder.
SETUP, TRAIN, VALID, ORDER, SAMPLE, STREAM, PREDICT, EPOCH = range(8)

# Of the states of fleet's tracker, by name and indices: the device on which it was met first, and
# the seed that the tensor parallel program has given it. What each rank is to draw otherwise has
# another seed on each.
_met: dict[tuple[Any, ...], tuple[str, int]] = {}


def derive(seed: int, *path: int) -> int:
    """Returns a seed of 63 bits that depends on all the numbers and on their order."""
    text = " ".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_for(seed: int, *path: int) -> None:
    """Seeds all three libraries by the numbers of a path."""
    seed_all(derive(seed, *path))


def seed_all(seed: int) -> None:
    """Seeds python, numpy and paddle, on the CPU and on this process's device."""
    seed_cpu(seed)
    for generator in _of_device():
        generator.manual_seed(seed)
    if RNG_STATE_TRACKER.states_:  # hardly ever, and this is called at each update
        for own, generator in _tracked():
            generator.manual_seed(derive(seed, own))


def _tracked() -> Iterator[tuple[int, Any]]:
    """Yields, for each state of fleet's tracker, its own seed and a generator that has it just now.

    `fleet.meta_parallel.get_rng_state_tracker` returns that tracker. Its states are further ones
    of the generators of the device on which they were added
    (paddle/distributed/fleet/layers/mpu/random.py), and under a name each.
    """
    here = str(framework._current_expected_place_())
    for name, indices in [*RNG_STATE_TRACKER.states_.items()]:
        device, own = _met.get((name, *indices), (here, None))
        if device != here:  # a generator that is given the index of another one draws no more
            continue
        with contextlib.suppress(ValueError), RNG_STATE_TRACKER.rng_state(name):
            generator = _of_paddle()[-1]
            if own is None:
                own = generator.initial_seed()
                _met[(name, *indices)] = here, own
            yield own, generator


def is_seeded(generator: Any) -> bool:
    """Returns whether a generator is one of those that `seed_all` seeds, as `paddle.seed` and
    `paddle.Generator()` return them; each time it is another object.
    """
    known = _of_paddle()
    own = generator.initial_seed()
    if own not in [one.initial_seed() for one in known]:
        return False
    with unmoved():
        for one in known:
            one.manual_seed(own ^ 1)
        return bool(generator.initial_seed() == own ^ 1)


def _of_paddle() -> list[Any]:
    """Returns paddle's generators that are seeded here; the last one is that of the device."""
    return [core.default_cpu_generator(), *_of_device()]


def _of_device() -> list[Any]:
    """Returns paddle's generator of this process's device, unless that is the CPU."""
    device = framework._current_expected_place_()
    if isinstance(device, core.CPUPlace):
        return []
    place = as_place(device)
    if place.is_gpu_place():
        return [core.default_cuda_generator(place.gpu_device_id())]
    if place.is_xpu_place():
        return [core.default_xpu_generator(place.xpu_device_id())]
    if place.is_custom_place():
        return [core.default_custom_device_generator(device)]
    return []


@contextlib.contextmanager
def unmoved() -> Iterator[None]:
    """Restores, at the end of the block, the state of all generators that `seed_all` seeds."""
    of_paddle = _of_paddle()
    states = [generator.get_state() for generator in of_paddle]
    of_tracker = [generator.get_state() for _, generator in _tracked()]
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for generator, state in zip(of_paddle, states, strict=True):
            generator.set_state(state)
        for (_, generator), state in zip(_tracked(), of_tracker, strict=False):
            generator.set_state(state)


def seed_cpu(seed: int) -> None:
    """Seeds python, numpy and paddle's CPU generator: all that a worker process may draw from.

    Touches no device, so it is legal there. `paddle.seed` is not: it seeds the generators of all
    GPUs (paddle/framework/random.py, seed).
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    core.default_cpu_generator().manual_seed(seed)
