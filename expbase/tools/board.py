"""VisualDL over all runs below a directory, also while they are running.

Starts VisualDL's own command over copies of the runs' record files, in a temporary directory. A
copy holds whole records only: VisualDL fails at the half record that a killed run leaves. Every
second the new records are added. VisualDL cannot forget what it has read: when a resumed run has
cut its file back, VisualDL is started again over new copies. Until then a removed run stays.

The runs' files are only read, and the pages load nothing from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from expbase.base.errors import RuntimeMistake, ValueMistake
from expbase.base.files import regular
from expbase.base.processes import die_with_parent
from expbase.record.visualizer import FILE_NAME, RECORD_HEAD
from expbase.tools import add_tool, board_server
from expbase.tools.child_processes import ended_by_signals, kill
from expbase.tools.runs import find

_COPIES = "expbase-board-"  # how the name of their directory begins, before the process's id


Seen = dict[Path, tuple[int, ...]]  # by a copy: inode, size and time of its file


def record_files(folder: Path, copies: Path) -> dict[Path, Path]:
    """Returns the record files of the runs at and below a folder, by the paths of the copies."""
    runs = find(folder)
    files = {copies / run.relative_to(folder) / FILE_NAME: run / FILE_NAME for run in runs}
    return {c: path for c, path in files.items() if path.is_file() and os.access(path, os.R_OK)}


def update(files: dict[Path, Path], seen: Seen) -> bool:
    """Adds the new records of runs to their copies.

    Args:
        files: The record files, by the paths of their copies.
        seen: What is known of the files. One that is as it was is not opened: of thousands of runs
            few are growing.

    Returns:
        False if a copy holds records that its file does not have any more.
    """
    for copy, path in files.items():
        status = path.stat()
        is_now = status.st_ino, status.st_size, status.st_mtime_ns
        if seen.get(copy) == is_now:
            continue
        if not _extend(copy, path):
            return False
        seen[copy] = is_now
    return True


def _extend(copy: Path, path: Path) -> bool:
    """Adds the new whole records of a file to its copy; False if the file does not begin with it.

    VisualDL opens a file by its name for each piece that it reads (visualdl/io/bfile.py,
    LocalFileSystem.read), and fails for good at half of a record (visualdl/reader/record_reader.py,
    RecordReader.get_next). So a longer copy takes the place of the copy.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.touch()
    with copy.open("rb") as copied, open(path, "rb", opener=regular) as file:
        size = copy.stat().st_size
        start = max(size - 256, 0)
        copied.seek(start)
        file.seek(start)
        # The last bytes are enough: each record holds the time when it was written.
        if copied.read() != file.read(size - start):
            return False
        records = _whole_records(file)
        for first in records:
            longer = shutil.copyfile(copy, copy.with_name("longer"))  # no name of a record file
            with longer.open("ab") as added:
                added.write(first)
                added.writelines(records)
            longer.replace(copy)
    return True


def _whole_records(file: BinaryIO) -> Iterator[bytes]:
    """Yields the whole records from the position of a file on, each with its head."""
    size = os.fstat(file.fileno()).st_size
    while len(head := file.read(RECORD_HEAD.size)) == RECORD_HEAD.size:
        (length,) = RECORD_HEAD.unpack(head)
        # After a power cut the end may be zeros: no record is empty.
        if not 0 < length <= size - file.tell():
            return
        yield head + file.read(length)


def show(folder: Path, copies: Path, host: str, port: int, say: Callable[[], object]) -> None:
    """Runs VisualDL's own command, and adds new records, until new copies must be made.

    `say` is called when it answers.
    """
    seen: Seen = {}  # new, as the copies are
    update(record_files(folder, copies), seen)
    # The command `visualdl` need not be on the PATH. By default its answers are up to 20 s old
    # (visualdl/server/args.py, default_cache_timeout). Without -L it answers an error to a browser
    # that asks for neither English nor Chinese (visualdl/server/app.py, get_locale).
    command = [sys.executable, board_server.__file__, host, f"--logdir={copies.name}",
               "--host", host, "--port", str(port), "-L", "en", "--cache-timeout", "1",
               "--disable-telemetry"]  # fmt: skip
    log = copies.with_name("visualdl.log")
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            cwd=copies.parent,  # so that runs are called runs/a, and not by the path of the copy
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
            start_new_session=True,  # Ctrl-C ends the board, and the board ends VisualDL
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        while server.poll() is None and not _answers(host, port):
            time.sleep(0.1)
        if server.poll() is None:
            say()
        while server.poll() is None:
            if not update(record_files(folder, copies), seen):
                return
            time.sleep(1)
        said = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeMistake(f"VisualDL ended with exit code {server.returncode}: {said}")
    finally:
        kill(server)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), 1):
            return True
    except OSError:
        return False


def add_parser(tools: Any) -> None:
    codes = "130 Ctrl-C, 143 SIGTERM, 1 an error, such as a port in use"
    add = add_tool(tools, main, codes).add_argument
    add("dir", type=Path, metavar="DIR", help="a directory with runs in it, or a run")
    add("--host", default="127.0.0.1", help="address of this machine (default: 127.0.0.1, so "
        "nobody else can look; 0.0.0.0: everybody who reaches the machine can)")  # fmt: skip
    add("--port", type=int, default=8040, help="default: 8040; 0: any free one")


def free_port(host: str, port: int) -> int:
    """Returns the port, or any free one for 0.

    On a port in use VisualDL says that it runs, and hangs (visualdl/server/app.py,
    wait_until_live).

    Raises:
        ValueError: It cannot be had.
    """
    if not 0 <= port <= 65535:
        raise ValueMistake(f"--port: {port} given; expected 0 to 65535.")
    try:
        with socket.create_server((host, port)) as tried:
            return int(tried.getsockname()[1])
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueMistake(
            f"--port {port}, --host {host}: {reason}; expected a port that nobody uses, --port 0 "
            "for any such one, and an address of this machine."
        ) from (error if error.errno == errno.EADDRINUSE else None)  # it may be free later


@contextlib.contextmanager
def _room_for_copies() -> Iterator[Path]:
    """Makes a temporary directory, and removes the ones that killed boards have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{_COPIES}*"):
        if not Path("/proc", left.name.removeprefix(_COPIES).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)  # it may be another user's
    with tempfile.TemporaryDirectory(prefix=f"{_COPIES}{os.getpid()}-") as directory:
        yield Path(directory)


def main(args: argparse.Namespace) -> int:
    """Runs the tool until a signal ends it."""
    folder = args.dir.resolve()
    with ended_by_signals(), _room_for_copies() as directory:
        copies = directory / folder.name
        if not record_files(folder, copies):
            raise ValueMistake(
                f"no runs with VisualDL records below {folder}. A run has some as soon as it has "
                "logged a line."
            )
        port = free_port(args.host, args.port)
        page = f"{port}/app/scalar"  # /app would open the page of graphs
        tunnel = f"ssh -N -L {port}:{args.host}:{port} {socket.gethostname()}"

        @functools.cache  # once, and not each time that VisualDL is started
        def say() -> None:
            print(f"http://{args.host}:{page} (Ctrl-C ends it)")
            print(f"from another machine: {tunnel}, then http://127.0.0.1:{page}", flush=True)

        while True:
            show(folder, copies, args.host, port, say)
            shutil.rmtree(copies)
