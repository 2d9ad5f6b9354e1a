"""What is state, how it is read, and that restoring it is strict and exact."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.amp import grad_scaler
from paddle.optimizer import lr

from expbase.base import encoding
from expbase.base.arrays import Array, parse, serialize
from expbase.checkpoint import contents
from expbase.state import optimizers, parts


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


def carried(attributes: dict[str, Any]) -> parts.State:
    """The state of attributes, taken through files."""
    tensors, values = parts.find(attributes).state_dict()
    files = {name: b"".join(map(bytes, serialize(arrays))) for name, arrays in tensors.items()}
    return {name: parse(data) for name, data in files.items()}, through_json(values)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Array] = {}
    encoded = json.loads(json.dumps(encoding.encode(state, "part", arrays)))
    copies = parse(b"".join(map(bytes, serialize(arrays))))
    decoded: dict[str, Any] = encoding.decode(encoded, copies)
    return decoded


def restore(attributes: dict[str, Any], state: parts.State) -> None:
    found = parts.find(attributes)
    assert found.problems(state) == []
    assert found.load_state_dict(state) == []


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
    found = parts.find(attributes)
    assert list(found.layers) == ["generator", "blocks.0", "blocks.1.deep"]
    assert list(found.optimizers) == ["d_optimizer"]
    assert list(found.objects) == ["counter", "random", "d_optimizer.learning_rate"]
    assert list(found.parameters) == ["scale"]


def test_an_excluded_model_is_left_out_under_all_its_names() -> None:
    judge = net()
    found = parts.find({"judge": judge, "model": net(), "other_name": judge}, ["judge"])
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
    state = carried({"model": model, "optimizer": optimizer})
    net()  # paddle's automatic names go on counting
    other = net()
    other_optimizer = make_optimizer(name, other.parameters())
    restore({"optimizer": other_optimizer, "model": other}, state)
    for _ in range(3):
        step(model, optimizer)
        step(other, other_optimizer)
    assert weights(other) == weights(model)


class Shrinking(lr.LRScheduler):
    def get_lr(self) -> float:
        return float(self.last_lr * 0.9)


SCHEDULES: list[Any] = [
    lambda: lr.LinearWarmup(Shrinking(0.1), 3, 0.0, 0.1),
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
    state = carried({"schedule": schedule})
    assert "_var_name" not in state[1]["schedule"][1]  # an automatic name
    restore({"schedule": other}, state)
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
    restore({"schedule": rest}, carried({"schedule": half}))
    assert run(rest, [0.9, 0.9, 0.9, 0.9]) == whole


def test_another_kind_of_optimizer_or_schedule_is_a_problem() -> None:
    def attributes(kind: Any, rate: Any) -> dict[str, Any]:
        model = net()
        return {"model": model, "optimizer": kind(rate, parameters=model.parameters())}

    step_decay = lr.StepDecay(0.1, 3)
    state = carried(attributes(paddle.optimizer.SGD, lr.LinearWarmup(step_decay, 2, 0, 0.1)))
    other = attributes(
        paddle.optimizer.Momentum, lr.LinearWarmup(lr.ExponentialDecay(0.1, 0.9), 2, 0, 0.1)
    )
    problems = parts.find(other).problems(state)
    there = "LinearWarmup of StepDecay in the checkpoint"
    here = "LinearWarmup of ExponentialDecay here."
    assert f"optimizer is SGD of {there} and Momentum of {here}" in problems
    assert f"optimizer.learning_rate is {there} and {here}" in problems
    assert parts.find(attributes(paddle.optimizer.SGD, 0.1)).problems(state) == [
        "optimizer.learning_rate: in the checkpoint, and not here.",
        f"optimizer is SGD of {there} and SGD here.",
    ]


def test_a_float_learning_rate_is_restored() -> None:
    model, other = net(), net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer.set_lr(0.025)
    fresh = paddle.optimizer.SGD(0.1, parameters=other.parameters())
    state = carried({"model": model, "optimizer": optimizer})
    restore({"model": other, "optimizer": fresh}, state)
    assert fresh.get_lr() == 0.025


def test_generators_objects_and_bare_parameters_are_restored() -> None:
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
    restore(other, carried(one))
    assert other["counter"].count == 5
    assert other["python"].random() == one["python"].random()
    assert other["numpy"].normal() == one["numpy"].normal()
    assert other["legacy"].randn() == one["legacy"].randn()
    assert other["scale"].tolist() == one["scale"].tolist()


def test_master_weights_are_restored() -> None:
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
    names = parts.parameter_names(parts.find(one))
    for number, tensor in enumerate(optimizers.accumulators(one["optimizer"], names).values()):
        tensor.fill_(number + 0.1)
    state = carried(one)
    expected = state[0]["optimizer"]
    assert {"master_weight/model.weight", "moment1/model.weight"} <= set(expected)
    restore(other, state)
    restored = carried(other)[0]["optimizer"]
    assert restored.keys() == expected.keys()
    for key, array in restored.items():
        assert array.data.tobytes() == expected[key].data.tobytes(), key


# --- strictness --------------------------------------------------------------------------------


@pytest.fixture
def trained() -> tuple[parts.StatefulObjects, parts.Tensors, dict[str, Any]]:
    """A model and its optimizer after a step, and their state."""
    model = net()
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    step(model, optimizer)
    attributes = {"model": model, "optimizer": optimizer}
    return parts.find(attributes), *carried(attributes)


def test_every_entry_that_is_dropped_is_missed_by_name(trained: Any) -> None:
    found, tensors, values = trained
    assert found.problems((tensors, values)) == []
    for file, arrays in tensors.items():
        for key in arrays:
            less = {
                n: {k: a for k, a in b.items() if (n, k) != (file, key)} for n, b in tensors.items()
            }
            assert any(key in problem for problem in found.problems((less, values))), key
        assert found.problems(({n: a for n, a in tensors.items() if n != file}, values)), file
    for name in values:
        less_values = {n: v for n, v in values.items() if n != name}
        assert found.problems((tensors, less_values)) == [f"{name}: missing in the checkpoint."]


def test_what_is_too_much_is_named(trained: Any) -> None:
    found, tensors, values = trained
    tensors["head"] = tensors["model"]
    values["counter"] = ["Tally", {}]
    tensors["model"]["extra"] = tensors["model"]["0.weight"]
    problems = "\n".join(found.problems((tensors, values)))
    for text in (
        "head: '0.weight': in the checkpoint",
        "counter: in the checkpoint",
        "'extra': in the checkpoint",
    ):
        assert text in problems


def test_another_model_is_refused_with_names_and_shapes_and_nothing_is_changed(
    trained: Any,
) -> None:
    _, tensors, values = trained
    other = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.Tanh(), paddle.nn.Linear(5, 2))
    optimizer = paddle.optimizer.Adam(0.1, parameters=other.parameters())
    before = weights(other)
    problems = parts.find({"model": other, "optimizer": optimizer}).problems((tensors, values))
    expected = "model: '0.weight' is float32 [3, 4] in the checkpoint and float32 [3, 5] here."
    assert expected in problems
    assert weights(other) == before


def test_a_parameter_that_is_not_updated_here_is_named(trained: Any) -> None:
    found, tensors, values = trained
    model = found.layers["model"]
    part = paddle.optimizer.Adam(0.1, parameters=model[0].parameters())
    problems = parts.find({"model": model, "optimizer": part}).problems((tensors, values))
    (name,) = [key for key in tensors["optimizer"] if key.startswith("moment1") and "2.bias" in key]
    assert f"optimizer: {name!r}: in the checkpoint, and not here." in problems


def test_a_scaler_is_restored_also_one_that_switched_itself_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Paddle enables none on the CPU.
    tracer = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    monkeypatch.setattr(grad_scaler, "_dygraph_tracer", lambda: tracer)
    fresh = paddle.amp.GradScaler(init_loss_scaling=2.0)
    saved = paddle.amp.GradScaler(init_loss_scaling=8.0)
    restore({"scaler": fresh}, carried({"scaler": saved}))
    assert fresh.state_dict()["scale"].tolist() == [8.0]
    # With bfloat16 a scaler switches itself off when it is used first, and saves nothing then.
    off = paddle.amp.GradScaler(enable=False)
    with pytest.raises(RuntimeError, match="state dict is empty"):
        fresh.load_state_dict(off.state_dict())
    restore({"scaler": fresh}, carried({"scaler": off}))


def test_names_that_would_meet_or_are_no_file_names_are_refused() -> None:
    for attributes in ({"heads": {1: net(), "1": net()}}, {"heads": {"a/b": net()}}):
        with pytest.raises(ValueError, match=r"self\.heads\."):
            parts.find(attributes)


def test_cycles_and_long_lists_of_data_are_no_matter() -> None:
    cycle: dict[str, Any] = {"model": net()}
    cycle["self"] = [cycle]
    assert parts.find({"cycle": cycle, "history": [(1, 2.0)] * 10**6}).names() == ["cycle.model"]


# --- other parts of a checkpoint -----------------------------------------------------------------


def test_gradients_are_restored_and_zeros_are_not_the_same_as_none() -> None:
    def part(model: Any) -> contents.Gradients:
        return contents.Gradients(parts.named_parameters(parts.find({"model": model})))

    def backward(model: Any) -> None:
        model(paddle.ones([1, 3])).sum().backward()

    model, other = net(), net()
    other.set_state_dict(model.state_dict())
    for made in (model, other):
        backward(made)
    model[0].bias.clear_gradient(True)  # zeros
    model[2].bias.clear_gradient(False)  # none
    state = through_json(part(model).state_dict())
    assert state["model.0.bias"] is None
    assert "model.2.bias" not in state
    backward(other)
    assert part(other).load_state_dict(state) == []
    for _ in range(2):  # what is added to them later is added to the same
        for one, restored in zip(model.parameters(), other.parameters(), strict=True):
            if one.grad_ is None:
                assert restored.grad_ is None
            else:
                assert restored.grad_.numpy().tobytes() == one.grad_.numpy().tobytes()
        backward(model)
        backward(other)


def test_a_state_that_a_rate_a_schedule_or_a_generator_cannot_have_is_a_problem() -> None:
    model = net()
    fixed = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    rate = lr.StepDecay(0.1, 2)
    random = np.random.default_rng(3)
    found = parts.find({"model": model, "fixed": fixed, "rate": rate, "random": random})
    tensors, values = found.state_dict()
    drawn = random.bit_generator.state
    wrong: dict[str, Any] = {"fixed": [0.5], "rate": 3, "random": {**drawn, "state": {"state": 1}}}
    for name, state in wrong.items():
        (text,) = found.problems((tensors, {**values, name: [values[name][0], state]}))
        assert text.startswith(f"{name}: {str(state)[:5]}")
        assert "is no state of a" in text
    assert random.bit_generator.state == drawn
    assert found.problems((tensors, values)) == []
