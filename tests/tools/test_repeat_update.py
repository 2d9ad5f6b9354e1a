"""Where a script does not repeat itself: updates made several times, and what is said of them.

That verify starts it is in test_verify.py; more causes are in tests/proofs/unrepeatable.py.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.io import DataLoader
from pages import TEXT, rows
from tiny import Points, Tiny, trained

from expbase.mixins_in_front import put_in_front
from expbase.tools import repeat_update
from expbase.tools.nondeterminism import Updates, read_updates, where
from expbase.tools.repeat_update import FIRST, MORE, TIMES, Repeated


class Left(BaseException):
    """In the place of the end of the process."""


def repeated(
    experiment: type[Tiny], folder: Path, monkeypatch: pytest.MonkeyPatch, first: int = 1
) -> list[Updates]:
    """The updates of two runs that make them several times, from the first one on."""

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setenv(FIRST, str(first))
    monkeypatch.setattr(os, "_exit", leave)
    outputs = [folder / name for name in ("one", "other")]
    for output in outputs:
        with put_in_front(Repeated), contextlib.suppress(Left):
            trained(experiment, output, max_iteration=first + MORE + 1, valid_interval=0)
    return [read_updates(output) for output in outputs]


class Clocked(paddle.nn.Layer):
    """A dropout whose seed is the time."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = paddle.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        paddle.seed(time.perf_counter_ns() % 2**31)
        return self.drop(x)


class ByClock(Tiny):
    def setup_model(self) -> None:
        self.model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), Clocked(), paddle.nn.Linear(8, 2))
        self.optimizer = paddle.optimizer.Adam(
            paddle.optimizer.lr.NoamDecay(8, 4), parameters=self.model.parameters()
        )


def test_the_layer_and_the_operator_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, causes = where(repeated(ByClock, tmp_path, monkeypatch))
    tells = paddle.base.core.globals().is_public("FLAGS_tensor_md5_checksum_output_path")
    operator = ". The first operator whose result differs is dropout" if tells else ""
    assert place == (
        "where: update 1: the output of model.1.drop (Dropout) differs, and its input is the same"
        f"{operator}. Made {TIMES} times in one process, from one state and one batch, it differs, "
        "too."
    )
    assert "the time; numbers of the system (os.urandom, a generator without a seed)" in causes


class Table(paddle.nn.Layer):
    """An Embedding with gradients of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = paddle.nn.Embedding(50, 2, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.rows((x.abs() * 20).astype("int64") % 50).flatten(1)


class Sparse(Tiny):
    def setup_model(self) -> None:
        self.model = paddle.nn.Sequential(Table(), paddle.nn.Linear(8, 2))
        rate = paddle.optimizer.lr.NoamDecay(8, 4)
        self.optimizer = paddle.optimizer.Adam(rate, parameters=self.model.parameters())


class Doubled(PyLayer):
    """An operator of the user's own."""


@pytest.mark.long
def test_sparse_gradients_threads_and_own_operators_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat_update, "MORE", 0)  # whether the memory differs is chance
    is_over = threading.Event()

    def draw() -> None:
        is_over.wait()

    thread = threading.Thread(target=draw, name="drawing")
    thread.start()
    processes = repeated(Sparse, tmp_path, monkeypatch)
    is_over.set()
    thread.join()
    facts = processes[0][1, 0]
    assert facts["threads"] == ["drawing"]
    assert "Doubled" in facts["own_operators"]
    _, causes = where(processes)
    assert causes == (
        "causes to look at: model.0.rows.weight has sparse gradients, and Adam's kernel for them "
        "does not repeat on the CPU: give the optimizer lazy_mode=True, or the Embedding no "
        "sparse=True."
    )
    kinds = [step[:2] for step in facts["traces"][0]["steps"]]
    assert ["gradient", "model.0.rows.weight"] in kinds


class Stateful(Tiny):
    """One with everything that an update may change, and that must be put back."""

    def setup_model(self) -> None:
        super().setup_model()
        self.generator, self.count = np.random.default_rng(3), 0
        self.averaged = self.model[0].weight.detach().clone()

        def double(layer: Any, inputs: Any) -> None:
            inputs[0].scale_(2.0)

        self.model.register_forward_pre_hook(double)

    def train_batch(self) -> None:
        self.count += 1
        weight, bias = self.model[0].weight, self.model[0].bias
        with paddle.no_grad():
            drawn = (self.generator.random(8) + np.random.random(8)) / self.count
            bias.add_(paddle.to_tensor(drawn, "float32"))
        super().train_batch()
        self.averaged.copy_(self.averaged * 0.9 + weight.detach() * 0.1, True)
        with paddle.no_grad():
            bias.add_(self.averaged.mean().expand([8]))
        if self.count % 2:
            weight.square().sum().backward()  # for the next update
        else:
            weight.clear_gradient(False)  # as before the first one


@pytest.mark.long
def test_of_a_script_that_repeats_itself_each_update_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = repeated(Stateful, tmp_path, monkeypatch, first=2)
    assert [*one] == [(number, 0) for number in range(1, 2 + MORE + 1)]
    assert [len(one[number, 0]["traces"]) for number in (1, 2, 3)] == [1, TIMES, TIMES]
    kinds = {kind for kind, _, _ in one[2, 0]["traces"][0]["steps"]}
    assert kinds == {"before", "samples", "batch", "input", "output", "gradient", "after"}
    place, _ = where([one, other])
    assert place == (
        "where: not seen again: in two more processes the updates 1 to 11 were the same, the last "
        "of them 4 times each."
    )
    # The next update goes on from the last making.
    for number in range(1, 2 + MORE):
        after, before = one[number, 0]["traces"][-1], one[number + 1, 0]["traces"][0]
        ends = [step[1:] for step in after["steps"] if step[0] == "after"]
        assert [step for step in ends if step[0].startswith("model.")] == [
            step[1:]
            for step in before["steps"]
            if step[0] == "before" and step[1].startswith("model.")
        ]
    monkeypatch.setattr(repeat_update, "MORE", 0)
    folder = tmp_path / "first"
    folder.mkdir()
    processes = repeated(Stateful, folder, monkeypatch)  # before which nothing has been stepped
    assert "not seen again" in next(where(processes))


def a_process(**facts: Any) -> Updates:
    """An update of one process, as it is when nothing differs."""
    kinds = ("before", "samples", "batch", "input", "output", "loss", "gradient", "after")
    name = {"samples": "", "batch": "[0]", "loss": "", "input": "model.0", "output": "model.0"}
    steps = [[kind, name.get(kind, "model.0.weight"), "1"] for kind in kinds]
    trace = {"steps": steps, "logged": [["loss", "0.5"]]}
    line = {
        "iteration": 1, "traces": [copy.deepcopy(trace) for _ in range(TIMES)], "device": "cpu",
        "samples": {"3": ["a", "a"]}, "order": ["b", "b"], "data_set": "Words", "sampler": "Mine",
        "layers": {"model": "Net", "model.0": "Linear"}, "optimizers": {"optimizer": "Adam"},
        "sparse_under_adam": [], "threads": [], "own_operators": [],
    }  # fmt: skip
    return {(1, 0): line | facts}


LAYERS = "what layers gave before is the same"
ACROSS = "Made 4 times in one process, from one state and one batch, it is the same, and in another"
PLACES = {
    "before": "model.0.weight differs before it: setup has made it otherwise.",
    "samples": "the samples differ, of Mine. Asked twice in one process, from one seed, it is the "
    "same.",
    "batch": "batch[0] differs, of the same samples. Words.__getitem__ gives the same: look at "
    "collate_fn, and at what draws beside it.",
    "input": f"the input of model.0 (Linear) differs, and {LAYERS}. {ACROSS}",
    "output": f"the output of model.0 (Linear) differs, and its input is the same. {ACROSS}",
    "loss": f"the loss differs, and what the layers gave is the same. {ACROSS}",
    "gradient": "the gradient of model.0.weight (Linear) differs, and what the layers gave is the "
    f"same; so does what it logs: loss. {ACROSS}",
    "after": "model.0.weight differs after it, and the gradients are the same: the step of "
    f"self.optimizer (Adam), or what train_batch itself writes into it. {ACROSS}",
}


def test_the_first_step_that_differs_between_two_processes_is_named() -> None:
    said = ["The first operator whose result differs is", "not seen again"]  # other tests
    for kind, text in PLACES.items():
        other = a_process()
        for trace in other[1, 0]["traces"]:
            first = [step[0] for step in trace["steps"]].index(kind)
            for step in trace["steps"][first:]:  # what comes of it differs, too
                step[2] = "2"
            trace["logged"] = [["loss", "0.6"]]
        place, causes = where([a_process(), other])
        assert place.startswith(f"where: update 1: {text}")
        assert ("the order of a set" in causes) == (kind != "batch")
        said.append(place)
    for words, _ in rows(TEXT["same_result"], "what is named | where to look"):
        for word in re.findall("`([^`]+)`", words):
            plain = word.replace("model.1", "model.0").replace("…", "").strip()
            assert any(plain in place for place in said), word


def test_what_data_set_and_sampler_give_when_they_are_asked_twice_is_named() -> None:
    def lines(kind: str, **facts: Any) -> list[str]:
        other = a_process(**facts)
        for step in other[1, 0]["traces"][0]["steps"]:
            step[2] = "2" if step[0] == kind else "1"
        return [*where([a_process(), other])]

    def said(kind: str, **facts: Any) -> str:
        return lines(kind, **facts)[0]

    split = "causes to look at: a split of the data that setup draws without a seed"
    assert lines("batch", samples={"3": ["c", "c"]})[1].startswith(split)
    assert split not in lines("batch", samples={"3": ["a", "c"]})[1]

    assert said("batch", samples={"3": ["a", "c"]}).endswith(
        "Words.__getitem__(3) differs when it is called twice in one process."
    )
    assert said("batch", samples={"3": ["c", "c"]}).endswith(
        "Words.__getitem__(3) differs in another process, and not in one."
    )
    assert said("samples", order=["b", "c"]).endswith("from one seed, it differs, too.")


def test_what_the_script_has_itself_is_among_the_causes() -> None:
    facts = {"threads": ["Thread-1 (draw)"], "own_operators": ["Raced"], "device": "gpu:0"}
    processes = [a_process(**facts), a_process(**facts)]
    for process in processes:
        process[1, 0]["traces"][1]["steps"][4][2] = "2"  # the second time
    place, causes = where(processes, ["self.others"])
    assert place == (
        "where: update 1: the output of model.0 (Linear) differs, and its input is the same."
    )
    assert causes == (
        "causes to look at: self.others is read by hand: paddle's thread draws beside training; "
        "threads of yours that run beside training: Thread-1 (draw); operators of yours, which may "
        "add in another order each time: Raced; the time; numbers of the system (os.urandom, a "
        "generator without a seed); memory that nobody has filled (paddle.empty); a kernel that "
        "adds in any order, and that training.deterministic does not reach."
    )
    assert [*where([{}, {}])] == []  # both processes have failed


class Noisy(Points):
    """A data set with numbers of the system."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point + np.float32(os.urandom(1)[0]), label


class OfSystem(Tiny):
    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.train_loader = DataLoader(Noisy(20), batch_size=4, shuffle=True)


@pytest.mark.long
def test_a_data_set_that_gives_another_sample_each_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = where(repeated(OfSystem, tmp_path, monkeypatch))
    assert place.startswith("where: update 1: batch[0] differs, of the same samples. Noisy.__geti")
    assert place.endswith(" differs when it is called twice in one process.")
