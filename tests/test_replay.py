"""What a failure leaves, and that it comes again on a copy of the run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest
import safetensors.paddle
from paddle.io import DataLoader
from terminal import terminal
from tiny import TESTS, Points, Tiny, trained

from expbase.__main__ import main
from expbase.record import crash
from expbase.tools import replay, replay_worker
from expbase.tools.process import run_program

SCRIPT = """
import pathlib
from tiny import Tiny
from expbase import default_argument_parser, main
from expbase.cli import load_config

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
            raise ValueError("on rank 1")

    def valid(self):
        if KIND == "valid" and self.iteration == 7:
            raise ValueError("in valid()")
        return {"accuracy": 0.5}

    def on_train_end(self):
        print("finished:", self.finished)

if __name__ == "__main__":
    if KIND == "by hand":
        args = default_argument_parser().parse_intermixed_args()
        exp = Failing(load_config(Failing, args), args)
        exp.setup()
        exp.run()
    main(Failing)
    pathlib.Path("after").write_text("what the script does with a trained model")
"""
TRAINING = ["max_iteration=20", "save_interval=3", "log_interval=2", "valid_interval=7"]


@pytest.fixture
def folder(tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, which is the current one; scripts in it find the helpers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "orig_argv", [])
    yield tmp_path
    sys.modules.pop("train", None)  # which the runner has imported from here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes replay run the worker in this process."""

    class Left(BaseException):
        """The process would end here."""

    class Worker:
        """In place of the worker's process."""

        def __init__(self, words: Sequence[str], cwd: Path) -> None:
            monkeypatch.chdir(cwd)
            monkeypatch.setattr(sys, "argv", [*words[1:]])
            monkeypatch.setattr(replay_worker.Repeated, "was_made", False)
            with pytest.raises(Left):
                replay_worker.main()

        def wait(self) -> int:
            return 0

        poll = wait

    def leave(ended: str, code: int) -> None:
        if not left:  # a process leaves once; here it goes through the worker's own `except`
            left.append(ended)
            write_and_leave(ended, code)
        raise Left

    left: list[str] = []
    write_and_leave = replay_worker.leave
    monkeypatch.setattr(replay_worker.os, "_exit", lambda code: None)
    monkeypatch.setattr(replay_worker, "leave", leave)
    monkeypatch.setattr(replay, "subprocess", SimpleNamespace(Popen=Worker))


def failed(folder: Path, kind: str, *words: str) -> Path:
    """The output of a run that failed at iteration 7 (8, where it logs, if not finite)."""
    (folder / "train.py").write_text(SCRIPT.replace("KIND", repr(kind)))
    settings = [f"training.{word}" for word in TRAINING]
    start(["train.py", "--output", "runs/a", "--device=cpu", *settings, *words])
    return folder / "runs/a"


def start(program: list[str]) -> None:
    """Runs what the interpreter would be given, in this process, until it fails."""
    sys.orig_argv[:] = [sys.executable, *program]
    with pytest.raises((ArithmeticError, ValueError)):
        run_program(program)


def contents(run: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in run.rglob("*")
        if path.is_file()
    }


def test_a_failure_leaves_its_batch_traceback_and_checkpoint(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed(folder, "error")
    assert "to see it fail again: python -m expbase replay runs/a" in capfd.readouterr().err
    left = folder / "runs/a/crash/iteration-7"
    facts = crash.last_failure(folder / "runs/a")[0]
    arrays = safetensors.paddle.load_file(left / "batch_0.safetensors")
    assert facts["error"] == f"ValueError: a sum of {float(arrays['0'].sum())!r}"
    assert facts["checkpoint"] == "step-00000006"
    assert (facts["phase"], facts["epoch"], facts["batch_in_epoch"]) == ("train", 1, 7)
    assert len(facts["samples"]) == 4
    assert facts["batch"] == ["float32 [4, 4]", "int64 [4]"]
    assert sorted(arrays) == ["0", "1"]
    assert 'raise ValueError(f"a sum of' in (left / "traceback_0.txt").read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failure_of_the_data_set_leaves_the_indices_of_its_batch(
    tmp_path: Path, workers: int
) -> None:
    class Broken(Points):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                raise KeyError("no such label")
            return super().__getitem__(index)

    class Failing(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = DataLoader(Broken(), batch_size=4, num_workers=workers)

    with pytest.raises(KeyError):
        trained(Failing, tmp_path / "run")
    facts = crash.last_failure(tmp_path / "run")[0]
    assert facts["samples"] == [8, 9, 10, 11]
    assert "batch" not in facts  # it could not be made, and is not the one before
    text = (tmp_path / "run/crash/iteration-3/traceback_0.txt").read_text()
    assert text.count("self.train_loader: raised by sample 9 of the data set") == 1


def test_a_batch_of_anything_is_described_and_in_two_processes_alike() -> None:
    batch = {"ids": np.zeros(2, "uint32"), "image": np.zeros((2, 3), "float32"), "odd": object()}
    described, arrays = crash.describe_batch(batch)
    assert described["image"] == "float32 [2, 3]"
    assert described["odd"] == "<object object>"
    assert list(arrays) == ["image"]


def test_a_failure_comes_again_and_the_run_stays_as_it_is(
    folder: Path, here: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed(folder, "error")
    before = contents(run)
    (folder / "temporary").mkdir()
    monkeypatch.setattr(replay.tempfile, "tempdir", str(folder / "temporary"))
    capfd.readouterr()
    assert main(["replay", "runs/a"]) == 0
    captured = capfd.readouterr()
    error = crash.last_failure(run)[0]["error"]
    assert f"replay: the same error at iteration 7: {error}" in captured.out
    assert "replay: from step-00000006 to" in captured.out
    assert "to see it fail again" not in captured.err  # of the copy
    assert contents(run) == before
    assert list((folder / "temporary").iterdir()) == []


@pytest.mark.parametrize(("kind", "iteration"), [("nan", 8), ("valid", 7)])
def test_a_failure_outside_of_train_batch_comes_again(
    folder: Path, here: None, capsys: pytest.CaptureFixture[str], kind: str, iteration: int
) -> None:
    run = failed(folder, kind)
    before = contents(run)
    assert main(["replay", "runs/a"]) == 0
    assert f"replay: the same error at iteration {iteration}: " in capsys.readouterr().out
    assert contents(run) == before


def test_a_failure_before_the_first_checkpoint_comes_again_from_the_beginning(
    folder: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(folder, "error", "training.save_interval=0")
    assert main(["replay", "runs/a"]) == 0
    assert "from the beginning to iteration 7" in capsys.readouterr().out


def test_a_failure_of_rank_1_comes_again_on_two_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed(folder, "error")
    (folder / "train.py").write_text(SCRIPT.replace("KIND", repr("rank 1")))
    path = run / "crash/iteration-7/crash_0.json"  # as two ranks would have left it
    changed = {"ranks": 2, "checkpoint": None, "error": "ValueError: on rank 1"}
    path.with_name("crash_1.json").write_text(
        json.dumps({**json.loads(path.read_text()), **changed})
    )
    path.unlink()
    before = contents(run)
    assert main(["replay", "runs/a"]) == 0
    assert "rank 1, the same error at iteration 7: ValueError: on" in capsys.readouterr().out
    assert contents(run) == before
    assert main(["replay", "runs/a", "--pdb"]) == 1
    assert "--pdb: the run has 2 processes" in capsys.readouterr().err


def test_what_was_repaired_since_passes_and_the_answer_is_1(
    folder: Path, here: None, capfd: pytest.CaptureFixture[str]
) -> None:
    run = failed(folder, "error")
    (folder / "train.py").write_text(SCRIPT.replace("KIND", "''"))
    before = contents(run)
    capfd.readouterr()
    assert main(["replay", "runs/a"]) == 1
    shown = capfd.readouterr()
    assert "iteration 7 passed; not repeatable, or code, data or the machine were" in shown.out
    assert "finished: False" in shown.out
    assert "[7] saved" in shown.err
    assert "[8]" not in shown.err
    assert contents(run) == before
    assert not (folder / "after").exists()


def test_another_error_is_no_repetition(
    folder: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(folder, "error")
    script = SCRIPT.replace("KIND", "'error'").replace("a sum of", "the sum of")
    (folder / "train.py").write_text(script)
    assert main(["replay", "runs/a"]) == 1
    assert "another end: ValueError: the sum of" in capsys.readouterr().out


def test_a_script_without_main_is_told_so_and_cannot_reach_the_run(
    folder: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed(folder, "error")
    (folder / "train.py").write_text(SCRIPT.replace("KIND", "'by hand'"))
    before = contents(run)
    assert main(["replay", "runs/a"]) == 1
    assert "no run was made by main(Experiment), which replay needs" in capsys.readouterr().out
    assert contents(run) == before


@pytest.mark.filterwarnings("ignore:'expbase.__main__' found:RuntimeWarning")  # here it runs twice
def test_of_the_runners_of_a_file_the_one_that_failed_is_run_alone(
    folder: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("KIND", "'valid'"))
    (folder / "runs.yaml").write_text(
        "experiment: train.py:Failing\nconfig: {training: {log_interval: 2, valid_interval: 7}}\n"
        "runner:\n- {name: before, class: train, max_iteration: 6}\n"
        "- {name: a, class: train, max_iteration: 20, save_interval: 3}\n"
    )
    start(["-m", "expbase", "run", "runs.yaml", "--device", "cpu"])
    before = contents(folder / "runs")
    assert main(["replay", "runs/a"]) == 0
    assert "the same error at iteration 7: ValueError: in valid()" in capsys.readouterr().out
    assert contents(folder / "runs") == before


def test_the_debugger_is_at_the_failing_line_of_the_users_code(folder: Path) -> None:
    run = failed(folder, "shape")  # raised somewhere in paddle
    words = [sys.executable, "-m", "expbase", "replay", str(run), "--pdb"]
    environment = {"PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"}
    with terminal(["/usr/bin/env", "-C", str(folder), *words], 120, **environment) as shown:
        text = shown.wait(lambda text: text.endswith("(Pdb)"))
        assert "-> self.model(points[:, :2])" in text.splitlines()[-2]
        shown.type("p self.iteration, tuple(points.shape)\n")
        assert shown.wait(lambda text: "(7, (4, 4))" in text and text.endswith("(Pdb)"))
        shown.type("q\n")
        end = shown.wait()
    assert shown.exit_code == 0
    assert "the same error at iteration" in end


def test_the_debugger_is_where_a_value_that_is_not_finite_was_logged(
    folder: Path,
    here: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed(folder, "nan")
    seen: list[Any] = []

    def post_mortem(trace: TracebackType) -> None:
        seen.append(traceback.extract_tb(trace)[-1])

    monkeypatch.setattr(replay_worker.pdb, "post_mortem", post_mortem)
    assert main(["replay", "runs/a", "--pdb"]) == 0
    (frame,) = seen
    assert (frame.line, Path(frame.filename).name) == ("self.log(loss=loss)", "train.py")
    assert "the same error at iteration 8" in capsys.readouterr().out


def test_where_there_is_no_failure_a_line_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    trained(Tiny, folder / "fine")
    for name in ("missing", "file", "empty", "fine"):
        capsys.readouterr()
        assert main(["replay", name]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        expected = ": no failure in training was noted" if name == "fine" else "' holds no run"
        assert f"{name}{expected}" in line


def test_what_is_missing_for_a_replay_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed(folder, "error")
    path = run / "crash/iteration-7/crash_0.json"
    lost = json.dumps({**json.loads(path.read_text()), "checkpoint": "step-00000099"})
    for expected, change in (
        ("step-00000099: is not there any more", lambda: path.write_text(lost)),
        ("train.py: no such file; call replay where", lambda: os.remove(folder / "train.py")),
        ("crash_0.json: damaged", lambda: path.write_text("{")),
    ):
        change()
        assert main(["replay", "runs/a"]) == 1
        assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_mistake_that_its_message_explains_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.monitor"):
        trained(Tiny, tmp_path / "run", monitor="accurcy")
    assert not (tmp_path / "run/crash").exists()
