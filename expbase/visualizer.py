"""VisualDL for one run: one record file, opened at first use. The only file that imports it.

visualizer = Visualizer(directory)      # or Visualizer(None): takes everything, writes nothing
visualizer.add_scalar("train/loss", 0.25, step=400)
visualizer.close()
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

FILE_NAME = "vdlrecords.run.log"


class Visualizer:
    """Writes one VisualDL record file; a resumed run goes on in the same one.

    Args:
        directory: Where the file stands; None on the ranks that write none.
    """

    def __init__(self, directory: str | Path | None) -> None:
        # Absolute: a chdir of the user's must not divert the log.
        self._directory = None if directory is None else os.path.abspath(directory)
        self._path = None if directory is None else Path(os.path.abspath(directory)) / FILE_NAME
        self._writer: Any = None

    @property
    def writer(self) -> Any:
        """VisualDL's own LogWriter, for what has no method here; None where nothing is written."""
        if self._writer is None and self._directory is not None:
            from visualdl import LogWriter

            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                # It prints that it goes on in an existing file, which is what we want.
                self._writer = LogWriter(logdir=self._directory, file_name=FILE_NAME)
        return self._writer

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Adds one point to a curve."""
        if self._directory is not None:
            self.writer.add_scalar(tag.replace("%", "_"), value, step)  # VisualDL takes no %

    def size(self) -> int:
        """Of the record file now, in bytes, with everything that was added."""
        if self._writer is not None:
            for file_writer in self._writer._all_writers.values():
                file_writer.flush()
        return self._path.stat().st_size if self._path and self._path.exists() else 0

    def cut(self, size: int) -> None:
        """Takes away what was written after the file had this size; a torn record goes too."""
        self.close()
        if self._path is not None and self.size() > size:
            os.truncate(self._path, size)

    def close(self) -> None:
        """Writes what is pending and closes the file. May be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
