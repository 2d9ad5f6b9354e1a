"""Batches as tensors where they are used, and as arrays for the way out of a worker.

    to_tensors = tensors_at(loader.places[0])
    batch = to_tensors(batch)    # as paddle's DataLoader would return it
    to_arrays(batch)             # in a worker

A copy to a device is queued behind the kernels, and nothing waits for it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle.base import core

from expbase.base.device import as_place
from expbase.base.errors import TypeMistake


def tensors_at(place: Any) -> Callable[[Any], Any]:
    """Returns a function that makes a batch what paddle's DataLoader would return.

    It takes arrays, tensors and other values in lists, tuples and mappings. Arrays become tensors,
    tensors of another place are copied, tuples become lists.

    Args:
        place: The paddle place of the tensors.
    """
    kind = as_place(place)
    if kind.is_gpu_place() or kind.is_custom_place():
        return _Queue(place)
    # To an XPU paddle queues no copies of such memory: paddle/phi/core/memory/memcpy.cc, Copy.
    return functools.partial(_mapped, convert=functools.partial(_copied, place=place))


def reader_tensors_at(place: Any) -> Callable[[Any], Any]:
    """Returns a function that moves what paddle's reader of worker processes gives to a place.

    Its batches are in pinned memory on a GPU, and with use_buffer_reader=False on the host: the
    first kernel that uses such a tensor would copy it, and wait for the device
    (paddle/phi/core/operators/reader/buffered_reader.cc, ReadAsync;
    paddle/phi/api/lib/data_transform.cc, TransDataPlace).
    """
    return (lambda batch: batch) if as_place(place).is_cpu_place() else tensors_at(place)


def _copied(value: Any, place: Any) -> Any:
    """Returns an array or a tensor as a tensor at a place, and another value as it is."""
    if isinstance(value, np.ndarray):
        return paddle.Tensor(value, place=place)  # paddle.to_tensor does this after more questions
    is_elsewhere = isinstance(value, paddle.Tensor) and not value.place._equals(place)
    return value._copy_to(place, True) if is_elsewhere else value


class _Queue:
    """Copies batches to a device, one after another, behind the kernels that are queued there.

    Args:
        place: The device's.
    """

    # What is read by copies that may still be queued, and the event behind them. One list for all:
    # a copy may outlive its loader. For a GPU paddle keeps it, and for no other device:
    # paddle/fluid/pybind/eager_method.cc, IncreaseTensorReferenceCountUntilCopyComplete.
    under_way: ClassVar[collections.deque[tuple[Any, list[Any]]]] = collections.deque()

    def __init__(self, place: Any) -> None:
        self._place = place
        self._kind = as_place(place)
        # From memory that is not pinned a copy may wait for the stream (the manual of CUDA's
        # interface for drivers, "API synchronization behavior").
        pinned = self._kind.is_gpu_place()
        self._host = core.CUDAPinnedPlace() if pinned else core.CPUPlace()

    def __call__(self, batch: Any) -> Any:
        """Returns the batch on the device."""
        sources: list[Any] = []
        batch = _mapped(batch, functools.partial(self._tensor, sources=sources))
        if sources and self._kind.is_custom_place():
            device = self._kind.custom_device_type(), self._kind.custom_device_id()
            event = core.CustomDeviceEvent(*device)
            stream = core._get_current_custom_device_stream(*device)  # type: ignore[attr-defined]
            event.record(stream)
            self.under_way.append((event, sources))
            while self.under_way and self.under_way[0][0].query():
                self.under_way.popleft()
        return batch

    def _tensor(self, value: Any, sources: list[Any]) -> Any:
        """Returns a value of a batch on the device; notes from what its copy reads."""
        if isinstance(value, np.ndarray):
            value = paddle.Tensor(value, place=self._host)  # the data set may write into its array
        elif not isinstance(value, paddle.Tensor) or value.place._equals(self._place):
            return value
        elif not (value.place.is_cpu_place() or value.place.is_cuda_pinned_place()):
            return value._copy_to(self._place, True)  # from another card, which has its own queue
        else:
            value = value._copy_to(self._host, True)  # a collate_fn may fill it anew
        sources.append(value)
        return value._copy_to(self._place, False)


def to_arrays(batch: Any) -> Any:
    """Returns the batch of a worker with arrays in the place of tensors.

    Paddle makes tensors of them again. A tensor it would send in another thread, and take its
    memory away meanwhile: the worker dies, sooner or later (paddle/io/dataloader/worker.py, and
    _reduce_lodtensor in paddle/incubate/multiprocessing/reductions.py).
    """
    return _mapped(batch, _to_array)


def _to_array(value: Any) -> Any:
    if not isinstance(value, paddle.Tensor):
        return value
    if value.dtype == paddle.bfloat16:
        raise TypeMistake(
            "a tensor of bfloat16 in a worker of a DataLoader, which sends numpy arrays; expected "
            "float32, or num_workers=0."
        )
    return value.numpy()


def _mapped(batch: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts what a batch holds; its tuples become lists."""
    if isinstance(batch, Mapping):
        return {key: _mapped(value, convert) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [_mapped(value, convert) for value in batch]
    return convert(batch)
