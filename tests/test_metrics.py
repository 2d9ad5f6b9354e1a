"""One event goes to the log, to metrics.jsonl and to VisualDL; the config stands there once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny import Tiny, trained

from expbase.record.logs import early_log
from expbase.record.meter import MetricsFile
from expbase.record.metrics import MetricLog
from expbase.record.visualizer import FILE_NAME, Visualizer


def hparams(output: Path) -> list[Any]:
    from visualdl import LogReader

    reader = LogReader(file_path=str(output / "vdlrecords.run.log"))
    tags = reader.get_tags().get("hyper_parameters", [])
    return [record for tag in tags for record in reader.get_data("hyper_parameters", tag)]


def compared(output: Path) -> list[tuple[dict[str, Any], list[str]]]:
    return [
        (
            {
                h.name: h.float_value or h.string_value or h.int_value
                for h in record.hparam.hparamInfos
            },
            [info.name for info in record.hparam.metricInfos],
        )
        for record in hparams(output)
    ]


def test_the_points_of_a_line_are_in_the_file_with_it(tmp_path: Path) -> None:
    from visualdl import LogReader

    log = MetricLog(early_log(), MetricsFile(None), Visualizer(tmp_path))
    log.write(3, 1, {"train/loss": 0.5, "speed/data_wait": 0.25})
    reader = LogReader(file_path=str(tmp_path / FILE_NAME))  # nothing was closed
    tags = ("train/loss", "wall_clock/data_wait")
    assert [reader.get_data("scalar", tag)[0].value for tag in tags] == [0.5, 0.25]
    log.close()


def test_the_config_stands_in_visualdl_once_also_after_a_resume(tmp_path: Path) -> None:
    for max_iteration in (6, 12):
        trained(Tiny, tmp_path / "run", max_iteration=max_iteration)
    ((config, names),) = compared(tmp_path / "run")
    assert config["max_iteration"] == 6  # of the first start
    assert names == ["valid/accuracy"]


def test_it_comes_again_where_a_resume_cut_it_away(tmp_path: Path) -> None:
    class Dying(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 4:
                raise RuntimeError

    options = {"max_iteration": 6, "save_interval": 2, "valid_interval": 3}
    try:
        trained(Dying, tmp_path / "run", **options)
    except RuntimeError:
        assert len(compared(tmp_path / "run")) == 1
    trained(Tiny, tmp_path / "run", **options)
    assert len(compared(tmp_path / "run")) == 1


def test_it_comes_again_in_a_run_that_continues_another_one(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "one")
    path = {"checkpoint_path": str(tmp_path / "one")}
    trained(Tiny, tmp_path / "two", path, max_iteration=12)
    assert len(compared(tmp_path / "two")) == 1


def test_without_validation_runs_are_compared_by_what_training_logs(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", valid_interval=0)
    ((_, names),) = compared(tmp_path / "run")
    assert "train/loss" in names
    assert not [name for name in names if name.startswith("speed/")]
