"""Kinds of data sets and of loaders; here the batches depend on what is state; see kinds.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from kinds import EITHER, LOUD, REFUSED, TOLD, Kind, Points
from kinds_of_values import Box, number
from paddle.io import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
)


class _OfData(Kind):
    has_effect = False  # nothing is made anew
    dataset_class: type[Any] = Points

    def loader(self) -> Any:
        return DataLoader(self.dataset_class(), batch_size=4, shuffle=True)


# Data sets


class _Noisy(Points):
    def __init__(self) -> None:
        super().__init__()
        self.noise: Any = np.random.RandomState(1)

    def __getitem__(self, index: int) -> Any:
        return self.points[index] + self.noise.randn(3).astype("float32")


class DataSetWithItsGenerator(_OfData):
    dataset_class = _Noisy


class DataSetWithItsGeneratorInWorkers(_OfData):
    expected = EITHER

    def loader(self) -> Any:
        return DataLoader(_Noisy(), batch_size=4, shuffle=True, num_workers=1)


class DataSetWithGlobalNoise(_OfData):
    def loader(self) -> Any:
        data = _Noisy()
        data.noise = np.random
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=1)


class _Levelled(Points):
    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0
        self.transform: Any = Box(scale=1.0, names=["a"])

    def __getitem__(self, index: int) -> Any:
        return self.points[index] * np.float32(self.transform.scale) + np.float32(self.level)


class LevelOfADataSet(_OfData):
    dataset_class = _Levelled

    def on_train_epoch_begin(self) -> None:
        self.train_loader.dataset.level += 0.3


class LevelOfADataSetInWorkers(LevelOfADataSet):
    def loader(self) -> Any:
        return DataLoader(_Levelled(), batch_size=4, shuffle=True, num_workers=1)


class LevelByTheEpoch(_OfData):
    dataset_class = _Levelled

    def on_train_epoch_begin(self) -> None:
        self.train_loader.dataset.level = 0.1 * self.epoch


class LevelInEachUpdate(_OfData):
    dataset_class = _Levelled

    def use(self) -> float:
        self.train_loader.dataset.level += 0.1
        return 0.5


class ScaleOfATransform(_OfData):
    dataset_class = _Levelled

    def on_train_epoch_begin(self) -> None:
        self.train_loader.dataset.transform.scale *= 0.8


class TransformReplaced(_OfData):
    expected = LOUD
    dataset_class = _Levelled

    def on_train_epoch_begin(self) -> None:
        if self.epoch == 2:
            self.train_loader.dataset.transform = Box(scale=3.0)


class TransformOfAnotherClass(_OfData):
    expected = LOUD
    dataset_class = _Levelled

    def on_train_epoch_begin(self) -> None:
        if self.epoch == 2:
            self.train_loader.dataset.transform = _Strong()


class _Strong:
    scale = 3.0


class HardExamples(_OfData):
    """The data set is told the losses, in place."""

    def loader(self) -> Any:
        self.hard = _Weighted()
        return DataLoader(self.hard, batch_size=4, shuffle=True)

    def use(self) -> float:
        self.hard.weights[self.iteration % 12] += 0.5
        return 0.5


class _Weighted(Points):
    def __init__(self, size: int = 12) -> None:
        super().__init__(size)
        self.weights = np.ones(size, "float32")

    def __getitem__(self, index: int) -> Any:
        return self.points[index] * self.weights[index]


class PseudoLabels(_OfData):
    """A few changes in a long array."""

    expected = EITHER

    def loader(self) -> Any:
        return DataLoader(_Weighted(200_000), batch_sampler=_Few())

    def use(self) -> float:
        self.train_loader.dataset.weights[177_000 + 997 * (self.iteration % 12)] += 0.5
        return 0.5


class _Few:
    """Batches of twelve samples of many."""

    batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        places = [177_000 + 997 * n for n in range(12)]
        return iter([places[:4], places[4:8], places[8:]])

    def __len__(self) -> int:
        return 3


class NamesThatAreCorrected(_OfData):
    """A few changes in a long list."""

    expected = EITHER

    def loader(self) -> Any:
        return DataLoader(_Named(), batch_sampler=_Few())

    def use(self) -> float:
        self.train_loader.dataset.names[177_000 + 997 * (self.iteration % 12)] += "x"
        return 0.5


class _Named(Points):
    def __init__(self) -> None:
        super().__init__(1)
        self.names = [f"name-{n}" for n in range(200_000)]

    def __getitem__(self, index: int) -> Any:
        return self.points[0] * np.float32(len(self.names[index]))

    def __len__(self) -> int:
        return len(self.names)


class ChangedInPlace(_OfData):
    def use(self) -> float:
        self.train_loader.dataset.points[self.iteration % 12] *= 0.5
        return 0.5


class CacheOfADataSet(_OfData):
    dataset_class = type(
        "Cached",
        (Points,),
        {
            "__init__": lambda self: (Points.__init__(self), setattr(self, "cache", {}))[0],
            "__getitem__": lambda self, index: self.cache.setdefault(index, self.points[index]),
        },
    )


class LargeCacheOfADataSet(_OfData):
    """Larger than what is saved; it may be told."""

    expected = EITHER
    dataset_class = type(
        "Large",
        (Points,),
        {
            "__init__": lambda self: (Points.__init__(self), setattr(self, "cache", {}))[0],
            "__getitem__": lambda self, index: self.cache.setdefault(
                index, np.repeat(self.points[index], 600_000)
            )[::600_000].copy(),
        },
    )


class _Learning(Points):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[float, int] = {}

    def __getitem__(self, index: int) -> Any:
        place = self.numbers.setdefault(float(self.points[index][0]), len(self.numbers))
        return self.points[index] + np.float32(place)


class VocabularyThatGrows(_OfData):
    dataset_class = _Learning


class _Counting(Points):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.points[index] + np.float32(self.calls % 7)


class DataSetThatCounts(_OfData):
    dataset_class = _Counting


class DataSetInASubset(_OfData):
    expected = EITHER

    def loader(self) -> Any:
        data = ConcatDataset([Subset(_Levelled(), [*range(6)]), Points(6)])
        return DataLoader(data, batch_size=4, shuffle=True)

    def use(self) -> float:
        self.train_loader.dataset.datasets[0].dataset.level += 0.1
        return 0.5


# What makes batches


class _Counter:
    def __init__(self) -> None:
        self.calls, self.level = 0, 1.0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return np.stack(batch) * np.float32(self.level) + np.float32(self.calls % 5)


class CollateFnThatCounts(_OfData):
    def loader(self) -> Any:
        return DataLoader(Points(), batch_size=4, collate_fn=_Counter())


class LevelOfACollateFn(_OfData):
    def loader(self) -> Any:
        self.collate = _Level()
        return DataLoader(Points(), batch_size=4, shuffle=True, collate_fn=self.collate)

    def use(self) -> float:
        self.collate.level *= 1.1
        return 0.5


class _Level(_Counter):
    def __call__(self, batch: Any) -> Any:
        return np.stack(batch) * np.float32(self.level)


class CollatingMethodOfTheExperiment(LevelOfACollateFn):
    def loader(self) -> Any:
        self.collate: Any = Box(level=1.0)
        return DataLoader(Points(), batch_size=4, shuffle=True, collate_fn=self.collated)

    def collated(self, batch: Any) -> Any:
        return np.stack(batch) * np.float32(self.collate.level)


# Streams


class _Stream(IterableDataset):
    def __init__(self) -> None:
        self.points, self.passes = Points().points, 0

    def __iter__(self) -> Iterator[Any]:
        yield from self.points


class Stream(_OfData):
    def loader(self) -> Any:
        return DataLoader(_Stream(), batch_size=4)


class StreamThatCounts(_OfData):
    def loader(self) -> Any:
        return DataLoader(_Passing(), batch_size=4)


class _Passing(_Stream):
    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.points * np.float32(self.passes)


class StreamThatShuffles(_OfData):
    def loader(self) -> Any:
        return DataLoader(_Shuffling(), batch_size=4)


class _Shuffling(_Stream):
    def __init__(self) -> None:
        super().__init__()
        self.files = [(f"file {n}", n) for n in range(len(self.points))]
        self.random = np.random.RandomState(3)
        self.order = np.arange(4)

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.files)
        self.random.shuffle(self.order)
        self.last = self.order[0]  # which setup has not made
        for _, n in self.files:
            yield self.points[n] + np.float32(self.order[n % 4] + self.random.rand())


class StreamOfALevelThatRises(_OfData):
    def loader(self) -> Any:
        return DataLoader(_Raised(), batch_size=4)

    def on_train_epoch_begin(self) -> None:
        self.train_loader.dataset.level += 1

    def on_train_batch_end(self) -> None:
        self.train_loader.dataset.noise = self.iteration / 10  # within a pass


class _Raised(_Stream):
    level, noise = 0, 0.0

    def __iter__(self) -> Iterator[Any]:
        for point in self.points[: 5 + self.level]:
            yield point * np.float32(self.level)


class StreamOfAnotherOrderEachTime(_OfData):
    expected = LOUD
    has_effect = False  # two runs differ

    def loader(self) -> Any:
        return _Unseeded()


class _Unseeded:
    def __iter__(self) -> Iterator[Any]:
        for n in np.random.default_rng().permutation(1000)[:40]:
            yield paddle.full([4, 3], n / 1000)


class StreamWithAState(_OfData):
    def loader(self) -> Any:
        return _Batches()


class _Batches:
    """Batches that go on where they are, with their state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.place += 1
            yield paddle.full([4, 3], self.place % 7 / 7)
            if self.place % 3 == 0:
                return

    def state_dict(self) -> Any:
        return {"place": self.place}

    def set_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class GeneratorForALoader(_OfData):
    expected = LOUD

    def loader(self) -> Any:
        return (paddle.full([4, 3], n % 7 / 7) for n in range(100))


class ListForALoader(_OfData):
    def loader(self) -> Any:
        return [paddle.full([4, 3], n / 7) for n in range(4)]


class ListForALoaderThatChanges(_OfData):
    expected = EITHER

    def loader(self) -> Any:
        return [paddle.full([4, 3], n / 7) for n in range(4)]

    def on_train_epoch_end(self) -> None:
        self.train_loader[0] = self.train_loader[0] + 1


class NoLoader(_OfData):
    def setup_dataloader(self) -> None:
        self.generator = np.random.default_rng(3)

    def read_batch(self) -> Any:
        return paddle.to_tensor(self.generator.normal(size=[4, 3]).astype("float32"))


class NoLoaderButABuffer(_OfData):
    def setup_dataloader(self) -> None:
        self.buffer: Any = Box(rows=np.zeros((8, 3), "float32"), at=0)

    def read_batch(self) -> Any:
        self.buffer.rows[self.buffer.at % 8] = random.random()
        self.buffer.at += 1
        return paddle.to_tensor(self.buffer.rows)


class SecondLoaderByHand(_OfData):
    expected = TOLD

    def make(self) -> None:
        self.other = DataLoader(Points(20), batch_size=4, shuffle=True)
        self.walk: Any = None

    def use(self) -> float:
        if self.walk is None or self.iteration % 5 == 2:
            self.walk = iter(self.other)
        return number(next(self.walk))


class SecondLoaderWhole(_OfData):
    """Read from its start in each update."""

    def make(self) -> None:
        self.other = DataLoader(Points(20), batch_size=10)

    def use(self) -> float:
        return number(list(self.other)[1])


class SecondDataSetByItsIndex(_OfData):
    def make(self) -> None:
        self.other, self.at = Points(20), 0

    def use(self) -> float:
        self.at = (self.at + 3) % 20
        return number(self.other[self.at])


# Replaced on the way


class LoaderSetAnew(_OfData):
    expected = REFUSED

    def use(self) -> float:
        if self.now(2):
            self.train_loader = DataLoader(Points(20), batch_size=4, shuffle=True)
        return 0.5


class LoaderSetAnewAtAnEpochsEnd(_OfData):
    expected = REFUSED

    def on_train_epoch_end(self) -> None:
        self.train_loader = DataLoader(Points(12 + 4 * self.epoch), batch_size=4, shuffle=True)


class DataSetSetAnew(_OfData):
    expected = LOUD

    def on_train_epoch_end(self) -> None:
        if self.epoch == 1:
            self.train_loader.dataset = _Weighted()
            self.train_loader.dataset.weights *= 2


class ValidationLoaderSetAnew(_OfData):
    training = {"valid_interval": 2}  # noqa: RUF012
    expected = LOUD

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.valid_loader = DataLoader(Points(8), batch_size=4)

    def valid(self) -> dict[str, float]:
        total = sum(float(self.model(batch).sum()) for batch in self.valid_batches())
        return {"loss": total}

    def use(self) -> float:
        if self.now(3):
            self.valid_loader = DataLoader(Points(4), batch_size=4)
        return 0.5


# Ways to read


class BestValidation(_OfData):
    training = {"valid_interval": 2}  # noqa: RUF012

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.valid_loader = DataLoader(Points(8), batch_size=4)

    def make(self) -> None:
        self.best, self.bad = Box(loss=1e9, at=0), 0

    def valid(self) -> dict[str, float]:
        outputs = [self.model(batch).square().mean() for batch in self.valid_batches()]
        return self.average({"loss": float(sum(outputs))}, weight=8)

    def on_evaluate_end(self, results: Any) -> None:
        if results["loss"] < self.best.loss:
            self.best.loss, self.best.at = results["loss"], self.iteration
        self.bad = self.iteration - self.best.at

    def use(self) -> float:
        return number([self.best, self.bad])


class TwoBatchesInAnUpdate(_OfData):
    def use(self) -> float:
        return number(self.read_batch())


class BatchKept(_OfData):
    """The batch of the update before is used again."""

    has_effect = True

    def make(self) -> None:
        self.before = paddle.zeros([4, 3])

    def update(self) -> Any:
        batch = self.read_batch()
        loss = (self.model(batch) - self.model(self.before)).square().mean()
        self.before = batch
        loss.backward()
        self.step()
        return loss.detach()


class BatchesOfAnUpdate(_OfData):
    training = {"accumulation_steps": 2}  # noqa: RUF012

    def update(self) -> Any:
        for batch in self.micro_batches():
            loss = self.model(batch).square().mean()
            self.backward(loss)
        self.step_optimizers()
        return loss.detach()
