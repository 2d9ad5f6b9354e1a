"""Tensors as bytes: exact for every type and layout, and understood by the official library."""

from __future__ import annotations

import gc
import json
import struct
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.paddle
from paddle.base import core
from tiny import DEVICE

from expbase.base import arrays
from expbase.base.arrays import (
    Array,
    TensorFileError,
    copy_all,
    describe,
    fetch,
    numbers,
    parse,
    pinned,
    serialize,
)

SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex64": 8,
}  # fmt: skip
# What the library can read: no complex numbers in some of its versions; before paddle 3.2 it goes
# by numpy, which has no float8 and no bfloat16.
NO_NUMPY = {"float8_e4m3fn", "float8_e5m2", "bfloat16"}
THEIRS = {*SIZES} - {"complex64"} - (NO_NUMPY if paddle.__version__ < "3.2" else set())


SHAPES: list[list[int]] = [[2, 3], [1], [], [0, 3]]


def make(dtype: str, shape: list[int]) -> tuple[Any, bytes]:
    """A tensor, and the bytes that it was made of; no two elements are alike."""
    count = int(np.prod(shape)) * SIZES[dtype]
    data = (np.arange(count) % (2 if dtype == "bool" else 251)).astype(np.uint8)
    if not count:
        return paddle.empty(shape, dtype=dtype), b""
    same_size = {"bfloat16": "int16"}.get(dtype, "uint8" if "float8" in dtype else dtype)
    return paddle.to_tensor(data.view(same_size)).view(dtype).reshape(shape), data.tobytes()


def file_of(**tensors: Any) -> bytes:
    arrays = {name: Array.of(tensor) for name, tensor in tensors.items()}
    return b"".join(bytes(part) for part in serialize(arrays))


def header_of(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


TWO = header_of({"x": entry("U8", [4], 0, 4)["x"], "y": entry("U8", [4], 4, 8)["x"]}, bytes(8))
ONE_NAME_TWICE = TWO.replace(b'"y"', b'"x"')


@pytest.mark.device
@pytest.mark.parametrize("dtype", SIZES)
def test_every_type_and_shape_is_copied_to_the_byte_from_a_device(dtype: str) -> None:
    for shape in SHAPES:
        here, data = make(dtype, shape)
        array, other, third = (Array.of(here.to(DEVICE)) for _ in range(3))
        memory = np.full(len(data) + 2, 7, np.uint8)
        copy_all([(array, memory[1:-1]), (array.as_bytes(), memory[1:-1])])
        assert memory.tobytes() == b"\7" + data + b"\7", shape
        fetch([other, array])
        assert [array.data.tobytes(), other.data.tobytes(), third.data.tobytes()] == [data] * 3
        assert (array.dtype, array.shape, array.nbytes) == (dtype, tuple(shape), len(data))
        assert (array, array.is_on_host, str(array)) == (third, True, describe(here))
    fetch([])


@pytest.mark.device
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "int64"])
def test_some_elements_of_a_tensor_are_read_alike_from_every_device(dtype: str) -> None:
    here, data = make(dtype, [3, 4])
    size = SIZES[dtype]
    expected = b"".join(data[i * size : (i + 1) * size] for i in (1, 6, 11))
    for array in (Array.of(here), Array.of(here.to(DEVICE)), Array.of(here).copy()):
        sample = array.every(5, 1)
        assert (sample.data.tobytes(), sample.dtype, sample.shape) == (expected, dtype, (3,))


@pytest.mark.device
def test_a_part_of_a_tensor_on_a_device_is_its_own_bytes() -> None:
    whole = paddle.arange(12, dtype="float32").reshape([3, 4]).to(DEVICE)
    row, column = np.empty(16, np.uint8), np.empty(12, np.uint8)
    copy_all([(Array.of(whole[1]), row), (Array.of(whole[:, 1]), column)])
    assert row.view("float32").tolist() == [4, 5, 6, 7]
    assert column.view("float32").tolist() == [1, 5, 9] == [*Array.of(whole[:, 1]).data.view("f4")]


@pytest.mark.device
def test_numbers_are_read_from_every_device_as_item_reads_them() -> None:
    values: list[Any] = [1.5, np.float32(0.1), 7, paddle.to_tensor(0.1, "float64")]
    made = {"float32": 0.1, "bfloat16": 0.1, "int64": 3, "bool": True, "float16": float("inf")}
    for dtype, value in made.items():
        one = paddle.to_tensor(value, "float32").astype(dtype)
        values += [one.to(DEVICE), one.reshape([1]).to(DEVICE), one]
    expected = [float(v.item() if hasattr(v, "item") else v) for v in values]
    with paddle.amp.auto_cast(DEVICE != "cpu", level="O2", dtype="bfloat16"):
        assert numbers(values) == expected
    assert numbers([]) == []


def test_pinned_memory_is_paddles_where_paddle_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    assert pinned(8).size == 8  # paddle for the CPU refuses
    made: list[weakref.ref[Any]] = []

    class Pinned:
        def __init__(self) -> None:
            made.append(weakref.ref(self))
            self.memory = core.DenseTensor()
            self._set_dims = self.memory._set_dims

        def _mutable_data(self, place: Any, dtype: Any) -> int:
            return int(self.memory._mutable_data(paddle.CPUPlace(), dtype))

    monkeypatch.setattr(arrays, "core", SimpleNamespace(**vars(core) | {"DenseTensor": Pinned}))
    monkeypatch.setattr(arrays.core, "CUDAPinnedPlace", lambda: None)
    memory = pinned(8)
    memory[:] = range(8)
    assert np.asarray(made[0]().memory).tolist() == [*range(8)]  # type: ignore[union-attr]
    del memory
    gc.collect()
    assert made[0]() is None
    monkeypatch.setattr(Pinned, "_mutable_data", lambda *_: 0)  # there is no more of it
    assert pinned(8).size == 8


@pytest.mark.parametrize("dtype", SIZES)
def test_every_type_and_shape_is_read_back_to_the_byte(dtype: str) -> None:
    for shape in SHAPES:
        tensor, data = make(dtype, shape)
        back = parse(file_of(x=tensor, y=paddle.ones([1])))["x"]
        assert (back.dtype, back.shape, back.data.tobytes()) == (dtype, tuple(shape), data)
        made = back.tensor()
        assert (describe(made), Array.of(made).data.tobytes()) == (describe(tensor), data)
        if data:
            other = Array(dtype, tuple(shape), np.zeros(len(data), np.uint8)).tensor()
            back.copy_to(other)
            assert Array.of(other).data.tobytes() == data, shape


@pytest.mark.device
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64"])
def test_a_part_of_a_larger_tensor_has_its_own_bytes(dtype: str) -> None:
    tensor, data = make(dtype, [4, 3])
    for row in range(4):  # all but the first start behind the beginning of the memory
        length = 3 * SIZES[dtype]
        assert Array.of(tensor[row]).data.tobytes() == data[row * length : (row + 1) * length]


@pytest.mark.device
def test_what_is_not_contiguous_is_written_in_its_order() -> None:
    tensor, _ = make("float32", [2, 3])
    for view in (tensor.t(), tensor[:, 1], tensor[:, ::2]):
        assert not view.is_contiguous()
        array = Array.of(view)
        assert array.data.tobytes() == view.numpy().tobytes()
        assert array.shape == tuple(view.shape)


@pytest.mark.device
def test_the_weights_of_recurrent_layers_are_read_back() -> None:
    layer = paddle.nn.LSTM(3, 4, num_layers=2, direction="bidirect")
    states = layer.state_dict()  # views of one memory
    back = parse(file_of(**states))
    for name, parameter in states.items():
        np.testing.assert_array_equal(back[name].tensor().numpy(), parameter.numpy())


@pytest.mark.device
def test_the_official_library_reads_ours_and_we_read_its_files() -> None:
    made = {dtype: make(dtype, [2, 3]) for dtype in THEIRS}
    tensors = {dtype: tensor for dtype, (tensor, _) in made.items()}
    theirs = safetensors.paddle.load(file_of(**tensors, empty=paddle.empty([0, 2])))
    ours = parse(safetensors.paddle.save(tensors, metadata={"format": "pd"}))
    assert list(theirs["empty"].shape) == [0, 2]
    for dtype, (_, data) in made.items():
        read = Array.of(theirs[dtype])
        assert (dtype, read.shape, read.data.tobytes()) == (dtype, (2, 3), data)
        read = ours[dtype]
        assert (read.dtype, read.shape, read.data.tobytes()) == (dtype, (2, 3), data)


def test_an_array_is_a_view_of_the_live_tensor() -> None:
    tensor = paddle.zeros([4]).cpu()
    view = Array.of(tensor)
    tensor.add_(paddle.ones([4]).cpu())
    assert view.data.view(np.float32).tolist() == [1.0] * 4


def test_a_new_tensor_shares_no_memory_with_the_file() -> None:
    content = bytearray(file_of(x=paddle.ones([2])))
    tensor = parse(content)["x"].tensor()
    content[-8:] = bytes(8)
    assert tensor.tolist() == [1.0, 1.0]


def test_the_data_of_a_file_are_aligned() -> None:
    (length,) = struct.unpack("<Q", file_of(name_of_any_length=paddle.ones([2]))[:8])
    assert length % 8 == 0


def test_a_type_that_the_format_lacks_is_refused_by_name() -> None:
    strange = Array("float4", (2,), np.zeros(1, np.uint8))
    with pytest.raises(TensorFileError, match="weight: float4 has no place"):
        list(serialize({"weight": strange}))


def test_a_file_cut_off_anywhere_is_refused() -> None:
    content = file_of(x=paddle.ones([3]), y=paddle.ones([2]))
    for length in range(len(content)):
        with pytest.raises(TensorFileError):
            parse(content[:length])


CONTRADICTIONS = [
    b"\x80\x02}q\x00. a pickle",
    header_of([]),
    header_of(None),
    header_of({"x": {}}),
    header_of(entry("F99", [1], 0, 4), bytes(4)),
    header_of(entry("F32", [2], 0, 4), bytes(8)),
    header_of(entry("F32", [2], -8, 0), bytes(8)),
    header_of(entry("F32", [2], 8, 0), bytes(8)),
    header_of(entry("F32", [-1, -2], 0, 8), bytes(8)),
    header_of(entry("F32", ["2"], 0, 8), bytes(8)),
    header_of(entry("F32", [2.0], 0, 8), bytes(8)),
    header_of(entry("F32", [1], 4, 8), bytes(8)),  # a hole
    header_of({**entry("F32", [2], 0, 8), "y": entry("F32", [1], 4, 8)["x"]}, bytes(8)),
    header_of({}, bytes(8)),
    ONE_NAME_TWICE,
    struct.pack("<Q", 4) + b"\xff\xfe{}",
    struct.pack("<Q", 100_000) + b"[" * 100_000,
]


def test_a_file_of_another_kind_or_that_contradicts_itself_is_refused() -> None:
    def is_refused(content: bytes) -> bool:
        try:
            parse(content)
        except TensorFileError:
            return True
        return False

    assert [content for content in CONTRADICTIONS if not is_refused(content)] == []


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 63]], ids=len)
def test_a_shape_that_takes_minutes_to_multiply_is_refused(shape: list[int]) -> None:
    with pytest.raises(TensorFileError, match="x has no shape that a tensor can have"):
        parse(header_of(entry("F32", shape, 0, 4), bytes(4)))
