"""One event goes to the log, to metrics.jsonl and to VisualDL."""

from __future__ import annotations

from pathlib import Path

from expbase.record.logs import early_log
from expbase.record.metrics import MetricLog, MetricsFile
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
