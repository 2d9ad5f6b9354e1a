"""Kinds of values, at several places; see kinds.py.

A value is made in setup and takes a step in each update; what it is then, to its class, its order,
its layout and its aliases, is the number that is learned.
"""

from __future__ import annotations

import array
import collections
import datetime
import enum
import random
import re
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
from kinds import EXACT, LOUD, Kind, Points
from paddle.io import BatchSampler, DataLoader, Sampler


def counting() -> Callable[[], int]:
    """A function that counts its calls in a variable of its closure."""
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def number(value: Any) -> float:
    """Another one for a value that is another one, also by its class, layout or aliases."""
    if isinstance(value, (random.Random, np.random.Generator)):
        return float(value.random())
    if isinstance(value, np.random.RandomState):
        return float(value.rand())
    return zlib.crc32(described(value, {}).encode()) % 10007 / 1000


def described(value: Any, seen: dict[int, Any]) -> str:
    """A value in words, each object once; those of `seen` live, so that no id comes twice."""
    kind = type(value)
    if isinstance(value, int) and not isinstance(value, enum.Enum):
        return f"{kind.__name__} {int(value):x}"  # a long one has no decimals
    if kind in (float, str, bytes, type(None), complex) or isinstance(value, (type, enum.Enum)):
        return repr(value)
    if id(value) in seen:
        return f"<{seen[id(value)][0]}>"
    if isinstance(value, _WITH_IDENTITY) or hasattr(value, "__dict__"):
        seen[id(value)] = len(seen), value
    return f"{kind.__name__}({', '.join(described(part, seen) for part in _parts(value))})"


def _parts(value: Any) -> list[Any]:
    if isinstance(value, paddle.Tensor):
        content = _array_of(value).tobytes()
        return [str(value.dtype), value.shape, value.stop_gradient, content]
    if isinstance(value, np.ndarray):
        layout = [value.dtype.str, value.shape, value.strides, value.flags.writeable]
        if value.size > 1000:
            return [*layout, value.tobytes()]
        return [*layout, value.tolist(), np.ma.getmaskarray(value).tolist()]
    if isinstance(value, collections.ChainMap):
        return list(value.maps)
    if isinstance(value, dict):
        return [getattr(value, "default_factory", None), *value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple, collections.deque)):
        return [getattr(value, "maxlen", None), *value]
    state = [] if isinstance(value, (str, float, np.generic)) else _state_of(value)
    has_text = type(value).__repr__ is not object.__repr__
    return state or ([repr(value)] if has_text else [])


def _array_of(tensor: Any) -> Any:
    is_half = tensor.dtype in (paddle.bfloat16, paddle.float16)
    return (tensor.astype("float32") if is_half else tensor).numpy()


def _state_of(value: Any) -> list[Any]:
    slots = [n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())]
    return [*((n, getattr(value, n, None)) for n in slots), *getattr(value, "__dict__", {}).items()]


_WITH_IDENTITY = (list, dict, set, collections.deque, bytearray, np.ndarray, paddle.Tensor)


class Colour(enum.Enum):
    RED = 0
    GREEN = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 0
    MIDDLE = 1
    HIGH = 2


class Mode(str, enum.Enum):
    WARM = "warm"
    MAIN = "main"
    COOL = "cool"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Metres(float):
    pass


class Count(int):
    pass


class Name(str):
    __slots__ = ()


class Stack(list):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Pair(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Bag(set):  # type: ignore[type-arg]
    pass


class Place(NamedTuple):
    x: int
    y: float


Old = collections.namedtuple("Old", "step best")


@dataclass
class Meter:
    total: float = 0.0
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Slim:
    count: int
    total: float


@dataclass(frozen=True)
class Frozen:
    count: int = 0


@dataclass
class Outer:
    inner: Meter = field(default_factory=Meter)
    best: Frozen = field(default_factory=Frozen)


class Box:
    """An object of a user's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("count", "missing", "names")

    def __init__(self) -> None:
        self.count, self.names = 0, ["a"]


class HalfSlots(Slots):
    """Has a __dict__ besides the slots of its base class."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 0.5


class Guarded:
    """A property with a setter over a private attribute."""

    def __init__(self) -> None:
        self._level = 1.0

    @property
    def level(self) -> float:
        return self._level

    @level.setter
    def level(self, value: float) -> None:
        self._level = min(value, 100.0)


class Mangled:
    def __init__(self) -> None:
        self.__count = 0

    def step(self) -> None:
        self.__count += 1


class Node:
    def __init__(self, value: float, after: Any = None) -> None:
        self.value, self.after = value, after


def linked() -> Node:
    return Node(0.0, Node(1.0, Node(2.0)))


def ring() -> Node:
    first = linked()
    first.after.after.after = first
    return first


def endless() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def run(*calls: Any) -> None:
    """Takes what statements within a lambda return."""


def add(values: Any) -> None:
    values += 1


Values = dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
VALUES: Values = {
    # By name: what is made in setup, and its step: a new value, or None if it was changed in place.
    "int": (lambda: 1, lambda v: v + 3),
    "float": (lambda: 0.1, lambda v: v * 1.1),
    "list": (lambda: [1, 2], lambda v: v.append(v[-1] + v[-2])),
    "dict": (lambda: {"a": 1}, lambda v: v.update({f"k{len(v)}": len(v), "a": v["a"] + 2})),
    "array": (lambda: np.zeros(3), add),
    "tensor": (lambda: paddle.zeros([3]), lambda v: v + 1),
    "random.Random": (lambda: random.Random(3), lambda v: None),
    "np.random.Generator": (lambda: np.random.default_rng(3), lambda v: None),
    "RandomState": (lambda: np.random.RandomState(3), lambda v: None),
    # numbers
    "bool": (lambda: False, lambda v: not v if random.random() < 0.6 else v),
    "complex": (lambda: 1 + 2j, lambda v: v * (0.9 + 0.1j)),
    "Decimal": (lambda: Decimal("0.1"), lambda v: v + Decimal("0.37")),
    "Fraction": (lambda: Fraction(1, 3), lambda v: v + Fraction(1, 7)),
    "int of 5000 digits": (lambda: 10**5000, lambda v: v * 3 + 1),
    "negative int": (lambda: -(2**70), lambda v: v - 1),
    "infinite float": (lambda: 1e300, lambda v: v * 100),
    "np.float32": (lambda: np.float32(0.1), lambda v: v * np.float32(1.1)),
    "np.int64": (lambda: np.int64(5), lambda v: v + np.int64(7)),
    "np.bool": (lambda: np.False_, lambda v: ~v if random.random() < 0.6 else v),
    "np.complex64": (lambda: np.complex64(1j), lambda v: v * np.complex64(0.9 + 0.1j)),
    "np.datetime64": (lambda: np.datetime64("2020-01-01"), lambda v: v + np.timedelta64(3, "D")),
    # dates and names
    "date": (lambda: datetime.date(2020, 1, 1), lambda v: v + datetime.timedelta(days=3)),
    "datetime": (
        lambda: datetime.datetime(2020, 1, 1, 1, 2, 3, 4),
        lambda v: v + datetime.timedelta(hours=5),
    ),
    "datetime with a zone": (
        lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
        lambda v: v + datetime.timedelta(hours=5),
    ),
    "timedelta": (lambda: datetime.timedelta(1), lambda v: v * 1.5),
    "time of day": (lambda: datetime.time(1, 2), lambda v: v.replace(minute=v.minute + 1)),
    "enum": (lambda: Colour.RED, lambda v: Colour((v.value + 1) % 3)),
    "int enum": (lambda: Level.LOW, lambda v: Level((v.value + 1) % 3)),
    "str enum": (lambda: Mode.WARM, lambda v: Mode.MAIN if v is Mode.WARM else Mode.COOL),
    "flags": (lambda: Rights.READ, lambda v: v | Rights.RUN if v & Rights.WRITE else Rights(3)),
    "uuid": (lambda: uuid.UUID(int=1), lambda v: uuid.UUID(int=v.int + 1)),
    "path": (lambda: PurePosixPath("a"), lambda v: v / "b"),
    "regex": (lambda: re.compile("a"), lambda v: re.compile(v.pattern + "b")),
    "str": (lambda: "a", lambda v: v + "ß"),
    "str with a surrogate": (lambda: "\udc80", lambda v: v + "\udc81\0"),
    "bytes": (lambda: b"\xff", lambda v: v + b"\0"),
    "bytearray": (lambda: bytearray(b"a"), lambda v: v.extend(b"b")),
    "none that becomes a float": (lambda: None, lambda v: 0.5 if v is None else v + 1),
    "float that becomes none": (lambda: 3.0, lambda v: None if v is None or v < 2 else v - 1),
    "slice": (lambda: slice(0, 1), lambda v: slice(0, v.stop + 1)),
    "range": (lambda: range(1), lambda v: range(len(v) + 1)),
    # subclasses
    "float subclass": (lambda: Metres(1), lambda v: Metres(v * 1.1)),
    "int subclass": (lambda: Count(1), lambda v: Count(v + 1)),
    "str subclass": (lambda: Name("a"), lambda v: Name(v + "b")),
    "list subclass": (lambda: Stack([1]), lambda v: v.append(len(v))),
    "dict subclass": (lambda: Table(a=1), lambda v: v.update({str(len(v)): 1})),
    "tuple subclass": (lambda: Pair((1, 2)), lambda v: Pair((v[1], v[0] + 1))),
    "set subclass": (lambda: Bag({1}), lambda v: v.add(len(v) * 3)),
    "user dict": (collections.UserDict, lambda v: v.update({str(len(v)): 1})),
    "user list": (lambda: collections.UserList([1]), lambda v: v.append(len(v))),
    # containers
    "empty list": (list, lambda v: v.append(len(v))),
    "list of lists": (
        lambda: [[1], [2]],
        lambda v: (
            v[0].append(v[1].pop() + 1) or v.reverse() or v[1].append(3)
            if not v[0] or not v[1]
            else v[1].append(v[0][-1] + 1)
        ),
    ),
    "list that shrinks": (lambda: [*range(20)], lambda v: run(v.pop(0))),
    "list replaced": (lambda: [1], lambda v: [*v, len(v)]),
    "one item of many": (
        lambda: [0] * 50_000,
        lambda v: run(v.__setitem__(12_345 + sum(v) * 432, 1)),
    ),
    "heap": (lambda: [(3, "a"), (5, "b")], lambda v: v.append((len(v), "c"))),
    "tuple": (lambda: (1, 2), lambda v: (*v[-3:], v[-1] + v[-2])),
    "tuple with a list": (lambda: ([1], 2), lambda v: v[0].append(len(v[0]))),
    "tuple with an array": (lambda: (np.zeros(2), 2), lambda v: add(v[0])),
    "set": (lambda: {1, 2}, lambda v: v.add(len(v) * 5)),
    "frozenset": (lambda: frozenset({1}), lambda v: v | {len(v) * 3}),
    "deque": (lambda: collections.deque([1], maxlen=4), lambda v: v.append(v[-1] + 1)),
    "deque rotated": (lambda: collections.deque(range(5)), lambda v: v.rotate(2)),
    "ordered dict": (
        lambda: collections.OrderedDict(a=1, b=2, c=3),
        lambda v: v.move_to_end(next(iter(v))),
    ),
    "defaultdict": (lambda: collections.defaultdict(int), lambda v: run(v[len(v)])),
    "defaultdict of lists": (lambda: collections.defaultdict(list), lambda v: v["a"].append(1)),
    "counter": (lambda: collections.Counter("a"), lambda v: v.update("ab")),
    "counter in a dict": (
        lambda: {"words": collections.Counter()},
        lambda v: v["words"].update("ab"),
    ),
    "defaultdict in a list": (
        lambda: [collections.defaultdict(float)],
        lambda v: run(v[0].__setitem__(len(v[0]), v[0]["none"])),
    ),
    "chain map": (lambda: collections.ChainMap({}, {"a": 1}), lambda v: v.update({str(len(v)): 1})),
    "dict with other keys": (
        lambda: {(1, "a"): 1, None: 2, 3: 4, Level.LOW: 5, 0.5: 6, b"a": 7},
        lambda v: run(v.__setitem__((1, "a"), v[(1, "a")] + 1), v.__setitem__(3, v[3] * 2)),
    ),
    "dict keyed by enums": (
        dict,
        lambda v: v.update({Colour(len(v) % 3): v.get(Colour(len(v) % 3), 0) + 1}),
    ),
    "dict in another order": (
        lambda: dict.fromkeys("abc", 1),
        lambda v: v.update({(k := next(iter(v))): v.pop(k)}),
    ),
    "dict of dicts": (
        lambda: {"a": {"b": {}}},
        lambda v: v["a"]["b"].update({len(v["a"]["b"]): v["a"]["b"].get(0, 1)}),
    ),
    "deleted keys": (lambda: dict.fromkeys(range(30), 1), lambda v: run(v.popitem())),
    "named tuple": (lambda: Place(1, 2.0), lambda v: v._replace(x=v.x + 1, y=v.y * 1.1)),
    "old named tuple": (lambda: Old(1, 2.0), lambda v: v._replace(step=v.step + 1)),
    "list of named tuples": (
        lambda: [Place(1, 2.0)],
        lambda v: run(v.__setitem__(0, Place(v[0].x + 1, 0.5))),
    ),
    "list that contains itself": (endless, lambda v: v.append(len(v))),
    "array.array": (lambda: array.array("d", [1.0]), lambda v: v.append(len(v))),
    "namespace": (lambda: SimpleNamespace(a=1), lambda v: run(setattr(v, "a", v.a + 1))),
    # objects
    "object": (lambda: Box(total=0.0), lambda v: run(setattr(v, "total", v.total + 0.5))),
    "object with a new attribute": (Box, lambda v: run(setattr(v, f"a{len(vars(v))}", 1))),
    "object 3 deep": (
        lambda: Box(a=Box(b=Box(c=1))),
        lambda v: run(setattr(v.a.b, "c", v.a.b.c + 1)),
    ),
    "dataclass": (Meter, lambda v: run(setattr(v, "total", v.total + 1), v.values.append(v.total))),
    "dataclass with slots": (lambda: Slim(0, 0.0), lambda v: run(setattr(v, "total", v.total + 1))),
    "frozen dataclass": (Frozen, lambda v: Frozen(v.count + 1)),
    "nested dataclasses": (Outer, lambda v: run(v.inner.values.append(1.0))),
    "frozen in a dataclass": (Outer, lambda v: run(setattr(v, "best", Frozen(v.best.count + 1)))),
    "slots": (Slots, lambda v: run(setattr(v, "count", v.count + 1), v.names.append("b"))),
    "slots and a dict": (
        HalfSlots,
        lambda v: run(setattr(v, "count", v.count + 1), setattr(v, "more", v.more + 1)),
    ),
    "slot that was empty": (
        Slots,
        lambda v: run(setattr(v, "missing", getattr(v, "missing", 0) + 1)),
    ),
    "property": (Guarded, lambda v: run(setattr(v, "level", v.level * 1.5))),
    "private attribute": (Mangled, lambda v: v.step()),
    "linked list": (linked, lambda v: run(setattr(v.after, "value", v.after.value + 1))),
    "ring of objects": (
        ring,
        lambda v: run(
            setattr(v.after.after, "value", v.value + 3), setattr(v, "value", v.value + 1)
        ),
    ),
    "list of objects": (
        lambda: [Box(n=0), Box(n=1)],
        lambda v: run(setattr(v[1], "n", v[1].n + 2)),
    ),
    "dict of objects": (lambda: {"a": Box(n=0)}, lambda v: run(setattr(v["a"], "n", v["a"].n + 2))),
    "objects in another order": (
        lambda: [Box(n=0), Box(n=1), Box(n=2)],
        lambda v: v.append(v.pop(0)),
    ),
    "objects that come": (lambda: [Box(n=0)], lambda v: v.append(Box(n=len(v)))),
    "objects that go": (lambda: [Box(n=n) for n in range(20)], lambda v: run(v.pop(0))),
    "object replaced": (lambda: Box(n=0), lambda v: Box(n=v.n + 1)),
    "linked list that grows": (linked, lambda v: Node(v.value + 1, v)),
    "dict keyed by objects": (
        lambda: {Box(n=0): 1},
        lambda v: run(v.update({k: v[k] + 1 for k in v})),
    ),
}

# Of these nothing is promised but that a line or an error names them.
OTHERWISE = """
objects that come, object replaced, linked list that grows, slice, range, regex, dict keyed by
objects, objects in another order, objects that go, path, uuid, list that contains itself, int of
5000 digits, array.array, str with a surrogate, user dict, user list, time of day, set, set subclass
"""


class _Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(3, 1)

    def forward(self, batch: Any) -> Any:
        return self.inner(batch)


class InOrder(Sampler):
    def __iter__(self) -> Any:
        return iter([*range(0, 12, 2), *range(1, 12, 2)])


class Collate:
    def __call__(self, batch: Any) -> Any:
        return np.stack(batch)


class Loss:
    def __call__(self, output: Any) -> Any:
        return output.square()


# By name: what it makes of the experiment, and how the object is found that has the value.
HERE: dict[str, tuple[Callable[[Any], object], Callable[[Any], Any]]] = {
    "": (lambda e: None, lambda e: e)
}
PLACES = {
    "in an object": (lambda e: setattr(e, "helper", Box()), lambda e: e.helper),
    "3 deep": (lambda e: setattr(e, "helper", Box(a=Box(b=Box()))), lambda e: e.helper.a.b),
    "of an object in a list": (lambda e: setattr(e, "helpers", [Box()]), lambda e: e.helpers[0]),
    "of an object in a dict": (lambda e: setattr(e, "parts", {"a": Box()}), lambda e: e.parts["a"]),
    "in a namespace": (lambda e: setattr(e, "state", SimpleNamespace()), lambda e: e.state),
    "in a dataclass": (lambda e: setattr(e, "outer", Outer()), lambda e: e.outer.inner),
    "in a layer": (lambda e: None, lambda e: e.model),
    "in a part of a layer": (lambda e: None, lambda e: e.model.inner),
    "in a loss": (lambda e: setattr(e, "criterion", Loss()), lambda e: e.criterion),
    "in a sampler": (lambda e: None, lambda e: e.train_loader.batch_sampler.sampler),
    "in a batch sampler": (lambda e: None, lambda e: e.train_loader.batch_sampler),
    "in a data set": (lambda e: None, lambda e: e.train_loader.dataset),
    "in a collate_fn": (lambda e: None, lambda e: e.train_loader.collate_fn),
}
# What is tried at all places.
EVERYWHERE = [*[*VALUES][:9], "enum", "counter", "named tuple", "deque"]


class _OfValue(Kind):
    """A value at a place."""

    value: tuple[Any, Any]
    place: tuple[Any, Any]

    def net(self) -> Any:
        return _Net()

    def loader(self) -> Any:
        data = Points()
        batches = BatchSampler(sampler=InOrder(data), batch_size=4)
        return DataLoader(data, batch_sampler=batches, collate_fn=Collate())

    def make(self) -> None:
        self.place[0](self)
        self.place[1](self).value_of_kind = self.value[0]()

    def use(self) -> float:
        random.seed(self.iteration)
        holder = self.place[1](self)
        new = self.value[1](holder.value_of_kind)
        if new is not None or isinstance(holder.value_of_kind, float):
            holder.value_of_kind = new
        return number(holder.value_of_kind)


def make_kinds(values: Values, places: Mapping[str, Any], otherwise: str) -> list[type[Kind]]:
    """A kind for each value at each place; `otherwise` names values that may be told or refused."""
    named = {*filter(None, map(str.strip, otherwise.replace("\n", " ").split(",")))}
    assert named <= {*values}
    return [
        type(
            f"{value} {place}".strip(),
            (_OfValue,),
            {
                "value": values[value],
                "place": how,
                "expected": LOUD if value in named else EXACT,
                "__module__": __name__,
            },
        )
        for place, how in places.items()
        for value in values
    ]


KINDS = make_kinds(VALUES, HERE, OTHERWISE)
KINDS += make_kinds({name: VALUES[name] for name in EVERYWHERE}, PLACES, "")
