"""A file that grows by whole pieces and can be cut back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from expbase.record.files import AppendedFile


def test_a_file_goes_on_after_it_was_closed_and_cut(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "new" / "log")
    file.append(b"one")
    assert (tmp_path / "new" / "log").read_bytes() == b"one"  # it is there before it is closed
    size = file.size()
    file.append(b"two")
    file.cut(size)
    file.append(b"three")
    file.close()
    file.close()
    file.append(b"!")
    file.close()
    assert (tmp_path / "new" / "log").read_bytes() == b"onethree!"


def test_a_piece_of_which_the_system_takes_a_part_is_written_whole(tmp_path: Path) -> None:
    class Part:
        """A file that takes two bytes at a time, as one may on a full disk or in a pipe."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            return self.file.write(data[:2])

    file = AppendedFile(tmp_path / "log")
    file.append(b"")
    with file._file as opened:
        file._file = Part(opened)
        file.append(b"seven..")
    assert (tmp_path / "log").read_bytes() == b"seven.."


def test_a_full_disk_is_told_once_leaves_no_half_piece_and_does_not_end_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Full:
        """A file on a disk that has room for seven bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.fileno = file, file.fileno

        def write(self, data: bytes) -> int:
            if room := 7 - os.fstat(self.fileno()).st_size:
                return self.file.write(data[:room])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = AppendedFile(tmp_path / "log")
    with file.open() as opened:
        file._file = Full(opened)
        for piece in (b"one\n", b"seven!\n", b"eight!\n", b"ab\n"):
            file.append(piece)
        assert (tmp_path / "log").read_bytes() == b"one\nab\n"
    text = "log: cannot be written: No space left on device; what should be in it is lost"
    assert capfd.readouterr().err.count(text) == 1


def test_without_a_path_nothing_is_written() -> None:
    file = AppendedFile(None)
    file.append(b"one")
    file.cut(0)
    file.close()
    assert file.size() == 0
