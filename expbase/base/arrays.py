"""Tensors as bytes, and files of them in the safetensors format.

The library of that name (safetensors/paddle.py, save_file) is not used here: it copies the data
once more before it writes, does not flush the file to disk, labels bfloat16 wrongly when it comes
through numpy, and cannot do empty tensors of paddle.

    arrays = {"weight": Array.of(tensor)}          # no copy; from a device when it is needed
    for buffer in serialize(arrays): file.write(buffer)
    parse(file.read_bytes())["weight"].copy_to(tensor)

Source: https://github.com/huggingface/safetensors, the format.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from expbase.base.errors import Mistake
from expbase.base.read_limits import MOST_AXES

_TYPES = {  # paddle's name, by the name in a file
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
# Types that numpy lacks, and the type of the same size as which they are viewed. As a smaller type,
# a slice shows bytes of another tensor (paddle 3.3); as a greater one, any tensor kills the process
# (3.0.0, 3.1.0): paddle/tensor/manipulation.py, view.
_IN_NUMPY = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # by the bytes of an element
LABELS = {dtype: label for label, dtype in _TYPES.items()}


class TensorFileError(Mistake, ValueError):
    """Bytes that are not a file of tensors."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(eq=False)
class Array:
    """The content of one tensor."""

    dtype: str  # paddle's name, "float32"
    shape: tuple[int, ...]  # () for a scalar
    # Flat bytes in C order, which may be the live tensor's memory; or a tensor on a device, whose
    # bytes take its place when they are asked for.
    source: Any

    @classmethod
    def of(cls, tensor: Any) -> Array:
        """Returns the local part of a tensor: what it holds when the bytes are asked for.

        On the CPU it is a view of the tensor's memory if that is contiguous, else a copy. From a
        device it is copied when it is needed: `data`, or all at once by `copy_all`.
        """
        tensor = local(tensor)
        dtype, shape = dtype_name(tensor), tuple(tensor.shape)
        if 0 in shape:
            return cls(dtype, shape, np.empty(0, np.uint8))
        tensor = tensor.detach()
        on_cpu = tensor.place.is_cpu_place()
        return cls(dtype, shape, _bytes_of(tensor, dtype) if on_cpu else tensor)

    @classmethod
    def of_bytes(cls, data: Bytes) -> Array:
        """Returns flat bytes as an array."""
        return cls("uint8", (data.size,), data)

    @property
    def is_on_host(self) -> bool:
        """Whether the bytes are there, and no device has to be waited for."""
        return isinstance(self.source, np.ndarray)

    @property
    def data(self) -> Bytes:
        """The bytes, flat, in C order."""
        source: Any = self.source
        if not isinstance(source, np.ndarray):
            self.source = _bytes_of(source.cpu(), dtype_name(source))
        return self.source  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        if isinstance(self.source, np.ndarray):
            return self.source.nbytes
        return math.prod(self.shape) * _item_size(self.dtype)

    def as_bytes(self) -> Array:
        """Returns the same content as an array of uint8."""
        return Array("uint8", (self.nbytes,), self.source)

    def every(self, step: int, start: int) -> Array:
        """Returns each element that is `step` after the one before, from a number on; flat."""
        if not self.is_on_host:
            return Array.of(self.source.flatten()[start::step])
        words = _WORDS.get(size := _item_size(self.dtype), f"V{size}")
        elements = np.ascontiguousarray(self.data.view(words)[start::step])
        return Array(self.dtype, elements.shape, elements.view(np.uint8))

    def tensor(self) -> Any:
        """Returns a new tensor on the CPU with a copy of the content."""
        # paddle.empty (paddle/tensor/creation.py) takes a device since 3.2; this operator always
        # did.
        tensor = paddle._C_ops.empty([*self.shape], getattr(paddle, self.dtype), paddle.CPUPlace())
        self.copy_to(tensor)
        return tensor

    def copy_to(self, tensor: Any) -> None:
        """Overwrites a tensor of the same type and shape, wherever it is."""
        if self.data.size:
            flat = _tensor_over(self.data, self.dtype)
            tensor.copy_(flat.reshape(list(self.shape)), True)

    def copy(self) -> Array:
        """Returns a copy in memory of its own."""
        return Array(self.dtype, self.shape, self.data.copy())

    def converted(self, dtype: str) -> Array:
        """Returns its numbers in another type; itself if it has that one."""
        return self if dtype == self.dtype else Array.of(self.tensor().astype(dtype))

    def __eq__(self, other: object) -> bool:
        """Returns whether type, shape and every byte are the same."""
        return (
            isinstance(other, Array)
            and (self.dtype, self.shape) == (other.dtype, other.shape)
            and np.array_equal(self.data, other.data)
        )

    def is_finite(self) -> bool:
        """Returns whether no element is nan or infinite; True for types other than real floats."""
        if self.dtype == "bfloat16":  # its exponent has the same bits as that of float32
            return bool((self.data.view(np.uint16) & 0x7F80 != 0x7F80).all())
        if self.dtype in ("float64", "float32", "float16"):
            return bool(np.isfinite(self.data.view(self.dtype)).all())
        return True

    def __str__(self) -> str:
        return describe(self)


def copy_all(copies: Iterable[tuple[Array, Bytes]]) -> None:
    """Copies the bytes of each array into the memory beside it; for a device it waits once."""
    under_way = []  # tensors whose copies are queued, which must stay until these are done
    for array, memory in copies:
        if array.is_on_host:
            memory[:] = array.data
        else:
            tensor = array.source.contiguous()
            # Into memory that is not pinned the driver of a GPU waits for each copy, rightly.
            _tensor_over(memory, dtype_name(tensor)).copy_(tensor, False)
            under_way.append(tensor)
    for device in {_device_of(tensor) for tensor in under_way}:
        if not device.endswith("pinned"):  # memory of the host, from which no copy is queued
            paddle.device.synchronize(device)


def fetch(arrays: Iterable[Array]) -> None:
    """Copies the bytes of arrays from their device to where `data` has them; waits once, for all.

    Without it each would be waited for when its bytes are asked for.
    """
    missing = [array for array in arrays if not array.is_on_host]
    if missing:
        ends = np.cumsum([array.nbytes for array in missing])
        parts = np.split(np.empty(ends[-1], np.uint8), ends[:-1])
        copy_all(zip(missing, parts, strict=True))
        for array, part in zip(missing, parts, strict=True):
            array.source = part


def numbers(values: Iterable[Any]) -> list[float]:
    """Returns numbers, and tensors of one element, as numbers; waits once for those on a device."""
    values = [*values]
    alike: dict[str, list[int]] = {}  # places of tensors on a device, by what can be stacked
    for place, value in enumerate(values):
        if on_device(value):
            alike.setdefault(f"{value.dtype} {value.place}", []).append(place)
    with paddle.amp.auto_cast(False) if alike else contextlib.nullcontext():  # it would round them
        stacks = [
            Array.of(paddle.stack([values[place].reshape([]) for place in places]))
            for places in alike.values()
        ]
    fetch(stacks)
    for places, stack in zip(alike.values(), stacks, strict=True):
        for place, read in zip(places, to_numpy(stack.tensor()).tolist(), strict=True):
            values[place] = read
    return [*map(number, values)]


def number(value: Any) -> float:
    """Returns a number, or a tensor of one element, as a float; waits for the device."""
    return float(value.item() if hasattr(value, "item") else value)


def pinned(size: int) -> Bytes:
    """Returns new memory for copies from a device; for those of a GPU it is page-locked."""
    if size and paddle.is_compiled_with_cuda():
        # There is less of it than of other memory, which does as well, only slower. Where none is
        # left paddle gives no address, and a tensor of its functions would crash
        # (paddle/phi/core/memory/allocation/system_allocator.cc, CUDAPinnedAllocator::Alloc).
        with contextlib.suppress(Exception):
            whole = core.DenseTensor()
            whole._set_dims([size])
            address = whole._mutable_data(core.CUDAPinnedPlace(), core.VarDesc.VarType.UINT8)
            if address:
                block: Any = (ctypes.c_uint8 * size).from_address(address)
                block.owner = whole  # numpy keeps the block, which keeps the tensor
                memory: Bytes = np.frombuffer(block, np.uint8)
                return memory
    return np.empty(size, np.uint8)


def on_device(tensor: Any) -> bool:
    """Returns whether the host would have to wait for a device to read a value."""
    return isinstance(tensor, paddle.Tensor) and not tensor.place.is_cpu_place()


def _device_of(tensor: Any) -> str:
    """Returns the device of a tensor, as paddle's functions want it: "gpu:0"."""
    return str(tensor.place).removeprefix("Place(").removesuffix(")")


def _bytes_of(tensor: Any, dtype: str) -> Bytes:
    """Returns the bytes of a tensor on the CPU, in C order: a view if they are in that order."""
    tensor = tensor.contiguous()
    if dtype in _IN_NUMPY:
        tensor = tensor.view(_IN_NUMPY[dtype])
    return np.from_dlpack(tensor).reshape(-1).view(np.uint8)


def _tensor_over(memory: Bytes, dtype: str) -> Any:
    """Returns a flat tensor on the CPU whose memory that is."""
    data = memory.view(_IN_NUMPY.get(dtype, dtype))
    # The fourth argument: zero_copy; to_tensor of paddle/tensor/creation.py would copy it.
    flat = core.eager.Tensor(data, paddle.CPUPlace(), False, True, "", True)
    return flat.view(dtype) if dtype in _IN_NUMPY else flat


def local(tensor: Any) -> Any:
    """Returns the local part of a tensor with placements, in the same memory; else the tensor."""
    return tensor._local_value() if tensor.is_dist() else tensor


def is_piece(tensor: Any) -> bool:
    """Returns whether each rank holds a different part of a tensor.

    Its placements tell it, or the mark `is_distributed` of tensor parallelism.
    """
    if tensor.is_dist():
        return not all(placement.is_replicated() for placement in tensor.placements)
    return bool(getattr(tensor, "is_distributed", False))


def to_numpy(tensor: Any) -> Any:
    """Returns a tensor as a numpy array; bfloat16, which numpy lacks, becomes float32."""
    return (tensor.astype("float32") if dtype_name(tensor) == "bfloat16" else tensor).numpy()


def dtype_name(tensor: Any) -> str:
    """Returns paddle's name for a tensor's type, without the module: "float32"."""
    return str(tensor.dtype).removeprefix("paddle.")


def _item_size(dtype: str) -> int:
    return np.dtype(_IN_NUMPY.get(dtype, dtype)).itemsize


# Of all types; complex128 has no name in a file, and a value of it is written as bytes.
ITEM_SIZES = {dtype: _item_size(dtype) for dtype in (*LABELS, "complex128")}


def describe(tensor: Any) -> str:
    """Returns type and shape for a message: `float32 [3, 2]`."""
    return f"{dtype_name(tensor)} [{', '.join(map(str, tensor.shape))}]"


def in_words(value: Any) -> str:
    """Returns a value for a message: a tensor or an array by its shape, without its numbers."""
    is_array = isinstance(value, (paddle.Tensor, np.ndarray))
    return f"a {type(value).__name__} of shape {[*value.shape]}" if is_array else repr(value)


def serialize(arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yields the parts of a file, in order; the data parts are the arrays' own memory.

    Raises:
        TensorFileError: An array has a type that the format lacks.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in LABELS:
            raise TensorFileError(f"{name}: {array.dtype} has no place in a safetensors file.")
        start = end
        end += array.nbytes
        label = LABELS[array.dtype]
        header[name] = {"dtype": label, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    yield struct.pack("<Q", len(text)) + text
    for array in arrays.values():
        if array.nbytes:
            # No copy: the memory itself is written. (mypy does not know that an array is a buffer.)
            yield memoryview(array.data)  # type: ignore[arg-type]


def parse(content: Any) -> dict[str, Array]:
    """Returns the arrays of a file of tensors, as views of its bytes.

    Args:
        content: Bytes, a memory map, or an array of uint8.

    Raises:
        TensorFileError: It is not a safetensors file, or one that contradicts itself.
    """
    data = np.frombuffer(content, np.uint8)
    arrays: dict[str, Array] = {}
    try:
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        body = data[8 + length :]
        end = 0
        # In the order of the data, which has no holes: so no two overlap, and no name stands twice.
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = _TYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            if len(shape) > MOST_AXES or max(shape, default=0) >= 1 << 63:  # slow to multiply
                raise ValueError(f"{name:.80} has no shape that a tensor can have")
            start = end
            end += math.prod(shape) * _item_size(dtype)
            if entry["data_offsets"] != [start, end] or min(shape, default=0) < 0:
                raise ValueError(f"{name:.80} of {dtype} {shape}, which does not begin at {start}")
            arrays[name] = Array(dtype, shape, body[start:end])
        if end != body.size:
            raise ValueError(f"{body.size} bytes of data instead of {end}")
        return arrays
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error) as e:
        raise TensorFileError(f"cut off, or not a safetensors file: {e}") from e
