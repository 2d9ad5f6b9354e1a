"""The random states of one process: python's, numpy's and paddle's, on every device.

It reads, sets and derives random states and does nothing else. Who may draw from which state, and
when, is decided by its callers. Generators that a user makes (`np.random.default_rng`) are not
among them: one that is an attribute of the experiment is saved as such (objects.py).

    seed_all(derive(0, TRAIN, rank))       # one seed for all three libraries
    states = capture()                     # values that JSON can hold
    restore(states)
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
    for generator in _device_generators().values():
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
        """What `capture` returns."""
        return capture()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restores them; returns reasons why it is not exact."""
        return [f"the random states of {name} are new" for name in restore(state)]


def capture() -> dict[str, Any]:
    """The states of all generators of this process, as values that JSON can hold."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    name, key, *rest = numpy_state
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, key.tolist(), *rest],  # position, whether a normal number waits, and it
        "cpu": _to_json(core.default_cpu_generator().get_state()),
    }
    for device, generator in _device_generators().items():
        states[device] = _to_json(generator.get_state())
    return states


def restore(states: dict[str, Any]) -> list[str]:
    """Sets what `capture` returned.

    Returns:
        The devices that only one side knows. A run may be continued on a machine with other
        devices, but what it draws there is not what it would have drawn.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, np.array(key, np.uint32), *rest))
    generators = {"cpu": core.default_cpu_generator(), **_device_generators()}
    saved_devices = set(states) - {"python", "numpy"}
    for device in saved_devices & set(generators):
        generators[device].set_state(_from_json(states[device]))
    return sorted(saved_devices ^ set(generators))


def snapshot() -> tuple[Any, ...]:
    """The states of all generators, quickly, for `reset` in this process."""
    devices = _device_generators().values()
    return (
        random.getstate(),
        np.random.get_state(legacy=False),
        core.default_cpu_generator().get_state(),
        [(generator, generator.get_state()) for generator in devices],
    )


def reset(states: tuple[Any, ...]) -> None:
    """Sets what `snapshot` returned."""
    python_state, numpy_state, cpu_state, device_states = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    core.default_cpu_generator().set_state(cpu_state)
    for generator, state in device_states:
        generator.set_state(state)


@contextlib.contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Restores all random states after the block, however it ends.

    Args:
        seed: The block draws from it; None: the block goes on from the states of before.
    """
    states = snapshot()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        reset(states)


def _device_generators() -> dict[str, Any]:
    """The generators of the devices that this process may draw from, by device name."""
    if not paddle.is_compiled_with_cuda():
        return {}
    count = paddle.device.cuda.device_count()
    return {f"gpu:{index}": core.default_cuda_generator(index) for index in range(count)}


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
