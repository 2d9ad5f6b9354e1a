"""The random states of one process: python's, numpy's and paddle's, on every device.

Generators that a user makes (`np.random.default_rng`) are not among them: one that is an attribute
of the experiment is saved as such (objects.py).

    seed_all(derive(0, TRAIN, rank))       # one seed for all three libraries
    with isolated(derive(0, VALID, 400)):  # what is drawn inside has no effect outside
        ...
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.base import core

# What a derived seed is for. It is the first number of its path, so that no two purposes draw the
# same numbers. Checkpoints depend on the values: append, never reorder.
SETUP, TRAIN, VALID, ORDER, SAMPLE, STREAM, PREDICT = range(7)

_MASK = (1 << 64) - 1


def derive(seed: int, *path: int) -> int:
    """A seed of 63 bits that depends on all the numbers and on their order.

    A generator of paddle takes 64 bits, but its state can then not be restored.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014), once per number.
    """
    state = seed & _MASK
    for number in path:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK) * 0xD1342543DE82EF95) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int) -> None:
    """Seeds python, numpy and paddle, on every device."""
    seed_cpu(seed)
    for generator in _generators().values():
        generator.manual_seed(seed)


def seed_cpu(seed: int) -> None:
    """Seeds python, numpy and paddle's CPU generator: all that a data set may draw from.

    Touches no device, so it is legal in a loader's worker process (`paddle.seed` is not).
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    core.default_cpu_generator().manual_seed(seed)


class RandomStates:
    """The random states of this process as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """By library or device, as values that JSON can hold."""
        states = snapshot()
        version, words, gauss = states.pop("python")
        name, key, *rest = states.pop("numpy")
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, key.tolist(), *rest],  # position, whether a normal number waits, and it
            **{device: _to_json(state) for device, state in states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restores them; the machine may have other devices, and then it is not exact."""
        devices = dict(state)
        version, words, gauss = devices.pop("python")
        name, key, *rest = devices.pop("numpy")
        states = {device: _from_json(value) for device, value in devices.items()}
        states["python"] = (version, tuple(words), gauss)
        states["numpy"] = (name, np.array(key, np.uint32), *rest)
        reset(states)
        one_sided = devices.keys() ^ _generators().keys()
        return [f"the random states of {device} are new" for device in sorted(one_sided)]


def snapshot() -> dict[str, Any]:
    """The states of all generators by library or device, quickly, for `reset` in this process."""
    return {"numpy": np.random.get_state(), **_but_numpys()}


def _but_numpys() -> dict[str, Any]:
    devices = {device: generator.get_state() for device, generator in _generators().items()}
    return {"python": random.getstate(), **devices}


def reset(states: dict[str, Any]) -> None:
    """Sets what `snapshot` returned."""
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    for device, generator in _generators().items():
        if device in states:
            generator.set_state(states[device])


@contextlib.contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Restores all random states after the block, which draws from the seed if there is one."""
    states = snapshot()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        reset(states)


class DataStates:
    """Random states of what draws often: a data set's. Neither they nor training's see the other.

    Numpy's generator is exchanged, because copying its state costs more than making a small batch.
    The price: numpy makes two normal numbers at once, and one that waits is dropped.
    """

    def __init__(self, seed: int) -> None:
        self._numpys = np.random.MT19937(0)
        with self.in_use(seed):
            seed_all(seed)
            self._others = _but_numpys()

    @contextlib.contextmanager
    def in_use(self, seed: int | None = None) -> Iterator[None]:
        """Goes on where the block before ended; with a seed it begins anew."""
        outside, others = np.random.mtrand.get_bit_generator(), _but_numpys()
        np.random.mtrand.set_bit_generator(self._numpys)
        try:
            if seed is None:
                reset(self._others)
            else:
                seed_cpu(seed)
            yield
        finally:
            if seed is None:
                self._others = _but_numpys()
            np.random.mtrand.set_bit_generator(outside)
            reset(others)


def drop_waiting_normal() -> None:
    """Leaves training's states as `DataStates` does, for batches that are made elsewhere."""
    np.random.mtrand.set_bit_generator(np.random.mtrand.get_bit_generator())


def _generators() -> dict[str, Any]:
    """Paddle's generators that this process may draw from, by device."""
    generators = {"cpu": core.default_cpu_generator()}
    if paddle.is_compiled_with_cuda():
        for index in range(paddle.device.cuda.device_count()):
            generators[f"gpu:{index}"] = core.default_cuda_generator(index)
    return generators


def _to_json(state: Any) -> list[Any]:
    # The state of a paddle generator is (device, seed, offset, codes of an ASCII text), and the
    # text holds the state of the C++ engine.
    device, seed, offset, text = state.__getstate__()
    return [device, seed, offset, "".join(map(chr, text))]


def _from_json(state: list[Any]) -> Any:
    device, seed, offset, text = state
    # It has no constructor; this is how pickle makes one.
    made = core.GeneratorState.__new__(core.GeneratorState)
    made.__setstate__((device, seed, offset, [ord(letter) for letter in text]))
    return made
