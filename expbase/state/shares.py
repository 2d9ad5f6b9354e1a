"""What a rank holds alone, by construction: it writes this share itself, in a file of its own.

Such are the accumulators of an optimizer whose ranks update some parameters each (fleet's sharded
ones), and pieces: tensors of which each rank has another part, by their placements or marked
`is_distributed`, with their accumulators. Nobody compares or gathers them.

    rank 0                                        rank R
    begin: an empty hidden directory              waits for it
    @share_0, and the files of all ranks          @share_R, then an entry: checksums, or the error
    waits for the entries, manifest, rename

Below the first line this is done by a thread of each rank, so without a collective. At a resume a
rank takes its own pieces, and of the accumulators those that it updates now, whoever wrote them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expbase import distributed
from expbase.state import checkpoint
from expbase.state.arrays import Array
from expbase.state.checkpoint import CheckpointError
from expbase.state.objects import StatefulObjects, Tensors
from expbase.state.snapshot import SHARE, Snapshot

_LIMIT_SECONDS = 600.0  # for which rank 0 waits for a rank that writes nothing more
_POLL_SECONDS = 0.01


def expected(found: StatefulObjects, run: Path) -> bool:
    """Whether the ranks have shares; one or three collectives.

    Raises:
        ValueError: They have, and one does not see the directory of rank 0, which is `run` there.
    """
    has_any = bool(found.pieces() or found.sharded())
    if not any(distributed.gather_objects(has_any)):
        return False
    make_one = functools.partial(tempfile.mkdtemp, prefix=".shared-", dir=run)
    probe = Path(distributed.on_rank_zero(make_one, "looking at the directory of rank 0") or "")
    blind = distributed.gather_objects(not probe.is_dir()).count(True)
    if distributed.rank() == 0:
        probe.rmdir()
    if blind:
        raise ValueError(
            f"args.output: {blind} of the ranks do not see {probe.parent}, the directory of rank 0;"
            " expected one that all see, under the same path, because each rank writes the state "
            "that it holds alone. Give an --output on a shared disk."
        )
    return True


def split(found: StatefulObjects, tensors: Tensors) -> tuple[Tensors, Tensors, int]:
    """What all ranks have, the file of this rank's share, and the bytes of the others' shares.

    Of an accumulator that several ranks have, the first one writes it. One collective.
    """
    pieces, sharded, rank = found.pieces(), found.sharded(), distributed.rank()
    rest: Tensors = {}
    held: dict[str, tuple[str, Array]] = {}
    for file, arrays in tensors.items():
        for key, array in arrays.items():
            is_piece = found.owner(file, key) in pieces
            if is_piece or file in sharded:
                # Each rank has another part of a piece, which so goes by another name.
                held[f"{file}/{key}" + f"/{rank}" * is_piece] = f"{file}/{key}", array
            else:
                rest.setdefault(file, {})[key] = array
    of_ranks = distributed.gather_objects({n: a.data.nbytes for n, (_, a) in held.items()})
    earlier = {name for of_rank in of_ranks[:rank] for name in of_rank}
    share = dict(named for name, named in held.items() if name not in earlier)
    everything = {name: size for of_rank in of_ranks for name, size in of_rank.items()}
    others = sum(everything.values()) - sum(array.data.nbytes for array in share.values())
    return rest, {f"{SHARE}{rank}": share}, others


def write(snapshot: Snapshot) -> None:
    """On another rank than 0: its share, if it is finite, and then its entry.

    Raises:
        CheckpointError: The system refused; rank 0 is told, if that can be.
    """
    directory, bad, error, files = snapshot.path or Path(), snapshot.nonfinite(), "", {}
    try:
        files = {} if bad else checkpoint.add(directory, snapshot.tensor_files())
    except OSError as raised:
        error = raised.strerror or f"{raised}"
    entry, text = _entry(directory, distributed.rank()), json.dumps([files, bad, error])
    with contextlib.suppress(FileNotFoundError):  # rank 0 has given up, and says why
        checkpoint.add(directory, {f"{entry.name}.part": [text.encode()]})
        os.replace(f"{entry}.part", entry)
    if error:
        raise CheckpointError(f"{directory}: cannot be written: {error}.")


def write_together(snapshot: Snapshot, bad: str) -> tuple[dict[str, Any], str]:
    """On rank 0: its files, unless something is `bad`, while the others write theirs.

    Returns:
        The manifest's entries, and what is not finite on any rank; then nothing is left.

    Raises:
        CheckpointError: A rank could not write, or does not go on.
    """
    directory = snapshot.path or Path()
    with checkpoint.explained(directory):
        entries = {} if bad else checkpoint.add(directory, snapshot.files())
        found = [bad]
        for files, theirs in _entries(directory):
            entries |= files
            found.append(theirs)
    if bad := ", ".join(filter(None, found)):
        shutil.rmtree(directory)
    return entries, bad


def _entries(directory: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Those of the other ranks, as they come."""
    missing = {*range(1, distributed.world_size())}
    progress, since = -1, time.monotonic()
    while missing:
        for rank in [rank for rank in missing if _entry(directory, rank).exists()]:
            files, bad, error = json.loads(_entry(directory, rank).read_bytes())
            _entry(directory, rank).unlink()
            if error:
                raise OSError(0, f"{error} (rank {rank})")
            missing.remove(rank)
            yield files, bad
        before, progress = progress, _size(directory)
        since = since if before == progress else time.monotonic()
        if missing and time.monotonic() - since > _LIMIT_SECONDS:
            raise CheckpointError(
                f"{directory}: rank {min(missing)} has not written its share, and nothing new for "
                f"{_LIMIT_SECONDS:.0f} s. Look whether it is stopped, and whether it has its disk."
            )
        time.sleep(_POLL_SECONDS if missing else 0)


def _size(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # an entry has just got its name
            total += file.stat().st_size
    return total


def _entry(directory: Path, rank: int) -> Path:
    return directory / f"entry_{rank}.json"


def take(found: StatefulObjects, files: Tensors, rank: int | None) -> list[str]:
    """Replaces the shares in `files` by what this rank holds now; a line for what cannot be.

    `rank` is its number among those that wrote them; None if they were more or less.
    """
    pieces, sharded, problems = found.pieces(), found.sharded(), []
    shares = {n: files.pop(n) for n in [*files] if n.startswith(SHARE)}
    for file in sharded.keys() & files.keys():  # one process may have saved all of them
        mine = sharded[file]
        files[file] = {k: a for k, a in files[file].items() if found.owner(file, k) in mine}
    for name in dict.fromkeys(name for share in shares.values() for name in share):
        file, key = name.split("/", 1)
        owner = found.owner(file, key)
        holders = [share for share in shares.values() if name in share]
        if owner in pieces and rank is not None:
            holders = [share for share in (shares.get(f"{SHARE}{rank}", {}),) if name in share]
        elif owner in pieces or len(holders) > 1:
            parts = f"expected {len(shares)} ranks that have one each"
            problems.append(f"{file}: {key!r} is in pieces; {parts}.")
        elif owner not in sharded.get(file, {owner}):
            continue  # another rank updates it now
        for share in holders:
            files.setdefault(file, {})[key] = share[name]
    return problems
