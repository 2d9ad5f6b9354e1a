"""Fetching batches, here and in workers: what they hold, their random numbers, errors, ends."""

from __future__ import annotations

import argparse
import fcntl
import glob
import itertools
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from driving import Endless, Fragile, Lines, Noisy, adapted, drawn, loader, plain
from paddle.io import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)
from tiny import Tiny, trained

from expbase.base import rng
from expbase.data import workers
from expbase.data.loaders import Shard, adapt_loader


@pytest.mark.parametrize(
    "make",
    [
        lambda workers: loader(num_workers=workers),
        lambda workers: DataLoader(Noisy(), batch_size=None, num_workers=workers),
        lambda workers: DataLoader(Noisy(), batch_size=3, collate_fn=dict_of, num_workers=workers),
        lambda workers: loader(num_workers=workers, persistent_workers=bool(workers)),
    ],
    ids=["shuffled", "no batches", "custom collate", "persistent"],
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


def test_the_random_states_are_set_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(rng, "seed_cpu", seeds.append)
    batches = list(adapted(loader()).open(2))
    assert len(batches) == 4
    assert seeds[-4:] == [rng.derive(rng.derive(3, rng.SAMPLE, 2), at) for at in (0, 3, 6, 9)]


def test_nothing_is_seeded_where_nothing_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(rng, "seed_cpu", seeds.append)
    data = TensorDataset([paddle.arange(6)])
    assert len(list(adapted(DataLoader(data, batch_size=2)).open(1))) == 3
    assert seeds == []
    assert len(list(adapted(DataLoader(data, batch_size=2, collate_fn=list)).open(1))) == 3
    assert len(seeds) == 3


# --- as paddle's loader ------------------------------------------------------------------------


@pytest.mark.device
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


def test_iterable_data_sets_are_batched_as_paddle_does() -> None:
    for options in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}):
        theirs = [plain(batch) for batch in DataLoader(Lines(), **options)]
        ours = drawn(adapted(DataLoader(Lines(), **options)))
        assert [np.array(b)[..., 0].tolist() for b in ours] == [
            np.array(b)[..., 0].tolist() for b in theirs
        ]


@pytest.mark.device
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
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


@pytest.mark.device
def test_a_tensor_dataset_may_hold_arrays() -> None:
    arrays = [np.arange(12.0, dtype="float32").reshape(6, 2), np.arange(6)]
    loader = DataLoader(TensorDataset(arrays), batch_sampler=[[5, 0], [3, 2]])
    for ours, paddles in zip(adapted(loader).open(1), loader, strict=True):
        assert [one.tolist() for one in ours] == [other.tolist() for other in paddles]


def test_what_workers_are_given_can_be_pickled_for_those_that_are_spawned() -> None:
    loader = DataLoader(TensorDataset([np.arange(6)]), batch_size=2)  # no tensor of paddle 3.0 can
    again = pickle.loads(pickle.dumps(workers._BatchDataset(loader)))
    assert [part.tolist() for part in again.batch([4, 1])] == [[4, 1]]


def test_a_wrong_index_of_a_tensor_dataset_is_named() -> None:
    for index in (6, -7, "x"):
        loader = DataLoader(TensorDataset([paddle.arange(6)]), batch_sampler=[[0, index]])
        with pytest.raises(Exception) as caught:  # noqa: PT011  paddle raises several
            next(adapted(loader).open(1))
        assert f"raised by sample {index!r} of the data set" in told(caught.value)


@pytest.mark.pretend
@pytest.mark.parametrize("index", [6, -7])
def test_a_wrong_index_of_a_tensor_dataset_reaches_no_kernel_that_would_not_say_so(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setattr(paddle, "index_select", lambda tensor, rows: tensor)  # as a GPU's may
    loader = DataLoader(TensorDataset([paddle.arange(6)]), batch_sampler=[[-6, 5], [0, index]])
    batches = adapted(loader).open(1)
    next(batches)
    with pytest.raises(Exception) as caught:  # noqa: PT011  paddle raises several
        next(batches)
    assert f"raised by sample {index!r} of the data set" in told(caught.value)


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


# --- workers -----------------------------------------------------------------------------------


class Told(Noisy):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return np.array([os.getpgrp() == os.getpid(), info.dataset is self, info.num_workers])


def test_workers_know_the_users_data_set_and_lead_their_own_group() -> None:
    batch = next(adapted(DataLoader(Told(), batch_size=2, num_workers=2)).open(1))
    assert plain(batch) == [[1, 1, 2], [1, 1, 2]]


def test_workers_of_a_loader_that_is_read_by_hand_lead_a_group_of_their_own_too() -> None:
    class Leading(Noisy):
        def __getitem__(self, index: int) -> Any:
            return np.array(os.getpgrp() == os.getpid())

    with workers.workers_end_with_this():
        [batch] = DataLoader(Leading(2), batch_size=2, num_workers=1)
    assert plain(batch) == [True, True]


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


def test_workers_end_beside_the_update_of_their_last_batch() -> None:
    before = {*multiprocessing.active_children()}
    batches = adapted(loader(num_workers=2)).open(1)
    while not batches.ended:
        next(batches)
    for worker in {*multiprocessing.active_children()} - before:
        worker.join(20)
        assert not worker.is_alive()
    batches.close()


def test_what_one_worker_alone_can_hold_is_free_for_the_next_epoch_s(tmp_path: Path) -> None:
    def hold(worker_id: int) -> None:
        held.append((tmp_path / "lock").open("w"))
        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)

    held: list[Any] = []
    data = adapted(DataLoader(Noisy(4), batch_size=2, num_workers=1, worker_init_fn=hold))
    for epoch in range(1, 5):
        assert len(drawn(data, epoch)) == 2
    data.close()


def test_workers_end_beside_an_exception_of_the_last_batch_too() -> None:
    class Last(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError(index)
            return super().__getitem__(index)

    before = {*multiprocessing.active_children()}
    failing = adapted(DataLoader(Last(4), batch_size=1, num_workers=1))
    with pytest.raises(KeyError):
        drawn(failing, 1)
    for worker in {*multiprocessing.active_children()} - before:
        worker.join(20)
        assert not worker.is_alive()
    failing.close()


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


class Scaling:
    factor = 1

    def __call__(self, number: int) -> int:
        return number * self.factor


class Curriculum(Dataset):
    """Gives what it holds, and who has read it."""

    def __init__(self) -> None:
        self.numbers = [1, 2, 3, 4]
        self.transform: Any = Scaling()
        self.level = 0
        self.file: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __getitem__(self, index: int) -> Any:
        return np.array([self.transform(self.numbers[index]) + self.level, os.getpid()])

    def __len__(self) -> int:
        return len(self.numbers)


class Asked(Curriculum):
    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


@pytest.mark.parametrize(
    ("data", "change", "numbers", "path"),
    [
        (Curriculum, lambda data: data.set_epoch(10), [11, 12, 13, 14], "dataset.level"),
        pytest.param(Asked, lambda data: data.set_epoch(10), [11, 12, 13, 14],
                     "dataset.state_dict()", marks=pytest.mark.long),
        pytest.param(Curriculum, lambda data: setattr(data.transform, "factor", 2), [2, 4, 6, 8],
                     "dataset.transform.factor", marks=pytest.mark.long),
        pytest.param(Curriculum, lambda data: setattr(data, "transform", lambda number: -number),
                     [-1, -2, -3, -4], "dataset.transform", marks=pytest.mark.long),
        pytest.param(Curriculum, lambda data: data.numbers.append(5), [1, 2, 3, 4, 5],
                     "dataset.numbers[:]", marks=pytest.mark.long),
        pytest.param(Curriculum, lambda data: setattr(data, "file", open(__file__)), [1, 2, 3, 4],
                     "", marks=pytest.mark.long),
        (Curriculum, lambda data: None, [1, 2, 3, 4], ""),
    ],
)  # fmt: skip
def test_persistent_workers_have_what_the_data_set_is_when_an_epoch_begins(
    data: Any, change: Any, numbers: list[int], path: str
) -> None:
    dataset = data()
    said: list[str] = []
    options = {"batch_size": 1, "num_workers": 2, "persistent_workers": True}
    batches = adapt_loader(DataLoader(dataset, **options), "self.loader", Shard(0), said.append)
    epochs = []
    for epoch in (1, 2, 3):
        rows = [row for batch in drawn(batches, epoch) for row in batch]
        epochs.append(([number for number, _ in rows], {pid for _, pid in rows}))
        if epoch == 1:
            change(dataset)
    batches.close()
    (before, first), (after, second), (again, third) = epochs
    assert (before, after, again) == ([1, 2, 3, 4], numbers, numbers)
    assert second == third  # what has not changed costs no start
    assert (first == second) == (not path)
    assert [text.partition(" has changed, and its persistent workers")[0] for text in said] == (
        [f"self.loader: {path}"] if path else []
    )
    if dataset.file is not None:
        dataset.file.close()


def test_another_batch_size_needs_no_other_workers() -> None:
    options = {"num_workers": 2, "persistent_workers": True}
    persistent = DataLoader(Curriculum(), batch_size=1, **options)
    batches = adapted(persistent)
    first = {batch[0][1] for batch in drawn(batches, 1)}
    persistent.batch_sampler.batch_size = 2
    pairs = drawn(batches, 2)
    batches.close()
    assert [[number for number, _ in batch] for batch in pairs] == [[1, 2], [3, 4]]
    assert {pid for batch in pairs for _, pid in batch} == first


def test_a_users_worker_init_fn_is_called() -> None:
    def init(worker_id: int) -> None:
        os.environ["EXPBASE_TEST_WORKER"] = str(worker_id)

    class Reading(Noisy):
        def __getitem__(self, index: int) -> Any:
            return np.array(int(os.environ["EXPBASE_TEST_WORKER"]))

    reading = DataLoader(Reading(4), batch_size=2, num_workers=2, worker_init_fn=init)
    assert drawn(adapted(reading)) == [[0, 0], [1, 1]]


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


def test_workers_read_tensors_of_the_cpu_that_the_data_set_held_before_the_fork() -> None:
    data = TensorDataset([paddle.arange(8).reshape([4, 2])])
    with_workers = DataLoader(data, batch_size=2, num_workers=2)
    assert drawn(adapted(with_workers)) == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]


def test_a_tensor_of_bfloat16_in_a_worker_is_an_error() -> None:
    batches = adapted(DataLoader(OfTensors("bfloat16"), batch_size=2, num_workers=1)).open(1)
    with pytest.raises(TypeError, match="a tensor of bfloat16 in a worker of a DataLoader"):
        next(batches)
    batches.close()


# --- errors ------------------------------------------------------------------------------------


def told(error: BaseException) -> str:
    """What a traceback shows, the notes of Python 3.11, too."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_data_set_comes_out_with_its_traceback(num_workers: int) -> None:
    batches = adapted(DataLoader(Fragile(), batch_size=3, num_workers=num_workers)).open(1)
    next(batches)
    with pytest.raises(KeyError, match="sample 4 is broken") as caught:
        next(batches)
    assert "self.train_loader: raised by sample 4 of the data set" in told(caught.value)
    if num_workers:
        assert "__getitem__" in str(caught.value.__cause__)
    else:
        assert caught.traceback[-1].name == "__getitem__"
    batches.close()


class FragileLines(Lines):
    def __iter__(self) -> Iterator[np.ndarray]:
        yield from itertools.islice(super().__iter__(), 2)
        raise KeyError("line 4 is broken")


def fail(argument: Any) -> Any:
    raise KeyError("it fails")


@pytest.mark.parametrize(
    ("dataset", "options", "place"),
    [
        (FragileLines(), {}, "in worker 0, after 2 batches of its own"),
        (Lines(), {"collate_fn": fail}, "in worker 0, after 0 batches of its own"),
        (Lines(), {"worker_init_fn": fail}, "by worker_init_fn(0)"),
        (Noisy(), {"worker_init_fn": fail}, "by worker_init_fn(0)"),
    ],
    ids=["stream", "collate_fn of a stream", "init_fn of a stream", "init_fn"],
)
def test_what_fails_in_a_worker_comes_out_whatever_it_is(
    dataset: Any, options: Any, place: str
) -> None:
    batches = adapted(DataLoader(dataset, batch_size=1, num_workers=2, **options)).open(1)
    with pytest.raises(KeyError) as caught:
        list(batches)
    said = told(caught.value)
    assert f"self.train_loader: raised {place}" in said
    assert "Traceback" in str(caught.value.__cause__)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_sampler_that_fails_is_an_error_of_its_own_behind_the_batches_before(
    workers: int,
) -> None:
    def drawn() -> Iterator[list[int]]:
        yield from ([0], [1])
        raise KeyError("no weights")

    sampler = Endless()
    sampler.__class__ = type("Failing", (Endless,), {"__iter__": lambda self: drawn()})
    batches = adapted(DataLoader(Noisy(), batch_sampler=sampler, num_workers=workers)).open(1)
    next(batches)  # whether the one after it is the last cannot be known
    with pytest.raises(KeyError, match="no weights"):
        next(batches)


def test_sys_exit_in_a_worker_says_which_sample_called_it() -> None:
    class Exiting(Noisy):
        def __getitem__(self, index: int) -> Any:
            sys.exit(3)

    batches = adapted(DataLoader(Exiting(), batch_size=3, num_workers=1)).open(1)
    with pytest.raises(RuntimeError, match="SystemExit: 3") as caught:
        next(batches)
    assert "raised by sample 0 of the data set" in told(caught.value)


class Dying(Tiny):
    """Its workers end in another way than by an exception, some batches later."""

    way = "os._exit(3)"

    def setup_dataloader(self) -> None:
        way = self.way

        class Ending(Noisy):
            def __getitem__(self, index: int) -> Any:
                return eval(way) if index == 6 else index

        self.train_loader = DataLoader(Ending(), batch_size=1, num_workers=1)

    def train_batch(self) -> None:
        self.read_batch()


NO_MEMORY = "it had no more memory, or no more room in /dev/shm"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("os.kill(os.getpid(), 9)", NO_MEMORY),
        pytest.param(
            "os._exit(3)",
            "it ended itself with code 3. Look for os._exit",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "os.kill(os.getpid(), 11)",
            "a signal has ended it: Segmentation fault",
            marks=pytest.mark.long,
        ),
    ],
    ids=["killed", "exit", "crash"],
)
def test_how_a_worker_has_ended_is_told(tmp_path: Path, way: str, words: str) -> None:
    experiment = type("Dies", (Dying,), {"way": way})
    with pytest.raises(SystemError) as caught:
        trained(experiment, tmp_path, max_iteration=10, valid_interval=0)
    assert told(caught.value).count(f"A worker of a DataLoader has died: {words}") == 1


@pytest.mark.parametrize(
    ("said", "exitcode", "words"),
    [
        # Paddle's own words are the same for all that it cannot tell.
        ("(Fatal) Blocking queue is killed because …", 0, "it ended itself with code 0. Look for"),
        ("(Fatal) Blocking queue is killed because …", -9, NO_MEMORY),
        ("DataLoader process (pid 7) exited unexpectedly with code 3.", 3, "itself with code 3."),
        (
            "DataLoader process (pid 7) is killed by signal: Segmentation fault. (at …)",
            -11,
            "a signal has ended it: Segmentation fault.",
        ),
    ],
)
def test_what_paddle_says_of_a_worker_that_has_ended_is_explained(
    said: str, exitcode: int, words: str
) -> None:
    class Iterator:
        _workers = (argparse.Namespace(exitcode=None), argparse.Namespace(exitcode=exitcode))

        def __next__(self) -> None:
            raise SystemError(said)

    with pytest.raises(SystemError) as caught:
        next(Iterator())  # type: ignore[call-overload]
    workers.ReaderThreads().explain(caught.value)
    assert told(caught.value).count(words) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dataset", [Fragile(), FragileLines()], ids=["indices", "stream"])
def test_the_log_has_what_a_worker_of_a_loader_read_by_hand_has_raised(
    dataset: Any, tmp_path: Path
) -> None:
    class ByHand(Tiny):
        def valid(self) -> None:
            for _ in read:
                pass

    read = iter(DataLoader(dataset, batch_size=1, num_workers=1))
    with pytest.raises(SystemError):
        trained(ByHand, tmp_path)
    workers._end_workers(read)  # paddle's own end may wait for them for ever
    log = (tmp_path / "worker_0.log").read_text()
    assert log.rindex("is broken") > log.rindex("Blocking queue is killed")


class TwoArguments(Exception):
    """Pickle cannot make it again from its text alone."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


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
