"""The loop: what comes when, and loops of one's own, with the two methods of train() or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, WeightedRandomSampler
from tiny import (
    DEVICE,
    Helped,
    Notes,
    Points,
    Tiny,
    curve,
    make,
    metrics,
    same_bits,
    saved,
    trained,
)

from expbase import main, on, training
from expbase.checkpoint.layout import NonFiniteError
from expbase.config import load_yaml

OPTIONS: dict[str, Any] = {"max_iteration": 13, "valid_interval": 5, "save_interval": 4}
END = "checkpoints/step-00000012"


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

    @on("on_train_batch_end", every=4)
    def count(self) -> None:
        self.noted.append(("fourth", self.epoch, self.iteration))


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


def shorter(experiment: type[Tiny]) -> type[Tiny]:
    """The experiment with epochs of five iterations."""
    return type(experiment.__name__, (experiment,), {"size": 20})


def died_and_continued(experiment: type[Tiny], output: Path) -> Any:
    """A run that fails within the second epoch, after a checkpoint in the first, and goes on."""

    class Dying(shorter(experiment)):  # type: ignore[misc]
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 7 and not died:
                died.append(self.iteration)
                raise RuntimeError("died")

    Dying.__name__ = experiment.__name__
    died: list[int] = []
    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, output, **OPTIONS)
    return trained(Dying, output, **OPTIONS)


def test_a_loop_of_ones_own_is_the_template_s_and_continues_exactly(tmp_path: Path) -> None:
    whole: Any = trained(shorter(Epochs), tmp_path / "whole", **OPTIONS)
    for experiment in (OwnLoop, ByEpochs):
        name = experiment.__name__
        exp = died_and_continued(experiment, tmp_path / name)
        assert exp.noted == whole.noted, name
        assert (exp.epoch, exp.internals.epochs_ended) == (3, 2), name
        for step in ("checkpoints/step-00000008", "checkpoints/step-00000012"):
            same_bits(tmp_path / "whole" / step, tmp_path / name / step)
        for metric in ("train/loss", "valid/accuracy"):
            found, expected = (curve(tmp_path / run, metric) for run in (name, "whole"))
            assert found == expected, name


class Numbered(Points):
    """Their label is their number."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return super().__getitem__(index)[0], np.int64(index)


class Chosen(Tiny):
    """Epoch n has samples of the n-th ten, in batches of 3 + n."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.sampler = WeightedRandomSampler(np.ones(40), 20)
        batches = BatchSampler(sampler=self.sampler, batch_size=4)
        self.train_loader = DataLoader(Numbered(), batch_sampler=batches)
        self.seen = Notes()

    def on_train_epoch_begin(self) -> None:
        self.sampler.weights = np.arange(40) // 10 + 1.0 == self.epoch
        self.train_loader.batch_sampler.batch_size = 3 + self.epoch

    def train_batch(self) -> None:
        points, numbers = self.read_batch()
        self.seen.append((self.epoch, len(numbers), {int(n) // 10 + 1 for n in numbers}))
        loss = F.cross_entropy(self.model(points), numbers % 2)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)


def test_what_on_train_epoch_begin_sets_in_a_sampler_is_of_this_epoch(tmp_path: Path) -> None:
    whole: Any = trained(Chosen, tmp_path / "whole", **OPTIONS)
    first, second, third = [(1, 4, {1})] * 5, [(2, 5, {2})] * 4, [(3, 6, {3})] * 3
    assert whole.seen[:13] == [*first, *second, *third, (3, 2, {3})]
    died_and_continued(Chosen, tmp_path / "parts")
    same_bits(*(tmp_path / run / END for run in ("whole", "parts")))
    assert "not exact" not in (tmp_path / "parts/worker_0.log").read_text()


def test_a_batch_that_on_train_epoch_begin_reads_is_the_first_of_the_epoch(tmp_path: Path) -> None:
    class Greedy(Chosen):
        def on_train_epoch_begin(self) -> None:
            super().on_train_epoch_begin()
            self.seen.append(tuple(self.read_batch()[1].numpy() // 10 + 1))

    exp: Any = trained(Greedy, tmp_path, **{**OPTIONS, "max_iteration": 7})
    of_train_batch = [(1, 4, {1})] * 4, [(2, 5, {2})] * 3
    assert exp.seen == [(1,) * 4, *of_train_batch[0], (2,) * 5, *of_train_batch[1]]


def test_a_sampler_that_the_event_tells_the_epoch_has_it_after_a_resume_too(tmp_path: Path) -> None:
    class Told(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.sampler = DistributedBatchSampler(Points(20), 4, 1, 0, shuffle=True)
            self.train_loader = DataLoader(Points(20), batch_sampler=self.sampler)

        def on_train_epoch_begin(self) -> None:
            self.sampler.set_epoch(self.epoch)

    trained(Told, tmp_path / "whole", **OPTIONS)
    died_and_continued(Told, tmp_path / "parts")
    same_bits(*(tmp_path / run / END for run in ("whole", "parts")))
    assert "not exact" not in (tmp_path / "parts/worker_0.log").read_text()


def test_a_loop_by_epochs_ends_with_them(tmp_path: Path) -> None:
    exp = trained(shorter(ByEpochs), tmp_path, **{**OPTIONS, "max_iteration": 0, "max_epoch": 3})
    assert (exp.iteration, exp.epoch, exp.internals.epochs_ended) == (15, 3, 3)
    assert exp.finished


@pytest.mark.long
def test_the_literal_loop_of_the_seed_counts_epochs_rightly_and_continues_exactly(
    tmp_path: Path,
) -> None:
    whole: Any = trained(shorter(Literal), tmp_path / "whole", **OPTIONS)
    exp = died_and_continued(Literal, tmp_path / "parts")
    assert exp.noted == whole.noted
    begins = [("begin", 1, 0), ("begin", 2, 6), ("begin", 3, 11)]
    assert [note for note in whole.noted if note[0] == "begin"] == begins
    same_bits(tmp_path / "whole" / END, tmp_path / "parts" / END)
    # It never asked whether to go on, so all that can be said is that it returned.
    assert "[13] STOPPED by train() returned" in (tmp_path / "whole/worker_0.log").read_text()


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


def test_a_loop_that_returns_early_is_saved_where_it_left_and_over(tmp_path: Path) -> None:
    class Early(Tiny):
        def train(self) -> None:
            for _ in range(3):
                assert self.going_on()
                self.train_batch()
                self.end_iteration()

        def on_train_end(self) -> None:
            assert not self.going_on()
            self.load_checkpoint("last")

    exp = trained(Early, tmp_path / "run", max_iteration=9, save_interval=4)
    assert exp.iteration == 3
    assert (tmp_path / "run/checkpoints/step-00000003").exists()
    assert "STOPPED by train() returned" in (tmp_path / "run/worker_0.log").read_text()


def test_a_loop_by_hand_needs_no_run(tmp_path: Path) -> None:
    options = {"max_iteration": 6, "save_interval": 100, "valid_interval": 4}
    trained(Tiny, tmp_path / "whole", **options)
    for steps in (2, 9, 1):  # the second time it is continued, the third time it is at its end
        exp = make(Tiny, tmp_path / "own", **{**options, "save_interval": 2})
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


def test_a_stop_ends_after_the_iteration_with_a_checkpoint_and_opens_no_epoch(
    tmp_path: Path,
) -> None:
    class Stopping(ByEpochs):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.stop("enough")

    exp = trained(Stopping, tmp_path / "run", **OPTIONS)
    assert exp.noted == [("begin", 1, 0)]
    assert (exp.iteration, exp.epoch, exp.internals.epochs_ended) == (3, 1, 0)
    assert saved(tmp_path / "run") == [3]
    assert "[3] STOPPED by enough" in (tmp_path / "run/worker_0.log").read_text()


def test_the_last_iteration_is_validated_and_saved_off_the_interval(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=5, keep_last=0)
    assert saved(tmp_path / "run") == [2, 4, 5]
    assert list(curve(tmp_path / "run", "valid/accuracy")) == [3, 5]


def test_an_interval_of_zero_means_never(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", valid_interval=0, save_interval=0, log_interval=0)
    assert saved(tmp_path / "run") == []
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_epochs_count_passes_begun_and_max_epoch_ends_the_run(tmp_path: Path) -> None:
    options = {"max_iteration": 0, "save_interval": 100, "valid_interval": 0}
    exp = trained(Tiny, tmp_path / "run", max_epoch=2, **options)
    assert (exp.iteration, exp.epoch, exp.internals.batch_in_epoch) == (20, 2, 10)
    assert exp.batches_per_epoch == 10


@pytest.mark.parametrize(
    ("size", "training", "total"),
    [
        (38, {"max_epoch": 2, "accumulation_steps": 1}, 20),  # the last batch of an epoch is short
        (40, {"max_epoch": 2, "accumulation_steps": 3}, 7),  # 20 batches; the last update has two
        (40, {"max_epoch": 2, "shares": 4}, 6),  # 12 batches an epoch, two of them again
        (40, {"max_epoch": 2, "max_iteration": 19}, 19),
        (40, {"max_epoch": 2, "max_iteration": 21}, 20),
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
        (40, [(8, 8), (4, 9)], 32),  # 16 samples of the second epoch were left
        pytest.param(33, [(4, 9), (16, 10)], 18, marks=pytest.mark.long),
        pytest.param(40, [(4, 13), (8, 15), (8, 20), (4, 25)], 34, marks=pytest.mark.long),
        pytest.param(40, [(4, 3), (8, 7), (4, 10), (8, 11)], 24, marks=pytest.mark.long),
        pytest.param(33, [(4, 4), (16, 5)], 15, marks=pytest.mark.long),
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


def test_a_pass_that_ends_within_an_update_ends_the_run_there(tmp_path: Path) -> None:
    class Pairs(Tiny):
        size = 20  # five batches a pass

        def train_batch(self) -> None:
            self.read_batch()
            super().train_batch()

    rare = {"valid_interval": 0, "log_interval": 0, "keep_last": 0}
    exp = trained(Pairs, tmp_path / "run", max_iteration=0, max_epoch=1, save_interval=50, **rare)
    assert (exp.iteration, exp.epoch, exp.internals.batch_in_epoch) == (3, 2, 1)
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


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_pending_nan_that_is_allowed_does_not_stop_a_save(tmp_path: Path, policy: str) -> None:
    class Bad(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.log(loss=float("nan"))

    exp = trained(Bad, tmp_path, nonfinite=policy, max_iteration=3, log_interval=3)
    assert (exp.iteration, saved(tmp_path)) == (3, [2, 3])
    is_told = "loss=nan at iteration 3" in (tmp_path / "worker_0.log").read_text()
    assert is_told == (policy == "warn")


def test_epochs_that_are_asked_for_are_trained_although_there_is_a_limit_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_LIMIT", 10)  # of 10 batches an epoch
    options = ["--device", DEVICE, "training.save_interval=0", "training.valid_interval=0"]
    exp = main(Tiny, argv=["--output", str(tmp_path / "two"), *options, "training.max_epoch=2"])
    assert (exp.iteration, exp.internals.epochs_ended, exp.finished) == (20, 2, True)
    exp = main(Tiny, argv=["--output", str(tmp_path / "one"), *options])
    assert (exp.iteration, exp.internals.epochs_ended, exp.finished) == (10, 1, True)
    assert exp.config.training.max_iteration == 10
    assert load_yaml(tmp_path / "one/config.yaml")["training"]["max_iteration"] == 10

    class Late(Tiny):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.config.training.max_epoch = 2

    exp = main(Late, argv=["--output", str(tmp_path / "late"), *options])
    assert (exp.iteration, exp.config.training.max_iteration) == (20, 0)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({}, "training.max_iteration"),  # 6
        ({"max_iteration": 10**6, "max_epoch": 1}, "training.max_epoch"),
        ({"max_iteration": 10, "max_epoch": 1}, "training.max_iteration and training.max_epoch"),
    ],
)
def test_a_run_that_has_finished_names_the_limit_to_raise(
    tmp_path: Path, limits: dict[str, int], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        trained(Tiny, tmp_path, **{"save_interval": 100, "valid_interval": 0, **limits})
    told = f"To train on, raise {named}; --fresh starts over."
    assert told in capsys.readouterr().err
