"""The ledger: what is written at a start and an end, and how it is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, trained, training_config

from expbase import Config
from expbase.record.ledger import (
    Ledger,
    Session,
    config_changes,
    last_config,
    read,
    sessions,
)


class Failing(Tiny):
    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 3:
            raise ArithmeticError("no")


class Rated(Tiny):
    """With keys of its own, of all kinds that a config takes."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.optim = Config({"betas": (0.9, 0.99), "limit": float("nan"), "name": None})
        return config


def starts(run: Path) -> list[dict[str, Any]]:
    return [record for record in read(run / "ledger.jsonl") if record["event"] == "start"]


def test_a_start_and_an_end_are_noted_with_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0004, 160.0])
    monkeypatch.setattr(time, "time", lambda: next(times))
    record = Ledger(tmp_path / "ledger.jsonl")
    record.write("start", iteration=400)
    record.write("end", iteration=600, reason="finished", exit_code=0)
    assert read(tmp_path / "ledger.jsonl") == [
        {"event": "start", "time": 100.0, "iteration": 400},
        {"event": "end", "time": 160.0, "iteration": 600, "reason": "finished", "exit_code": 0},
    ]


def test_a_record_without_a_path_writes_nothing(tmp_path: Path) -> None:
    Ledger(None).write("start", iteration=0)
    assert read(tmp_path / "ledger.jsonl") == []


def test_a_torn_record_is_passed_over_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    Ledger(file).write("start", iteration=0)
    with file.open("ab") as torn:
        torn.write(b'{"event": "end", "exit_')
    Ledger(file).write("start", iteration=2)
    assert [record["iteration"] for record in read(file)] == [0, 2]


def test_starts_are_paired_with_their_ends() -> None:
    def record(event: str, number: int) -> dict[str, Any]:
        return {"event": event, "number": number}

    killed, ended, orphan = record("start", 1), record("start", 2), record("end", 4)
    records = [killed, ended, record("end", 3), orphan, {"event": "other"}, record("start", 5)]
    assert sessions(records) == [
        Session(killed, None),
        Session(ended, record("end", 3)),
        Session(None, orphan),  # another rank failed before the run began
        Session(record("start", 5), None),
    ]
    assert sessions([]) == []


def test_each_start_notes_what_it_changes_against_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=2)
    with pytest.raises(ArithmeticError):
        trained(Failing, run, max_iteration=4, log_interval=2)
    trained(Tiny, run, max_iteration=4, log_interval=2)
    trained(Tiny, run, max_iteration=6, log_interval=1)
    assert [start["config_changes"] for start in starts(run)] == [
        {},
        {"training.max_iteration": [2, 4], "training.log_interval": [1, 2]},
        {},
        {"training.max_iteration": [4, 6], "training.log_interval": [2, 1]},
    ]
    first = training_config(max_iteration=2)
    assert last_config(first, read(run / "ledger.jsonl"))["training.max_iteration"] == 6


def test_values_that_json_does_not_have_are_no_changes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(2):
        trained(Rated, run, max_iteration=2)
    assert [start["config_changes"] for start in starts(run)] == [{}, {}]


def test_a_key_that_is_new_or_gone_is_noted_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: {b: 1}\nold: 2\n")
    now = {"a": {"b": 1, "new": [1, float("inf")]}}
    changes = config_changes(tmp_path, now)
    assert changes == {"old": [2, None], "a.new": [None, [1, "Infinity"]]}
    Ledger(tmp_path / "ledger.jsonl").write("start", iteration=0, config_changes=changes)
    json.loads((tmp_path / "ledger.jsonl").read_text(), parse_constant=pytest.fail)
    assert config_changes(tmp_path, now) == {}


def test_records_of_an_earlier_expbase_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "ledger.jsonl").write_text('{"event": "start", "iteration": 0}\n')
    assert config_changes(tmp_path, {"a": 2}) == {"a": [1, 2]}


def test_without_a_dumped_config_the_first_start_notes_all_of_it(tmp_path: Path) -> None:
    class Silent(Tiny):
        def dump_config(self) -> None:
            pass

    trained(Silent, tmp_path / "run", max_iteration=2)
    trained(Silent, tmp_path / "run", max_iteration=4)
    first, second = starts(tmp_path / "run")
    assert first["config_changes"]["training.max_iteration"] == [None, 2]
    assert second["config_changes"] == {"training.max_iteration": [2, 4]}
