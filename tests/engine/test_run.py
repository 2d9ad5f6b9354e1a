"""A run from its start to its end: what it notes, how it fails, and that all of it is closed."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import forks
import paddle
import pytest
from tiny import Tiny, ledger, make, same_bits, trained

from expbase.__main__ import main as tool
from expbase.checkpoint import layout, storage
from expbase.engine.stop import StopRequests


def test_everything_is_closed_once_however_it_ends(tmp_path: Path) -> None:
    class Interrupted(Tiny):
        closed = 0

        def train_batch(self) -> None:
            raise KeyboardInterrupt

        def terminal(self) -> None:
            self.closed += 1

    handlers = list(logging.getLogger().handlers)
    exp = make(Interrupted, tmp_path / "run")
    exp.setup()
    with pytest.raises(KeyboardInterrupt):
        exp.run()
    exp.close()
    assert exp.closed == 1
    assert logging.getLogger().handlers == handlers
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    trained(Tiny, tmp_path / "run", max_iteration=1)  # the lock is free


def test_a_failed_setup_frees_what_it_took(tmp_path: Path) -> None:
    class Broken(Tiny):
        def setup_model(self) -> None:
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        make(Broken, tmp_path / "run").setup()
    trained(Tiny, tmp_path / "run", max_iteration=1)


def test_a_save_that_failed_beside_the_failure_is_told_and_hides_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def refuse(*args: Any) -> None:
        failing.wait(forks.LONG_SECONDS)
        raise layout.CheckpointError("no room")

    class Failing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                failing.set()
                raise ValueError("broken")

    monkeypatch.setattr(storage, "write", refuse)
    with pytest.raises(ValueError, match="broken"):
        trained(Failing, tmp_path / "run", save_interval=2)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "in saving, after the failure: CheckpointError" in log
    assert "[3] the failed update has read batch 3 of epoch 1, samples [" in log
    assert "the same command makes this update again (newest checkpoint: none yet)" in log


@pytest.mark.parametrize(
    "error", [MemoryError("no"), RuntimeError("\n\nOut of memory error on GPU 0. Cannot allocate")]
)
def test_an_update_without_memory_says_what_needs_less_of_it(
    tmp_path: Path, error: Exception
) -> None:
    class Greedy(Tiny):
        def train_batch(self) -> None:
            raise error

    with pytest.raises(type(error)):
        trained(Greedy, tmp_path / "run")
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "Out of memory in an update: expected smaller batches" in log


def test_the_ledger_holds_each_start_and_each_end(tmp_path: Path) -> None:
    class Dividing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            raise ZeroDivisionError("the original")

    trained(Tiny, tmp_path / "run", max_iteration=2)
    with pytest.raises(ZeroDivisionError):
        trained(Dividing, tmp_path / "run", max_iteration=4)
    records = ledger(tmp_path / "run")
    told = [(r["event"], r["iteration"], r.get("reason"), r.get("exit_code")) for r in records]
    assert told == [
        ("start", 0, None, None),
        ("data", 1, None, None),
        ("digest", 2, None, None),
        ("end", 2, "finished", 0),
        ("start", 2, None, None),
        ("data", 3, None, None),
        ("end", 3, "ZeroDivisionError('the original')", 1),
    ]
    assert records[4]["resumed"] == "step-00000002"
    assert records[1]["first_batch"] != records[5]["first_batch"]


def test_no_absolute_path_stands_in_the_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Tiny, Path("run"), max_iteration=2)
    trained(Tiny, Path("run"), max_iteration=4)
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_with_workers_ends_cleanly_and_continues_to_the_same_bits(
    tmp_path: Path, persistent: bool
) -> None:
    class Working(Tiny):
        loader_options = {"num_workers": 2, "persistent_workers": persistent}  # noqa: RUF012

    trained(Tiny, tmp_path / "without", max_iteration=12, save_interval=6)
    trained(Working, tmp_path / "with", max_iteration=3, valid_interval=0)
    trained(Working, tmp_path / "with", max_iteration=12, save_interval=6)
    for file in ("model.safetensors", "optimizer.safetensors"):
        end = f"checkpoints/step-00000012/{file}"
        assert (tmp_path / "with" / end).read_bytes() == (tmp_path / "without" / end).read_bytes()
    assert "ERROR" not in (tmp_path / "with/worker_0.log").read_text()


def test_a_stop_in_the_last_iteration_is_the_end_for_each_start_and_each_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(Tiny):
        def on_evaluate_end(self, results: Any) -> None:
            if self.iteration == 4:
                self.stop("not better any more")

    for number, said in enumerate(("[4] FINISHED: ", "FINISHED already: iteration 4"), 1):
        exp = trained(Late, tmp_path / "run", max_iteration=4, valid_interval=2)
        assert (exp.finished, exp.end_reason) == (True, "finished")
        assert said in capsys.readouterr().err
        ends = [line["reason"] for line in ledger(tmp_path / "run") if line["event"] == "end"]
        assert ends == ["finished"] * number
        for name in ("ls", "show"):
            assert tool([name, str(tmp_path / "run")]) == 0
            shown = capsys.readouterr().out
            assert "finished" in shown
            assert "stopped" not in shown


@pytest.mark.parametrize(
    ("reason", "error", "finished", "end_reason"),
    [
        ("the end", None, True, "finished"),
        ("stop()", None, True, "stopped: it is good enough"),
        ("train() returned", None, True, "stopped: train() returned"),
        ("STOP", None, False, "stopped: a file named STOP"),
        ("an error", OSError, False, "failed: OSError('full')"),
        ("SIGTERM", SystemExit, False, "signal: SIGTERM"),
        ("a second Ctrl-C", KeyboardInterrupt, False, "signal: SIGINT"),
        ("the time limit", SystemExit, False, "time limit: training.time_limit_seconds"),
    ],
)
def test_the_end_tells_its_reason_and_whether_training_has_finished(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    error: type[BaseException] | None,
    finished: bool,
    end_reason: str,
) -> None:
    said: list[tuple[bool, str]] = []

    class Ending(Tiny):
        def train(self) -> None:
            while self.going_on():
                self.train_batch()
                self.end_iteration()
                if reason == "train() returned":
                    return

        def train_batch(self) -> None:
            super().train_batch()
            said.append((self.finished, self.end_reason))
            if self.iteration == 2 and reason == "stop()":
                self.stop("it is good enough")
            if self.iteration == 2 and reason == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            if self.iteration == 2 and reason == "STOP":
                (self.output_dir / "STOP").touch()
            if reason == "a second Ctrl-C":
                raise KeyboardInterrupt

        def valid(self) -> dict[str, float]:
            if reason == "an error":  # in the last iteration
                raise OSError("full")
            return super().valid()

        def on_train_end(self) -> None:
            said.append((self.finished, self.end_reason))

    seconds = itertools.count()  # one at every look
    hasty = functools.partial(StopRequests, clock=seconds.__next__)
    monkeypatch.setattr("expbase.engine.run.StopRequests", hasty)
    limit = 4 if reason == "the time limit" else 0  # more looks than setup makes
    exp = make(
        Ending, tmp_path / "run", max_iteration=3, valid_interval=3, time_limit_seconds=limit
    )
    exp.setup()
    assert (exp.finished, exp.end_reason) == (False, "")
    if error is None:
        exp.run()
    else:
        with pytest.raises(error):
            exp.run()
    assert said == [(False, "")] * (len(said) - 1) + [(finished, end_reason)]
    assert (exp.finished, exp.end_reason) == (finished, end_reason)
    assert not (tmp_path / "run/STOP").exists()  # else it would stop the next start, too
    noted = ledger(tmp_path / "run")[-1]["reason"]
    assert noted in (end_reason.partition(": ")[2] or end_reason, "Ctrl-C", "KeyboardInterrupt()")


def test_a_terminal_that_fails_is_in_the_record(tmp_path: Path) -> None:
    class Failing(Tiny):
        def terminal(self) -> None:
            raise OSError("no upload")

    exp = make(Failing, tmp_path / "run")
    exp.setup()
    with pytest.raises(OSError, match="no upload"):
        exp.run()
    assert not exp.finished
    last = ledger(tmp_path / "run")[-1]
    assert (last["event"], last["reason"], last["exit_code"]) == ("end", "OSError('no upload')", 1)


@pytest.mark.parametrize(
    ("place", "code"),
    [("valid", 0), ("on_train_begin", None), ("terminal", 0), ("setup_model", None)],
)
def test_an_exit_that_says_that_all_is_well_is_a_failure(
    tmp_path: Path, place: str, code: int | None
) -> None:
    def leave(self: Tiny, *_: object) -> None:
        sys.exit(code)

    with pytest.raises(SystemExit) as ended:
        trained(type("Leaving", (Tiny,), {place: leave}), tmp_path / "run")
    text = rf"sys\.exit\({code}\) called in leave \(test_run\.py:\d+\): the run has not finished"
    assert re.match(text, str(ended.value.code))  # a text, after which python answers 1
    last = ledger(tmp_path / "run")[-1]
    assert (last["exit_code"], "called in leave" in last["reason"]) == (1, True)


def test_another_exit_code_of_ones_own_stays(tmp_path: Path) -> None:
    class Leaving(Tiny):
        def valid(self) -> Any:
            sys.exit(7)

    with pytest.raises(SystemExit, match="7"):
        trained(Leaving, tmp_path / "run")


def test_an_experiment_is_set_up_and_run_once(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    with pytest.raises(RuntimeError, match="setup: called a second time"):
        exp.setup()
    exp.run()
    assert exp.finished
    with pytest.raises(RuntimeError, match="run: this experiment is closed"):
        exp.run()


def test_a_second_experiment_of_a_process_may_name_its_parameters_alike(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.teacher = paddle.nn.Linear(4, 2, weight_attr=paddle.ParamAttr(name="of_teacher"))

        def setup_model(self) -> None:
            self.model = paddle.nn.Linear(4, 2, weight_attr=paddle.ParamAttr(name="of_model"))
            rate = paddle.optimizer.lr.CosineAnnealingDecay(0.01, T_max=30)
            self.optimizer = paddle.optimizer.Adam(rate, parameters=self.model.parameters())

    whole = trained(Named, tmp_path / "whole", max_iteration=8, save_interval=4)
    trained(Named, tmp_path / "run", max_iteration=4, save_interval=4)
    continued = trained(Named, tmp_path / "run", max_iteration=8, save_interval=4)
    same_bits(*(tmp_path / name / "checkpoints" / "step-00000008" for name in ("whole", "run")))
    assert continued.model.weight.name == "of_model"
    assert whole.model.bias.name != continued.model.bias.name  # automatic names go on counting

    class Twice(Named):
        def setup_model(self) -> None:
            super().setup_model()
            self.other = paddle.nn.Linear(4, 2, weight_attr=paddle.ParamAttr(name="of_model"))

    with pytest.raises(ValueError, match="of_model"):
        trained(Twice, tmp_path / "c")
