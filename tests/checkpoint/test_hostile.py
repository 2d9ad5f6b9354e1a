"""A checkpoint that somebody has written by hand is refused, soon, and calls nothing."""

from __future__ import annotations

import enum
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from starts import Start
from tiny import Tiny, run_of, trained

from expbase.base.any_object import attributes_of, set_attribute
from expbase.base.arrays import Array
from expbase.base.files import DAMAGES
from expbase.base.json_values import Decoder, Encoded, checksum
from expbase.checkpoint import layout, storage
from expbase.state.value_places import LayerNode, Node

HERE = __name__
set_by_property: list[Any] = []


class Slotted:
    """An object without a __dict__."""

    __slots__ = ("count",)

    @property
    def path(self) -> str:
        return "safe"

    @path.setter
    def path(self, value: str) -> None:
        set_by_property.append(value)


class Hidden(Slotted):
    """One with a property in front of a slot."""

    __slots__ = ()

    @property
    def count(self) -> int:  # type: ignore[override]
        return 2 * Slotted.count.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @count.setter
    def count(self, value: int) -> None:
        set_by_property.append(value)


# Python 3.10 keeps no unknown bits, and has no word for it.
_KEEP: Any = {"boundary": enum.KEEP} if hasattr(enum, "KEEP") else {}
Marks = enum.Flag("Marks", {"ONE": 1}, module=HERE, **_KEEP)


def mt(place: int) -> dict[str, Any]:
    return {"key": [0] * 624, "pos": place}


def generator(kind: str, state: Any) -> Any:
    return {"$generator": [kind, state]}


ARRAYS = {"a": Array.of_bytes(np.zeros(8, np.uint8)), "e": Array.of_bytes(np.zeros(0, np.uint8))}
MANY = 10**12
PCG: Any = np.random.default_rng(0).bit_generator.state
PHILOX = {"bit_generator": "Philox", "buffer_pos": 10**6, "buffer": [0] * 4, "has_uint32": 0,
          "uinteger": 0, "state": {"counter": [0] * 4, "key": [0] * 2}}  # fmt: skip
HOSTILE: dict[str, Any] = {
    "a fraction of a million digits": {"$fraction": "1e1000000"},
    "a decimal that nobody can write out": {"$decimal": "1e99999999"},
    "a range without an end": {"$range": [0, 10**30, 1]},
    "a time of 10**20 days": {"$timedelta": [10**20, 0, 0]},
    "a complex number of 400 digits": {"$complex": [10**400, 0]},
    "more objects than memory": {"$array": [None, [MANY], []]},
    "more numbers than bytes": {"$array": ["a", "<f8", [MANY], [0], True]},
    "a shape below zero": {"$array": ["a", "<f8", [-1], [0], True]},
    "a tensor larger than its bytes": {"$tensor": ["a", "float32", [MANY], True, True]},
    "a tensor of no type": {"$tensor": ["a", "load", [2], True, True]},
    "a gradient of another shape": {
        "$tensor": ["a", "int64", [1], True, False, ["a", "int32", [2], True, True]]
    },
    "an address": {"$scalar": ["|O", "00" * 8]},
    "an address in a record": {"$scalar": [[["a", "|O"]], "00" * 8]},
    "addresses": {"$array": ["a", "|O", [1], [0], True]},
    "numbers of one byte": {"$list": {"$numbers": ["b", "a"]}},
    "rows without content": {
        "$list": {"$stack": {"$array": ["e", "<f8", [2**21, 0], [0, 1], True]}}
    },
    "one array again and again": [{"$list": {"$numbers": ["q", "a"]}}] * 17,
    "a place behind the memory of a generator": generator(
        "Generator of MT19937", {"bit_generator": "MT19937", "state": mt(10**9), "children": []}
    ),
    "a place before the memory of a generator": generator(
        "RandomState of MT19937",
        {"bit_generator": "MT19937", "state": mt(-(10**9)), "has_gauss": 0, "gauss": 0.0},
    ),
    "a place behind the buffer of a generator": generator(
        "Generator of Philox", {**PHILOX, "children": []}
    ),
    "a place behind the memory of paddle's generator": generator(
        "paddle.Generator", [-1, 0, 0, "1 " * 312 + "999999999"]
    ),
    "a billion generators": generator("Generator of PCG64", {**PCG, "children": [10**11, 0, []]}),
    "a seed of a million bits": generator(
        "Generator of PCG64", {**PCG, "children": [0, {"$int": hex(1 << 10**6)}, []]}
    ),
    "a million flags": {"$enum": [f"{HERE}.Marks", {"$int": hex((1 << 20_000) - 1)}]},
    "a class that starts a process": {"$class": "subprocess.Popen"},
    "a function of the system": {"$function": "posix.system"},
    "an attribute that is a property": {"$object": [f"{HERE}.Slotted", {"path": "/"}, None]},
    "no object but its class": {"$object": [f"{HERE}.Slotted", {"__class__": 1}, None]},
    "a deque below zero": {"$deque": [[], -1]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_run_has_saved_is_refused(kind: str) -> None:
    arrays = {name: array.copy() for name, array in ARRAYS.items()}
    with pytest.raises(DAMAGES):
        Decoder(arrays).decode(HOSTILE[kind], "value")
    assert set_by_property == []


def test_values_that_contain_each_other_too_deeply_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    with pytest.raises(RecursionError):
        Decoder({}).decode(deep, "value")


def test_a_checksum_of_what_stands_in_many_places_takes_no_longer() -> None:
    def held(depth: int) -> list[Any]:
        inner: list[Any] = [1]
        for _ in range(depth):
            inner = [inner, inner]  # 2 ** depth of them, written out
        return [*range(10_000), inner]

    assert checksum(held(40)) != checksum(held(41))
    assert checksum(held(1)) != checksum(deepcopy([*range(10_000), [[1], [1]]]))


def test_a_slot_is_read_and_set_behind_a_property() -> None:
    one = Hidden()
    set_attribute(one, "count", 3)
    assert (one.count, attributes_of(one)) == (6, {"count": 3})
    Node(one).remove("count")
    assert attributes_of(one) == {}
    assert set_by_property == []


# --- places ------------------------------------------------------------------------------------


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(2, 2)
        self.register_buffer("mean", paddle.zeros([2]))
        self.level = 0.5


FORGED: dict[str, list[Any]] = {  # by path: the name of a node, a key, a value
    "model._sub_layers": ["model", ["_sub_layers"], {}],
    "model.level": ["model", ["_parameters"], {}],
    "model._buffers": ["model", ["_buffers"], {}],
    "model._forward_pre_hooks": ["model", ["_forward_pre_hooks"], {}],
    "model.mean": ["model", ["mean"], 5],
    "model.fc": ["model", ["fc"], 5],
    "model.fc.weight": ["model.fc", ["weight"], 5],
    "model.__dict__": ["model", ["__dict__"], {}],
    "model.fc.weight._is_param": ["model.fc.weight", ["_is_param"], False],
    "optimizer._accumulators": ["optimizer", ["_accumulators"], {}],
    "optimizer._master_weights": ["optimizer", ["_master_weights"], {}],
    "optimizer.step": ["optimizer", ["step"], 1],
    "numbers": ["numbers", ["x"], []],
    "slotted.path": ["slotted", ["path"], "/"],
    "slotted.__class__": ["slotted", ["__class__"], 1],
    "train_loader.num_workers": ["train_loader", ["num_workers"], 9],
    "train_loader.dataset": ["train_loader", ["dataset"], 9],
    "excluded": ["excluded", ["x"], 1],
    "other": [None, None, 1],
    "config": [None, None, 1],
}


def of_setup() -> Start:
    model = Net()
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    data = paddle.io.TensorDataset([paddle.zeros([4, 2])])
    loader = paddle.io.DataLoader(data, batch_size=2)
    own = {"model": model, "optimizer": optimizer, "train_loader": loader, "numbers": [1]}
    own |= {"slotted": Slotted(), "excluded": {"x": 0}, "other": 2, "config": 3}
    return Start(own, exclude=["excluded"])


def test_names_that_are_no_places_are_refused_together_and_nothing_is_changed() -> None:
    one = of_setup()
    layers = {**one.own.model._sub_layers}
    saved = {path: Encoded(content, {}) for path, content in FORGED.items()}
    lines = one.state.values.problems({**saved, "@deleted": [], "@order": {}, "@constants": {}})
    refused = {line.partition(": ")[0].partition(" is ")[0] for line in lines}
    assert {*FORGED} - refused == {"excluded"}  # which is passed over, by its path
    assert one.own.model._sub_layers == layers
    assert set_by_property == []


def test_a_path_does_not_hide_where_a_value_is_put(tmp_path: Path) -> None:
    exp: Any = trained(Tiny, tmp_path, max_iteration=1)
    values = run_of(exp).state.values
    for name, key in (("", "train_loader"), ("", "visualizer"), ("config.training", "seed")):
        saved = {"fine": Encoded([name, [key], 5], {})}
        assert values.problems(saved) == ["fine: a value in the checkpoint, and no value here."]
    for forged in ([["model", "_sub_layers"]], [["config.training", "seed"]]):
        assert values.problems({"@deleted": forged}) == []
        values.load_state_dict({"@deleted": forged, "@order": {"config.training": []}} | EMPTY)
    assert exp.model._sub_layers
    assert exp.config.training.seed == 0


EMPTY: dict[str, Any] = {"@constants": {}}


def test_a_buffer_that_is_saved_with_the_weights_is_no_place() -> None:
    node = LayerNode(Net())
    assert [node.may_have(key) for key in ("level", "later", "mean")] == [True, True, False]


# --- a start -----------------------------------------------------------------------------------


def forge(output: Path, edit: Any) -> None:
    """Writes the newest checkpoint of a run anew, with another state."""
    path = layout.listed(output / layout.FOLDER)[-1]
    there = storage.opened(path)
    state = there.state
    edit(state["values"])
    files = {name: [data.tobytes()] for name, data in there.files.items()}
    files[layout.STATE_FILE] = [json.dumps(state).encode()]
    storage.write(output / layout.FOLDER, there.manifest["iteration"], files, there.info)


@pytest.mark.parametrize(
    "value",
    [
        {"$encoded": ["", ["level"], {"$fraction": "1e300000000"}]},
        {"$encoded": ["model", ["_sub_layers"], {}]},
        {"$encoded": ["", ["level"], {"$array": [None, [MANY], []]}]},
        {"$encoded": ["", ["level"], {"$scalar": ["|O", "00" * 8]}]},
    ],
)
def test_a_start_says_in_a_line_that_the_checkpoint_is_none_of_a_run(
    value: Any, tmp_path: Path
) -> None:
    trained(Tiny, tmp_path, max_iteration=1)
    forge(tmp_path, lambda values: values["values"].update(level=value))
    with pytest.raises(layout.CheckpointError, match=r"damaged, or not of expbase|does not fit"):
        trained(Tiny, tmp_path, max_iteration=2)


def test_a_schedule_is_not_stepped_for_days(tmp_path: Path) -> None:
    class Scheduled(Tiny):
        length = 10

        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer._learning_rate = paddle.optimizer.lr.StepDecay(0.1, self.length)

    trained(Scheduled, tmp_path, max_iteration=1)
    name = "optimizer.learning_rate"

    def edit(values: dict[str, Any]) -> None:
        far = [name, ["last_epoch"], 10**18]
        values["values"][f"{name}.last_epoch"] = {"$encoded": far}

    forge(tmp_path, edit)
    Scheduled.length = 20
    with pytest.raises(layout.CheckpointError, match="which no training reaches"):
        trained(Scheduled, tmp_path, max_iteration=2)


def test_what_an_epoch_s_position_counts_is_no_endless_number(tmp_path: Path) -> None:
    trained(Tiny, tmp_path, max_iteration=1)
    forge(tmp_path, lambda values: values["data"].update(ahead="1e300000000"))
    exp: Any = trained(Tiny, tmp_path, max_iteration=2)
    assert exp.iteration == 2
