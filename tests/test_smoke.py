"""`--smoke`: a whole life in seconds, which leaves nothing and answers with an exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import DEVICE, Tiny, run_script

from expbase import main, on
from expbase.extras.mixins import EarlyStopping

ALWAYS = ["--smoke", "--device", DEVICE]


class Tried(Tiny):
    """One that prints what of its life is seen."""

    def valid(self) -> dict[str, float]:
        assert len([1 for _ in self.valid_batches()]) == 2  # of four
        return super().valid()

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"note": "saved and loaded"}

    def on_load_checkpoint(self, states: Mapping[str, Any]) -> None:
        print(states["note"])

    def on_train_end(self) -> None:
        print("finished:", self.finished, "max:", self.config.training.max_iteration)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary ones; the current one is empty, too."""
    (tmp_path / "work").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def left(folder: Path) -> list[str]:
    """What was made in either directory."""
    return [str(path) for path in folder.glob("*/*")]


@pytest.mark.device
@pytest.mark.parametrize(
    "words", [["--output", "runs/a"], ["training.save_interval=0", "training.valid_interval=0"]]
)
def test_an_experiment_that_works_passes_and_nothing_is_left(
    temporary: Path, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    main(Tried, argv=[*ALWAYS, *words])
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [
        "finished: True max: 10000",  # schedules are as long as they will be
        "saved and loaded",
        "smoke test passed: 2 updates, validated, saved and loaded",
    ]
    assert "[2] epoch=1 valid/accuracy=" in shown.err
    assert "expbase board" not in shown.err  # of a directory that is gone
    assert left(temporary) == []


class Rare(Tiny):
    """One whose listeners act late."""

    @on("on_train_batch_end", every=1000)
    def draw_samples(self) -> None:
        print("drawn at", self.iteration)

    @on("on_evaluate_end", once=3)
    def look(self, results: Mapping[str, float]) -> None:
        print("looked")

    @on("on_train_batch_end", filter_fn=lambda filter_, exp: filter_.num_called == 3)
    def never(self) -> None:
        print("no condition of a user's is overruled")


def test_listeners_that_act_late_act_once(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(Rare, argv=ALWAYS)
    assert capfd.readouterr().out.splitlines()[:-1] == ["drawn at 1", "looked"]
    main(Rare, argv=["--output", "run", "--device=cpu", "training.max_iteration=2"])
    assert capfd.readouterr().out == ""


def test_it_starts_anywhere_in_a_run(temporary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(Tiny, argv=["--output", "run", "--device=cpu", "training.max_iteration=3"])
    main(Tiny, argv=[*ALWAYS, "--checkpoint_path", "run"])
    shown = capfd.readouterr()
    assert "smoke test passed: 2 updates" in shown.out
    assert "[4] epoch=1 valid/accuracy=" in shown.err
    words = [*ALWAYS, "--checkpoint_path", "run", "training.max_iteration=3"]
    with pytest.raises(SystemExit, match="--smoke: made no update; training ended at 3"):
        main(Tiny, argv=words)


def test_what_would_fail_after_hours_fails_now(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Invalid(Tried):
        def valid(self) -> dict[str, float]:
            raise KeyError("a broken valid()")

    class Unsavable(Tried):
        def setup_model(self) -> None:
            super().setup_model()
            self.notes = iter([1])
            self.register_stateful("notes")

    with pytest.raises(KeyError, match=r"a broken valid\(\)"):
        main(Invalid, argv=ALWAYS)
    with pytest.raises(TypeError, match=r"notes: a list_iterator cannot be saved"):
        main(Unsavable, argv=ALWAYS)
    with pytest.raises(SystemExit, match=r"training\.monitor: 'accurcy' given"):
        main(Tried, argv=[*ALWAYS, "training.monitor=accurcy"])
    shown = capfd.readouterr()
    assert "smoke test passed" not in shown.out
    assert "after the failure" not in shown.err  # there is nothing to load
    assert "saved and loaded" not in shown.out
    assert left(temporary) == []


@pytest.mark.long
def test_it_goes_with_several_processes(tmp_path: Path, script: Path) -> None:
    (tmp_path / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path / "temporary"))
        result = run_script(script, *ALWAYS, "--nprocs", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("smoke test passed: 2 updates") == 1
    assert list((tmp_path / "temporary").iterdir()) == []


def test_it_does_not_go_with_looking_at_a_run() -> None:
    with pytest.raises(SystemExit, match="--smoke: given with --evaluate or --export"):
        main(Tried, argv=[*ALWAYS, "--evaluate", "best", "--output", "run"])


def test_an_experiment_with_an_input_spec_is_exported(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Exported(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.input_spec = [paddle.static.InputSpec([None, 4])]

    class Wrong(Exported):
        def setup_model(self) -> None:
            super().setup_model()
            self.input_spec *= 2  # of a model with one input

    class NoList(Exported):
        def setup_model(self) -> None:
            super().setup_model()
            self.input_spec = self.input_spec[0]

    main(Exported, argv=ALWAYS)
    assert "2 updates, validated, saved, loaded and exported" in capfd.readouterr().out
    with pytest.raises(ValueError, match=r"export: ValueError: .* Expected an input_spec with the"):
        main(Wrong, argv=ALWAYS)
    with pytest.raises(SystemExit, match=r"export: input_spec=InputSpec.*; expected a list with"):
        main(NoList, argv=ALWAYS)
    assert left(temporary) == []


@pytest.mark.long
def test_what_gives_a_worse_result_and_no_error_is_told(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Forgetful(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            rate = paddle.optimizer.lr.LinearWarmup(0.1, 100, 0.0, 0.1)
            self.optimizer = paddle.optimizer.Adam(rate, parameters=self.model.parameters())

        def train_batch(self) -> None:
            loss = self.model(self.read_batch()[0]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.log(loss=loss)

    class ByEpochs(Forgetful):
        def train_batch(self) -> None:
            super().train_batch()
            self.optimizer.clear_grad()

        def on_train_epoch_end(self) -> None:
            self.optimizer._learning_rate.step()

    main(Forgetful, argv=ALWAYS)
    err = capfd.readouterr().err
    assert "[2] self.optimizer: has stepped again with the gradients of an update before" in err
    assert "[11] in 11 updates nobody has stepped the LinearWarmup of self.optimizer" in err
    assert err.count("WARNING") == 2
    main(ByEpochs, argv=ALWAYS)
    assert "WARNING" not in capfd.readouterr().err


class Late(Tiny):
    """One whose learning rate is 0 for a while; its own numbers."""

    rates = 0.0, 0.1
    zeros = 5

    def setup_model(self) -> None:
        super().setup_model()
        rate = paddle.optimizer.lr.PiecewiseDecay([self.zeros], [*self.rates])
        self.optimizer = paddle.optimizer.SGD(rate, parameters=self.model.parameters())


class Stepless(Tiny):
    def train_batch(self) -> None:
        loss = self.model(self.read_batch()[0]).square().mean()
        loss.backward()
        self.optimizer.clear_grad()
        self.log(loss=loss)


class Buffer(Tiny):
    """One that trains nothing for longer than a trial."""

    def train_batch(self) -> None:
        self.log(size=len(self.read_batch()))


def test_it_goes_on_until_a_parameter_has_changed(
    temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(Late, argv=ALWAYS)  # updates 1 to 5 have the rate 0
    shown = capfd.readouterr()
    assert "smoke test passed: 6 updates, validated, saved and loaded" in shown.out
    assert " output " not in shown.err  # its directory does not stay
    assert "WARNING" not in shown.err
    main(type("AtZero", (Late,), {"rates": (0.0, 0.0)}), argv=ALWAYS)
    assert "passed: 52 updates, no parameter changed, val" in capfd.readouterr().out


def test_a_missing_step_fails_also_where_early_stopping_ends_the_trial(temporary: Path) -> None:
    class Stopped(EarlyStopping, Stepless): ...

    words = [*ALWAYS, "training.monitor=accuracy", "early_stopping.patience=1"]
    with pytest.raises(RuntimeError, match="--smoke: in 4 updates no parameter has changed, th"):
        main(Stopped, argv=words)


@pytest.mark.parametrize("advice", [[], pytest.param(["--no_advice"], marks=pytest.mark.long)])
def test_a_missing_step_fails_and_a_buffer_that_is_filled_first_does_not(
    temporary: Path, capfd: pytest.CaptureFixture[str], advice: list[str]
) -> None:
    with pytest.raises(RuntimeError, match="--smoke: in 52 updates no parameter has changed, th"):
        main(Stepless, argv=[*ALWAYS, *advice])
    shown = capfd.readouterr()
    assert "smoke test passed" not in shown.out
    assert "WARNING" not in shown.err  # the error says it
    main(Buffer, argv=[*ALWAYS, *advice])
    shown = capfd.readouterr()
    assert "passed: 52 updates, no parameter changed, val" in shown.out
    assert shown.err.count("unless something has to be filled first") == (not advice)
    assert left(temporary) == []
