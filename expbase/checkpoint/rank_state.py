"""Per-rank state: what is the same on all ranks, and what each has; to rank 0 and back.

    trained     what is trained, and its accumulators: DataParallel keeps them equal, and rank 0's
                are saved. Each save compares a sample (rank_comparison.py), and the checkpoint says
                what differs.
    compared    all else: running statistics, generators, values. Each save compares checksums, and
                what a rank has otherwise than rank 0 is its per-rank state.
    pieces      tensors of which each rank has another part (by placements, or marked
                `is_distributed`), and their accumulators: always per-rank state.
    sharded     the accumulators of an optimizer whose ranks update some parameters each (fleet's).
                They stand once, as if one process had them all.

Rank 0 alone writes. `@local_R.safetensors` is the state of rank R, by `file/key`; that of rank 0 is
its pieces. At a resume each rank takes what all have, the accumulators that it updates now, and its
per-rank state, if there are as many ranks as before; pieces fit no other number.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from expbase.base.arrays import Array, fetch, serialize
from expbase.base.background import SnapshotBuffer
from expbase.base.errors import RuntimeMistake
from expbase.base.files import checksum_of
from expbase.checkpoint import storage
from expbase.checkpoint.compare_rank_weights import (
    Arrays,
    Name,
    OnDifference,
    RankComparison,
    Sample,
    checksums,
)
from expbase.checkpoint.contents import DIVIDED, VALUES
from expbase.checkpoint.layout import ARRAYS, FORMAT, OF_RANK, STATE_FILE, SUFFIX, CheckpointError
from expbase.ranks import collectives, compare_gathered
from expbase.state.changed_values import HOOKED
from expbase.state.parts import PARAMETERS, StatefulObjects, Tensors, statistics

_CHUNK = 1 << 22  # bytes of one broadcast; four times as many take longer

# Raises for what a rank has otherwise than rank 0: arrays of this one, values of all.
Refusal = Callable[[Set[Name], list[dict[str, Any]], StatefulObjects], None]
Outline = dict[Name, tuple[str, tuple[int, ...], int]]  # of each array its type, shape and bytes


@dataclass
class GatheredState:
    """The state of all ranks at a save."""

    tensors: Tensors
    values: dict[str, Any]
    of_ranks: list[dict[str, Any]]  # the values that each rank has other than rank 0
    trained: set[Name]  # must be finite
    differing: list[str] = field(default_factory=list)  # parameters of which rank 0's is here

    def nonfinite(self) -> str:
        """Returns the names of the first tensors that are not finite; "" if all are."""
        bad = [f"{f}.{key}" for f, key in self.trained if not self.tensors[f][key].is_finite()]
        return ", ".join(sorted(bad)[:3])

    def files(self) -> dict[str, list[Any]]:
        """Returns the content of each file, in buffers."""
        state = {"format": FORMAT, "values": self.values, "local": self.of_ranks}
        if self.differing:  # which no 1.0 has written, nor reads
            state["differing"] = self.differing
        return {
            **{f"{name}{SUFFIX}": [*serialize(arrays)] for name, arrays in self.tensors.items()},
            STATE_FILE: [json.dumps(state).encode()],
        }


class Gatherer:
    """Brings to rank 0 what a checkpoint holds.

    Args:
        refuse: Called, if no bit may depend on the number of ranks, with what this rank has
            otherwise than rank 0, and with the values of which that is so on each rank; raises.
        on_difference: Called on every rank when trained tensors or learning rates differ.
    """

    def __init__(
        self,
        logger: logging.Logger,
        refuse: Refusal | None = None,
        on_difference: OnDifference | None = None,
    ) -> None:
        self._refuse = refuse
        self._comparison = RankComparison(logger, on_difference)

    def gather(
        self,
        found: StatefulObjects,
        tensors: Tensors,
        values: dict[str, Any],
        memory: SnapshotBuffer | None = None,
    ) -> GatheredState:
        """Returns the state of all ranks, on rank 0; on the others only a part of it. A collective.

        The tensors that other ranks send to rank 0 are kept in `memory`.

        Raises:
            RuntimeError: A rank has an accumulator that another one lacks, or what is refused.
        """
        here = _flat(tensors)
        of_ranks: list[dict[str, Any]] = [{}]
        if collectives.world_size() > 1:
            here, of_ranks = self._of_all_ranks(here, values, found, memory or SnapshotBuffer())
        in_order = dict(sorted(here.items()))  # whoever had them
        differing = sorted(self._comparison.differing)
        trained = trained_names(here, found)
        return GatheredState(_nested(in_order), values, of_ranks, trained, differing)

    def _of_all_ranks(
        self,
        here: Arrays,
        values: dict[str, Any],
        found: StatefulObjects,
        memory: SnapshotBuffer,
    ) -> tuple[Arrays, list[dict[str, Any]]]:
        """Returns the arrays of all ranks, and the values that each has otherwise than rank 0."""
        rank = collectives.rank()
        piece_names = found.pieces()
        sharded = found.sharded()
        divided = {name for name in here if name[0] == ARRAYS and name[1].startswith(f"{DIVIDED}.")}
        pieces = {name for name in here if found.owner(*name) in piece_names}
        sent_once = _first_had(here.keys() - pieces, found) | divided
        compared = here.keys() - pieces - divided - {n for n in here if n[0] in sharded}
        different, values_here = self._different({n: here[n] for n in compared}, values, found)
        of_ranks = collectives.all_gather_object(values_here)
        if self._refuse is not None:
            for of_rank in of_ranks:
                values[DIVIDED] |= of_rank.pop(DIVIDED)
            self._refuse(different, of_ranks, found)
            of_ranks = [{}]
        apart = pieces | different
        of_rank_only = {(f"{OF_RANK}{rank}", "/".join(n)): a for n, a in here.items() if n in apart}
        if rank == 0:
            common = {name: array for name, array in here.items() if name not in pieces}
            return of_rank_only | common | _send({}, memory), of_ranks
        return _send(of_rank_only | {name: here[name] for name in sent_once}, memory), of_ranks

    def _different(
        self, compared: Arrays, values: dict[str, Any], found: StatefulObjects
    ) -> tuple[set[Name], dict[str, Any]]:
        """Returns the untrained tensors and values of this rank that differ from rank 0's."""
        comparison = self._comparison
        trained = set() if self._refuse else trained_names(compared, found)
        watched = {name: compared[name] for name in comparison.not_known(trained, found)}
        sums = checksums({name: compared[name] for name in compared.keys() - trained})
        sample = Sample(0, {}) if self._refuse else comparison.sample(watched, found)
        of_zero = None if collectives.rank() else (sums, values)
        of_ranks = collectives.all_gather_object((sample, of_zero))
        assert of_ranks[0][1] is not None
        sums_of_zero, values_of_zero = of_ranks[0][1]
        samples = [of_rank[0] for of_rank in of_ranks]
        if comparison.shows(samples):
            comparison.look(watched, found, samples)
        different = compare_gathered.unlike([sums_of_zero, sums]) & sums.keys()
        different = {*comparison.not_known(different, found)}  # nor what only rank 0 trains
        others = {
            entry: compare_gathered.unlike([values_of_zero[entry], values[entry]])
            for entry in values
        }
        if self._refuse:  # what on_train_begin sets on each rank, such as its id, is rank 0's
            hooked = {HOOKED}.union(
                *(of[VALUES].get(HOOKED, ()) for of in (values_of_zero, values))
            )
            others[VALUES] -= hooked
            arrays = {f"{VALUES}.{path.removesuffix('[:]')}" for path in hooked}
            within = tuple(f"{name}{mark}" for name in arrays for mark in ".'#")
            different -= {
                (file, key)
                for file, key in different
                if file == ARRAYS and (key in arrays or key.startswith(within))
            }
        return different, {
            entry: {name: value for name, value in parts.items() if name in others[entry]}
            for entry, parts in values.items()
        }


def _send(arrays: Arrays, memory: SnapshotBuffer) -> Arrays:
    """Brings arrays of all ranks to rank 0, where they are returned; by other names on each."""
    outlines = collectives.all_gather_object(_outline(arrays))
    everything = {name: entry for outline in outlines for name, entry in outline.items()}
    received = {} if collectives.rank() else _room(everything, memory)
    fetch(arrays.values())
    for source, outline in enumerate(outlines):
        _broadcast(source, outline, arrays if collectives.rank() == source else received)
    return received


def _first_had(names: Set[Name], found: StatefulObjects) -> set[Name]:
    """Returns the accumulators of sharded optimizers that no rank before this one has."""
    here = dict.fromkeys(name for name in names if name[0] in found.optimizers)
    of_ranks = collectives.all_gather_object(here)
    sharded = found.sharded()
    for file, key in sorted(compare_gathered.unlike(of_ranks)):
        if file not in sharded:
            raise RuntimeMistake(
                f"self.{file}: {key!r} is on some of the ranks alone, and would be lost; expected "
                "the same parameters to be updated on all ranks, or an optimizer of "
                "paddle.distributed.fleet that divides them."
            )
    earlier = of_ranks[: collectives.rank()]
    return {name for name in names if name[0] in sharded}.difference(*earlier)


def trained_names(names: Iterable[Name], found: StatefulObjects) -> set[Name]:
    """Returns the names of what is trained, and of its accumulators; no running statistics, which a
    loop that unfreezes all parameters reaches, too.
    """
    layers = {name: layer.named_parameters() for name, layer in found.layers.items()}
    files = {**layers, PARAMETERS: found.parameters.items()}
    named = [(file, key, p) for file, parameters in files.items() for key, p in parameters]
    written = {path for path, _ in statistics(found)}
    trained = {
        (file, key)
        for file, key, parameter in named
        if not parameter.stop_gradient and f"{file}.{key}" not in written
    }
    return {n for n in names if _origin(n) in trained or _origin(n)[0] in found.optimizers}


@dataclass
class OpenedOnRanks:
    """A checkpoint that verifies, on every rank."""

    info: dict[str, Any]  # of the manifest
    state: dict[str, Any]
    outline: Outline
    arrays: Arrays  # views of the files
    is_seen: bool  # by all ranks; else rank 0 alone has the arrays

    def of_this_rank(self) -> tuple[dict[str, Any], int]:
        """Returns the values of each entry as this rank is to have them, and how many ranks there
        were: what each had otherwise comes back if there are as many.
        """
        values, of_ranks = self.state["values"], self.state["local"]
        if len(of_ranks) == collectives.world_size():
            for name, entry in of_ranks[collectives.rank()].items():
                values[name] |= entry
        return values, len(of_ranks)


def open_checkpoint(path: Path) -> OpenedOnRanks:
    """Opens a checkpoint on rank 0, and on the others, if each finds the same one at this path.

    They need not, but to send it takes longer, and memory for what is sent.

    Raises:
        CheckpointError: It is damaged.
    """
    arrays: Arrays = {}

    def read() -> tuple[dict[str, Any], bytes, Outline]:
        there = storage.opened(path)
        arrays.update(_flat(there.arrays))
        state = there.files.get(STATE_FILE, np.empty(0, np.uint8))
        return there.manifest, state.tobytes(), _outline(arrays)

    read_there = collectives.on_rank_zero(read, "reading the checkpoint")
    assert read_there is not None
    manifest, state, outline = read_there
    if collectives.rank():
        with contextlib.suppress(CheckpointError):
            if storage.verify(path) == manifest:
                arrays = _flat(storage.opened(path).arrays)
    collectives.barrier("reading the checkpoint")
    is_seen = all(collectives.all_gather_object(bool(arrays)))
    info: dict[str, Any] = manifest["info"]
    return OpenedOnRanks(info, storage.state_in(path, state, info), outline, arrays, is_seen)


def take(saved: OpenedOnRanks, found: StatefulObjects, num_ranks: int) -> tuple[Tensors, list[str]]:
    """Returns the tensors that this rank needs from the state of `num_ranks`, and problems.

    With another number of ranks all get the state of rank 0, and pieces cannot be taken. A
    collective.
    """
    rank = collectives.rank()
    sharded = found.sharded()
    problems = []
    places = {  # where a tensor stands, by its name here
        (file, key): (file, key)
        for file, key in saved.outline
        if not file.startswith(OF_RANK)
        if file not in sharded or found.owner(file, key) in sharded[file]
    }
    if num_ranks == collectives.world_size():
        places |= {_origin(name): name for name in saved.outline if name[0] == f"{OF_RANK}{rank}"}
    else:
        problems = [
            f"{file}: {key!r} is in pieces; expected {num_ranks} ranks that have one each."
            for file, key in (_origin(name) for name in saved.outline if name[0] == f"{OF_RANK}0")
        ]
    arrays = saved.arrays
    if not saved.is_seen:
        if rank:
            part = {name: saved.outline[name] for name in places.values()}
            arrays = _room(part, SnapshotBuffer())
        _broadcast(0, saved.outline, arrays)
    return _nested({name: arrays[place] for name, place in places.items()}), problems


def as_on_rank_zero(tensors: Tensors) -> Tensors:
    """Returns rank 0's arrays, on every rank. They are sent if a rank has others; collective."""
    if collectives.world_size() == 1:
        return tensors
    here = _flat(tensors)
    checksum = checksum_of(array.data for array in here.values())
    of_ranks = collectives.all_gather_object((_outline(here), checksum))
    if compare_gathered.are_alike(of_ranks):
        return tensors
    outline = of_ranks[0][0]
    arrays = _room(outline, SnapshotBuffer()) if collectives.rank() else here
    _broadcast(0, outline, arrays)
    return _nested(arrays)


def _broadcast(source: int, outline: Outline, arrays: Arrays) -> None:
    """Copies arrays from one rank to the others; what a rank has no array for, it passes over.

    Not by send and recv: after those, paddle's gloo fails at the next collective of three ranks
    (paddle/fluid/distributed/collective/process_group_gloo.cc, ProcessGroupGloo::Send).
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
    """Yields what is sent at a time: parts of arrays, small ones together."""
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
    """Returns file and key under which a rank itself has it."""
    file, _, key = name[1].partition("/")
    return (file, key) if name[0].startswith(OF_RANK) else name


def _outline(arrays: Arrays) -> Outline:
    return {name: (a.dtype, a.shape, a.nbytes) for name, a in arrays.items()}


def _room(outline: Outline, buffer: SnapshotBuffer) -> Arrays:
    """Returns arrays to receive into."""
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
