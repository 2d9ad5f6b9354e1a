"""What differs between the ranks, at a save and at a resume.

What all ranks have is written by rank 0. At a save it gathers what the others have that is not the
same as its own (running statistics, generators). At a resume every rank gets all files, if need
be from rank 0, and takes its own part. What a rank holds alone is not for here: shares.py.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase import distributed
from expbase.state import checkpoint
from expbase.state.objects import PARAMETERS, StatefulObjects, Tensors
from expbase.state.snapshot import SHARE, Part

_CHUNK = 1 << 24  # bytes of one broadcast; memory of more is not used again, but made anew


def differing(tensors: Tensors, values: dict[str, Any], same: set[tuple[str, str]]) -> list[Part]:
    """What each rank has other than rank 0, in the order of the ranks; rank 0's part is empty.

    `same` has file and key of tensors that are the same on all ranks, and need no look.
    """
    if distributed.world_size() == 1:
        return [({}, {})]
    sums = {
        (file, key): (str(array), zlib.crc32(array.data))  # type: ignore[arg-type]
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


def check_names(names: set[tuple[str, str]]) -> None:
    """Raises a RuntimeError if a rank has a tensor, of a file and key, that another one lacks."""
    count = Counter(name for of_rank in distributed.gather_objects(names) for name in of_rank)
    for file, key in sorted(n for n in count if count[n] < distributed.world_size()):
        raise RuntimeError(
            f"self.{file}: {key!r} is on {count[file, key]} of the ranks alone, and would be lost; "
            "expected the same parameters to be updated on all ranks, or an optimizer of "
            "paddle.distributed.fleet that divides them."
        )


def trained(found: StatefulObjects) -> set[tuple[str, str]]:
    """File and key of what is trained; running statistics are parameters, too, but are not."""
    layers = {name: layer.named_parameters() for name, layer in found.layers.items()}
    files = {**layers, PARAMETERS: found.parameters.items()}
    named = [(file, key, p) for file, parameters in files.items() for key, p in parameters]
    return {(file, key) for file, key, parameter in named if not parameter.stop_gradient}


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint that verifies, on every rank: its manifest, and arrays of bytes by file.

    A rank that finds the same one at this path reads it there: sending takes longer, and as much
    memory as there are bytes. If one does not, rank 0 sends the bytes to all. Shares are nobody's
    to send, and as they were written on a disk that all see, rank 0 alone verifies them.

    Raises:
        CheckpointError: It is damaged, or has shares and is not seen by all ranks.
    """
    manifest = distributed.on_rank_zero(lambda: checkpoint.verify(path), "reading the checkpoint")
    assert manifest is not None
    contents = {}
    has_shares = any(name.startswith(SHARE) for name in manifest["files"])
    read_manifest = checkpoint.read_manifest if has_shares else checkpoint.verify
    with contextlib.suppress(checkpoint.CheckpointError):
        if distributed.rank() == 0 or read_manifest(path) == manifest:
            contents = checkpoint.read(path)
    distributed.wait_for_all("reading the checkpoint")
    seen = distributed.gather_objects(bool(contents))
    if all(seen):
        return manifest, contents
    if has_shares:
        raise checkpoint.CheckpointError(
            f"{path}: rank {seen.index(False)} does not see it, as all ranks must to continue what "
            "each has written itself. Put it on a disk that all see, under the same path."
        )
    sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    return manifest, {n: _broadcast_bytes(contents.get(n), size) for n, size in sizes.items()}


def _broadcast_bytes(data: Any, size: int) -> Any:
    """An array of bytes, chunk by chunk; on the other ranks `data` is None."""
    received = np.empty(size, np.uint8) if data is None else data
    for start in range(0, size, _CHUNK):
        end = min(start + _CHUNK, size)
        chunk = paddle.to_tensor(received[start:end])
        paddle.distributed.broadcast(chunk, src=0)
        if data is None:
            received[start:end] = chunk.numpy()
    return received
