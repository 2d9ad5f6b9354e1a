"""A file that grows piece by piece, and can be cut back: logs, metrics, the records of VisualDL.

file = AppendedFile(directory / "metrics.jsonl")   # opened at its first piece
file.append(data)
size = file.size()
file.cut(size)                                     # what came later is gone
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


class AppendedFile:
    """Each piece is the system's when `append` returns, so a kill does not lose it.

    Without a path nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def append(self, data: bytes) -> None:
        """Adds a piece at the end.

        Raises:
            OSError: The system refused; a part may be written.
        """
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)  # which would cost as much again
        while data:  # the system may take a part of it
            data = data[self._file.write(data) :]

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
