"""Lines of metrics as text and as JSON; one event goes to the log, the file and VisualDL."""

from __future__ import annotations

import math
from pathlib import Path

from expbase.base.json_lines import JsonLines
from expbase.record.logs import early_log
from expbase.record.metrics import MetricLog, words
from expbase.record.visualizer import FILE_NAME, Visualizer


def test_the_points_of_a_line_are_in_the_file_with_it(tmp_path: Path) -> None:
    from visualdl import LogReader

    board = Visualizer(tmp_path)
    log = MetricLog(early_log(), JsonLines(None), lambda: board)
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
