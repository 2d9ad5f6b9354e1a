"""VisualDL for one run: one record file, opened at first use. The only file that imports VisualDL.

Every method takes tensors, arrays and numbers, never changes its arguments, and does nothing on
ranks that write no file.

    visualizer = Visualizer(directory)      # Visualizer(None) accepts everything, writes nothing
    visualizer.add_scalar("train/loss", 0.25, step=400)
    visualizer.add_image("sample", pixels, step=400)
    visualizer.close()
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from expbase.state.arrays import to_numpy

FILE_NAME = "vdlrecords.run.log"
_HEAD = struct.Struct("<Q")  # before each record: its length in bytes
_LARGEST = 2**31  # bytes: protobuf's limit for a record


class Visualizer:
    """Writes one VisualDL record file; a resumed run appends to the same one.

    VisualDL's `add_graph`, `add_pr_curve` and `add_roc_curve` are broken and have no method here:
    use `export` of the experiment, and `add_figure`.

    Args:
        directory: Where the file is; None on ranks that write none.
    """

    def __init__(self, directory: str | Path | None) -> None:
        # Absolute: a later chdir in user code must not divert the log.
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
        self._add("scalar", tag, value.item() if hasattr(value, "item") else value, step)

    def add_image(self, tag: str, image: Any, step: int) -> None:
        """Adds an image.

        Args:
            tag: Its name.
            image: [H, W], [H, W, 1] or [H, W, 3]: whole numbers from 0 to 255, or floats from 0
                to 1.
            step: The iteration.

        Raises:
            ValueError: The shape or a value is outside of these.
        """
        self._add("image", tag, _pixels(image), step)

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        """Adds a matplotlib figure; the caller closes it."""
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
            sample_rate: Samples per second.

        Raises:
            ValueError: The shape or a value is outside of these.
        """
        self._add("audio", tag, _samples(samples), step, sample_rate=sample_rate)

    def add_histogram(self, tag: str, values: Any, step: int, *, buckets: int = 10) -> None:
        """Adds a histogram of numbers of any shape."""
        self._add("histogram", tag, _array(values).reshape(-1).tolist(), step, buckets=buckets)

    def add_hparams(
        self, hparams: Mapping[str, Any], metrics: Sequence[str], *, keys: Iterable[str] = ()
    ) -> None:
        """Adds the run's row to the table that compares runs. VisualDL reads the first one only.

        Args:
            hparams: Values by config key. Pass only what differs from the defaults: VisualDL's
                page of parallel coordinates hangs when a column is too narrow for its name.
            metrics: The tags of the scalars to compare, `valid/accuracy`.
            keys: All keys of the config. A column is called by the last part of its key, `lr`,
                if no other key ends in it, and `optim/lr` otherwise. Without `keys` only those of
                `hparams` are compared.
        """
        if self.writer is not None:
            names = column_names([*keys, *hparams])
            values = {names[key]: _plain(value) for key, value in hparams.items()}
            self.writer.add_hparams(values, [_tag(metric) for metric in metrics])

    def _add(self, kind: str, tag: str, value: Any, step: int, **options: Any) -> None:
        if self.writer is not None:
            getattr(self.writer, f"add_{kind}")(_tag(tag), value, int(step), **options)

    def size(self) -> int:
        """Of the record file now, in bytes, with everything that was added."""
        return self._path.stat().st_size if self._path and self._path.exists() else 0

    def cut(self, size: int) -> None:
        """Removes what was written after the file had this size; a torn record is removed, too."""
        self.close()
        if self._path is not None and self.size() > size:
            os.truncate(self._path, size)

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def column_names(keys: Iterable[str]) -> dict[str, str]:
    """Column names for config keys, all different: the last part where that is unique."""
    # In a column's name VisualDL takes a dot for a step into the value, and finds nothing there.
    paths = {key: re.sub(r"[.\[\]]+", "/", key).strip("/") for key in keys}
    last = {key: path.rpartition("/")[2] for key, path in paths.items()}
    count = Counter(last.values())
    names = {key: last[key] if count[last[key]] == 1 else path for key, path in paths.items()}
    return {key: "name_" if name == "name" else name for key, name in names.items()}  # the run's


def whole_records(file: BinaryIO) -> Iterator[bytes]:
    """The records of a file, from its position to the last one that is whole.

    The run may be writing the next record just now, or it was killed while it did.

    Yields:
        A record with its head, as it is in the file.

    Raises:
        ValueError: The bytes that follow are not a record.
    """
    # Here, and not at the top: training never reads records.
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from visualdl.proto.record_pb2 import Record

    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        (length,) = _HEAD.unpack(head)
        if length > _LARGEST:
            raise ValueError(f"a record of {length} bytes")
        if len(data := file.read(length)) < length:
            return
        try:
            is_good = Record.FromString(data).values[0].WhichOneof("one_value")
        except (DecodeError, IndexError):
            is_good = None
        if not is_good:
            raise ValueError("VisualDL cannot read this record")
        yield head + data


class _RecordFile:
    """Writes VisualDL's records to their file at once, in VisualDL's format.

    VisualDL's own class hands each record to a thread. That costs 60 µs per record when they come
    quickly, the last ones are lost with the process, and write errors are swallowed.

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
        self._file.write(_HEAD.pack(len(data)) + data)
        self._file.flush()

    def flush(self) -> None:
        """Nothing is pending; called by VisualDL."""

    def close(self) -> None:
        """Closes the file; called by VisualDL."""
        self._file.close()


def _log_writer(path: Path) -> Any:
    # Here, and not at the top: it takes 37 ms, and most processes write no records.
    from visualdl import LogWriter

    class DirectWriter(LogWriter):  # type: ignore[misc]  # visualdl has no types
        """VisualDL's writer over our own file."""

        _file_writer: _RecordFile | None

        def _get_file_writer(self) -> _RecordFile:
            if self._file_writer is None:
                self._file_writer = self._all_writers[self._logdir] = _RecordFile(path)
            return self._file_writer

    return DirectWriter(logdir=str(path.parent), file_name=path.name)


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
