"""training.skip_updates: whose batches are left out, and that nothing else moves."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import (
    DEVICE,
    TESTS,
    Helped,
    Notes,
    Tiny,
    curve,
    ledger,
    metrics,
    run_script,
    same_bits,
    saved,
    trained,
)

from expbase.data.skipped_updates import Skips
from expbase.extras.all_events import AllEvents

sys.path.insert(0, str(TESTS / "proofs"))

from compare import differences

# Ten batches an epoch.
RARE = {"valid_interval": 0, "save_interval": 4, "keep_last": 0}


def slot_of(update: int, numbers: set[int]) -> int:
    """The slot that an update uses, counted among those that are not left out."""
    free = (slot for slot in range(1, 1000) if slot not in numbers)
    return [next(free) for _ in range(update)][-1]


def read_by(skips: Skips, updates: range, place: int) -> tuple[list[int], int]:
    """What these updates use, if so many slots were read before them, and how many were after."""
    used = []
    for update in updates:
        slots = skips.before(update)
        assert slots == [*range(place + 1, place + 1 + len(slots))]
        skips.note(slots)
        place += len(slots) + 1
        assert skips.before(update) == []  # of a second batch of the update
        used.append(place)
    return used, place


def test_an_update_uses_the_next_slot_that_is_not_left_out_whenever_a_number_was_given() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        first, later = ({draw.randint(1, 30) for _ in range(draw.randint(0, 12))} for _ in range(2))
        before = Skips(first)
        middle = draw.randint(0, 12)
        used, place = read_by(before, range(1, middle + 1), 0)
        assert used == [slot_of(update, first) for update in range(1, middle + 1)], seed

        # Continued, with other numbers: those that are behind have no effect, given or taken away.
        after = Skips(later)
        after.done = [*before.done]
        too_late, gone = after.go_on(middle)
        assert too_late == sorted(n for n in later - first if n <= place), seed
        assert gone == sorted(n for n in first - later if n <= place), seed
        what_holds = {n for n in first if n <= place} | {n for n in later if n > place}
        assert after.numbers == what_holds, seed
        used, _ = read_by(after, range(middle + 1, 25), place)
        assert used == [slot_of(update, what_holds) for update in range(middle + 1, 25)], seed
        assert len(after.to_come) == len({n for n in what_holds if n > used[-1]}), seed


# --- runs ---------------------------------------------------------------------------------------


class Reading(AllEvents, Helped):
    """Notes the epoch and the samples of each batch that train_batch got."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.noted = Notes()

    def on_batch_read(self, batch: Any, indices: Any) -> None:
        self.noted.append((self.iteration, self.epoch, tuple(indices)))

    def batches(self) -> list[Any]:
        return [rest for _, *rest in self.noted]


def both(
    tmp_path: Path, experiment: type[Tiny], numbers: list[int], middle: int, **training: Any
) -> tuple[Any, Any]:
    """A run that had the numbers from the start, and one that got them in its middle; the same."""
    training = {**RARE, **training}
    whole = trained(experiment, tmp_path / "whole", skip_updates=numbers, **training)
    trained(experiment, tmp_path / "parts", **{**training, "max_iteration": middle})
    parts = trained(experiment, tmp_path / "parts", skip_updates=numbers, **training)
    end = f"checkpoints/step-{whole.iteration:08d}"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)
    losses = [curve(tmp_path / name, "train/loss") for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert "not exact" not in (tmp_path / "parts/worker_0.log").read_text()
    return whole, parts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The batches that runs of no shares and of four read if nothing is left out."""
    folder = tmp_path_factory.mktemp("plain")
    ends = {0: 20, 4: 5}
    return {
        shares: trained(  # type: ignore[attr-defined]
            Reading, folder / str(shares), **{**RARE, "max_iteration": end, "shares": shares}
        ).batches()
        for shares, end in ends.items()
    }


@pytest.mark.parametrize(
    ("numbers", "middle", "training", "left_out"),
    [
        # The batches of one epoch are 0 to 9, of the next 10 to 19.
        ([9, 7, 7, 8], 4, {"max_iteration": 9}, [6, 7, 8]),
        # Over its end, after a checkpoint; the first one of the next epoch, between two.
        pytest.param([10, 11, 12], 9, {"max_iteration": 12}, [9, 10, 11], marks=pytest.mark.long),
        pytest.param([11], 10, {"max_iteration": 12}, [10], marks=pytest.mark.long),
        ([2, 4], 1, {"accumulation_steps": 4, "max_iteration": 3}, [4, 5, 6, 7, 12, 13, 14, 15]),
        # Shares: an epoch of ten batches ends with its first two again.
        pytest.param(
            [3], 2, {"shares": 4, "max_iteration": 4}, [8, 9, 10, 11], marks=pytest.mark.long
        ),
    ],
)
def test_what_is_left_out_later_was_never_there_to_the_bit(
    tmp_path: Path,
    plain: dict[int, list[Any]],
    numbers: list[int],
    middle: int,
    training: dict[str, int],
    left_out: list[int],
) -> None:
    whole, _ = both(tmp_path, Reading, numbers, middle, **training)
    of_each = training.get("shares") or training.get("accumulation_steps", 1)
    all_batches = plain[training.get("shares", 0)]
    count = of_each * training["max_iteration"]
    assert whole.batches() == [b for n, b in enumerate(all_batches) if n not in left_out][:count]
    assert len(whole.noted) == count
    # Each update has its own number of batches, and the random numbers of its own.
    assert [iteration for iteration, *_ in whole.noted] == [
        iteration for iteration in range(1, whole.iteration + 1) for _ in range(of_each)
    ]


def test_an_update_draws_what_it_draws_if_nothing_is_left_out(tmp_path: Path) -> None:
    class Drawing(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            self.noted = Notes()

        def train_batch(self) -> None:
            for _ in self.micro_batches():
                self.noted.append(np.random.rand())

    few = {**RARE, "max_iteration": 4, "accumulation_steps": 2}
    one, other = (
        trained(Drawing, tmp_path / str(numbers), skip_updates=numbers, **few).noted
        for numbers in ([], [2])
    )
    assert one == other


def test_epochs_begin_and_end_among_batches_that_are_left_out(tmp_path: Path) -> None:
    class Epochs(Tiny):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.noted = Notes()

        def on_train_epoch_begin(self) -> None:
            self.noted.append(("begin", self.epoch, self.iteration))

        def on_train_epoch_end(self) -> None:
            self.noted.append(("end", self.epoch, self.iteration))

    numbers = [*range(10, 32)]
    few = {**RARE, "save_interval": 0, "save_every_epoch": 1, "max_iteration": 12}
    exp: Any = trained(Epochs, tmp_path / "run", skip_updates=numbers, **few)
    assert (exp.epoch, exp.internals.batch_in_epoch) == (4, 4)
    assert exp.noted == [
        ("begin", 1, 0), ("end", 1, 10), ("begin", 2, 10), ("end", 2, 10), ("begin", 3, 10),
        ("end", 3, 10), ("begin", 4, 10),
    ]  # fmt: skip
    assert saved(tmp_path / "run") == [10, 12]
    seconds = [line["epoch"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert seconds == [1] * 9 + [4] * 3


@pytest.mark.long
def test_workers_read_past_what_is_read_past_without_them(tmp_path: Path) -> None:
    class Worked(Helped):
        loader_options = {"num_workers": 2}  # noqa: RUF012

    outputs = tmp_path / "none", tmp_path / "two"
    for experiment, output in zip((Helped, Worked), outputs, strict=True):
        trained(experiment, output, skip_updates=[3, 10], max_iteration=12, **RARE)
    same_bits(*(output / "checkpoints/step-00000012" for output in outputs))


def test_a_stream_is_read_past_too(tmp_path: Path) -> None:
    class Stream(Helped):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = [*self.train_loader]

    both(tmp_path, Stream, [6, 10], 4, max_iteration=12)


def test_a_number_that_comes_too_late_is_told_and_moves_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few = {**RARE, "save_interval": 2}
    whole: Any = trained(Reading, tmp_path / "whole", skip_updates=[3, 8], max_iteration=9, **few)
    trained(Reading, tmp_path / "run", skip_updates=[3], max_iteration=5, **few)
    capfd.readouterr()
    exp: Any = trained(Reading, tmp_path / "run", skip_updates=[2, 6, 8], max_iteration=9, **few)
    said = capfd.readouterr().err
    text = (
        "training.skip_updates: [2, 6] given, and the run goes on from iteration 5, which has used "
        "their batches: they have no effect. To leave them out, continue from a checkpoint before "
        "them: --checkpoint_path RUN/N with another --output, or --fresh."
    )
    assert said.count(text) == 1
    text = "training.skip_updates: lacks [3], which the run has left out; they stay so"
    assert said.count(text) == 1
    assert said.count("[7] training.skip_updates: left out the batches of [8]") == 1
    assert exp.batches() == whole.batches()[5:]
    end = "checkpoints/step-00000009"
    same_bits(tmp_path / "whole" / end, tmp_path / "run" / end)

    # The way that is named: another output, from a checkpoint before.
    path = {"checkpoint_path": str(tmp_path / "run/checkpoints/step-00000004")}
    capfd.readouterr()
    trained(Reading, tmp_path / "other", path, skip_updates=[3, 8], max_iteration=9, **few)
    assert "no effect" not in capfd.readouterr().err
    same_bits(tmp_path / "whole" / end, tmp_path / "other" / end)


def test_a_number_that_was_in_time_is_not_told_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for end in (4, 6, 8):
        trained(Reading, tmp_path / "run", skip_updates=[3, 6], max_iteration=end, **RARE)
    said = capfd.readouterr().err
    assert "no effect" not in said
    assert "skip_updates: lacks" not in said
    assert said.count("left out the batches of") == 2


@pytest.mark.long
def test_the_end_by_epochs_comes_earlier_and_a_schedule_stays_as_long(tmp_path: Path) -> None:
    class Planned(Tiny):
        size = 12  # three batches an epoch

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.planned = Notes()

        def on_train_batch_end(self) -> None:
            self.planned.append(self.total_iterations)

    by_epochs = {**RARE, "max_iteration": 0, "max_epoch": 2}
    for numbers, end in (([2, 4], 4), ([6], 6), ([5, 6], 5), ([7], 6)):
        output = tmp_path / str(end) / str(numbers)
        exp: Any = trained(Planned, output, skip_updates=numbers, **by_epochs)
        assert exp.iteration == end
        assert {*exp.planned} == {6}
        log = (output / "worker_0.log").read_text()
        assert f"end         by training.max_epoch (2 epochs, {end} updates)" in log
        assert f"config      training.skip_updates={numbers}" in log
        assert metrics(output)[-1]["speed/seconds_left"] == 0

    both_limits = {**by_epochs, "max_iteration": 6}
    for _ in range(2):
        trained(Planned, tmp_path / "run", skip_updates=[3], **both_limits)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "FINISHED already: iteration 5, epoch 2. To train on, raise training.max_epoch;" in log


def test_what_is_left_out_is_in_the_records_and_no_speed(tmp_path: Path) -> None:
    class Logged(Tiny):
        def on_log(self, metrics: dict[str, float]) -> None:
            rates = (metrics[f"speed/{of}_per_second"] for of in ("samples", "steps"))
            self.samples_of_update = next(rates) / next(rates)

    exp: Any = trained(Logged, tmp_path / "run", skip_updates=[4], max_iteration=4, **RARE)
    (start,) = [record for record in ledger(tmp_path / "run") if record["event"] == "start"]
    assert start["config"]["training.skip_updates"] == [4]
    path = tmp_path / "run/checkpoints/step-00000004"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["info"]["config"]["training.skip_updates"] == [4]
    assert exp.internals.batch_in_epoch == 5
    assert exp.samples_of_update == pytest.approx(4)


# With shares the bits are those of one process.
@pytest.mark.parametrize("shares", [pytest.param(0, marks=pytest.mark.long), 4])
@pytest.mark.long
def test_the_ranks_leave_out_the_same(tmp_path: Path, shares: int) -> None:
    words = [f"training.{key}={number}" for key, number in {**RARE, "log_interval": 1}.items()]
    words += [f"training.shares={shares}", "--device", DEVICE]
    script = TESTS.parent / "experiments/line/train.py"
    if shares:  # without them each rank would draw other numbers for its weights
        script = TESTS / "proofs/many.py"
        words += ["data.net=classifier"]
    numbers = "training.skip_updates=[4, 6]"
    starts = [("whole", 1 if shares else 2, 6, [numbers]), ("parts", 2, 6, [numbers])]
    if not shares:
        starts.insert(1, ("parts", 2, 2, []))
    for name, ranks, end, more in starts:
        given = ["--output", str(tmp_path / name), *words, f"training.max_iteration={end}", *more]
        result = run_script(script, *given, "--nprocs", str(ranks))
        assert result.returncode == 0, result.stderr
    assert differences(tmp_path / "parts", tmp_path / "whole") == []
