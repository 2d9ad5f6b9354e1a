"""VisualDL for one run: one record file, opened at the first record.

This is the only file that imports VisualDL, also at the first record. Every method takes tensors,
arrays and numbers, and never changes them.

    visualizer = Visualizer(directory)      # Visualizer(None) accepts everything, writes nothing
    visualizer.add_scalar("train/loss", 0.25, step=400)
    visualizer.add_image("sample", pixels, step=400)
    visualizer.close()
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from expbase.base.errors import TypeMistake, ValueMistake
from expbase.base.files import AppendedFile

FILE_NAME = "vdlrecords.run.log"
RECORD_HEAD = struct.Struct("<Q")  # before each record in the file: its length in bytes


class Visualizer:
    """Writes one VisualDL record file; a resumed run appends to the same one.

    A tag is for one kind of records. Another kind raises a ValueError: the board would not show it.

    Args:
        directory: Where the file is; None on ranks that write none.
        warn: Called with a text when a record is changed, as when a sound is clipped.
        iteration: Returns the step of what is added without one; without it each needs its own.
    """

    def __init__(
        self,
        directory: str | Path | None,
        warn: Callable[[str], object] = warnings.warn,
        iteration: Callable[[], Any] = lambda: None,
    ) -> None:
        self._warn = warn
        self._iteration = iteration
        # Absolute: a later chdir in user code must not divert the log.
        path = None if directory is None else Path(os.path.abspath(directory)) / FILE_NAME
        self._file = _RecordFile(path)
        self._writer: Any = None
        self.num_scalars = 0  # points of curves, in this start
        self._has_ended = False
        self._is_told = False  # whether a warning has said that it has ended

    @property
    def writer(self) -> Any:
        """VisualDL's own LogWriter, for what has no method here; None where nothing is written."""
        if self._writer is None and self._file.path is not None:
            self._writer = _log_writer(self._file)
        return self._writer

    def add_scalar(self, tag: str, value: Any, step: int | None = None) -> None:
        """Adds one point to a curve.

        Args:
            tag: The name of the curve, with its group: "train/loss".
            value: A number, or a tensor or array of one element.
            step: Where the point is on the axis; by default self.iteration.

        Raises:
            TypeError: The value is not one number.
        """
        self.num_scalars += 1
        try:
            number = value.item() if hasattr(value, "item") else value
            float(number)
        except (TypeError, ValueError):  # of a text, or of an array of several
            raise TypeMistake(f"{_said('add_scalar', tag, value)}; expected one number.") from None
        self._add("scalar", tag, number, step)

    def add_image(self, tag: str, image: Any, step: int | None = None) -> None:
        """Adds an image.

        Args:
            tag: Its name, under which the images of all steps stand.
            image: [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]: floats from 0 to 1, or integers from 0
                to 255.
            step: Where the image is on the axis; by default self.iteration.

        Raises:
            TypeError: The image does not hold real numbers.
            ValueError: It has another shape, or other values.
        """
        pixels = _pixels(tag, _numbers("add_image", tag, image))
        self._add("image", tag, pixels, step, dataformats="HW" if pixels.ndim == 2 else "HWC")

    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Adds a matplotlib figure; the caller closes it.

        Args:
            tag: Its name, under which the figures of all steps stand.
            figure: A matplotlib.figure.Figure.
            step: Where the figure is on the axis; by default self.iteration.

        Raises:
            TypeError: It is no figure.
        """
        if not hasattr(figure, "savefig"):
            raise TypeMistake(
                f"{_said('add_figure', tag, figure)}; expected a figure of matplotlib, of axes "
                "`axes.figure`."
            )
        self._add("figure", tag, figure, step)

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        """Adds a text.

        Args:
            tag: Its name, under which the texts of all steps stand.
            text: What the board shows.
            step: Where the text is on the axis; by default self.iteration.

        Raises:
            TypeError: It is no text.
        """
        if not isinstance(text, (str, bytes)):
            raise TypeMistake(f"{_said('add_text', tag, text)}; expected a text.")
        self._add("text", tag, text, step)

    def add_audio(
        self, tag: str, samples: Any, step: int | None = None, *, sample_rate: int = 8000
    ) -> None:
        """Adds a sound.

        Args:
            tag: Its name, under which the sounds of all steps stand.
            samples: [N], floats from -1 to 1 or int16. Louder samples are clipped, with a warning.
            step: Where the sound is on the axis; by default self.iteration.
            sample_rate: Samples per second.

        Raises:
            TypeError: The samples are no real numbers.
            ValueError: They have another shape, or one of them is not finite.
        """
        sound = _numbers("add_audio", tag, samples)
        is_int16 = sound.dtype == np.int16
        sound = sound.squeeze() / (32768 if is_int16 else 1)
        loudest = abs(sound).max(initial=0)
        if sound.ndim != 1 or not sound.size or not np.isfinite(loudest):
            raise ValueMistake(
                f"{_said('add_audio', tag, samples)}, and values up to {loudest}; expected [N] "
                "samples, floats from -1 to 1 or int16."
            )
        if loudest > 1:
            self._warn(f"add_audio: {tag!r} has values up to {loudest:.3g}, clipped to -1 … 1")
        self._add("audio", tag, sound.clip(-1, 1), step, sample_rate=int(sample_rate))

    def add_histogram(
        self, tag: str, values: Any, step: int | None = None, *, buckets: int = 10
    ) -> None:
        """Adds a histogram of numbers.

        Args:
            tag: Its name, under which the histograms of all steps stand.
            values: Numbers, of any shape.
            step: Where the histogram is on the axis; by default self.iteration.
            buckets: The number of its bars.

        Raises:
            TypeError: The values are no real numbers.
            ValueError: One of them is not finite.
        """
        numbers = _numbers("add_histogram", tag, values)
        if not np.isfinite(numbers).all():
            raise ValueMistake(
                f"{_said('add_histogram', tag, values)}, and values that are not finite; expected "
                "finite numbers."
            )
        self._add("histogram", tag, numbers, step, buckets=buckets)

    def _add(self, kind: str, tag: str, value: Any, step: Any, **options: Any) -> None:
        if not isinstance(tag, str):
            raise TypeMistake(f"add_{kind}: tag={tag!r} given; expected a text.")
        try:
            step = int(self._iteration() if step is None else step)
        except (TypeError, ValueError):
            raise TypeMistake(
                f"add_{kind}: {tag!r} has step={step!r}; expected a whole number, "
                "such as self.iteration."
            ) from None
        if self._has_ended and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"visualizer: {tag!r} and what follows is not written: the run has ended, and its "
                "record stays as it is. Write in on_train_end at the latest.",
                stacklevel=3,
            )
        if self.writer is not None:
            # VisualDL refuses a tag with one: visualdl/writer/writer.py, LogWriter.add_scalar.
            tag = tag.replace("%", "_")
            getattr(self.writer, f"add_{kind}")(tag, value, step, **options)

    def end(self) -> None:
        """Closes the file for good. Later records are not written, and one warning says so."""
        self.write_no_more()
        self._has_ended = True

    def write_no_more(self) -> None:
        """Writes nothing from now on: the record of a run that has finished stays as it is."""
        self.close()
        self._file = _RecordFile(None)

    def size(self) -> int:
        """Measures the record file, with what is written to it so far.

        Returns:
            Its size in bytes.
        """
        return self._file.size()

    def cut(self, size: int) -> None:
        """Removes what was written to the record file later.

        Args:
            size: The size that is left, in bytes.
        """
        self.close()
        self._file.cut(size)

    def close(self) -> None:
        """Closes the file until the next record. May be called twice."""
        self._writer = None
        self._file.close()


class _RecordFile(AppendedFile):
    """The records, written in this thread; VisualDL calls these methods.

    VisualDL's own classes (visualdl/writer/record_writer.py, RecordFileWriter and _AsyncWriter)
    hand each record to a thread. That costs 60 µs per record when they come quickly, the last
    records are lost with the process, and write errors are swallowed.
    """

    has_lines = False

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self._kinds: dict[str, str] = {}  # of records, by their tags

    def get_filename(self) -> str:
        return str(self.path)

    def add_record(self, record: Any) -> None:
        # Of a tag with several kinds the board shows the first one:
        # visualdl/reader/reader.py, LogReader.parse_from_bin.
        for value in record.values:
            kind = value.WhichOneof("one_value").replace("value", "scalar")
            if (first := self._kinds.setdefault(value.tag, kind)) != kind:
                raise ValueMistake(
                    f"visualizer: the tag {value.tag!r} is used for {first} and for {kind}, and "
                    "the board shows only one of them; expected another tag for the "
                    f"second, such as '{value.tag}/{kind}'."
                )
        data = record.SerializeToString()
        self.append(RECORD_HEAD.pack(len(data)) + data)


def check_visualizer(visualizer: Any) -> None:
    """Raises a TypeError if self.visualizer is no Visualizer: VisualDL's writer lacks methods."""
    if not isinstance(visualizer, Visualizer):
        raise TypeMistake(
            f"self.visualizer: is a {type(visualizer).__name__}; expected a class derived from "
            "expbase.record.visualizer.Visualizer, or another name."
        )


def _log_writer(file: _RecordFile) -> Any:
    from visualdl import LogWriter  # not at the top: most processes write no records

    class DirectWriter(LogWriter):  # type: ignore[misc]  # visualdl has no types
        def _get_file_writer(self) -> _RecordFile:
            self._file_writer = self._all_writers[self._logdir] = file
            return file

    return DirectWriter(logdir=os.path.dirname(file.get_filename()))


def _numbers(method: str, tag: Any, value: Any) -> Any:
    """Returns a value as an array; a TypeError if it does not hold real numbers."""
    from expbase.base.arrays import to_numpy  # here: the board reads files, and needs no paddle

    try:
        array = np.asarray(to_numpy(value) if hasattr(value, "numpy") else value)
    except ValueError:  # lists of unequal length
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        expected = "expected an array or a tensor of real numbers"
        raise TypeMistake(f"{_said(method, tag, value)}; {expected}.")
    return array


def _said(method: str, tag: Any, value: Any) -> str:
    """Returns the beginning of an error: what was given under a tag."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("paddle.")
        return f"{method}: {tag!r} has the shape {[*value.shape]} of {dtype}"
    return f"{method}: {tag!r} is {type(value).__name__} {value!r:.80}"


def _pixels(tag: Any, image: Any) -> Any:
    """Returns an image as uint8.

    VisualDL would multiply the caller's array by 255, or show it in black
    (visualdl/component/base_component.py, denormalization).
    """
    channels = image.shape[2:]
    if image.ndim < 2 or not image.size or channels not in [(), (1,), (3,), (4,)]:
        hint = ""
        if image.ndim == 3 and image.shape[0] in (1, 3, 4):
            hint = " Of [C, H, W] it is image.transpose([1, 2, 0])."
        elif image.ndim == 4:
            hint = " Give one image of a batch: images[0]."
        raise ValueMistake(
            f"{_said('add_image', tag, image)}; expected [H, W], [H, W, 1], [H, W, 3] or "
            f"[H, W, 4].{hint}"
        )
    highest = 1 if image.dtype.kind in "fb" else 255
    if not 0 <= image.min() <= image.max() <= highest:
        raise ValueMistake(
            f"add_image: {tag!r} has values from {image.min()} to {image.max()}; expected floats "
            "from 0 to 1, or whole numbers from 0 to 255."
        )
    return (image * 255.0).round().astype("uint8") if highest == 1 else image.astype("uint8")
