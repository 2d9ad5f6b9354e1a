"""What is state, how it is captured, and that putting it back is strict and exact."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.optimizer import lr

from expbase.state import encoding, objects
from expbase.state.arrays import Array, parse, serialize


def net() -> Any:
    return paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 2))


def step(model: Any, *optimizers: Any) -> None:
    loss = model(paddle.to_tensor(np.linspace(0, 1, 6, dtype="float32").reshape(2, 3))).square()
    loss.mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.clear_grad()
        if isinstance(optimizer._learning_rate, lr.LRScheduler):
            optimizer._learning_rate.step()


def carried(found: objects.StatefulObjects) -> tuple[objects.Tensors, objects.Values]:
    """Captured, and taken through files."""
    tensors, values = objects.capture(found)
    files = {name: b"".join(map(bytes, serialize(arrays))) for name, arrays in tensors.items()}
    return {name: parse(data) for name, data in files.items()}, json.loads(json.dumps(values))


def put_back(attributes: dict[str, Any], tensors: objects.Tensors, values: objects.Values) -> None:
    found = objects.find(attributes)
    assert objects.check(found, tensors, values) == []
    objects.apply(found, tensors, values)


def weights(model: Any) -> list[bytes]:
    return [parameter.numpy().tobytes() for parameter in model.parameters()]


# --- finding -----------------------------------------------------------------------------------


class Tally:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self.count = values["count"]


def test_everything_stateful_is_found_once_also_in_lists_and_dicts() -> None:
    layer, schedule = net(), lr.StepDecay(0.1, 3)
    optimizer = paddle.optimizer.SGD(schedule, parameters=layer.parameters())
    attributes = {
        "generator": layer,
        "same": layer,
        "blocks": [net(), {"deep": net()}],
        "d_optimizer": optimizer,
        "counter": Tally(),
        "scale": paddle.create_parameter([1], "float32"),
        "random": np.random.default_rng(0),
        "loss": paddle.ones([1]),
        "number": 3,
        "kind": Tally,
    }
    found = objects.find(attributes)
    assert list(found.layers) == ["generator", "blocks.0", "blocks.1.deep"]
    assert list(found.optimizers) == ["d_optimizer"]
    assert list(found.schedulers) == ["d_optimizer.learning_rate"]
    assert (list(found.objects), list(found.parameters)) == (["counter"], ["scale"])
    assert list(found.generators) == ["random"]


def test_an_excluded_model_is_left_out_under_all_its_names() -> None:
    judge = net()
    found = objects.find({"judge": judge, "model": net(), "other_name": judge}, ["judge"])
    assert list(found.layers) == ["model"]


# --- exactness ---------------------------------------------------------------------------------

OPTIMIZERS = [
    "SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp", "Lamb",
    "NAdam", "RAdam", "ASGD", "Rprop",
]  # fmt: skip


def make_optimizer(name: str, parameters: Any, rate: Any = 0.01) -> Any:
    kind = getattr(paddle.optimizer, name)
    options = {"ASGD": {"batch_num": 3}, "RMSProp": {"momentum": 0.9, "centered": True}}
    return kind(learning_rate=rate, parameters=parameters, **options.get(name, {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_exactly_in_another_order_of_construction(name: str) -> None:
    model = net()
    optimizer = make_optimizer(name, model.parameters())
    for _ in range(3):
        step(model, optimizer)
    tensors, values = carried(objects.find({"model": model, "optimizer": optimizer}))
    net()  # paddle's automatic names go on counting
    other = net()
    other_optimizer = make_optimizer(name, other.parameters())
    put_back({"optimizer": other_optimizer, "model": other}, tensors, values)
    for _ in range(3):
        step(model, optimizer)
        step(other, other_optimizer)
    assert weights(other) == weights(model)


SCHEDULES: list[Any] = [
    lambda: lr.NoamDecay(4, 10),
    lambda: lr.PiecewiseDecay([2, 4], [0.1, 0.01, 0.001]),
    lambda: lr.NaturalExpDecay(0.1, 0.5),
    lambda: lr.InverseTimeDecay(0.1, 0.5),
    lambda: lr.PolynomialDecay(0.1, 4, cycle=True),
    lambda: lr.LinearWarmup(lr.CosineAnnealingWarmRestarts(0.1, 2, 2), 3, 0.0, 0.1),
    lambda: lr.ExponentialDecay(0.1, 0.9),
    lambda: lr.MultiStepDecay(0.1, [2, 5]),
    lambda: lr.StepDecay(0.1, 2),
    lambda: lr.LambdaDecay(0.1, lambda n: 0.9**n),
    lambda: lr.MultiplicativeDecay(0.1, lambda n: 0.9),
    lambda: lr.CosineAnnealingDecay(0.1, 5),
    lambda: lr.OneCycleLR(0.1, 20),
    lambda: lr.CyclicLR(0.01, 0.1, 3),
    lambda: lr.LinearLR(0.1, 10),
    lambda: lr.CosineAnnealingWarmRestarts(0.1, 2, 2),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_schedule_goes_on_exactly(make: Any) -> None:
    schedule, other = make(), make()
    for _ in range(5):
        schedule.step()
    tensors, values = carried(objects.find({"schedule": schedule}))
    put_back({"schedule": other}, tensors, values)
    for _ in range(8):
        assert other() == schedule()
        schedule.step()
        other.step()


def test_a_plateau_schedule_goes_on_exactly() -> None:
    def run(schedule: Any, losses: list[float]) -> list[float]:
        for loss in losses:
            schedule.step(paddle.to_tensor(loss))  # it keeps the tensor
        return [schedule()]

    def make() -> Any:
        return lr.ReduceOnPlateau(0.1, patience=1)

    whole = run(make(), [1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9])
    half, rest = make(), make()
    run(half, [1.0, 1.0, 1.0])
    put_back({"schedule": rest}, *carried(objects.find({"schedule": half})))
    assert run(rest, [0.9, 0.9, 0.9, 0.9]) == whole


def test_a_float_learning_rate_comes_back() -> None:
    model, other = net(), net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer.set_lr(0.025)
    fresh = paddle.optimizer.SGD(0.1, parameters=other.parameters())
    put_back(
        {"model": other, "optimizer": fresh},
        *carried(objects.find({"model": model, "optimizer": optimizer})),
    )
    assert fresh.get_lr() == 0.025


def test_generators_objects_and_bare_parameters_come_back() -> None:
    def make() -> dict[str, Any]:
        return {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(1),
            "counter": Tally(),
            "scale": paddle.create_parameter([2], "float32"),
        }

    one, other = make(), make()
    one["counter"].count = 5
    one["python"].random(), one["numpy"].normal(), one["legacy"].randn()
    put_back(other, *carried(objects.find(one)))
    assert other["counter"].count == 5
    assert other["python"].random() == one["python"].random()
    assert other["numpy"].normal() == one["numpy"].normal()
    assert other["legacy"].randn() == one["legacy"].randn()
    assert other["scale"].tolist() == one["scale"].tolist()


def test_master_weights_come_back() -> None:
    # Paddle has no bfloat16 Adam on the CPU: the tensors of a step are made and filled by hand.
    def make() -> dict[str, Any]:
        model = paddle.nn.Linear(3, 2)
        model.to(dtype="bfloat16")
        kind = paddle.optimizer.Adam
        optimizer = kind(0.1, parameters=model.parameters(), multi_precision=True)
        return {"model": model, "optimizer": optimizer}

    one, other = make(), make()
    block = paddle.base.framework.default_main_program().global_block()
    one["optimizer"]._create_accumulators(block, one["model"].parameters())
    found = objects.find(one)
    filled = objects._accumulators(one["optimizer"], objects.parameter_names(found))
    for number, tensor in enumerate(filled.values()):
        tensor.fill_(number + 0.1)
    tensors, values = carried(found)
    assert {"master_weight/model.weight", "moment1/model.weight"} <= set(tensors["optimizer"])
    put_back(other, tensors, values)
    assert carried(objects.find(other))[0]["optimizer"].keys() == tensors["optimizer"].keys()
    for key, array in carried(objects.find(other))[0]["optimizer"].items():
        assert array.data.tobytes() == tensors["optimizer"][key].data.tobytes(), key


# --- strictness --------------------------------------------------------------------------------


def captured_model() -> tuple[Any, Any, objects.Tensors, objects.Values]:
    model = net()
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    step(model, optimizer)
    tensors, values = carried(objects.find({"model": model, "optimizer": optimizer}))
    return model, optimizer, tensors, values


def test_every_entry_that_is_dropped_is_missed_by_name() -> None:
    model, optimizer, tensors, values = captured_model()
    found = objects.find({"model": model, "optimizer": optimizer})
    assert objects.check(found, tensors, values) == []
    for file, arrays in tensors.items():
        for key in arrays:
            less = {
                n: {k: a for k, a in b.items() if (n, k) != (file, key)} for n, b in tensors.items()
            }
            assert any(key in problem for problem in objects.check(found, less, values)), key
    for name in values:
        less_values = {n: v for n, v in values.items() if n != name}
        assert objects.check(found, tensors, less_values) == [f"{name}: missing in the checkpoint."]


def test_a_missing_file_is_an_error_and_not_skipped() -> None:
    model, optimizer, tensors, values = captured_model()
    found = objects.find({"model": model, "optimizer": optimizer})
    for file in tensors:
        assert objects.check(found, {n: a for n, a in tensors.items() if n != file}, values)


def test_what_is_too_much_is_named() -> None:
    model, optimizer, tensors, values = captured_model()
    found = objects.find({"model": model, "optimizer": optimizer})
    tensors["head"] = tensors["model"]
    values["counter"] = {}
    tensors["model"]["extra"] = tensors["model"]["0.weight"]
    problems = "\n".join(objects.check(found, tensors, values))
    for text in ("head: tensors in", "counter: in the checkpoint", "'extra' is in the checkpoint"):
        assert text in problems


def test_another_model_is_refused_with_names_and_shapes_and_nothing_is_changed() -> None:
    _, _, tensors, values = captured_model()
    other = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.Tanh(), paddle.nn.Linear(5, 2))
    optimizer = paddle.optimizer.Adam(0.1, parameters=other.parameters())
    before = weights(other)
    problems = objects.check(
        objects.find({"model": other, "optimizer": optimizer}), tensors, values
    )
    expected = "model: '0.weight' is float32 [3, 4] in the checkpoint and float32 [3, 5] here."
    assert expected in problems
    assert weights(other) == before


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**70, 0.1, float("inf"), "text", b"bytes", [1, (2, [3])], {1: "a", "b": 2},
        {"$tuple": 1}, {(1, 2): 3}, {1, 2}, np.float32(0.1), np.int64(3), {}, [], (),
        OrderedDict(a=1), Counter("aab"), frozenset({1}),
    ],
)  # fmt: skip
def test_values_come_back_as_the_same_values_of_the_same_type(value: Any) -> None:
    arrays: dict[str, Array] = {}
    text = json.dumps(encoding.encode(value, "here", arrays), allow_nan=False)
    back = encoding.decode(json.loads(text), arrays)
    assert back == value
    assert type(back) is type(value)


def test_arrays_and_tensors_come_back_from_any_depth() -> None:
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
    with pytest.raises(TypeError, match=r"buffer\.frames\.1: a builtins\.object cannot be saved"):
        encoding.encode({"frames": [1, object()]}, "buffer", {})
    for value in (defaultdict(int), namedtuple("Pair", "a b")(1, 2)):
        with pytest.raises(TypeError, match="cannot be saved"):
            encoding.encode(value, "here", {})


def test_two_arrays_never_share_a_place() -> None:
    arrays: dict[str, Array] = {}
    value = {"a.0": np.zeros(2), "a": [np.ones(2)]}
    back = encoding.decode(encoding.encode(value, "here", arrays), arrays)
    assert (back["a.0"].tolist(), back["a"][0].tolist()) == ([0, 0], [1, 1])


def test_names_that_would_meet_or_are_no_file_names_are_refused() -> None:
    for attributes in ({"heads": {1: net(), "1": net()}}, {"heads": {"a/b": net()}}):
        with pytest.raises(ValueError, match=r"self\.heads\."):
            objects.find(attributes)


def test_cycles_and_long_lists_of_data_are_no_matter() -> None:
    cycle: dict[str, Any] = {"model": net()}
    cycle["self"] = [cycle]
    assert objects.find({"cycle": cycle, "history": [(1, 2.0)] * 10**6}).names() == ["cycle.model"]
