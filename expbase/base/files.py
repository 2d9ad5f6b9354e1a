"""The files of a run: how each is opened, and files that grow piece by piece.

data = read_bytes(path, most=1 << 20)              # an OSError if it is a pipe, or larger
file = AppendedFile(directory / "metrics.jsonl")   # opened at its first piece
file.append(data)
size = file.size()
file.cut(size)                                     # removes later pieces
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import stat
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from expbase.base.errors import OSMistake
from expbase.base.terminal import say
from expbase.base.threads import result_of

# The exceptions that a wrong value in a damaged file may raise.
DAMAGES = AttributeError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError


def regular(path: str, flags: int) -> int:
    """Opens a regular file, as the `opener` of `open`; an OSError if it is anything else.

    `open` would wait for a pipe, and a device may have no end. A file to be written may be no link:
    another user may have planted it.
    """
    is_read = flags & os.O_ACCMODE == os.O_RDONLY
    flags |= os.O_NONBLOCK | (0 if is_read else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSMistake(errno.EINVAL, "no regular file", path)
    return descriptor


def read_bytes(path: Path, most: int, *, or_end: bool = False) -> bytes:
    """Returns the content of a file.

    Args:
        path: The file.
        most: The greatest size, in bytes.
        or_end: Return the last `most` bytes of a longer file, instead of an error.

    Raises:
        OSError: It is no regular file, or too long.
    """
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most and not or_end:
            raise OSMistake(errno.EFBIG, f"{size} bytes long; expected at most {most}", str(path))
        file.seek(max(size - most, 0))
        return file.read(most)


class AppendedFile:
    """A file that grows piece by piece.

    When `append` returns, the system has the piece, and a kill of the process does not lose it.
    Without a path nothing is written.
    """

    has_lines = True  # each piece ends a line

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._is_refused = False  # the last piece was, and that was told
        self._has_bytes = 0  # that the file is known to have, while it is open

    def open(self) -> IO[bytes]:
        """Opens the file, unless it is open; an OSError if that fails."""
        if self._file is None:
            assert self.path is not None
            # A buffer would cost as much again. No directory is made: a run has its own already.
            self._file = open(self.path, "ab", buffering=0, opener=regular)
            self._has_bytes = os.fstat(self._file.fileno()).st_size
            if self.has_lines:
                self._end_torn_line(self._file)
        return self._file

    def _end_torn_line(self, file: IO[bytes]) -> None:
        """Ends a line that a power cut has torn: it would spoil the one that comes after it."""
        with open(self.path or "", "rb", opener=regular) as written:
            written.seek(max(self.size() - 1, 0))
            is_torn = written.read(1) not in (b"", b"\n")
        if is_torn:
            file.write(b"\n")
            text = "its last line was torn, as by a power cut, and is lost; what follows is not"
            say(f"{self.path}: {text}.")

    def append(self, data: bytes) -> None:
        """Adds a piece at the end. If the system refuses, the piece is lost, and one line says so.

        A full disk must not end a training that may still find room for its checkpoint.
        """
        if self.path is None:
            return
        left = data
        try:
            file = self._file or self.open()
            while left:  # the system may write only a part of it
                left = left[file.write(left) :]
            self._has_bytes += len(data)
            self._is_refused = False
        except OSError as error:
            self._refused(error, len(data) - len(left))

    def _refused(self, error: OSError, taken: int) -> None:
        if self._file is not None and taken:  # a torn record would spoil those behind it
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - taken)
        if not self._is_refused:
            self._is_refused = True
            lost = f"{self.path}: cannot be written: {error.strerror}; what should be in it is lost"
            # Not by a logger: the file that is refused may be its own.
            say(f"{lost}, and training goes on. Make room, or allow writing.")

    def flush(self) -> None:
        """Waits until all pieces are on the disk, if the system can do that."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())

    def size(self) -> int:
        """Returns the size of the file now, in bytes; says so if somebody else has made it less."""
        if self.path is None:
            return 0
        size = self.path.stat().st_size if self.path.exists() else 0
        is_shorter = self._file is not None and size < self._has_bytes
        if is_shorter and self.path.parent.is_dir():  # else the whole run was moved
            lost = f"has {size} bytes, and had {self._has_bytes}: it was removed or cut"
            say(f"{self.path}: {lost}, and what it had is lost. Training goes on.")
            self.close()  # the next piece is written to what is there, or to a new one
        return size

    def cut(self, size: int) -> None:
        """Removes what was written after the file had this size, in bytes.

        If the system refuses, a line says so, and training goes on.
        """
        if self.path and self.size() > size:
            try:
                with open(self.path, "ab", opener=regular) as file:
                    file.truncate(size)
                self._has_bytes = size
            except OSError as error:
                say(
                    f"{self.path}: cannot be cut back to the checkpoint: {error.strerror}; what "
                    "came after it stands there, and comes a second time. Training goes on."
                )

    def close(self) -> None:
        """Closes the file until the next piece. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def remove(path: Path) -> OSError | None:
    """Removes a directory or a file, but for what the system refuses to remove.

    Returns:
        The first refusal; None if all is removed.
    """
    is_folder = False
    try:
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)  # rmtree would wait for a pipe
    except OSError as error:
        if is_folder:
            shutil.rmtree(path, ignore_errors=True)
        return error
    return None


def write_single_file(path: Path, parts: Iterable[Any]) -> None:
    """Writes one file, which appears complete or not at all, and is on disk when this returns.

    Args:
        path: Of the file. Its folder is made.
        parts: Buffers, in order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{path.name}")
    remove(temporary)  # of a killed process
    try:
        write_flushed(temporary, parts)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def mapped(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Maps the bytes of a file into memory, which the ranks of one machine share."""
    with open(file, "rb", opener=regular) as opened:
        is_empty = not os.fstat(opened.fileno()).st_size  # which cannot be mapped
        return np.empty(0, np.uint8) if is_empty else np.memmap(opened, np.uint8, mode="r")


def write_flushed(path: Path, parts: Iterable[Any]) -> dict[str, int]:
    """Writes a new file, and waits until it is on the disk.

    Args:
        path: Of the file; an OSError if there is one.
        parts: Buffers, in order.

    Returns:
        Its `size` in bytes, and its `crc32`.
    """
    buffers = [memoryview(part).cast("B") for part in parts]
    with ThreadPoolExecutor(1) as executor, path.open("xb") as file:  # no link
        crc32 = executor.submit(checksum_of, buffers)  # while this thread waits for the disk
        file.writelines(buffers)
        file.flush()
        os.fsync(file.fileno())
        return {"size": sum(map(len, buffers)), "crc32": result_of(crc32, executor)}


def checksum_of(buffers: Iterable[Any]) -> int:
    """Returns the CRC-32 of the bytes of buffers, one after the other."""
    return functools.reduce(lambda value, buffer: zlib.crc32(buffer, value), buffers, 0)


def flush(path: Path) -> None:
    """Waits until a file or a directory is on the disk."""
    # New names and renames are on disk only when the directory that holds them was flushed.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems, such as older CIFS, can flush files and no directories.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
