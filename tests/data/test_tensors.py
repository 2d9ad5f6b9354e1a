"""Batches as tensors on a device: where they are, what they hold, and that nothing waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pretend
import pytest
from driving import Lines, adapted, plain
from paddle.io import DataLoader, Dataset, TensorDataset
from tiny import DEVICE

from expbase.data.tensors import tensors_at


class Numbers(Dataset):
    """Arrays of its index, of 256 kB."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full([65536], index, "float32"), "of": (np.int64(index), "a text")}

    def __len__(self) -> int:
        return 40


def here() -> Any:
    """The place of this process's device."""
    return paddle.zeros([1]).place


@pytest.mark.device
@pytest.mark.parametrize(("workers", "buffered"), [(0, True), (2, True), (2, False)])
def test_a_batch_is_on_the_device_and_holds_what_the_data_set_gave(
    workers: int, buffered: bool
) -> None:
    options = {"num_workers": workers, "use_buffer_reader": buffered}
    loader = DataLoader(Numbers(), batch_size=2, **options)
    batches = adapted(loader).open(1)
    for number, batch in zip(range(3), batches, strict=False):
        index, text = batch["of"]
        assert batch["x"].place._equals(here())
        assert index.place._equals(here())
        assert plain(batch["x"][:, -1]) == plain(index) == [2 * number, 2 * number + 1]
        assert text == ["a text"] * 2
    batches.close()


@pytest.mark.pretend
@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=2),
        DataLoader(Lines(), batch_size=2),
        DataLoader(TensorDataset([paddle.arange(9.0).cpu()]), batch_size=2),
    ],
    ids=["arrays", "stream", "tensors of the host"],
)
def test_a_batch_is_read_without_a_wait_for_the_device(loader: DataLoader) -> None:
    batches = adapted(loader).open(1)
    before = pretend.counts()
    for _ in range(3):
        next(batches)
    counted = pretend.counts().since(before)
    assert counted.waits == 0
    assert counted.queued_to_device >= 3


@pytest.mark.pretend
def test_the_memory_that_a_queued_copy_reads_lives_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRETEND_LAZY", "1")  # as from pinned memory
    batches = adapted(DataLoader(Numbers(), batch_size=2)).open(1)
    busy = [paddle.full([1 << 24], 1.0) for _ in range(2)]  # keeps the device busy for a while
    got = [next(batches) for _ in range(12)]
    assert [plain(batch["x"][:, 7]) for batch in got] == [[2 * n, 2 * n + 1] for n in range(12)]
    assert len(busy) == 2


@pytest.mark.pretend
def test_a_tensor_of_another_card_is_moved_to_this_one() -> None:
    first, second = (paddle.CustomPlace(DEVICE, number) for number in (0, 1))
    value = paddle.Tensor(np.arange(3), place=second)
    assert value.place._equals(second)
    moved = tensors_at(first)([value])[0]
    assert moved.place._equals(first)
    assert moved.tolist() == [0, 1, 2]
    assert tensors_at(second)(value) is value


@pytest.mark.pretend
def test_a_tensor_of_the_device_comes_to_the_host_where_the_loader_wants_it() -> None:
    loader = DataLoader(Numbers(), batch_size=2, places=[paddle.CPUPlace()])
    assert next(adapted(loader).open(1))["x"].place.is_cpu_place()
    moved = tensors_at(paddle.CPUPlace())(paddle.full([3], 2.0))
    assert moved.place.is_cpu_place()
    assert moved.tolist() == [2.0] * 3
