"""What expbase raises on purpose is told from every other exception, and shown as a sentence."""

from __future__ import annotations

import errno
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import Tiny, make, trained

from expbase.base.error_text import sentence, users_line
from expbase.base.errors import OSMistake, is_on_purpose
from expbase.base.exit_codes import exit_code_of
from expbase.checkpoint.layout import CheckpointError
from expbase.cli import report_user_errors
from expbase.config import ConfigError
from expbase.engine.evaluation import named_scalars
from expbase.engine.run_states import Life
from expbase.record.meter import Meter
from expbase.state.optimizers import settings


class Logging(Tiny):
    """One that logs a loss without its name."""

    def train_batch(self) -> None:
        loss = self.model(self.read_batch()[0]).mean()
        self.log(loss)


def broken(batch: Any) -> Any:
    """A collate function of a user's."""
    raise ValueError("no such label")


class Collating(Tiny):
    """One whose own code fails within ours."""

    loader_options = {"collate_fn": broken}  # noqa: RUF012


def raised_by(function: Any, *args: Any) -> Exception:
    """What it raises."""
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError


def because_of_another() -> None:
    """Raises one of ours while another error is handled."""
    try:
        raise KeyError("a user's")
    except KeyError:
        Life.NEW.need_training("log")


def test_ours_is_what_a_raise_of_expbases_made_with_a_text_and_for_no_other_error() -> None:
    assert is_on_purpose(raised_by(Life.NEW.need_training, "log"))
    assert is_on_purpose(raised_by(Meter().add, 1, {"loss": paddle.ones([3])}))
    others = [
        raised_by(settings, None),  # Python's own, in a line of ours
        raised_by(Meter().add, 1, None),
        raised_by(broken, []),
        raised_by(because_of_another),
        raised_by(Tiny.valid_batches, None),
        raised_by(super(Tiny, Tiny).valid, None),  # NotImplementedError, without a text
        ValueError("raised nowhere"),
    ]
    assert [error for error in others if is_on_purpose(error)] == []


def test_a_mistake_is_caught_by_pythons_class_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config: 1 given"):
        raise ConfigError("config: 1 given")
    error = pickle.loads(pickle.dumps(OSMistake(errno.EFBIG, "too long", "metrics.jsonl")))
    assert (error.strerror, error.filename) == ("too long", "metrics.jsonl")
    missing = raised_by(getattr, make(Tiny, tmp_path), "clip_gradients")
    assert isinstance(missing, AttributeError)
    assert (missing.name, is_on_purpose(missing)) == ("clip_gradients", True)


def test_a_mistake_in_the_experiment_is_mended_by_no_other_start() -> None:
    assert exit_code_of(raised_by(named_scalars, 1.0, ())) == 78  # a TypeError, at any time
    assert (
        exit_code_of(raised_by(Life.NEW.need_training, "log")) == 1
    )  # what a RuntimeError is, depends
    assert exit_code_of(raised_by(broken, [])) == 1
    assert exit_code_of(raised_by(broken, []), in_setup=True) == 78
    for number, code in ((errno.EEXIST, 78), (errno.ENOTDIR, 78), (errno.ENOSPC, 1)):
        mistake = ConfigError("--output: 'runs' cannot be made a directory.")
        mistake.__cause__ = OSError(number, os.strerror(number))
        assert exit_code_of(mistake, in_setup=True) == code
    # Another rank was killed while they connected.
    gone = "(InvalidArgument) TCP receive error. Details: Connection reset by peer."
    assert exit_code_of(ValueError(gone), in_setup=True) == 1


def test_a_full_disk_is_no_mistake_however_often_its_error_was_raised_anew() -> None:
    def failing() -> None:
        try:
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise CheckpointError("cannot be written") from error
        except CheckpointError as error:
            raise CheckpointError("Then run the same command again.") from error

    assert exit_code_of(raised_by(failing)) == 1
    assert f"{exit_code_of(CheckpointError('damaged'))!s}" == "78"


def test_the_sentence_stands_below_the_users_own_line_and_the_log_has_the_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(TypeError) as caught, report_user_errors("train.py"):
        trained(Logging, tmp_path / "run")
    capfd.readouterr()
    with pytest.raises(SystemExit, match="78"):  # as Python shows what nobody catches
        sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capfd.readouterr().err
    first, line, *_, last = shown.splitlines()
    assert first.startswith(f'  File "{__file__}", line ')
    assert first.endswith(", in train_batch")
    assert line.strip() == "self.log(loss)"
    assert last == (
        "train.py: error: log: a Tensor of shape [] given without a name; expected "
        'self.log(loss=loss) or self.log({"loss": loss}).'
    )
    assert "Traceback" not in shown
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(caught.type, caught.value, caught.tb)  # Python's prompt stays
    assert capfd.readouterr().err == shown
    assert "Traceback" in (tmp_path / "run" / "worker_0.log").read_text()


def test_what_a_user_raises_keeps_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ValueError, match="no such label") as caught, report_user_errors("train.py"):
        trained(Collating, tmp_path / "run")
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "Traceback" in capfd.readouterr().err


def test_what_calls_expbase_first_is_no_line_that_leads_to_a_mistake() -> None:
    error = raised_by(Life.NEW.need_training, "log")
    assert users_line(error) == ""
    assert sentence("train.py", error) == f"train.py: error: {error}"
