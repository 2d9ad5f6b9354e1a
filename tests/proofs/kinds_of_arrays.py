"""Kinds of arrays and tensors by type, layout and container; see kinds_of_values.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from kinds_of_values import HERE, Values, add, make_kinds, run


def structured() -> Any:
    return np.zeros(3, [("id", "i4"), ("score", "f8")])


def read_only() -> Any:
    values = np.arange(4.0)
    values.flags.writeable = False
    return values


def stepped_read_only(values: Any) -> Any:
    other = values + 1
    other.flags.writeable = False
    return other


ARRAYS: Values = {
    # arrays
    "array in Fortran order": (lambda: np.zeros((3, 2), order="F"), add),
    "transposed array": (lambda: np.zeros((3, 2)).T, add),
    "strided view": (lambda: np.zeros(9)[::3], add),
    "reversed view": (lambda: np.zeros(4)[::-1], add),
    "new array each time": (lambda: np.zeros((2, 2)), lambda v: np.asfortranarray(v + 1)),
    "masked array": (
        lambda: np.ma.masked_less(np.zeros(3), 0),
        lambda v: run(v.__iadd__(1), v[0] > 3 and v.__setitem__(2, np.ma.masked)),
    ),
    "structured array": (structured, lambda v: add(v["score"])),
    "record array": (lambda: structured().view(np.recarray), lambda v: add(v.score)),
    "matrix": (lambda: np.matrix([[1.0, 2.0]]), add),
    "array without dimensions": (lambda: np.zeros(()), add),
    "read-only array": (read_only, stepped_read_only),
    "array that becomes read-only": (
        lambda: np.zeros(3),
        lambda v: run(v.flags.writeable and v.setflags(write=False)) if v[0] else add(v),
    ),
    "bool array": (lambda: np.zeros(12, bool), lambda v: run(v.__setitem__(int(v.sum()), True))),
    "uint16 array": (lambda: np.zeros(3, "uint16"), add),
    "float16 array": (lambda: np.zeros(3, "float16"), add),
    "complex array": (lambda: np.zeros(3, "complex128"), add),
    "big-endian array": (lambda: np.zeros(3, ">f4"), add),
    "datetime64 array": (lambda: np.zeros(3, "datetime64[D]"), add),
    "array of texts": (lambda: np.array(["a", "bcd"]), lambda v: np.char.add(v, "x")),
    "array of objects": (
        lambda: np.array([1, "a", None], object),
        lambda v: run(v.__setitem__(2, (v[2] or 0) + 1)),
    ),
    "one element of many": (
        lambda: np.zeros(300_000),
        lambda v: run(v.__setitem__(123_457 + int(v.sum()) * 4_321, 1)),
    ),
    "array that grows": (lambda: np.zeros(1), lambda v: np.append(v, len(v))),
    "list of arrays": (lambda: [np.zeros(1)], lambda v: v.append(v[-1] + 1)),
    "dict of arrays in place": (lambda: {"a": np.zeros(2)}, lambda v: add(v["a"])),
    "empty array": (lambda: np.zeros((0, 2)), lambda v: np.concatenate([v, np.ones((1, 2))])),
    "subclass of ndarray": (lambda: np.zeros(2).view(np.ndarray), add),
    # tensors
    "tensor in place": (lambda: paddle.zeros([3]), lambda v: run(v.add_(paddle.ones([3])))),
    "tensors in a list": (lambda: [paddle.zeros([2])], lambda v: v.append(v[-1] + 1)),
    "tensors in a dict": (lambda: {"a": paddle.zeros([2])}, lambda v: v.update(a=v["a"] + 1)),
    "tuple of tensors": (lambda: (paddle.zeros([2]), 1), lambda v: (v[0] + 1, v[1])),
    "int64 tensor": (lambda: paddle.zeros([3], "int64"), lambda v: v + 1),
    "bool tensor": (
        lambda: paddle.zeros([12], "bool"),
        lambda v: paddle.arange(12) <= v.astype("int32").sum(),
    ),
    "bfloat16 tensor": (
        lambda: paddle.zeros([3]).astype("bfloat16"),
        lambda v: (v.astype("float32") + 1).astype("bfloat16"),
    ),
    "float16 tensor": (
        lambda: paddle.zeros([3]).astype("float16"),
        lambda v: (v.astype("float32") + 1).astype("float16"),
    ),
    "complex64 tensor": (lambda: paddle.to_tensor([1 + 2j], "complex64"), lambda v: v * 1.1),
    "complex128 tensor": (lambda: paddle.to_tensor([1 + 2j], "complex128"), lambda v: v * 1.1),
    "tensor without dimensions": (lambda: paddle.zeros([]), lambda v: v + 1),
    "tensor that is not contiguous": (lambda: paddle.zeros([3, 2]).t(), lambda v: (v + 1).t().t()),
    "tensor that grows": (
        lambda: paddle.zeros([0, 2]),
        lambda v: paddle.concat([v, paddle.ones([1, 2])]),
    ),
    "tensor with a gradient": (
        lambda: paddle.to_tensor([1.0], stop_gradient=False),
        lambda v: paddle.to_tensor(v.numpy() * 1.1, stop_gradient=False),
    ),
    "parameter outside of a layer": (
        lambda: paddle.create_parameter(
            [2], "float32", default_initializer=paddle.nn.initializer.Constant(1.0)
        ),
        lambda v: v.set_value(v * 1.1),
    ),
}
NAMED = "complex128 tensor, array of objects, record array, masked array, matrix"
KINDS = make_kinds(ARRAYS, HERE, NAMED)
