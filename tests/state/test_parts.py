"""What has a form of its own in a checkpoint: how it is found, that it is exact and strict."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pretend
import pytest
from paddle.amp import grad_scaler
from paddle.optimizer import lr
from starts import Start, found_among, through_json, to_bytes
from tiny import DEVICE

from expbase.base.arrays import parse
from expbase.checkpoint import contents
from expbase.state import optimizers, parts

pytestmark = pytest.mark.device


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
    tensors, values = found_among(attributes).state_dict()
    return {n: parse(to_bytes(arrays)) for n, arrays in tensors.items()}, through_json(values)


def restore(attributes: dict[str, Any], state: parts.State) -> None:
    found = found_among(attributes)
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
    found = found_among(attributes)
    assert list(found.layers) == ["generator", "blocks.0", "blocks.1.deep"]
    assert list(found.optimizers) == ["d_optimizer"]
    assert list(found.objects) == ["counter"]
    assert list(found.schedules) == ["d_optimizer.learning_rate"]
    assert list(found.generators) == ["random"]
    assert list(found.parameters) == ["scale"]


def test_an_excluded_model_is_left_out_under_all_its_names() -> None:
    judge = net()
    found = found_among({"judge": judge, "model": net(), "other_name": judge}, {"judge": judge})
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
    if name in ("ASGD", "RMSProp") and DEVICE.startswith(pretend.NAME):
        pytest.skip("the CPU's kernels work in place: they refuse the copies that they get here")

    def made() -> dict[str, Any]:
        model = net()
        return {"model": model, "optimizer": make_optimizer(name, model.parameters())}

    one = Start(made())
    for _ in range(3):
        step(one.own.model, one.own.optimizer)
    net()  # paddle's automatic names go on counting
    other = Start(dict(reversed(made().items())), one.saved())
    for start in (one, other):
        for _ in range(3):
            step(start.own.model, start.own.optimizer)
    assert weights(other.own.model) == weights(one.own.model)


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


def test_a_schedule_goes_on_exactly() -> None:
    for make in SCHEDULES:
        one = Start({"schedule": make()})
        for _ in range(5):
            one.own.schedule.step()
        saved = one.saved()
        assert not [path for path in saved["values"] if "_var_name" in path]  # an automatic name
        schedule, other = one.own.schedule, Start({"schedule": make()}, saved).own.schedule
        for _ in range(8):
            assert other() == schedule(), schedule
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
    half = Start({"schedule": make()})
    run(half.own.schedule, [1.0, 1.0, 1.0])
    rest = Start({"schedule": make()}, half.saved())
    assert run(rest.own.schedule, [0.9, 0.9, 0.9, 0.9]) == whole


def test_another_kind_of_optimizer_or_schedule_is_a_problem() -> None:
    def attributes(kind: Any, rate: Any) -> dict[str, Any]:
        model = net()
        return {"model": model, "optimizer": kind(rate, parameters=model.parameters())}

    step_decay = lr.StepDecay(0.1, 3)
    state = carried(attributes(paddle.optimizer.SGD, lr.LinearWarmup(step_decay, 2, 0, 0.1)))
    other = attributes(
        paddle.optimizer.Momentum, lr.LinearWarmup(lr.ExponentialDecay(0.1, 0.9), 2, 0, 0.1)
    )
    problems = found_among(other).problems(state)
    there, here = "StepDecay in the checkpoint", "ExponentialDecay here."
    assert "optimizer is SGD in the checkpoint and Momentum here." in problems
    assert f"optimizer.learning_rate.learning_rate is {there} and {here}" in problems
    assert found_among(attributes(paddle.optimizer.SGD, 0.1)).problems(state) == [
        "optimizer.learning_rate: in the checkpoint, and not here.",
        "optimizer.learning_rate.learning_rate: in the checkpoint, and not here.",
    ]


def test_generators_objects_and_bare_parameters_are_restored() -> None:
    def made() -> dict[str, Any]:
        return {
            "python": random.Random(1),
            "numpy": np.random.default_rng(1),
            "legacy": np.random.RandomState(1),
            "paddle": new_paddle_generator(),
            "counter": Tally(),
            "scale": paddle.create_parameter([2], "float32"),
        }

    one = Start(made())
    one.own.counter.count = 5
    draws(one.own)
    other = Start(made(), one.saved())
    assert other.own.counter.count == 5
    assert draws(other.own) == draws(one.own)
    assert other.own.scale.tolist() == one.own.scale.tolist()


def new_paddle_generator() -> Any:
    generator = paddle.framework.core.Generator()
    generator.manual_seed(1)
    return generator


def draws(own: Any) -> list[Any]:
    of_paddle = own.paddle.random()
    return [own.python.random(), own.numpy.normal(), own.legacy.randn(), of_paddle]


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
    names = parts.parameter_names(found_among(one))
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


# --- what a class of the user's writes ---------------------------------------------------------


class Copying(paddle.nn.Layer):
    """A layer whose state_dict gives copies, which nothing can be put back into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(2, 2)

    def state_dict(self, *words: Any, **options: Any) -> Any:
        return {"other": paddle.ones([1])}

    def set_state_dict(self, *words: Any, **options: Any) -> None:
        raise AssertionError


def test_a_layer_is_walked_and_never_asked() -> None:
    one = Start({"model": Copying()})
    one.own.model.linear.weight.set_value(paddle.full([2, 2], 3.0))
    other = Start({"model": Copying()}, one.saved())
    assert other.own.model.linear.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


class Sequence(lr.LRScheduler):
    """Schedules, one after the other, with a state that says it all."""

    def __init__(self) -> None:
        self.schedules = [lr.LinearLR(0.1, 3), lr.ExponentialDecay(0.1, 0.9)]
        self.asked = 0
        super().__init__(0.1)

    def get_lr(self) -> float:
        schedule = self.schedules[self.last_epoch >= 4]
        schedule.step()
        return float(schedule())

    def state_dict(self) -> dict[str, Any]:
        return {"all": [s.state_dict() for s in self.schedules], "own": super().state_dict()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        for schedule, of_it in zip(self.schedules, state["all"], strict=True):
            schedule.set_state_dict(of_it)
        super().set_state_dict(state["own"])
        self.asked += 1


class Walked(Sequence):
    """The same without one."""

    state_dict = lr.LRScheduler.state_dict
    set_state_dict = lr.LRScheduler.set_state_dict


@pytest.mark.parametrize(("kind", "asked"), [(Sequence, 1), (Walked, 0)])
def test_a_schedule_with_a_state_of_its_own_is_asked_and_any_other_walked(
    kind: Any, asked: int
) -> None:
    one = Start({"schedule": kind()})
    for _ in range(3):
        one.own.schedule.step()
    other = Start({"schedule": kind()}, one.saved())
    rates = [[(s.own.schedule.step(), s.own.schedule())[1] for _ in range(5)] for s in (one, other)]
    assert rates[0] == rates[1]
    assert other.own.schedule.asked == asked


class Averaging(paddle.optimizer.Momentum):
    """An optimizer of one's own: an accumulator that its step makes, a number for each parameter,
    buffers by the parameter, its id and its automatic name, and a list.
    """

    def __init__(self, rate: float, parameters: Any) -> None:
        super().__init__(rate, parameters=parameters)
        self.by_name: dict[str, int] = {}
        self.by_id: dict[int, Any] = {}
        self.by_parameter: dict[Any, Any] = {}
        self.norms: list[float] = []

    def step(self) -> None:
        for p in self._parameter_list:
            if p.grad is None:
                continue
            if p.name not in self._accumulators.get("average", {}):
                self._add_accumulator("average", p)
            average = self._get_accumulator("average", p)
            average.set_value(0.5 * average + 0.5 * p.grad)
            self.by_name[p.name] = self.by_name.get(p.name, 0) + 1
            self.by_id[id(p)] = self.by_id.get(id(p), 0) + p.grad
            self.by_parameter[p] = self.by_parameter.get(p, 1) + average
            self.norms.append(float(p.grad.norm()))
            p.grad.set_value(average / self.by_name[p.name] + self.by_id[id(p)] / len(self.norms))
            p.grad.set_value(p.grad + self.by_parameter[p] / 100)
        super().step()


class AveragingWithState(Averaging):
    """The same with a state of its own, by structured order."""

    def state_dict(self) -> dict[str, Any]:
        own = [(self.by_name.get(p.name), self.by_id.get(id(p)), self.by_parameter.get(p))
               for p in self._parameter_list]  # fmt: skip
        return {**super().state_dict(), "own": own, "norms": [*self.norms]}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.norms = state.pop("norms")
        for p, (count, total, sums) in zip(self._parameter_list, state.pop("own"), strict=True):
            if count is not None:
                self.by_name[p.name], self.by_id[id(p)], self.by_parameter[p] = count, total, sums
        super().set_state_dict(state)


@pytest.mark.parametrize("kind", [Averaging, AveragingWithState])
def test_an_optimizer_of_ones_own_goes_on_exactly(kind: Any) -> None:
    def made() -> dict[str, Any]:
        model = net()
        return {"model": model, "optimizer": kind(0.01, model.parameters())}

    one = Start(made())
    one.own.model[0].bias.stop_gradient = True  # never had a gradient: it has no accumulators
    for _ in range(2):
        step(one.own.model, one.own.optimizer)
    net()
    other = Start(made(), one.saved())
    for start in (one, other):
        for _ in range(3):
            step(start.own.model, start.own.optimizer)
    assert weights(other.own.model) == weights(one.own.model)
    assert one.warned == other.lost == []


# --- strictness --------------------------------------------------------------------------------


@pytest.fixture
def trained() -> tuple[parts.StatefulObjects, parts.Tensors, dict[str, Any]]:
    """A model and its optimizer after a step, and their state."""
    model = net()
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    step(model, optimizer)
    attributes = {"model": model, "optimizer": optimizer}
    return found_among(attributes), *carried(attributes)


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
    problems = found_among({"model": other, "optimizer": optimizer}).problems((tensors, values))
    expected = "model: '0.weight' is float32 [3, 4] in the checkpoint and float32 [3, 5] here."
    assert expected in problems
    assert weights(other) == before


def test_a_parameter_that_is_not_updated_here_is_named(trained: Any) -> None:
    found, tensors, values = trained
    model = found.layers["model"]
    part = paddle.optimizer.Adam(0.1, parameters=model[0].parameters())
    problems = found_among({"model": model, "optimizer": part}).problems((tensors, values))
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


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"self\.heads\.a/b: has a '/' in it; expected names"):
        found_among({"heads": {"a/b": net()}})


def test_no_layer_hides_another_whose_name_is_written_alike() -> None:
    heads = {1: net(), "1": net()}
    assert [*found_among({"heads": heads}).layers.values()] == [*heads.values()]


def test_cycles_and_long_lists_of_data_are_no_matter() -> None:
    cycle: dict[str, Any] = {"model": net()}
    cycle["self"] = [cycle]
    assert found_among({"cycle": cycle, "history": [(1, 2.0)] * 10**6}).names() == ["cycle.model"]


# --- other parts of a checkpoint -----------------------------------------------------------------


def test_gradients_are_restored_and_zeros_are_not_the_same_as_none() -> None:
    def part(model: Any) -> contents.Gradients:
        return contents.Gradients(parts.named_parameters(found_among({"model": model})))

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


def test_a_generator_of_another_kind_is_a_problem_and_nothing_is_changed() -> None:
    one = Start({"random": np.random.default_rng(3)})
    one.own.random.random()
    saved = one.saved()
    other = Start({"random": np.random.Generator(np.random.MT19937(3))})
    before = other.own.random.bit_generator.state["state"]["key"].tolist()
    (text,) = other.problems(saved)
    there, here = "Generator of PCG64 in the checkpoint", "Generator of MT19937 here."
    assert text == f"random[:] is {there} and {here}"
    assert other.own.random.bit_generator.state["state"]["key"].tolist() == before
