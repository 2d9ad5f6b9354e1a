"""Values through JSON and files of tensors: the same value of the same type, or an error."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import paddle
import pytest

from expbase.base import encoding
from expbase.base.arrays import Array, parse, serialize


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**70, 0.1, float("inf"), "text", b"bytes", [1, (2, [3])], {1: "a", "b": 2},
        {"$tuple": 1}, {(1, 2): 3}, {1, 2}, np.float32(0.1), np.int64(3), {}, [], (),
        OrderedDict(a=1), Counter("aab"), frozenset({1}), np.datetime64("2026-01-01"),
    ],
)  # fmt: skip
def test_values_are_decoded_as_the_same_values_of_the_same_type(value: Any) -> None:
    arrays: dict[str, Array] = {}
    text = json.dumps(encoding.encode(value, "here", arrays))
    back = encoding.decode(json.loads(text), arrays)
    assert back == value
    assert type(back) is type(value)


def test_arrays_and_tensors_are_decoded_from_any_depth() -> None:
    value = {
        "a": [np.arange(6).reshape(2, 3).T, np.array(2.5), np.array(["x", "yz"])],
        1: np.zeros(2), "1": np.ones(3, dtype=bool), "t": (paddle.ones([2, 2], dtype="bfloat16"),),
    }  # fmt: skip
    arrays: dict[str, Array] = {}
    encoded = json.loads(json.dumps(encoding.encode(value, "here", arrays)))
    back = encoding.decode(encoded, parse(b"".join(map(bytes, serialize(arrays)))))
    for left, right in zip(back["a"], value["a"], strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
    np.testing.assert_array_equal(back[1], value[1])
    np.testing.assert_array_equal(back["1"], value["1"])
    assert back["t"][0].dtype == paddle.bfloat16
    assert back["t"][0].astype("float32").tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_what_cannot_be_saved_is_named_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"buffer\.frames\.1: a object cannot be saved"):
        encoding.encode({"frames": [1, object()]}, "buffer", {})
    for value in (defaultdict(lambda: 1), namedtuple("Pair", "a b")(1, 2), iter([1])):
        with pytest.raises(TypeError, match="cannot be saved"):
            encoding.encode(value, "here", {})


def test_two_arrays_never_share_a_place() -> None:
    arrays: dict[str, Array] = {}
    value = {"a.0": np.zeros(2), "a": [np.ones(2)]}
    back = encoding.decode(encoding.encode(value, "here", arrays), arrays)
    assert (back["a.0"].tolist(), back["a"][0].tolist()) == ([0, 0], [1, 1])


def test_a_set_is_encoded_in_the_same_order_in_every_process() -> None:
    names = {f"name{number}" for number in range(20)}
    assert encoding.encode(names, "here", {})["$new"][1] == [sorted(names)]
