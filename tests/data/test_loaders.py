"""Driving loaders: each rank's share of the batches, streams, and what cannot be driven."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driving import (
    Countdown,
    Endless,
    Lines,
    Noisy,
    adapted,
    drawn,
    indices,
    loader,
    plain,
    train_iterator,
)
from paddle.io import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    WeightedRandomSampler,
)

from expbase.base import rng
from expbase.data import loaders
from expbase.data.loaders import LoaderAdapter
from expbase.data.position import DataPosition


def test_indices_are_told_with_each_batch() -> None:
    batches = adapted(loader(shuffle=False)).open(1)
    assert batches.indices is None
    next(batches)
    assert (batches.indices, batches.ended) == ([0, 1, 2], False)


# --- shards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "filled"), [(2, 0), (3, 2), (5, 1), (7, 3)])
def test_batches_are_dealt_out_and_the_last_round_is_filled(world_size: int, filled: int) -> None:
    whole = drawn(adapted(loader()))
    adapters = [adapted(loader(), rank, world_size) for rank in range(world_size)]
    shares = [drawn(one) for one in adapters]
    rounds = -(-len(whole) // world_size)
    assert [len(share) for share in shares] == [rounds] * world_size
    dealt = [shares[i % world_size][i // world_size] for i in range(rounds * world_size)]
    assert dealt == list(itertools.islice(itertools.cycle(whole), rounds * world_size))
    assert (adapters[0].filled, adapters[0].batches_per_epoch) == (filled, rounds)


def test_another_number_of_ranks_continues_the_same_order() -> None:
    whole = drawn(adapted(loader(batch_size=1)))
    taken = whole[:4]  # two rounds of two ranks
    for world_size in (1, 3):
        shares = [
            drawn(adapted(loader(batch_size=1), rank, world_size), position=4)
            for rank in range(world_size)
        ]
        rest = [batch for round_ in zip(*shares, strict=True) for batch in round_]
        assert (taken + rest)[:10] == whole


def test_a_distributed_sampler_is_driven_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int) -> DataLoader:
        sampler = DistributedBatchSampler(Noisy(), 2, num_replicas=2, rank=rank, shuffle=True)
        return DataLoader(Noisy(), batch_sampler=sampler)

    sampler = make(1).batch_sampler
    sampler.set_epoch(3)
    expected = [index for batch in sampler for index in batch]
    one = adapted_together(monkeypatch, make)[1]
    part = drawn(one, epoch=3)
    assert indices(part) == expected
    assert drawn(one, epoch=3, position=8) == part[2:]


@pytest.mark.parametrize("size", [1, 4, 10])
@pytest.mark.parametrize("distributed", [False, True])
def test_evaluation_gives_every_sample_once_over_the_ranks(size: int, distributed: bool) -> None:
    def make(rank: int) -> DataLoader:
        if not distributed:
            return DataLoader(Noisy(size), batch_size=3)
        sampler = DistributedBatchSampler(Noisy(size), 3, num_replicas=3, rank=rank)
        return DataLoader(Noisy(size), batch_sampler=sampler)

    seen = [plain(b) for rank in range(3) for b in adapted(make(rank), rank, 3).once(rng.VALID, 1)]
    assert sorted(indices(seen)) == list(range(size))


# --- samplers that shard by themselves ---------------------------------------------------------


class Together(BaseException):
    """A rank waits for the others."""


def adapted_together(
    monkeypatch: pytest.MonkeyPatch, make: Any, world_size: int = 2
) -> list[LoaderAdapter]:
    """The adapters of all ranks, which compare their samplers, in one process."""
    collectives: list[list[Any]] = []
    while True:
        adapters, waiting = [], []
        for rank in range(world_size):
            done = iter(collectives)

            def gather(value: Any, done: Any = done, waiting: list[Any] = waiting) -> Any:
                for values in done:
                    return values
                waiting.append(value)
                raise Together

            monkeypatch.setattr(loaders, "all_gather_object", gather)
            with contextlib.suppress(Together):
                adapters.append(adapted(make(rank), rank, world_size))
        if not waiting:
            return adapters
        assert len(waiting) == world_size
        collectives.append(waiting)


class EveryNth(BatchSampler):
    """Paddle's idiom: each rank takes every nranks-th batch; len() forgets it."""

    def __init__(self, dataset: Dataset, rank: int, world_size: int = 2) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), self.rank, None, self.world_size)


class Part:
    """A sampler of samples that shards, endlessly or not, padded to full batches of two."""

    def __init__(self, rank: int, size: int = 9, endless: bool = False) -> None:
        self.own = range(rank, size + -size % 4, 2)
        self.size, self.endless = size, endless

    def __iter__(self) -> Iterator[int]:
        own = (index % self.size for index in self.own)
        return itertools.cycle(own) if self.endless else own


SHARDING = {
    "every nth batch": lambda rank: EveryNth(Noisy(16), rank),
    "every nth sample": lambda rank: BatchSampler(sampler=Part(rank), batch_size=2),
    "endless": lambda rank: BatchSampler(sampler=Part(rank, endless=True), batch_size=2),
    "of paddle": lambda rank: DistributedBatchSampler(Noisy(9), 2, 2, rank),
    "more than is looked at": lambda rank: BatchSampler(
        sampler=[0, *range(1 + rank, 10**4, 2)], batch_size=9
    ),
}


@pytest.mark.parametrize("make", SHARDING.values(), ids=SHARDING)
def test_a_sampler_that_shards_by_rank_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    both = adapted_together(
        monkeypatch, lambda rank: DataLoader(Noisy(9), batch_sampler=make(rank))
    )
    assert [adapter.sharding for adapter in both] == ["sharded by its sampler"] * 2


def test_of_a_sampler_that_shards_every_sample_is_seen_in_training_and_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = adapted_together(
        monkeypatch, lambda rank: DataLoader(Noisy(16), batch_sampler=EveryNth(Noisy(16), rank))
    )
    shares = [indices(drawn(adapter)) for adapter in both]
    assert sorted(shares[0] + shares[1]) == list(range(16))
    assert [adapter.batches_per_epoch for adapter in both] == [4, 4]
    assert [indices(drawn(adapter, position=8)) for adapter in both] == [s[4:] for s in shares]
    seen = [indices([plain(b) for b in adapter.once(rng.VALID, 1)]) for adapter in both]
    assert sorted(seen[0] + seen[1]) == list(range(16))
    iterator = DataPosition()
    iterator.attach(both[0])
    iterator.open(1)
    iterator.read()
    sampler = EveryNth(Noisy(16), 0, world_size=1)
    (reason,) = train_iterator(DataLoader(Noisy(16), batch_sampler=sampler)).load_state_dict(
        iterator.state_dict()
    )
    assert "of 2, world size 2 there" in reason
    assert "goes on behind 4 samples, but which ones they were is unknown" in reason


class Seeded:
    """A sampler that draws from a generator of its own."""

    def __init__(self, seed: int, length: int | None) -> None:
        self.generator, self.length = np.random.RandomState(seed), length

    def __iter__(self) -> Iterator[list[int]]:
        for _ in itertools.count() if self.length is None else range(self.length):
            yield self.generator.randint(0, 16, 2).tolist()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("endless")
        return self.length


class Generating(Seeded):
    """One whose generator is part of its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


SHARED = {
    "seeded equally": lambda rank: Seeded(3, 8),
    "drawn from numpy": lambda rank: Endless(),
    "weighted": lambda rank: BatchSampler(
        sampler=WeightedRandomSampler([0.1] * 10, 8), batch_size=3
    ),
    "a state": lambda rank: Generating(3, 8),
    "all of paddle's": lambda rank: DistributedBatchSampler(Noisy(16), 2, 1, 0, shuffle=True),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_one_order_of_all_ranks_is_dealt_out_and_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    both = adapted_together(
        monkeypatch, lambda rank: DataLoader(Noisy(16), batch_sampler=make(rank))
    )
    assert [adapter.sharding for adapter in both] == ["dealt out over 2 ranks"] * 2
    looked_at, alone = both[0].loader.batch_sampler, make(0)
    if isinstance(alone, Generating):
        assert [*looked_at] == [*alone]


def test_a_sampler_that_cannot_be_asked_at_setup_is_dealt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Later:
        def __iter__(self) -> Any:
            raise AttributeError("the model is made later")

    one, _ = adapted_together(monkeypatch, lambda rank: DataLoader(Noisy(), batch_sampler=Later()))
    assert one.sharding == "dealt out over 2 ranks"

    def read_once(rank: int) -> DataLoader:
        sampler = BatchSampler(sampler=(index for index in range(8)), batch_size=2)
        return DataLoader(Noisy(), batch_sampler=sampler)

    both = adapted_together(monkeypatch, read_once)
    assert sorted(index for one in both for index in indices(drawn(one))) == list(range(8))


# --- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        Countdown,
        lambda: [1, 2, 3, 4, 5],
        lambda: DataLoader(Lines(), batch_size=2),
        lambda: DataLoader(Lines(), batch_size=None),
        lambda: DataLoader(Lines(), batch_size=3, drop_last=True),
        lambda: DataLoader(Lines(), batch_size=2, num_workers=2),
    ],
    ids=["iterable", "list", "iterable data set", "no batches", "drop last", "workers"],
)
def test_a_stream_is_replayed_to_its_position(make: Any) -> None:
    whole = drawn(adapted(make()))
    assert len(list(adapted(make()).once(rng.VALID, 1))) == len(whole) > 2
    np.random.rand()
    assert drawn(adapted(make()), position=2 * (adapted(make()).batch_size or 1)) == whole[2:]


@pytest.mark.parametrize("stream", [iter([1, 2, 3, 4]), [1, 2, 3, 4]], ids=["iterator", "list"])
def test_a_stream_ends_on_all_ranks_when_one_has_no_more(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    of_ranks = iter([[0.0], [0.0], [1.0]])
    monkeypatch.setattr(loaders, "max_over_ranks", lambda mine: next(of_ranks))
    assert drawn(adapted(stream, 0, 2)) == [1, 2]


def test_a_loader_with_its_own_iter_is_taken_as_it_comes() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            yield from ("a", "b", "c")

    assert drawn(adapted(Own(Noisy()))) == ["a", "b", "c"]


def test_the_end_of_a_stream_is_known_with_its_last_batch() -> None:
    batches = adapted(Countdown()).open(1)
    ended = []
    for _ in batches:
        ended.append(batches.ended)
    assert ended == [False] * 4 + [True]


# --- errors ------------------------------------------------------------------------------------


def test_something_that_cannot_be_iterated_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"self\.train_loader: 5 given; expected a paddle"):
        adapted(5)


@pytest.mark.parametrize("empty", [[], iter(())])
def test_an_empty_loader_is_an_error_that_names_it(empty: Any) -> None:
    with pytest.raises(ValueError, match=r"self\.train_loader: has no batch"):
        next(adapted(empty).open(1))
