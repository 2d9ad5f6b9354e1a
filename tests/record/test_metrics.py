"""Lines of metrics as text and as JSON; one event goes to the log, the file and VisualDL."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NoReturn

import pytest

from expbase.record.logs import early_log
from expbase.record.metrics import MetricLog, MetricsFile, json_lines, words
from expbase.record.visualizer import FILE_NAME, Visualizer


def test_the_points_of_a_line_are_in_the_file_with_it(tmp_path: Path) -> None:
    from visualdl import LogReader

    board = Visualizer(tmp_path)
    log = MetricLog(early_log(), MetricsFile(None), lambda: board)
    log.write(3, 1, {"train/loss": 0.5, "speed/data_wait": 0.25})
    reader = LogReader(file_path=str(tmp_path / FILE_NAME))  # nothing was closed
    tags = ("train/loss", "wall_clock/data_wait")
    assert [reader.get_data("scalar", tag)[0].value for tag in tags] == [0.5, 0.25]
    log.close()


def test_a_line_has_the_iteration_then_what_was_logged_in_its_order() -> None:
    metrics = {"loss": 1 / 3, "bad": math.nan, "acc": 2, "lr": 1e-3, "speed/data_wait": 0.5}
    assert words(metrics) == "loss=0.333333 bad=nan acc=2 lr=0.001"


def test_the_time_left_is_shown_as_a_clock() -> None:
    assert words({"speed/seconds_left": 3725.4}) == "speed/seconds_left=1:02:05"


def test_a_speed_has_three_digits_or_all_before_the_point() -> None:
    assert [words({"speed/steps_per_second": value}) for value in (0.12345, 45.61, 7823.4)] == [
        f"speed/steps_per_second={text}" for text in ("0.123", "45.6", "7823")
    ]


def test_every_metrics_line_is_strict_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    monkeypatch.setattr("time.time", lambda: 12.34567)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(400, 2, {"b": math.nan, "a": 0.5, "c": -math.inf})
    file.write(401, 2, {})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(text, parse_constant=refuse) for text in lines)
    start = {"iteration": 400, "epoch": 2, "time": 12.346}
    assert first == {**start, "a": 0.5, "b": "nan", "c": "-inf"}
    assert list(first) == ["iteration", "epoch", "time", "a", "b", "c"]
    assert second == {**start, "iteration": 401}


def test_metrics_are_cut_back_to_a_size_and_go_on_from_there(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.size() == 0
    file.write(1, 1, {})
    size = file.size()
    file.write(2, 1, {"of the killed process": 1})
    file.cut(size)
    file.cut(size + 1000)  # there is nothing to remove
    file.write(2, 1, {})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [set(json.loads(text)) for text in lines] == [{"iteration", "epoch", "time"}] * 2


def test_a_metrics_file_without_a_path_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = MetricsFile(None)
    file.write(1, 1, {"a": 1.0})
    file.cut(file.size())
    assert list(tmp_path.iterdir()) == []


def test_a_torn_line_and_one_that_is_no_object_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert [*json_lines(file)] == []
    nested = b"[" * 100_000
    file.write_bytes(b'{"a": 1}\n[2]\n{"a"\n\xff\n' + nested + b'\n{"a": 3}\n{"a": 4')
    assert [*json_lines(file)] == [{"a": 1}, {"a": 3}]
    assert [*json_lines(file, last=16)] == [{"a": 3}]
    file.unlink()
    os.mkfifo(file)
    assert [*json_lines(file)] == []
