"""Logs: lines of text, means of what was logged, speeds, JSON lines."""

from __future__ import annotations

import gc
import io
import json
import logging
import math
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import paddle
import pytest

from expbase.logs import Meter, MetricsFile, close_log, line, open_log, silent_log


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


def test_a_line_has_the_iteration_then_sorted_names() -> None:
    metrics = {"lr": 1e-3, "epoch": 2, "acc": 1 / 3, "bad": math.nan}
    assert line(400, metrics) == "[400] acc=0.333333 bad=nan epoch=2 lr=0.001"


def test_the_time_left_is_shown_as_a_clock() -> None:
    assert line(1, {"speed/seconds_left": 3725.4}) == "[1] speed/seconds_left=1:02:05"


def test_two_logs_do_not_write_into_each_other(tmp_path: Path) -> None:
    one, two = (open_log(tmp_path / name, echo=False) for name in ("one", "two"))
    one.info("first")
    two.warning("second")
    close_log(one)
    close_log(two)
    assert (tmp_path / "one").read_text().endswith(" first\n")
    assert (tmp_path / "two").read_text().endswith(" WARNING: second\n")
    assert {len((tmp_path / name).read_text().splitlines()) for name in ("one", "two")} == {1}


def test_a_log_goes_on_in_its_file(tmp_path: Path) -> None:
    for text in ("before", "after"):
        logger = open_log(tmp_path / "log", echo=False)
        logger.info(text)
        close_log(logger)
    assert [words.split()[-1] for words in (tmp_path / "log").read_text().splitlines()] == [
        "before", "after",
    ]  # fmt: skip


def test_closing_a_log_twice_is_legal_and_what_follows_goes_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = open_log(tmp_path / "log", echo=True)
    close_log(logger)
    close_log(logger)
    logger.error("late")
    silent_log().error("nobody hears this")
    assert (tmp_path / "log").read_text() == ""
    assert capsys.readouterr().err == ""


def test_pythons_root_logger_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = list(logging.root.handlers)
    logger = open_log(tmp_path / "log", echo=False)
    logger.error("mine")
    assert logging.root.handlers == handlers
    assert caplog.records == []
    close_log(logger)


def test_a_traceback_stands_in_the_file_and_not_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = open_log(tmp_path / "log", echo=True)
    users = io.StringIO()
    logger.addHandler(logging.StreamHandler(users))
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        logger.exception("it failed")
    close_log(logger)
    for full in ((tmp_path / "log").read_text(), users.getvalue()):
        assert "RuntimeError: the reason" in full
    shown = capsys.readouterr().err
    assert "ERROR: it failed" in shown
    assert "Traceback" not in shown


def test_a_meter_gives_the_mean_over_the_times_a_name_was_logged() -> None:
    meter = Meter()
    meter.add(1, {"loss": paddle.to_tensor(1.0), "acc": 1})
    meter.add(2, {"loss": paddle.to_tensor([4.0])})
    meter.add(3, {"loss": np.float32(1), "acc": 0.5})
    assert meter.means() == {"loss": 2.0, "acc": 0.75}
    assert meter.means() == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32", "bool"])
def test_a_mean_does_not_depend_on_how_often_a_type_was_logged(dtype: str) -> None:
    for times in (1, 2):
        meter = Meter()
        for iteration in range(times):
            meter.add(iteration, {"loss": paddle.to_tensor(1.0).astype(dtype)})
        assert meter.means() == {"loss": 1.0}


def test_a_logged_tensor_keeps_its_value_and_no_graph() -> None:
    x = paddle.ones([1])
    x.stop_gradient = False
    loss = Double.apply(x)
    meter = Meter()
    meter.add(1, {"loss": loss})
    with paddle.no_grad():
        loss.scale_(100.0)
    del loss
    gc.collect()
    assert Double.graph() is None
    assert meter.means() == {"loss": 2.0}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(paddle.ones([2]), "[2]"), (np.ones(2), "2|1., 1."), ("high", "'high'"), (None, "None")],
)
def test_what_is_not_one_number_is_refused_by_name(value: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=r"log: 'loss' is .*; expected") as caught:
        Meter().add(1, {"loss": value})
    assert any(part in str(caught.value) for part in shown.split("|"))


def test_what_is_not_finite_is_told_with_name_value_and_iteration() -> None:
    meter = Meter()
    meter.add(3, {"loss": 1.0})
    assert meter.nonfinite() == ""
    meter.add(4, {"loss": paddle.to_tensor(math.nan), "acc": -math.inf})
    assert meter.nonfinite() == "loss=nan at iteration 4, acc=-inf at iteration 4"
    for iteration in range(5, 10):
        meter.add(iteration, {"loss": math.nan})
    assert meter.nonfinite().endswith("at iteration 8 …")


def test_what_a_meter_holds_survives_json() -> None:
    meter, other = Meter(), Meter()
    meter.add(3, {"loss": paddle.to_tensor(0.1)})
    meter.add(4, {"loss": 2})
    other.restore(json.loads(json.dumps(meter.numbers())))
    assert other.means() == meter.means() != {}


def test_every_metrics_line_is_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    file = MetricsFile(tmp_path / "metrics.jsonl", clock=lambda: 12.34567)
    file.write(400, 2, {"b": math.nan, "a": 0.5, "c": -math.inf})
    file.write(401, 2, {})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before it is closed
    file.close()
    first, second = (json.loads(text, parse_constant=refuse) for text in lines)
    start = {"iteration": 400, "epoch": 2, "time": 12.346}
    assert first == {**start, "a": 0.5, "b": "nan", "c": "-inf"}
    assert list(first) == ["iteration", "epoch", "time", "a", "b", "c"]
    assert second == {**start, "iteration": 401}


def test_metrics_are_cut_back_to_a_size_and_go_on_from_there(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.size() == 0
    file.write(1, 1, {})
    size = file.size()
    file.write(2, 1, {"of the killed process": 1})
    file.cut(size)
    file.cut(size + 1000)  # nothing to take away
    file.write(2, 1, {})
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [set(json.loads(text)) for text in lines] == [{"iteration", "epoch", "time"}] * 2


def test_a_metrics_file_without_a_path_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = MetricsFile(None)
    file.write(1, 1, {"a": 1.0})
    file.cut(file.size())
    assert list(tmp_path.iterdir()) == []
