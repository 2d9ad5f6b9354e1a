"""What differs between the ranks, at a save and at a resume.

Rank 0 alone reads and writes checkpoints. At a save it gathers what the other ranks have that is
not the same as its own (random states, running statistics); at a resume it sends everybody the
files, and each rank takes its own part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from expbase import distributed
from expbase.state.arrays import Array
from expbase.state.objects import StatefulObjects, Tensors

Part = tuple[Tensors, dict[str, Any]]  # tensors and values that one rank has other than rank 0

_CHUNK = 1 << 26  # bytes of one broadcast


def differing(tensors: Tensors, values: dict[str, Any], same: set[tuple[str, str]]) -> list[Part]:
    """What each rank has other than rank 0, in the order of the ranks; rank 0's part is empty.

    `same` has file and key of tensors that are the same on all ranks, and need no look.
    """
    if distributed.world_size() == 1:
        return [({}, {})]
    sums = {
        (file, key): (str(array), _checksum(array))
        for file, arrays in tensors.items()
        for key, array in arrays.items()
        if (file, key) not in same
    }
    shared, shared_sums = distributed.broadcast_object((values, sums))
    other: Tensors = {}
    for (file, key), checksum in sums.items():
        if shared_sums.get((file, key)) != checksum:
            other.setdefault(file, {})[key] = tensors[file][key].copy()
    own = {
        entry: {n: v for n, v in parts.items() if shared[entry].get(n) != v}
        for entry, parts in values.items()
    }
    return distributed.gather_objects((other, own))


def trained(found: StatefulObjects) -> set[tuple[str, str]]:
    """File and key of what is trained; running statistics are parameters, too, but are not."""
    return {
        (name, key)
        for name, layer in found.layers.items()
        for key, parameter in layer.named_parameters()
        if not parameter.stop_gradient
    }


def broadcast_files(read_here: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The files that rank 0 reads, on every rank, as arrays of bytes by name."""
    contents: dict[str, Any] = {}

    def read() -> dict[str, int]:
        contents.update(read_here())
        return {name: content.size for name, content in contents.items()}

    sizes = distributed.on_rank_zero(read, "reading the checkpoint") or {}
    if distributed.world_size() == 1:
        return contents
    return {name: _broadcast_bytes(contents.get(name), size) for name, size in sizes.items()}


def _broadcast_bytes(data: Any, size: int) -> Any:
    """An array of bytes, chunk by chunk; on the other ranks `data` is None."""
    received = np.empty(size, np.uint8) if data is None else data
    for start in range(0, size, _CHUNK):
        end = min(start + _CHUNK, size)
        chunk = paddle.to_tensor(np.array(received[start:end]))
        paddle.distributed.broadcast(chunk, src=0)
        if data is None:
            received[start:end] = chunk.numpy()
    return received


def _checksum(array: Array) -> int:
    return zlib.crc32(array.data)  # type: ignore[arg-type]  # mypy: an array is no buffer
