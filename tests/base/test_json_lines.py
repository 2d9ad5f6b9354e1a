"""Files of JSON lines: written, and read, also where a line is torn."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NoReturn

import pytest

from expbase.base.json_lines import JsonLines, json_lines


def test_every_line_is_strict_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    monkeypatch.setattr("time.time", lambda: 12.34567)
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.write(400, 2, {"b": math.nan, "a": 0.5, "c": -math.inf})
    file.write(401, 2, {})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(text, parse_constant=refuse) for text in lines)
    start = {"iteration": 400, "epoch": 2, "time": 12.346}
    assert first == {**start, "a": 0.5, "b": "nan", "c": "-inf"}
    assert list(first) == ["iteration", "epoch", "time", "a", "b", "c"]
    assert second == {**start, "iteration": 401}


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
