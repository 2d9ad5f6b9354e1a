"""The numbers that a run logs: their means."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import DEVICE

from expbase.record.meter import Meter, Reading, SampleMeter, means_over


class Graph:
    """Something that lives as long as the graph that a Double made."""


class Double(paddle.autograd.PyLayer):
    """Twice the input; `graph` tells whether its graph still lives."""

    graph: weakref.ref[Graph]

    @staticmethod
    def forward(context: Any, x: paddle.Tensor) -> paddle.Tensor:
        context.token = Graph()
        Double.graph = weakref.ref(context.token)
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient * 2


def test_a_mean_is_over_the_times_that_its_name_was_logged() -> None:
    meter = Meter()
    meter.add(1, {"loss": paddle.to_tensor(1.0), "acc": 1})
    meter.add(2, {"loss": paddle.to_tensor([4.0])})
    meter.add(3, {"loss": np.float32(1), "acc": 0.5})
    assert meter.means() == {"loss": 2.0, "acc": 0.75}
    assert meter.means() == {}


@pytest.mark.device
def test_a_tensor_is_not_read_before_the_number_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    with monkeypatch.context() as patch:
        reads: list[Any] = []
        patch.setattr(paddle.Tensor, "item", lambda tensor: reads.append(tensor) or 1.0)
        meter.add(1, {"loss": paddle.to_tensor(1.0)})
        assert reads == []
    assert meter.means() == {"loss": 1.0}


@pytest.mark.device
def test_a_mean_does_not_depend_on_how_often_a_type_was_logged() -> None:
    for dtype in ("bfloat16", "float16", "float64", "int32", "bool"):
        for times in (1, 2):
            meter = Meter()
            for iteration in range(times):
                meter.add(iteration, {"loss": paddle.to_tensor(1.0).astype(dtype)})
            assert meter.means() == {"loss": 1.0}, (dtype, times)


@pytest.mark.device
def test_a_logged_tensor_keeps_its_value_and_no_graph() -> None:
    x = paddle.ones([1])
    x.stop_gradient = False
    loss = Double.apply(x)
    meter = Meter()
    meter.add(1, {"loss": loss})
    with paddle.no_grad():
        loss.scale_(100.0)
    array = np.ones(1)
    meter.add(1, {"array": array})
    array[0] = 5
    del loss
    gc.collect()
    assert Double.graph() is None
    assert meter.means() == {"loss": 2.0, "array": 1.0}


def test_what_is_not_one_number_is_refused_by_name() -> None:
    for value, shown in (
        (paddle.ones([2]), "of shape [2]"),
        (np.ones(2), "of shape [2]"),
        ("high", "'high'"),
    ):
        text = re.escape(f"log: 'loss' is {shown}; expected one number")
        with pytest.raises(TypeError, match=text):
            Meter().add(1, {"loss": value})


def test_a_number_that_is_not_finite_is_named_with_value_and_iteration() -> None:
    meter = Meter()
    meter.add(3, {"loss": 1.0})
    assert meter.nonfinite() == ""
    meter.add(4, {"loss": paddle.to_tensor(math.nan), "acc": -math.inf})
    assert meter.nonfinite() == "loss=nan at iteration 4, acc=-inf at iteration 4"
    for iteration in range(5, 10):
        meter.add(iteration, {"loss": math.nan})
    assert meter.nonfinite().count("nan") == 5
    meter.take_all([{"loss": [1, 0, [[4, math.nan]]]}] * 4)  # what the shares of an update logged
    assert meter.nonfinite() == "loss=nan at iteration 4"


def test_a_line_that_never_comes_needs_no_memory() -> None:
    meter = Meter()
    for iteration in range(2500):
        meter.add(iteration, {"loss": paddle.to_tensor(float(iteration % 2)), "bad": math.inf})
    (held,) = [one for name, one in meter._sums.items() if name == "loss"]
    assert len(held.unread) <= 500
    assert len(json.dumps(meter.state_dict())) < 2000
    assert meter.means() == {"loss": 0.5, "bad": math.inf}


def test_what_a_meter_holds_survives_json() -> None:
    meter, other = Meter(), Meter()
    meter.add(3, {"loss": paddle.to_tensor(0.1)})
    meter.add(4, {"loss": 2})
    assert other.load_state_dict(json.loads(json.dumps(meter.state_dict()))) == []
    assert other.means() == meter.means() != {}


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 4)])
def test_a_mean_over_samples_has_the_same_bits_whoever_has_which_batch(cuts: tuple[int]) -> None:
    logged = [(0.1, 4), (1e300, 3), (1 / 3, 5), (-1e300, 3), (5e-324, 1)]
    reading = Reading()
    taken = []
    for part in np.split(np.arange(5), cuts)[::-1]:  # of a rank each
        meter = SampleMeter(reading)
        for number in part:
            value, samples = logged[number]
            reading.enter("a loop", samples)
            meter.add(1, {"loss": value})
        taken.append(meter.take())
    assert means_over(taken) == {"loss": math.fsum([4 * 0.1, 5 * (1 / 3)]) / 16}


def test_of_names_that_may_overflow_the_finite_numbers_count() -> None:
    meter = Meter()
    for number in (1.0, math.inf, paddle.to_tensor(math.nan), 3.0):
        meter.add(1, {"norm": number}, only_finite=True)
    meter.add(1, {"none": math.inf}, only_finite=True)
    assert meter.nonfinite() == ""
    again = Meter()
    again.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    again.add(2, {"norm": math.inf}, only_finite=True)
    assert [meter.means(), again.means()] == [{"norm": 2.0}] * 2


@pytest.mark.device
def test_what_is_logged_of_a_device_is_what_item_reads() -> None:
    meter = Meter()
    values = [paddle.to_tensor(v).to(DEVICE) for v in (0.1, [0.2], 3, True)]
    for value in values:
        meter.add(1, {"loss": value, "on the host": value.cpu(), "number": value.item()})
        value.fill_(9)
    meter.add(1, {"loss": 0.5, "on the host": 0.5, "number": 0.5})
    means = meter.means()
    assert means["loss"] == means["on the host"] == means["number"]
    for number in range(1000):  # so many are read before a line is due
        meter.add(1, {"many": paddle.to_tensor(number).to(DEVICE)})
    assert meter.means() == {"many": 499.5}
