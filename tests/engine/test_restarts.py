"""--restarts: what is started again, when and how often, and what is said of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import psutil
import pytest
from repository import GIT, commit, git
from tiny import TESTS, Tiny, ledger, make, same_bits, saved, trained, wait_until

from expbase import ConfigError
from expbase.checkpoint.layout import newest_iteration
from expbase.engine import restarts
from expbase.ranks import launch
from expbase.ranks.launch import Outcome

KILLED = Outcome(137, deaths=("rank 1 was killed by SIGKILL",))
DONE = Outcome(0)


class Run:
    """Starts that end as they are told, and a clock that goes on when somebody waits."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *starts: Outcome, newest: Any = (), stop_at: int = 10**9
    ) -> None:
        self.starts = [*starts]
        self.newest = [-1, *newest]
        self.reasons: list[str] = []
        self.seconds = 0
        self.stop_at = stop_at
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=self.sleep)
        patch.setattr(restarts, "time", clock)
        patch.setattr(restarts, "newest_iteration", self.look)
        patch.setattr(launch, "spawn", self.start)

    def look(self, args: Any) -> int:
        return self.newest.pop(0) if len(self.newest) > 1 else self.newest[0]

    def start(self, function: Any, words: Any, *_: Any) -> Outcome:
        self.reasons.append(words[-1].restart_reason)
        return self.starts.pop(0)

    def sleep(self, seconds: int) -> None:
        self.seconds += seconds
        if self.seconds >= self.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def supervise(self, limit: int) -> int:
        words = {"output": "nowhere", "fresh": False, "nprocs": 2, "device": None}
        return restarts.run(print, [argparse.Namespace(restarts=limit, **words)])


def test_what_killed_a_rank_is_the_reason_of_the_next_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, KILLED, Outcome(1), DONE)
    assert run.supervise(3) == 0
    assert run.reasons == [
        "",
        "RESTART 1 of 3: rank 1 was killed by SIGKILL",
        "RESTART 2 of 3: a rank ended with code 1",
    ]
    assert capsys.readouterr().err.splitlines() == [
        "rank 1 was killed by SIGKILL; starts again in 0 s",
        "a rank ended with code 1; starts again in 1 s",
    ]


def test_starts_without_progress_are_counted_and_wait_longer_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, *[KILLED] * 4)
    assert run.supervise(3) == 137
    assert len(run.reasons) == 4
    assert run.seconds == pytest.approx(0 + 1 + 2)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "rank 1 was killed by SIGKILL; not started again: 3 restarts brought no new checkpoint"
    )
    run = Run(monkeypatch, *[KILLED] * 40, DONE)
    assert run.supervise(40) == 0
    assert run.seconds == pytest.approx(sum(range(31)) + 9 * 30)


def test_a_newer_checkpoint_gives_the_restarts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, *[KILLED] * 6, newest=[10, 10, 20, 20, 20, 20])
    assert run.supervise(2) == 137
    numbers = [reason.partition(":")[0] for reason in run.reasons[1:]]
    first, second = "RESTART 1 of 2", "RESTART 2 of 2"
    assert numbers == [first, second, first, second]


@pytest.mark.parametrize("code", [143, 124, 78, 0])
def test_what_somebody_stopped_or_a_mistake_is_not_started_again(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Run(monkeypatch, Outcome(code)).supervise(3) == code


def test_a_failure_after_a_signal_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)

    def start(*_: Any) -> Outcome:
        signal.raise_signal(signal.SIGUSR1)
        return KILLED

    monkeypatch.setattr(launch, "spawn", start)
    assert run.supervise(3) == 137


def test_a_signal_ends_the_wait_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, *[KILLED] * 4, stop_at=2)
    assert run.supervise(9) == 137
    assert run.seconds == 2
    assert len(run.reasons) == 3


# --- processes -------------------------------------------------------------------------------


SCRIPT = """
import os, signal, sys
from tiny import Tiny
from expbase import main

class Failing(Tiny):
    def train_batch(self):
        super().train_batch()
        for how in os.environ.get("FAIL", "").split():
            rank, iteration, signum = map(int, how.split(","))
            note = self.output_dir / how
            if (self.rank, self.iteration) == (rank, iteration) and not note.exists():
                note.touch()
                os.kill(os.getpid(), signum)
        if os.environ.get("RAISE") == str(self.iteration):
            raise ValueError("mine")

if __name__ == "__main__":
    main(Failing)
"""
KILLS = f"0,3,{signal.SIGKILL:d} 1,7,{signal.SIGSEGV:d}"  # rank, iteration, signal
WORDS = ["--device", "cpu", "training.valid_interval=4", "training.save_interval=2"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@contextlib.contextmanager
def started(script: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore", **variables}
    process = forks.Popen(
        [sys.executable, str(script), *WORDS, *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=script.parent,
        env=environment,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def starts(run: Path) -> list[dict[str, Any]]:
    return [record for record in ledger(run) if record["event"] == "start"]


EDITING = """
import os, pathlib, signal, subprocess
from tiny import Tiny
from expbase import main

class Editing(Tiny):
    def train_batch(self):
        super().train_batch()
        note = self.output_dir / "edited"
        if self.iteration == 3 and not note.exists():
            note.touch()
            script = pathlib.Path(__file__)
            script.write_text(script.read_text() + "# for the next experiment")
            subprocess.run(["git", "commit", "-qam", "two"], check=True)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(Editing)
"""


def test_an_edit_in_mid_run_is_not_of_the_run_and_the_next_start_by_hand_tells_it(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in GIT.items():
        monkeypatch.setenv(name, value)
    script.write_text(EDITING)
    git(script.parent, "init", "-q")
    commit(script.parent, "one")
    first = git(script.parent, "rev-parse", "HEAD")
    words = ["--output", "run", "training.log_interval=1"]
    with started(script, *words, "--restarts", "1", "training.max_iteration=4") as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 0, stderr
    checksum = f"{zlib.crc32(EDITING.encode()):08x}"
    run = script.parent / "run"
    assert [start["sources"] for start in starts(run)] == [{"train.py": checksum}] * 2
    assert [start["git"]["commit"] for start in starts(run)] == [first] * 2
    assert git(script.parent, "rev-parse", "HEAD") != first
    told = [line for line in stderr.splitlines() if "WARNING: train.py: edited since" in line]
    assert len(told) == 1
    with started(script, *words, "training.max_iteration=6") as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert "not exact: train.py: changed since the checkpoint was written" in stderr
    assert "edited since" not in stderr
    assert starts(run)[2]["sources"] != {"train.py": checksum}


SHRINKING = """
import os, signal
from tiny import Helped
from expbase import main

class Shrinking(Helped):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3 and self.rank == 1:
            os.sched_setaffinity(os.getppid(), [min(os.sched_getaffinity(0))])
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main(Shrinking)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
@pytest.mark.long
def test_a_start_after_a_device_is_gone_has_fewer_processes(script: Path) -> None:
    script.write_text(SHRINKING)
    words = ["--nprocs", "auto", "--restarts", "1", "training.shares=2"]
    words += ["training.max_iteration=4"]
    with started(script, "--output", "run", *words) as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 0, stderr
    assert [start["ranks"] for start in starts(script.parent / "run")] == [2, 1]
    assert "--nprocs auto: 1 (2 shares, 1 cores)" in stderr
    assert "not exact" not in (script.parent / "run" / "worker_0.log").read_text()


@pytest.mark.long
def test_a_run_whose_ranks_are_killed_ends_like_one_that_was_not(script: Path) -> None:
    words = ["--nprocs", "2", "training.max_iteration=8"]
    with started(script, "--output", "whole", *words) as process:
        assert process.wait(forks.LONG_SECONDS) == 0
    with started(script, "--output", "run", "--restarts", "1", *words, FAIL=KILLS) as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 0, stderr
    run = script.parent / "run"
    end = "checkpoints/step-00000008"
    same_bits(script.parent / "whole" / end, run / end)
    reasons = [start["restart"] or "" for start in starts(run)]
    assert reasons[0] == ""
    assert reasons[1].startswith("RESTART 1 of 1: rank 0 was killed by SIGKILL")
    assert reasons[2].startswith("RESTART 1 of 1: rank 1 was killed by SIGSEGV")
    log = (run / "worker_1.log").read_text().splitlines()
    told = [line.partition("WARNING: ")[2] for line in log if "RESTART" in line]
    assert told == reasons[1:]


@pytest.mark.long
def test_an_exception_in_training_is_tried_n_times(script: Path) -> None:
    with started(script, "--output", "run", "--restarts", "1", RAISE="3") as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 1
    assert len(starts(script.parent / "run")) == 2
    text = "a rank ended with code 1; not started again: 1 restarts brought no new checkpoint"
    assert text in stderr


def test_a_mistake_that_was_caught_is_not_the_answer_of_what_comes_later(script: Path) -> None:
    script.write_text(
        "from tiny import Tiny\nfrom expbase import main\n"
        "class Wrong(Tiny):\n    def setup_model(self):\n        raise ValueError('mine')\n"
        "try:\n    main(Wrong)\nexcept ValueError:\n    1 / 0\n"
    )
    with started(script, "--output", "run") as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert "ZeroDivisionError" in stderr
    assert process.returncode == 1


@pytest.mark.parametrize("words", [[], ["--nprocs", "2", "--restarts", "2"]])
def test_a_mistake_in_the_class_is_a_sentence_of_each_rank_and_answers_78(
    script: Path, words: list[str]
) -> None:
    script.write_text(SCRIPT.replace("def train_batch(self)", "def train_batches(self)"))
    script.write_text(script.read_text().replace("(Tiny)", "(ExperimentBase)"))
    script.write_text("from expbase import ExperimentBase\n" + script.read_text())
    with started(script, "--output", "run", *words) as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 78
    text = ".py: error: Failing: setup_dataloader, setup_model, train_batch not defined"
    assert stderr.count(text) == (2 if "--nprocs" in words else 1)
    assert "Traceback" not in stderr


def test_a_stop_reaches_the_one_process_and_is_not_started_again(script: Path) -> None:
    run = script.parent / "run"
    words = ["--output", "run", "--restarts", "5", "training.max_iteration=1000000"]
    with started(script, *words, FAIL=KILLS) as process:
        # Killed at 3, it begins anew, or goes on from step 2: it is at 4 in the second start.
        wait_until(lambda: max(saved(run), default=0) >= 4, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=forks.LONG_SECONDS)
    assert process.returncode == 143
    assert len(starts(run)) == 2


def test_the_old_run_is_moved_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_fresh, reasons = [], []
    run = tmp_path / "run"

    def start(function: Any, words: Any, *_: Any) -> Outcome:
        was_fresh.append(words[-1].fresh)
        reasons.append(words[-1].restart_reason)
        if len(was_fresh) == 2:
            (run / "checkpoints/step-00000002").mkdir(parents=True)
        return KILLED if len(was_fresh) < 4 else DONE

    Run(monkeypatch)  # for its clock
    monkeypatch.setattr(restarts, "newest_iteration", newest_iteration)
    monkeypatch.setattr(launch, "spawn", start)
    args = argparse.Namespace(
        output=str(run), fresh=True, force=False, restarts=4, nprocs=2, device=None
    )
    (run / "checkpoints/step-00000900").mkdir(parents=True)
    (run / "config.yaml").touch()
    assert restarts.run(print, [args]) == 0
    assert was_fresh == [False] * 4
    reasons = [reason.partition(":")[0] for reason in reasons]
    assert reasons == ["", "RESTART 1 of 4", "RESTART 1 of 4", "RESTART 2 of 4"]
    assert (tmp_path / "run.old-1/checkpoints/step-00000900").exists()


def test_a_run_that_is_in_use_is_not_moved_aside(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    args = argparse.Namespace(
        output=str(tmp_path / "run"), fresh=True, force=False, restarts=1, nprocs=1
    )
    with pytest.raises(ConfigError, match="in use by a running experiment"):
        restarts.run(print, [args])
    exp.close()


def test_the_time_limit_counts_from_the_first_start(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        trained(Tiny, tmp_path, {"supervised_since": -1e9}, time_limit_seconds=1, valid_interval=0)
    assert ended.value.code == 124
