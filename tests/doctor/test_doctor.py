"""The doctor is a guest: it changes nothing, fails alone, leaves, and can be left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Tiny, make, metrics, run_of, trained

from expbase.doctor import first_updates


class Forgetful(Tiny):
    """Logs nothing, which the doctor says."""

    def log(self, *args: Any, **scalars: Any) -> None: ...


def log_of(run: Path) -> str:
    return (run / "worker_0.log").read_text()


def test_it_is_left_out_where_nobody_wants_it(tmp_path: Path) -> None:
    told = "nothing was logged"
    trained(Forgetful, tmp_path / "with", max_iteration=2)
    assert log_of(tmp_path / "with").count(told) == 1
    trained(Forgetful, tmp_path / "without", args={"advice": False}, max_iteration=2)
    assert told not in log_of(tmp_path / "without")


def test_it_looks_in_a_loop_without_run(tmp_path: Path) -> None:
    exp = make(Forgetful, tmp_path, max_iteration=3)
    exp.setup()
    with exp.internals.closing():
        while exp.going_on():
            exp.train_batch()
            exp.end_iteration()
    assert log_of(tmp_path).count("[3] in 3 updates nothing was logged") == 1


def test_an_error_of_a_guest_is_a_line_and_training_goes_on(tmp_path: Path) -> None:
    def guest() -> None:
        raise KeyError("broken")

    trained(Tiny, tmp_path / "alone", max_iteration=2)
    exp = make(Tiny, tmp_path / "visited", max_iteration=2)
    exp.internals.listen("on_train_batch_end", guest)
    exp.setup()
    exp.run()
    assert log_of(tmp_path / "visited").count("KeyError('broken'), which has no effect") == 2
    assert exp.finished
    assert not exp.internals.hears("on_train_batch_end")
    numbers = [[line["train/loss"] for line in metrics(tmp_path / name) if "train/loss" in line]
               for name in ("alone", "visited")]  # fmt: skip
    assert numbers[0] == numbers[1]


def test_after_the_first_updates_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = []

    class Asking(Tiny):
        def on_train_batch_begin(self) -> None:
            listening.append("on_train_batch_end" in vars(run_of(self).events)["_guests"])

    monkeypatch.setattr(first_updates, "LOOK_AFTER", 3)
    trained(Asking, tmp_path, max_iteration=5, valid_interval=0)
    assert listening == [True] * 3 + [False] * 2


def test_a_guest_may_explain_an_error_before_it_is_logged(tmp_path: Path) -> None:
    class Broken(Tiny):
        def train_batch(self) -> None:
            raise ValueError("broken")

    exp = make(Broken, tmp_path)
    exp.internals.explain(lambda error: error.add_note("because it is a test"))  # type: ignore[attr-defined]
    exp.setup()
    with pytest.raises(ValueError, match="broken"):
        exp.run()
    assert "because it is a test" in log_of(tmp_path)
