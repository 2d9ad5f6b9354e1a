"""The ledger: what is written at a start and an end, and how it is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, trained

from expbase import Config
from expbase.base.json_lines import json_lines
from expbase.engine import run_digest
from expbase.record.starts_and_ends import Ledger, Session, sessions


class Rated(Tiny):
    """With keys of its own, of all kinds that a config takes."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.optim = Config({"betas": (0.9, 0.99), "limit": float("nan"), "name": None})
        return config


def read(path: Path) -> list[dict[str, Any]]:
    return list(json_lines(path))


def starts(run: Path) -> list[dict[str, Any]]:
    return [record for record in read(run / "ledger.jsonl") if record["event"] == "start"]


def test_a_start_and_an_end_are_noted_with_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0004, 160.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    record = Ledger()
    record.begin(tmp_path / "ledger.jsonl", {})
    record.write("start", iteration=400)
    record.write("end", iteration=600, reason="finished", exit_code=0)
    record.close()
    assert read(tmp_path / "ledger.jsonl") == [
        {"event": "start", "time": 100.0, "iteration": 400},
        {"event": "end", "time": 160.0, "iteration": 600, "reason": "finished", "exit_code": 0},
    ]


def test_starts_are_paired_with_their_ends(tmp_path: Path) -> None:
    def record(event: str, number: int) -> dict[str, Any]:
        return {"event": event, "number": number}

    killed, ended, orphan = record("start", 1), record("start", 2), record("end", 4)
    records = [killed, ended, record("end", 3), orphan, {"event": "other"}, record("start", 5)]
    assert sessions(tmp_path) == []
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    assert sessions(tmp_path) == [
        Session(killed),
        Session(ended, record("end", 3)),
        Session(end=orphan),  # another rank failed before the run began
        Session(record("start", 5)),
    ]


def test_each_start_notes_its_config(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(Rated, run, max_iteration=2)
    trained(Rated, run, max_iteration=4)
    json.loads((run / "ledger.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)
    first, second = (start["config"] for start in starts(run))
    assert first["optim.betas"] == [0.9, 0.99]
    assert first | {"training.max_iteration": 4} == second


def test_what_setup_and_training_change_in_the_config_is_not_what_a_start_was_given(
    tmp_path: Path,
) -> None:
    class Warming(Rated):
        def setup_model(self) -> None:
            super().setup_model()
            self.config.optim.name = "of the data"

        def train_batch(self) -> None:
            super().train_batch()
            self.config.optim.betas = [0.5, 0.5]

    for end in (2, 4):
        exp = trained(Warming, tmp_path, max_iteration=end)
    assert exp.config.optim.betas == [0.5, 0.5]
    assert [start["config"]["optim.betas"] for start in starts(tmp_path)] == [[0.9, 0.99]] * 2
    assert [start["config"]["optim.name"] for start in starts(tmp_path)] == [None] * 2
    assert run_digest.problems(tmp_path) == []


def test_a_record_that_a_power_cut_has_torn_does_not_spoil_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"event": "start", "ti')
    record = Ledger()
    record.begin(tmp_path / "ledger.jsonl", {})
    record.write("start", iteration=400)
    record.close()
    assert [one["iteration"] for one in read(tmp_path / "ledger.jsonl")] == [400]
    assert "its last line was torn" in capsys.readouterr().err
