"""The last value of each metric, without reading all lines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from expbase.record.metrics import metric_lines
from expbase.tools import newest_metrics
from expbase.tools.newest_metrics import Newest, read_newest, search


def written(run: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return run


def test_a_validation_and_a_test_of_long_ago_are_known_and_others_of_the_end(
    tmp_path: Path,
) -> None:
    lines = [
        {"iteration": 1, "train/once": 1, "train/text": "valid/accuracy"},
        {"iteration": 1, "valid/accuracy": 0.25},
        {"iteration": 1, "test/accuracy": 0.5, "checkpoint": "step-00000001"},
        {"iteration": 1, "valid/accuracy": 0.75},
        '{"iteration": 1, "valid/accuracy": {"no": "metric"}}',
        '{"iteration": 1, "test/accuracy": 0.1, "chec',
        *({"iteration": 2 + n, "train/loss": n / 7} for n in range(9000)),
    ]
    newest = read_newest(written(tmp_path, *lines))
    metrics = {"train/loss": 8999 / 7, "valid/accuracy": 0.75, "test/accuracy": 0.5}
    assert newest == Newest(9001, metrics, "step-00000001")
    assert search(tmp_path, "once") == search(tmp_path, "train/once") == {"train/once": 1}
    assert search(tmp_path, "onc") == search(tmp_path, "iteration") == {}
    assert read_newest(tmp_path / "no") == Newest()
    assert search(tmp_path / "no", "once") == {}


def test_it_is_what_reading_all_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of names that differ in digits alone, and of lines that are longer than a piece."""
    draw = random.Random(0)
    names = ["valid/a1", "valid/a2", "test/x", "train/loss", "train/l2", "train/l3", "ood/é"]
    for _ in range(60):
        lines: list[dict[str, Any] | str] = []
        for iteration in range(draw.randrange(12)):
            chosen = draw.sample(names, draw.randrange(1, 4))
            line = {"iteration": iteration, **{name: draw.random() for name in chosen}}
            lines.append(draw.choice([line, line, line, "torn", json.dumps(line)[:-9], "", "[]"]))
        written(tmp_path, *lines)
        all_of_them: dict[str, Any] = {}
        for line in metric_lines(tmp_path):
            all_of_them |= {name: value for name, value in line.items() if "/" in name}
        assert read_newest(tmp_path).metrics == all_of_them
        for size in (16, 64, 256):
            monkeypatch.setattr(newest_metrics, "_PIECE", size)
            for name in names:
                found = search(tmp_path, name)
                assert found == {n: v for n, v in all_of_them.items() if n == name}
        monkeypatch.undo()
