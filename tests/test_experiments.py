"""The experiments, in short; proofs/experiments.py runs them whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import curve, run_script

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "words", "metric"),
    [
        ("charlm", ["data.num_files=20", "optim.warmup_iterations=2"], "valid/bits_per_character"),
        ("gan", ["data.num_points=1000"], "valid/quality"),
        ("flow", ["data.num_held_out=1000", "drawing.interval=4"], "valid/nll"),
        ("multitask", ["data.num_files=20", "training.log_interval=2"], "valid/accuracy"),
        (
            "ctr",
            [
                "data.lines_per_day=2000",
                "data.folder={tmp}",
                "training.max_epoch=0",
                "training.save_every_epoch=0",
                "training.valid_every_epoch=0",
            ],
            "valid/auc",
        ),
    ],
)
def test_an_experiment_trains_is_continued_and_evaluated(
    tmp_path: Path, name: str, words: list[str], metric: str
) -> None:
    script = ROOT / "experiments" / name / "train.py"
    output = tmp_path / "run"
    given = ["--output", str(output), *(word.format(tmp=tmp_path / "data") for word in words)]
    if name != "ctr":  # whose YAML is for the runner
        given += ["--config", str(script.with_name("config.yaml"))]
    given += ["training.valid_interval=4", "training.save_interval=4", "training.log_interval=2"]
    for end in (4, 8):
        result = run_script(script, *given, f"training.max_iteration={end}")
        assert result.returncode == 0, result.stderr
    assert "CONTINUING" in result.stderr
    assert sorted(curve(output, metric)) == [4, 8]
    result = run_script(script, "--output", str(output), "--evaluate", "best")
    assert result.returncode == 0, result.stderr
    assert metric.removeprefix("valid/") in result.stdout
