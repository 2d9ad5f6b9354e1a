"""What is the same on all ranks, what differs, and what one has alone: to rank 0 and back.

    the same    what is trained, and its accumulators: DataParallel keeps them equal. The first save
                compares them; a warning names what is not equal then; it counts as different.
    different   all else: running statistics, generators, values. Each save compares checksums, and
                what a rank has otherwise than rank 0 is its local state.
    alone       by construction, so nothing is compared. Pieces, tensors of which each rank has
                another part (by placements, or marked `is_distributed`), and their accumulators are
                local state, too. The accumulators of an optimizer whose ranks update some
                parameters each (fleet's sharded ones) stand once, as if one process had them all.

Rank 0 alone writes. `@local_R.safetensors` is the local state of rank R, by `file/key`; that of
rank 0 is its pieces. At a resume each rank takes what all have, the accumulators that it updates
now, and its local state, if there are as many ranks as before; pieces fit no other number.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.base.arrays import Array, parse
from expbase.base.background import SnapshotBuffer
from expbase.base.files import checksum_of
from expbase.checkpoint import storage
from expbase.checkpoint.layout import ARRAYS, LOCAL, SHARES, STATE_FILE, SUFFIX, Name, Snapshot
from expbase.ranks import collectives
from expbase.state.objects import PARAMETERS, StatefulObjects, Tensors

_OF_SHARES = f"{SHARES}."  # what the names of their arrays begin with
_CHUNK = 1 << 22  # bytes of one broadcast; four times as many take longer

Arrays = dict[Name, Array]
Outline = dict[Name, tuple[str, tuple[int, ...], int]]  # of each array its type, shape and bytes


class Gatherer:
    """Brings to rank 0 what a checkpoint holds."""

    def __init__(self, logger: logging.Logger, *, has_shares: bool = False) -> None:
        self._logger = logger
        self._has_shares = has_shares  # then only they differ
        self._buffer = SnapshotBuffer()
        self._drifted: set[Name] | None = None  # what should be the same; None before a save

    def gather(self, found: StatefulObjects, tensors: Tensors, values: dict[str, Any]) -> Snapshot:
        """What all ranks have, on rank 0; on the others it is not whole. Collective.

        Raises:
            RuntimeError: A rank has an accumulator that another one lacks; with shares, too, if
                anything is another one than on rank 0.
        """
        here = _flat(tensors)
        local_values: list[dict[str, Any]] = [{}]
        if collectives.world_size() > 1:
            here, local_values = self._of_all_ranks(here, values, found)
        in_order = dict(sorted(here.items()))  # whoever had them
        return Snapshot(_nested(in_order), values, local_values, _trained(here, found))

    def _of_all_ranks(
        self, here: Arrays, values: dict[str, Any], found: StatefulObjects
    ) -> tuple[Arrays, list[dict[str, Any]]]:
        """The arrays of all ranks, and the values that each has otherwise than rank 0.

        With shares no byte depends on the number of ranks.
        """
        rank = collectives.rank()
        of_pieces, sharded = found.pieces(), found.sharded()
        of_shares = {name for name in here if name[0] == ARRAYS and name[1].startswith(_OF_SHARES)}
        pieces = {name for name in here if found.owner(*name) in of_pieces}
        first = _first_had(here.keys() - pieces, found) | of_shares
        apart = pieces | of_shares
        common = {n: a for n, a in here.items() if n not in apart and n[0] not in sharded}
        same = set() if self._has_shares else _trained(common, found)
        different, otherwise = self._different(common, same, values)
        local_values = collectives.all_gather_object(otherwise)
        if self._has_shares:
            for of_rank in local_values:
                values[SHARES] |= of_rank.pop(SHARES)
            _refuse_different(different, local_values, found)
            local_values = [{}]
        alone = pieces | different
        local = {(f"{LOCAL}{rank}", "/".join(n)): a for n, a in here.items() if n in alone}
        sent = local | {name: here[name] for name in first} if rank else {}
        arrays = local | {n: a for n, a in here.items() if n not in pieces}
        return arrays | self._send(sent), local_values

    def _send(self, arrays: Arrays) -> Arrays:
        """Brings arrays of all ranks to rank 0, where they are returned; by other names on each."""
        outlines = collectives.all_gather_object(_outline(arrays))
        everything = {name: entry for outline in outlines for name, entry in outline.items()}
        received = {} if collectives.rank() else _room(everything, self._buffer)
        for source, outline in enumerate(outlines):
            _broadcast(source, outline, arrays if collectives.rank() == source else received)
        return received

    def _different(
        self, common: Arrays, same: set[Name], values: dict[str, Any]
    ) -> tuple[set[Name], dict[str, Any]]:
        """What this rank has otherwise than rank 0; of the `same` only what has drifted."""
        skipped = set() if self._drifted is None else same - self._drifted
        sums = {
            name: (str(array), zlib.crc32(array.data))  # type: ignore[arg-type]
            for name, array in common.items()
            if name not in skipped
        }
        sums_of_zero, values_of_zero = collectives.broadcast_object((sums, values))
        different = {name for name in sums if sums_of_zero.get(name) != sums[name]}
        if self._drifted is None:
            self._drifted = same & set().union(*collectives.all_gather_object(different))
            for file, key in sorted(self._drifted)[:1]:
                self._logger.warning(
                    f"{file}.{key} differs between the ranks: each trains a model of its own. Put "
                    "what you train into self.data_parallel and call that in train_batch."
                )
        return different, {
            entry: {n: v for n, v in parts.items() if values_of_zero[entry].get(n) != v}
            for entry, parts in values.items()
        }


def _refuse_different(
    different: Set[Name], values: list[dict[str, Any]], found: StatefulObjects
) -> None:
    """Raises a RuntimeError for what depends on the number of ranks; collective."""
    for rank, of_rank in enumerate(collectives.all_gather_object(sorted(different))):
        names = [name for entry in values[rank].values() for name in entry]
        names += [key.partition(".")[2] for file, key in of_rank if file == ARRAYS]
        frozen = {name for name in of_rank if name[0] != ARRAYS} - _trained(of_rank, found)
        of_others = [f"{file}.{key}" for file, key in [*sorted(frozen), *of_rank]]
        what = "a weight or its accumulator"
        hint = "gradients of what is done within the loop over micro_batches() alone"
        if frozen:
            what = "a tensor that is not trained"
            hint = "it to be a buffer (register_buffer), of which each share has its own"
        if names:
            what = "a value"
            hint = "the same on all, or register_stateful of it with by_share=True"
        if names or of_others:
            raise RuntimeError(
                f"self.{(names or of_others)[0]}: {what} that is another one on rank {rank} than "
                f"on rank 0, and would depend on their number; with training.shares expected "
                f"{hint}, or exclude_from_state, if training does not depend on it."
            )


def _first_had(names: Set[Name], found: StatefulObjects) -> set[Name]:
    """The accumulators of sharded optimizers that no rank before this one has."""
    of_ranks = collectives.all_gather_object(
        {name for name in names if name[0] in found.optimizers}
    )
    sharded = found.sharded()
    for of_rank in of_ranks:
        for file, key in sorted(of_rank ^ of_ranks[0]):
            if file not in sharded:
                raise RuntimeError(
                    f"self.{file}: {key!r} is on some of the ranks alone, and would be lost; "
                    "expected the same parameters to be updated on all ranks, or an optimizer of "
                    "paddle.distributed.fleet that divides them."
                )
    earlier = of_ranks[: collectives.rank()]
    return {name for name in names if name[0] in sharded}.difference(*earlier)


def _trained(names: Iterable[Name], found: StatefulObjects) -> set[Name]:
    """Those of what is trained and its accumulators; running statistics are only parameters."""
    layers = {name: layer.named_parameters() for name, layer in found.layers.items()}
    files = {**layers, PARAMETERS: found.parameters.items()}
    named = [(file, key, p) for file, parameters in files.items() for key, p in parameters]
    trained = {(file, key) for file, key, parameter in named if not parameter.stop_gradient}
    return {n for n in names if _origin(n) in trained or _origin(n)[0] in found.optimizers}


@dataclass
class Opened:
    """A checkpoint that verifies, on every rank."""

    manifest: dict[str, Any]
    state: bytes  # of state.json
    outline: Outline
    arrays: Arrays  # views of the files
    is_seen: bool  # by all ranks; else rank 0 alone has the arrays


def open_checkpoint(path: Path) -> Opened:
    """Opens a checkpoint on rank 0, and on the others, if each finds the same one at this path.

    They need not, but to send it takes longer, and memory for what is sent.

    Raises:
        CheckpointError: It is damaged.
    """

    def read() -> tuple[dict[str, Any], bytes, Outline]:
        manifest = storage.read_manifest(path)  # who has found it here has verified it
        state = storage.read(path).get(STATE_FILE, np.empty(0, np.uint8))
        return manifest, state.tobytes(), _outline(_arrays_in(path))

    read_there = collectives.on_rank_zero(read, "reading the checkpoint")
    assert read_there is not None
    manifest, state, outline = read_there
    arrays: Arrays = {}
    with contextlib.suppress(storage.CheckpointError):
        if collectives.rank() == 0 or storage.verify(path) == manifest:
            arrays = _arrays_in(path)
    collectives.barrier("reading the checkpoint")
    is_seen = all(collectives.all_gather_object(bool(arrays)))
    return Opened(manifest, state, outline, arrays, is_seen)


def take(saved: Opened, found: StatefulObjects, num_ranks: int) -> tuple[Tensors, list[str]]:
    """What this rank needs of what `num_ranks` have saved, and a line for what nobody can take.

    With another number of ranks all have what rank 0 had, and pieces cannot be taken. Collective.
    """
    rank, sharded, problems = collectives.rank(), found.sharded(), []
    places = {  # where a tensor stands, by its name here
        (file, key): (file, key)
        for file, key in saved.outline
        if not file.startswith(LOCAL)
        if file not in sharded or found.owner(file, key) in sharded[file]
    }
    if num_ranks == collectives.world_size():
        places |= {_origin(name): name for name in saved.outline if name[0] == f"{LOCAL}{rank}"}
    else:
        problems = [
            f"{file}: {key!r} is in pieces; expected {num_ranks} ranks that have one each."
            for file, key in (_origin(name) for name in saved.outline if name[0] == f"{LOCAL}0")
        ]
    arrays = saved.arrays
    if not saved.is_seen:
        if rank:
            part = {name: saved.outline[name] for name in places.values()}
            arrays = _room(part, SnapshotBuffer())
        _broadcast(0, saved.outline, arrays)
    return _nested({name: arrays[place] for name, place in places.items()}), problems


def as_on_rank_zero(tensors: Tensors) -> Tensors:
    """The arrays that rank 0 has, on every rank. They are sent if a rank has others; collective."""
    if collectives.world_size() == 1:
        return tensors
    here = _flat(tensors)
    checksum = checksum_of(array.data for array in here.values())
    of_ranks = collectives.all_gather_object((_outline(here), checksum))
    if all(of_rank == of_ranks[0] for of_rank in of_ranks):
        return tensors
    outline = of_ranks[0][0]
    arrays = _room(outline, SnapshotBuffer()) if collectives.rank() else here
    _broadcast(0, outline, arrays)
    return _nested(arrays)


def _broadcast(source: int, outline: Outline, arrays: Arrays) -> None:
    """Copies arrays from one rank to the others; what a rank has no array for, it passes over.

    Not by send and recv: after those, paddle's gloo fails at the next collective of three ranks.
    """
    is_source = collectives.rank() == source
    for chunk in _chunks(outline):
        ends = np.cumsum([part.stop - part.start for _, part in chunk])
        data = np.empty(ends[-1], np.uint8)
        if is_source:
            np.concatenate([arrays[name].data[part] for name, part in chunk], out=data)
        tensor = paddle.to_tensor(data)
        paddle.distributed.broadcast(tensor, src=source)
        if arrays and not is_source:
            views = np.split(Array.of(tensor).data, ends[:-1])  # numpy() would copy
            for (name, part), view in zip(chunk, views, strict=True):
                if name in arrays:
                    arrays[name].data[part] = view


def _chunks(outline: Outline) -> Iterator[list[tuple[Name, slice]]]:
    """What is sent at a time: parts of arrays, small ones together."""
    chunk: list[tuple[Name, slice]] = []
    room = _CHUNK
    for name, (_, _, size) in outline.items():
        start = 0
        while start < size:
            end = min(size, start + room)
            chunk.append((name, slice(start, end)))
            room -= end - start
            start = end
            if not room:
                yield chunk
                chunk = []
                room = _CHUNK
    if chunk:
        yield chunk


def _origin(name: Name) -> Name:
    """File and key under which a rank itself has it."""
    file, _, key = name[1].partition("/")
    return (file, key) if name[0].startswith(LOCAL) else name


def _arrays_in(path: Path) -> Arrays:
    tensors: Tensors = {}
    for name, data in storage.read(path).items():
        if name.endswith(SUFFIX):
            with storage.reading(path / name):
                tensors[name.removesuffix(SUFFIX)] = parse(data)
    return _flat(tensors)


def _outline(arrays: Arrays) -> Outline:
    return {name: (a.dtype, a.shape, a.data.nbytes) for name, a in arrays.items()}


def _room(outline: Outline, buffer: SnapshotBuffer) -> Arrays:
    """Arrays to receive into."""
    memory = buffer.room(sum(size for _, _, size in outline.values()))
    arrays: Arrays = {}
    end = 0
    for name, (dtype, shape, size) in outline.items():
        start = end
        end += size
        arrays[name] = Array(dtype, shape, memory[start:end])
    return arrays


def _flat(tensors: Tensors) -> Arrays:
    return {(file, key): a for file, arrays in tensors.items() for key, a in arrays.items()}


def _nested(arrays: Arrays) -> Tensors:
    tensors: Tensors = {}
    for (file, key), array in arrays.items():
        tensors.setdefault(file, {})[key] = array
    return tensors
