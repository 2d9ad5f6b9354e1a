"""A run that somebody has written by hand is looked at, and does nothing but to be shown."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from expbase.__main__ import main

BAD = "\x1b]0;title\x07\x1b[2J\u202e"  # a title, an empty screen, letters from right to left
YAML = """
a: &a [x, x, x, x, x, x, x, x, x, x]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]
c: [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]
d: !!python/object/apply:os.mkdir [harm]
"""
TEXTS = ("experiment", "directory", "host", "device", "python", "platform", "code", "model")
TABLES = ("packages", "environment", "sources", "loaders", "began_from")
START: dict[str, Any] = {
    "event": "start", "time": 1.0, "iteration": 0, "ranks": 1, "script": 0, "pid": 10**30,
    **dict.fromkeys((*TEXTS, "resumed"), BAD),
    **{name: {BAD: BAD} for name in TABLES},
    "command": ["train.py", BAD], "config": {"training.seed": BAD, BAD: 1},
    "git": {"commit": BAD, "branch": BAD, "dirty": 1, "note": BAD},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "letters": {},
    "kinds": {"time": "x", "git": [], "config": [1], "command": {"a": 1}},
    "numbers": {"time": float("inf"), "config": {"training.seed": {"a": [1]}}, "packages": 3},
}


def test_who_looks_at_it_sees_text_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    end = {"event": "end", "time": 2.0, "iteration": 10**40, "reason": BAD, "exit_code": BAD}
    line = {"iteration": 1, "epoch": 1, "time": 1.0, "train/loss": 0.5, f"train/{BAD}": 1.0}
    for kind, edits in KINDS.items():
        run = tmp_path / "runs" / f"{kind}{BAD}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(YAML)
        records = [json.dumps({**START, **edits}), json.dumps(end)]
        (run / "ledger.jsonl").write_text("\n".join(records))
        (run / "metrics.jsonl").write_text(json.dumps({**line, "valid/x": BAD}))
    for words in (["ls", "runs"], ["ls", "runs", "--json"], *(["show", run] for run in runs())):
        assert main(words) == 0
        out, err = capfd.readouterr()
        assert out
        assert all(letter.isprintable() for letter in (out + err).replace("\n", ""))
    assert not (tmp_path / "harm").exists()


def runs() -> list[str]:
    return [str(path) for path in sorted(Path("runs").iterdir())]
