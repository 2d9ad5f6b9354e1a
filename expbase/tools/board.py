"""VisualDL over all runs below directories, also while they are running.

Starts VisualDL's own command over copies of the runs' record files, in a temporary directory, and
ends with it. A copy holds whole records only: VisualDL fails at the half record that a killed run
leaves, and misreads everything after one that is just being written. Every second the new records
are added. VisualDL cannot forget what it has read: when a resumed run has cut its file back, or a
run was removed, VisualDL is started again over new copies.

The runs' files are only read, and the pages load nothing from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from expbase.cli import Paragraphs
from expbase.processes import die_with_parent
from expbase.tools.process import ended_by_signals, kill
from expbase.tools.runs import find, printable
from expbase.visualizer import FILE_NAME, whole_records

_PORT = 8040  # VisualDL's own default
_SECONDS = 1.0  # between two looks at the runs' files
_LOG = "visualdl.log"  # in the temporary directory: what VisualDL prints on stderr
_TAIL = 256  # bytes at the end of a copy that are compared with the run's file


class Mirror:
    """Copies of the runs' record files that hold whole records only.

    Args:
        folders: Where the runs are: directories with runs in them, or runs.
        directory: For the copies; each run has a folder there.

    Attributes:
        name: The folder in the directory that VisualDL is to show.

    Raises:
        ValueError: A folder is not a directory, or there is no record file in any of them.
    """

    def __init__(self, folders: Sequence[Path], directory: Path) -> None:
        self._folders = [folder.resolve() for folder in folders]
        # A run that is asked for by itself is shown by its name, too, so begin above it.
        tops = [f.parent if find(f) == [f] else f for f in self._folders]
        self._top = Path(os.path.commonpath(tops))
        self.name = self._top.name or "runs"
        self._directory = directory / self.name
        self._reported: set[str] = set()
        if not self._files():
            raise ValueError(
                f"no runs with VisualDL records below {', '.join(map(str, folders))}. A run has "
                "some as soon as it has logged a line."
            )

    def _files(self) -> dict[Path, Path]:
        """The runs' record files by the paths of their copies."""
        runs = [run for folder in self._folders for run in find(folder, self._cannot_read)]
        copies = {self._directory / run.relative_to(self._top): run for run in runs}
        files = {copy / FILE_NAME: run / FILE_NAME for copy, run in copies.items()}
        return {copy: path for copy, path in files.items() if path.is_file()}

    def update(self, server: subprocess.Popen[bytes] | None = None) -> bool:
        """Adds the records that are new.

        Args:
            server: VisualDL, if it reads the copies already.

        Returns:
            False if something was copied that is no longer in the runs' files. Then all copies
            were removed: call it again, and start VisualDL again.
        """
        files = self._files()
        is_good = all(copy in files for copy in self._directory.rglob(FILE_NAME))
        for copy, path in files.items() if is_good else ():
            try:
                with path.open("rb") as file:
                    is_good = is_good and _extend(copy, file, server)
            except ValueError as error:
                place = f"{path}: damaged at byte {copy.stat().st_size}: {error}"
                self._report(f"{place}. Shown is what comes before.")
            except (PermissionError, FileNotFoundError) as error:  # removed since it was found
                self._cannot_read(error)
        if not is_good:
            shutil.rmtree(self._directory)
        return is_good

    def _cannot_read(self, error: OSError) -> None:
        self._report(f"{error.filename}: {error.strerror}. Not shown.")

    def _report(self, line: str) -> None:
        if line not in self._reported:  # it is looked at every second
            self._reported.add(line)
            print(printable(line), flush=True)


def _extend(copy: Path, file: BinaryIO, server: subprocess.Popen[bytes] | None) -> bool:
    """Appends the new whole records of a file to its copy.

    Returns:
        False if the file does not begin with its copy: a resumed run has cut it back.

    Raises:
        ValueError: There are bytes that are not a record; what is before them is appended.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.open("a+b") as copied:
        size = copied.tell()
        start = max(size - _TAIL, 0)
        copied.seek(start)
        file.seek(start)
        # The end is enough: each record holds the time when it was written.
        if copied.read() != file.read(size - start):
            return False
        if os.fstat(file.fileno()).st_size > size:
            # `copied` is closed, and so written as a whole, before VisualDL continues.
            with _paused(server), copied:
                copied.writelines(whole_records(file))
    return True


@contextlib.contextmanager
def _paused(server: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Stops VisualDL for the block, in which a copy grows.

    One write is not one step for a reader in another process: it may see the first half only.
    """
    if server is None or server.poll() is not None:
        yield
        return
    os.kill(server.pid, signal.SIGSTOP)
    # It may still be inside a read of the copy: wait until it has stopped. WNOWAIT: if it has
    # ended instead, leave its exit code for `server.poll`.
    os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "board",
        help="VisualDL's pages over the runs below directories",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0 ended by Ctrl-C, 143 ended by SIGTERM, 1 if there are no runs, or "
        "the port or the host cannot be had",
    )
    add = parser.add_argument
    add("dirs", type=Path, nargs="+", metavar="DIR", help="a directory with runs in it, or a run")
    add("--host", default="127.0.0.1",
        help="address of this machine (default: 127.0.0.1, so nobody else can look; 0.0.0.0: "
        "everybody who reaches the machine can)")  # fmt: skip
    add("--port", type=int, help=f"default: {_PORT} if it is free, else any free one")
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool until a signal ends it."""
    with (
        ended_by_signals(ctrl_c=0),
        tempfile.TemporaryDirectory(prefix="expbase-board-") as directory,
    ):
        mirror = Mirror(args.dirs, Path(directory))
        port = free_port(args.host, args.port)
        says = addresses(args.host, port)
        while True:
            mirror.update()
            with visualdl(directory, mirror.name, args.host, port) as server:
                for line in says:  # the first time
                    print(line, flush=True)
                while mirror.update(server):
                    _check(server, directory)
                    time.sleep(_SECONDS)


def free_port(host: str, port: int | None) -> int:
    """A port that is free now: the given one, or by default VisualDL's own, else any.

    On a port in use VisualDL says that it runs, and hangs.

    Raises:
        ValueError: The port is in use, or there can be none.
    """
    if port is None:
        with contextlib.suppress(ValueError):
            return free_port(host, _PORT)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            # As VisualDL does; without it a port is not free for a minute after a board ended.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port or 0))
            number: int = tried.getsockname()[1]
            return number
    except (OSError, OverflowError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ValueError(
                f"--port: {port} is in use; expected a free one. Without --port one is found."
            ) from error
        raise ValueError(
            f"--host {host} --port {port or 0}: cannot be bound: {error}; expected an address of "
            "this machine, and a port from 0 to 65535 that you may use."
        ) from error


@contextlib.contextmanager
def visualdl(directory: str, name: str, host: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """VisualDL's own command over a folder of a directory, from when it listens.

    Raises:
        ValueError: It does not start.
    """
    # As the command `visualdl`, which need not be on the PATH. By default it answers from what it
    # read up to 20 s ago. Without -L it answers some browsers with an error.
    command = [sys.executable, "-W", "ignore", "-m", "visualdl.server.app", f"--logdir={name}",
               "--host", host, "--port", str(port), "-L", "en", "--cache-timeout", "1",
               "--disable-telemetry"]  # fmt: skip
    with open(Path(directory, _LOG), "wb") as log:
        server = subprocess.Popen(
            command,
            cwd=directory,  # so that runs are called runs/a, and not by the path of the copy
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            start_new_session=True,  # Ctrl-C ends the board, and the board ends VisualDL
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        is_up = False
        while not is_up:
            _check(server, directory)
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                socket.create_connection((_own(host), port), timeout=1).close()
                is_up = True
        yield server
    finally:
        kill(server)


def _check(server: subprocess.Popen[bytes], directory: str) -> None:
    if server.poll() is not None:
        said = Path(directory, _LOG).read_text(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"VisualDL ended with exit code {server.returncode}: {said}")


def _own(host: str) -> str:
    """The address by which this machine reaches itself."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def addresses(host: str, port: int) -> Iterator[str]:
    """Where the pages are, for people at this machine and at others, a line each."""
    place = f"[{_own(host)}]:{port}" if ":" in host else f"{_own(host)}:{port}"
    yield f"http://{place}/app/scalar (Ctrl-C ends it)"  # /app would open the page of graphs
    tunnel = f"ssh -N -L {port}:{place} {socket.gethostname()}, then http://127.0.0.1:{port}"
    others = tunnel if _own(host) == host else f"http://{socket.gethostname()}:{port}"
    yield f"from another machine: {others}/app/scalar"
