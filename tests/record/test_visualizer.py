"""VisualDL made safe: one file, opened late, appended to, closed twice."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from PIL import Image
from tiny import Points, Tiny, trained
from visualdl import LogReader

from expbase.record.visualizer import FILE_NAME, Visualizer


def curve(directory: Path, tag: str) -> dict[int, float]:
    from visualdl import LogReader

    records = LogReader(file_path=str(directory / FILE_NAME)).get_data("scalar", tag)
    return {record.id: record.value for record in records}


def test_without_a_step_a_record_is_of_the_iteration_under_way(tmp_path: Path) -> None:
    class Drawing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.visualizer.add_scalar("drawn", 0.5)

    trained(Drawing, tmp_path / "run", max_iteration=2)
    assert curve(tmp_path / "run", "drawn") == {1: 0.5, 2: 0.5}
    with pytest.raises(TypeError, match=r"'drawn' has step=None; expected a whole number"):
        Visualizer(None).add_scalar("drawn", 0.5)


def test_a_point_is_any_number_at_any_step(tmp_path: Path) -> None:
    steps = (0, 127, 128, np.int64(1 << 40))
    visualizer = Visualizer(tmp_path)
    values = [0, 0.1, -1e300, math.inf, math.nan, paddle.ones([1])]
    stored = [0, np.float32(0.1), -math.inf, math.inf, math.nan, 1]
    for number, value in enumerate(values):
        for step in steps:
            visualizer.add_scalar(f"{number}" + "ж" * 70 + "%", value, step)
    visualizer.close()
    for number, value in enumerate(stored):
        found = curve(tmp_path, f"{number}" + "ж" * 70 + "_")
        assert [*found] == [*steps], values[number]
        np.testing.assert_array_equal([*found.values()], value)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["pr_curve", "roc_curve"])
def test_curves_of_visualdls_own_writer_need_the_way_round_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    visualizer = Visualizer(tmp_path)
    labels, scores = np.array([0, 1, 1]), np.array([0.2, 0.9, 0.4])
    add = getattr(visualizer.writer, f"add_{kind}")
    with pytest.raises(AttributeError, match="module 'numpy' has no attribute 'float'"):
        add("curve", labels, scores, 1)  # else the page needs no way round any more
    monkeypatch.setattr(np, "float", float, raising=False)
    add("curve", labels, scores, 1)
    visualizer.close()
    [record] = LogReader(file_path=str(tmp_path / FILE_NAME)).get_data(kind, "curve")
    assert record.id == 1


def test_a_second_one_goes_on_in_the_same_file_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        visualizer = Visualizer(tmp_path)
        visualizer.add_scalar("loss", 0.5 * step, step)
        assert len(curve(tmp_path, "loss")) == step  # at once
        visualizer.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert curve(tmp_path, "loss") == {1: 0.5, 2: 1.0}
    assert capfd.readouterr().out == ""


def test_a_curve_is_cut_back_to_a_size_and_goes_on_as_one_line(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    assert visualizer.size() == 0
    visualizer.add_scalar("loss", 1.0, 1)
    size = visualizer.size()
    assert size == (tmp_path / FILE_NAME).stat().st_size > 0
    visualizer.add_scalar("loss", 7.0, 2)
    visualizer.cut(size)
    assert visualizer.size() == size
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"a torn record")
    visualizer.cut(size)
    visualizer.cut(size + 1000)  # nothing to take away
    visualizer.add_scalar("loss", 2.0, 2)
    visualizer.close()
    assert curve(tmp_path, "loss") == {1: 1.0, 2: 2.0}


def test_a_later_chdir_does_not_divert_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    visualizer = Visualizer("run")
    os.chdir(elsewhere)
    visualizer.add_scalar("loss", 1.0, 1)
    os.chdir(tmp_path)
    visualizer.add_scalar("loss", 2.0, 2)
    visualizer.close()
    assert curve(tmp_path / "run", "loss") == {1: 1.0, 2: 2.0}
    assert list(elsewhere.iterdir()) == []


def test_closing_twice_and_closing_what_was_never_used_are_legal(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    visualizer.close()
    assert list(tmp_path.iterdir()) == []  # it is opened at its first use
    visualizer.add_scalar("loss", 1.0, 1)
    visualizer.close()
    visualizer.close()
    assert curve(tmp_path, "loss") == {1: 1.0}


def test_without_a_directory_nothing_is_written_and_nothing_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    nowhere = Visualizer(None)
    nowhere.add_text("a", "b", 1)
    nowhere.add_image("a", np.zeros([2, 2]), 1)
    nowhere.cut(nowhere.size())
    assert nowhere.writer is None
    nowhere.close()


# --- what VisualDL itself breaks on ----------------------------------------------------------


def records(directory: Path, kind: str, tag: str) -> Any:
    from visualdl import LogReader

    return LogReader(file_path=str(directory / FILE_NAME)).get_data(kind, tag)


def pixels_of(record: Any) -> Any:
    return np.asarray(Image.open(io.BytesIO(record.image.encoded_image_string)))


@pytest.fixture
def visualizer(tmp_path: Path) -> Iterator[Visualizer]:
    made = Visualizer(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "image",
    [
        np.array([[0.0, 0.5], [1.0, 0.25]]),
        np.array([[0.0, 0.5], [1.0, 0.25]], "float32")[:, :, None],
        paddle.to_tensor([[0.0, 0.5], [1.0, 0.25]]),
        np.array([[0, 128], [255, 64]], "uint8"),
    ],
    ids=["floats", "one channel", "tensor", "whole"],
)
def test_an_image_arrives_as_it_is_and_is_not_changed(
    visualizer: Visualizer, tmp_path: Path, image: Any
) -> None:
    before = image.numpy().copy() if hasattr(image, "numpy") else image.copy()
    visualizer.add_image("image", image, step=3)
    visualizer.close()
    (record,) = records(tmp_path, "image", "image")
    assert record.id == 3
    assert pixels_of(record).tolist() == [[[v] * 3 for v in row] for row in ([0, 128], [255, 64])]
    assert (np.asarray(image) == before).all()


def test_an_image_that_would_be_black_is_refused(visualizer: Visualizer) -> None:
    for image, text in (
        (np.full([2, 2], 1.5), "values from 1.5 to 1.5; expected floats from 0 to 1, or whole"),
        (np.full([2, 2], np.nan), "values from nan to nan"),
        (np.full([2, 2], 300), "values from 300 to 300"),
    ):
        with pytest.raises(ValueError, match=text):
            visualizer.add_image("image", image, 1)


IMAGE = "expected [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]."
REFUSED = [
    ("add_image", np.zeros([3, 8, 6]), f"has the shape [3, 8, 6] of float64; {IMAGE} Of [C, H, W]"),
    ("add_image", np.zeros([2, 8, 6, 3]), f"{IMAGE} Give one image of a batch"),
    ("add_image", paddle.zeros([8]), f"has the shape [8] of float32; {IMAGE}"),
    ("add_image", np.zeros([0, 8]), f"has the shape [0, 8] of float64; {IMAGE}"),
    ("add_image", np.zeros([4, 4], "complex64"), "of complex64; expected an array or a tensor of"),
    ("add_image", "a.png", "is str 'a.png'; expected an array or a tensor of real numbers"),
    ("add_image", [[1], [1, 2]], "is list [[1], [1, 2]]; expected an array"),
    ("add_scalar", paddle.zeros([2]), "has the shape [2] of float32; expected one number"),
    ("add_scalar", "high", "is str 'high'; expected one number"),
    ("add_scalar", None, "is NoneType None; expected one number"),
    ("add_audio", None, "is NoneType None; expected an array"),
    ("add_audio", np.zeros(0), "has the shape [0] of float64, and values up to 0"),
    ("add_histogram", ["a"], "is list ['a']; expected an array"),
    ("add_histogram", np.array([1, np.nan]), "values that are not finite"),
    ("add_text", 3, "is int 3; expected a text"),
    ("add_figure", np.zeros([4, 4]), "of float64; expected a figure of matplotlib"),
]


@pytest.mark.parametrize("directory", [True, False], ids=["writes", "writes nothing"])
def test_what_cannot_be_shown_is_named_with_its_tag_and_what_is_expected(
    visualizer: Visualizer, *, directory: bool
) -> None:
    shown = visualizer if directory else Visualizer(None)  # another rank's
    for method, value, text in REFUSED:
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(shown, method)("sample", value, 1)
        assert str(caught.value).startswith(f"{method}: 'sample' ")
        assert text in str(caught.value)
    for tag, step, text in (
        (3, 1, "tag=3 given"),
        ("a", "b", "'a' has step='b'; expected a whole"),
    ):
        with pytest.raises(TypeError, match=text):
            shown.add_scalar(tag, 0.5, step)  # type: ignore[arg-type]


SOUND = np.zeros(100)
SECOND = {
    "image": lambda visualizer: visualizer.add_image("voice", np.zeros([2, 2]), 1),
    "histogram": lambda visualizer: visualizer.add_histogram("voice", SOUND, 1),
    "scalar": lambda visualizer: visualizer.add_scalar("voice", 0.5, 1),
    "text": lambda visualizer: visualizer.writer.add_text("voice", "a", 1),
}


def test_a_tag_of_two_kinds_is_an_error_at_the_second(
    visualizer: Visualizer, tmp_path: Path
) -> None:
    visualizer.add_audio("voice", SOUND, 1)
    size = visualizer.size()
    for kind, add in SECOND.items():
        text = f"'voice' is used for audio and for {kind}, .*, such as 'voice/{kind}'"
        with pytest.raises(ValueError, match=text):
            add(visualizer)
        assert visualizer.size() == size, kind
    visualizer.add_audio("voice", SOUND, 2)
    visualizer.add_image("voice/image", np.zeros([2, 2]), 2)
    visualizer.close()
    assert len(records(tmp_path, "audio", "voice")) == 2


def test_a_sound_that_is_clipped_or_none_at_all_is_named(tmp_path: Path) -> None:
    said: list[str] = []
    visualizer = Visualizer(tmp_path, said.append)
    visualizer.add_audio("loud", np.array([0.5, -2]), 1)
    visualizer.add_audio("loudest int16", np.array([0, -32768], "int16"), 1)
    assert said == ["add_audio: 'loud' has values up to 2, clipped to -1 … 1"]
    for bad, text in (([0, np.nan], "values up to nan"), (np.zeros([2, 3]), r"the shape \[2, 3\]")):
        with pytest.raises(ValueError, match=f"add_audio: 'x' has .*{text}.*; expected"):
            visualizer.add_audio("x", np.asarray(bad), 1)
    visualizer.close()


def test_texts_sounds_histograms_and_figures_are_read_back(
    visualizer: Visualizer, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    sound = np.sin(np.linspace(0, 9, 100)).astype("float32")
    visualizer.add_text("words %", "hello", 1)
    visualizer.add_audio("tone", paddle.to_tensor(sound), 2, sample_rate=100)
    visualizer.add_audio("tone", np.array([0, -32768], "int16"), 3)
    visualizer.add_histogram("weights", paddle.randn([4, 5]), 4, buckets=5)
    visualizer.add_figure("figure", figure, 5)
    visualizer.add_scalar("tensor", paddle.to_tensor([0.5]), 6)
    visualizer.close()
    assert records(tmp_path, "text", "words _")[0].text.encoded_text_string == "hello"
    tones = records(tmp_path, "audio", "tone")
    assert [tone.audio.length_frames for tone in tones] == [100, 2]
    assert tones[0].audio.sample_rate == 100
    histogram = records(tmp_path, "histogram", "weights")[0].histogram
    assert (sum(histogram.hist), len(histogram.bin_edges)) == (20, 6)
    assert pixels_of(records(tmp_path, "image", "figure")[0]).std() > 0
    assert curve(tmp_path, "tensor") == {6: 0.5}


def test_what_was_cut_is_written_again(tmp_path: Path) -> None:
    visualizer = Visualizer(tmp_path)
    for value in (0.25, 0.5):
        visualizer.cut(0)
        visualizer.add_scalar("loss", value, 1)
    visualizer.close()
    [record] = LogReader(file_path=str(tmp_path / FILE_NAME)).get_data("scalar", "loss")
    assert record.value == 0.5


def test_a_visualizer_of_one_s_own_is_used(tmp_path: Path) -> None:
    class Own(Visualizer):
        def add_scalar(self, tag: str, value: Any, step: int) -> None:
            tags.append(tag)

    class Experiment(Tiny):
        def setup_visualizer(self) -> None:
            self.visualizer = Own(None)

    tags: list[str] = []
    trained(Experiment, tmp_path / "run")
    assert "valid/accuracy" in tags


def test_after_the_end_nothing_is_written_into_the_record_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    exp = trained(Tiny, tmp_path)
    record = (tmp_path / FILE_NAME).read_bytes()
    with pytest.warns(UserWarning, match="'late' and what follows is not written: the run has end"):
        exp.visualizer.add_scalar("late", 1.0, 7)
    exp.visualizer.add_image("late", np.zeros([2, 2]), 7)
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert exp.evaluate(DataLoader(Points(10), batch_size=2), name="late")["accuracy"] > 0
    exp.close()
    assert (tmp_path / FILE_NAME).read_bytes() == record
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
