"""Values through JSON and files of tensors: the same bits of the same type, or an error."""

from __future__ import annotations

import datetime
import enum
import json
import math
import random
import time
import uuid
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from expbase.base import json_values
from expbase.base.arrays import Array, parse, serialize
from expbase.base.json_values import checksum


def encode(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    return json_values.Encoder(arrays).encode(value, path)


def decode(content: Any, path: str, arrays: dict[str, Array]) -> Any:
    return json_values.Decoder(arrays).decode(content, path)


def carried(value: Any) -> Any:
    """A value through JSON and a file of tensors."""
    arrays: dict[str, Array] = {}
    text = json.dumps(encode(value, "here", arrays))
    copies = parse(b"".join(map(bytes, serialize(arrays))))
    return decode(json.loads(text), "here", copies)


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: float
    items: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Fixed:
    x: float


class Step(NamedTuple):
    state: int
    reward: float


Pair = namedtuple("Pair", "a b")


class Slots:
    __slots__ = ("left", "right")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self.left == other.left

    __hash__ = None  # type: ignore[assignment]


class Named(dict[str, int]):
    """A dict with an attribute, whose own methods are not to be called."""

    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError

    def update(self, *words: Any, **options: Any) -> None:
        raise AssertionError


class Window(deque[int]):
    pass


class Celsius(float):
    pass


def slots() -> Slots:
    made = Slots()
    made.left = [1]  # `right` is not set
    return made


UTC = datetime.timezone.utc
VALUES: list[Any] = [
    None, True, 3, -1, 2**63, -(2**63), 2**70, 1 << 20_000, 0.1, -0.0, 5e-324, math.inf, -math.inf,
    1 + 2j, complex(-0.0, math.inf), "text", "", "\ud800", "$tuple", b"bytes", b"",
    bytearray(b"ab"),
    [], [1, (2, [3])], [1.5] * 100, [2] * 100, [2**70] * 100, [True] * 100, [(1, "a")] * 100,
    ["a"] * 100, [()] * 100, [1, 2.0] * 50, [(1.0, [2])] * 70,
    (), (1,), {}, {1: "a", "b": 2}, {"$tuple": 1}, {"": {"a.b": 1, "a": {"b": 2}}}, {(1, 2): 3},
    {None: 1, True: 2, 2.5: 3}, {1, 2}, {"a", "b"}, set(), frozenset({1}), frozenset(),
    range(3), range(9, 0, -2), slice(1, None, 2), Decimal("0.10"), Decimal("NaN").copy_abs(),
    Fraction(1, 3), OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], maxlen=3), deque(),
    defaultdict(list, a=[1]), defaultdict(None, {1: 2}),
    datetime.date(2026, 2, 28), datetime.time(1, 2, 3, 4), datetime.time(1, 2, tzinfo=UTC),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=UTC),
    datetime.timedelta(-1, 2, 3), UTC, datetime.timezone(datetime.timedelta(hours=-3, minutes=-30)),
    time.gmtime(0), uuid.UUID(int=5), Path("a/b"), PurePosixPath("/c"),
    np.float32(0.1), np.float64(-0.0), np.int64(3), np.bool_(True), np.str_("x"), np.bytes_(b"y"),
    np.datetime64("2026-01-01"), np.timedelta64(3, "s"), np.complex64(1 + 2j),
    np.dtype("float32"), np.dtype([("a", "<i4"), ("b", "<f8", (2,))]), paddle.float32,
    Color.RED, Color.PAIR, Level.LOW | Level.HIGH, int, Point, Color,
    Point(1.5, [1]), Fixed(0.1), Step(1, 0.5), Pair(1, [2]), slots(), SimpleNamespace(a=1, b=[2]),
    Window([1, 2]), Celsius(0.1), array("d", [0.1, -0.0]), array("h"),
]  # fmt: skip


def test_values_are_decoded_as_the_same_values_of_the_same_type() -> None:
    for value in VALUES:
        back = carried([value])[0]
        assert back == value or back != back, value
        assert type(back) is type(value)
        if not isinstance(value, (set, frozenset, int, Slots)):
            assert repr(back) == repr(value)  # an order, a sign, a maxlen
        if isinstance(value, (float, np.generic)):
            assert np.array(back).tobytes() == np.array(value).tobytes(), value


def test_a_deque_of_ones_own_keeps_its_limit() -> None:
    assert carried(Window([1, 2], maxlen=2)).maxlen == 2


def test_nan_keeps_its_kind() -> None:
    (back,) = carried([math.nan])
    assert math.isnan(back)


def test_a_dict_with_attributes_and_methods_of_its_own_is_made_without_them() -> None:
    value = Named()
    dict.__setitem__(value, "a", 1)
    value.name = "n"  # type: ignore[attr-defined]
    back = carried(value)
    assert (type(back), dict(back), vars(back)) == (Named, {"a": 1}, {"name": "n"})


STRUCTURE = np.zeros(3, [("a", "<i4"), ("b", [("c", "<f8"), ("d", "U3")]), ("e", "<f4", (2, 2))])
STRUCTURE["b"]["d"] = "xyz"
ARRAYS: list[Any] = [
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0), np.arange(10)[::-2], np.array(2.5),
    np.zeros([0, 3]), np.array(["x", "yz"]), np.array([b"a"]), np.array([True]), STRUCTURE,
    np.array(["2026-01-01", "NaT"], "datetime64[s]"), np.array([1, 2], ">i2"),
    np.array([1 + 2j], "complex64"), np.array([1], "float16"), np.array([np.nan, -0.0]),
    np.broadcast_to(np.arange(3), (2, 3)), STRUCTURE.view(np.recarray)["a"],
]  # fmt: skip


def test_arrays_have_the_same_bits_in_the_same_order_of_axes() -> None:
    for value in ARRAYS:
        name = f"{value.dtype} {value.shape}"
        back = carried({"a": [value]})["a"][0]
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert back.tobytes() == value.tobytes(), name
        assert back.flags.writeable == value.flags.writeable, name
        if value.size and 0 not in value.strides and min(value.strides, default=1) > 0:
            order = np.argsort(value.strides).tolist()
            assert np.argsort(back.strides).tolist() == order, name


@pytest.mark.device
def test_tensors_have_the_same_bits() -> None:
    for dtype in (
        "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool", "complex64", "complex128",
    ):  # fmt: skip
        one = paddle.to_tensor([[1.0, 0.0], [3.0, 0.5]]).astype(dtype)
        for value in (one, one[0, 0], paddle.zeros([0, 2], dtype)):
            back = carried((value,))[0]
            assert (back.dtype, back.shape) == (value.dtype, value.shape)
            assert Array.of(back).data.tobytes() == Array.of(value).data.tobytes(), dtype
            assert back.stop_gradient


@pytest.mark.device
def test_a_tensor_keeps_its_gradient() -> None:
    value = paddle.ones([2], "bfloat16")
    value.stop_gradient = False
    (value * 3).sum().backward()
    without = paddle.ones([2])
    without.stop_gradient = False
    back, other = carried([value, without])
    assert not back.stop_gradient
    assert (back.grad.dtype, back.grad.astype("float32").tolist()) == (paddle.bfloat16, [3.0, 3.0])
    assert other.grad is None


def seeded() -> Any:
    generator = paddle.framework.core.Generator()
    generator.manual_seed(3)
    return generator


GENERATORS: list[tuple[Any, Any]] = [
    (random.Random(1), lambda g: [g.random(), g.gauss(0, 1)]),
    (np.random.RandomState(1), lambda g: [g.randn()]),
    *[
        (np.random.Generator(bits(1)), lambda g: [g.normal(), g.random()])
        for bits in (
            np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox,
            np.random.SFC64,
        )
    ],
    (seeded(), lambda g: [g.random()]),
]  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize(("value", "draw"), GENERATORS)
def test_generators_draw_on_from_where_they_were(value: Any, draw: Any) -> None:
    draw(value)
    back = carried([value])[0]
    assert type(back) is type(value)
    assert [draw(back) for _ in range(3)] == [draw(value) for _ in range(3)]


def test_a_generator_that_is_made_again_has_the_same_children() -> None:
    value = np.random.default_rng()
    back = carried([value])[0]
    assert back.spawn(1)[0].random() == value.spawn(1)[0].random()


def test_a_thing_that_stands_twice_is_one_thing_and_may_contain_itself() -> None:
    shared = [1]
    value: dict[str, Any] = {"a": shared, "b": (shared, deque([shared])), "p": Point(0.5, shared)}
    value["self"] = value
    back = carried(value)
    assert back["a"] is back["b"][0] is back["b"][1][0] is back["p"].items
    assert back["self"] is back


def test_a_long_list_of_arrays_of_a_kind_is_one_array() -> None:
    rows = [(np.full(3, n, "float32"), n, n / 2, n % 2 == 0) for n in range(100)]
    arrays: dict[str, Array] = {}
    encode(rows, "here", arrays)
    assert len(arrays) == 3
    back = carried(rows)
    assert [row[1:] for row in back] == [row[1:] for row in rows]
    assert all(
        one[0].tobytes() == other[0].tobytes() for one, other in zip(back, rows, strict=True)
    )
    assert type(back[0]) is tuple
    back[0][0][0] = 9.0  # each has memory of its own
    assert back[1][0][0] == 1.0


def test_an_array_that_stands_in_a_long_list_twice_is_one_array() -> None:
    back = carried([np.zeros(2)] * 100)
    assert back[0] is back[1]


def test_two_arrays_never_share_a_place() -> None:
    back = carried(
        {"a.0": np.zeros(2), "a": [np.ones(2)], 1: np.full(2, 2.0), "1": np.full(2, 3.0)}
    )
    found = [back["a.0"], back["a"][0], back[1], back["1"]]
    assert [array[0] for array in found] == [0.0, 1.0, 2.0, 3.0]


def test_a_set_is_encoded_in_the_same_order_in_every_process() -> None:
    names = {f"name{number}" for number in range(20)}
    assert encode(names, "here", {}) == {"$set": sorted(names)}


class Deleting:
    def __del__(self) -> None:
        pass


class Metal(type):
    pass


def test_what_cannot_be_saved_is_named_with_its_place() -> None:
    def local() -> Any:
        class Local:
            pass

        return Local()

    with pytest.raises(TypeError, match=r"^buffer\.frames\.1: a object cannot be saved; expected"):
        encode({"frames": [1, object()]}, "buffer", {})
    refused: list[Any] = [
        defaultdict(lambda: 1), iter([1]), (n for n in [1]), len, lambda: 1, json, open(__file__),
        Deleting(), local(), paddle.nn.Linear(1, 1), random.SystemRandom(),
        datetime.datetime.now, Metal("Made", (), {}),
        {paddle.ones([1]): 1},
    ]  # fmt: skip
    for value in refused:
        with pytest.raises(TypeError, match=r"^here\.x\b.*cannot be saved"):
            encode({"x": value}, "here", {})
    refused[6].close()


def test_an_attempt_that_fails_leaves_nothing() -> None:
    encoder = json_values.Encoder({})
    array = np.zeros(2)
    assert encoder.attempt([array, object()], "one") is None
    assert encoder.arrays == {}
    done = encoder.attempt([array], "two")
    assert done is not None
    assert [*done.arrays] == ["two.0"]
    again = encoder.attempt([array], "three")  # it was met there
    assert again is not None
    assert (again.content, again.arrays) == ([{"$same": "two.0"}], {})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"$nothing": 1}, r"there is no type \$nothing"),
        ({"$object": ["no.Such", {}, None]}, "there is no class no.Such"),
        ({"$object": ["subprocess.Popen", {}, None]}, "no subprocess.Popen is made from a file"),
        ({"$enum": [f"{__name__}.Point", 1]}, "is no Enum"),
        ({"$ref": "model"}, "there is no model"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(content: Any, text: str) -> None:
    with pytest.raises(LookupError, match=rf"^x: .*{text}"):
        json_values.Decoder({}).decode({"x": content}, "")


# --- checksums ---------------------------------------------------------------------------------


def test_a_checksum_tells_values_apart() -> None:
    pairs: list[tuple[Any, Any]] = [
        (1, 1.0), (0.0, -0.0), (True, 1), ("a", "b"), ([1, 2], [1, 2, 3]), ((1,), [1]),
        (np.zeros(3), np.zeros(3, "float32")), (np.zeros([2, 3]), np.zeros([3, 2])),
        (paddle.zeros([2]), paddle.ones([2])), ([paddle.zeros([2])], [paddle.zeros([3])]),
        (deque([1], maxlen=2), deque([1], maxlen=3)), ([Point], [Fixed]),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)), (Point(1.0), Point(2.0)),
        (len, print), ([object()], [Deleting()]), (["a"] * 20_000, ["b"] * 20_000),
    ]  # fmt: skip
    for value, other in pairs:
        assert checksum(value) != checksum(other), f"{value!s:.99} and {other!s:.99}"


def test_equal_values_and_the_same_objects_have_one_checksum() -> None:
    thing = Deleting()
    for make_one in (
        lambda: [1.5, "text", (None, {"a": 1})],
        lambda: np.arange(6).reshape(2, 3)[:, ::2],
        lambda: {"thing": thing, "tensor": paddle.ones([3])},
        lambda: {f"name{number}" for number in range(20)},
    ):
        assert checksum(make_one()) == checksum(make_one())
    nested: list[Any] = []
    nested.append(nested)
    assert checksum(nested) == checksum(nested)


def test_what_a_defaultdict_calls_is_no_class_of_the_library() -> None:
    made = encode(defaultdict(list, a=[1]), "here", {})
    assert decode(made, "here", {})["b"] == []
    made["$defaultdict"][0] = "subprocess.Popen"
    with pytest.raises(LookupError, match=r"no subprocess\.Popen is made from a file"):
        decode(made, "here", {})


def test_a_checksum_of_what_is_large_is_not_taken_for_one_of_a_sample() -> None:
    rows, array = [[n] for n in range(10_000)], np.zeros(1 << 23)
    whole = [
        json_values.checksum(value) for value in (rows, array, [array], [*map(np.array, rows)])
    ]
    assert all(text.startswith("all: ") for text in whole)
    rows[5_003][0], array[-1] = -1, 1
    assert json_values.checksum(rows) != whole[0]
    assert json_values.checksum(array) != whole[1]
    short = json_values.checksum(rows[:100])
    assert json_values.is_of_a_sample(whole[0], "1a2b3c4d")  # as expbase 1.0 has noted it
    assert not json_values.is_of_a_sample(short, "1a2b3c4d")
    assert not json_values.is_of_a_sample(whole[0], whole[1])
