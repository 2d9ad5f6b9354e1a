"""A file that grows by whole pieces and can be cut back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from expbase.base.files import AppendedFile, flush, read_bytes


def test_a_file_goes_on_after_it_was_closed_and_cut(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "log")
    assert file.size() == 0
    file.append(b"one\n")
    assert (tmp_path / "log").read_bytes() == b"one\n"  # it is there before it is closed
    size = file.size()
    file.append(b"two\n")
    file.cut(size)
    file.cut(size + 1000)  # there is nothing to remove
    file.append(b"three\n")
    file.close()
    file.close()
    file.append(b"!\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\nthree\n!\n"


def test_a_torn_last_line_is_ended_and_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(b"one\ntw")
    file = AppendedFile(tmp_path / "log")
    for piece in (b"three\n", b"four\n"):
        file.append(piece)
        file.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntw\nthree\nfour\n"
    assert capfd.readouterr().err.count("log: its last line was torn, as by a power cut") == 1


def test_nothing_but_a_file_is_read_or_written(tmp_path: Path) -> None:
    """A pipe would be waited for; through a link somebody else's file would be changed."""
    (tmp_path / "theirs").write_bytes(b"theirs\n")
    (tmp_path / "link").symlink_to("theirs")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # with it a pipe can be opened
    for name in ("link", "pipe"):
        file = AppendedFile(tmp_path / name)
        file.append(b"ours\n")
        with pytest.raises(OSError, match=r"symbolic links|no regular file"):
            file.open()
    AppendedFile(tmp_path / "link").cut(0)
    assert (tmp_path / "theirs").read_bytes() == b"theirs\n"
    os.close(reader)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            read_bytes(path, 10)
    assert read_bytes(tmp_path / "link", 7) == b"theirs\n"  # is read, wherever it leads
    assert read_bytes(tmp_path / "link", 3, or_end=True) == b"rs\n"
    with pytest.raises(OSError, match="7 bytes long; expected at most 6"):
        read_bytes(tmp_path / "link", 6)


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


def test_a_file_that_cannot_be_cut_is_told_and_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    monkeypatch.setattr("expbase.base.files.regular", refuse)  # another user's, under a sticky bit
    AppendedFile(tmp_path / "log").cut(4)
    text = "log: cannot be cut back to the checkpoint: Operation not permitted"
    assert text in capfd.readouterr().err
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_without_a_path_nothing_is_written() -> None:
    file = AppendedFile(None)
    file.append(b"one")
    file.cut(0)
    file.close()
    assert file.size() == 0


@pytest.mark.parametrize(
    ("number", "place", "is_passed_over"),
    [(errno.EINVAL, "", True), (errno.EIO, "", False), (errno.EINVAL, "file", False)],
)
def test_only_a_directory_that_cannot_be_flushed_at_all_is_passed_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    place: str,
    is_passed_over: bool,
) -> None:
    """As on older CIFS; a disk that fails, or a file that is not kept, is an error as before."""

    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    monkeypatch.setattr("os.fsync", fsync)
    if is_passed_over:
        return flush(tmp_path / place)
    with pytest.raises(OSError, match=os.strerror(number)):
        flush(tmp_path / place)
