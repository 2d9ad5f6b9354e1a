"""The loop: what comes when, and loops of one's own, with the two methods of train() or without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import paddle
import pytest
from tiny import DEVICE, Helped, Notes, Tiny, curve, make, metrics, same_bits, saved, trained

from expbase import defaults, main, on
from expbase.checkpoint.layout import NonFiniteError
from expbase.config import load_yaml

OPTIONS: dict[str, Any] = {"max_iteration": 25, "valid_interval": 10, "save_interval": 4}
END = "checkpoints/step-00000024"


class Epochs(Tiny):
    """Notes its epochs: ten iterations each."""

    def setup_model(self) -> None:
        super().setup_model()
        self.noted: list[tuple[str, int, int]] = []
        self.register_stateful("noted")

    def on_train_epoch_begin(self) -> None:
        self.noted.append(("begin", self.epoch, self.iteration))

    def on_train_epoch_end(self) -> None:
        self.noted.append(("end", self.epoch, self.iteration))

    @on("on_train_batch_end", every=9)
    def count(self) -> None:
        self.noted.append(("ninth", self.epoch, self.iteration))


class OwnLoop(Epochs):
    def train(self) -> None:
        while self.going_on():
            self.train_batch()
            self.end_iteration()


class ByEpochs(Epochs):
    """The loop of seed 002's runner: over the epochs that are left."""

    def train(self) -> None:
        for epoch in range(self.internals.epochs_ended, 3):
            self.new_epoch()
            while self.internals.epochs_ended == epoch and self.going_on():
                self.train_batch()
                self.end_iteration()


class Literal(Epochs):
    """The loop that seed 004 prints."""

    def train(self) -> None:
        self.new_epoch()
        while self.iteration < self.config.training.max_iteration:
            self.iteration += 1
            self.train_batch()
            if self.iteration % self.config.training.valid_interval == 0:
                self.valid()
            if self.iteration % self.config.training.save_interval == 0:
                self.save()


def died_and_continued(experiment: type[Tiny], output: Path, **options: Any) -> Any:
    """A run that fails twice, within the first and the second epoch, and is started again."""

    class Dying(experiment):  # type: ignore[misc, valid-type]
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration in (7, 15) and self.iteration not in died:
                died.append(self.iteration)
                raise RuntimeError("died")

    Dying.__name__ = experiment.__name__
    died: list[int] = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="died"):
            trained(Dying, output, **{**OPTIONS, **options})
    return trained(Dying, output, **{**OPTIONS, **options})


@pytest.mark.parametrize("experiment", [OwnLoop, ByEpochs])
def test_a_loop_of_ones_own_is_the_template_s_and_continues_exactly(
    tmp_path: Path, experiment: type[Tiny]
) -> None:
    whole = trained(Epochs, tmp_path / "whole", **OPTIONS)
    exp = died_and_continued(experiment, tmp_path / "own")
    assert exp.noted == whole.noted
    assert (exp.epoch, exp.internals.epochs_ended) == (3, 2)
    for step in ("checkpoints/step-00000020", "checkpoints/step-00000024"):
        same_bits(tmp_path / "whole" / step, tmp_path / "own" / step)
    assert curve(tmp_path / "own", "train/loss") == curve(tmp_path / "whole", "train/loss")
    assert curve(tmp_path / "own", "valid/accuracy") == curve(tmp_path / "whole", "valid/accuracy")


def test_a_loop_by_epochs_ends_with_them(tmp_path: Path) -> None:
    exp = died_and_continued(ByEpochs, tmp_path / "own", max_iteration=0, max_epoch=3)
    assert (exp.iteration, exp.epoch, exp.internals.epochs_ended) == (30, 3, 3)
    assert exp.finished


def test_a_signal_stops_a_loop_of_ones_own_with_a_checkpoint(tmp_path: Path) -> None:
    class Stopped(OwnLoop):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        trained(Stopped, tmp_path / "run", **OPTIONS)
    assert caught.value.code == 143
    assert (tmp_path / "run/checkpoints/step-00000006").exists()


def test_the_literal_loop_of_the_seed_counts_epochs_rightly_and_continues_exactly(
    tmp_path: Path,
) -> None:
    whole = trained(Literal, tmp_path / "whole", **OPTIONS)
    exp = died_and_continued(Literal, tmp_path / "parts")
    assert exp.noted == whole.noted
    begins = [("begin", 1, 0), ("begin", 2, 11), ("begin", 3, 21)]
    assert [note for note in whole.noted if note[0] == "begin"] == begins
    same_bits(tmp_path / "whole" / END, tmp_path / "parts" / END)
    # It never asked whether to go on, so all that can be said is that it returned.
    assert "[25] STOPPED by train() returned" in (tmp_path / "whole/worker_0.log").read_text()


def test_an_iteration_that_is_not_ended_is_an_error_that_names_the_method(tmp_path: Path) -> None:
    class Forgetting(Tiny):
        def train(self) -> None:
            while self.going_on():
                self.train_batch()

    class Leaving(Tiny):
        def train(self) -> None:
            self.going_on()
            self.train_batch()

    with pytest.raises(
        RuntimeError,
        match=r"going_on: called in an iteration that self\.end_iteration\(\) has not ended",
    ):
        trained(Forgetting, tmp_path / "forgetting")
    with pytest.raises(RuntimeError, match=r"train: returned within iteration 1.*end_iteration"):
        trained(Leaving, tmp_path / "leaving")


def test_end_iteration_without_an_iteration_is_an_error(tmp_path: Path) -> None:
    class Hasty(Tiny):
        def train(self) -> None:
            self.end_iteration()

    with pytest.raises(RuntimeError, match="end_iteration: called before the first iteration"):
        trained(Hasty, tmp_path / "run")


def test_a_loop_that_returns_early_is_saved_where_it_left(tmp_path: Path) -> None:
    class Early(Tiny):
        def train(self) -> None:
            for _ in range(3):
                assert self.going_on()
                self.train_batch()
                self.end_iteration()

    exp = trained(Early, tmp_path / "run", max_iteration=9, save_interval=4)
    assert exp.iteration == 3
    assert (tmp_path / "run/checkpoints/step-00000003").exists()
    assert "STOPPED by train() returned" in (tmp_path / "run/worker_0.log").read_text()


def test_a_loop_that_returned_early_is_over(tmp_path: Path) -> None:
    class Early(Tiny):
        def train(self) -> None:
            self.going_on()
            self.train_batch()
            self.end_iteration()

        def on_train_end(self) -> None:
            assert not self.going_on()
            self.load_checkpoint("last")

    assert trained(Early, tmp_path / "run").iteration == 1


def test_a_loop_by_hand_needs_no_run(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "whole")
    for steps in (2, 9, 1):  # the second time it is continued, the third time it is at its end
        exp = make(Tiny, tmp_path / "own")
        exp.setup()
        with exp.internals.closing():
            while steps and exp.going_on():
                exp.train_batch()
                exp.end_iteration()
                steps -= 1
    same_bits(*(tmp_path / run / "checkpoints/step-00000006" for run in ("whole", "own")))
    assert [line["iteration"] for line in metrics(tmp_path / "own")] == [
        line["iteration"] for line in metrics(tmp_path / "whole")
    ]


class Hasty(Tiny):
    """Takes names that a template might use, and sets some before the template does."""

    def __init__(self, config: Any, args: Any) -> None:
        self.mine = 1
        self.model = paddle.nn.Linear(1, 1)
        self._loop = [0]
        super().__init__(config, args)
        self._run = None

    def _update(self) -> None:
        self.mine += 1
        self._loop.append(self.iteration)

    def train_batch(self) -> None:
        super().train_batch()
        self._update()


def test_private_names_are_the_users_and_so_is_what_was_set_early(tmp_path: Path) -> None:
    assert isinstance(make(Hasty, tmp_path / "run").model, paddle.nn.Linear)
    for end in (4, 6):
        exp: Any = trained(Hasty, tmp_path / "run", max_iteration=end)
    assert (exp.mine, exp._loop) == (7, [0, 1, 2, 3, 4, 5, 6])


def test_a_stop_opens_no_further_epoch(tmp_path: Path) -> None:
    class Stopping(ByEpochs):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.stop()

    exp = trained(Stopping, tmp_path / "run", **OPTIONS)
    assert exp.noted == [("begin", 1, 0)]
    assert (exp.iteration, exp.epoch, exp.internals.epochs_ended) == (3, 1, 0)


def test_the_last_iteration_is_validated_and_saved_off_the_interval(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=5, keep_last=0)
    assert saved(tmp_path / "run") == [2, 4, 5]
    assert list(curve(tmp_path / "run", "valid/accuracy")) == [3, 5]


def test_an_interval_of_zero_means_never(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", valid_interval=0, save_interval=0, log_interval=0)
    assert saved(tmp_path / "run") == []
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_epochs_count_passes_begun_and_max_epoch_ends_the_run(tmp_path: Path) -> None:
    exp = trained(Tiny, tmp_path / "run", max_iteration=0, max_epoch=2)
    assert (exp.iteration, exp.epoch, exp.internals.batch_in_epoch) == (20, 2, 10)
    assert exp.batches_per_epoch == 10


@pytest.mark.parametrize(
    ("size", "training", "total"),
    [
        (40, {"max_epoch": 2}, 20),
        (38, {"max_epoch": 2, "accumulation_steps": 1}, 20),  # the last batch of an epoch is short
        (40, {"max_epoch": 2, "accumulation_steps": 3}, 7),  # 20 batches; the last update has two
        (40, {"max_epoch": 3, "accumulation_steps": 3}, 10),
        (40, {"max_epoch": 2, "shares": 4}, 6),  # 12 batches an epoch, two of them again
        (40, {"max_epoch": 2, "max_iteration": 19}, 19),
        (40, {"max_epoch": 2, "max_iteration": 21}, 20),
        (40, {"max_iteration": 3, "accumulation_steps": 3}, 3),
    ],
)
def test_the_number_of_iterations_is_known_where_a_schedule_is_made(
    tmp_path: Path, size: int, training: dict[str, int], total: int
) -> None:
    class Planned(Helped):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.size = size
            self.planned = Notes([self.total_iterations])

        def setup_model(self) -> None:
            super().setup_model()
            self.planned.append(self.total_iterations)

    rare = {"valid_interval": 0, "save_interval": 0, "log_interval": 0}
    exp: Any = trained(Planned, tmp_path / "run", **{"max_iteration": 0, **rare, **training})
    assert exp.planned == [training.get("max_iteration"), total]  # an epoch's length is not known
    assert exp.iteration == exp.total_iterations == total


@pytest.mark.parametrize(
    ("samples", "sizes_and_stops", "total"),
    [
        (40, [(4, 10)], 40),
        (40, [(4, 10), (2, 11)], 70),
        (40, [(4, 13), (2, 14)], 67),  # 28 samples of the second epoch were left
        (40, [(4, 13), (8, 14)], 27),
        (40, [(4, 13), (8, 15), (8, 20), (4, 25)], 34),
        (40, [(4, 3), (8, 7), (4, 10), (8, 11)], 24),
        (33, [(4, 9), (16, 10)], 18),
        (33, [(4, 4), (16, 5)], 15),
    ],
)
def test_a_run_that_goes_on_with_another_batch_size_knows_how_long_it_is_in_all(
    tmp_path: Path, samples: int, sizes_and_stops: list[tuple[int, int]], total: int
) -> None:
    class Sized(Helped):
        size = samples

        def setup_model(self) -> None:
            super().setup_model()
            self.planned = Notes([self.total_iterations])

    def start(size: int, stop: int) -> Any:
        Sized.batch_size = size
        rare = {"valid_interval": 0, "save_interval": 1000, "log_interval": 0}
        return trained(Sized, tmp_path / "run", max_epoch=4, max_iteration=stop, **rare)

    for size, stop in sizes_and_stops:
        assert start(size, stop).iteration == stop
    exp = start(size, 0)
    assert exp.planned == [exp.total_iterations] == [exp.iteration] == [total]
    looking = make(Sized, tmp_path / "run", {"evaluate": "last"}, max_epoch=4, max_iteration=0)
    looking.setup()
    looking.close()
    assert looking.planned == [total]  # a model may be as large as the run is long


class Unsized:
    """The batches of a loader, without a length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize("limit", [None, 7])
def test_over_a_stream_only_a_limit_of_iterations_is_a_known_total(
    tmp_path: Path, limit: int | None
) -> None:
    class Streamed(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = Unsized(self.train_loader)

    exp = make(Streamed, tmp_path / "run", max_epoch=2, max_iteration=limit or 0)
    exp.setup()
    exp.close()
    assert exp.total_iterations == limit


def test_a_train_batch_may_read_any_number_of_batches(tmp_path: Path) -> None:
    class Greedy(Tiny):
        def train_batch(self) -> None:
            self.read_batch()
            self.read_batch()
            super().train_batch()

    exp = trained(Greedy, tmp_path / "run", max_iteration=4)
    assert (exp.epoch, exp.internals.batch_in_epoch) == (2, 2)


def test_stop_ends_after_the_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    class Stopping(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.stop("enough")

    exp = trained(Stopping, tmp_path / "run", max_iteration=100, save_interval=50)
    assert exp.iteration == 3
    assert saved(tmp_path / "run") == [3]
    assert "[3] STOPPED by enough" in (tmp_path / "run/worker_0.log").read_text()


def test_a_pass_that_ends_within_an_update_ends_the_run_there(tmp_path: Path) -> None:
    class Pairs(Tiny):
        size = 20  # five batches a pass

        def train_batch(self) -> None:
            self.read_batch()
            super().train_batch()

    rare = {"valid_interval": 0, "log_interval": 0, "keep_last": 0}
    exp = trained(Pairs, tmp_path / "run", max_iteration=0, max_epoch=1, save_interval=50, **rare)
    assert exp.iteration == 3
    trained(Pairs, tmp_path / "every", max_iteration=8, save_interval=0, save_every_epoch=1, **rare)
    assert saved(tmp_path / "every") == [3, 5, 8]


@pytest.mark.device
@pytest.mark.parametrize("interval", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_holds_it(
    tmp_path: Path, interval: int
) -> None:
    class Diverging(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.log(loss=float("nan"))

    with pytest.raises(NonFiniteError, match=r"loss=nan at iteration 3.*step-00000002"):
        trained(Diverging, tmp_path / "run", log_interval=interval)
    assert saved(tmp_path / "run") == [2]
    warned = trained(Diverging, tmp_path / "warned", nonfinite="warn")
    assert warned.iteration == 6
    assert "loss=nan at iteration 3" in (tmp_path / "warned/worker_0.log").read_text()


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_pending_nan_that_is_allowed_does_not_stop_a_save(tmp_path: Path, policy: str) -> None:
    class Bad(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.log(loss=float("nan"))

    exp = trained(Bad, tmp_path / "run", nonfinite=policy, log_interval=5, save_interval=2)
    assert exp.iteration == 6


def test_epochs_that_are_asked_for_are_trained_although_there_is_a_limit_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "_LIMIT", 50)  # of 10 batches an epoch: 5 epochs
    options = ["--device", DEVICE, "training.save_interval=0", "training.valid_interval=0"]
    exp = main(Tiny, argv=["--output", str(tmp_path / "six"), *options, "training.max_epoch=6"])
    assert (exp.iteration, exp.internals.epochs_ended, exp.finished) == (60, 6, True)
    exp = main(Tiny, argv=["--output", str(tmp_path / "five"), *options])
    assert (exp.iteration, exp.internals.epochs_ended, exp.finished) == (50, 5, True)
    assert exp.config.training.max_iteration == 50
    assert load_yaml(tmp_path / "five/config.yaml")["training"]["max_iteration"] == 50

    class Late(Tiny):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.config.training.max_epoch = 6

    exp = main(Late, argv=["--output", str(tmp_path / "late"), *options])
    assert (exp.iteration, exp.config.training.max_iteration) == (60, 0)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({}, "training.max_iteration"),  # 6
        ({"max_iteration": 0, "max_epoch": 1}, "training.max_epoch"),
        ({"max_iteration": 10**6, "max_epoch": 1}, "training.max_epoch"),
        ({"max_iteration": 10, "max_epoch": 1}, "training.max_iteration and training.max_epoch"),
    ],
)
def test_a_run_that_has_finished_names_the_limit_to_raise(
    tmp_path: Path, limits: dict[str, int], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        trained(Tiny, tmp_path, **limits)
    told = f"To train on, raise {named}; --fresh starts over."
    assert told in capsys.readouterr().err
