"""Stopping early: signals, a file, a limit, several ranks; each with a checkpoint and its code."""

from __future__ import annotations

import faulthandler
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
from paddle.io import DataLoader
from tiny import (
    DEVICE,
    TESTS,
    Notes,
    Points,
    Tiny,
    curve,
    ledger,
    make,
    run_of,
    run_ranks,
    run_script,
    same_bits,
    saved,
    trained,
    validations,
    wait_until,
)

from expbase.engine import run as run_file
from expbase.engine.stop import StopReason, StopRequests

ENDLESS = dict.fromkeys(("max_iteration", "save_interval", "valid_interval"), 10**6)
LONG = [f"training.{key}={value}" for key, value in ENDLESS.items()] + ["training.log_interval=1"]


@contextmanager
def started(script: Path, *words: str, launch: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, which is ended with everything in it."""
    command = [sys.executable]
    if launch:
        log = str(script.parent / "launch_log")
        command += ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", log]
    process = forks.Popen(
        [*command, str(script), "--output", str(script.parent / "run"), *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore"},
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def trains(run: Path) -> Callable[[], bool]:
    file = run / "metrics.jsonl"
    return lambda: file.exists() and file.read_text().count("\n") >= 5


def last_record(run: Path) -> dict[str, object]:
    return ledger(run)[-1]


class Signalled(Tiny):
    """Has a signal sent to it, once or more, within update 6."""

    signals: Sequence[int] = ()

    def train_batch(self) -> None:
        super().train_batch()
        if self.iteration == 6:
            for signum in self.signals:
                os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("signum", "code", "text"),
    [
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGUSR1, 143, "SIGUSR1"),
        (signal.SIGUSR2, 143, "SIGUSR2"),
        (signal.SIGXCPU, 143, "SIGXCPU"),
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
def test_a_signal_stops_saves_and_answers_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signum: int, code: int, text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        trained(type("Once", (Signalled,), {"signals": [signum]}), tmp_path, **ENDLESS)
    assert ended.value.code == code
    assert f"[6] STOPPED by {text}; the same command continues" in capsys.readouterr().err
    assert (tmp_path / "checkpoints/step-00000006/manifest.json").exists()
    record = last_record(tmp_path)
    assert (record["reason"], record["exit_code"], record["iteration"]) == (text, code, 6)


def test_a_signal_is_answered_at_once_and_only_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    twice = type("Twice", (Signalled,), {"signals": [signal.SIGTERM] * 2})
    with pytest.raises(SystemExit):
        trained(twice, tmp_path, **ENDLESS)
    text = "stops at the end of the update, or at the next batch of the validation"
    assert capfd.readouterr().err.count(text) == 1


@pytest.mark.parametrize("way", ["signal.signal", "faulthandler.register", "ignored"])
@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGXCPU])
def test_a_signal_that_the_users_code_handles_is_left_to_it(
    tmp_path: Path, signum: signal.Signals, way: str
) -> None:
    with (tmp_path / "noted").open("w+") as noted:
        if way == "faulthandler.register":
            faulthandler.register(signum, noted)
        else:
            own = {"signal.signal": lambda *_: noted.write("File")}.get(way, signal.SIG_IGN)
            signal.signal(signum, own)
        kept = signal.getsignal(signum)
        try:
            once = type("Once", (Signalled,), {"signals": [signum]})
            assert trained(once, tmp_path / "run", max_iteration=7).iteration == 7
            assert signal.getsignal(signum) is kept
        finally:
            faulthandler.unregister(signum)
            signal.signal(signum, signal.SIG_DFL)
    assert ("File" in (tmp_path / "noted").read_text()) == (way != "ignored")


OWN_HANDLER = """
import os, signal
from pathlib import Path
from tiny import Tiny
from expbase import main

signal.signal(signal.SIGUSR2, lambda *_: Path(f"heard-{os.getpid()}").touch())

class Own(Tiny):
    def train_batch(self):
        super().train_batch()
        if self.iteration == 3:
            for pid in (os.getpid(), os.getppid()):
                os.kill(pid, signal.SIGUSR2)
        if self.iteration == 6:
            os.kill(os.getppid(), signal.SIGXCPU)
        while self.iteration >= 6 and not self.stop_asked():
            pass

    def stop_asked(self):
        return self._ExperimentBase__run.stop.reason

if __name__ == "__main__":
    main(Own)
"""


@pytest.mark.long
def test_what_starts_the_ranks_passes_on_what_is_not_the_users(tmp_path: Path) -> None:
    """SIGUSR2 to it and to its rank is the script's; SIGXCPU to it stops and saves the rank."""
    (tmp_path / "train.py").write_text(OWN_HANDLER)
    words = ["--output", str(tmp_path / "run"), "--restarts", "1", *LONG]
    result = run_script(tmp_path / "train.py", *words, "training.valid_interval=0")
    assert result.returncode == 143, result.stderr
    assert len([*tmp_path.glob("heard-*")]) == 2
    record = last_record(tmp_path / "run")
    assert (record["reason"], record["iteration"]) == ("SIGXCPU", 6)


class Told(Signalled):
    """Notes what it is told of its end."""

    def setup_model(self) -> None:
        super().setup_model()
        self.told = Notes()

    def on_exception(self, exception: BaseException) -> None:
        self.told.append((repr(exception), self.end_reason))
        raise ValueError("in on_exception")

    def on_train_end(self) -> None:
        self.told.append("on_train_end")


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        ([signal.SIGINT], ("KeyboardInterrupt('Ctrl-C')", "signal: SIGINT")),
        ([signal.SIGINT] * 2, ("KeyboardInterrupt()", "signal: SIGINT")),
        ([signal.SIGTERM], ("SystemExit(143)", "signal: SIGTERM")),
    ],
)
def test_a_signal_reaches_on_exception_once(
    tmp_path: Path, hasty: None, signals: list[int], told: tuple[str, str]
) -> None:
    exp: Any = make(type("Once", (Told,), {"signals": signals}), tmp_path, **ENDLESS)
    exp.setup()
    is_now = len(signals) > 1  # the second Ctrl-C within a second
    with pytest.raises(KeyboardInterrupt if is_now else SystemExit) as ended:
        exp.run()
    assert exp.told == [told, "on_train_end"]
    assert "in on_exception" not in repr(ended.value)
    assert saved(tmp_path) == ([] if is_now else [6])


@pytest.mark.parametrize(
    ("given", "text"),
    [("enough", "enough"), ("", "stop() was called"), (ValueError("of mine"), "of mine")],
)
def test_a_stop_that_is_no_signal_reaches_no_on_exception(
    tmp_path: Path, given: Any, text: str
) -> None:
    class Enough(Told):
        def train_batch(self) -> None:
            super().train_batch()
            self.stop(given)

    exp: Any = trained(Enough, tmp_path)
    assert (exp.told, exp.end_reason) == (["on_train_end"], f"stopped: {text}")
    assert last_record(tmp_path)["reason"] == text


def test_under_nohup_a_hangup_does_not_stop(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hung_up = type("HungUp", (Signalled,), {"signals": [signal.SIGHUP]})
        assert trained(hung_up, tmp_path, max_iteration=8).iteration == 8
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_without_a_checkpoint_does_not_promise_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = type("Once", (Signalled,), {"signals": [signal.SIGTERM]})
    with pytest.raises(SystemExit):
        trained(once, tmp_path, **{**ENDLESS, "save_interval": 0})
    text = "[6] STOPPED by SIGTERM; nothing was saved here: no checkpoint was asked for"
    assert text in capsys.readouterr().err


@pytest.mark.long
def test_sigterm_to_all_processes_stops_a_run_whose_worker_is_busy(tmp_path: Path) -> None:
    """As schedulers send it that know each process, and not only the first one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\n"
        "from tiny import DataLoader, Points, Tiny\nfrom expbase import main\n"
        "class Late(Points):\n"
        "    def __getitem__(self, index):\n"
        "        if index >= 36:\n"
        "            Path('busy').touch()\n"
        "            time.sleep(1000)\n"
        "        return super().__getitem__(index)\n"
        "class Busy(Tiny):\n"
        "    def setup_dataloader(self):\n"
        "        self.train_loader = DataLoader(\n"
        "            Late(), batch_size=4, num_workers=1, prefetch_factor=4)\n"
        "    def train_batch(self):\n"
        "        super().train_batch()\n"
        "        while self.iteration > 6 and not os.path.exists('signalled'):\n"
        "            time.sleep(0.01)\n"
        "if __name__ == '__main__': main(Busy)\n"
    )
    with started(script, *LONG, "training.valid_interval=0") as process:
        # The worker is four batches ahead, and stays in the tenth one.
        wait_until((tmp_path / "busy").exists, process)
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.send_signal(signal.SIGTERM)
        (tmp_path / "signalled").touch()
        process.communicate(timeout=forks.LONG_SECONDS)
    assert process.returncode == 143


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """All comes within a second, however slow the machine is."""
    monkeypatch.setattr(run_file, "StopRequests", partial(StopRequests, clock=lambda: 0.0))


def test_a_second_ctrl_c_leaves_the_closing_whole(tmp_path: Path, hasty: None) -> None:
    class Closing(Signalled):
        signals = [signal.SIGINT]  # noqa: RUF012

        def terminal(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        trained(Closing, tmp_path, **ENDLESS)
    assert ended.value.code == 130
    record = last_record(tmp_path)
    assert (record["reason"], record["exit_code"], record["iteration"]) == ("Ctrl-C", 130, 6)


def test_a_stop_file_that_cannot_be_removed_is_told_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "STOP").mkdir()  # as one of another user's, under a sticky bit
    (tmp_path / "STOP/theirs").touch()
    StopRequests(tmp_path / "STOP").remove_stop_file()
    assert "STOP: cannot be removed: Is a directory; each start stops at it" in (
        capsys.readouterr().err
    )
    assert (tmp_path / "STOP/theirs").exists()


@pytest.mark.long
def test_a_time_limit_shorter_than_setup_lets_each_start_make_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the validation that the one before has left, which it would leave again for ever."""
    seconds = itertools.count(0, 100)
    hasty = partial(StopRequests, clock=seconds.__next__)
    monkeypatch.setattr(run_file, "StopRequests", hasty)
    # At each batch of a validation.
    monkeypatch.setattr("expbase.engine.leave_validation._LOOK_SECONDS", 0)
    for iteration in (1, 2, 3):
        with pytest.raises(SystemExit) as ended:
            trained(Tiny, tmp_path / "run", valid_interval=1, time_limit_seconds=9)
        assert ended.value.code == 124
        assert saved(tmp_path / "run")[-1] == iteration
        assert [*curve(tmp_path / "run", "valid/accuracy")] == [*range(1, iteration)]
        text = rf"\[{iteration}\] STOPPED by training.time_limit_seconds=9, which was over before "
        text += r"the first update of this start, after \d+ s; raise it; the same command continues"
        assert re.search(text, capsys.readouterr().err)


def test_a_stop_by_the_experiment_lets_the_validation_finish(tmp_path: Path) -> None:
    class Validating(Tiny):
        def valid(self) -> dict[str, float]:
            self.stop()
            return super().valid()

    trained(Validating, tmp_path / "run", save_interval=100)
    assert list(curve(tmp_path / "run", "valid/accuracy")) == [3]
    assert (tmp_path / "run/checkpoints/step-00000003").exists()


class InTest(Tiny):
    """Gets a signal at the second of the ten batches of its final test."""

    signum = 0
    batches = 0  # tested

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.test_loader = DataLoader(Points(10), batch_size=1)

    def valid(self) -> dict[str, float]:
        for _ in self.valid_batches():
            if self.internals.evaluated_loader is self.test_loader:
                InTest.batches += 1
                if self.batches == 2 and self.signum:
                    os.kill(os.getpid(), self.signum)
        return {"accuracy": 1.0}

    def on_train_end(self) -> None:
        self.evaluate(self.test_loader)


def test_a_signal_leaves_the_test_of_on_train_end_which_the_next_start_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InTest, "signum", signal.SIGTERM)
    exp = make(InTest, tmp_path)
    exp.setup()
    with pytest.raises(SystemExit, match="143"):
        exp.run()
    assert (InTest.batches, exp.finished, exp.end_reason) == (2, False, "signal: SIGTERM")
    log = capsys.readouterr().err
    assert "[6] left on_train_end; the next start calls it again" in log
    assert "[6] STOPPED by SIGTERM; the same command continues" in log
    assert not curve(tmp_path, "test/accuracy")
    assert ledger(tmp_path)[-1]["reason"] == "SIGTERM"

    monkeypatch.setattr(InTest, "signum", 0)
    assert trained(InTest, tmp_path).finished
    assert InTest.batches == 12
    assert curve(tmp_path, "test/accuracy") == {6: 1.0}
    assert "FINISHED already" not in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_was_stopped_often_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    class Often(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration % 4 == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"max_iteration": 8, "save_interval": 100}
    trained(Tiny, tmp_path / "whole", **options)
    for _ in range(2):
        with pytest.raises(SystemExit):
            trained(Often, tmp_path / "often", **options)
    trained(Often, tmp_path / "often", **options)
    end = "checkpoints/step-00000008"
    same_bits(tmp_path / "whole" / end, tmp_path / "often" / end)
    assert curve(tmp_path / "often", "train/loss") == curve(tmp_path / "whole", "train/loss")


def test_handlers_are_as_before_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    trained(Tiny, tmp_path / "run", max_iteration=1, save_interval=0, valid_interval=0)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_in_a_thread_trains_and_says_once_that_it_hears_no_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(trained, Tiny, tmp_path, max_iteration=2).result().finished
    assert capsys.readouterr().err.count("WARNING: run() in a thread: python gives signals to") == 1


def test_of_several_requests_the_strongest_counts_and_times_are_injected(tmp_path: Path) -> None:
    now = [0.0]
    requests = StopRequests(tmp_path / "STOP", 10, clock=lambda: now[0])
    requests.note_update()
    requests.poll()
    assert requests.reason == StopReason.NONE
    now[0] = 10.0
    requests.poll()
    assert requests.reason == StopReason.TIME_LIMIT
    requests.add(StopReason.CALL)
    assert requests.reason == StopReason.TIME_LIMIT


# --- checkpoints by the clock ------------------------------------------------------------------


def test_a_save_is_due_by_the_clock_so_long_after_the_newest_checkpoint() -> None:
    now = [0.0]
    requests = StopRequests(save_seconds=10, clock=lambda: now[0])
    requests.start(0)
    due = []
    for iteration in range(1, 8):
        now[0] += 4.0
        requests.agreed(iteration)
        due.append(requests.is_save_due)
        if requests.is_save_due or iteration == 4:  # that one was due by its number
            requests.note_saved()
    assert due == [False, False, True, False, False, False, True]
    assert not StopRequests(clock=lambda: now[0]).is_save_due


@pytest.mark.long
def test_checkpoints_by_the_clock_change_neither_the_bits_nor_what_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            now[0] += 1
            if self.iteration == 7 and not (self.output_dir / "failed").exists():
                (self.output_dir / "failed").touch()
                raise ValueError("broken")

    values = {"max_iteration": 12, "save_interval": 4, "valid_interval": 3, "monitor": "accuracy"}
    whole = trained(Tiny, tmp_path / "whole", **values)
    now = [0.0]
    by_clock = partial(StopRequests, clock=lambda: now[0])
    monkeypatch.setattr(run_file, "StopRequests", by_clock)
    values |= {"save_seconds": 2, "keep_last": 0}
    with pytest.raises(ValueError, match="broken"):
        trained(Failing, tmp_path / "run", **values)
    exp = trained(Failing, tmp_path / "run", **values)
    assert "resumed step-00000006" in (tmp_path / "run/worker_0.log").read_text()
    folders = [tmp_path / name / "checkpoints" for name in ("whole", "run")]
    saved = [sorted(int(path.name[-2:]) for path in folder.iterdir()) for folder in folders]
    assert saved == [[6, 8, 12], [2, 3, 4, 6, 8, 10, 12]]  # 3 and 6 were the best of their time
    same_bits(*(folder / "step-00000012" for folder in folders))
    assert validations(tmp_path / "run") == validations(tmp_path / "whole")
    assert [line["iteration"] for line in validations(tmp_path / "run")] == [3, 6, 9, 12, 12]
    best = [run_of(e).checkpointer.validations.best[0] for e in (exp, whole)]
    assert best[0] == best[1] == (6, curve(tmp_path / "run", "valid/accuracy")[6])


def test_with_the_clock_alone_the_last_iteration_is_saved_too(tmp_path: Path) -> None:
    trained(Tiny, tmp_path, save_interval=0, save_seconds=600, max_iteration=3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


# --- several ranks -----------------------------------------------------------------------------


RANKS = """
import sys
from pathlib import Path
from expbase.engine import stop
from test_stop import ENDLESS
from tiny import Tiny, trained

class Stopping(Tiny):
    def train(self):
        while self.going_on():
            self.train_batch()
            self.end_iteration()
            if WAYS[self.output_dir.name](self):
                return

    def on_train_end(self):
        (self.output_dir / f"said_{self.rank}").write_text(self.end_reason)

WAYS = {
    "of one": lambda exp: exp.rank == 1 and exp.stop("of rank 1"),
    "of all": lambda exp: exp.stop("on all", on_all_ranks=True),
    "return": lambda exp: True,
}
stop._ASK_SECONDS = 0.05
for way in WAYS:
    trained(Stopping, Path(sys.argv[1]) / way, **ENDLESS)
"""


def test_all_ranks_know_why_one_has_stopped(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    for rank in run_ranks([[str(script), str(tmp_path)]] * 2):
        assert rank.returncode == 0, rank.stderr
    texts = {"of one": "of rank 1", "of all": "on all", "return": "train() returned"}
    for way, text in texts.items():
        run = tmp_path / way
        said = [(run / f"said_{rank}").read_text() for rank in (0, 1)]
        assert said == [f"stopped: {text}"] * 2, way
        assert last_record(run)["reason"] == text, way
        assert f"STOPPED by {text}" in (run / "worker_0.log").read_text(), way


@pytest.mark.long
def test_sigterm_to_the_launcher_stops_both_ranks_at_one_iteration(script: Path) -> None:
    run = script.parent / "run"
    with started(script, *LONG, launch=True) as process:
        wait_until(trains(run), process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=forks.LONG_SECONDS)
    stopped = [
        re.findall(r"\[(\d+)\] STOPPED by SIGTERM", (run / f"worker_{rank}.log").read_text())
        for rank in (0, 1)
    ]
    assert stopped[0] == stopped[1]
    assert len(stopped[0]) == 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == [
        f"step-{int(stopped[0][0]):08d}"
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_nprocs_answers_with_the_code_of_the_signal(tmp_path: Path, signum: int, code: int) -> None:
    """No rank ends before the checkpoint is written: paddle's launcher would kill the others."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfrom tiny import Tiny\nfrom expbase import main\n"
        "from expbase.checkpoint import storage as checkpoint\n"
        "write = checkpoint.write\n"
        "def slowly(*args):\n    time.sleep(0.3)\n    return write(*args)\n"
        "checkpoint.write = slowly\n"
        "class Slow(Tiny):\n"
        "    def terminal(self):\n"
        "        names = [path.name for path in self.checkpoint_dir.glob('step-*')]\n"
        "        (self.output_dir / f'seen_{self.rank}').write_text(' '.join(names))\n"
        "if __name__ == '__main__': main(Slow)\n"
    )
    run = tmp_path / "run"
    with started(script, *LONG, "--nprocs", "2") as process:
        wait_until(trains(run), process)
        process.send_signal(signum)  # to the parent alone
        process.communicate(timeout=forks.LONG_SECONDS)
    assert process.returncode == code
    (saved,) = (path.name for path in (run / "checkpoints").iterdir())
    assert [(run / f"seen_{rank}").read_text() for rank in (0, 1)] == [saved, saved]


@pytest.mark.parametrize(
    ("nprocs", "seconds"),
    [
        (2, 0.02),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1, 0), (1, 0.3), (2, 0), (2, 0.3))
        ),
    ],
)
def test_two_ctrl_c_answer_130_at_any_distance(script: Path, nprocs: int, seconds: float) -> None:
    run = script.parent / "run"
    words = (*LONG, "--nprocs", str(nprocs), "training.save_interval=0")
    with started(script, *words) as process:
        wait_until(trains(run), process)
        for pause in (seconds, 0):  # as a terminal does
            with suppress(ProcessLookupError):  # the second one may come too late
                os.killpg(process.pid, signal.SIGINT)
            time.sleep(pause)
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    # The second one may find the ranks gone, and this process without its handlers.
    assert process.returncode in (130, -signal.SIGINT), stderr  # to a shell the same
    assert "failed" not in stderr
    assert last_record(run)["exit_code"] == 130


def test_when_a_rank_fails_the_other_says_which_and_nothing_is_saved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from tiny import Tiny\nfrom expbase import main\n"
        "class Failing(Tiny):\n"
        "    def train_batch(self):\n"
        "        super().train_batch()\n"
        "        if self.rank == 1 and self.iteration == 3: raise OSError('bad sector')\n"
        "if __name__ == '__main__': main(Failing)\n"
    )
    with started(script, *LONG, "--nprocs", "2") as process:
        stderr = process.communicate(timeout=forks.LONG_SECONDS)[1]
    assert process.returncode == 1
    assert "OSError: bad sector" in stderr
    run = tmp_path / "run"
    log = (run / "worker_0.log").read_text()
    assert "ended, because another rank failed: rank 1: OSError('bad sector')" in log
    assert "[3] ended by OSError('bad sector')" in (run / "worker_1.log").read_text()
    assert not list((run / "checkpoints").glob("step-*"))


def test_of_a_crash_the_line_is_told(script: Path) -> None:
    script.write_text(
        "import ctypes\nfrom tiny import Tiny\nfrom expbase import main\n"
        "class Crashing(Tiny):\n    def train_batch(self):\n        ctypes.string_at(0)\n"
        "if __name__ == '__main__':\n    main(Crashing)\n"
    )
    result = run_script(script, "--output", "run", "--device", DEVICE)
    assert result.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in result.stderr
    assert f'File "{script}", line 6 in train_batch' in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="one"),
        pytest.param(["--nprocs", "2"], id="ranks", marks=pytest.mark.long),
    ],
)
def test_a_signal_after_the_end_changes_no_answer(tmp_path: Path, words: list[str]) -> None:
    """Python and paddle take a second to unload."""
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, os, signal\nfrom tiny import Tiny\nfrom expbase import main\n"
        "def late():\n"
        "    for number in (1, 2, 10, 15):\n        os.kill(os.getpid(), number)\n"
        "    print('late', flush=True)\n"
        "atexit.register(late)\n"
        "class Late(Tiny):\n    def terminal(self):\n"
        "        if self.parallel:\n            atexit.register(late)\n"
        "if __name__ == '__main__':\n    main(Late)\n"
    )
    words = [*words, "--output", str(tmp_path / "run"), "--device", DEVICE]
    result = run_script(script, *words, "training.max_iteration=2")
    assert result.returncode == 0, result.stderr
    # Ranks of a device are not forked: each has executed the file, too.
    of_ranks = 3 if DEVICE == "cpu" else 5
    assert result.stdout.count("late") == (of_ranks if "2" in words else 1)
