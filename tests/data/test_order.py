"""What a loader's sampler gives: which samples, in which order, from any position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from driving import Endless, Noisy, RememberingSampler, adapted, drawn, indices, loader, plain
from paddle.io import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from tiny import DEVICE

from expbase.base import rng
from expbase.data.loaders import Shard, adapt_loader
from expbase.data.position import DataPosition


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    np.random.seed(1)
    first = drawn(adapted(loader()))
    np.random.seed(2)
    paddle.rand([5])
    assert drawn(adapted(loader())) == first
    assert indices(drawn(adapted(loader()), epoch=2)) != indices(first)
    assert indices(drawn(adapted(loader(), seed=4))) != indices(first)
    assert sorted(indices(first)) == list(range(10))


@pytest.mark.device
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_sampler_may_draw_from_paddle(is_listed: bool) -> None:
    class Endless(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            while True:
                yield paddle.randint(0, 10, [4]).tolist()

        def __len__(self) -> int:
            raise TypeError("no end")

    def order(epoch: int) -> list[Any]:
        paddle.rand([epoch])  # a device's generator is another one than the CPU's
        sampler = SubsetRandomSampler(range(10))
        listed = BatchSampler(sampler=sampler, batch_size=4)
        chosen = listed if is_listed else Endless(sampler=sampler)
        adapter = adapted(DataLoader(Noisy(), batch_sampler=chosen))
        return [batch.indices for batch in itertools.islice(adapter._order.batches(epoch), 3)]

    paddle.set_device(DEVICE)
    assert order(1) == order(1)
    assert order(2) != order(1)


def test_batches_hold_the_samples_that_paddles_own_loader_takes() -> None:
    for drop_last in (False, True):
        both = DataLoader(Noisy(), batch_size=3, drop_last=drop_last)
        ours = [batch[0] for batch in drawn(adapted(both))]
        assert ours == [batch[0].tolist() for batch in both], drop_last


def test_what_was_trained_on_is_not_loaded_again() -> None:
    skipping = loader()
    drawn(adapted(skipping), position=9)
    assert len(skipping.dataset.made) == 1


def test_an_order_in_sequence_is_not_listed() -> None:
    class Endless(Dataset):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 1 << 60

    adapter = adapted(DataLoader(Endless(), batch_size=2))
    middle = adapter.open(1, 1 << 59)
    assert next(middle).tolist() == [1 << 59, (1 << 59) + 1]
    assert middle.indices == [1 << 59, (1 << 59) + 1]
    assert next(adapter.once(rng.VALID, 1)).tolist() == [0, 1]


# --- samplers of one's own ---------------------------------------------------------------------


def test_an_endless_sampler_is_continued_from_any_position() -> None:
    def take(position: int, count: int, workers: int = 0) -> list[Any]:
        endless = DataLoader(Noisy(), batch_sampler=Endless(), num_workers=workers)
        batches = adapted(endless).open(1, position)
        taken = [plain(batch) for batch in itertools.islice(batches, count)]
        batches.close()
        return taken

    assert take(0, 7)[4:] == take(12, 3) == take(12, 3, workers=2)


def test_validation_takes_a_sampler_that_fails_to_tell_its_length() -> None:
    sampler = BatchSampler(sampler=WeightedRandomSampler([0.1] * 10, 8), batch_size=3)
    weighted = adapted(DataLoader(Noisy(), batch_sampler=sampler))
    assert [len(batch[0]) for batch in weighted.once(rng.VALID, 1)] == [3, 3, 2]


class Seeking:
    """A sampler of samples that can be asked to start anywhere."""

    def __init__(self) -> None:
        self.start = 0
        self.epochs: list[int] = []

    def seek(self, position: int) -> None:
        self.start = position

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 10))

    def __len__(self) -> int:
        return 10


def test_a_sampler_with_seek_is_asked_and_one_with_set_epoch_is_told() -> None:
    sampler = Seeking()
    seeking = DataLoader(Noisy(), batch_sampler=BatchSampler(sampler=sampler, batch_size=3))
    assert indices(drawn(adapted(seeking), epoch=4, position=6)) == [6, 7, 8, 9]
    assert sampler.start == 6
    assert set(sampler.epochs) == {4}


def test_an_order_that_a_sampler_draws_itself_is_continued_or_told() -> None:
    class Own(BatchSampler):
        def __init__(self, draws: int) -> None:
            super().__init__(Noisy(), batch_size=4)
            self.generator = np.random.RandomState(3)
            self.generator.randn(draws)

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.generator.permutation(len(Noisy()) // 4 * 4).reshape([-1, 4]).tolist())

    def iterator(draws: int) -> DataPosition:
        made = DataPosition()
        made.attach(adapt_loader(DataLoader(Noisy(), batch_sampler=Own(draws)), "self.l", Shard(0)))
        return made

    first = iterator(draws=0)
    first.open(1)
    first.read()
    state = first.state_dict()
    again = iterator(draws=1)
    assert again.load_state_dict(state) == []
    assert plain(again.read()) == plain(first.read())
    state["loader"].pop("listing")  # more than a checkpoint holds
    assert iterator(draws=0).load_state_dict(state) == []
    (reason,) = iterator(draws=1).load_state_dict(state)
    assert reason.startswith("self.l: its sampler gives another order of this epoch than before")


def test_an_order_of_paddles_distributed_sampler_is_in_the_checkpoint_if_a_subclass_decides() -> (
    None
):
    class Same(DistributedBatchSampler):
        pass

    class Other(DistributedBatchSampler):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch + 100)

    held = {}
    for kind in (DistributedBatchSampler, Same, Other):
        adapter = adapted(DataLoader(Noisy(), batch_sampler=kind(Noisy(), 4, 1, 0, shuffle=True)))
        adapter.open(1)
        held[kind] = [*adapter.state_dict()]
    assert [*held.values()] == [[], [], ["listing"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_filling_and_validating_leave_a_samplers_state_alone(rank: int) -> None:
    def orders(validate: bool) -> list[Any]:
        remembering = DataLoader(Noisy(), batch_sampler=RememberingSampler())
        training = adapted(remembering, rank, 2)  # five batches: the last round is filled
        seen = []
        for epoch in (1, 2, 3):
            seen.append(indices(drawn(training, epoch)))
            if validate:
                list(training.once(rng.VALID, epoch))
        return seen

    plain_orders = orders(validate=False)
    assert orders(validate=True) == plain_orders
    assert plain_orders[0] != plain_orders[1] != plain_orders[2]
