"""Digests of what a run begins from: a file, a folder, the parameters of its layers.

A digest is a text, which also says of what it is: of much, only a part is read, so that a start
does not wait for it. That of a whole file is what `sha256sum` prints.

    of_path(Path("data"))                     # "sha256 3f9a… of 12,345 bytes in 3 files"
    of_tensors([("model.weight", tensor)])    # "sha256 3f9a… of 1 tensor of 48 bytes"
    or_reason(lambda: of_path(path))          # "not known: Permission denied", and no error
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from expbase.base.arrays import Array, describe, fetch
from expbase.base.files import regular
from expbase.record.starts_and_ends import LEDGER

_MOST_BYTES = 1 << 28  # of files that are read wholly; of more, the ends, which are no more either
_MOST_FILES = 1000  # of a folder that are opened: over a network each takes milliseconds
_END_BYTES = 1 << 16  # at each end of a file, at most
_PIECE_BYTES = 1 << 20
_MOST_TENSOR_BYTES = 1 << 26  # that are hashed wholly; of more, a sample of each tensor
_ELEMENTS = 1024  # of a tensor in a sample, at least


def or_reason(digest: Callable[[], str]) -> str:
    """Returns a digest, or why there is none: a failure here must not end a run."""
    try:
        return digest()
    except Exception as error:
        # A text without a path: no file of a run has one of the machine.
        return f"not known: {getattr(error, 'strerror', None) or type(error).__name__}"


def of_path(path: Path) -> str:
    """Returns the digest of a file; of a folder that of its files, with their names and sizes.

    Of more than 256 MB it is that of the names, the sizes, and the first and last 64 kB of each
    file, or less of many; of more than 1,000 files that of the first ones. A run in the folder is
    no part of it, because another one may be made in the meantime.

    Raises:
        OSError: The system refuses to read a file.
    """
    if path.is_file():
        size = path.stat().st_size
        if size <= _MOST_BYTES:
            return f"{_text(_content(path))} of {size:,} bytes"
        ends = itertools.chain([f"{size}\0".encode()], _ends(path, size, _END_BYTES))
        return f"{_text(ends)} of the size and the ends of {size:,} bytes"
    files = [*itertools.islice(_files_in(path), _MOST_FILES + 1)]
    is_cut = len(files) > _MOST_FILES
    del files[_MOST_FILES:]
    sizes = [file.stat().st_size for file in files]
    total = sum(sizes)
    is_whole = total <= _MOST_BYTES
    end = min(_END_BYTES, _MOST_BYTES // max(1, 2 * len(files)))

    def parts() -> Iterator[Any]:
        for file, size in zip(files, sizes, strict=True):
            yield f"{file.relative_to(path).as_posix()}\0{size}\0".encode()
            yield from _content(file) if is_whole else _ends(file, size, end)

    read = "" if is_whole else "the names, sizes and ends of "
    first = "the first " if is_cut else ""
    return f"{_text(parts())} of {read}{total:,} bytes in {first}{len(files):,} files"


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder and of those below it, in an order that depends on names alone;
    links are followed.
    """

    def refuse(error: OSError) -> None:
        if error.filename == str(folder):  # others are passed over, as lost+found of a disk
            raise error

    seen = set()  # a link may lead back up
    for place, folders, names in os.walk(str(folder), onerror=refuse, followlinks=True):
        status = os.stat(place)
        here = status.st_dev, status.st_ino
        if here in seen or LEDGER in names:
            folders.clear()
            continue
        seen.add(here)
        folders.sort()
        yield from filter(Path.is_file, (Path(place, name) for name in sorted(names)))


def _content(file: Path) -> Iterator[bytes]:
    with open(file, "rb", opener=regular) as stream:
        yield from iter(lambda: stream.read(_PIECE_BYTES), b"")


def _ends(file: Path, size: int, length: int) -> Iterator[bytes]:
    """Yields the first and the last bytes of a file, `length` of each."""
    with open(file, "rb", opener=regular) as stream:
        yield stream.read(length)
        stream.seek(max(0, size - length))
        yield stream.read(length)


def of_tensors(named: Iterable[tuple[str, Any]]) -> str:
    """Returns the digest of tensors: names, types, shapes and bytes. It waits for a device once.

    Of more than 64 MB it is that of a sample from all over each tensor, which is taken where the
    tensor is. Of a tensor that is split over the ranks it is the local part. Nothing is drawn.
    """
    unique = {id(tensor): (name, tensor) for name, tensor in named}  # several names of one
    tensors = dict(sorted(unique.values(), key=lambda pair: pair[0]))
    arrays = {name: Array.of(t) for name, t in tensors.items() if t._is_initialized()}
    total = sum(array.nbytes for array in arrays.values())
    taken = arrays
    if total > _MOST_TENSOR_BYTES:
        taken = {name: _sample(array) for name, array in arrays.items()}
    fetch(taken.values())

    def parts() -> Iterator[Any]:
        for name in tensors:
            array = arrays.get(name)  # None: the tensor has no memory yet
            yield f"{name} {'without values' if array is None else describe(array)}\0".encode()
            if array is not None:
                yield memoryview(taken[name].data)  # type: ignore[arg-type]

    read = "" if taken is arrays else "a sample of each of "
    plural = "s" * (len(tensors) != 1)
    return f"{_text(parts())} of {read}{len(tensors):,} tensor{plural} of {total:,} bytes"


def _sample(array: Array) -> Array:
    return array.every(max(1, math.prod(array.shape) // _ELEMENTS), 0)


def _text(parts: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256 {digest.hexdigest()}"
