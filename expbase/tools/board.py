"""VisualDL's board over all runs below a directory, as they are and as they go on.

It is VisualDL's own server, in this process, with another reader of the runs' files: VisualDL's
ends with an error at the half record that a killed run leaves, goes astray for good when it meets
a run in the middle of writing one, and does not see that a resumed run has cut its file back. The
files are only read. The pages load nothing from elsewhere.

The table of hyper parameters shows what is not the same in all runs, and the newest metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import getpass
import http.client
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from expbase.cli import Paragraphs
from expbase.state import checkpoint
from expbase.tools.ls import check_folder, differences, printable
from expbase.tools.process import ended_by_signals
from expbase.visualizer import board_application, column_name, record_parser, record_store

_EXIT_CODES: dict[int, int | None] = {signal.SIGINT: 0, signal.SIGTERM: 143}
_PORT = 8040  # VisualDL's own
_HEAD = 8  # bytes before a record that hold its length
_MARK = 256  # bytes of the last record that was read; it holds a time, so no other is like it
_LOOK_SECONDS = 1.0  # between two looks at the files


class RecordFile:
    """The records of a run, read as far as they are whole, and later on from there.

    Args:
        name: Of the run on the board.
        path: The file.
        parse: Turns bytes into kind, tag and value.

    Attributes:
        store: VisualDL's sample of the records.
        last: The newest value of each kind and tag.
        damage: Where the reading ended, and what is wrong there; empty if nothing is.
    """

    def __init__(self, name: str, path: Path, parse: Callable[[bytes], Any]) -> None:
        self.name, self.path, self._parse = name, path, parse
        self._status: tuple[int, ...] = ()
        self._begin_again()

    def _begin_again(self) -> None:
        self.store = record_store()
        self.last: dict[tuple[str, str], Any] = {}
        self.damage = ""
        self._offset = 0
        self._mark = b""

    def read_on(self) -> None:
        """Reads what is new; everything if the file is another one now, or was cut back.

        Raises:
            OSError: The file cannot be read.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if now == self._status:
                return
            if now[:2] != self._status[:2] or not self._still_holds_what_was_read(file):
                self._begin_again()
            self._status = now
            file.seek(self._offset)
            self._read(file, status.st_size)

    def _still_holds_what_was_read(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _read(self, file: BinaryIO, size: int) -> None:
        self.damage = ""
        try:
            for data in whole_records(file, size):
                kind, tag, value = self._parse(data)
                self.last[kind, tag] = value
                self.store.add_item(kind, self.name, tag, value)
                self._offset += _HEAD + len(data)
                self._mark = data[-_MARK:]
        except ValueError as error:
            self.damage = f"at byte {self._offset}: {error}"

    def values(self, tag: str) -> Iterator[Any]:
        """All values of a tag, those too that are not in the sample."""
        with self.path.open("rb") as file:
            for data in whole_records(file, self._offset):
                _, other, value = self._parse(data)
                if other == tag:
                    yield value


def whole_records(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The records from here on, up to one that is not whole: a run is writing it, or died so.

    Args:
        file: At the beginning of a record.
        size: Of the file, in bytes.

    Raises:
        ValueError: What comes next cannot become a record.
    """
    while len(head := file.read(_HEAD)) == _HEAD:
        length = int.from_bytes(head, "little")
        if file.tell() + length > size:
            opening = _opening(length)
            there = file.read(len(opening))
            if not opening or not opening.startswith(there):
                raise ValueError("no record begins here")
            return
        yield file.read(length)


def _opening(length: int) -> bytes:
    """The bytes that each record of this length begins with; none if no record has it.

    A record is one protobuf field, number 1, whose own length follows, 7 bits in a byte.
    """
    for width in range(1, 10):
        rest = length - 1 - width
        if rest >= 0 and max(rest.bit_length(), 1) in range(7 * width - 6, 7 * width + 1):
            digits = [rest >> 7 * place & 127 | 128 for place in range(width)]
            return bytes([10, *digits[:-1], digits[-1] & 127])
    return b""


class Runs:
    """What VisualDL's pages ask, in place of its own LogReader.

    Args:
        folder: Where the runs are.
        say: Takes what the user should know, a line.
        clock: Seconds.

    Attributes:
        name2tags: VisualDL's names for runs by ours; it fills them in.
        tags2name: The other way round.
        data_manager: Who has the records: this object, too.

    Raises:
        ValueError: There is no such directory, or no run below it.
    """

    def __init__(
        self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_folder(folder)
        self._folder, self._say, self._clock = folder.resolve(), say, clock
        self._said: set[str] = set()
        # A run by itself has a name, too.
        alone = _newest(os.listdir(folder))
        self._base = self._folder.parent if alone else self._folder
        if not self.find():
            raise ValueError(
                f"no runs with VisualDL records below {folder}. A run has some as soon as it has "
                "logged a line."
            )
        self._files: dict[str, RecordFile] = {}
        self._parse = record_parser()
        self._next_look = -math.inf
        self.name2tags: dict[str, str] = {}
        self.tags2name: dict[str, str] = {}
        self.data_manager = self

    def find(self) -> dict[str, Path]:
        """The record files by the names of their runs."""
        found = {}
        for directory, names, files in os.walk(self._folder, onerror=self._cannot_read):
            names[:] = [n for n in names if not n.startswith(".") and n != checkpoint.FOLDER]
            if newest := _newest(files):
                path = Path(directory)
                found[path.relative_to(self._base).as_posix()] = path / newest
        return dict(sorted(found.items()))

    def load_new_data(self, update: bool = True) -> None:
        """Looks for new runs and new records, unless it was done a moment ago."""
        began = self._clock()
        if began < self._next_look:
            return
        files = {}
        for name, path in self.find().items():
            file = self._files.get(name)
            if file is None or file.path != path:
                file = RecordFile(name, path, self._parse)
            if self._read(file):
                files[name] = file
        self._files = files
        now = self._clock()
        # A slow disk is not asked all the time.
        self._next_look = now + max(_LOOK_SECONDS, 4 * (now - began))

    def _read(self, file: RecordFile) -> bool:
        try:
            file.read_on()
        except FileNotFoundError:  # it was there a moment ago
            return False
        except OSError as error:
            self._cannot_read(error)
            return False
        if file.damage:
            self._say_once(f"{file.path}: damaged {file.damage}. Shown is what comes before.")
        return True

    def _cannot_read(self, error: OSError) -> None:
        self._say_once(f"{error.filename}: {error.strerror}. Not shown.")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    # --- asked by VisualDL's pages

    def runs(self, update: bool = True) -> list[str]:
        """The names of the runs."""
        self.load_new_data()
        return list(self._files)

    def tags(self) -> dict[str, str]:
        """The kind of each run/tag."""
        files = self._files.values()
        return {f"{file.name}/{tag}": kind for file in files for kind, tag in file.last}

    def components(self, update: bool = False) -> set[str]:
        """The kinds that there are."""
        self.load_new_data()
        return set(self.tags().values())

    def component_tabs(self, update: bool = False) -> set[str]:
        """The kinds that have a page."""
        return self.components() - {"meta_data"}

    def get_reservoir(self, kind: str) -> Reservoir:
        """The samples of a kind."""
        self.load_new_data()  # the pages' lists of tags would never grow
        return Reservoir(self._files.values(), kind)

    def get_log_data(self, component: str, run: str, tag: str) -> list[list[Any]]:
        """The rows of a table to download."""
        values = self._files[run].values(tag)
        if component == "scalars":
            return [[v.id, v.tag, v.tag_value.tag, v.timestamp, v.tag_value.value] for v in values]
        return [[v.id, v.tag, v.timestamp, v.value] for v in values]

    def hparam_list(self) -> list[dict[str, Any]]:
        """The rows of the table of hyper parameters."""
        self.load_new_data()
        return table_rows(self._files.values())

    def hparam_indicators(self) -> dict[str, list[dict[str, Any]]]:
        """Its columns."""
        self.load_new_data()
        return table_columns(table_rows(self._files.values()))


class Reservoir:
    """The samples of a kind over all runs.

    Args:
        files: The runs'.
        kind: In VisualDL's words.
    """

    def __init__(self, files: Iterable[RecordFile], kind: str) -> None:
        self._parts = [file.store.get_reservoir(kind) for file in files]

    @property
    def keys(self) -> list[str]:
        """Each run/tag."""
        return [key for part in self._parts for key in part.keys]

    def get_items(self, run: str, tag: str) -> Any:
        """The sample of a tag."""
        # Asked of all: VisualDL counts a curve of add_scalars as a run of its own, run/tag_curve.
        for part in self._parts:
            if part.exist_in_keys(run, tag):
                return part.get_items(run, tag)
        return []


def _newest(names: list[str]) -> str:
    """VisualDL shows one record file of a directory; others are of earlier starts."""
    return max((name for name in names if "vdlrecords" in name), default="")


# --- the table that compares runs ------------------------------------------------------------


def table_rows(files: Iterable[RecordFile]) -> list[dict[str, Any]]:
    """The runs that recorded hyper parameters, in the form that VisualDL's page takes.

    VisualDL's own leaves a run out whose value has another type than the first run's, or whose
    metric is not finite, and takes a metric from its sample, which may be without the newest point.
    """
    rows = [row for file in files for row in _rows(file)]
    differing = differences([row["hparams"] for row in rows])
    if any(differing):
        for row, own in zip(rows, differing, strict=True):
            row["hparams"] = own
    for name, values in _by_name(rows, "hparams").items():
        if _type(values) == "string":
            for row, value in zip(rows, values, strict=True):
                row["hparams"][name] = "–" if value is None else str(value)
    return rows


def table_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The columns of these rows; a metric that has no value yet in any run has none."""
    return {
        "hparams": [
            {"name": name, "type": _type(values), "values": list(dict.fromkeys(values))}
            for name, values in _by_name(rows, "hparams").items()
        ],
        "metrics": [
            {"name": name, "type": "continuous"}
            for name, values in _by_name(rows, "metrics").items()
            if any(value is not None for value in values)
        ],
    }


def _rows(file: RecordFile) -> Iterator[dict[str, Any]]:
    if record := file.last.get(("hyper_parameters", "hparam")):
        values = {i.name: getattr(i, i.WhichOneof("type")) for i in record.hparam.hparamInfos}
        metrics = {i.name: _newest_point(file, i.name) for i in record.hparam.metricInfos}
        yield {
            "name": file.name,
            "hparams": {column_name(name): value for name, value in values.items()},
            "metrics": {column_name(name): value for name, value in metrics.items()},
        }


def _newest_point(file: RecordFile, tag: str) -> float | None:
    record = file.last.get(("scalar", tag.replace("/", "%")))
    if record is None or not math.isfinite(record.value):
        return None
    return float(str(np.float32(record.value)))  # 0.95 and not 0.949999988079071


def _by_name(rows: Sequence[Mapping[str, Any]], group: str) -> dict[str, list[Any]]:
    """The values of all rows under each name; None where a row has no such name."""
    names = dict.fromkeys(name for row in rows for name in row[group])
    return {name: [row[group].get(name) for row in rows] for name in names}


def _type(values: Sequence[Any]) -> str:
    """VisualDL's word for what all values are; it can order numbers, and mixes nothing."""
    if all(isinstance(value, int) for value in values):
        return "numeric"
    numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
    return "continuous" if numbers else "string"


# --- the tool --------------------------------------------------------------------------------


def add_parser(tools: Any) -> None:
    """Adds the tool to the command line of `python -m expbase`."""
    parser = tools.add_parser(
        "board",
        help="VisualDL's pages over the runs below a directory",
        description=__doc__,
        formatter_class=Paragraphs,
        epilog="exit codes: 0 ended by Ctrl-C, 143 ended by SIGTERM, 1 if there are no runs, or "
        "the port or the host cannot be had",
    )
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="a directory with runs in it, or a run")
    add("--host", default="127.0.0.1",
        help="address of this machine (default: 127.0.0.1, so nobody else can look; 0.0.0.0: "
        "everybody who reaches the machine can)")  # fmt: skip
    add("--port", type=int, help=f"default: {_PORT} if it is free, else any free one")
    parser.set_defaults(run=main, user_errors=(ValueError, OSError))


def main(args: argparse.Namespace) -> int:
    """Runs the tool until a signal ends it."""
    terminal = sys.stdout

    def say(line: str) -> None:
        print(printable(line), file=terminal, flush=True)

    with (
        ended_by_signals(_EXIT_CODES),
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),  # what VisualDL prints is for its authors
    ):
        runs = Runs(args.dir, say)
        with bound(args.host, args.port) as listening:
            count = len(runs.find())
            say(f"{count} run{'s' * (count != 1)} below {args.dir}")
            runs.load_new_data()
            serve(runs, listening, args.host, say)
    return 0


def bound(host: str, port: int | None) -> socket.socket:
    """A socket that listens there; at VisualDL's own port or any free one if none is asked for.

    Raises:
        ValueError: The port is in use, or there can be none.
    """
    if port is None:
        with contextlib.suppress(OSError):
            return _listening(host, _PORT)
    try:
        return _listening(host, port or 0)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(_refusal(host, port or 0, error)) from error


def _listening(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a board that just ended
        made.bind((host, port))
        made.listen()
    except BaseException:
        made.close()
        raise
    return made


def _refusal(host: str, port: int, error: Exception) -> str:
    if isinstance(error, OverflowError):
        return f"--port: {port} given; expected 0 to 65535."
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"--port: {port} is in use; expected a free one. Without --port one is found."
    return (
        f"--host {host} --port {port}: cannot be bound: {getattr(error, 'strerror', error)}; "
        "expected an address of this machine, and a port that you may use."
    )


def serve(runs: Runs, listening: socket.socket, host: str, say: Callable[[str], None]) -> None:
    """Answers requests until a signal comes; says where once the first page was answered."""
    from werkzeug.serving import make_server  # of Flask, which VisualDL's server is made with

    port = listening.getsockname()[1]
    # In threads, since browsers keep connections open that they do not use; VisualDL's code is
    # written for one request at a time.
    application = _one_at_a_time(board_application(runs))
    server = make_server(host, port, application, threaded=True, fd=listening.fileno())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        _wait_for_the_first_page(host, port)
        for line in addresses(host, port):
            say(line)
        threading.Event().wait()
    finally:
        server.shutdown()
        server.server_close()


def _one_at_a_time(application: Any) -> Any:
    lock = threading.Lock()

    def answer(environment: Any, start_response: Any) -> Any:
        with lock:
            return application(environment, start_response)

    return answer


def _wait_for_the_first_page(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(_own(host), port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/app/index")
        status = connection.getresponse().status
    if status != 200:
        raise RuntimeError(f"VisualDL's first page answers {status}; expected 200.")


def _own(host: str) -> str:
    """The address by which this machine reaches itself."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def addresses(host: str, port: int) -> Iterator[str]:
    """Where the board is, for people at this machine and at others, a line each."""
    place = f"[{_own(host)}]:{port}" if ":" in host else f"{_own(host)}:{port}"
    yield f"http://{place}/app/scalar (Ctrl-C ends it)"  # of itself it opens the page of graphs
    if _own(host) != host:
        name = socket.gethostname()
        yield f"http://{name}:{port}/app/scalar for everybody who reaches this machine"
    tunnel = f"ssh -N -L {port}:{place} {_login()}"
    yield f"from another machine: {tunnel}, then http://127.0.0.1:{port}/app/scalar"


def _login() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user without a name
        return socket.gethostname()
