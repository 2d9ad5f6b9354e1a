"""`--smoke`: a whole life in seconds, which leaves nothing and answers with an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TESTS

SCRIPT = """
import paddle
from tiny import Tiny
from expbase import main

class Tried(Tiny):
    def valid(self):
        if BROKEN == "valid":
            raise KeyError("a broken valid()")
        batches = [1 for _ in self.valid_batches()]
        assert len(batches) <= 2
        return super().valid()
    def setup_model(self):
        super().setup_model()
        if BROKEN == "state":
            self.notes = [object()]
            self.register_stateful("notes")
    def on_save_checkpoint(self):
        return {"note": "saved and loaded"}
    def on_load_checkpoint(self, states):
        print(states["note"])
    def on_train_end(self):
        print("finished:", self.finished, "max:", self.config.training.max_iteration)

if __name__ == "__main__":
    main(Tried)
"""


def smoke(
    folder: Path, *words: str, broken: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A smoke test in a process of its own; and what it left, anywhere."""
    work, temporary = folder / "work", folder / "temporary"
    work.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    (work / "train.py").write_text(SCRIPT.replace("BROKEN", repr(broken)))
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(temporary)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py", "--smoke", "--device", "cpu", *words],
        cwd=work, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    left = [str(path) for path in (*work.rglob("*"), *temporary.rglob("*"))]
    return result, [name for name in left if not name.endswith(("train.py", ".pyc", "__pycache__"))]


@pytest.mark.parametrize("nprocs", ["1", "2"])
def test_an_experiment_that_works_passes_and_nothing_is_left(tmp_path: Path, nprocs: str) -> None:
    result, left = smoke(tmp_path, "--nprocs", nprocs, "--output", "runs/a")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("smoke test passed in ") == 1
    assert "2 updates, 0.0 MB saved and loaded, validated: [2] accuracy=" in result.stdout
    assert "finished: False max: 10000" in result.stdout  # schedules are as long as they will be
    assert "\nsaved and loaded\n" in result.stdout
    assert "expbase board" not in result.stderr  # of a directory that is gone
    assert left == []


@pytest.mark.parametrize(
    ("broken", "text"), [("valid", "a broken valid()"), ("state", "notes.0: a builtins.object")]
)
def test_what_would_fail_after_hours_fails_now(tmp_path: Path, broken: str, text: str) -> None:
    result, left = smoke(tmp_path, broken=broken)
    assert result.returncode == 1
    assert text in result.stderr.splitlines()[-1]
    assert "smoke test passed" not in result.stdout
    assert left == []


def test_it_saves_and_loads_where_the_config_never_does(tmp_path: Path) -> None:
    result, left = smoke(tmp_path, "training.save_interval=0", "training.valid_interval=0")
    assert result.returncode == 0, result.stderr
    assert "\nsaved and loaded\n" in result.stdout
    assert left == []


def test_a_monitor_that_valid_does_not_return_is_found(tmp_path: Path) -> None:
    result, _ = smoke(tmp_path, "training.monitor=accurcy")
    assert result.returncode == 1
    assert "training.monitor: 'accurcy' given" in result.stderr


def test_it_does_not_go_with_looking_at_a_run(tmp_path: Path) -> None:
    result, _ = smoke(tmp_path, "--evaluate", "best", "--output", "run")
    assert result.returncode == 1
    assert "--smoke: given with --evaluate or --export" in result.stderr
