"""Making batches: in this thread, or in worker processes that leave nothing behind.

What a data set draws for a sample depends on the key that the sample comes with, so it is the
same here, in any worker, and after a resume. Which batches are made is decided in data.py.

    fetcher = Fetcher(loader)                     # a DataLoader over a data set with indices
    for batch, indices, last in fetcher.fetch(iter([(0, [5, 2]), (1, [7, 1])]), base=seed): ...
    fetcher.close()
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader
from paddle.io.dataloader import worker as paddle_worker
from paddle.io.dataloader.collate import default_collate_fn, default_convert_fn

from expbase.processes import end_with_parent, forking
from expbase.state import rng

# The number of a batch in its pass, and the indices of its samples.
Numbered = tuple[int, Any]


class Fetcher:
    """Makes the numbered batches of a DataLoader over a data set with indices.

    Args:
        loader: The user's; its settings are used and never changed.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._worker_loader: DataLoader | None = None  # of persistent workers
        self._persistent_are_busy = False

    def fetch(self, items: Iterator[Numbered], base: int) -> Iterator[tuple[Any, list[Any], bool]]:
        """Makes batch after batch.

        Args:
            items: Which.
            base: The seed that the keys of the samples begin with.

        Yields:
            The batch as paddle's loader gives it, the indices of its samples, and whether it is
            the last.
        """
        return (self._by_workers if self._loader.num_workers else self._here)(items, base)

    def close(self) -> None:
        """Ends persistent workers. May be called twice."""
        if self._worker_loader is not None and self._worker_loader._iterator is not None:
            self._worker_loader._iterator._try_shutdown_all(1)
            self._worker_loader._iterator = None  # a later run over the data starts new ones

    def _here(self, items: Iterator[Numbered], base: int) -> Iterator[tuple[Any, list[Any], bool]]:
        # Synchronous, in this thread: paddle's own thread reads ahead, draws from the states
        # that training draws from, and hangs for ever when the data set raises.
        loader, place = self._loader, self._loader.places[0]
        dataset = _KeyedDataset(loader.dataset)
        for (number, indices), last in with_last(items):
            with rng.isolated():
                if loader.auto_collate_batch:
                    samples = [dataset[key] for key in _keys(base, number, indices)]
                    batch = (loader.collate_fn or default_collate_fn)(samples)
                else:
                    sample = dataset[(base, number, 0, indices)]
                    batch = (loader.collate_fn or default_convert_fn)(sample)
            yield to_tensors(batch, place), _index_list(indices), last

    def _by_workers(
        self, items: Iterator[Numbered], base: int
    ) -> Iterator[tuple[Any, list[Any], bool]]:
        # The workers run ahead of training: what was handed out waits here for its batch.
        handed_out: list[tuple[Any, bool]] = []

        def keys() -> Iterator[list[Any]]:
            for (number, indices), last in with_last(items):
                handed_out.append((indices, last))
                single = not self._loader.auto_collate_batch
                yield _keys(base, number, [indices] if single else indices)

        # Persistent workers serve one iteration at a time; another one gets workers of its own.
        persistent = self._loader._persistent_workers and not self._persistent_are_busy
        loader = self._persistent_loader() if persistent else self._new_loader()
        loader.batch_sampler.keys = keys()
        with rng.isolated(base), forking():  # making its iterator draws a seed
            iterator = iter(loader)
        self._persistent_are_busy |= persistent
        last = False
        try:
            for batch in iterator:
                if _is_failure(batch):
                    batch[1].raise_here()
                indices, last = handed_out.pop(0)
                yield batch, _index_list(indices), last
        finally:
            self._persistent_are_busy &= not persistent
            if not (persistent and last):
                # Persistent workers of a pass that was left early hold batches of it, which
                # paddle would give as the next pass's.
                iterator._try_shutdown_all(1)
                loader._iterator = None

    def _persistent_loader(self) -> DataLoader:
        if self._worker_loader is None:
            self._worker_loader = self._new_loader()
            self._worker_loader._persistent_workers = True
        return self._worker_loader

    def _new_loader(self) -> DataLoader:
        loader = with_hardened_workers(self._loader)
        loader.dataset = _KeyedDataset(self._loader.dataset, failures_as_values=True)
        loader.batch_sampler = _Keys()
        loader.collate_fn = _Collate(self._loader.collate_fn, self._loader.auto_collate_batch)
        loader.auto_collate_batch = True
        loader._persistent_workers = False
        loader._iterator = None
        return loader


def with_hardened_workers(loader: DataLoader) -> DataLoader:
    """A copy of the loader whose workers end with this process and survive its group's signals."""
    hardened = copy.copy(loader)
    hardened.worker_init_fn = _WorkerInit(loader.worker_init_fn, loader.dataset)
    return hardened


class BatchedStream:
    """A DataLoader over an IterableDataset without workers, read in this thread."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        loader, place = self._loader, self._loader.places[0]
        samples = iter(loader.dataset)
        if not loader.auto_collate_batch:
            for sample in samples:
                yield to_tensors((loader.collate_fn or default_convert_fn)(sample), place)
            return
        while chunk := list(itertools.islice(samples, loader.batch_size)):
            if len(chunk) == loader.batch_size or not loader.drop_last:
                yield to_tensors((loader.collate_fn or default_collate_fn)(chunk), place)


class _KeyedDataset(paddle.io.Dataset):  # type: ignore[misc]  # paddle has no types for us
    """A data set that seeds the random states for each sample before it makes it."""

    def __init__(self, dataset: Any, failures_as_values: bool = False) -> None:
        self.dataset = dataset
        self._failures_as_values = failures_as_values

    def __getitem__(self, key: tuple[int, int, int, Any]) -> Any:
        base, number, place, index = key
        rng.seed_cpu(rng.derive(base, number, place))
        if not self._failures_as_values:
            return self.dataset[index]
        try:
            return self.dataset[index]
        except Exception as error:
            return _Failure(error)

    def __len__(self) -> int:
        return len(self.dataset)


class _Failure:
    """An exception of a worker, on its way to the main process, which paddle would not tell."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.text = traceback.format_exc()

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.loads(pickle.dumps(self.error))
            error: Exception = self.error
        except Exception:
            error = RuntimeError(f"{type(self.error).__name__}: {self.error}")
        return _rebuilt_failure, (error, self.text)

    def raise_here(self) -> None:
        """Raises it, with the worker's traceback as the cause."""
        raise self.error from RuntimeError(f"in a worker of the loader:\n{self.text}")


def _is_failure(batch: Any) -> bool:
    return isinstance(batch, list) and len(batch) == 2 and isinstance(batch[1], _Failure)


def _rebuilt_failure(error: Exception, text: str) -> _Failure:
    failure = _Failure(error)
    failure.text = text
    return failure


class _Collate:
    """The user's collate_fn in a worker; a failure of a sample or of its own becomes the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any] | None, batched: bool) -> None:
        self._collate_fn = collate_fn or (default_collate_fn if batched else default_convert_fn)
        self._batched = batched

    def __call__(self, samples: list[Any]) -> Any:
        failures = [sample for sample in samples if isinstance(sample, _Failure)]
        try:
            if not failures:
                return self._collate_fn(samples if self._batched else samples[0])
        except Exception as error:
            failures = [_Failure(error)]
        return [np.zeros(1), failures[0]]  # paddle takes a batch without arrays for the end


class _WorkerInit:
    """What a worker process does first."""

    def __init__(self, then: Callable[[int], None] | None, dataset: Any) -> None:
        self._then = then
        self._dataset = dataset

    def __call__(self, worker_id: int) -> None:
        end_with_parent(f"/dev/shm/paddle_{os.getpid()}_*")
        os.setpgrp()  # the launcher's SIGTERM goes to the process group and is not for workers
        info = paddle_worker._worker_info
        info.__dict__["dataset"] = self._dataset  # the user's, not our wrapper
        if self._then is not None:
            self._then(worker_id)


class _Keys:
    """A batch sampler whose batches are put in from outside, anew for each pass."""

    keys: Iterator[list[Any]]

    def __iter__(self) -> Iterator[list[Any]]:
        return self.keys


def _keys(base: int, number: int, indices: Iterable[Any]) -> list[Any]:
    return [(base, number, place, index) for place, index in enumerate(indices)]


def _index_list(indices: Any) -> list[Any]:
    return list(indices) if isinstance(indices, (list, tuple, np.ndarray)) else [indices]


def with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last; reads one ahead."""
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True


def to_tensors(batch: Any, place: Any) -> Any:
    """The batch as paddle's DataLoader would give it: arrays as tensors, tuples as lists."""
    if isinstance(batch, np.ndarray):
        return paddle.to_tensor(batch, place=place)
    if isinstance(batch, (str, bytes)):
        return batch
    if isinstance(batch, Mapping):
        return {key: to_tensors(value, place) for key, value in batch.items()}
    if isinstance(batch, Sequence):
        return [to_tensors(value, place) for value in batch]
    if isinstance(batch, paddle.Tensor) and batch.place._type() != place._type():
        return paddle.to_tensor(batch, place=place)
    return batch
