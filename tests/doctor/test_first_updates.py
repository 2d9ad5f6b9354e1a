"""Mistakes that are told, and odd experiments that are right: user_mistakes.py in one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import TESTS, Helped, Tiny, make, metrics, run_of, trained

from expbase.doctor import first_gradients, first_updates
from expbase.doctor.first_updates import TrainedParameters

sys.path.insert(0, str(TESTS / "proofs"))
from user_mistakes import MISTAKES, ODD, WORDS, Case, said

sys.path.pop(0)


def run(case: Case, output: Path) -> int:
    """Runs a case as its script would; 1 if it ends by an exception."""
    # A checkpoint at the end alone, where a case does not ask for more.
    options = dict(word.split("=") for word in (*WORDS, "save_interval=100", *case.words))
    names: dict[str, Any] = {"__name__": "mistake"}
    try:
        script = output.with_suffix(".py")  # a class whose source can be read
        script.write_text(case.script)
        exec(compile(case.script, script, "exec"), names)
        trained(names["Experiment"], output, **{key: int(value) for key, value in options.items()})
    except Exception as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


# Of the odd ones, of which nothing is to be told, every third is quick.
ALONE = [
    pytest.param(case, id=case.name, marks=[pytest.mark.long] * bool(number % 3 and case in ODD))
    for number, case in enumerate((*MISTAKES, *ODD))
    if case.ranks == 1
]


class Counted:
    """Batches of Tiny, and a length that may be another one."""

    def __init__(self, loader: Any, length: int) -> None:
        self.loader = loader
        self.length = length

    def __iter__(self) -> Any:
        return iter(self.loader)

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("length", "training", "is_told"),
    [(40, {}, True), (10, {}, False),
     pytest.param(40, {"skip_updates": [2]}, False, marks=pytest.mark.long),
     pytest.param(10, {"accumulation_steps": 4}, False, marks=pytest.mark.long)],
)  # fmt: skip
def test_a_length_that_does_not_count_the_batches_is_told_once(
    tmp_path: Path, length: int, training: dict[str, Any], is_told: bool
) -> None:
    class Sized(Helped):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = Counted(self.train_loader, length)

    for max_epoch in 2, 4:
        trained(Sized, tmp_path, max_iteration=0, max_epoch=max_epoch, **training)
    text = f"self.train_loader: its length is {length}, and an epoch had 10 batches"
    assert (tmp_path / "worker_0.log").read_text().count(text) == is_told


def test_a_schedule_that_a_checkpoint_of_before_has_put_back_was_stepped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Tested(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            rate = paddle.optimizer.lr.MultiStepDecay(0.01, [1, 2], 0.1)
            self.optimizer = paddle.optimizer.Adam(rate, parameters=self.model.parameters())

        def on_train_epoch_end(self) -> None:
            self.optimizer._learning_rate.step()

        def on_train_end(self) -> None:
            self.load_checkpoint("last")  # which was written before the end of the epoch

    for end in (17, 20):
        trained(Tested, tmp_path, max_iteration=end, save_interval=100)
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.parametrize("case", ALONE)
def test_a_mistake_is_told_and_what_is_only_odd_is_not(
    tmp_path: Path, case: Case, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run(case, tmp_path / "run")
    err = capfd.readouterr().err
    assert bool(code) == bool(case.code)  # which one a process answers, user_mistakes.py looks at
    if not case.line:
        assert said(err) == []
        return
    assert re.search(case.line, err), err
    assert code or len(said(err)) <= 1, err


def test_there_is_one_look_in_a_run_and_one_that_goes_on_has_more_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Tiny):
        def log(self, *args: Any, **scalars: Any) -> None: ...

        def train_batch(self) -> None:
            super().train_batch()
            for parameter in self.optimizer._parameter_list:
                parameter.clear_gradient(False)

        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer.step = lambda: None  # type: ignore[method-assign]

    monkeypatch.setattr("expbase.doctor.first_updates.LOOK_AFTER", 5)
    trained(Forgetful, tmp_path / "run", max_iteration=7, save_interval=0, valid_interval=0)
    told = capfd.readouterr().err
    assert told.count("in 5 updates no parameter has changed") == 1
    assert told.count("nothing was logged") == 1
    monkeypatch.setattr("expbase.doctor.first_updates.EARLY", 3)
    trained(Forgetful, tmp_path / "early", max_iteration=7, save_interval=0, valid_interval=0)
    told = capfd.readouterr().err
    looks = re.findall(r"\[(\d)\] in \d updates (no parameter|nothing was logged)", told)
    assert looks == [("3", "no parameter"), ("3", "nothing was logged"), ("5", "no parameter")]
    trained(Tiny, tmp_path / "other", max_iteration=2)
    trained(Forgetful, tmp_path / "other", max_iteration=4)
    # Two updates of a run that goes on are too few to say so.
    assert "updates no parameter has" not in capfd.readouterr().err


def test_after_the_early_look_what_comes_late_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unstepped(Tiny):
        def train_batch(self) -> None:
            points, labels = self.read_batch()
            self.backward(paddle.nn.functional.cross_entropy(self.model(points), labels))
            self.step_optimizers()
            self.log(nothing=0.0)

    class Unread(Tiny):
        def train_batch(self) -> None:
            loss = self.model(paddle.ones([4, 4])).mean()
            self.backward(loss)
            self.step_optimizers()
            self.optimizer._learning_rate.step()
            self.log(loss=loss)
            if self.iteration == 16:
                self.stop()

    class Idle(Tiny):
        def train_batch(self) -> None:
            self.read_batch()
            self.log(remainder=self.iteration % 2)  # so that the early look is not taken

    monkeypatch.setattr("expbase.doctor.first_updates.EARLY", 2)
    often = {"max_iteration": 17, "save_interval": 0, "valid_interval": 0, "log_interval": 4}
    trained(Unstepped, tmp_path / "unstepped", **often)
    assert "[16] in 16 updates nobody has stepped" in capfd.readouterr().err
    trained(Unread, tmp_path / "unread", **often | {"max_iteration": 0, "max_epoch": 1})
    assert capfd.readouterr().err.count("[12] in 12 updates train_batch did not call") == 1
    trained(Idle, tmp_path / "idle", **often)  # its last update has no line
    assert "[17] in 17 updates no" in capfd.readouterr().err


def test_after_the_early_look_an_update_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = first_updates.FirstUpdates._look

    def noted(guest: first_updates.FirstUpdates) -> None:
        looks.append(exp.iteration)
        look(guest)

    monkeypatch.setattr(first_updates.FirstUpdates, "_look", noted)
    monkeypatch.setattr(first_updates, "EARLY", 3)
    monkeypatch.setattr(first_updates, "LOOK_AFTER", 20)
    for log_interval, expected in (6, [1, 2, 3, 6, 12, 18, 24]), (3, [1, 2, *range(3, 22, 3)]):
        exp = make(
            Tiny, tmp_path / f"run{log_interval}", max_iteration=30, log_interval=log_interval
        )
        exp.setup()
        exp.run()
        assert looks == expected
        looks.clear()


def looks(step: Any) -> list[str]:
    """What is said after `step(layer, optimizer)`."""
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    trained = TrainedParameters({"optimizer": optimizer})
    step(layer, optimizer)
    return [*trained.look()]


def nothing(layer: Any, optimizer: Any) -> None: ...


def update(layer: Any, optimizer: Any) -> None:
    layer(paddle.ones([1, 2])).sum().backward()
    optimizer.step()


@pytest.mark.device
def test_each_thing_that_is_missing_is_said() -> None:
    assert looks(update) == []
    assert len(looks(nothing)) == 1


def test_of_a_validation_without_results_there_is_no_line(tmp_path: Path) -> None:
    class Silent(Tiny):
        def valid(self) -> None:  # type: ignore[override]
            super().valid()

    trained(Silent, tmp_path, valid_interval=2, log_interval=4, save_interval=100)
    assert [line["iteration"] for line in metrics(tmp_path)] == [4, 6]
    assert not re.search(r"\[2\] (epoch=1)?$", (tmp_path / "worker_0.log").read_text(), re.M)
    validations = (tmp_path / "validations.jsonl").read_text().splitlines()
    assert ["finished" in line for line in validations] == [True]


def test_what_is_drawn_on_the_board_alone_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Drawn(Tiny):
        def train_batch(self) -> None:
            points, labels = self.read_batch()
            loss = paddle.nn.functional.cross_entropy(self.model(points), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.visualizer.add_scalar("loss", loss, self.iteration)

    trained(Drawn, tmp_path / "run", max_iteration=2)
    assert "nothing was logged" not in capfd.readouterr().err


@pytest.mark.device
def test_gradients_that_are_cleared_once_are_watched_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    note_backward = first_gradients._Watched.note_backward

    def heard(watched: Any, new: Any) -> None:
        seen.append(exp.iteration)
        note_backward(watched, new)

    monkeypatch.setattr(first_gradients._Watched, "note_backward", heard)

    class Watching(Tiny):
        def train_batch(self) -> None:
            points, labels = self.read_batch()
            loss = paddle.nn.functional.cross_entropy(self.model(points), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer._learning_rate.step()
            if self.iteration == 1:  # later it is not seen
                self.optimizer.clear_grad()
            self.log(loss=loss)

    exp = make(Watching, tmp_path / "run", max_iteration=3)
    exp.setup()
    exp.run()
    assert {*seen} == {1}
    assert "WARNING" not in (tmp_path / "run" / "worker_0.log").read_text()


def test_what_rank_0_logs_counts_for_all(tmp_path: Path) -> None:
    class Drawing(Tiny):
        def log(self, *args: Any, **scalars: Any) -> None: ...

    exp = make(Drawing, tmp_path / "run", max_iteration=2)
    exp.setup()
    object.__setattr__(run_of(exp).start, "rank", 1)
    exp.run()
    assert "nothing was logged" not in (tmp_path / "run" / "worker_0.log").read_text()
