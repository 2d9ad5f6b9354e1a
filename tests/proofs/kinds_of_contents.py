"""Kinds of values with much in them, of which one element or item has changed; see kinds.py.

The whole content is compared, at every size, and nothing is looked at in samples. Those of hundreds
of MB run only with --large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from kinds import Kind
from kinds_of_values import Box, number

PLACES = {"begin": 0.0, "middle": 0.51, "end": 1.0}


def index_at(place: str, size: int) -> int:
    """Of an element: the first one, the last one, or one that is no multiple of anything."""
    return min(int(PLACES[place] * size) | (place == "middle"), size - 1)


# Arrays


class _OfArray(Kind):
    """Zeros, of which one becomes a small whole number in the fourth update."""

    number_of_bytes = 1_000
    dtype = "float32"
    changed = "middle"
    steps = 1

    def make(self) -> None:
        self.array = np.zeros(self.number_of_bytes // np.dtype(self.dtype).itemsize, self.dtype)

    def index(self) -> int:
        return index_at(self.changed, len(self.array))

    def use(self) -> float:
        if self.now(3):
            self.array[self.index()] = 1
        return float(self.array[self.index()])


SMALL = [
    (dtype, place) for dtype in ("float32", "float64", "int8", "int64", "bool") for place in PLACES
]
# Sizes in MB, and what is tried of each: 201 to 268 of float32 were looked at in every fourth byte.
LARGE = {
    70: [("float32", "begin"), ("float32", "end"), ("int8", "middle"), ("bool", "end")],
    250: [("float32", "begin"), ("float32", "middle"), ("float64", "end"), ("int64", "middle")],
    500: [("float32", "middle"), ("int8", "end")],
}


def _arrays() -> list[type[Kind]]:
    corners = [("1 kb", 1_000, *of_one) for of_one in SMALL]
    corners += [
        (f"{mb} mb", mb * 10**6, *of_one) for mb, all_of in LARGE.items() for of_one in all_of
    ]
    return [
        type(
            f"{size} of {dtype} changed at the {place}",
            (_OfArray,),
            {
                "number_of_bytes": number_of_bytes,
                "dtype": dtype,
                "changed": place,
                "is_large": number_of_bytes > 10**7,
                "__module__": __name__,
            },
        )
        for size, number_of_bytes, dtype, place in corners
    ]


KINDS = _arrays()


class _Visits(_OfArray):
    """Whole numbers in an array that counts or ranks, of some MB."""

    number_of_bytes = 8_000_000

    def make(self) -> None:
        super().make()
        self.array += np.arange(len(self.array)) % 7

    def use(self) -> float:
        if self.now(3):
            self.array[self.index()] += 1
        return float(self.array[self.index()])


class VisitsInFloats(_Visits):
    pass


class VisitsInADataSet(_Visits):
    """By several names."""

    def make(self) -> None:
        super().make()
        self.train_loader.dataset.visits = self.array


class VisitsInAMatrix(_Visits):
    """Whose rows are not one after another."""

    def make(self) -> None:
        self.matrix = np.zeros((1000, 2000), "float32").T
        self.array = self.matrix[1503]


class VisitsInARing(_Visits):
    """A new array each time, with as many equal elements."""

    def use(self) -> float:
        if self.now(3):
            self.array = np.roll(self.array, 1)
        return float(self.array[self.index()])


class BitsOfANan(_Visits):
    """Which is unequal to itself."""

    def make(self) -> None:
        super().make()
        self.array[5::7] = np.nan


class NegativeZero(_Visits):
    """Equal to the other one, and another number."""

    def make(self) -> None:
        self.array = np.zeros(2_000_000, "float32")

    def use(self) -> float:
        if self.now(3):
            self.array[self.index()] = -0.0
        return float(np.signbit(self.array[self.index()]))


class OtherShapeOfTheSameBytes(_Visits):
    def make(self) -> None:
        self.array = np.zeros((1000, 2000), "float32")

    def use(self) -> float:
        if self.now(3):
            self.array = self.array.reshape(2000, 1000)
        return number(self.array.shape)


class OtherTypeOfTheSameBytes(_Visits):
    def make(self) -> None:
        self.array = np.zeros(2_000_000, "float32")

    def use(self) -> float:
        if self.now(3):
            self.array = self.array.view("int32")
        return number(str(self.array.dtype))


class TensorOfEightMb(_OfArray):
    def make(self) -> None:
        self.array = paddle.zeros([2_000_000])


class LargeTensor(TensorOfEightMb):
    is_large = True

    def make(self) -> None:
        self.array = paddle.zeros([62_500_000])


class WhatAPriorityBufferHas(_OfArray):
    """As reinforcement learning keeps it: 210 MB of whole numbers, of which few change."""

    is_large = True
    number_of_bytes = 210_000_000

    def make(self) -> None:
        super().make()
        self.buffer = Box(priorities=self.array, place=0)

    def use(self) -> float:
        if self.now(3):
            self.buffer.priorities[12_345:12_348] += 2
        return float(self.buffer.priorities[12_346])


# Lists and dicts


ITEMS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    # By name: item n, and what one becomes: a new one, or None if it was changed in place.
    "ints": (lambda n: n * 7, lambda v: v + 1),
    "floats": (lambda n: n / 7, lambda v: v * 1.5),
    "texts": (lambda n: f"word {n}", lambda v: v + "s"),
    "dicts": (lambda n: {"id": n, "score": 0.0}, lambda v: v.update(score=1.0)),
    "lists": (lambda n: [n, 0], lambda v: v.__setitem__(1, 1)),
    "tuples": (lambda n: (n, "a"), lambda v: (v[0], "b")),
    "bools": (lambda n: n % 3 == 0, lambda v: not v),
    "nones": (lambda n: None, lambda v: 0),
    "deep ones": (lambda n: {"a": [n, {"b": (n, 1.5)}]}, lambda v: v["a"][1].update(b=(0, 2.5))),
}
SIZES = {"9999": 9_999, "10001": 10_001, "100000": 100_000}
MANY = ("ints", "floats", "texts", "dicts", "lists", "tuples")


class _OfItems(Kind):
    """A list or a dict, of which one item changes in the fourth update."""

    size = 10_001
    item: tuple[Callable[[int], Any], Callable[[Any], Any]]
    changed = "middle"
    is_dict = False

    def make(self) -> None:
        items = [self.item[0](n) for n in range(self.size)]
        self.items_of_kind: Any = (
            {f"k{n}": v for n, v in enumerate(items)} if self.is_dict else items
        )

    def key(self) -> Any:
        index = index_at(self.changed, self.size)
        return f"k{index}" if self.is_dict else index

    def use(self) -> float:
        key = self.key()
        if self.now(3):
            new = self.item[1](self.items_of_kind[key])
            if new is not None:
                self.items_of_kind[key] = new
        return number([self.items_of_kind[key], len(self.items_of_kind)])


def _items() -> list[type[Kind]]:
    places = [*PLACES]
    corners = [
        (items, size, places[(a + b) % 3], container)
        for a, items in enumerate(MANY)
        for b, size in enumerate(SIZES)
        for container in ("list", "dict")
        if container == "list" or size != "9999"
    ]
    corners += [(items, "10001", "middle", "list") for items in ITEMS if items not in MANY]
    corners += [("dicts", "100000", place, "list") for place in ("begin", "middle")]
    return [
        type(
            f"{container} of {size} {items} changed at the {place}",
            (_OfItems,),
            {
                "item": ITEMS[items],
                "size": SIZES[size],
                "changed": place,
                "is_dict": container == "dict",
                "__module__": __name__,
            },
        )
        for items, size, place, container in dict.fromkeys(corners)
    ]


KINDS += _items()


class _OfOne(_OfItems):
    """Item 12,345."""

    size = 100_000

    def key(self) -> Any:
        return 12_345


class OneItemOfManyDicts(_OfOne):
    item = ITEMS["dicts"]


class OneItemOfManyLists(_OfOne):
    size = 20_000
    item = ITEMS["lists"]


class OneItemOfADictOfLists(_OfOne):
    size = 20_000
    item = ITEMS["lists"]
    is_dict = True

    def key(self) -> Any:
        return "k12345"


class OneItemOfAListOfAnObject(_OfOne):
    """In a list of a helper."""

    size = 20_000
    item = ITEMS["dicts"]

    def make(self) -> None:
        super().make()
        self.helper = Box(rows=self.items_of_kind)


class RecordsOfADataSet(_OfOne):
    size = 20_000
    item = ITEMS["deep ones"]

    def make(self) -> None:
        super().make()
        self.train_loader.dataset.records = self.items_of_kind


class TwoItemsThatSwap(_OfOne):
    size = 20_000
    item = ITEMS["ints"]

    def use(self) -> float:
        items = self.items_of_kind
        if self.now(3):
            items[12_345], items[12_346] = items[12_346], items[12_345]
        return number(items[12_345:12_347])


class _Ints(_OfOne):
    size = 20_000
    item = ITEMS["ints"]


class AnIntThatBecomesAFloat(_Ints):
    """Equal, and of another type."""

    def use(self) -> float:
        if self.now(3):
            self.items_of_kind[12_345] = float(self.items_of_kind[12_345])
        return number(self.items_of_kind[12_345])


class AnIntThatBecomesANumberOfNumpy(_Ints):
    def use(self) -> float:
        if self.now(3):
            self.items_of_kind[12_345] = np.int64(self.items_of_kind[12_345])
        return number(type(self.items_of_kind[12_345]).__name__)


class BytesThatBecomeABytearray(_OfOne):
    size = 20_000
    item = (lambda n: b"abcd", lambda v: bytearray(v))

    def use(self) -> float:
        super().use()
        return number(type(self.items_of_kind[12_345]).__name__)


class AnArrayAmongManyItems(_OfOne):
    size = 20_000
    item = (lambda n: np.zeros(2, "int32") if n % 1000 == 345 else n, lambda v: v + 1)


class AKeyOfMany(_OfOne):
    """Another name in the place of one of a dict, with its value."""

    size = 20_000
    item = ITEMS["ints"]
    is_dict = True

    def use(self) -> float:
        if self.now(3):
            self.items_of_kind["other"] = self.items_of_kind.pop("k12345")
        return number("other" in self.items_of_kind)


class OrderOfManyKeys(AKeyOfMany):
    """As a cache has it: one is moved to the end."""

    def use(self) -> float:
        if self.now(3):
            self.items_of_kind["k12345"] = self.items_of_kind.pop("k12345")
        return number([*self.items_of_kind][-1])


class IntsAsKeys(_OfOne):
    def make(self) -> None:
        self.items_of_kind = {n: n for n in range(self.size)}

    item = ITEMS["ints"]


class OneListTwiceAmongMany(_OfOne):
    """Two items that are one object, since the fourth update."""

    size = 20_000
    item = ITEMS["lists"]

    def use(self) -> float:
        items = self.items_of_kind
        if self.now(3):
            items[12_345] = items[12_346]
        items[12_346][1] += 1
        return number(items[12_345])


class ManyTextsInASet(Kind):
    expected = "exact told"

    def make(self) -> None:
        self.seen = {f"word {n}" for n in range(20_000)}

    def use(self) -> float:
        if self.now(3):
            self.seen.remove("word 12345")
        return number("word 12345" in self.seen)


class ManyArrays(Kind):
    """Fewer than objects may be, of which one changes."""

    def make(self) -> None:
        self.rows = [np.zeros(2) for _ in range(12_000)]

    def use(self) -> float:
        if self.now(3):
            self.rows[11_999][1] = 1.0
        return number(self.rows[11_999])


class ManyTensors(ManyArrays):
    def make(self) -> None:
        self.rows = [paddle.zeros([2]) for _ in range(2_000)]

    def use(self) -> float:
        if self.now(3):
            self.rows[1_999] = paddle.ones([2])
        return number(self.rows[1_999])


class ManyParameters(Kind):
    """More than objects may be, beside a counter."""

    is_large = True  # it takes long, too

    def net(self) -> Any:
        layer = super().net()
        for n in range(21_000):
            layer.add_parameter(f"p{n}", layer.create_parameter([1]))
        return layer

    def optimizers(self) -> None:
        parameters = [self.model.weight, self.model.bias]
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
        for n in range(21_000):
            getattr(self.model, f"p{n}").stop_gradient = True

    def make(self) -> None:
        self.z_last = Box(count=0)

    def use(self) -> float:
        self.z_last.count += 1
        return number(self.z_last.count)


class LongTextThatChanges(Kind):
    def make(self) -> None:
        self.text = "a" * 3_000_000

    def use(self) -> float:
        if self.now(3):
            self.text = f"{self.text[:1_500_001]}b{self.text[1_500_002:]}"
        return number(self.text[1_500_001])


class LongBytesThatChange(Kind):
    def make(self) -> None:
        self.content = bytearray(3_000_000)

    def use(self) -> float:
        if self.now(3):
            self.content[1_500_001] = 1
        return number(self.content[1_500_001])
