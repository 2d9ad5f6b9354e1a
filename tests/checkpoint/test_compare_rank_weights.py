"""Ranks that part: what differs is found at each save, told once, and noted in the checkpoint."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from starts import layer_and_optimizer
from test_rank_state import Ranks, array
from tiny import TESTS, run_ranks, same_bits

from expbase.base.arrays import Array, parse
from expbase.checkpoint import rank_state
from expbase.checkpoint.compare_rank_weights import Difference
from expbase.checkpoint.layout import STATE_FILE
from expbase.state.parts import StatefulObjects

LOGGER = logging.getLogger("expbase")
WEIGHT = "moment1/model.weight"
ROWS, WIDTH = 2000, 32

# --- two processes -----------------------------------------------------------------------------

# A way is run whole, and again from a checkpoint in its middle, as after a kill -9. Who has
# unfrozen something wraps it again, as the error says. The log has the doctor's lines, too.
SCRIPT = """
import argparse, shutil, sys
from pathlib import Path
import paddle.distributed as dist
from tiny import DEVICE, TESTS
sys.path.insert(0, str(TESTS / "proofs"))
from parted import Parted
class Advised(Parted):
    def train_batch(self):
        try:
            super().train_batch()
        except RuntimeError as error:
            with (self.output_dir / f"errors_{self.rank}").open("a") as file:
                file.write(f"[{self.iteration}] {error}\\n")
            self.model = self.data_parallel(self.model)
            super().train_batch()

def run(way, output):
    config = Advised.default_config()
    config.data.way = way
    config.training.max_iteration = last
    exp = Advised(config, argparse.Namespace(output=str(output), device=DEVICE))
    exp.setup()
    exp.run()
    dist.barrier()

way, last = sys.argv[2], int(sys.argv[3])
whole, parts = (Path(sys.argv[1]) / name for name in ("whole", "parts"))
run(way, whole)
if dist.get_rank() == 0:
    shutil.copytree(whole, parts)
    for path in sorted((parts / "checkpoints").glob("step-*"))[3 * last // 20 :]:
        shutil.rmtree(path)
dist.barrier()
run(way, parts)
"""
# How many updates it takes until what parts is found, and continued.
LAST = {"frozen after": 20, "frozen before": 20, "left out": 20, "raw loss": 20, "plateau": 20,
        "embedding": 40}  # fmt: skip


def ways(*quick: str, long: Sequence[str] = ()) -> list[Any]:
    """Cases of a test: two processes that train take some seconds."""
    return [*quick, *(pytest.param(way, marks=pytest.mark.long) for way in long)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the runs of a way are: two processes make them when a test first asks for it."""

    @functools.cache
    def launch(way: str) -> Path:
        folder = tmp_path_factory.mktemp("parted")
        script = folder / "train.py"
        script.write_text(SCRIPT)
        for rank in run_ranks([[str(script), str(folder), way, str(LAST[way])]] * 2):
            assert rank.returncode == 0, rank.stderr
        return folder

    return launch


def told(output: Path) -> list[str]:
    """What rank 0's log says of ranks that differ."""
    lines = (output / "worker_0.log").read_text().splitlines()
    return [line for line in lines if "WARNING" in line and " rank" in line]


Launched = Callable[[str], Path]


ALL_WAYS = ways(
    "left out", long=["frozen after", "frozen before", "raw loss", "plateau", "embedding"]
)


NOW = "; all have rank 0's now"
PARTED = {
    "left out": ("model.parts.0.0.bias", f", and so did 6 more{NOW}"),
    "raw loss": ("model.parts.0.0.bias", f", and so did 6 more{NOW}"),
    "embedding": ("model.parts.1.weight", NOW),
}


@pytest.mark.parametrize("way", ALL_WAYS)
def test_where_ranks_have_parted_a_resumed_run_has_rank_zeros_bits_and_says_so(
    launched: Launched, way: str
) -> None:
    sys.path.insert(0, str(TESTS / "proofs"))
    from parted import begins_with

    parts, last, name = launched(way) / "parts", LAST[way], f"step-{LAST[way] * 3 // 5:08}"
    log = (parts / "worker_0.log").read_text()
    assert f"resumed {name}" in log
    assert begins_with(parts, parts / "checkpoints" / name) == [True, True]
    end = f"checkpoints/step-{last:08}"
    reasons = re.findall(r"not exact: (.*) differed between the ranks(.*)", log)
    if way in PARTED:
        assert reasons == [PARTED[way]]
    else:  # it had not parted yet at that checkpoint, or not at all
        same_bits(launched(way) / "whole" / end, parts / end)
        assert reasons == []


@pytest.mark.parametrize("way", ways("frozen after", long=["frozen before"]))
def test_what_is_thawed_behind_a_wrapper_is_an_error_in_that_update(
    launched: Launched, way: str
) -> None:
    for rank in (0, 1):
        [error] = (launched(way) / f"whole/errors_{rank}").read_text().splitlines()
        assert error.startswith("[10] self.model.parts.0.0.weight: was frozen when its layer was")
        assert error.endswith("unfreeze it: self.model = self.data_parallel(self.model).")


@pytest.mark.parametrize("way", ways("frozen after", long=["frozen before"]))
def test_what_is_wrapped_again_is_averaged_also_after_a_resume(
    launched: Launched, way: str
) -> None:
    for run in ("whole", "parts"):
        assert told(launched(way) / run) == []
        log = (launched(way) / run / "worker_0.log").read_text()
        assert not re.search("in no checkpoint|not exact", log)  # the new wrapper is no change
        apart = launched(way) / run / "checkpoints/step-00000020/@local_1.safetensors"
        assert {key.split("/")[1][-5:] for key in parse(apart.read_bytes())} == {"_mean", "iance"}
    # The error is raised once: the start that continues averages what the one before did.
    for rank in (0, 1):
        errors = [launched(way) / run / f"errors_{rank}" for run in ("whole", "parts")]
        assert errors[0].read_text() == errors[1].read_text()  # which was copied


KEPT = "; rank 0's is saved, so a resumed run has rank 0's on all"
CAUSES = {
    "left out": ["more" + KEPT, ": the ranks have made unlike numbers of its updates. Whether to"],
    "raw loss": [
        "differs between the ranks, and so do 6 more" + KEPT,
        " and 6 more: each rank trains a model of its own, although its layer is in data_parallel.",
    ],
    "embedding": [
        "model.parts.1.weight differs between the ranks" + KEPT,
        "model.parts.1.weight: each rank trains a model of its own, although its layer is in",
    ],
    "plateau": [
        "optimizer: the learning rate is 0.015 on rank 0 and 0.05 on rank 1",
        "and so do 6 more" + KEPT,
        "and 6 more: each rank trains with a learning rate of its own, which must come from what",
    ],
}


@pytest.mark.parametrize("way", ways("left out", long=["raw loss", "embedding", "plateau"]))
def test_what_parts_after_the_first_checkpoint_is_told_once_and_its_causes_can_be_known(
    launched: Launched, way: str
) -> None:
    whole, parts = (told(launched(way) / run) for run in ("whole", "parts"))
    for line, text in zip(whole, CAUSES[way], strict=True):
        assert text in line
    assert parts[: len(whole)] == whole  # a copy
    assert len([line for line in parts[len(whole) :] if KEPT in line]) == 1


# --- ranks that are threads --------------------------------------------------------------------


def saves(
    monkeypatch: pytest.MonkeyPatch,
    of_rank: Any,
    found: StatefulObjects | list[StatefulObjects],
    count: int,
    apart: Sequence[str] = (),
) -> list[list[str]]:
    """What each of some saves notes to differ; `of_rank` makes what a rank has then.

    Of no tensor a rank's own is saved, but for those in the files `apart`.
    """
    monkeypatch.setattr(rank_state, "_CHUNK", 1 << 12)
    founds = found if isinstance(found, list) else [found, found]

    def gathered(rank: int) -> list[list[str]]:
        gatherer = rank_state.Gatherer(LOGGER)
        make = functools.partial(of_rank, rank)
        states = [gatherer.gather(founds[rank], make(number), {}) for number in range(count)]
        assert all({*state.tensors} <= {"model", "optimizer", *apart} for state in states)
        return [json.loads(s.files()[STATE_FILE][0]).get("differing", []) for s in states]

    return Ranks(monkeypatch, 2).run(gathered)[0]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said, by each of the ranks."""
    said = [record.getMessage() for record in caplog.records]
    assert all(said.count(line) == 2 for line in said)
    return [*dict.fromkeys(said)]


def test_what_parts_is_told_once_with_its_accumulators_and_noted_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_rank(rank: int, number: int) -> Any:
        layer = {"weight": array(rank * (number == 1)), "bias": array(7 + rank * (number > 2))}
        moments = {WEIGHT: array(rank * (number == 2)), "moment1/model.bias": array(1)}
        return {"model": layer, "optimizer": moments}

    caplog.set_level("WARNING", "expbase")
    noted = saves(monkeypatch, of_rank, layer_and_optimizer(wrapped=False), 5)
    assert noted == [[], ["model.weight"], ["model.weight"], *[["model.bias", "model.weight"]] * 2]
    assert lines(caplog) == [
        f"model.{name} differs between the ranks{KEPT}" for name in ("weight", "bias")
    ]


def test_of_what_differs_rank_zeros_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(rank: int) -> Any:
        tensors = {"model": {"weight": array(rank)}, "optimizer": {WEIGHT: array(5 + rank)}}
        return rank_state.Gatherer(LOGGER).gather(layer_and_optimizer(wrapped=True), tensors, {})

    zero, _ = Ranks(monkeypatch, 2).run(gathered)
    assert zero.tensors == {"model": {"weight": array(0)}, "optimizer": {WEIGHT: array(5)}}


def test_when_a_sample_differs_all_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(rank: int, number: int) -> Any:
        table = np.zeros([ROWS, WIDTH], "float32")
        table[1999, 31] = rank * number  # where no sample comes
        return {
            "model": {"weight": Array.of(paddle.to_tensor(table)), "bias": array(rank * number)}
        }

    noted = saves(monkeypatch, of_rank, layer_and_optimizer(wrapped=True), 2)
    assert noted == [[], ["model.bias", "model.weight"]]


def test_the_sample_moves_so_that_a_row_of_an_embedding_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_rank(rank: int, number: int) -> Any:
        table = np.zeros([ROWS, WIDTH], "float32")
        table[1234] = rank * (number > 0)  # 32 elements in a row, and one in 250 is looked at
        return {"model": {"weight": Array.of(paddle.to_tensor(table))}}

    noted = saves(monkeypatch, of_rank, layer_and_optimizer(wrapped=True), 20)
    assert noted[0] == []
    assert noted[-1] == ["model.weight"]


def test_what_one_rank_alone_has_frozen_is_told_on_both_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    founds = [layer_and_optimizer(wrapped=True) for _ in range(2)]
    founds[1].layers["model"].weight.stop_gradient = True

    def of_rank(rank: int, number: int) -> Any:
        return {"model": {"weight": array(rank), "bias": array(2)}}

    caplog.set_level("WARNING", "expbase")
    assert saves(monkeypatch, of_rank, founds, 3) == [["model.weight"]] * 3
    assert lines(caplog) == [f"model.weight differs between the ranks{KEPT}"]


def test_rates_are_compared_at_each_save_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = layer_and_optimizer(wrapped=True)
    ranks = Ranks(monkeypatch, 2)

    def gathered(rank: int) -> list[Difference]:
        handed: list[Difference] = []
        gatherer = rank_state.Gatherer(LOGGER, on_difference=handed.append)
        for rate in (0.1, 0.1, 0.2, 0.3):
            optimizer = paddle.optimizer.SGD(rate * (1 + rank * (rate > 0.1)), parameters=[])
            here = StatefulObjects(found.layers, {"optimizer": optimizer}, parallel=found.parallel)
            gatherer.gather(here, {"model": {"weight": array(1)}}, {})
        return handed

    caplog.set_level("WARNING", "expbase")
    for handed in ranks.run(gathered):
        assert [(one.rates, one.owners, one.elements) for one in handed] == [
            ({"optimizer"}, {}, [])
        ]
    assert lines(caplog) == ["optimizer: the learning rate is 0.2 on rank 0 and 0.4 on rank 1"]


def test_who_asks_is_handed_on_every_rank_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def handed(rank: int) -> list[Difference]:
        of_this: list[Difference] = []
        gatherer = rank_state.Gatherer(LOGGER, on_difference=of_this.append)
        for number in range(3):
            moments = {WEIGHT: array(1, rank * number)}
            gatherer.gather(layer_and_optimizer(wrapped=True), {"optimizer": moments}, {})
        return of_this

    for [of_rank] in Ranks(monkeypatch, 2).run(handed):
        name = ("optimizer", WEIGHT)
        assert of_rank.owners == {name: "model.weight"}
        assert of_rank.elements == [{name: array(1, 0)}, {name: array(1, 1)}]
        assert of_rank.rates == set()


def test_statistics_that_a_loop_has_unfrozen_are_not_trained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = paddle.nn.BatchNorm1D(2)
    for parameter in layer.parameters():
        parameter.stop_gradient = False
    found = StatefulObjects({"model": layer}, parallel={0: layer})

    def of_rank(rank: int, number: int) -> Any:
        return {"model": {"weight": array(1), "_mean": array(rank)}}

    caplog.set_level("WARNING", "expbase")
    assert saves(monkeypatch, of_rank, found, 2, ["@local_1"]) == [[], []]
    assert caplog.records == []
