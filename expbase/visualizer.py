"""VisualDL for one run: one record file, opened at first use. The only file that imports it.

Every method takes tensors, arrays and numbers, changes nothing that it is handed, and does nothing
on the ranks that write no file. What is broken in VisualDL says so, and what to use instead. At the
end stands what `python -m expbase board` needs of VisualDL's server; training never calls it.

visualizer = Visualizer(directory)      # or Visualizer(None): takes everything, writes nothing
visualizer.add_scalar("train/loss", 0.25, step=400)
visualizer.add_image("sample", pixels, step=400)
visualizer.close()
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expbase.state.arrays import to_numpy

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
        if self._writer is None and self._path is not None:
            self._writer = _log_writer(self._path)
        return self._writer

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Adds one point to a curve."""
        number = value.item() if hasattr(value, "item") else value
        self._add("scalar", tag, number, step)

    def add_image(self, tag: str, image: Any, step: int) -> None:
        """Adds an image.

        Args:
            tag: Its name.
            image: [H, W], [H, W, 1] or [H, W, 3]: whole numbers from 0 to 255, or floats from 0
                to 1.
            step: The iteration.

        Raises:
            ValueError: It has another shape, or values beyond these.
        """
        self._add("image", tag, _pixels(image), step)

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Adds a matplotlib figure; closing it is yours."""
        self._add("figure", tag, figure, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Adds a text."""
        self._add("text", tag, str(text), step)

    def add_audio(self, tag: str, samples: Any, step: int, *, sample_rate: int = 8000) -> None:
        """Adds a sound.

        Args:
            tag: Its name.
            samples: [N]: floats from -1 to 1, or int16.
            step: The iteration.
            sample_rate: Samples in a second.

        Raises:
            ValueError: It has another shape, or values beyond these.
        """
        self._add("audio", tag, _samples(samples), step, sample_rate=sample_rate)

    def add_histogram(self, tag: str, values: Any, step: int, *, buckets: int = 10) -> None:
        """Adds a histogram of numbers of any shape."""
        self._add("histogram", tag, _array(values).reshape(-1).tolist(), step, buckets=buckets)

    def add_hparams(self, hparams: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Adds a row to the table that compares runs.

        Args:
            hparams: Values by name; what is no finite number or text goes in as its text. In the
                table `optim.lr` is called `optim/lr`.
            metrics: The tags of the scalars to compare, `valid/accuracy`.
        """
        if self._directory is not None:
            plain = {column_name(name): _plain(value) for name, value in hparams.items()}
            self.writer.add_hparams(plain, [_tag(metric) for metric in metrics])

    def add_graph(self, *args: Any, **options: Any) -> None:
        """Broken in VisualDL.

        Raises:
            NotImplementedError: Always, with what to use instead.
        """
        raise NotImplementedError(
            "add_graph: broken in VisualDL 2.5; expected self.export(path): VisualDL's page for "
            "graphs opens the exported file."
        )

    def add_pr_curve(self, *args: Any, **options: Any) -> None:
        """Broken in VisualDL.

        Raises:
            NotImplementedError: Always, with what to use instead.
        """
        raise _broken_curve("add_pr_curve")

    def add_roc_curve(self, *args: Any, **options: Any) -> None:
        """Broken in VisualDL.

        Raises:
            NotImplementedError: Always, with what to use instead.
        """
        raise _broken_curve("add_roc_curve")

    def _add(self, kind: str, tag: str, value: Any, step: int, **options: Any) -> None:
        if self._directory is not None:
            getattr(self.writer, f"add_{kind}")(_tag(tag), value, int(step), **options)

    def size(self) -> int:
        """Of the record file now, in bytes, with everything that was added."""
        return self._path.stat().st_size if self._path and self._path.exists() else 0

    def cut(self, size: int) -> None:
        """Takes away what was written after the file had this size; a torn record goes too."""
        self.close()
        if self._path is not None and self.size() > size:
            os.truncate(self._path, size)

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _RecordFile:
    """Writes VisualDL's records to their file at once, in VisualDL's format.

    VisualDL's own hands each one to a thread: when points come quickly that takes 60 µs of each,
    the last ones are lost with the process, and an error in writing is never heard of.

    Args:
        path: The file to append to.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def get_filename(self) -> str:
        """Its name; called by VisualDL."""
        return self._file.name

    def add_record(self, record: Any) -> None:
        """Appends a record; called by VisualDL."""
        data = record.SerializeToString()
        self._file.write(struct.pack("<Q", len(data)) + data)
        self._file.flush()

    def flush(self) -> None:
        """Nothing is pending; called by VisualDL."""

    def close(self) -> None:
        """Closes the file; called by VisualDL."""
        self._file.close()


def _log_writer(path: Path) -> Any:
    from visualdl import LogWriter

    class DirectWriter(LogWriter):  # type: ignore[misc]  # visualdl has no types
        """VisualDL's, over a file of ours."""

        _file_writer: _RecordFile | None

        def _get_file_writer(self) -> _RecordFile:
            if self._file_writer is None:
                self._file_writer = self._all_writers[self._logdir] = _RecordFile(path)
            return self._file_writer

    return DirectWriter(logdir=str(path.parent), file_name=path.name)


def _broken_curve(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: broken in VisualDL 2.5 with today's numpy; expected add_figure with a curve that "
        "matplotlib draws."
    )


def _array(value: Any) -> Any:
    return np.asarray(to_numpy(value) if hasattr(value, "numpy") else value)


def _pixels(image: Any) -> Any:
    """[H, W, 3] of uint8. VisualDL itself multiplies the caller's array by 255."""
    pixels = _array(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ValueError(
            f"add_image: an image of shape {list(pixels.shape)}; expected [H, W], [H, W, 1] or "
            "[H, W, 3]."
        )
    highest = 1 if pixels.dtype.kind in "fb" else 255
    low, high = (pixels.min(), pixels.max()) if pixels.size else (0, 0)
    if not 0 <= low <= high <= highest:
        raise ValueError(
            f"add_image: values from {low} to {high}; expected floats from 0 to 1, or whole "
            "numbers from 0 to 255."
        )
    scaled = np.round(pixels.astype("float64") * 255) if highest == 1 else pixels
    return np.repeat(scaled.astype(np.uint8), 3 if pixels.shape[2] == 1 else 1, axis=2)


def _samples(samples: Any) -> Any:
    sound = _array(samples)
    if sound.ndim != 1 or not sound.size:
        raise ValueError(f"add_audio: samples of shape {list(sound.shape)}; expected [N], N > 0.")
    if sound.dtype.kind != "f":
        sound = sound / 32768
    if not np.abs(sound).max() <= 1:
        raise ValueError(
            f"add_audio: values from {sound.min()} to {sound.max()}; expected floats from -1 to 1, "
            "or int16."
        )
    return sound


def _tag(tag: str) -> str:
    return tag.replace("%", "_")  # VisualDL takes none


def _plain(value: Any) -> Any:
    """A number that VisualDL's pages can read, or a text."""
    value = value.item() if hasattr(value, "item") else value
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    return value if type(value) is float and math.isfinite(value) else str(value)


# --- what the board needs of VisualDL --------------------------------------------------------

# VisualDL's words for the field of a record that holds its value.
_KINDS = {
    "value": "scalar", "tag_value": "scalars", "image": "image", "audio": "audio", "text": "text",
    "histogram": "histogram", "embeddings": "embeddings", "hparam": "hyper_parameters",
    "pr_curve": "pr_curve", "roc_curve": "roc_curve", "meta_data": "meta_data",
}  # fmt: skip
# Of its graph of hyper parameters: a name that is too wide loses a letter and gains three dots,
# again and again, until it fits. It never does, and the browser hangs.
_HANGING = (
    "/ParallelCoordinatesGraph.js",
    b'.text().slice(0,-1)+"..."',
    b'.text().replace(/[.]+$/,"").slice(0,-1)+"..."',
)


def record_parser() -> Callable[[bytes], tuple[str, str, Any]]:
    """What turns a record's bytes into its kind, its tag and its value, in VisualDL's words.

    It raises ValueError for bytes that are no record.
    """
    from visualdl.proto.record_pb2 import Record
    from visualdl.utils.string_util import decode_tag

    def parse(data: bytes) -> tuple[str, str, Any]:
        record = Record()
        try:
            record.ParseFromString(data)
            value = record.values[0]
            return _KINDS[value.WhichOneof("one_value")], decode_tag(value.tag), value
        except Exception as error:  # protobuf's own, and those of a record without a value
            raise ValueError("VisualDL cannot read this record") from error

    return parse


def record_store() -> Any:
    """An empty DataManager of VisualDL's: it keeps, of many records of a tag, a sample."""
    from visualdl.server.data_manager import DataManager

    return DataManager()


def board_application(reader: Any) -> Any:
    """VisualDL's own server as a WSGI application: in English, without telemetry.

    Args:
        reader: What is asked for everything that is shown, in place of VisualDL's LogReader.
    """
    from visualdl.server import api, lib
    from visualdl.server.app import create_app
    from visualdl.server.args import ParseArgs

    for name in ("vdl_logger", "werkzeug"):  # they tell each request
        logging.getLogger(name).setLevel(logging.CRITICAL)
    api.LogReader = lambda logdir: reader
    lib.get_hparam_list = lambda reader: reader.hparam_list()
    lib.get_hparam_indicator = lambda reader: reader.hparam_indicators()
    # What fails fails again: its own waits 2 s twice, while nobody else is served.
    lib.retry = lambda times, function, seconds, *args: function(*args)
    # The reader itself knows when to look again. It has the directory; to VisualDL's readers of
    # graphs and profiles none is given: they start processes, and a thread that never ends.
    options = ParseArgs(logdir=[], language="en", telemetry=False, cache_timeout=0.001)
    handler = signal.getsignal(signal.SIGINT)
    application = create_app(options)
    signal.signal(signal.SIGINT, handler)  # which it takes
    options.logdir = ["."]  # now no more than a sign that there is something to show
    application.after_request(_repaired)
    return application


def _repaired(response: Any) -> Any:
    from flask import request

    name, wrong, right = _HANGING
    if request.path.endswith(name):
        response.set_data(response.get_data().replace(wrong, right))
    return response


def column_name(name: str) -> str:
    """A name for the table that compares runs, in which VisualDL finds its values.

    For VisualDL a dot leads into the value, as in a path, and `name` is the column of the runs.
    """
    return "name_" if name == "name" else re.sub(r"[.\[\]]+", "/", name).strip("/")
