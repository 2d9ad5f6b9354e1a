"""`python -m expbase verify`: sound experiments pass, and each broken one is caught and named."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from forks import LONG_SECONDS
from paddle.io import DataLoader
from tiny import TESTS, Points, Tiny, trained

from expbase import ExperimentBase
from expbase.__main__ import main
from expbase.config import flatten
from expbase.mixins_in_front import put_in_front
from expbase.tools import verify as tool
from expbase.tools.verified_run import PLAN, Verified
from expbase.tools.verify import ComparedRun, first_difference

# In a module that is not the user's: out of sight.
HIDDEN: Any = argparse


class Hidden(Tiny):
    """One that draws from a generator which nobody saves; each start makes it anew."""

    def prepare(self) -> None:
        HIDDEN.generator, HIDDEN.updates = np.random.default_rng(3), 0


class InClass(Tiny):
    """Its generator is in a class."""

    generator = np.random.default_rng(3)

    def prepare(self) -> None:
        InClass.generator = np.random.default_rng(3)

    def train_batch(self) -> None:
        self.optimizer.set_lr(float(InClass.generator.random()))
        points, labels = self.read_batch()
        F.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()

    def setup_model(self) -> None:
        super().setup_model()
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())


class Shuffled(Hidden):
    def setup_dataloader(self) -> None:
        class Sampler:
            def __iter__(self) -> Any:
                return iter(HIDDEN.generator.permutation(20).reshape(5, 4).tolist())

            def __len__(self) -> int:
                return 5

        super().setup_dataloader()
        self.train_loader = DataLoader(Points(20), batch_sampler=Sampler())


class Augmented(Hidden):
    def setup_dataloader(self) -> None:
        class Noisy(Points):
            def __getitem__(self, index: int) -> Any:
                point, label = super().__getitem__(index)
                return point + HIDDEN.generator.normal(size=4).astype("float32"), label

        super().setup_dataloader()
        self.train_loader = DataLoader(Noisy(20), batch_size=4, shuffle=True)


class Dropping(Hidden):
    def train_batch(self) -> None:
        points, labels = self.read_batch()
        mask = paddle.to_tensor((HIDDEN.generator.random(points.shape) > 0.5).astype("float32"))
        F.cross_entropy(self.model(points * mask), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


class Forgetful(Tiny):
    def setup_model(self) -> None:
        super().setup_model()
        self.optimizer = paddle.optimizer.Momentum(0.01, parameters=self.model.parameters())
        self.exclude_from_state("optimizer")

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        F.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


class Scheduled(Hidden):
    def setup_model(self) -> None:
        super().setup_model()
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())

    def train_batch(self) -> None:
        HIDDEN.updates += 1
        self.optimizer.set_lr(0.01 / HIDDEN.updates)
        points, labels = self.read_batch()
        F.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


class Losing(Tiny):
    """Draws from an iterator, of which nobody can know where it stands."""

    def setup_model(self) -> None:
        super().setup_model()
        self.levels = itertools.cycle([0.5, 0.1, 2.0, 0.3, 0.7])

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        F.cross_entropy(self.model(points * next(self.levels)), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


BROKEN = {  # where it is killed, where it differs, and how that is called
    Shuffled: (6, 6, "Likely cause: data order"),
    Augmented: (7, 7, "Likely cause: augmentation"),
    Dropping: (7, 7, "model, optimizer differ after the update, and no line of the log says why"),
    Forgetful: (7, 7, "optimizer differ before the update"),
    Scheduled: (7, 7, "Likely cause: schedule"),
    InClass: (7, 7, "Cause: class tests.tools.test_verify.InClass.generator: has changed"),
    # What a start says that it has lost.
    Losing: (7, 7, "Cause: self.levels (cycle): has changed in training, and is not what it was"),
}


class Killed(BaseException):
    """No kill -9, but as sudden for what is compared."""


def run(experiment: type[Tiny], output: Path, end: int = 0) -> None:
    """Makes a run of two epochs with fingerprints, or a part of it that ends early."""

    class Ended(experiment):  # type: ignore[misc, valid-type]
        size = 20

        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == end:
                raise Killed

    Ended.__name__ = experiment.__name__
    with put_in_front(Verified):
        trained(Ended, output, max_iteration=8)


def difference(
    experiment: type[Tiny], folder: Path, monkeypatch: pytest.MonkeyPatch, end: int = 7
) -> str:
    """What verify finds between a run and one that was killed in its second epoch."""
    plan = {"training": {"save_interval": 3}, "kill": "", "at": 0, "delay": 0}
    monkeypatch.setenv(PLAN, json.dumps(plan))
    run(experiment, folder / "straight")
    with pytest.raises(Killed):
        run(experiment, folder / "killed", end=end)
    run(experiment, folder / "killed")
    args = argparse.Namespace(output=folder, iterations=8, words=[])
    return first_difference(ComparedRun(args, "straight", []), ComparedRun(args, "killed", []))


LONG = [pytest.param(one, marks=pytest.mark.long) for one in BROKEN if one is not Shuffled]


@pytest.mark.parametrize("experiment", [Shuffled, *LONG])
def test_the_cause_of_a_difference_is_named_with_its_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: type[Tiny]
) -> None:
    end, iteration, cause = BROKEN[experiment]
    found = difference(experiment, tmp_path, monkeypatch, end)
    assert found.startswith(f"first at iteration {iteration}. {cause}")
    assert "out of sight" not in found or experiment is Dropping


CAUSES = {
    "before": "model, optimizer, it differ before the update",
    "indices": "Likely cause: data order",
    "batches": "Likely cause: augmentation",
    "rates": "Likely cause: schedule",
    "after": "model, optimizer, it differ after the update, and no line of the log says why",
}


def test_the_first_value_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert difference(Tiny, tmp_path, monkeypatch) == ""
    args = argparse.Namespace(output=tmp_path, iterations=8, words=[])
    straight, killed = ComparedRun(args, "straight", []), ComparedRun(args, "killed", [])
    for field, cause in CAUSES.items():
        notes = killed.notes()
        assert notes[7][field], field  # something is noted
        notes[7][field] = {"it": "another"}
        with monkeypatch.context() as patched:
            patched.setattr(killed, "notes", lambda notes=notes: notes)
            assert first_difference(straight, killed).startswith(f"first at iteration 7. {cause}")
    found = flatten(straight.saved())
    for name in ("loop.epoch", "model.safetensors"):
        assert name in found
        changed = {**found, name: "another value"}
        told = f"{name} differs: {found[name]} straight through, another value after the kills."
        with monkeypatch.context() as patched:
            patched.setattr(killed, "saved", lambda changed=changed: changed)
            assert first_difference(straight, killed) == told
    path = tmp_path / "killed/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (changed,) = [line for line in lines if line["iteration"] == 5 and "train/loss" in line]
    changed["train/loss"] += 0.25
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert first_difference(straight, killed).startswith("train/loss at iteration 5 differs: ")


def verify(folder: Path, body: str, *words: str) -> int:
    script = folder / "train.py"
    script.write_text(f"from tiny import Tiny\n{body}\n")
    base = ["verify", str(script), "--output", str(folder / "out"), "--iterations", "16"]
    return main([*base, *words])


@pytest.fixture(autouse=True)
def _helpers_on_the_path(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


MAIN = "from expbase import main\nif __name__ == '__main__':\n    main(Tiny)"
# As those who come from Parakeet have it: a parser and a config of their own, yacs, no `main`.
BY_HAND = """
import argparse, os
from expbase import get_default_training_config
from yacs.config import CfgNode

class Experiment(Tiny):
    def train_batch(self):
        super().train_batch()
        self.log(weight=os.getpid() if self.config.broken else 1)

_C = CfgNode({"training": dict(get_default_training_config()), "broken": False})
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--output")
parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[])
args = parser.parse_args()
args.device = "gpu"
config = _C.clone()
config.merge_from_list(args.opts)
config.freeze()
exp = Experiment(config, args)
exp.setup()
exp.resume_or_load()
exp.run()
"""


def test_a_sound_experiment_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here that of a module, as Python runs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/nets.py").write_text("from tiny import Tiny\n")
    (tmp_path / "package/train.py").write_text(f"from .nets import Tiny\n{MAIN}\n")
    words = ["verify", "--iterations", "16", "--kills", "3"]
    assert main([*words, "--output", "other", "package/train.py"]) == 1
    assert "code 1. If it is started as python -m package.train, give" in capsys.readouterr().err
    assert main([*words, "--output", "out", "-m", "package.train"]) == 0
    output = capsys.readouterr().out
    killed = re.findall("killed (.*)", output)
    assert killed == ["inside a save", "inside a validation", "at a random moment"]
    assert "with training.* max_iteration=16 save_interval=2 valid_interval=3" in output
    assert "identical: 16 iterations, 3 kills" in output
    assert "note: " not in output


OF_RANKS = """
import paddle
from expbase import main
from tiny import Helped

class Experiment(Helped):
    def setup_dataloader(self):
        super().setup_dataloader()
        if self.config.training.seed:
            self.batch_size += self.world_size
            super().setup_dataloader()

if __name__ == "__main__":
    main(Experiment)
"""


@pytest.mark.long
def test_a_run_with_shares_is_proven_on_other_numbers_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--kills", "1", "--ranks", "1,2", "--", "training.shares=2")
    assert verify(tmp_path, OF_RANKS, *words) == 0
    assert re.search(
        r"identical: 16 iterations, 1 kills, .*, on 1, 2 processes", said := capsys.readouterr().out
    ), said
    (tmp_path / "broken").mkdir()
    assert verify(tmp_path / "broken", OF_RANKS, *words, "training.seed=1") == 1
    text = "NOT IDENTICAL on 2 processes: first at iteration 1. Likely cause: data order"
    assert text in capsys.readouterr().out


def test_ranks_need_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path, MAIN, "--kills", "1", "--ranks", "1,2") != 0
    error = capsys.readouterr().err
    assert "has training.shares=0, so the bits depend on the number of processes; expected" in error
    assert "expected `-- training.shares=4 training.accumulation_steps=1`, or" in error
    assert "and `for batch in self.micro_batches():` in train_batch.\n" in error


@pytest.mark.long
def test_a_script_with_yacs_and_last_lines_of_its_own_is_proven_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, BY_HAND, "--kills", "1") == 0
    (tmp_path / "broken").mkdir()
    words = ("--kills", "1", "--", "--opts", "broken", "True")
    assert verify(tmp_path / "broken", BY_HAND, *words) == 1
    text = "NOT IDENTICAL: the script does not repeat itself: train/weight at iteration 1 differs: "
    assert text in (output := capsys.readouterr().out)
    assert " the second time. Known causes: the time; " in output


DRAWING = """
import os, time
import numpy as np
import paddle
from expbase import main
from tiny import Helped

generator = np.random.default_rng(3)

class Experiment(Helped):
    def train_batch(self):
        super().train_batch()
        drawn = generator.random()
        if self.config.training.seed:  # a number of the system, the same on all ranks
            drawn = os.getppid() / 1000 if self.parallel else time.time()
        with paddle.no_grad():
            self.model.parameters()[0].add_(paddle.to_tensor(drawn / 1000, dtype="float32"))

if __name__ == "__main__":
    main(Experiment)
"""


@pytest.mark.long
def test_a_state_that_is_not_saved_is_no_script_that_does_not_repeat_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, DRAWING, "--kills", "1") == 1
    output = capsys.readouterr().out
    text = r"NOT IDENTICAL: first at iteration \d+. Cause: module __main__.generator: has changed"
    assert re.search(text, output), output
    assert "repeat itself" not in output


def test_what_no_line_explains_is_looked_for_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs of a script that does not repeat itself may be the same."""
    finished: list[str] = []
    monkeypatch.setattr(ComparedRun, "finish", lambda side: finished.append(side.directory.name))
    monkeypatch.setattr(tool, "first_note", lambda *sides: None)
    args = argparse.Namespace(output=tmp_path, iterations=16, words=[])
    for difference, answers, runs in (
        ("model differ after the update, and no line of the log says why", ["", "new"], 2),
        ("model differ after the update, and no line of the log says why", ["new"], 1),
        ("Cause: self.levels (cycle): has changed", [""], 1),
    ):
        found = iter(answers)
        monkeypatch.setattr(tool, "first_difference", lambda *sides, found=found: next(found))
        assert tool._not_identical(args, "", difference, ComparedRun(args, "straight", [])) == 1
        assert finished == ["again", "again-2"][:runs]
        finished.clear()
        last = capsys.readouterr().out.splitlines()[-1]
        is_chance = last.startswith(
            "NOT IDENTICAL: the script does not repeat itself: new Known ca"
        )
        assert is_chance == (answers[-1] == "new")


@pytest.mark.long
def test_on_several_processes_it_is_told_from_a_script_that_does_not_repeat_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kills", "1", "--ranks", "1,2", "--", "training.shares=2", "training.seed=1"]
    assert verify(tmp_path, DRAWING, *words) == 1
    assert (
        "NOT IDENTICAL: the script does not repeat itself: first at iteration 1. The update itself "
        "differs: model.\n"
        "where: update 1: model.0.weight differs after it, and the gradients are the same: the "
        "step of self.optimizer (Adam), or what train_batch itself writes into it. Made 4 times in "
        "one process, from one state and one batch, it is the same, and in another process it is "
        "not.\n"
        "causes to look at: the time; numbers of the system"
    ) in capsys.readouterr().out


def test_a_run_that_is_too_fast_for_its_kill_is_killed_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unvalidated(Tiny):
        valid = ExperimentBase.valid  # so it is killed at another moment

    plan = {"training": {}, "kill": "inside a validation", "at": 3, "delay": LONG_SECONDS}
    monkeypatch.setenv(PLAN, json.dumps(plan))
    monkeypatch.setattr(os, "kill", lambda *args: died.append(args))
    died: list[Any] = []
    before = {*threading.enumerate()}
    with put_in_front(Verified):
        trained(Unvalidated, tmp_path / "run", max_iteration=6)
    (timer,) = [t for t in {*threading.enumerate()} - before if isinstance(t, threading.Timer)]
    assert not timer.daemon  # so Python waits for it at the end of the process
    assert timer.interval == LONG_SECONDS
    timer.cancel()
    timer.function(*timer.args)
    assert died == [(os.getpid(), signal.SIGKILL)]
    assert (tmp_path / "run.killed").read_text() == "at a random moment"


@pytest.mark.long
def test_a_script_in_two_processes_is_killed_in_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, MAIN, "--kills", "1", "--", "--nprocs", "2", "--device", "cpu") == 0
    assert "identical: 16 iterations, 1 kills" in capsys.readouterr().out
    notes = [tmp_path / f"out/{name}.notes.rank_1.jsonl" for name in ("straight", "killed")]
    assert all(path.read_text().count('"iteration"') > 15 for path in notes)


SCHEDULED = """
import paddle
from expbase import main
class Scheduled(Tiny):
    def setup_model(self):
        super().setup_model()
        paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=self.total_iterations - 100)
main(Scheduled)
"""


@pytest.mark.parametrize(
    ("body", "words", "texts"),
    [
        (MAIN, ["training.sed=1"], [
            "python -m expbase verify: error: the run 'straight' ended with code 78",
            "unknown key 'training.sed'. Did you mean 'training.seed'?",
        ]),
        (MAIN, ["--device", "pluto"], [
            "straight through, on pluto, with training.* max_iteration=16",
            "keep_last=0 deterministic=True\n",
            "--device: 'pluto' given; expected cpu",
        ]),
        (SCHEDULED, [], ["For a longer schedule give more, such as --iterations 200"]),
    ],
    ids=["a key", "a device", "a schedule"],
)  # fmt: skip
def test_words_after_two_dashes_go_to_the_script_and_its_error_is_told(
    body: str, words: list[str], texts: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    is_mistyped = bool(words)  # the corrected command may be given at once
    assert verify(tmp_path, body, "--", *words) == (78 if is_mistyped else 1)
    assert (tmp_path / "out").exists() != is_mistyped
    said = "".join(capsys.readouterr())
    for text in texts:
        assert text in said


def test_a_run_that_could_not_write_its_error_is_told_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ComparedRun, "command", lambda self: ["false"])
    assert main(["verify", __file__, "--output", str(tmp_path / "out")]) == 1
    text = "ended with code 1. It could write nothing to {}: is the disk full?\n"
    assert capsys.readouterr().err.endswith(text.format(tmp_path / "out/straight.stderr"))


def test_without_a_tool_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 78
    assert "verify" in capsys.readouterr().out


def test_wrong_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for words, text in (
        (["missing.py", "--output", "out"], "missing.py: no such file"),
        (["--output", "out"], "expected a training script, or -m and a module"),
        (["-m", "package", __file__, "--output", "out"], "expected a training script, or -m and"),
        ([__file__, "--output", str(TESTS)], f"{TESTS}: exists already. Delete it, or give"),
        ([__file__, "--output", "file"], "file: exists already. Delete it"),
    ):
        assert main(["verify", *words]) == 78
        assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_script_that_trains_nothing_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ComparedRun, "command", lambda self: ["true"])
    assert main(["verify", __file__, "--output", str(tmp_path / "out")]) == 1
    assert f"{__file__}: made no checkpoint in {tmp_path / 'out/straight'}" in (
        capsys.readouterr().err
    )


def test_verify_that_is_broken_off_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(seconds: float) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(ComparedRun, "command", lambda self: ["sleep", "100"])
    monkeypatch.setattr("expbase.tools.verify.time.sleep", broken_off)
    side = ComparedRun(argparse.Namespace(output=tmp_path, iterations=40, words=[]), "killed", [])
    with pytest.raises(SystemExit):
        side.finish_with_kills(random.Random(0), 1)
    assert side.process.returncode == -signal.SIGKILL


def test_a_schedule_may_count_on_the_epochs_of_the_config(tmp_path: Path) -> None:
    class Counting(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            limit = self.config.training.max_epoch * self.batches_per_epoch
            self.rate = paddle.optimizer.lr.CosineAnnealingDecay(0.1, limit)

    with put_in_front(Verified), pytest.MonkeyPatch.context() as patched:
        plan = {"training": {"max_iteration": 6}, "kill": "", "at": 0, "delay": 0}
        patched.setenv(PLAN, json.dumps(plan))
        exp = trained(Counting, tmp_path / "run", max_iteration=0, max_epoch=3)
        assert (exp.iteration, exp.config.training.max_epoch) == (6, 6)
        endless = trained(Tiny, tmp_path / "endless", max_iteration=9)
        assert (endless.iteration, endless.config.training.max_epoch) == (6, 0)
