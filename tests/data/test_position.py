"""The position in the data: reading on, and going on from that of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from driving import (
    Countdown,
    Fragile,
    Lines,
    Noisy,
    RememberingSampler,
    adapted,
    drawn,
    indices,
    loader,
    plain,
    train_iterator,
)
from paddle.io import DataLoader

from expbase.base import rng
from expbase.base.json_values import checksum
from expbase.data.position import DataPosition


def test_the_place_is_restored_within_an_epoch_and_between_two() -> None:
    iterator = train_iterator(loader())
    iterator.open(2)
    iterator.read()
    within = iterator.state_dict()
    rest = [plain(iterator.read()) for _ in range(3)]
    between = iterator.state_dict()
    assert (iterator.epoch, iterator.batch_in_epoch, iterator.needs_epoch) == (2, 4, True)

    resumed = train_iterator(loader())
    assert resumed.load_state_dict(within) == []
    assert (resumed.epoch, resumed.batch_in_epoch, resumed.needs_epoch) == (2, 1, False)
    assert resumed.state_dict() == within
    assert [plain(resumed.read()) for _ in range(3)] == rest
    resumed.open(3)
    assert resumed.load_state_dict(between) == []
    assert (resumed.epoch, resumed.batch_in_epoch, resumed.needs_epoch) == (2, 4, True)
    assert resumed.state_dict() == between


def test_an_epoch_is_resumed_until_a_batch_of_it_is_read() -> None:
    iterator = train_iterator(loader())
    assert not iterator.resumed_within_epoch
    iterator.open(1)
    iterator.read()
    state = iterator.state_dict()
    assert not iterator.resumed_within_epoch
    iterator.load_state_dict(state)
    assert iterator.resumed_within_epoch
    iterator.read()
    assert not iterator.resumed_within_epoch
    iterator.load_state_dict(state)
    iterator.open(2)
    assert not iterator.resumed_within_epoch
    iterator.load_state_dict({**state, "ended": True})
    assert not iterator.resumed_within_epoch


def test_the_place_counts_the_batches_of_all_ranks() -> None:
    pair, three = DataPosition(), DataPosition()
    pair.attach(adapted(loader(batch_size=1), rank=1, world_size=2))
    pair.open(1)
    pair.read(), pair.read()
    state = pair.state_dict()
    assert (state["layout"], state["position"]) == (["shuffled", 10, 1, 0], 4)
    assert state["batches"] == 4
    three.attach(adapted(loader(batch_size=1), rank=0, world_size=3))
    three.load_state_dict(state)
    assert three.batch_in_epoch == 1  # four samples are a batch of each and a part
    assert plain(three.read()) == drawn(adapted(loader(batch_size=1)))[4]


def test_the_batch_before_is_not_the_one_that_the_data_set_fails_at() -> None:
    iterator = train_iterator(DataLoader(Fragile(), batch_size=2))
    iterator.open(1)
    iterator.read(), iterator.read()
    assert iterator.batches.indices == [2, 3]
    with pytest.raises(KeyError):
        iterator.read()
    assert (iterator.batches.indices, iterator.batch_in_epoch) == (None, 3)


def test_a_loader_that_ends_too_early_is_an_error() -> None:
    iterator = train_iterator([1, 2])
    iterator.open(1, 5)
    with pytest.raises(RuntimeError, match=r"self\.train_loader: has no more batches"):
        iterator.read()


# --- loaders with a state of their own ---------------------------------------------------------


class Remembering:
    """A stream that goes on where it was, and counts what it had to read."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[list[float]]:
        while self.at % 6 < 5:
            self.at += 1
            self.read += 1
            yield [self.at, np.random.rand()]
        self.at += 1


@pytest.mark.parametrize(
    "make",
    [Remembering, lambda: DataLoader(Noisy(), batch_sampler=RememberingSampler())],
    ids=["stream", "sampler"],
)
@pytest.mark.parametrize("stop", [1, 5, 8])  # within an epoch, at its end, in the next
def test_a_loader_that_remembers_is_continued_from_its_own_state(make: Any, stop: int) -> None:
    def step(iterator: DataPosition) -> Any:
        if iterator.needs_epoch:
            iterator.open(iterator.epoch + 1)
        return plain(iterator.read())

    whole, resumed = train_iterator(make()), train_iterator(make())
    for _ in range(stop):
        step(whole)
    state = copy.deepcopy(whole.state_dict())
    expected = [step(whole) for _ in range(14 - stop)]
    resumed.load_state_dict(state)
    resumed.load_state_dict(state)  # once more, in the same process
    list(resumed.adapter.once(rng.VALID, 1))
    if make is Remembering:
        resumed.adapter.loader.read = 0
    assert [step(resumed) for _ in range(14 - stop)] == expected
    if make is Remembering:
        assert resumed.adapter.loader.read <= 14 - stop + 1


# --- another order than before -----------------------------------------------------------------


class Shuffled:
    """A stream whose passes move its attributes."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor
        self.files = [*range(8)]
        self.same_files = self.files  # another name of it
        self.order = np.arange(4)
        self.random = np.random.RandomState(3)
        self.passes = 0

    def __iter__(self) -> Iterator[list[float]]:
        self.passes += 1
        self.place = self.passes  # setup has not made it
        np.random.shuffle(self.files)
        self.random.shuffle(self.order)
        for n in self.files:
            yield [n * self.factor, self.order[n % 4], self.passes, self.place, self.random.rand()]


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_stream_is_replayed_from_what_it_was_when_its_pass_began(epoch: int) -> None:
    whole, resumed = train_iterator(Shuffled()), train_iterator(Shuffled())
    for number in range(1, epoch + 1):
        whole.open(number)
        for _ in range(3 if number == epoch else 8):
            whole.read()
    state = copy.deepcopy(whole.state_dict())
    assert resumed.load_state_dict(state) == []
    assert resumed.adapter.loader.same_files is resumed.adapter.loader.files
    assert [plain(resumed.read()) for _ in range(5)] == [plain(whole.read()) for _ in range(5)]
    # The same from the state of the start that went on.
    again = train_iterator(Shuffled())
    assert again.load_state_dict(copy.deepcopy(state)) == []
    assert checksum(again.state_dict()) == checksum(state)
    (reason,) = train_iterator(Shuffled(factor=2)).load_state_dict(state)
    assert reason.startswith(
        "self.train_loader: replayed up to the position, and the last batch is"
    )


class Changing:
    """A stream with attributes that no checkpoint holds, or that nobody can put back in place."""

    def __init__(self) -> None:
        self.readers: list[Any] = [None, None]
        self.nested = [[0, 0], [1, 0]]
        self.generator = paddle.framework.core.Generator()
        self.fixed = np.arange(4)
        self.fixed.setflags(write=False)
        self.random: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.random = self.random or np.random.default_rng(3)
        self.fixed = self.random.permutation(4)
        self.fixed.setflags(write=False)
        self.readers[1] = self
        for n in range(8):
            yield [int(self.fixed[n % 4]), self.random.random()]


def test_of_a_stream_that_holds_anything_what_can_be_put_back_is() -> None:
    whole = train_iterator(Changing())
    for number in range(1, 3):
        whole.open(number)
        for _ in range(8 if number == 1 else 3):
            whole.read()
    state = whole.state_dict()
    assert "loader.readers" not in state["loader"]["attributes"]
    expected = [plain(whole.read()) for _ in range(5)]
    for _ in range(2):  # twice from one state: nothing of it has moved
        resumed = train_iterator(Changing())
        assert resumed.load_state_dict(state) == []
        assert [plain(resumed.read()) for _ in range(5)] == expected


class Batched:
    """A stream of tensors, by name."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for n in range(5):
            yield {"x": paddle.full([2], n, "float32"), "y": paddle.full([2], n + 0.5)}


def test_a_batch_that_training_changes_is_no_other_one() -> None:
    def told(change: Callable[[Any], object]) -> list[str]:
        iterator = train_iterator(Batched())
        iterator.open(1)
        change(iterator.read())
        return train_iterator(Batched()).load_state_dict(iterator.state_dict())

    assert told(lambda batch: batch.pop("y")) == []
    (line,) = told(lambda batch: batch["x"].scale_(2.0))  # what it was nobody knows
    assert "exact only if it returns the same batches" in line


def test_an_epoch_that_was_begun_and_not_opened_is_begun_in_the_next_start() -> None:
    for make in Shuffled, lambda: loader():
        whole, resumed = train_iterator(make()), train_iterator(make())
        whole.open(1)
        while not whole.needs_epoch:
            whole.read()
        whole.begin(2)
        state = copy.deepcopy(whole.state_dict())
        if make is Shuffled:  # as the values of a checkpoint do
            loader_then = copy.deepcopy(vars(whole.adapter.loader))
        assert resumed.load_state_dict(state) == []
        if make is Shuffled:
            vars(resumed.adapter.loader).update(loader_then)
        assert (resumed.epoch, resumed.needs_epoch) == (2, False)
        assert [plain(resumed.read()) for _ in range(3)] == [plain(whole.read()) for _ in range(3)]


def test_a_stream_that_has_become_shorter_ends_its_epoch() -> None:
    class Short:
        def __init__(self, size: int) -> None:
            self.size = size

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([n] for n in range(self.size))

    iterator = train_iterator(Short(8))
    iterator.open(1)
    for _ in range(5):
        iterator.read()
    resumed = train_iterator(Short(5))
    resumed.load_state_dict(iterator.state_dict())
    assert (resumed.needs_epoch, resumed.resumed_within_epoch) == (True, False)


def test_what_a_forged_state_puts_into_a_stream_are_attributes_alone() -> None:
    iterator = train_iterator(Shuffled())
    iterator.open(1)
    iterator.read()
    state = iterator.state_dict()
    forged = {"loader.__class__": "x", "loader.__dict__": [], "other.name": 1}
    for begun in forged, [1], "x":
        state["loader"]["attributes"] = begun
        again = train_iterator(Shuffled())
        again.load_state_dict(state)
        assert type(again.adapter.loader) is Shuffled
        assert again.adapter.loader.passes == 1


def test_reasons_why_continuing_is_not_exact_are_returned() -> None:
    iterator = train_iterator(Countdown())
    iterator.open(1)
    iterator.read()
    state = iterator.state_dict()
    assert iterator.load_state_dict(state) == []
    for of_before in {}, {"last": None}:
        state["loader"] = of_before
        (replayed,) = iterator.load_state_dict(state)
        assert replayed == (
            "self.train_loader: replayed up to the position: exact only if it returns the same "
            "batches"
        )
    state = train_iterator(loader()).state_dict()
    (sizes,) = train_iterator(loader(batch_size=5)).load_state_dict(state)
    assert sizes == (
        "self.train_loader: 10 samples, shuffled, in batches of 3 there, 10 samples, "
        "shuffled, in batches of 5 now: the next epoch is the first one of the new size"
    )


def continued(before: Any, after: Any, batches: int = 2) -> tuple[DataPosition, list[str]]:
    """A place in the second loader, where some batches of the first were read; and the reasons."""
    iterator = train_iterator(before)
    iterator.open(1)
    for _ in range(batches):
        iterator.read()
    resumed = train_iterator(after)
    return resumed, resumed.load_state_dict(copy.deepcopy(iterator.state_dict()))


def sized(size: int, **options: Any) -> DataLoader:
    return DataLoader(Noisy(size), **{"batch_size": 3, "shuffle": True, **options})


def rest(iterator: DataPosition) -> list[int]:
    seen: list[int] = []
    while not iterator.needs_epoch:
        seen += plain(iterator.read())[0]
    return seen


def test_other_sizes_go_on_with_the_samples_that_the_epoch_has_not_had() -> None:
    had = indices(drawn(adapted(sized(20))))[:6]
    larger, (reason,) = continued(sized(20), sized(20, batch_size=5))
    assert reason == (
        "self.train_loader: 20 samples, shuffled, in batches of 3 there, 20 samples, "
        "shuffled, in batches of 5 now: the epoch goes on with the samples that it has "
        "not had"
    )
    assert larger.batch_in_epoch == 1  # six samples, in batches of five
    assert sorted(had + rest(larger)) == list(range(20))
    assert larger.batch_in_epoch == 4


def own_order(size: int) -> DataLoader:
    return DataLoader(Noisy(size), batch_sampler=[[i] for i in range(size)])


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        (
            sized(20),
            sized(24),
            ["20 samples, shuffled, in", "24 samples, shuffled, in"],
        ),
        (sized(20), sized(20, shuffle=False), ["20 samples, shuffled", "20 samples, in order"]),
        (own_order(10), own_order(8), ["10 samples, own", "8 samples, own"]),
        (
            DataLoader(Lines(20), batch_size=3),
            DataLoader(Lines(20), batch_size=3, num_workers=1),
            ["? samples, a stream, in batches", "? samples, a stream of 1 workers, in batches"],
        ),
    ],
)
def test_another_order_in_the_middle_of_an_epoch_is_refused_or_ends_it(
    before: Any, after: Any, texts: list[str]
) -> None:
    iterator = train_iterator(before)
    iterator.open(1)
    iterator.read()
    state = copy.deepcopy(iterator.state_dict())
    resumed = train_iterator(after)
    (problem,) = resumed.problems(state)
    assert all(text in problem for text in texts)
    assert "in the middle of epoch 1; expected the same order, or --force" in problem
    resumed.leaves_epochs = True
    assert resumed.problems(state) == []
    assert resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.needs_epoch, resumed.resumed_within_epoch) == (1, True, False)
    resumed.open(2)
    assert rest(resumed)
    assert train_iterator(after).problems({**state, "ended": True}) == []


def test_a_place_behind_the_new_end_is_the_end_of_the_epoch() -> None:
    for before, after in [
        (DataLoader(Lines(20), batch_size=3), DataLoader(Lines(5), batch_size=3)),
        (list(range(8)), [1]),
    ]:
        resumed, _ = continued(before, after)
        assert resumed.needs_epoch
        resumed.open(2)
        assert not resumed.needs_epoch


def test_a_stream_goes_on_at_the_next_sample_or_says_that_it_cannot() -> None:
    def lines(size: int, workers: int = 0) -> DataLoader:
        return DataLoader(Lines(20), batch_size=size, num_workers=workers)

    resumed, (reason,) = continued(lines(3), lines(4))
    assert "the epoch goes on with the samples that it has not had" in reason
    assert [index for index, _ in plain(resumed.read())] == [6, 7, 8, 9]
    resumed, (reason,) = continued(lines(3, 1), lines(4, 1))
    assert "which ones they were is unknown" in reason


def test_a_shuffled_order_of_another_seed_is_told() -> None:
    before, after = train_iterator(sized(20)), DataPosition()
    before.open(1)
    before.read()
    after.attach(adapted(sized(20), seed=4))
    (reason,) = after.load_state_dict(before.state_dict())
    assert "another order of this epoch than before" in reason


def test_an_own_order_that_is_cut_otherwise_is_that_of_the_checkpoint_until_its_end() -> None:
    assert continued(own_order(10), own_order(10))[1] == []
    threes = DataLoader(Noisy(10), batch_sampler=[[i, i + 1, i + 2] for i in (0, 3, 6)])
    resumed, reasons = continued(own_order(10), threes)
    assert (plain(resumed.read())[0], reasons) == ([2], [])
    resumed.open(2)
    assert plain(resumed.read())[0] == [0, 1, 2]
