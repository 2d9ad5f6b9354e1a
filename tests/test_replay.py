"""What a failure leaves, and that it comes again on a copy of the run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from terminal import terminal
from tiny import TESTS, Tiny, trained

from expbase.record import crash

SCRIPT = """
import paddle
from paddle import Tensor
from tiny import Tiny
from expbase import main

class Failing(Tiny):
    def train_batch(self):
        points, labels = batch = self.read_batch()
        loss = self.model(points).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        if KIND == "nan" and self.iteration >= 7:
            loss = loss * float("nan")
        self.log(loss=loss)
        if KIND == "error" and self.iteration == 7:
            raise ValueError(f"a sum of {float(points.sum())!r}")
        if KIND == "shape" and self.iteration == 7:
            self.model(points[:, :2])
        if KIND == "rank 1" and self.iteration == 7 and self.rank == 1:
            raise ValueError(f"a sum of {float(points.sum())!r}")

    def valid(self):
        if KIND == "valid" and self.iteration == 7:
            raise ValueError("in valid()")
        return {"accuracy": 0.5}

if __name__ == "__main__":
    main(Failing)
"""
TRAINING = ["max_iteration=20", "save_interval=3", "log_interval=2", "valid_interval=7"]


def call(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore", **environment},
    )  # fmt: skip


def failed(folder: Path, kind: str, *words: str) -> Path:
    """The output of a run that failed at iteration 7 (8, where it logs, if not finite)."""
    (folder / "train.py").write_text(SCRIPT.replace("KIND", repr(kind)))
    settings = [f"training.{word}" for word in TRAINING]
    options = ["--output", "runs/a", "--device=cpu", *settings, *words]
    result = call("train.py", *options, folder=folder)
    assert result.returncode == 1, result.stderr
    if kind != "rank 1":
        assert "to see it fail again: python -m expbase replay runs/a" in result.stderr
    return folder / "runs/a"


def contents(run: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file()
    }


def replay(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    result = call("-m", "expbase", "replay", *words, folder=folder, TMPDIR=str(temporary))
    assert list(temporary.iterdir()) == []
    return result


def test_a_failure_leaves_its_batch_traceback_and_checkpoint(tmp_path: Path) -> None:
    failed(tmp_path, "error")
    folder = tmp_path / "runs/a/crash/iteration-7"
    facts = crash.read(folder)[0]
    arrays = paddle.load(str(folder / "batch_0.safetensors"), safetensors=True)
    assert facts["error"] == f"ValueError: a sum of {float(arrays['0'].sum())!r}"
    assert facts["checkpoint"] == "step-00000006"
    assert (facts["phase"], facts["epoch"], facts["batch_in_epoch"]) == ("train", 1, 7)
    assert len(facts["samples"]) == 4
    assert facts["batch"] == ["float32 [4, 4]", "int64 [4]"]
    assert sorted(arrays) == ["0", "1"]
    text = (folder / "traceback_0.txt").read_text()
    assert 'raise ValueError(f"a sum of' in text


@pytest.mark.parametrize(("kind", "iteration"), [("error", 7), ("nan", 8), ("valid", 7)])
def test_a_failure_comes_again_and_the_run_stays_as_it_is(
    tmp_path: Path, kind: str, iteration: int
) -> None:
    run = failed(tmp_path, kind)
    before = contents(run)
    result = replay(tmp_path, "runs/a")
    assert result.returncode == 0, result.stderr + result.stdout
    error = crash.read(crash.newest(run) or run)[0]["error"]
    assert f"replay: the same error at iteration {iteration}: {error}" in result.stdout
    assert "replay: from step-00000006 to" in result.stdout
    assert contents(run) == before


def test_a_failure_before_the_first_checkpoint_comes_again_from_the_beginning(
    tmp_path: Path,
) -> None:
    failed(tmp_path, "error", "training.save_interval=0")
    result = replay(tmp_path, "runs/a")
    assert result.returncode == 0, result.stderr
    assert "from the beginning to iteration 7" in result.stdout


def test_a_failure_of_rank_1_comes_again_on_two_ranks(tmp_path: Path) -> None:
    failed(tmp_path, "rank 1", "--nprocs", "2")
    assert (tmp_path / "runs/a/crash/iteration-7/batch_1.safetensors").exists()
    result = replay(tmp_path, "runs/a")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "rank 1, the same error at iteration 7: ValueError: a sum of" in result.stdout
    refused = replay(tmp_path, "runs/a", "--pdb")
    assert refused.returncode == 1
    assert "--pdb: the run has 2 processes" in refused.stderr


def test_what_was_mended_since_passes_and_the_answer_is_1(tmp_path: Path) -> None:
    failed(tmp_path, "error")
    (tmp_path / "train.py").write_text(SCRIPT.replace("KIND", "''"))
    result = replay(tmp_path, "runs/a")
    assert result.returncode == 1
    assert "iteration 7 passed without 'ValueError: a sum of" in result.stdout


def test_another_error_is_no_repetition(tmp_path: Path) -> None:
    failed(tmp_path, "error")
    script = SCRIPT.replace("KIND", "'error'").replace("a sum of", "the sum of")
    (tmp_path / "train.py").write_text(script)
    result = replay(tmp_path, "runs/a")
    assert result.returncode == 1
    assert "another end: ValueError: the sum of" in result.stdout


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("error", 'raise ValueError(f"a sum'),
        ("nan", "self.log(loss=loss)"),
        ("shape", "self.model(points[:, :2])"),  # raised somewhere in paddle
    ],
)
def test_the_debugger_stands_at_the_failing_line(tmp_path: Path, kind: str, line: str) -> None:
    failed(tmp_path, kind)
    words = [sys.executable, "-m", "expbase", "replay", str(tmp_path / "runs/a"), "--pdb"]
    os_environment = {"PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    with terminal(["/usr/bin/env", "-C", str(tmp_path), *words], 120, **os_environment) as shown:
        text = shown.wait(lambda text: text.endswith("(Pdb)"))
        assert f"-> {line}" in text.splitlines()[-2]
        shown.type("p self.iteration, tuple(points.shape)\n")
        assert shown.wait(lambda text: "(7, (4, 4))" in text and text.endswith("(Pdb)"))
        shown.type("q\n")
        end = shown.wait()
    assert shown.exit_code == 0
    assert "the same error at iteration" in end


def runs(folder: Path) -> dict[str, Path]:
    """Directories that hold no failure."""
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    trained(Tiny, folder / "fine")
    return {name: folder / name for name in ("missing", "file", "empty", "fine")}


def test_where_there_is_no_failure_a_line_says_so(tmp_path: Path) -> None:
    for name, path in runs(tmp_path).items():
        result = replay(tmp_path, str(path))
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        expected = "no failure in training was noted" if name == "fine" else "holds no run"
        assert f"{path}: {expected}" in line


def test_what_is_missing_for_a_replay_is_named(tmp_path: Path) -> None:
    run = failed(tmp_path, "error")
    facts_file = run / "crash/iteration-7/crash_0.json"
    facts: dict[str, Any] = json.loads(facts_file.read_text())
    for expected, change in (
        ("--iteration: 3 given; expected one of 7", lambda: ["--iteration", "3"]),
        ("step-00000099: is not there any more", lambda: lost_checkpoint(facts_file, facts)),
        ("train.py: no such file; expected the script", lambda: os.remove(tmp_path / "train.py")),
        ("crash_0.json: damaged", lambda: facts_file.write_text("{")),
    ):
        words = change()  # type: ignore[no-untyped-call]
        result = replay(tmp_path, "runs/a", *(words if isinstance(words, list) else []))
        assert result.returncode == 1
        assert expected in result.stderr.splitlines()[-1]


def lost_checkpoint(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps({**facts, "checkpoint": "step-00000099"}))


def test_a_slip_that_its_message_explains_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.monitor"):
        trained(Tiny, tmp_path / "run", monitor="accurcy")
    assert not (tmp_path / "run/crash").exists()
