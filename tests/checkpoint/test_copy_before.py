"""What a validation puts in the place of what was trained is never saved; the best of all counts.

A copy of the state stands before each validation: it is written if the run stops or fails within
it, or if its results are among the best.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import (
    DEVICE,
    Notes,
    Tiny,
    make,
    run_of,
    run_script,
    same_bits,
    saved,
    trained,
    validations,
)

from expbase.checkpoint import storage
from expbase.checkpoint.best import best_of
from expbase.checkpoint.model_files import read_weights
from expbase.engine.evaluation import Evaluation
from expbase.extras.all_events import AllEvents

EVERY_FOURTH: dict[str, Any] = {"max_iteration": 8, "valid_interval": 4, "save_interval": 100}
CODES = {"SIGTERM": 143, "time limit": 124, "STOP": 0, "exception": 1}


class Swapping(AllEvents, Tiny):
    """Validates with averages, which stand in the model meanwhile; something happens once in it."""

    cause = ""  # what happens in the second batch of the validation of this iteration
    happens_at = 4
    swaps_in_valid = False  # else in the events round it

    def setup_model(self) -> None:
        super().setup_model()
        self.kept = Notes()

    def swap(self) -> None:
        for parameter in self.model.parameters():
            self.kept.append(parameter.clone())
            parameter.set_value(paddle.zeros_like(parameter))

    def swap_back(self) -> None:
        for parameter in self.model.parameters():
            parameter.set_value(self.kept.pop(0))

    def on_evaluate_begin(self) -> None:
        if not self.swaps_in_valid:
            self.swap()

    def on_evaluate_end(self, results: Any) -> None:
        if not self.swaps_in_valid:
            self.swap_back()

    def valid(self) -> dict[str, float]:
        if self.swaps_in_valid:
            self.swap()
        for number, _ in enumerate(self.valid_batches()):
            if self.iteration == self.happens_at and number == 1:
                self.happen()
        if self.swaps_in_valid:
            self.swap_back()
        return {"score": 1.0}

    def happen(self) -> None:
        cause, type(self).cause = self.cause, ""
        if cause == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif cause == "time limit":
            run_of(self).stop._limit = 1e-9
        elif cause == "STOP":
            (self.output_dir / "STOP").touch()
        elif cause == "exception":
            raise ArithmeticError("in valid")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    trained(Swapping, run, **EVERY_FOURTH)
    return run


@pytest.fixture(autouse=True)
def looks_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expbase.engine.leave_validation._LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("cause", "in_valid"),
    [("SIGTERM", False), ("time limit", True), ("STOP", False), ("exception", True)],
)
def test_averages_that_stand_in_the_model_when_a_validation_is_left_are_not_saved(
    tmp_path: Path, straight: Path, cause: str, in_valid: bool
) -> None:
    swapping = type("Swapping", (Swapping,), {"cause": cause, "swaps_in_valid": in_valid})
    code: Any = 0
    try:
        trained(swapping, tmp_path / "run", **EVERY_FOURTH)
    except SystemExit as end:
        code = end.code
    except ArithmeticError:
        code = 1
    assert code == CODES[cause]
    assert saved(tmp_path / "run") == [4]
    trained(swapping, tmp_path / "run", **EVERY_FOURTH)
    same_bits(*(run / "checkpoints/step-00000008" for run in (straight, tmp_path / "run")))
    assert validations(tmp_path / "run") == validations(straight)


def test_a_file_that_is_still_being_written_keeps_the_copy_from_no_disk(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within = threading.Event()
    write = storage.write

    class Busy(Swapping):
        cause = "SIGTERM"

        def happen(self) -> None:
            super().happen()
            within.set()

    def late(directory: Path, iteration: int, *args: Any) -> Path:
        assert within.wait(60)  # of iteration 3, in the validation of 4
        return write(directory, iteration, *args)

    monkeypatch.setattr(storage, "write", late)
    with pytest.raises(SystemExit):
        trained(Busy, tmp_path / "run", **{**EVERY_FOURTH, "save_interval": 3})
    assert saved(tmp_path / "run") == [3, 4]
    trained(Busy, tmp_path / "run", **EVERY_FOURTH)
    same_bits(*(run / "checkpoints/step-00000008" for run in (straight, tmp_path / "run")))


def test_with_saving_switched_off_a_stop_in_a_validation_writes_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = type("Swapping", (Swapping,), {"cause": "SIGTERM"})
    with pytest.raises(SystemExit):
        trained(stopping, tmp_path, **{**EVERY_FOURTH, "save_interval": 0})
    assert saved(tmp_path) == []
    log = (tmp_path / "worker_0.log").read_text()
    assert "STOPPED by SIGTERM; nothing was saved here: no checkpoint was asked for" in log


def test_weights_that_are_written_after_a_validation_was_left_are_told(tmp_path: Path) -> None:
    class Writing(Swapping):
        cause = "SIGTERM"

        def on_train_end(self) -> None:
            self.save_model(self.output_dir / "final.pdparams")

    with pytest.raises(SystemExit):
        trained(Writing, tmp_path, **EVERY_FOURTH)
    trained(Writing, tmp_path, **EVERY_FOURTH)  # to its end, where nothing is to be told
    log = (tmp_path / "worker_0.log").read_text()
    assert log.count("final.pdparams: written after the validation of iteration ") == 1
    assert "final.pdparams: written after the validation of iteration 4 was left" in log


@pytest.mark.parametrize("place", ["on_train_epoch_end", "on_evaluate_begin", "on_train_end"])
def test_a_save_by_hand_holds_no_averages_either_if_the_validation_is_left(
    tmp_path: Path, place: str
) -> None:
    def save(self: Any, *args: Any) -> None:
        getattr(Swapping, place)(self, *args)
        self.save()

    saving: Any = type("Saving", (Swapping,), {place: save, "cause": "SIGTERM"})
    saving.happens_at = 10
    options = {"save_interval": 0, "valid_interval": 0, "valid_every_epoch": 1}
    with pytest.raises(SystemExit):
        trained(saving, tmp_path, **{**EVERY_FOURTH, **options, "max_iteration": 20})
    assert saved(tmp_path) == [10] * (place == "on_train_epoch_end")
    log = (tmp_path / "worker_0.log").read_text()
    text = "save: the validation of iteration 10 was left, and the weights in the model may not be"
    assert (text in log) == (place != "on_train_epoch_end")
    if saved(tmp_path):
        weights = read_weights(tmp_path / "checkpoints/step-00000010")["model"]
        assert any(array.data.any() for array in weights.values())


def test_a_copy_that_is_being_handed_to_the_writer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = trained(Tiny, tmp_path, **{**EVERY_FOURTH, "max_iteration": 2, "save_interval": 0})
    checkpointer = run_of(exp).checkpointer
    checkpointer.capture(2, {})
    taken, go_on = threading.Event(), threading.Event()

    def kept(coming: Any = ()) -> Any:
        taken.set()
        assert go_on.wait(60)
        return lambda there: []

    monkeypatch.setattr(checkpointer.validations, "kept", kept)
    handing = threading.Thread(target=checkpointer.write)
    handing.start()
    assert taken.wait(60)
    ending = threading.Thread(target=checkpointer.write_now)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    go_on.set()
    for thread in (handing, ending):
        thread.join(60)
    assert saved(tmp_path) == [2]


MIOU = {4: 0.5, 8: 0.95, 12: 0.8, 16: 0.6, 20: 0.7}


class Scored(Tiny):
    def valid(self) -> dict[str, float]:
        return {"miou": MIOU.get(self.iteration, 0.1)}


TEN = {"max_iteration": 20, "valid_interval": 4, "save_interval": 10, "monitor": "miou"}


def test_the_best_is_the_best_of_all_validations_whatever_save_interval_is(tmp_path: Path) -> None:
    class Tested(Scored):
        def setup_model(self) -> None:
            super().setup_model()
            self.asked = Notes()

        def on_save_checkpoint(self) -> None:
            self.asked.append(self.iteration)

        def on_train_end(self) -> None:
            self.load_checkpoint("best")

    exp: Any = trained(Tested, tmp_path / "run", **TEN)
    assert exp.asked == [4, 8, 10, 12, 16, 20]  # at each capture
    assert best_of(tmp_path / "run")[0] == (8, 0.95)
    assert "best        miou=0.95 at iteration 8" in (tmp_path / "run/worker_0.log").read_text()
    other = trained(Scored, tmp_path / "eight", **{**TEN, "max_iteration": 8})
    assert np.array_equal(exp.model[0].weight.numpy(), other.model[0].weight.numpy())
    assert saved(tmp_path / "run") == [8, 10, 20]  # 4 was the best until 8 was there


def test_a_copy_that_is_not_among_the_best_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = storage.write
    monkeypatch.setattr(
        storage, "write", lambda folder, n, *rest: written.append(n) or write(folder, n, *rest)
    )
    exp = trained(Scored, tmp_path / "two", **TEN, keep_best=2)
    assert written == [4, 8, 10, 12, 20]
    assert run_of(exp).checkpointer._copy is None
    written.clear()
    # Then only a due one may be the best.
    trained(Scored, tmp_path / "none", **{**TEN, "max_iteration": 10}, keep_best=0)
    assert written == [10]
    assert best_of(tmp_path / "none") == [(10, 0.1)]


def test_a_validation_that_is_made_again_writes_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(Scored, tmp_path, **{**TEN, "max_iteration": 9, "save_interval": 100})
    os.rename(tmp_path / "checkpoints/step-00000009", tmp_path / "gone")
    monkeypatch.setattr(Evaluation, "validate", lambda *_: {"miou": 0.99})
    exp = make(Scored, tmp_path, **{**TEN, "max_iteration": 9})
    exp.setup()
    writes = Notes()
    monkeypatch.setattr(storage, "write", lambda *args: writes.append(args[1]))
    with exp.internals.closing():
        assert exp.going_on()
    assert exp.iteration == 9
    assert writes == []


def test_a_validation_of_one_s_own_at_an_epoch_s_end_may_be_the_best(tmp_path: Path) -> None:
    class ByHand(Tiny):
        def on_train_epoch_end(self) -> None:
            self.evaluate()

        def valid(self) -> dict[str, float]:
            return {"score": -float(self.epoch)}

    options = {"valid_interval": 0, "save_interval": 100, "monitor": "score"}
    trained(ByHand, tmp_path, max_iteration=25, **options)
    assert best_of(tmp_path) == [(10, -1.0)]
    assert saved(tmp_path) == [10, 25]


HANGING = """
import threading
from expbase import main
from tiny import Tiny

class Hanging(Tiny):
    def valid(self):
        threading.Event().wait()

if __name__ == "__main__":
    main(Hanging)
"""


@pytest.mark.long
def test_a_validation_that_hangs_loses_nothing_when_it_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    words = ["--output", "run", "--device", DEVICE, "training.valid_interval=3"]
    words += ["training.hang_seconds=1", "training.hang_action=end"]
    ended = run_script(script, *words)
    assert ended.returncode == 1, ended.stderr
    assert saved(tmp_path / "run") == [3]
