"""What training changes is state, and what it does not change is the code's; nobody names it."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from paddle.optimizer import lr
from starts import Start
from tiny import Points, Tiny, run_of, same_bits, trained

from expbase.base.json_values import Encoded
from expbase.state.rollback import Rollback
from expbase.state.value_places import DictNode, Node, WholeNode
from expbase.state.walk import nodes_in_layers, unwrap


class Drifting(paddle.nn.Layer):
    """Carries a state from batch to batch, counts, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.hidden = paddle.zeros([4])
        self.register_buffer("passing", paddle.zeros([4]), persistable=False)
        self.pair: Any = None
        self.calls = 0
        self.rng = np.random.default_rng(5)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        out = self.linear(x) + self.hidden + self.passing + self.rng.random() + self.calls / 100
        out = out if self.pair is None else out + self.pair[0]
        self.hidden = out.mean(axis=0).detach().tanh()
        self.passing.set_value(self.hidden / 2)
        self.pair = (self.hidden * 2, self.calls)
        return out


def kinds() -> dict[str, tuple[Any, Callable[[Any, float], Any]]]:
    """By name: what setup makes, and what an update makes of it with a number of its own."""
    return {
        "number": (1.0, lambda old, x: 0.9 * old + x),
        "count": (0, lambda old, x: old + 1),
        "flag": (False, lambda old, x: not old),
        "text": ("a", lambda old, x: f"{old[-3:]}{x:.3f}"),
        "nothing": (None, lambda old, x: x if old is None else old / 2 + x),
        "history": ([], lambda old, x: [*old, x]),
        "in_place": ([], lambda old, x: old.append(x) or old),
        "several": ((0, 0.0), lambda old, x: (old[0] + 1, old[1] + x)),
        "table": ({}, lambda old, x: {**old, len(old): x}),
        "names": (set(), lambda old, x: old | {f"{x:.2f}"}),
        "counter": (Counter(), lambda old, x: old + Counter(a=1)),
        "ordered": (OrderedDict(), lambda old, x: OrderedDict(old, **{f"k{len(old)}": x})),
        "buffer": (
            deque(maxlen=70),
            lambda old, x: old.extend([(np.full(3, x, "float32"), x, True)] * 20) or old,
        ),
        "array": (np.zeros(3), lambda old, x: old + x),
        "array_in_place": (np.zeros(3), lambda old, x: np.add(old, x, out=old)),
        "scalar": (np.float32(0), lambda old, x: np.float32(old + x)),
        "tensor": (paddle.zeros([2]), lambda old, x: old + x),
        "tensor_in_place": (paddle.zeros([2]), lambda old, x: old.add_(paddle.full([2], x))),
        "pool": ([], lambda old, x: [*old[-4:], paddle.full([2, 2], x)]),
    }


class Everything(Tiny):
    """All kinds; each of them has an effect on the weights."""

    def setup_model(self) -> None:
        super().setup_model()
        self.drifting = Drifting()
        # Not all begin with the same rate, which a training may change by hand.
        groups = [
            {"params": self.drifting.parameters(), "learning_rate": 0.5},
            {"params": self.model.parameters()},
        ]
        self.optimizer = paddle.optimizer.Momentum(0.05, parameters=groups)
        self.generators = {"numpy": np.random.default_rng(1), "python": Random(2)}
        for name, (value, _) in kinds().items():
            setattr(self, name, value)

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        draw = self.generators["numpy"].random() + self.generators["python"].random()
        for name, (_, changed) in kinds().items():
            setattr(self, name, changed(getattr(self, name), draw / 10))
        self.made_late = getattr(self, "made_late", 0.0) + draw
        if self.iteration == 2:
            for parameter in self.drifting.parameters():
                parameter.optimize_attr["learning_rate"] = 0.25
            self.optimizer._param_groups[1]["momentum"] = 0.5
        felt = sum(fingerprint_of(getattr(self, name)) for name in kinds()) + self.made_late
        points = self.drifting(points) * (1 + felt / 1000)
        paddle.nn.functional.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(felt=felt)

    def valid(self) -> dict[str, float]:
        return {"mean": float(sum(self.drifting(p).mean() for p, _ in self.valid_batches()))}


def fingerprint_of(value: Any) -> float:
    """A number in which all of a value is."""
    if isinstance(value, (list, tuple, deque)):
        return sum(place * fingerprint_of(item) for place, item in enumerate(value, 1))
    if isinstance(value, dict):
        return sum(fingerprint_of(list(pair)) for pair in value.items())
    if isinstance(value, (set, str)):
        return sum(map(ord, "".join(sorted(value)))) / 100
    value = value.numpy() if hasattr(value, "numpy") else value
    return 0.0 if value is None else float(np.sum(value))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of everything, of one start, without a validation."""
    path = tmp_path_factory.mktemp("values") / "whole"
    trained(Everything, path, valid_interval=0, save_interval=1)
    return path / "checkpoints"


@pytest.mark.device
def test_whatever_has_changed_since_setup_is_restored_and_nobody_has_named_it(
    whole: Path, tmp_path: Path
) -> None:
    for end in (2, 4, 6):
        exp: Any = trained(
            Everything, tmp_path, max_iteration=end, valid_interval=0, save_interval=1
        )
    same_bits(whole / "step-00000006", tmp_path / "checkpoints/step-00000006")
    assert len(exp.history) == exp.count == 6
    assert exp.buffer.maxlen == len(exp.buffer) == 70


@pytest.mark.parametrize("name", kinds())
def test_each_kind_is_felt(name: str) -> None:
    """So the test before fails for each of them that is not restored."""

    def felt(starts: int) -> float:
        for _ in range(starts):
            value, changed = copy.deepcopy(kinds()[name])
            for number in range(6 // starts):
                value = changed(value, 0.1 + 0.01 * number)
        return fingerprint_of(value)

    assert felt(1) != felt(2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["number", "made_late", "drifting.hidden", "drifting.pair"])
def test_what_is_felt_has_an_effect_on_the_weights(whole: Path, tmp_path: Path, name: str) -> None:
    class Without(Everything):
        def setup_model(self) -> None:
            super().setup_model()
            self.made_late = 0.0
            self.exclude_from_state(name)

    for end in (3, 6):
        trained(Without, tmp_path, max_iteration=end, valid_interval=0)
    ends = (folder / "step-00000006" for folder in (whole, tmp_path / "checkpoints"))
    one, other = ((end / "model.safetensors").read_bytes() for end in ends)
    assert one != other


def test_validating_has_no_effect_on_what_layers_carry(whole: Path, tmp_path: Path) -> None:
    exp: Any = trained(Everything, tmp_path, valid_interval=1, save_interval=1, max_iteration=4)
    assert exp.drifting.calls == 4
    same_bits(whole / "step-00000004", tmp_path / "checkpoints/step-00000004", todo=False)


class Recurrent(Tiny):
    """Carries the hidden state of paddle's GRU, which has a list of its parameters, as this has."""

    def setup_model(self) -> None:
        super().setup_model()
        self.rnn = paddle.nn.GRU(4, 4)
        self.trained = [*self.rnn.parameters(), *self.model.parameters()]
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.trained)
        self.hidden: Any = None

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        outputs, hidden = self.rnn(points.unsqueeze(0), self.hidden)
        self.hidden = hidden.detach()
        paddle.nn.functional.cross_entropy(self.model(outputs[0]), labels).backward()
        self.optimizer.step()
        for parameter in self.trained:
            parameter.clear_grad()
        self.log(norm=sum(parameter.norm() for parameter in self.trained))


@pytest.mark.device
def test_lists_of_parameters_stay_lists_of_the_parameters(tmp_path: Path) -> None:
    trained(Recurrent, tmp_path / "whole", max_iteration=4)
    for end in (2, 4):
        exp: Any = trained(Recurrent, tmp_path / "parts", max_iteration=end)
    same_bits(*(tmp_path / f / "checkpoints/step-00000004" for f in ("whole", "parts")))
    assert exp.trained[0] is exp.rnn._all_weights[0] is exp.rnn.parameters()[0]
    saved = run_of(exp).state.values.state_dict()
    assert "hidden" in saved
    found = {name for name in saved if "rnn" in name or name == "trained"}
    assert (
        found - {"rnn._dropout_state[:]"} == set()
    )  # a device's generator, which the GRU advances
    exp.trained.append(paddle.create_parameter([2], "float32"))
    assert "trained" not in run_of(exp).state.values.state_dict()


class Thawing(Tiny):
    """Whose listeners thaw and freeze parameters, and switch parts to eval mode and back."""

    def setup_model(self) -> None:
        super().setup_model()
        self.model.add_sublayer("noise", paddle.nn.Dropout(0.5))
        self.model[0].weight.stop_gradient = True

    def on_train_batch_end(self) -> None:
        self.model[0].weight.stop_gradient = self.iteration < 3
        self.model[0].bias.stop_gradient = self.iteration >= 4
        self.model.noise.training = self.iteration % 3 == 0


def test_what_is_frozen_and_what_is_in_eval_mode_is_restored(tmp_path: Path) -> None:
    trained(Thawing, tmp_path / "whole")
    for end in (4, 6):  # at 4 each of them is the opposite of what setup makes
        exp: Any = trained(Thawing, tmp_path / "parts", max_iteration=end)
    same_bits(*(tmp_path / f / "checkpoints/step-00000006" for f in ("whole", "parts")))
    assert [p.stop_gradient for p in exp.model[0].parameters()] == [False, True]
    assert exp.model.noise.training


def test_a_copied_parameter_in_a_list_of_a_layer_is_state() -> None:
    """As of one that averages its weights in a list that paddle does not look into."""

    def made() -> dict[str, Any]:
        model: Any = paddle.nn.Linear(2, 2)
        model.shadow = {"of": [copy.deepcopy(model.weight)]}
        return {"model": model, "watched": list(model.parameters())}

    one = Start(made())
    one.own.model.shadow["of"][0].set_value(paddle.full([2, 2], 3.0))
    saved = one.saved()
    assert Start(made(), saved).own.model.shadow["of"][0].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert [*one.state.saved().parameters] == ["model.shadow.of.0"]  # and nothing of `watched`


class Memory:
    """A replay buffer: a class without a state_dict."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.capacity = 9


def test_an_object_is_registered_with_all_that_it_has_and_without_an_alarm() -> None:
    names: tuple[str, ...]
    for names in ((), ("big",), ("big.items",), ("big", "big.capacity")):
        one = Start({"big": Memory()}, register=names)
        one.own.big.items.append((np.full(3, 1.0), 1))
        saved = one.saved()
        other = Start({"big": Memory()}, saved, register=names)
        assert [number for _, number in other.own.big.items] == [1], names
        assert one.warned == other.lost == [], names
        assert ("big.capacity" in one.paths()) == ("big" in names), names


def test_what_is_large_is_saved_and_its_size_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expbase.state.changed_values._LARGE_BYTES", 100)
    for names, lines in (((), 1), (("big.items",), 0)):
        one = Start({"big": Memory()}, register=names)
        one.own.big.items += [np.zeros(20), np.ones(20)]
        one.saved()
        assert len(Start({"big": Memory()}, one.saved(), register=names).own.big.items) == 2
        assert len(one.warned) == lines
        for line in one.warned:
            assert "self.big.items: 0 MB in each checkpoint" in line
            assert "exclude_from_state('big.items')" in line


def test_what_the_walk_does_not_reach_can_be_registered() -> None:
    class Sampler(paddle.io.BatchSampler):
        """An object with a state that leaves something out."""

        def __init__(self) -> None:
            super().__init__(Points(8), batch_size=4)
            self.inner = Memory()

        def state_dict(self) -> dict[str, int]:
            return {}

        def set_state_dict(self, state: dict[str, int]) -> None:
            pass

    def made() -> dict[str, Any]:
        return {"train_loader": DataLoader(Points(8), batch_sampler=Sampler())}

    name = "train_loader.batch_sampler.inner.capacity"
    one = Start(made(), register=[name])
    one.own.train_loader.batch_sampler.inner.capacity += 4
    other = Start(made(), one.saved(), register=[name])
    assert other.own.train_loader.batch_sampler.inner.capacity == 13


def test_a_registered_iterator_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Iterating(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.stream = iter([1, 2, 3])
            self.register_stateful("stream")

    with pytest.raises(TypeError, match=r"values\.stream: a list_iterator cannot be saved"):
        trained(Iterating, tmp_path)


class Holder:
    """An object of the user's."""

    def __init__(self) -> None:
        self.position = 0


def test_places_in_layers_objects_lists_and_dicts_are_registered_and_excluded(
    tmp_path: Path,
) -> None:
    class Naming(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.model.fixed, self.numbers = 0, [0]
            self.holder, self.holders = Holder(), [Holder(), Holder()]
            self.table, self.rest = {"seen": 0, 3: 0}, {"seen": 0, 3: 0}
            self.register_stateful("holder.position", "holders.0.position", "model.fixed")
            self.register_stateful("table.seen", "table.3")
            self.exclude_from_state("rest.seen", "rest.3", "holders.1")
            for name_it in (self.register_stateful, self.exclude_from_state):
                # Numbers of a list are put back as a whole.
                for name in ("holder.place", "table.lost", "holders.2", "numbers.0"):
                    with pytest.raises(AttributeError, match=rf"self\.{name} does not exist"):
                        name_it(name)

        def train_batch(self) -> None:
            super().train_batch()
            for holder in (self.holder, *self.holders):
                holder.position += 1
            for table in (self.table, self.rest):
                table.update({key: value + 1 for key, value in table.items()})

    for end in (2, 3):
        exp: Any = trained(Naming, tmp_path, max_iteration=end)
    assert [h.position for h in (exp.holder, *exp.holders)] == [3, 3, 1]
    assert [*exp.table.values(), *exp.rest.values()] == [3, 3, 1, 1]
    assert "model.fixed" in run_of(exp).state.values.state_dict()


class Counting(paddle.nn.Layer):
    """A layer without parameters, so without a file in a checkpoint."""

    calls = 0


def test_a_layer_that_is_gone_and_had_changed_values_is_a_problem() -> None:
    one = Start({"counting": Counting()})
    one.own.counting.calls += 1
    problems = Start({}).problems(one.saved())
    assert problems == ["counting.calls: in the checkpoint, and not here."]


def test_a_value_in_the_place_of_a_method_a_property_or_a_layer_is_a_problem(
    tmp_path: Path,
) -> None:
    exp: Any = trained(Tiny, tmp_path, max_iteration=1)
    exp.epsilon = 0.1
    held = {"log": 1, "iteration": 2, "rank": 3, "optimizer": 1.5, "epsilon": 0.2, "new": [4]}
    saved = {path: Encoded(["", [path], value], {}) for path, value in held.items()}
    state = run_of(exp).state
    assert state.values.problems(saved) == [
        f"{name}: a value in the checkpoint, and no value here."
        for name in ("log", "iteration", "rank", "optimizer")
    ]
    state.reach.registered += held
    assert state.values.problems(saved) == []  # a user names them


class Levelled(Points):
    """A data set with a level, which its sampler knows, too."""

    level = 0.0


def test_what_is_excluded_is_excluded_by_all_of_its_names() -> None:
    level = "train_loader.dataset.level"
    for excluded, expected in (([], [level]), (["train_loader.dataset"], [])):
        loader = DataLoader(Levelled(), batch_size=4, shuffle=True)
        one = Start({"train_loader": loader}, exclude=excluded)
        one.own.train_loader.dataset.level += 1
        assert one.paths() == expected


# --- in place ----------------------------------------------------------------------------------


@pytest.mark.device
def test_what_several_names_have_stays_one_thing() -> None:
    def made() -> dict[str, Any]:
        whole, numbers, table = np.zeros([4, 4]), [1], defaultdict(list)
        names = {"view": whole[1:3, ::2], "same": numbers, "holder": SimpleNamespace(table=table)}
        return {"whole": whole, "numbers": numbers, "table": table, "tensor": ones(), **names}

    one = Start(made())
    one.own.view += 1.0
    one.own.numbers.append(2)
    one.own.table["a"].append(3)
    (2.0 * one.own.tensor).sum().backward()
    other = Start(made(), one.saved()).own
    assert other.whole.tolist() == one.own.whole.tolist()
    assert np.shares_memory(other.whole, other.view)
    assert other.same is other.numbers
    assert other.numbers == [1, 2]
    assert other.holder.table is other.table
    assert other.table["b"] == []  # the factory is the code's
    assert other.table["a"] == [3]
    assert other.tensor.grad.tolist() == [2.0, 2.0]


def ones() -> Any:
    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    return tensor


@pytest.mark.device
def test_things_that_training_has_made_have_in_common_what_they_had() -> None:
    one = Start({"first": None, "second": None, "known": [1]})
    one.own.first = {"numbers": [1, 2], "known": one.own.known}
    one.own.second = one.own.first["numbers"]
    one.own.cycle = []
    one.own.cycle.append(one.own.cycle)
    other = Start({"first": None, "second": None, "known": [1]}, one.saved()).own
    assert other.first["numbers"] is other.second
    assert other.first["known"] is other.known
    assert other.cycle[0] is other.cycle


def test_what_is_deleted_stays_deleted_and_comes_back_if_it_is_set_again() -> None:
    def made() -> dict[str, Any]:
        return {"warm": 1, "box": SimpleNamespace(a=1, b=2), "table": {"x": 1, "y": 2}}

    one = Start(made())
    del one.own.warm, one.own.box.a, one.own.table["x"]
    saved = one.saved()
    other = Start(made(), saved)
    assert vars(other.own) == {"box": SimpleNamespace(b=2), "table": {"y": 2}}
    again = Start(made(), other.saved())  # the run that continues has not deleted it itself
    assert vars(again.own) == vars(other.own)
    again.own.warm = 5
    assert Start(made(), again.saved()).own.warm == 5


def test_items_of_a_dict_are_places_of_their_own_and_its_order_is_restored() -> None:
    def made(momentum: float) -> dict[str, Any]:
        table = OrderedDict(old=1, new=2)
        return {"stats": {"count": 0, "momentum": momentum}, "table": table}

    one = Start(made(0.9))
    one.own.stats["count"] += 3
    one.own.table.move_to_end("old")
    assert one.paths() == ["stats.count"]
    other = Start(made(0.5), one.saved())
    assert other.own.stats == {"count": 3, "momentum": 0.5}
    assert [*other.own.table.items()] == [("new", 2), ("old", 1)]
    assert [*Start(made(0.5), other.saved()).own.table] == ["new", "old"]


@pytest.mark.device
def test_a_dict_by_parameters_ids_or_automatic_names_fits_another_order_of_construction() -> None:
    def made(*, first: int) -> dict[str, Any]:
        layers = {first: paddle.nn.Linear(2, 2), 1 - first: paddle.nn.Linear(2, 2)}
        table = {layers[0].weight.name: 0.0, layers[1].weight.name: 0.0}
        return {"layers": [layers[0], layers[1]], "made_in_setup": table, "made_late": None}

    def keyed(own: Any, key: Any, values: Sequence[int]) -> dict[Any, int]:
        return {key(layer.weight): v for layer, v in zip(own.layers, values, strict=True)}

    ways: dict[str, Any] = {"id": id, "parameter": lambda p: p, "name": lambda p: p.name}
    one = Start(made(first=0))
    for number, layer in enumerate(one.own.layers, 1):
        one.own.made_in_setup[layer.weight.name] += number
    one.own.made_late = {name: keyed(one.own, key, [3, 4]) for name, key in ways.items()}
    one.own.layers[0].by_id = {id(one.own.layers[1].weight): 7}
    other = Start(made(first=1), one.saved()).own
    assert other.made_in_setup == keyed(other, ways["name"], [1, 2])
    for name, key in ways.items():
        assert other.made_late[name].keys() == keyed(other, key, [3, 4]).keys(), name
        assert [*other.made_late[name].values()] == [3, 4]
    assert other.layers[0].by_id == {id(other.layers[1].weight): 7}


def test_a_dict_by_parameters_may_change_its_order_whatever_shapes_and_numbers_they_have() -> None:
    def made(sizes: tuple[int, ...]) -> dict[str, Any]:
        parameters = [paddle.zeros([size]) for size in sizes]
        return {"parameters": parameters, "table": dict(zip(parameters, sizes, strict=True))}

    for sizes in [(2, 3, 4), (1, 1, 1)]:
        one = Start(made(sizes))
        first = one.own.parameters[0]
        one.own.table[first] = one.own.table.pop(first)
        other = Start(made(sizes), one.saved()).own
        _, *rest = other.parameters
        assert [*map(id, other.table)] == [*map(id, rest), id(other.parameters[0])]


def test_keys_of_any_kind_are_found_again() -> None:
    def made() -> dict[str, Any]:
        boxes = [SimpleNamespace(), Meter()]
        keys = [np.int64(3), (np.int64(1), "a"), b"b", None, 2.5, boxes[1], "a.b", "", 1 << 40]
        return {"boxes": boxes, "table": dict.fromkeys(keys, 0), "late": {}}

    one = Start(made())
    for number, key in enumerate([*one.own.table], 1):
        one.own.table[key] = one.own.late[key] = number
    other = Start(made(), one.saved()).own
    for table in (other.table, other.late):
        assert [*table.values()] == [*range(1, 10)]
        assert [*map(type, table)] == [*map(type, one.own.table)]
        assert [*table][5] is other.boxes[1]


def test_keys_that_are_written_alike_are_places_of_their_own() -> None:
    made = {1: 0, "1": 0, None: 0, "None": 0}
    one = Start({"table": {**made}})
    one.own.table.update({1: 1, "1": 2, None: 3, "None": 4})
    assert Start({"table": made}, one.saved()).own.table == one.own.table


def test_what_is_excluded_later_may_stand_in_other_values() -> None:
    one = Start({"a": None, "b": None})
    one.own.a = one.own.b = [1, 2]
    assert Start({"a": None, "b": None}, one.saved(), exclude=["a"]).own.b == [1, 2]


def test_a_dict_in_another_order_may_grow_long() -> None:
    one = Start({"table": {"a": 1, "b": 2}})
    one.own.table["a"] = one.own.table.pop("a")
    assert list(Start({"table": {"a": 1, "b": 2}}, one.saved()).own.table) == ["b", "a"]
    one.own.table |= {str(number): number for number in range(2000)}
    other = Start({"table": {"a": 1, "b": 2}}, one.saved()).own.table
    assert [*other.items()] == [*one.own.table.items()]


@pytest.mark.parametrize(
    "item",
    [lambda: {"loss": 0}, pytest.param(lambda: np.zeros(1), marks=pytest.mark.long)],
    ids=["dict", "array"],
)
def test_an_item_that_is_replaced_in_a_very_long_list_is_seen(item: Any) -> None:
    one = Start({"memory": [item() for _ in range(20_000)]})
    one.own.memory[7] = 5
    other = Start({"memory": [item() for _ in range(20_000)]}, one.saved()).own
    assert other.memory[7] == 5


@pytest.mark.device
def test_a_tensor_of_another_shape_than_setups_is_told() -> None:
    one = Start({"tensor": paddle.zeros([2, 3])})
    one.own.tensor.reshape_([6])
    saved = one.saved()
    assert one.warned[0].startswith("self.tensor (Tensor): changed in training")
    assert Start({"tensor": paddle.zeros([2, 3])}, saved).own.tensor.shape == [2, 3]


@pytest.mark.device
def test_values_of_layers_are_restored_whatever_they_are() -> None:
    def made() -> dict[str, Any]:
        layer: Any = paddle.nn.Linear(2, 2)
        layer.temperature = lr.ExponentialDecay(1.0, 0.5)
        layer.random = paddle.framework.core.Generator()
        layer.random.manual_seed(3)
        layer.weight.stop_gradient = True
        return {"model": layer}

    one = Start(made())
    model = one.own.model
    model.temperature.step()
    model.random.random()
    model.weight.stop_gradient = False
    model.seen = 4
    other = Start(made(), one.saved()).own.model
    assert other.temperature() == 0.5
    assert other.random.random() == model.random.random()
    assert not other.weight.stop_gradient
    assert other.seen == 4


class Meter:
    """An object that training makes."""

    made = 0

    def __init__(self) -> None:
        Meter.made += 1
        self.count = 0


class Slotted(Meter):
    """One with slots."""

    __slots__ = ("place",)


class Frame(list[Any]):
    """One that is derived from a list, and is made with an argument."""

    def __init__(self, columns: str) -> None:
        super().__init__(columns)
        self.columns = columns


def test_an_object_that_training_has_made_is_made_again_without_init() -> None:
    one = Start({"meters": {}, "late": None})
    one.own.meters["loss"] = Meter()
    one.own.meters["loss"].count = 5
    one.own.meters["same"] = one.own.meters["loss"]
    one.own.late = [Slotted(), Frame("ab")]
    one.own.late[0].place = 3
    Meter.made = 0
    other = Start({"meters": {}, "late": None}, one.saved()).own
    assert Meter.made == 0
    assert type(other.meters["loss"]) is Meter
    assert other.meters["loss"].count == 5
    assert other.meters["same"] is other.meters["loss"]
    assert (other.late[0].place, other.late[0].count) == (3, 0)
    assert (other.late[1], other.late[1].columns, type(other.late[1])) == (["a", "b"], "ab", Frame)


class Deleting:
    """Python calls a method of each one that is made."""

    deleted = 0

    def __del__(self) -> None:
        Deleting.deleted += 1


def test_a_file_makes_no_object_of_a_class_that_runs_something() -> None:
    one = Start({"late": None})
    one.own.late = Meter()
    saved = one.saved()
    for name in (
        "subprocess.Popen", "threading.Thread", "no.Such", f"{Deleting.__module__}.Deleting",
        "paddle.nn.Linear", "paddle.nn.layer.common.Linear", "numpy.ndarray",
    ):  # fmt: skip
        saved["values"]["late"] = Encoded(["", ["late"], {"$object": [name, {"a": 1}, None]}], {})
        (problem,) = Start({"late": None}).problems(saved)
        assert problem.startswith("late: ")
        assert name in problem
    assert Deleting.deleted == 0


def test_a_file_brings_no_module_and_calls_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    trap = ModuleType("trap")
    monkeypatch.setitem(sys.modules, "trap", trap)
    ran: list[Any] = []

    class Trap:
        def __new__(cls) -> Any:
            ran.append("new")
            return super().__new__(cls)

        def __init__(self) -> None:
            ran.append("init")

        def __setstate__(self, state: Any) -> None:
            ran.append("setstate")

        def __setattr__(self, name: str, value: Any) -> None:
            ran.append("setattr")

        @property
        def level(self) -> int:
            return 1

    trap.Trap = Trap  # type: ignore[attr-defined]
    Trap.__module__, Trap.__qualname__ = "trap", "Trap"
    values = {"late": Encoded(["", ["late"], {"$object": ["trap.Trap", {"level": 2}, None]}], {})}
    start = Start({"late": None})
    saved = start.saved()
    saved["values"] |= values
    other = Start({"late": None}, saved).own.late
    assert vars(other) == {"level": 2}
    assert ran == []


# --- constants ---------------------------------------------------------------------------------


def warm(inner: Any, steps: int = 3) -> Any:
    return lr.LinearWarmup(inner, steps, 0.0, 0.1)


def decaying(factor: float) -> Any:
    return lr.LambdaDecay(0.1, lambda n: factor**n)


LONGER: dict[str, tuple[Callable[[int], Any], str]] = {
    "cosine": (lambda n: lr.CosineAnnealingDecay(0.1, T_max=n), "T_max: 80 by the code, 40"),
    "warm": (lambda n: warm(lr.PolynomialDecay(0.1, n)),
             "learning_rate.decay_steps: 80 by the code, 40"),
    "warmer": (lambda n: warm(lr.StepDecay(0.1, 2), n // 8),
               "warmup_steps: 10 by the code, 5"),
    "noam": (lambda n: lr.NoamDecay(4, n // 10), "warmup_steps: 8 by the code, 4"),
    "lambda": (lambda n: decaying(n / 100),
               "lr_lambda: decaying.<locals>.<lambda> factor=0.8 by the code, "
               "decaying.<locals>.<lambda> factor=0.4"),
    "rate": (lambda n: lr.ExponentialDecay(n / 100, 0.9), "base_lr: 0.8 by the code, 0.4"),
    "boundaries": (lambda n: lr.PiecewiseDecay([2, n // 10], [0.3, 0.2, 0.1]),
                   "boundaries[1]: 8 by the code, 4"),
    "cyclic": (lambda n: lr.CyclicLR(0.01, 0.1, n // 10), "cycle_size: 16.0 by the code, 8.0"),
    "warm twice": (lambda n: warm(warm(lr.CosineAnnealingDecay(0.1, n), 2)),
                   "learning_rate.learning_rate.T_max: 80 by the code, 40"),
    "once": (lambda n: lr.OneCycleLR(0.1, n), "total_steps: 80 by the code, 40"),
    "restarts": (lambda n: lr.CosineAnnealingWarmRestarts(0.1, n // 20, 2),
                 "T_0: 4 by the code, 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONGER)
def test_a_schedule_given_anew_is_where_a_new_run_would_be(name: str) -> None:
    make, line = LONGER[name]
    one = Start({"schedule": make(40)})
    whole = make(80)
    for schedule in [one.own.schedule, whole] * 6:
        schedule.step()
    other = Start({"schedule": make(80)}, one.saved())
    assert other.lines[0] == f"self.schedule.{line} at the checkpoint"
    # Of a cell of a function the audit has a line, too; and paddle derives some from others.
    assert len(other.lines) == {"lambda": 2, "restarts": 2}.get(name, 1)
    for _ in range(6):
        assert other.own.schedule() == whole()
        whole.step()
        other.own.schedule.step()
    again = Start({"schedule": make(80)}, other.saved())  # and from then on it is nothing new
    assert again.lines == []
    assert again.own.schedule() == whole()


def test_a_schedule_that_is_not_given_anew_says_nothing_and_is_not_stepped() -> None:
    one = Start({"schedule": warm(lr.CosineAnnealingDecay(0.1, 9))})
    for _ in range(5):
        one.own.schedule.step()
    one.own.schedule.learning_rate.last_lr = 0.07  # by hand
    other = Start({"schedule": warm(lr.CosineAnnealingDecay(0.1, 9))}, one.saved())
    assert other.lines == other.lost == []
    assert other.own.schedule.learning_rate.last_lr == 0.07


class Halving(lr.LRScheduler):
    """A schedule of one's own."""

    def __init__(self, every: int) -> None:
        self.every = every
        super().__init__(0.1)

    def get_lr(self) -> float:
        return float(0.1 * 0.5 ** (self.last_epoch // self.every))


@pytest.mark.parametrize(
    ("make", "step", "line"),
    [
        (lambda n: Halving(n), (), "every: 4 by the code, 2"),
        (lambda n: warm(Halving(n)), (), "learning_rate.every: 4 by the code, 2"),
        (lambda n: lr.ReduceOnPlateau(0.1, patience=n), (1.0,), "patience: 4 by the code, 2"),
    ],
)
def test_a_schedule_that_does_not_step_alone_keeps_its_rate_and_says_so(
    make: Any, step: Any, line: str
) -> None:
    one = Start({"schedule": make(2)})
    for _ in range(5):
        one.own.schedule.step(*step)
    other = Start({"schedule": make(4)}, one.saved())
    (said,) = other.lines
    assert said.startswith(f"self.schedule.{line} at the checkpoint; the rate goes on from what it")
    assert other.own.schedule() == one.own.schedule()
    assert other.own.schedule.last_epoch == one.own.schedule.last_epoch == 5


def sgd(rate: Any, **options: Any) -> dict[str, Any]:
    model = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.Momentum(rate, parameters=model.parameters(), **options)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.device
def test_a_rate_set_by_hand_is_restored_and_one_given_anew_counts_from_then_on() -> None:
    one = Start(sgd(0.1))
    one.own.optimizer.set_lr(0.025)
    saved = one.saved()
    same = Start(sgd(0.1), saved)
    assert same.own.optimizer.get_lr() == 0.025
    assert same.lines == []
    anew = Start(sgd(0.2), saved)
    assert anew.own.optimizer.get_lr() == 0.2
    line = "self.optimizer.learning_rate: 0.2 by the code, 0.1 at the checkpoint"
    assert anew.lines == [line]
    later = Start(sgd(0.2), anew.saved())
    assert later.own.optimizer.get_lr() == 0.2
    assert later.lines == []
    later.own.optimizer.set_lr(0.05)
    assert Start(sgd(0.2), later.saved()).own.optimizer.get_lr() == 0.05


def test_settings_of_an_optimizer_are_the_codes_unless_training_sets_them() -> None:
    one = Start(sgd(0.1, momentum=0.9, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)))
    assert one.paths() == []
    other = Start(sgd(0.1, momentum=0.8), one.saved())
    assert other.own.optimizer._momentum == 0.8
    assert other.lines == ["self.optimizer._momentum: 0.8 by the code, 0.9 at the checkpoint"]
    one.own.optimizer._momentum = 0.5
    assert Start(sgd(0.1, momentum=0.9), one.saved()).own.optimizer._momentum == 0.5


@pytest.mark.device
def test_a_history_in_what_clips_gradients_is_restored() -> None:
    class Clipping(paddle.nn.ClipGradByGlobalNorm):
        def __init__(self) -> None:
            super().__init__(1.0)
            self.norms: list[float] = []

    one = Start(sgd(0.1, grad_clip=Clipping()))
    one.own.optimizer._grad_clip.norms += [1.0, 2.0]
    one.own.optimizer._grad_clip.clip_norm = 3.0
    other = Start(sgd(0.1, grad_clip=Clipping()), one.saved()).own.optimizer._grad_clip
    assert (other.norms, other.clip_norm) == ([1.0, 2.0], 3.0)


# --- what is and what is not -------------------------------------------------------------------


def test_what_training_has_changed_once_stays_state() -> None:
    one = Start({"level": 0, "other": 0})
    one.own.level = 1
    one.saved()
    one.own.level = 0
    assert one.paths() == ["level"]
    other = Start({"level": 7, "other": 7}, one.saved())
    assert (other.own.level, other.own.other) == (0, 7)
    assert other.paths() == ["level"]


LOST = "has changed in training, and is not what it was then"


def test_what_on_train_begin_sets_once_is_state_and_what_it_sets_each_time_is_no_line() -> None:
    made: dict[str, Any] = {"rate": 0.1, "time": 0, "starts": 0, "scale": None, "count": 0}

    def begin(own: Any) -> None:
        own.starts += 1
        own.time = own.starts * 1000.0
        if not own.rate > 0.1:  # the first time
            own.rate, own.scale = 0.5, np.ones(2)

    one = Start(dict(made), during=begin)
    one.own.count = 1
    assert one.paths() == ["rate", "time", "starts", "scale", "count"]
    other = Start(dict(made), one.saved(), during=begin)
    assert (other.lost, other.lines) == ([], [])
    own = other.own
    assert (own.rate, own.starts, own.time, own.count) == (0.5, 2, 2000.0, 1)
    assert own.scale.tolist() == [1, 1]

    # A third start knows of the second what this one knows of the first.
    third = Start(dict(made), other.saved(), during=begin)
    assert (third.lost, third.own.starts, third.own.rate) == ([], 3, 0.5)


def test_what_training_has_changed_and_on_train_begin_sets_anew_is_lost() -> None:
    def begin(own: Any) -> None:
        own.count = 5

    one = Start({"count": 0}, during=begin)
    one.own.count = 6
    other = Start({"count": 0}, one.saved(), during=begin)
    assert other.lost == [f"self.count: {LOST}"]
    # It was told, and the next start sets what it has.
    assert Start({"count": 0}, other.saved(), during=begin).lost == []


def test_what_on_train_begin_sets_once_and_cannot_be_saved_is_lost() -> None:
    def each_time(own: Any) -> None:
        own.fn = lambda: own.count

    def once(own: Any) -> None:
        if own.count == 0:
            each_time(own)

    text = (
        "self.fn: on_train_begin had set it, which no checkpoint can hold, and has not set it again"
    )
    for during, lost in ((each_time, []), (once, [text])):
        one = Start({"fn": None, "count": 0}, during=during)
        one.own.count = 1
        one.saved()
        assert one.warned == []
        other = Start({"fn": None, "count": 0}, one.saved(), during=during)
        assert other.lost == lost
        assert Start({"fn": None, "count": 0}, other.saved(), during=during).lost == lost


def test_what_on_train_begin_makes_of_a_class_that_it_imports_itself_is_no_mistake() -> None:
    def begin(own: Any) -> None:
        module = ModuleType("lazily_imported")
        module.Client = type("Client", (), {"__module__": "lazily_imported"})  # type: ignore[attr-defined]
        sys.modules["lazily_imported"] = module
        if own.is_begun:
            own.client = module.Client()

    made = {"client": None, "is_begun": True}
    saved = Start(dict(made), during=begin).saved()
    assert "client" in saved["values"]
    del sys.modules["lazily_imported"]
    other = Start(dict(made), saved, during=begin)
    assert other.lost == []
    assert type(other.own.client).__name__ == "Client"
    del sys.modules["lazily_imported"]
    other = Start({"client": None, "is_begun": False}, saved, during=begin)
    assert [line.partition(":")[0] for line in other.lost] == ["self.client"]
    del sys.modules["lazily_imported"]


def make_layers() -> dict[str, Any]:
    layers = [paddle.nn.Linear(1, 1) for _ in range(3)]
    model = paddle.nn.Sequential(*layers[:2])
    return {"model": model, "other": layers[2], "active": model[0], "row": [model[0]], "none": None}


def test_a_place_may_hold_another_layer_of_those_that_setup_has_made() -> None:
    one = Start(make_layers())
    own = one.own
    own.model[1].weight.set_value(paddle.full([1, 1], 7.0))
    own.active, own.none, own.row[0] = own.model[1], own.other, own.other
    saved = one.saved()
    assert saved["files"].keys() == {"model", "other", "active"}  # as setup has named them
    own = Start(make_layers(), saved).own
    assert own.active is own.model[1]
    assert own.none is own.row[0] is own.other
    assert [layer.weight.item() == 7 for layer in own.model] == [False, True]


def test_a_part_that_is_a_second_name_may_be_another_part() -> None:
    def made() -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(1, 1), paddle.nn.Linear(1, 1))
        model.active = model[0]
        model[0].scale = model[0].weight  # of a parameter, too
        return {"model": model}

    one = Start(made())
    model = one.own.model
    model[1].weight.set_value(paddle.full([1, 1], 7.0))
    model.active, model[0].scale = model[1], model[1].weight
    model = Start(made(), one.saved()).own.model
    assert model.active is model[1]
    assert model[0].scale is model[1].weight
    assert [model[0].weight.item() == 7, model[1].weight.item() == 7] == [False, True]


@pytest.mark.filterwarnings("ignore:The program will return to single-card operation")
@pytest.mark.parametrize("then", [True, False])
@pytest.mark.parametrize("now", [True, False])
def test_a_place_may_hold_another_wrapper_also_where_one_process_has_none(
    then: bool, now: bool
) -> None:
    def made(is_parallel: bool) -> dict[str, Any]:
        a, b = (paddle.nn.Linear(1, 1) for _ in range(2))
        if is_parallel:
            a, b = paddle.DataParallel(a), paddle.DataParallel(b)
        return {"a": a, "b": b, "active": a, "row": [a, b]}

    one = Start(made(then))
    one.own.active = one.own.b
    del one.own.row[0]
    own = Start(made(now), one.saved()).own
    assert own.active is own.b
    assert [unwrap(layer) for layer in own.row] == [unwrap(own.b)]
    assert own.row[0] is own.b or (now and not then)  # a list does not say that it had wrappers


def test_a_buffer_that_is_set_anew_is_saved_also_where_the_one_before_is_used_still() -> None:
    def made() -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(1, 1), paddle.nn.Linear(1, 1))
        for part in model:
            part.register_buffer("mean", paddle.zeros([1]))
        model.active = model[0]
        return {"model": model, "first": model[0].mean, "history": []}

    one = Start(made())
    own = one.own
    own.history.append(own.model[1].mean)
    for number, part in enumerate(own.model[:2]):
        part.mean = part.mean * 0.9 + 5 + number
    own.model.active = own.model[1]
    own = Start(made(), one.saved()).own
    assert [part.mean.item() for part in own.model[:2]] == [5, 6]
    assert own.history[0].item() == 0
    assert own.model.active is own.model[1]


def test_attributes_of_a_parameter_are_state() -> None:
    def made() -> dict[str, Any]:
        return {"model": paddle.nn.Linear(2, 2)}

    one = Start(made())
    weight = one.own.model.weight
    weight.mask, weight.steps, weight.need_clip = paddle.eye(2), 3, False
    weight.optimize_attr["learning_rate"] = 0.5
    weight.is_distributed = True  # paddle's own
    weight = Start(made(), one.saved()).own.model.weight
    assert weight.mask.tolist() == [[1, 0], [0, 1]]
    assert (weight.steps, weight.need_clip, weight.optimize_attr) == (
        3,
        False,
        {"learning_rate": 0.5},
    )
    assert not weight.is_distributed


def test_an_optimizer_updates_what_it_did() -> None:
    def made() -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(1, 1), paddle.nn.Linear(1, 1))
        return {"model": model, "sgd": paddle.optimizer.SGD(0.1, model.parameters())}

    one = Start(made())
    one.own.sgd._parameter_list[:] = one.own.sgd._parameter_list[3:1:-1]
    own = Start(made(), one.saved()).own
    expected = [own.model[1].bias, own.model[1].weight]
    assert [*map(id, own.sgd._parameter_list)] == [*map(id, expected)]
    assert own.sgd._param_groups is own.sgd._parameter_list


def test_functions_and_methods_are_values_by_name() -> None:
    def made() -> dict[str, Any]:
        counts = Steps()
        loss: Any = paddle.nn.functional.mse_loss
        return {"counts": counts, "loss": loss, "fn": counts.up, "sine": np.sin}

    one = Start(made())
    own = one.own
    own.loss, own.fn, own.sine = paddle.nn.functional.l1_loss, own.counts.down, np.cos
    own = Start(made(), one.saved()).own
    assert own.loss is paddle.nn.functional.l1_loss
    assert own.fn == own.counts.down
    assert own.sine is np.cos
    one.own.loss = os.remove  # a file might name anything
    assert "loss" not in one.paths()
    assert "self.loss" in one.warned[0]


class Steps:
    def __init__(self) -> None:
        self.count = 0

    def up(self) -> None:
        self.count += 1

    def down(self) -> None:
        self.count -= 1


@pytest.mark.parametrize("size", [pytest.param(9_999, marks=pytest.mark.long), 10_001])
def test_one_item_of_many_is_seen(size: int) -> None:
    """Also in the middle, and of what stands in what is long."""

    def made() -> dict[str, Any]:
        return {
            "ints": [*range(size)], "texts": [*map(str, range(size))],
            "rows": [[n] for n in range(size)],
            "dicts": [{"n": n} for n in range(size)], "table": {n: [n] for n in range(size)},
            "names": {f"k{n}": n for n in range(size)}, "array": np.zeros(size, "float32"),
            "bytes": np.zeros(size, bool), "many": [np.zeros(1) for _ in range(size)],
        }  # fmt: skip

    one = Start(made())
    own, middle = one.own, size // 2 + 7
    own.ints[middle], own.texts[middle] = -1, "x"
    own.rows[middle][0], own.dicts[middle]["n"], own.table[middle][0] = -1, -1, -1
    own.names[f"k{middle}"], own.array[middle], own.bytes[middle] = -1, 256, True
    own.many[middle][0] = 1
    saved = one.saved()
    assert {path.removesuffix("[:]") for path in one.paths()} == {*made()}
    own = Start(made(), saved).own
    assert (own.ints[middle], own.texts[middle], own.rows[middle]) == (-1, "x", [-1])
    assert (own.dicts[middle], own.table[middle], own.names[f"k{middle}"]) == ({"n": -1}, [-1], -1)
    assert (own.array[middle], own.bytes[middle], own.many[middle][0]) == (256, True, 1)
    assert [*own.table] == [*range(size)]


def test_a_minus_and_a_type_are_changes() -> None:
    one = Start({"zero": 0.0, "number": 1, "flag": True, "nan": float("nan"), "text": "a"})
    one.own.zero, one.own.number, one.own.flag, one.own.nan = -0.0, 1.0, 1, float("nan")
    assert one.paths() == ["zero", "number", "flag"]
    made = {"zero": 0.0, "number": 1, "flag": True}
    own = Start(made, one.saved()).own
    assert list(map(repr, (own.zero, own.number, own.flag))) == ["-0.0", "1.0", "1"]


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        (np.zeros(3), np.zeros(4), "float64 [3] in the checkpoint and float64 [4] here"),
        (np.zeros(3), np.zeros(3, "float32"), "float64 [3] in the checkpoint and float32 [3]"),
        (paddle.zeros([2]), paddle.zeros([3]), "float32 [2] in the checkpoint and float32 [3]"),
        ([0], {0}, "list in the checkpoint and set here"),
    ],
)
def test_a_thing_of_another_shape_or_class_is_a_problem(there: Any, here: Any, text: str) -> None:
    one = Start({"thing": there})
    changed = {list: lambda: there.append(1), np.ndarray: lambda: there.fill(1)}
    changed.get(type(there), lambda: there.add_(paddle.ones([2])))()
    (problem,) = Start({"thing": here}).problems(one.saved())
    assert problem.startswith(f"thing[:] is {text}")


def test_what_is_excluded_is_neither_saved_nor_restored_nor_told() -> None:
    made = {"cache": {}, "box": SimpleNamespace(a=0, b=0)}
    one = Start(copy.deepcopy(made), exclude=["cache", "box.a"])
    one.own.cache["x"] = threading.Lock()
    one.own.box.a = one.own.box.b = 1
    assert one.paths() == ["box.b"]
    saved = one.saved()
    assert one.warned == []
    other = Start(copy.deepcopy(made), Start(copy.deepcopy(made), saved).saved(), exclude=["box"])
    assert vars(other.own.box) == {"a": 0, "b": 0}


def test_a_name_that_was_registered_is_missed_where_the_checkpoint_has_none() -> None:
    saved = Start({"a": 1}).saved()
    (problem,) = Start({"a": 1}, register=["a"]).problems(saved)
    assert problem == "a: missing in the checkpoint."


# --- in a validation ---------------------------------------------------------------------------


@pytest.mark.device
def test_a_rollback_puts_back_in_place_what_has_changed() -> None:
    holder: Any = SimpleNamespace(numbers=[1, [2]], array=np.zeros(3), tensor=ones(), count=0)
    holder.random, holder.table = np.random.default_rng(1), {"a": 1}
    holder.shared = holder.numbers
    then = dict(vars(holder))
    nodes = [Node(holder), DictNode(holder.table)]
    things = (holder.numbers, holder.numbers[1], holder.array, holder.tensor, holder.random)
    before = Rollback([*nodes, *map(WholeNode, things)])
    drawn = copy.deepcopy(holder.random).random()
    holder.numbers[1].append(3)
    holder.numbers.append(4)
    holder.array += 1
    holder.array = holder.array + 1
    (2.0 * holder.tensor).sum().backward()
    with paddle.no_grad():
        holder.tensor.set_value(paddle.zeros([2]))
    holder.random.random()
    holder.count, holder.new = 2, 3
    holder.table["b"] = 2
    holder.table["a"] = 5
    del holder.shared
    before.restore()
    assert vars(holder).keys() == then.keys()
    assert all(vars(holder)[name] is value for name, value in then.items())
    assert (holder.numbers, holder.table, holder.count) == ([1, [2]], {"a": 1}, 0)
    assert holder.array.tolist() == [0.0, 0.0, 0.0]
    assert (holder.tensor.tolist(), holder.tensor.grad) == ([1.0, 1.0], None)
    assert holder.random.random() == drawn


def test_a_rollback_puts_back_what_a_forward_sets_on_a_parameter_of_the_users() -> None:
    layer = paddle.nn.Linear(2, 2)
    layer.weight.seen = 1
    before = Rollback(nodes_in_layers([layer]))
    layer.weight.seen = 2
    before.restore()
    assert layer.weight.seen == 1


def test_a_weight_that_each_forward_derives_is_in_no_checkpoint() -> None:
    def made() -> dict[str, Any]:
        model = paddle.nn.Sequential(paddle.nn.Linear(3, 3), paddle.nn.Linear(3, 2))
        paddle.nn.utils.weight_norm(model[0])
        paddle.nn.utils.spectral_norm(model[1])
        return {"model": model, "optimizer": adam(model)}

    def adam(model: Any) -> Any:
        return paddle.optimizer.Adam(0.1, parameters=model.parameters())

    def train(own: Any) -> list[Any]:
        for _ in range(2):
            own.model(paddle.ones([2, 3])).square().sum().backward()
            own.optimizer.step()
            own.optimizer.clear_grad()
        return own.model(paddle.ones([2, 3])).tolist()

    one = Start(made())
    train(one.own)
    saved = one.saved()
    assert [path for path in one.paths() if path.endswith("weight")] == []
    assert train(Start(made(), saved).own) == train(one.own)


@pytest.mark.device
def test_a_tensor_with_a_graph_is_put_back_after_a_validation(tmp_path: Path) -> None:
    class Keeping(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.model[0].kept = self.model(paddle.ones([2, 4]))

        def valid(self) -> dict[str, float]:
            self.model[0].kept = None
            return super().valid()

    exp = trained(Keeping, tmp_path / "run", max_iteration=3)
    assert exp.model[0].kept.shape == [2, 2]
