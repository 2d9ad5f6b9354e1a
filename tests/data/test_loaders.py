"""Driving loaders: each rank's share of the batches, streams, and what cannot be driven."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
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
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from expbase.base import rng
from expbase.data import loaders
from expbase.data.loaders import LoaderAdapter, Shard, adapt_loader, check_begins_anew
from expbase.data.position import DataPosition

# --- shards ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "filled"), [(2, 0), (3, 2), (7, 3)])
def test_batches_are_dealt_out_and_the_last_round_is_filled(world_size: int, filled: int) -> None:
    whole = drawn(adapted(loader()))
    adapters = [adapted(loader(), rank, world_size) for rank in range(world_size)]
    shares = [drawn(one) for one in adapters]
    rounds = -(-len(whole) // world_size)
    assert [len(share) for share in shares] == [rounds] * world_size
    dealt = [shares[i % world_size][i // world_size] for i in range(rounds * world_size)]
    assert dealt == list(itertools.islice(itertools.cycle(whole), rounds * world_size))
    assert (adapters[0].filled, adapters[0].batches_per_epoch) == (filled, rounds)
    assert adapters[0].updates_per_epoch(2) == Fraction(rounds, 2)


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


class Sub(DistributedBatchSampler):
    """Gives each rank what its base does."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(10 * epoch)


@pytest.mark.parametrize("kind", [None, DistributedBatchSampler, Sub])
def test_evaluation_gives_every_sample_once_over_the_ranks(kind: Any) -> None:
    def make(size: int, rank: int) -> DataLoader:
        if kind is None:
            return DataLoader(Noisy(size), batch_size=3)
        sampler = kind(Noisy(size), 3, num_replicas=3, rank=rank)
        return DataLoader(Noisy(size), batch_sampler=sampler)

    for size in (1, 4, 10):
        of_ranks = [adapted(make(size, rank), rank, 3).once(rng.VALID, 1) for rank in range(3)]
        seen = [plain(batch) for batches in of_ranks for batch in batches]
        assert sorted(indices(seen)) == list(range(size))


class Half(DistributedBatchSampler):
    """Gives every second batch of its base."""

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(super().__iter__(), 0, None, 2)


def test_what_a_subclass_with_its_own_order_gives_is_validated_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(rank: int) -> DataLoader:
        return DataLoader(Noisy(16), batch_sampler=Half(Noisy(16), 2, 2, rank))

    for rank, adapter in enumerate(adapted_together(monkeypatch, make)):
        batches = adapter.once(rng.VALID, 1)
        given = [index for batch in make(rank).batch_sampler for index in batch]
        assert indices([plain(batch) for batch in batches]) == batches.kept == given


def test_indices_are_kept_only_of_a_sampler_that_shards_by_itself() -> None:
    sampler = DistributedBatchSampler(Noisy(), 2, 2, 0)
    for dealt in (loader(), DataLoader(Noisy(), batch_sampler=sampler), Countdown()):
        assert adapted(dealt, 0, 2).once(rng.VALID, 1).kept is None


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


class Past(BatchSampler):
    """What it draws next depends on what it was asked before, in six ways."""

    def __init__(self) -> None:
        super().__init__(Noisy(16), batch_size=4)
        self.state = np.random.RandomState(3)
        self.generators = np.random.default_rng(3)
        self.python = random.Random(3)
        self.passes = 0
        self.listed = [*range(16)]
        self.array = np.arange(16)

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        self.made = getattr(self, "made", 0) + 1  # only when it is first asked
        self.python.shuffle(self.listed)
        self.generators.shuffle(self.array)
        moved = np.array(self.listed)[self.array][self.state.permutation(16)]
        return iter(np.roll(moved, self.passes + self.made).reshape([4, 4]).tolist())


@pytest.mark.parametrize("deals", ["ranks", "shares"])
def test_a_sampler_with_a_past_is_left_as_it_was_by_what_the_ranks_ask(
    monkeypatch: pytest.MonkeyPatch, deals: str
) -> None:
    alone, asked = Past(), Past()
    monkeypatch.setattr(loaders, "all_gather_object", lambda value: [value, value])
    shard = Shard(3, 0, 2, 1, one_order=deals == "shares", dealt_to=deals[:-1])
    adapter = adapt_loader(DataLoader(Noisy(16), batch_sampler=asked), "self.l", shard)
    assert adapter.sharding == f"dealt out over 2 {deals}"
    assert [[*asked] for _ in range(3)] == [[*alone] for _ in range(3)]


def test_a_data_set_with_a_generator_is_left_as_it_was_when_ranks_compare_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Augmented(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(3)

        def __getitem__(self, index: int) -> tuple[int, np.ndarray]:
            self.made.append(index)
            return index, self.generator.random(2)

    monkeypatch.setattr(loaders, "all_gather_object", lambda value: [value, value])
    asked = Augmented()
    adapt_loader(DataLoader(asked), "self.l", Shard(3, 0, 2, 1, one_order=True))
    assert asked.made == [0]
    assert asked.generator.random() == Augmented().generator.random()


def test_a_sampler_over_an_iterator_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "all_gather_object", lambda value: [value, value])
    for has_shares in (False, True):
        numbers = iter(range(9))
        inner = RandomSampler(Noisy(9), replacement=True, num_samples=9, generator=numbers)
        one = DataLoader(Noisy(9), batch_sampler=BatchSampler(sampler=inner, batch_size=3))
        adapt_loader(one, "self.l", Shard(3, 0, 2, 1, one_order=has_shares))
        assert next(numbers) == 0


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


class Nothing(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class NoBatches(BatchSampler):
    """Its length is not the one of its base; it gives nothing, or more than it says."""

    def __init__(self, *batches: list[int]) -> None:
        super().__init__(Noisy(), batch_size=8)
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return 0


SIX = "It has 6 samples, batch_size=8, drop_last="
EMPTY: dict[str, tuple[Any, str]] = {
    "drop_last": (lambda: DataLoader(Noisy(6), batch_size=8, drop_last=True), f"{SIX}True."),
    "no samples": (lambda: DataLoader(Noisy(0), batch_size=8), "It has 0 samples, batch_size=8"),
    "distributed": (
        lambda: DataLoader(
            Noisy(6), batch_sampler=DistributedBatchSampler(Noisy(6), 8, 1, 0, drop_last=True)
        ),
        f"{SIX}True, and its batch_sampler is a DistributedBatchSampler.",
    ),
    "a sampler": (
        lambda: DataLoader(Noisy(6), batch_sampler=NoBatches()),
        f"{SIX}False, and its batch_sampler is a NoBatches.",
    ),
    "a list": (list, "It is a list of 0 batches."),
    "a stream": (
        lambda: DataLoader(Nothing(), batch_size=4, drop_last=True),
        "It has a Nothing of unknown length, batch_size=4, drop_last=True.",
    ),
    "an iterator": (lambda: iter(()), "It is a tuple_iterator, and a pass before it may have"),
}


@pytest.mark.parametrize(("make", "text"), EMPTY.values(), ids=EMPTY)
def test_a_loader_without_a_batch_is_an_error_that_says_what_it_has(make: Any, text: str) -> None:
    expected = re.escape(f"self.train_loader: has no batch; expected at least one. {text}")
    for read in (lambda of: of.open(1), lambda of: of.once(rng.VALID, 1)):
        with pytest.raises(ValueError, match=expected):
            next(read(adapted(make())))
    assert list(adapted(make(), 1, 2).once(rng.VALID, 1)) == []  # another rank may have some


def test_what_is_known_to_be_empty_is_known_before_it_is_read() -> None:
    streams = ("a stream", "an iterator")
    assert [name for name, (make, _) in EMPTY.items() if not adapted(make()).is_empty()] == [
        *streams
    ]
    assert [adapted([], 0, ranks).batches_per_epoch for ranks in (1, 2)] == [0, 0]
    for full in ([1], DataLoader(Noisy(6), batch_size=8), Countdown()):
        assert not adapted(full).is_empty()
    # Its length is wrong, and what it gives is validated.
    wrong = adapted(DataLoader(Noisy(6), batch_sampler=NoBatches([1, 2], [3])))
    assert not wrong.is_empty()
    assert len(list(wrong.once(rng.VALID, 1))) == 2


class Sized:
    """Batches with a length, as those of PaddleDetection's readers."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return int(self.length)


def test_an_iterable_is_asked_for_its_length() -> None:
    assert adapted(Sized(7)).batches_per_epoch == 7
    assert adapted(Sized(7)).updates_per_epoch(2) == Fraction(7, 2)
    # Of shares two on each of two ranks: of seven batches one round of four.
    shares = [Shard(0, rank, 2, batches=2, one_order=True) for rank in (0, 1)]
    sizes = [adapt_loader(Sized(7), "it", shard).batches_per_epoch for shard in shares]
    assert sizes == [2, 2]
    # Of two streams nobody knows which one ends first; a length of 0 may be one that is not known.
    assert adapted(Sized(7), 0, 2).batches_per_epoch is None
    for unknown in (Sized(0), Sized(NotImplementedError()), Sized(TypeError()), Countdown()):
        assert adapted(unknown).batches_per_epoch is None
        assert not adapted(unknown).is_empty()
    assert adapted(DataLoader(Endless(), batch_size=2)).batches_per_epoch is None


def test_of_ranks_a_padded_part_that_drop_last_leaves_out_is_no_empty_validation() -> None:
    # Each of two ranks has 5 of 10 samples, less than a batch; validated are the 8 of one.
    sampler = DistributedBatchSampler(Noisy(10), 8, 2, 0, drop_last=True)
    adapter = adapted(DataLoader(Noisy(10), batch_sampler=sampler), 0, 2)
    assert not adapter.is_empty()
    assert [len(plain(batch)[0]) for batch in adapter.once(rng.VALID, 1)] == [8]


def test_with_shares_a_list_that_is_too_short_says_how_many_batches_an_update_takes() -> None:
    short = adapt_loader([1, 2], "self.train_loader", Shard(0, 0, 1, 4, one_order=True))
    assert short.batches_per_epoch == 0
    assert "It is a list of 2 batches, and an update takes 4." in str(short.no_batch())


# --- what can be read once ---------------------------------------------------------------------


def generator() -> Iterator[int]:
    yield 1


class Again:
    """Gives itself as its iterator, and begins anew."""

    def __iter__(self) -> Again:
        self.left = 3
        return self

    def __next__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.left


class Stored(IterableDataset):
    """A data set that gives an iterator's items: once."""

    def __init__(self) -> None:
        self.items = iter([1, 2, 3])

    def __iter__(self) -> Stored:
        return self

    def __next__(self) -> int:
        return next(self.items)


class Once(Again):
    """Gives itself as its iterator, and does not begin anew."""

    left = 3

    def __iter__(self) -> Once:
        return self


class Kept:
    """Gives an iterator that it keeps."""

    def __init__(self) -> None:
        self.iterator = iter([1, 2])

    def __iter__(self) -> Iterator[int]:
        return self.iterator


ONCE: dict[str, Any] = {
    "a generator": generator,
    "of a list": lambda: iter([1]),
    "map": lambda: map(str, [1]),
    "islice": lambda: itertools.islice([1], 1),
    "csv": lambda: csv.reader(["1,2"]),
    "a file": lambda: io.StringIO("1"),
    "iter(loader)": lambda: iter(loader()),
    "loader()": lambda: loader()(),
}


def test_what_can_be_read_once_is_refused_with_what_to_give_instead() -> None:
    expected = (
        r"self\.valid_loader: <.* given, which can be read once; expected one that begins anew in "
        r"each pass: the DataLoader itself, not iter\(loader\) or loader\(\); a list of batches;"
    )
    for name, make in ONCE.items():
        said = f"{name} is taken"
        try:
            check_begins_anew(make(), "self.valid_loader")
        except TypeError as error:
            said = str(error)
        assert re.match(expected, said), name


def test_what_may_begin_anew_is_taken() -> None:
    for make in (loader, list, dict, Countdown, Again, Once, Kept, Lines):
        check_begins_anew(make(), "self.valid_loader")


@pytest.mark.parametrize("make", [Once, Kept, lambda: DataLoader(Stored(), batch_size=2)])
def test_a_second_pass_that_is_empty_is_an_error_that_says_why(make: Any) -> None:
    for read in (lambda of: of.open(1), lambda of: of.once(rng.VALID, 1)):
        adapter = adapted(make())
        assert len(list(read(adapter))) > 0
        with pytest.raises(ValueError, match=r"has no batch; .* a pass before it may have taken"):
            next(read(adapter))


def test_what_gives_itself_and_begins_anew_is_read_as_often_as_one_likes() -> None:
    adapter = adapted(Again())
    passes = [drawn(adapter), drawn(adapter, epoch=2), [*adapter.once(rng.VALID, 1)]]
    assert passes == [[2, 1, 0]] * 3


def test_a_sampler_that_can_be_read_once_is_named_when_it_is_used_up() -> None:
    sampler = BatchSampler(sampler=(index for index in range(4)), batch_size=2)
    adapter = adapted(DataLoader(Noisy(), batch_sampler=sampler))
    assert len(list(adapter.once(rng.VALID, 1))) == 2
    with pytest.raises(ValueError, match="BatchSampler, which draws from an iterator that can be"):
        adapter.once(rng.VALID, 2)


def test_a_stream_that_is_passed_over_says_how_far_each_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, said = [0.0], []

    class Slow(Lines):
        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                now[0] += 1 / 256
                yield item

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(loaders, "time", clock)
    monkeypatch.setattr(loaders, "barrier", said.append)  # other ranks may take longer
    stream = DataLoader(Slow(20_000), batch_size=2)
    adapter = adapt_loader(stream, "self.train_loader", Shard(0), said.append)
    batches = adapter.open(1, position=12_000)  # 1280 batches take 10 s
    assert said == [
        f"self.train_loader: passing over {count} of 6,000 batches"
        for count in ("1,280", "2,560", "3,840", "5,120")
    ] + ["the position in self.train_loader"]
    assert [index for index, _ in plain(next(batches))] == [12_000, 12_001]
