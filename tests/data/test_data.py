"""Driving loaders: order, random numbers, positions, shares, workers, streams."""

from __future__ import annotations

import contextlib
import copy
import glob
import itertools
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from tiny import Tiny, trained

from expbase.base import rng
from expbase.data import loaders
from expbase.data.loaders import LoaderAdapter, Shard, adapt_loader
from expbase.data.position import DataPosition


class Noisy(Dataset):
    """Its index, and what each of the three generators draws for it."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.made: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
        import random

        self.made.append(index)
        drawn = [random.random(), np.random.randn(), paddle.rand([1]).item()]
        return index, np.array(drawn)

    def __len__(self) -> int:
        return self.size


class Lines(IterableDataset):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __iter__(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, self.size, step):
            yield np.array([index, np.random.rand()])


def adapted(loader: Any, rank: int = 0, world_size: int = 1, seed: int = 3) -> LoaderAdapter:
    return adapt_loader(loader, "self.train_loader", Shard(seed, rank, world_size))


def plain(batch: Any) -> Any:
    """A batch as lists, for comparing."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def train_iterator(loader: Any) -> DataPosition:
    iterator = DataPosition()
    iterator.attach(adapted(loader))
    return iterator


def drawn(adapter: LoaderAdapter, epoch: int = 1, position: int = 0) -> list[Any]:
    batches = adapter.open(epoch, position)
    result = [plain(batch) for batch in batches]
    assert batches.ended
    return result


def indices(batches: list[Any]) -> list[int]:
    return [index for batch in batches for index in batch[0]]


def loader(**options: Any) -> DataLoader:
    return DataLoader(Noisy(), **{"batch_size": 3, "shuffle": True, **options})


# --- order and random numbers ------------------------------------------------------------------


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    np.random.seed(1)
    first = drawn(adapted(loader()))
    np.random.seed(2)
    paddle.rand([5])
    assert drawn(adapted(loader())) == first
    assert indices(drawn(adapted(loader()), epoch=2)) != indices(first)
    assert indices(drawn(adapted(loader(), seed=4))) != indices(first)
    assert sorted(indices(first)) == list(range(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda workers: loader(num_workers=workers),
        lambda workers: loader(num_workers=workers, shuffle=False, drop_last=True),
        lambda workers: DataLoader(Noisy(), batch_size=None, num_workers=workers),
        lambda workers: DataLoader(Noisy(), batch_size=3, collate_fn=dict_of, num_workers=workers),
        lambda workers: DataLoader(
            Noisy(),
            batch_sampler=BatchSampler(sampler=WeightedRandomSampler([0.1] * 10, 8), batch_size=3),
            num_workers=workers,
        ),
        lambda workers: loader(num_workers=workers, persistent_workers=bool(workers)),
    ],
    ids=["shuffled", "in order", "no batches", "custom collate", "weighted", "persistent"],
)
def test_workers_give_the_batches_of_no_workers_from_any_position(make: Any) -> None:
    whole = drawn(adapted(make(0)))
    with_workers = adapted(make(2))
    assert drawn(with_workers) == whole
    samples = 2 * (with_workers.batch_size or 1)
    assert drawn(with_workers, position=samples) == whole[2:]
    with_workers.close()
    assert drawn(adapted(make(0)), position=samples) == whole[2:]


def dict_of(samples: list[Any]) -> dict[str, Any]:
    """A collate_fn that draws, too."""
    noise = np.random.rand(2)
    return {"index": np.array([s[0] for s in samples]), "pair": (noise, "text"), "number": 1.5}


def test_batches_are_of_the_types_that_paddles_own_loader_returns() -> None:
    ours = next(iter(adapted(DataLoader(Noisy(), batch_size=3, collate_fn=dict_of)).open(1)))
    # All of them: else its thread would go on drawing random numbers in the tests that follow.
    theirs, *_ = DataLoader(Noisy(), batch_size=3, collate_fn=dict_of)
    assert type(ours) is type(theirs) is dict
    for key in theirs:
        assert type(ours[key]) is type(theirs[key]), key
    assert ours["index"].dtype == theirs["index"].dtype
    assert [type(value) for value in ours["pair"]] == [type(value) for value in theirs["pair"]]
    assert ours["index"].place._equals(theirs["index"].place)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_hold_the_samples_that_paddles_own_loader_takes(drop_last: bool) -> None:
    both = DataLoader(Noisy(), batch_size=3, drop_last=drop_last)
    assert [batch[0].tolist() for batch in both] == [batch[0] for batch in drawn(adapted(both))]


def test_what_was_trained_on_is_not_loaded_again() -> None:
    skipping = loader()
    drawn(adapted(skipping), position=9)
    assert len(skipping.dataset.made) == 1


def test_the_random_states_are_set_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(rng, "seed_cpu", seeds.append)
    batches = list(adapted(loader()).open(2))
    assert len(batches) == 4
    assert seeds[-4:] == [rng.derive(rng.derive(3, rng.SAMPLE, 2), at) for at in (0, 3, 6, 9)]


def test_indices_are_told_with_each_batch() -> None:
    batches = adapted(loader(shuffle=False)).open(1)
    assert batches.indices is None
    next(batches)
    assert (batches.indices, batches.ended) == ([0, 1, 2], False)


# --- samplers ----------------------------------------------------------------------------------


class Endless:
    """A batch sampler without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield np.random.randint(0, 10, 3).tolist()


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


def test_paddles_random_sampler_is_seeded_too() -> None:
    def make() -> DataLoader:
        return DataLoader(
            Noisy(), batch_sampler=BatchSampler(sampler=RandomSampler(Noisy()), batch_size=3)
        )

    assert drawn(adapted(make())) == drawn(adapted(make()))


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


class Countdown:
    """An iterable of batches that draws."""

    def __iter__(self) -> Iterator[list[float]]:
        for number in range(5):
            yield [number, np.random.rand()]


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


def test_iterable_data_sets_are_batched_as_paddle_does() -> None:
    for options in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}):
        theirs = [plain(batch) for batch in DataLoader(Lines(), **options)]
        ours = drawn(adapted(DataLoader(Lines(), **options)))
        assert [np.array(b)[..., 0].tolist() for b in ours] == [
            np.array(b)[..., 0].tolist() for b in theirs
        ]


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


@pytest.mark.parametrize("dataset", [Noisy(), Lines()], ids=["indices", "stream"])
def test_an_epoch_that_is_left_early_leaves_nothing_in_persistent_workers(dataset: Any) -> None:
    leaving = adapted(DataLoader(dataset, batch_size=1, num_workers=2, persistent_workers=True))
    first = leaving.open(1)
    next(first)
    first.close()
    assert sorted(int(batch[0][0]) for batch in drawn(leaving, 2)) == list(range(10))
    leaving.close()


def test_persistent_workers_serve_the_next_epoch_and_validation_has_its_own() -> None:
    class Workers(Noisy):
        def __getitem__(self, index: int) -> Any:
            return np.array(os.getpid())

    persistent = adapted(
        DataLoader(Workers(4), batch_size=1, num_workers=2, persistent_workers=True)
    )
    serving = set(itertools.chain(*drawn(persistent, 1)))
    epoch = persistent.open(2)
    seen = {next(epoch).item()}
    own = {batch.item() for batch in persistent.once(rng.VALID, 1)}
    seen |= {batch.item() for batch in epoch}
    persistent.close()
    assert seen == serving
    assert not own & serving


# --- errors ------------------------------------------------------------------------------------


def told(error: BaseException) -> str:
    """What a traceback shows, the notes of Python 3.11, too."""
    return "".join(traceback.format_exception(error))


class Fragile(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise KeyError("sample 4 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_data_set_comes_out_with_its_traceback(workers: int) -> None:
    batches = adapted(DataLoader(Fragile(), batch_size=3, num_workers=workers)).open(1)
    next(batches)
    with pytest.raises(KeyError, match="sample 4 is broken") as caught:
        next(batches)
    assert "self.train_loader: raised by sample 4 of the data set" in told(caught.value)
    if workers:
        assert "__getitem__" in str(caught.value.__cause__)
    else:
        assert caught.traceback[-1].name == "__getitem__"
    batches.close()


@pytest.mark.parametrize(
    "said",
    ["(Fatal) Blocking queue is killed because …", "DataLoader process (pid 7) exited"],
)
def test_the_error_of_a_worker_that_died_names_the_causes(said: str, tmp_path: Path) -> None:
    class Killed(Tiny):
        def train_batch(self) -> None:
            raise SystemError(said)

    with pytest.raises(SystemError) as caught:
        trained(Killed, tmp_path)
    assert told(caught.value).count("A worker of a DataLoader has died: it had no more memory") == 1


class OfTensors(Dataset):
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __getitem__(self, index: int) -> Any:
        return {"x": paddle.full([3], index, self.dtype), "pair": (paddle.to_tensor(index), "a")}

    def __len__(self) -> int:
        return 4


class StreamOfTensors(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([paddle.full([3], index) for index in range(4)])


@pytest.mark.parametrize("dataset", [OfTensors("float32"), StreamOfTensors()])
def test_workers_send_arrays_in_the_place_of_tensors_of_which_they_would_die(dataset: Any) -> None:
    with_workers = DataLoader(dataset, batch_size=2, num_workers=1)
    assert drawn(adapted(with_workers)) == drawn(adapted(DataLoader(dataset, batch_size=2)))


def test_a_tensor_of_bfloat16_in_a_worker_is_an_error() -> None:
    batches = adapted(DataLoader(OfTensors("bfloat16"), batch_size=2, num_workers=1)).open(1)
    with pytest.raises(TypeError, match="a tensor of bfloat16 in a worker of a DataLoader"):
        next(batches)
    batches.close()


class TwoArguments(Exception):
    """Pickle cannot make it again from its text alone."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "bool", "int64", "complex64"])
def test_batches_of_a_tensor_dataset_are_those_of_paddles_loader(dtype: str) -> None:
    tensors = [paddle.arange(24).reshape([6, 2, 2]).astype(dtype), paddle.arange(6)]
    loader = DataLoader(TensorDataset(tensors), batch_sampler=[[5, 0, np.int64(3)], [-1, 2]])
    for ours, paddles in zip(adapted(loader).open(1), loader, strict=True):
        assert type(ours) is type(paddles)
        for one, other in zip(ours, paddles, strict=True):
            assert one.dtype == other.dtype
            assert one.place._type() == other.place._type()
            assert one.stop_gradient == other.stop_gradient
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize("index", [6, -7, "x"])
def test_a_wrong_index_of_a_tensor_dataset_is_named(index: Any) -> None:
    loader = DataLoader(TensorDataset([paddle.arange(6)]), batch_sampler=[[0, index]])
    with pytest.raises(Exception) as caught:  # noqa: PT011  paddle raises several
        next(adapted(loader).open(1))
    said = "".join(traceback.format_exception(caught.value))
    assert f"raised by sample {index!r} of the data set" in said


def test_a_tensor_dataset_with_a_way_of_its_own_is_asked_for_each_sample() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return [2 * field for field in super().__getitem__(index)]

    [batch] = next(adapted(DataLoader(Doubled([paddle.arange(4)]), batch_size=4)).open(1))
    assert batch.tolist() == [0, 2, 4, 6]


def test_a_batch_of_a_tensor_dataset_shares_no_memory_with_it() -> None:
    tensor = paddle.zeros([4])
    [batch] = next(adapted(DataLoader(TensorDataset([tensor]), batch_size=2)).open(1))
    batch.add_(paddle.ones([2]))
    assert tensor.tolist() == [0.0] * 4


def test_an_exception_of_collate_fn_in_a_worker_comes_out_even_if_it_cannot_be_sent() -> None:
    def collate(samples: list[Any]) -> Any:
        raise TwoArguments("batch 0", "cannot collate")

    batches = adapted(DataLoader(Noisy(), batch_size=3, num_workers=1, collate_fn=collate)).open(1)
    with pytest.raises(RuntimeError, match="TwoArguments: batch 0: cannot collate") as caught:
        next(batches)
    assert "in collate" in str(caught.value.__cause__)
    what = "self.train_loader: raised by collate_fn for the samples [0, 1, 2]"
    assert told(caught.value).count(what) == 1
    batches.close()


def test_something_that_cannot_be_iterated_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"self\.train_loader: 5 given; expected a paddle"):
        adapted(5)


@pytest.mark.parametrize("empty", [[], iter(())])
def test_an_empty_loader_is_an_error_that_names_it(empty: Any) -> None:
    with pytest.raises(ValueError, match=r"self\.train_loader: has no batch"):
        next(adapted(empty).open(1))


def test_a_loader_that_ends_too_early_is_an_error() -> None:
    iterator = train_iterator([1, 2])
    iterator.open(1, 5)
    with pytest.raises(RuntimeError, match=r"self\.train_loader: has no more batches"):
        iterator.read()


def test_reading_before_a_loader_is_attached_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"self\.train_loader: not set by setup_dataloader"):
        DataPosition().read()
    with pytest.raises(ValueError, match=r"self\.train_loader: not set by setup_dataloader"):
        DataPosition().open(1)


# --- workers -----------------------------------------------------------------------------------


class Told(Noisy):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return np.array([os.getpgrp() == os.getpid(), info.dataset is self, info.num_workers])


def test_workers_know_the_users_data_set_and_lead_their_own_group() -> None:
    batch = next(adapted(DataLoader(Told(), batch_size=2, num_workers=2)).open(1))
    assert plain(batch) == [[1, 1, 2], [1, 1, 2]]


class Stuck(Noisy):
    """Its second sample never comes."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(1000 * (index > 0))
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Stuck(), Lines()], ids=["busy", "stream"])
def test_when_an_epoch_is_left_its_workers_end_with_what_they_made(dataset: Any) -> None:
    before = {*multiprocessing.active_children()}
    batches = adapted(DataLoader(dataset, batch_size=1, num_workers=1)).open(1)
    next(batches)
    (worker,) = {*multiprocessing.active_children()} - before
    batches.close()
    assert not worker.is_alive()
    assert not glob.glob(f"/dev/shm/*_{worker.pid}_*")


def test_a_users_worker_init_fn_is_called() -> None:
    def init(worker_id: int) -> None:
        os.environ["EXPBASE_TEST_WORKER"] = str(worker_id)

    class Reading(Noisy):
        def __getitem__(self, index: int) -> Any:
            return np.array(int(os.environ["EXPBASE_TEST_WORKER"]))

    reading = DataLoader(Reading(4), batch_size=2, num_workers=2, worker_init_fn=init)
    assert drawn(adapted(reading)) == [[0, 0], [1, 1]]


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


class RememberingSampler:
    """A batch sampler whose next epoch depends on the one before."""

    def __init__(self) -> None:
        self.shift = 0

    def state_dict(self) -> dict[str, int]:
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shift = state["shift"]

    def __iter__(self) -> Iterator[list[int]]:
        self.shift += 1
        return iter([[(i + self.shift) % 10] for i in range(5)])

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "make",
    [Remembering, lambda: DataLoader(Noisy(), batch_sampler=RememberingSampler())],
    ids=["stream", "sampler"],
)
@pytest.mark.parametrize("stop", range(1, 12))
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


# --- the place in the data ---------------------------------------------------------------------


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


def test_reasons_why_continuing_is_not_exact_are_returned() -> None:
    iterator = train_iterator(Countdown())
    iterator.open(1)
    (replayed,) = iterator.load_state_dict(iterator.state_dict())
    assert replayed.startswith("self.train_loader: replayed up to the position")
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

    resumed, (_, reason) = continued(lines(3), lines(4))
    assert "the epoch goes on with the samples that it has not had" in reason
    assert [index for index, _ in plain(resumed.read())] == [6, 7, 8, 9]
    resumed, (_, reason) = continued(lines(3, 1), lines(4, 1))
    assert "which ones they were is unknown" in reason


def test_a_shuffled_order_of_another_seed_is_told() -> None:
    before, after = train_iterator(sized(20)), DataPosition()
    before.open(1)
    before.read()
    after.attach(adapted(sized(20), seed=4))
    (reason,) = after.load_state_dict(before.state_dict())
    assert "another order of this epoch than before" in reason


def test_the_batch_before_is_not_the_one_that_the_data_set_fails_at() -> None:
    iterator = train_iterator(DataLoader(Fragile(), batch_size=2))
    iterator.open(1)
    iterator.read(), iterator.read()
    assert iterator.batches.indices == [2, 3]
    with pytest.raises(KeyError):
        iterator.read()
    assert (iterator.batches.indices, iterator.batch_in_epoch) == (None, 3)


def test_an_own_order_that_is_cut_otherwise_is_that_of_the_checkpoint_until_its_end() -> None:
    assert continued(own_order(10), own_order(10))[1] == []
    threes = DataLoader(Noisy(10), batch_sampler=[[i, i + 1, i + 2] for i in (0, 3, 6)])
    resumed, reasons = continued(own_order(10), threes)
    assert (plain(resumed.read())[0], reasons) == ([2], [])
    resumed.open(2)
    assert plain(resumed.read())[0] == [0, 1, 2]
