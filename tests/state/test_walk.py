"""Which objects have places, by which paths they are found, and that each is visited once."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import queue
import random
import socket
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import BatchSampler, DataLoader
from paddle.optimizer import lr
from tiny import Points

from expbase.state import value_kinds, walk
from expbase.state.compare import as_text, is_same, look
from expbase.state.value_kinds import is_users
from expbase.state.value_places import WHOLE, DictNode, Node
from expbase.state.walk import Walk, nodes_in_layers


class Holder:
    """An object of the user's."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def method(self) -> None:
        """Stands in attributes, as callbacks do."""


def nodes(**attributes: Any) -> list[str]:
    """The paths of what has places."""
    return [*Walk(None, attributes).nodes][1:]


# --- what has places ---------------------------------------------------------------------------

CLIP = paddle.nn.ClipGradByGlobalNorm(1.0)
OPEN: list[Any] = [
    Holder(), [1], {"a": 1}, {1}, deque(), OrderedDict(), defaultdict(list), Counter(),
    np.zeros(2), bytearray(b"a"), paddle.ones([1]), random.Random(), np.random.default_rng(),
    np.random.RandomState(), SimpleNamespace(), queue.Queue(), lr.StepDecay(0.1, 2), CLIP,
    paddle.metric.Accuracy(), paddle.vision.transforms.RandomCrop(4), paddle.regularizer.L2Decay(),
    paddle.nn.Linear(1, 1), paddle.create_parameter([1], "float32"),
    Holder(file=logging.getLogger("any")),  # one of the user's own is always open
]  # fmt: skip


def test_objects_and_collections_have_places() -> None:
    for value in OPEN:
        assert nodes(thing=value)[:1] == ["thing"], value


CLOSED: list[Any] = [
    threading.Lock(), threading.Thread(target=print), threading.local(), logging.getLogger("any"),
    logging.NullHandler(), walk, Holder, nodes, len, iter([1]), (n for n in [1]),
    itertools.count(), object(),
]  # fmt: skip


def test_code_iterators_and_what_talks_to_the_world_have_none() -> None:
    for value in CLOSED:
        found = Walk(None, {"thing": value})
        assert [*found.nodes] == [""], value
        assert found.closed == {"thing": value}


def test_files_sockets_and_memory_maps_have_none(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "map", "uint8", "w+", shape=(2,))
    with (tmp_path / "file").open("w") as file, socket.socket() as door:
        assert nodes(file=file, door=door, array=array) == []


def test_what_never_changes_is_no_matter() -> None:
    constants: list[Any] = [None, True, 1, 0.5, "text", b"b", (), (1, "a"), range(3)]
    for value in [*constants, np.float32(1), Path("a")]:
        found = Walk(None, {"thing": value})
        assert [*found.nodes] == [""], value
        assert found.closed == {}, value


# --- by which paths ----------------------------------------------------------------------------


def test_each_object_has_the_path_of_the_first_way_to_it_breadth_first() -> None:
    shared = Holder(items=[])
    deep = {"in": [{"it": shared}]}
    found = Walk(None, {"deep": deep, "near": shared, "again": shared})
    assert [*found.nodes] == ["", "deep", "near", "deep.in", "near.items", "deep.in.0"]
    assert found.nodes["near"].value is shared


def test_a_cycle_ends() -> None:
    one, other = Holder(), Holder()
    one.other, other.one, one.own = other, one, one
    assert nodes(one=one) == ["one", "one.other"]


def test_items_of_tuples_partials_methods_and_weak_references_are_reached() -> None:
    held = [Holder() for _ in range(4)]
    found = nodes(
        pair=(1, held[0]),
        call=functools.partial(print, held[1], to=[]),
        method=held[2].method,
        weak=weakref.ref(held[3]),
    )
    assert sorted(found) == [
        "call.args.0", "call.keywords", "call.keywords.to", "method.__self__", "pair.1", "weak.()",
    ]  # fmt: skip


def test_keys_have_paths_that_cannot_be_those_of_others() -> None:
    table = {"a.b": [], "a": {"b": []}, (1, 2): [], 2.5: [], 3: []}
    assert sorted(nodes(table=table)) == [
        "table", "table.'a.b'", "table.(1, 2)", "table.2.5", "table.3", "table.a", "table.a.b",
    ]  # fmt: skip
    layer = paddle.nn.Linear(1, 1)
    by_parameter = {layer.weight: [], id(layer.bias): [], layer.bias.name: {}}
    found = nodes(by=by_parameter, model=layer)
    assert {"by.<model.weight>", "by.<model.bias>"} < {*found}


def test_items_and_attributes_of_a_class_that_is_derived_from_a_dict_or_a_list() -> None:
    class Table(dict[str, Any]):
        pass

    class Items(list[Any]):
        pass

    table, items = Table(a=[]), Items([[]])
    table.named, items.named = [1], [2]
    assert nodes(table=table, items=items) == [
        "table", "items", "table.a", "table.__dict__", "items.0", "items.__dict__",
        "table.__dict__.named", "items.__dict__.named",
    ]  # fmt: skip


def test_what_is_set_on_a_layer_is_reached_and_what_paddle_keeps_there_is_not() -> None:
    model = paddle.nn.Sequential(paddle.nn.BatchNorm1D(2), paddle.nn.GRU(1, 1))
    model.own = [1]
    model[0].register_buffer("passing", paddle.ones([1]), persistable=False)
    found = Walk(None, {"model": model})
    assert {*found.nodes["model"].places()} == {"own", "training", "0", "1"}
    assert "passing" in found.nodes["model.0"].places()
    model[0](paddle.ones([3, 2]))  # the first forward sets an attribute
    again = Walk(None, {"model": model})
    assert again.nodes.keys() == found.nodes.keys()
    assert {name: {*n.places()} for name, n in again.nodes.items()} == {
        name: {*n.places()} for name, n in found.nodes.items()
    }


def test_parts_of_a_loader_are_reached_with_the_cells_of_what_collates() -> None:
    calls, seen = [0], [0]

    def collate(batch: Any) -> Any:
        calls[0] += 1
        return batch

    class Counting(Points):
        def __init__(self) -> None:
            super().__init__(8)
            self.read = [0]
            self.transform = lambda x: (seen, x)

    data = Counting()
    loader = DataLoader(data, batch_sampler=BatchSampler(data, batch_size=2), collate_fn=collate)
    found = Walk(None, {"train_loader": loader})
    assert {"train_loader.dataset.read", "train_loader.collate_fn.calls"} < {*found.nodes}
    assert not [path for path in found.nodes if "seen" in path]  # of which the audit tells
    assert found.nodes["train_loader.collate_fn"].places() == {"calls": calls}


def test_a_place_is_set_without_a_call_of_the_users_code() -> None:
    class Guarded(Holder):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError

        def __delattr__(self, name: str) -> None:
            raise AssertionError

    class Table(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError

    guarded, table = Guarded(level=1), Table(a=1)
    Node(guarded).put("level", 2)
    DictNode(table).put("a", 2)
    assert (vars(guarded), table) == ({"level": 2}, {"a": 2})
    Node(guarded).remove("level")
    DictNode(table).remove("a")
    assert (vars(guarded), table) == ({}, {})


def test_a_forward_may_change_what_is_set_on_layers_and_their_buffers() -> None:
    layer = paddle.nn.BatchNorm1D(2)
    layer.seen = [1]
    layer.register_buffer("count", paddle.zeros([1]))
    layer.other = Holder(a=[])
    values = [node.value for node in nodes_in_layers([layer])]
    for thing in (layer, layer.seen, layer.count, layer._buffers):
        assert any(value is thing for value in values)
    assert not any(value is layer.other for value in values)


# --- data, bounds and time ---------------------------------------------------------------------


def test_long_lists_of_data_are_one_place_and_long_lists_of_objects_are_walked() -> None:
    many = walk.MANY + 1
    assert nodes(rows=[(1, [2])] * many, arrays=[np.zeros(1)] * many) == ["rows", "arrays"]
    assert nodes(table=dict.fromkeys(range(many), 1.0)) == ["table"]
    table = Walk(None, {"table": dict.fromkeys(range(many), 1.0)}).nodes["table"]
    assert [*table.places()] == [WHOLE]
    assert len(nodes(all=[Holder() for _ in range(many)])) == many + 1


def test_it_ends_at_its_bound_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MOST", 10)
    found = Walk(None, {"all": [Holder() for _ in range(100)], "last": []})
    assert not found.is_whole
    assert len(found.nodes) == 11
    assert Walk(None, {"few": [Holder()]}).is_whole


SHAPES: dict[str, Callable[[int], Any]] = {
    "wide": lambda n: [Holder(a=1) for _ in range(n)],
    "dicts": lambda n: [{"a": [k]} for k in range(n)],
    "deep": lambda n: functools.reduce(lambda inner, _: Holder(inner=inner), range(n), None),
    "knit": lambda n: knit([Holder() for _ in range(n)]),
    "closed": lambda n: [threading.Lock() for _ in range(n)],
    "layers": lambda n: paddle.nn.LayerList([paddle.nn.Linear(1, 1) for _ in range(n)]),
}


def knit(holders: list[Any]) -> Any:
    """Holders that all know the list of them, as nodes of a graph do."""
    for holder in holders:
        holder.all = holders
    return holders


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_number_of_objects(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    def work(count: int) -> int:
        """How many lines of the walk run, which is about its time."""
        value = SHAPES[shape](count)
        lines = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace if frame.f_code.co_filename == walk.__file__ else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            Walk(None, {"thing": value})
        finally:
            sys.settrace(before)
        return lines

    few, many = work(40), work(160)
    assert many < 4.5 * few


# --- whose a class is --------------------------------------------------------------------------

SOURCE = "import threading\nclass Thing:\n    pass\nclass Busy:\n    pass\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Imports a module of a folder; a name is used in one test alone."""
    is_users.cache_clear()
    value_kinds._installed_in.cache_clear()

    def imported(name: str, folder: str, *, record: str = "", egg: bool = False) -> Any:
        root = tmp_path / folder
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE)
        if record:
            (root / f"{record.partition('/')[0]}-1.0.dist-info").mkdir()
            (root / f"{record.partition('/')[0]}-1.0.dist-info" / "RECORD").write_text(record)
        if egg:
            (root / f"{name}.egg-info").mkdir()
        monkeypatch.syspath_prepend(root)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    is_users.cache_clear()
    value_kinds._installed_in.cache_clear()


@pytest.mark.parametrize(
    ("name", "folder", "options", "expected"),
    [
        ("walked_own", "clone", {}, True),
        ("walked_editable", "clone", {"egg": True}, True),
        ("walked_beside.part", "clone", {"record": "other/a.py,sha256=x,1\n"}, True),
        ("walked_file", "target", {"record": "walked_file.py,sha256=x,1\n"}, False),
        ("walked_package.part", "target", {"record": "walked_package/part.py,,\n"}, False),
        ("walked_deep.a.b", "target", {"record": "walked_deep/a/b.py,,\n"}, False),
        ("walked_site", "lib/site-packages", {}, False),
        ("walked_dist.part", "lib/dist-packages", {"egg": True}, False),
    ],
)
def test_a_module_is_the_users_unless_a_distribution_beside_it_has_it(
    install: Any, name: str, folder: str, options: Any, expected: bool
) -> None:
    found = install(name, folder, **options)
    assert is_users(found.__name__) is expected


def test_python_paddle_and_expbase_are_not_the_users() -> None:
    for name in ("logging", "paddle.nn", "numpy", "expbase.state.walk", "builtins", "no_such"):
        assert not is_users(name)
    assert is_users(__name__)


def test_what_holds_a_lock_a_file_or_a_thread_only_reports_if_it_is_installed(
    install: Any,
) -> None:
    theirs = install("walked_client", "site-packages")
    ours = install("walked_ours", "clone")
    for found, reporting in ((theirs, ["bar.", "bar.inner."]), (ours, [])):
        bar = found.Busy()
        bar.inner = found.Thing()
        bar.inner.lock = threading.Lock()
        bar.count = 1
        walk = Walk(None, {"bar": bar})
        assert walk.reporting == reporting
        assert [*walk.nodes] == ["", "bar", "bar.inner"]  # numbers beside it are state
        assert "bar.inner.lock" in walk.closed
    meter = theirs.Thing()
    meter.sum, meter.values = 1.5, [1]
    assert nodes(meter=meter) == ["meter", "meter.values"]


@pytest.mark.filterwarnings("ignore:The program will return to single-card operation")
def test_a_layer_that_is_wrapped_anew_is_the_same_and_one_without_its_wrapper_is_another() -> None:
    layer = paddle.nn.Linear(1, 1)
    wrapped, anew = (paddle.DataParallel(layer) for _ in range(2))
    names = Walk(None, {"model": wrapped}).names()
    assert is_same(look(wrapped, names), look(anew, names))
    assert not is_same(look(wrapped, names), look(layer, names))
    # Another process compares texts; a single one has no wrapper.
    assert as_text(look(wrapped, names)) == as_text(look(layer, names))
