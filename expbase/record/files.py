"""A file that grows piece by piece, and can be cut back: logs, metrics, the records of VisualDL.

file = AppendedFile(directory / "metrics.jsonl")   # opened at its first piece
file.append(data)
size = file.size()
file.cut(size)                                     # what came later is gone
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import IO


class AppendedFile:
    """Each piece is the system's when `append` returns, so a kill does not lose it.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._is_refused = False  # the last piece was, and that was told

    def open(self) -> IO[bytes]:
        """Opens the file, unless it is open; an OSError if that cannot be."""
        if self._file is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)  # which would cost as much again
        return self._file

    def append(self, data: bytes) -> None:
        """Adds a piece at the end; if the system refuses, the piece is lost, and that is told once.

        A full disk must not end a training that may still find room for its checkpoint.
        """
        if self.path is None:
            return
        left = data
        try:
            file = self._file or self.open()
            while left:  # the system may take a part of it
                left = left[file.write(left) :]
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
            with contextlib.suppress(OSError):  # that may be on the same disk
                # Not by a logger: its file may be what is refused.
                print(f"{lost}, and training goes on. Make room.", file=sys.stderr)

    def size(self) -> int:
        """The size of the file now, in bytes."""
        return self.path.stat().st_size if self.path and self.path.exists() else 0

    def cut(self, size: int) -> None:
        """Removes what was written after the file had this size, in bytes."""
        if self.path and self.size() > size:
            os.truncate(self.path, size)

    def close(self) -> None:
        """Closes the file until the next piece. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
