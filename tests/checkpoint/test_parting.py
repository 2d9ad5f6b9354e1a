"""Ranks that part: what differs is found at each save, named with its cause, and kept for each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from test_rank_state import Ranks, array
from tiny import run_ranks, same_bits

from expbase.base.arrays import Array, parse
from expbase.checkpoint import parting, rank_state
from expbase.state.parts import StatefulObjects, find

LOGGER = logging.getLogger("expbase")
OWN = "each trains a model of its own"
WEIGHT = "moment1/model.weight"
ROWS, WIDTH = 2000, 32

# --- two processes -----------------------------------------------------------------------------

# A way is run whole, and again from a checkpoint in its middle, as after a kill -9. Who has
# unfrozen something wraps it again, as the error says.
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


@pytest.mark.parametrize(
    "way",
    ways("left out", long=["frozen after", "frozen before", "raw loss", "plateau", "embedding"]),
)
def test_a_run_whose_ranks_part_continues_to_the_same_bits(launched: Launched, way: str) -> None:
    end = f"checkpoints/step-{LAST[way]:08}"
    same_bits(launched(way) / "whole" / end, launched(way) / "parts" / end)
    again = f"from step-{LAST[way] * 3 // 5:08}"
    assert again in (launched(way) / "parts/worker_0.log").read_text()


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
        apart = launched(way) / run / "checkpoints/step-00000020/@local_1.safetensors"
        assert {key.split("/")[1][-5:] for key in parse(apart.read_bytes())} == {"_mean", "iance"}
    # The error is raised once: the start that continues averages what the one before did.
    for rank in (0, 1):
        errors = [launched(way) / run / f"errors_{rank}" for run in ("whole", "parts")]
        assert errors[0].read_text() == errors[1].read_text()  # which was copied


CAUSES = {
    "left out": ["the ranks have made unlike numbers of its updates. Whether to step must"],
    "raw loss": [f"and so do 6 more: {OWN}, although its layer is in data_parallel. The us"],
    "embedding": [f"model.parts.1.weight differs between the ranks: {OWN}, although"],
    "plateau": [
        "optimizer: the learning rate is 0.015 on rank 0 and 0.05 on rank 1. It must come",
        "and so do 6 more: each trains with a learning rate of its own.",
    ],
}


@pytest.mark.parametrize("way", ways("left out", long=["raw loss", "embedding", "plateau"]))
def test_what_parts_after_the_first_checkpoint_is_named_once_with_its_cause(
    launched: Launched, way: str
) -> None:
    whole, parts = (told(launched(way) / run) for run in ("whole", "parts"))
    for line, cause in zip(whole, CAUSES[way], strict=True):
        assert cause in line
    assert parts[: len(whole)] == whole  # a copy
    [again] = [line for line in parts[len(whole) :] if "differs between the ranks" in line]
    assert "From now on it is saved for each rank." in again


# --- ranks that are threads --------------------------------------------------------------------


def objects_of(*, wrapped: bool) -> StatefulObjects:
    """A layer of three parts, in a wrapper or not, and its optimizer."""
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.Adam(parameters=layer.parameters())
    found = find({"model": layer, "optimizer": optimizer})
    return StatefulObjects(found.layers, found.optimizers, parallel={0: layer} if wrapped else {})


def saves(
    monkeypatch: pytest.MonkeyPatch, of_rank: Any, found: StatefulObjects, count: int
) -> list[dict[str, list[str]]]:
    """What each of some saves keeps for rank 1, by rank 0; `of_rank` makes what a rank has then."""
    monkeypatch.setattr(rank_state, "_CHUNK", 1 << 12)

    def gathered(rank: int) -> list[list[str]]:
        gatherer = rank_state.Gatherer(LOGGER)
        states = [gatherer.gather(found, of_rank(rank, number), {}) for number in range(count)]
        return [sorted(state.tensors.get("@local_1", {})) for state in states]

    return Ranks(monkeypatch, 2).run(gathered)[0]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said, by rank 0 and not by rank 1, too."""
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said[::2]) == sorted(said[1::2]) or len({*said}) * 2 == len(said)
    return [*dict.fromkeys(said)]


def test_what_parts_is_kept_from_then_on_with_its_accumulators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_rank(rank: int, number: int) -> Any:
        layer = {"weight": array(rank * (number == 1)), "bias": array(7)}
        moments = {WEIGHT: array(rank * (number == 2)), "moment1/model.bias": array(1)}
        return {"model": layer, "optimizer": moments}

    caplog.set_level("WARNING", "expbase")
    kept = saves(monkeypatch, of_rank, objects_of(wrapped=False), 4)
    assert kept == [[], ["model/weight"], [f"optimizer/{WEIGHT}"], []]
    assert lines(caplog) == [
        f"model.weight differs between the ranks: {OWN}. Put what you train into "
        "self.data_parallel and call that in train_batch. From now on it is saved for each rank."
    ]


def test_when_a_sample_differs_all_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(rank: int, number: int) -> Any:
        table = np.zeros([ROWS, WIDTH], "float32")
        table[1999, 31] = rank * number  # where no sample comes
        return {
            "model": {"weight": Array.of(paddle.to_tensor(table)), "bias": array(rank * number)}
        }

    kept = saves(monkeypatch, of_rank, objects_of(wrapped=True), 2)
    assert kept == [[], ["model/bias", "model/weight"]]


def test_the_sample_moves_so_that_a_row_of_an_embedding_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_rank(rank: int, number: int) -> Any:
        table = np.zeros([ROWS, WIDTH], "float32")
        table[1234] = rank * (number > 0)  # 32 elements in a row, and one in 250 is looked at
        return {"model": {"weight": Array.of(paddle.to_tensor(table))}}

    kept = saves(monkeypatch, of_rank, objects_of(wrapped=True), 20)
    assert kept[0] == []
    assert kept[-1] == ["model/weight"]


def test_what_is_too_large_is_told_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parting, "MOST_BYTES", 8)

    def of_rank(rank: int, number: int) -> Any:
        large = array(*[rank] * 3) if number else array(0, 0, 0)
        return {"model": {"weight": large, "bias": array(rank if number > 1 else 0)}}

    caplog.set_level("WARNING", "expbase")
    kept = saves(monkeypatch, of_rank, objects_of(wrapped=False), 4)
    assert kept == [[], [], ["model/bias"], ["model/bias"]]
    first, second = lines(caplog)
    assert "model.weight differs" in first
    assert "NOT SAVED for each rank, but as rank 0 has it, so a run that goes on has oth" in first
    assert "model.bias differs" in second
    assert "From now on it is saved for each rank." in second


@pytest.mark.parametrize(
    ("dtype", "factor", "cause"),
    [
        ("float32", 1 + 2e-7, "differs between the ranks: in the last bits alone, as machines ro"),
        ("float32", 1.001, f"{OWN}, although its layer is in data_parallel."),
        ("bfloat16", 1.01, "in the last bits alone"),
        ("int64", 2, OWN),
    ],
)
def test_a_difference_in_the_last_bits_has_another_cause(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    factor: float,
    cause: str,
) -> None:
    def of_rank(rank: int, number: int) -> Any:
        values = paddle.linspace(1, 2, 50, "float32") * (factor if rank else 1)
        return {"model": {"weight": Array.of(values.astype(dtype)).copy()}}

    caplog.set_level("WARNING", "expbase")
    assert saves(monkeypatch, of_rank, objects_of(wrapped=True), 1) == [["model/weight"]]
    [line] = lines(caplog)
    assert cause in line


def test_rates_are_compared_at_each_save_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = objects_of(wrapped=True)
    ranks = Ranks(monkeypatch, 2)

    def gathered(rank: int) -> None:
        gatherer = rank_state.Gatherer(LOGGER)
        for rate in (0.1, 0.1, 0.2):
            optimizer = paddle.optimizer.SGD(rate * (1 + rank * (rate > 0.1)), parameters=[])
            here = StatefulObjects(found.layers, {"optimizer": optimizer}, parallel=found.parallel)
            gatherer.gather(here, {"model": {"weight": array(1)}}, {})

    caplog.set_level("WARNING", "expbase")
    ranks.run(gathered)
    [line] = lines(caplog)
    assert line.startswith("optimizer: the learning rate is 0.2 on rank 0 and 0.4 on rank 1. It m")


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
    assert saves(monkeypatch, of_rank, found, 2) == [["model/_mean"]] * 2
    assert caplog.records == []
