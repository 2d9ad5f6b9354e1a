"""Predicting: one result for each sample, in the order of the data, felt by nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from graded import SETTINGS, Graded
from paddle.io import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    IterableDataset,
    RandomSampler,
    SequenceSampler,
)
from tiny import Tiny, curve, make, trained

from expbase import on
from expbase.extras.prediction import Prediction


def test_predict_in_valid_keeps_its_phase_and_out_of_the_log_of_it(tmp_path: Path) -> None:
    phases: list[str] = []

    class Asking(Graded):
        def predict_batch(self, batch: Any) -> Any:
            phases.append(self.internals.phase)
            self.log(inner=1.0)
            return super().predict_batch(batch)

        def valid(self) -> dict[str, float]:
            self.log(outer=1.0)
            self.predict(self.valid_loader)
            return super().valid()

    trained(Asking, tmp_path / "run", max_iteration=1)
    assert phases == ["valid"] * 4
    assert curve(tmp_path / "run", "valid/outer") == {1: 1.0}
    assert curve(tmp_path / "run", "valid/inner") == {}


class Numbers(Dataset):
    """Sample i is i."""

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.full(4, index, "float32"),)

    def __len__(self) -> int:
        return 11


class Chunks(Dataset):
    """The same numbers in batches that are ready."""

    chunks = ((0, 1, 2), (3,), (4, 5, 6, 7, 8), (9, 10))

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.stack([np.full(4, n, "float32") for n in self.chunks[index]]),)

    def __len__(self) -> int:
        return len(self.chunks)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[np.ndarray]]:
        return (Numbers()[index] for index in range(11))


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": shuffled,
    "shuffled by a worker": lambda: shuffled(num_workers=1),
    "random sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(sampler=RandomSampler(Numbers()), batch_size=5)
    ),
    "distributed sampler": lambda: DataLoader(
        Numbers(), batch_sampler=DistributedBatchSampler(Numbers(), 4, shuffle=True)
    ),
    "ready batches": lambda: DataLoader(Chunks(), batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "list": lambda: [Chunks()[index] for index in range(4)],
    "generator": lambda: (Chunks()[index] for index in range(4)),
}


SHUFFLED = ("shuffled", "shuffled by a worker", "random sampler")


class Oracle(Graded):
    """What predict_batch gives is a function of the numbers; it can be exchanged."""

    gives: Any = staticmethod(lambda numbers: numbers)

    def setup_model(self) -> None:
        super().setup_model()
        self.order: list[float] = []
        self.events: list[str] = []

    def predict_batch(self, batch: Any) -> Any:
        self.order += np.asarray(batch[0])[:, 0].tolist()
        return self.gives(paddle.to_tensor(np.asarray(batch[0])[:, 0]))

    def on_predict_begin(self) -> None:
        self.events.append("begin")

    def on_predict_batch_end(self, outputs: Any) -> None:
        self.events.append("batch")

    def on_predict_end(self, results: Any) -> None:
        self.events.append(f"end {len(results)}")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    exp = make(Oracle, tmp_path_factory.mktemp("oracle") / "run")
    exp.setup()
    with exp.internals.closing():
        yield exp


@pytest.fixture
def asked(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Oracle]:
    """The oracle with another function."""

    def ask(gives: Any) -> Oracle:
        monkeypatch.setattr(Oracle, "gives", staticmethod(gives))
        return oracle

    return ask


@pytest.mark.device
@pytest.mark.parametrize("kind", LOADERS)
def test_predict_gives_one_result_per_sample_in_the_order_of_the_data(
    oracle: Oracle, kind: str
) -> None:
    oracle.order, oracle.events = [], []
    assert oracle.predict(LOADERS[kind]()) == list(range(11))
    assert sorted(oracle.order) == list(range(11))
    assert (oracle.order == list(range(11))) == (kind not in SHUFFLED)
    num_batches = 4 if "batches" in kind or kind in ("list", "generator", "stream") else 3
    assert oracle.events == ["begin", *["batch"] * num_batches, "end 11"]


@pytest.mark.device
def test_predict_tells_the_samples_of_every_kind_of_output_apart(
    asked: Callable[[Any], Oracle],
) -> None:
    def first_and_last(gives: Any) -> tuple[Any, Any]:
        results = asked(gives).predict(shuffled())
        assert len(results) == 11
        return results[0], results[10]

    assert first_and_last(lambda n: n.numpy()) == (0, 10)
    assert first_and_last(lambda n: (n, n.numpy() * 2)) == ((0, 0), (10, 20))
    assert first_and_last(lambda n: [f"no. {int(i)}" for i in n]) == ("no. 0", "no. 10")
    assert first_and_last(lambda n: n.astype("bfloat16")) == (0, 10)
    numbers = first_and_last(lambda n: [i + 1 for i in n])
    assert (numbers, type(numbers[0])) == ((1, 11), float)
    nested = first_and_last(lambda n: {"n": n, "more": (n, {"text": [str(int(i)) for i in n]})})
    assert nested[1] == {"n": 10, "more": (10, {"text": "10"})}
    rows = first_and_last(lambda n: n.unsqueeze(1) * paddle.ones([1, 3]))
    assert [type(row) for row in rows] == [np.ndarray] * 2
    assert rows[1].tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("gives", "error", "text"),
    [
        (lambda n: n[:1], ValueError, "returned 1 results for 4 samples; expected one per sample"),
        (lambda n: [1, 2], ValueError, "returned 2 results for 4 samples"),
        (lambda n: {}, ValueError, "returned 0 results for 4 samples"),
        (lambda n: n.mean(), TypeError, r"returned Tensor\(shape=\[\]"),
        (lambda n: None, TypeError, "returned None; expected"),
    ],
)
def test_outputs_that_are_not_one_per_sample_are_refused(
    asked: Callable[[Any], Oracle], gives: Any, error: type[Exception], text: str
) -> None:
    exp = asked(gives)
    with pytest.raises(error, match=f"predict_batch: {text}"):
        exp.predict(LOADERS["in order"]())
    assert exp.internals.phase == "train"
    assert exp.model.training


def test_a_loader_that_leaves_samples_out_is_refused(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Numbers(), batch_size=4, drop_last=True))
    sampler = BatchSampler(sampler=SequenceSampler(Numbers()), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Numbers(), batch_sampler=sampler))
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Stream(), batch_size=4, drop_last=True))


def test_predict_without_a_loader_says_so(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="predict: no loader given; expected one"):
        oracle.predict(oracle.test_loader)


def test_a_loader_that_was_made_for_one_prediction_is_let_go(oracle: Oracle) -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    gone = weakref.ref(loader)
    oracle.predict(loader)
    del loader
    gc.collect()
    assert gone() is None


class Remembering:
    """A loader that knows its place, which is saved and restored."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        while self.place < 30:
            self.place += 1
            random = np.random.RandomState(self.place)
            points, labels = random.randn(4, 4).astype("float32"), random.randint(0, 2, 4)
            yield paddle.to_tensor(points), paddle.to_tensor(labels)
        self.place = 0


@pytest.mark.device
def test_predict_over_a_training_loader_that_has_a_place_does_not_move_it(tmp_path: Path) -> None:
    class Plain(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = Remembering()

    class Asking(Plain):
        @on("on_train_batch_end", filter_fn=lambda _, exp: exp.iteration == 2)
        def ask(self) -> None:
            assert self.predict(self.train_loader)

    for experiment in (Plain, Asking):
        trained(experiment, tmp_path / experiment.__name__, **SETTINGS)
    lines = [curve(tmp_path / name, "train/loss") for name in ("Plain", "Asking")]
    assert lines[0] == lines[1]


def test_predict_without_predict_batch_says_what_is_missing(tmp_path: Path) -> None:
    class Silent(Prediction, Tiny):
        pass

    exp: Any = make(Silent, tmp_path / "run")
    exp.setup()
    with (
        exp.internals.closing(),
        pytest.raises(NotImplementedError, match=r"Silent\.predict_batch: not d"),
    ):
        exp.predict(exp.valid_loader)
