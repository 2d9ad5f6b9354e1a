"""Predicting: one result for each sample, in the order of the data, on every rank.

An experiment that has this mixin, `class Experiment(Prediction, ExperimentBase)`, defines
`predict_batch` and calls `self.predict(self.test_loader)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from expbase.base.arrays import to_numpy
from expbase.base.errors import NotImplementedMistake, TypeMistake, ValueMistake
from expbase.data.loaders import is_map_style
from expbase.experiment import ExperimentBase

Placed = tuple[Any, Any]  # where a sample is in the data set, and its result


class Prediction(ExperimentBase):
    """A mixin: `predict` runs `predict_batch` over data, as valid is run."""

    def on_predict_begin(self) -> None:
        """Before the first batch of predict; the layers are in eval mode."""

    def on_predict_batch_end(self, outputs: Any) -> None:
        """After each predict_batch.

        Args:
            outputs: What it has returned.
        """

    def on_predict_end(self, results: Sequence[Any]) -> None:
        """At the end of predict.

        Args:
            results: Of all ranks, one per sample, in the order of the data.
        """

    def predict_batch(self, batch: Any) -> Any:
        """Computes the results of a batch for predict; you write it.

        Args:
            batch: As the loader yields it.

        Returns:
            A tensor or array [B, …], a mapping or tuple of such, or a list of B results.
        """
        raise NotImplementedMistake(
            f"{type(self).__name__}.predict_batch: not defined; predict needs it. Expected a "
            "method that takes a batch and returns its outputs, one per sample."
        )

    def predict(self, loader: Any) -> list[Any]:
        """Runs predict_batch over the data: in eval mode, without gradients, each rank its share.

        Args:
            loader: A paddle.io.DataLoader or an iterable of batches; drop_last must be off.

        Returns:
            One result for each sample that the loader yields, in the order of the data set, the
            same on every rank; one that it yields twice has one. Of an iterable: in the order in
            which it comes, rank by rank.

        Raises:
            ValueError: drop_last is on, no rank has a batch, or predict_batch returned more or
                fewer results than samples.
        """
        _check_loader(loader)
        # Whether the data set itself makes whole batches, of any size.
        ready = is_map_style(loader) and loader.batch_sampler is None
        placed: list[Placed] = []
        with self.internals.evaluating():
            self.internals.fire("on_predict_begin")
            for batch in self.valid_batches(loader):
                outputs = self.predict_batch(batch)
                placed += _placed(
                    split(outputs), self.internals.evaluated_indices, len(placed), ready=ready
                )
                self.internals.fire("on_predict_batch_end", outputs)
            of_ranks = self.gather(placed)
            results = _in_order(of_ranks, is_stream=not is_map_style(loader))
            self.internals.fire("on_predict_end", results)
        return results


def _check_loader(loader: Any) -> None:
    if loader is None:
        raise ValueMistake("predict: no loader given; expected one, such as self.test_loader.")
    sampler = getattr(loader, "batch_sampler", None)
    if getattr(loader, "drop_last", False) or getattr(sampler, "drop_last", False):
        raise ValueMistake(
            "predict: the loader has drop_last=True, so some samples would have no result; "
            "expected drop_last=False."
        )


def _in_order(of_ranks: list[list[Placed]], *, is_stream: bool) -> list[Any]:
    if is_stream:  # dealt out by the user, who knows how
        return [result for of_rank in of_ranks for _, result in of_rank]
    by_place = {place: result for of_rank in of_ranks for place, result in of_rank}
    return [by_place[place] for place in sorted(by_place)]


def _placed(results: list[Any], indices: Any, count: int, *, ready: bool) -> list[Placed]:
    """Pairs each result of a batch with the place of its sample, by which they are sorted.

    `indices` are None for a stream, of which there were `count` results before. If the batch is
    `ready`, its one index is that of the whole batch.
    """
    if indices is None or ready:
        index = count if indices is None else indices[0]
        places = [(index, number) for number in range(len(results))]
    else:
        places = [(index, 0) for index in indices]
    if len(places) != len(results):
        raise ValueMistake(
            f"predict_batch: returned {len(results)} results for {len(places)} samples; "
            "expected one per sample: the first axis of each array is the batch."
        )
    return list(zip(places, results, strict=True))


def split(outputs: Any) -> list[Any]:
    """Splits the outputs of a batch into those of its samples.

    Args:
        outputs: A tensor or array [B, …], a mapping or tuple of such, or a list of B results.

    Returns:
        B numpy arrays or numbers, or mappings or tuples of them.

    Raises:
        TypeError: It is something else.
        ValueError: Its parts have different lengths.
    """
    if isinstance(outputs, Mapping):
        return [dict(zip(outputs, row, strict=True)) for row in split((*outputs.values(),))]
    if isinstance(outputs, tuple):
        return list(zip(*map(split, outputs), strict=True))
    if isinstance(outputs, list):
        return [_plain(value) for value in outputs]
    array = to_numpy(outputs) if isinstance(outputs, paddle.Tensor) else outputs
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise TypeMistake(
            f"predict_batch: returned {outputs!r}; expected a tensor or array with the batch as "
            "its first axis, a mapping or tuple of them, or a list with one entry per sample."
        )
    return list(array)


def _plain(value: Any) -> Any:
    if isinstance(value, paddle.Tensor):
        return to_numpy(value).item() if value.size == 1 else to_numpy(value)
    return value
