"""VisualDL for one run: one record file, opened at first use. The only file that imports it.

Every method takes tensors, arrays and numbers, changes nothing that it is handed, and does nothing
on the ranks that write no file. What is broken in VisualDL says so, and what to use instead.

visualizer = Visualizer(directory)      # or Visualizer(None): takes everything, writes nothing
visualizer.add_scalar("train/loss", 0.25, step=400)
visualizer.add_image("sample", pixels, step=400)
visualizer.close()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expbase.tensorfile import to_numpy

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
            hparams: Values by name; what is no number or text goes in as its text.
            metrics: The tags of the scalars to compare, `valid/accuracy`.
        """
        if self._directory is not None:
            plain = {name: _plain(value) for name, value in hparams.items()}
            self.writer.add_hparams(plain, list(metrics))

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
            tag = tag.replace("%", "_")  # VisualDL takes none
            getattr(self.writer, f"add_{kind}")(tag, value, int(step), **options)

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


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return value if type(value) in (int, float, str) else str(value)
