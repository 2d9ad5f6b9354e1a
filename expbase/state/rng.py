"""The random states of one process: python's, numpy's and paddle's, on every device.

A leaf: it reads, sets and derives random states and nothing else. Who may draw from which
state, and when, is decided by its callers. Generators that a user makes (`np.random.default_rng`)
are not among them; one that stands on the experiment is saved like any other value there.

    seed_all(derive(0, TRAIN, rank))      # one seed for all three libraries
    states = capture()                    # JSON-able
    restore(states)
    with isolated(derive(0, VALID, 400)): # whatever is drawn inside leaves no trace outside
        ...
"""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle.base import core

# What a derived seed is for; the first number of its path, so that no two purposes share a stream.
SETUP, TRAIN, VALID, ORDER, SAMPLE, STREAM, PREDICT = range(7)

_MASK = (1 << 64) - 1


def derive(seed: int, *path: int) -> int:
    """A seed of 63 bits (paddle takes no more back) that depends on all numbers and their order.

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


def capture() -> dict[str, Any]:
    """The states of all generators of this process, as values that JSON can hold."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    key = numpy_state["state"]["key"]
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": base64.b64encode(key.astype("<u4").tobytes()).decode(),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "cpu": _to_json(core.default_cpu_generator().get_state()),
    }
    for name, generator in _device_generators().items():
        states[name] = _to_json(generator.get_state())
    return states


def restore(states: dict[str, Any]) -> list[str]:
    """Sets what `capture` gave.

    Returns:
        The devices that only one side knows: a run that is continued on a machine with other
        devices goes on, but what was drawn there is drawn anew.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    saved = states["numpy"]
    np.random.set_state(
        {
            "bit_generator": saved["bit_generator"],
            "state": {
                "key": np.frombuffer(base64.b64decode(saved["key"]), "<u4"),
                "pos": saved["pos"],
            },
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )
    generators = {"cpu": core.default_cpu_generator(), **_device_generators()}
    saved_devices = set(states) - {"python", "numpy"}
    for name in saved_devices & set(generators):
        generators[name].set_state(_from_json(states[name]))
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
    """Sets what `snapshot` gave."""
    python_state, numpy_state, cpu_state, device_states = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    core.default_cpu_generator().set_state(cpu_state)
    for generator, state in device_states:
        generator.set_state(state)


@contextlib.contextmanager
def isolated(seed: int | None = None) -> Iterator[None]:
    """Gives the block random states of its own; the states outside are as before afterwards."""
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
    # A paddle generator's state is (device, seed, offset, text of the engine as ASCII codes).
    device, seed, offset, text = state.__getstate__()
    return [device, seed, offset, "".join(map(chr, text))]


def _from_json(state: list[Any]) -> Any:
    device, seed, offset, text = state
    made = core.GeneratorState.__new__(core.GeneratorState)
    made.__setstate__((device, seed, offset, [ord(letter) for letter in text]))
    return made
