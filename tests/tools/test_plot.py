"""Curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image

from expbase.__main__ import main
from expbase.tools import plot


def log(name: str, text: str) -> None:
    Path(name).mkdir()
    Path(name, "metrics.jsonl").write_text(text)


def trained(run: Path, seed: int, end: int = 6) -> None:
    """Writes what a run leaves: its config, a start and an end, and a falling loss."""
    run.mkdir(parents=True)
    config = {"training.seed": seed, "training.max_iteration": end}
    start = {"event": "start", "experiment": "Falling", "config": config}
    last = {"event": "end", "reason": "finished", "exit_code": 0}
    (run / "ledger.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(last)}\n")
    (run / "config.yaml").write_text(f"training: {{seed: {seed}, max_iteration: {end}}}\n")
    lines = [{"iteration": n, "train/loss": seed - n / 8} for n in range(1, end + 1)]
    lines += [{"iteration": end, "valid/accuracy": 1 / seed}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_curves_of_several_runs_are_drawn_into_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        trained(tmp_path / f"s{seed}", seed)
    picture = tmp_path / "curves.png"
    words = ["plot", str(tmp_path / "s1"), str(tmp_path / "s2"), "--output", str(picture)]
    words.append("--single")
    assert main(words) == 0
    assert capsys.readouterr().out == f"written: {picture}\n"
    assert main(words) == 0
    assert capsys.readouterr().out == f"replaced: {picture}\n"
    image = np.asarray(Image.open(picture).convert("RGB"))
    assert image.shape[1] > image.shape[0]  # two fields side by side
    for colour in ((31, 119, 180), (255, 127, 14)):  # of the first run, of the second
        assert (abs(image.astype(int) - colour).sum(axis=-1) < 40).sum() > 100


@pytest.mark.long
def test_all_runs_below_a_directory_are_drawn_and_one_without_lines_is_left_out(
    tmp_path: Path,
) -> None:
    for seed in (1, 2, 3):
        trained(tmp_path / f"runs/s{seed}", seed)
    (tmp_path / "runs/s3/metrics.jsonl").unlink()
    assert [run.name for run in plot._runs_at(tmp_path / "runs")] == ["s1", "s2"]
    assert main(["plot", str(tmp_path / "runs"), "--output", str(tmp_path / "c.png")]) == 0


def test_training_is_smoothed_and_validation_is_as_it_is() -> None:
    curve = {1: 1.0, 2: 3.0, 4: 2.0}
    run = {"train/loss": curve, "valid/a": curve}
    training, validation = plot.draw({"run": [run]}, ["train/loss", "valid/a"], 0.5).axes
    logged, smooth = training.lines
    assert logged.get_xydata().tolist() == [[1, 1.0], [2, 3.0], [4, 2.0]]
    assert smooth.get_xdata().tolist() == [1, 2, 4]
    assert smooth.get_ydata()[1] == pytest.approx((0.5 * 1 + 3 + 0.5 * 2) / 2)
    assert training.get_title("right") == "thick: smoothed by 0.5"
    assert [line.get_ydata().tolist() for line in validation.lines] == [[1.0, 3.0, 2.0]]
    assert validation.get_title("right") == ""
    (training,) = plot.draw({"run": [run]}, ["train/loss"], 0.0).axes
    assert len(training.lines) == 1
    assert training.get_title("right") == ""


@pytest.mark.parametrize("weight", [0.3, 0.99])
def test_the_smooth_line_goes_through_its_points_at_the_ends_too(weight: float) -> None:
    falling = 5 - np.arange(40) / 10
    np.testing.assert_allclose(plot.smoothed(falling, weight), falling)
    noisy = falling + np.where(np.arange(40) % 2, 0.3, -0.3)
    smooth = plot.smoothed(noisy, weight)
    for end in (slice(0, 6), slice(-6, None)):
        assert min(noisy[end] - smooth[end]) < 0 < max(noisy[end] - smooth[end])
    assert [*plot.smoothed([1.0, 2.0], weight)] == [1.0, 2.0]


def test_learning_rates_are_drawn_as_they_are() -> None:
    rates = {"train/lr": {1: 1.0, 2: 0.1, 3: 0.2}, "train/lr/d": {1: 0.1}, "train/lrs": {1: 0.1}}
    assert plot.chosen([{**rates, "speed/a": {1: 1.0}}], []) == [*rates]
    one, other, no_rate = plot.draw({"run": [rates]}, [*rates], 0.6).axes
    assert [len(axes.lines) for axes in (one, other, no_rate)] == [1, 1, 2]


def test_a_picture_of_one_run_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    draw = plot.draw
    monkeypatch.setattr(plot, "draw", lambda *args: figures.append(draw(*args)) or figures[0])
    monkeypatch.chdir(tmp_path)
    log("mine", '{"iteration": 1, "train/a": 1.0}\n')
    monkeypatch.chdir("mine")
    assert main(["plot", "."]) == 0
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["mine"]


def test_metrics_are_chosen_by_the_ends_of_their_names() -> None:
    found = [{"train/loss": {1: 1.0}, "valid/loss": {1: 1.0}, "speed/data_wait": {1: 1.0}}]
    assert plot.chosen(found, []) == ["train/loss", "valid/loss"]
    assert plot.chosen(found, ["loss"]) == ["train/loss", "valid/loss"]
    assert plot.chosen(found, ["speed/data_wait"]) == ["speed/data_wait"]
    assert plot.chosen([{"train/lr": {1: 1.0}}], []) == ["train/lr"]
    with pytest.raises(ValueError, match="--metrics: 'los' given; expected some of train/loss"):
        plot.chosen(found, ["los"])


def test_torn_and_infinite_points_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "train/a": 1.0}\n{"iteration": 2, "train/a": "nan"}\n'
        '{"iteration": 3, "train/a": 2.0}\n{"iteration": 4, "trai'
    )
    assert plot.curves(tmp_path) == {"train/a": {1: 1.0, 3: 2.0}}


MISTAKES = {
    "no": "no: no such directory; expected one with runs in it.",
    "empty": "empty/metrics.jsonl: no metrics; expected the output directory of a run",
    "run --smooth 1": "--smooth: 1 given; expected 0 or more, and less than 1.",
    "run --output no/such/a.png": "[Errno 2] No such file or directory: '",
    "run --output a.gif": "--output: a.gif given; expected .png, .svg, .pdf.",
    "run --output a": "--output: a given; expected .png, .svg, .pdf.",
    "run --metrics los": "--metrics: 'los' given; expected some of train/a, speed/b",
}


def test_a_mistake_is_a_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log("empty", "")
    log("run", '{"iteration": 1, "train/a": 1.0, "speed/b": 1.0}\n')
    for words, text in MISTAKES.items():
        assert main(["plot", *words.split()]) == 78, words
        out, err = capsys.readouterr()
        assert out == "", words
        assert err.startswith(f"python -m expbase plot: error: {text}")
        assert err.count("\n") == 1, words


def test_all_runs_of_a_picture_that_have_its_metrics_are_named() -> None:
    runs = {
        "a": [{"train/a": {1: 1.0, 2: 2.0}}],
        "_b": [{"train/b": {1: 1.0}}],
        "none": [{"train/c": {1: 1.0}}],
    }
    (legend,) = plot.draw(runs, ["train/a", "train/b"], 0.0).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "_b"]


def test_letters_that_the_usual_font_has_not_are_drawn_by_an_installed_one(tmp_path: Path) -> None:
    fonts = {font.name: font for font in font_manager.fontManager.ttflist}
    usual, other = (
        FT2Font(fonts[name].fname).get_charmap() for name in ("DejaVu Sans", "STIXNonUnicode")
    )
    letter = chr(min(other.keys() - usual.keys()))
    with plot.fonts_for(f"a{letter}"):
        assert "STIXNonUnicode" in matplotlib.rcParams["font.family"]
        figure = plot.draw({f"a{letter}": [{"train/a": {1: 1.0}}]}, ["train/a"], 0.0)
        figure.savefig(tmp_path / "a.png")  # a warning is an error here
    assert "STIXNonUnicode" not in matplotlib.rcParams["font.family"]


def test_nothing_is_said_of_letters_that_no_font_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log("第一", '{"iteration": 1, "train/损失": 1.0}\n')
    assert main(["plot", "第一"]) == 0


# --- means over seeds ------------------------------------------------------------------------


def test_runs_that_differ_in_their_seed_alone_are_one_line_in_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        trained(tmp_path / f"s{seed}", seed, 2)
    trained(tmp_path / "longer", 1, 3)
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda series, *_: drawn.append(series) or Figure())
    words = ["plot", str(tmp_path), "--output", str(tmp_path / "c.png")]
    for options in ([], ["--single"]):
        assert main([*words, *options]) == 0
    together, single = drawn
    longer, one, other = (str(tmp_path / name) for name in ("longer", "s1", "s2"))
    band = "mean ± deviation of 2 seeds: training.max_iteration=2"
    assert [*together] == [longer, band]
    assert [*single] == [longer, one, other]
    assert together[band] == [plot.curves(tmp_path / "s1"), plot.curves(tmp_path / "s2")]


def test_the_band_is_one_deviation_to_each_side_where_all_runs_have_numbers() -> None:
    runs = [{"valid/a": {1: 1.0, 2: 5.0, 3: 0.0}}, {"valid/a": {1: 3.0, 2: 5.0}}]
    (axes,) = plot.draw({"both": runs}, ["valid/a"], 0.6).axes
    (line,), (band,) = axes.lines, axes.collections
    assert line.get_xydata().tolist() == [[1, 2.0], [2, 5.0]]
    edges = band.get_paths()[0].vertices.tolist()
    assert [1, 2 - np.sqrt(2)] in edges
    assert [1, 2 + np.sqrt(2)] in edges
    assert {x for x, _ in edges} == {1, 2}
    point = [{"valid/a": {1: 1.0}}, {"valid/a": {1: 3.0}}]
    (axes,) = plot.draw({"both": point}, ["valid/a"], 0.6).axes
    assert axes.collections[0].get_segments()[0].tolist() == [
        [1, pytest.approx(2 - np.sqrt(2))], [1, pytest.approx(2 + np.sqrt(2))],
    ]  # fmt: skip


def test_more_runs_than_colours_have_other_dashes() -> None:
    runs = {f"run {number}": [{"valid/a": {1: 1.0, 2: 2.0}}] for number in range(40)}
    (axes,) = plot.draw(runs, ["valid/a"], 0.0).axes
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == 40


def test_a_smoothed_band_lies_round_the_smoothed_mean_and_is_never_inside_out() -> None:
    noise = np.random.RandomState(0).rand(2, 30) * np.linspace(3, 0, 30)
    runs = [{"train/a": dict(enumerate(values))} for values in noise]
    (axes,) = plot.draw({"both": runs}, ["train/a"], 0.9).axes
    thin, thick = axes.lines
    assert thin.get_ydata() == pytest.approx(noise.mean(axis=0))
    edges = axes.collections[0].get_paths()[0].vertices
    for x, y in thick.get_xydata():
        (low, high) = min(edges[edges[:, 0] == x][:, 1]), max(edges[edges[:, 0] == x][:, 1])
        assert low <= y <= high


def test_where_not_all_runs_of_a_group_have_a_metric_they_are_drawn_singly() -> None:
    runs = [{"valid/a": {1: 1.0, 2: 5.0}}, {}, {"valid/a": {1: 3.0}}]
    (axes,) = plot.draw({"three": runs}, ["valid/a"], 0.6).axes
    assert len(axes.lines) == 2
    assert not axes.collections
