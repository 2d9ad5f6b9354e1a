"""What differs between the ranks and what one has alone: gathered, handed out, in pieces."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from starts import found_among
from tiny import DEVICE, TESTS, Tiny, make, run_script, same_bits

from expbase.base.arrays import Array
from expbase.checkpoint import model_files, rank_state, storage
from expbase.checkpoint.layout import FORMAT, CheckpointError
from expbase.checkpoint.rank_state import GatheredState
from expbase.ranks import collectives
from expbase.state.parts import StatefulObjects

PARTS = TESTS / "proofs" / "parts.py"
WORDS = ["--device", DEVICE, "--nprocs", "2", "data.expert=4", "training.max_iteration=4"]
WORDS += ["data.placed=4"]
WORDS += ["training.save_interval=2", "training.valid_interval=3", "training.log_interval=1"]
END = "checkpoints/step-00000004"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks under fleet's sharded optimizer, each with a part of its own."""
    run: Path = tmp_path_factory.mktemp("parts") / "run"
    result = run_script(PARTS, "--output", str(run), *WORDS)
    assert result.returncode == 0, result.stderr + result.stdout
    return run


def keys(path: Path) -> set[str]:
    """What a file of tensors holds."""
    return {*model_files.read_weights(path)[""]}


@pytest.mark.long
def test_a_sharded_run_continues_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / END)
    result = run_script(PARTS, "--output", str(tmp_path / "run"), *WORDS)
    assert result.returncode == 0, result.stderr
    assert "from step-00000002" in result.stderr
    assert "not exact" not in result.stderr  # a wrapper of fleet's counts its own steps
    same_bits(whole / END, tmp_path / "run" / END)


def test_what_is_local_stands_for_its_rank_and_all_else_once(whole: Path) -> None:
    names = {path.name for path in (whole / END).iterdir()}
    assert names == {
        "model.safetensors", "optimizer.safetensors", "@local_0.safetensors",
        "@local_1.safetensors", "state.json", "manifest.json",
    }  # fmt: skip
    zero, one = (keys(whole / END / f"@local_{rank}.safetensors") for rank in (0, 1))
    assert {"expert/weight", "expert_optimizer/moment1/expert.weight"} <= zero & one
    assert {"placed/weight", "placed_optimizer/moment1/placed.weight"} <= zero & one
    assert one - zero == {"model/1._mean", "model/1._variance"}
    accumulators = keys(whole / END / "optimizer.safetensors")
    moments = {key for key in accumulators if key.startswith("moment1/model.")}
    assert len(moments) == 8  # four layers with weight and bias, which two ranks have updated
    assert "differs between the ranks" not in (whole / "worker_0.log").read_text()


def test_a_model_in_pieces_is_not_taken_for_a_whole_one(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(model_files.WeightsError, match="'expert/weight' is in pieces, one"):
        model_files.read_weights(whole / END)
    sys.path.insert(0, str(TESTS / "proofs"))
    from parts import Parts

    exp = make(Parts, tmp_path / "run", {"checkpoint_path": str(whole)}, max_iteration=8)
    exp.config.data.expert = 4
    exp.setup()
    with pytest.raises(CheckpointError, match="'weight' is in pieces; expected 2 ranks that have"):
        exp.resume_or_load()
    exp.close()


def array(*values: float) -> Array:
    data = np.array(values, "float32")
    return Array("float32", data.shape, data.view(np.uint8))


class Ranks:
    """Ranks that are threads of this process, with stand-ins for what connects them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.here = threading.local()
        self.meeting = threading.Barrier(number, timeout=60)
        self.values: list[Any] = [None] * number
        for name in ("all_gather_object", "on_rank_zero", "barrier", "rank"):
            monkeypatch.setattr(collectives, name, getattr(self, name))
        monkeypatch.setattr(collectives, "world_size", lambda: number)
        monkeypatch.setattr(paddle.distributed, "broadcast", self.broadcast)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function returns for each rank."""

        def as_rank(rank: int) -> Any:
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(len(self.values)) as executor:
            return list(executor.map(as_rank, range(len(self.values))))

    def rank(self) -> int:
        return getattr(self.here, "rank", 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        self.values[self.rank()] = pickle.dumps(value)
        self.meeting.wait()
        values = [pickle.loads(of_rank) for of_rank in self.values]
        self.meeting.wait()
        return values

    def on_rank_zero(self, function: Callable[[], Any], doing: str) -> Any:
        return self.all_gather_object(None if self.rank() else function())[0]

    def barrier(self, place: str) -> None:
        self.meeting.wait()

    def broadcast(self, tensor: Any, src: int) -> None:
        values = self.all_gather_object(tensor.numpy() if self.rank() == src else None)
        tensor.set_value(values[src])


class Sharded(paddle.optimizer.Adam):
    """Knows which rank updates what, as fleet's do; here this one updates the weight alone."""

    __module__ = "paddle.of_a_test"

    def __init__(self, layer: Any) -> None:
        super().__init__(parameters=layer.parameters())
        self._param2rank = {layer.weight.name: 0, layer.bias.name: 1}
        self._optim = paddle.optimizer.Adam(parameters=[layer.weight])


def objects_of(*, piece: bool = False, sharded: bool = True) -> StatefulObjects:
    layer = paddle.nn.Linear(2, 2)
    layer.weight.is_distributed = piece
    make_one = Sharded if sharded else lambda of: paddle.optimizer.Adam(parameters=of.parameters())
    return found_among({"model": layer, "optimizer": make_one(layer)})


WEIGHT, BIAS = "m/model.weight", "m/model.bias"
LOGGER = logging.getLogger("expbase")


def opened(written: dict[str, dict[str, float]]) -> rank_state.OpenedOnRanks:
    """What a checkpoint holds."""
    flat = {(file, key): array(v) for file, of in written.items() for key, v in of.items()}
    return rank_state.OpenedOnRanks({}, b"", rank_state._outline(flat), flat, is_seen=True)


def numbers(tensors: Any) -> dict[str, list[float]]:
    return {
        f"{file}: {key}": a.data.view("float32").tolist()
        for file, arrays in tensors.items()
        for key, a in arrays.items()
    }


@pytest.mark.device
@pytest.mark.parametrize(
    ("here", "written", "num_ranks", "taken"),
    [
        # The accumulators that this rank updates now, whoever had them; all of them, if it is one
        # for whose optimizer nobody has divided them.
        (objects_of(), {"optimizer": {BIAS: 1.0, WEIGHT: 2.0}}, 2, {f"optimizer: {WEIGHT}": [2]}),
        (objects_of(), {"optimizer": {BIAS: 1.0, WEIGHT: 2.0}}, 1, {f"optimizer: {WEIGHT}": [2]}),
        (
            objects_of(sharded=False),
            {"optimizer": {BIAS: 1.0, WEIGHT: 2.0}},
            3,
            {f"optimizer: {BIAS}": [1], f"optimizer: {WEIGHT}": [2]},
        ),
        # Its own piece.
        (
            objects_of(piece=True, sharded=False),
            {"@local_0": {f"optimizer/{WEIGHT}": 1.0}, "@local_1": {f"optimizer/{WEIGHT}": 2.0}},
            2,
            {f"optimizer: {WEIGHT}": [2]},
        ),
        # What differs, if there are as many ranks; else all have what rank 0 had.
        (
            objects_of(),
            {"model": {"1._mean": 1.0}, "@local_1": {"model/1._mean": 2.0}},
            2,
            {"model: 1._mean": [2]},
        ),
        # So does what is trained, which expbase 1.0 has written for each rank.
        (
            objects_of(sharded=False),
            {
                "model": {"weight": 1.0},
                "optimizer": {WEIGHT: 3.0},
                "@local_1": {"model/weight": 2.0, f"optimizer/{WEIGHT}": 4.0},
            },
            2,
            {"model: weight": [2], f"optimizer: {WEIGHT}": [4]},
        ),
        (
            objects_of(),
            {"model": {"1._mean": 1.0}, "@local_1": {"model/1._mean": 2.0}},
            3,
            {"model: 1._mean": [1]},
        ),
    ],
)
def test_a_rank_takes_what_it_holds_now(
    here: Any, written: Any, num_ranks: int, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rank 1 of two."""
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    tensors, problems = rank_state.take(opened(written), here, num_ranks)
    assert (numbers(tensors), problems) == (taken, [])


@pytest.mark.parametrize("piece", [True, False])
def test_pieces_fit_no_other_number_of_ranks_and_no_other_layers(*, piece: bool) -> None:
    here = objects_of(piece=piece, sharded=False)
    written = {f"@local_{rank}": {f"optimizer/{WEIGHT}": 1.0} for rank in (0, 1)}
    _, problems = rank_state.take(opened(written), here, 2)
    assert problems == [
        "optimizer: 'm/model.weight' is in pieces; expected 2 ranks that have one each."
    ]


def test_what_differs_comes_to_rank_zero_in_chunks_and_what_is_the_same_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_state, "_CHUNK", 12)  # so that arrays are cut, and sent together
    found = objects_of(sharded=False)

    def gathered(rank: int) -> Any:
        tensors = {"model": {"weight": array(7), "mean": array(*[rank] * 5), "n": array(rank > 1)}}
        values = {"own": {"same": 1, "rank": rank}}
        return rank_state.Gatherer(LOGGER).gather(found, tensors, values)

    zero, *_ = Ranks(monkeypatch, 3).run(gathered)
    assert numbers(zero.tensors) == {
        "model: weight": [7], "model: mean": [0] * 5, "model: n": [0],
        "@local_1: model/mean": [1] * 5,
        "@local_2: model/mean": [2] * 5, "@local_2: model/n": [1],
    }  # fmt: skip
    assert zero.values == {"own": {"same": 1, "rank": 0}}
    assert zero.of_ranks == [{"own": {}}, {"own": {"rank": 1}}, {"own": {"rank": 2}}]


def test_accumulators_that_some_ranks_have_stand_once_and_the_first_one_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects_of()
    of_ranks: list[dict[str, Array]] = [
        {"a": array(0)}, {"a": array(1), "b": array(1)}, {"b": array(2), "c": array(2)}
    ]  # fmt: skip
    zero, *_ = Ranks(monkeypatch, 3).run(
        lambda rank: rank_state.Gatherer(LOGGER).gather(found, {"optimizer": of_ranks[rank]}, {})
    )
    assert numbers(zero.tensors) == {"optimizer: a": [0], "optimizer: b": [1], "optimizer: c": [2]}


def test_pieces_stand_once_for_each_rank_also_where_they_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects_of(piece=True, sharded=False)
    tensors = {"model": {"weight": array(1), "bias": array(3)}, "optimizer": {WEIGHT: array(2)}}
    zero, _ = Ranks(monkeypatch, 2).run(
        lambda rank: rank_state.Gatherer(LOGGER).gather(found, tensors, {})
    )
    own = {"model/weight": [1], f"optimizer/{WEIGHT}": [2]}
    pieces = {f"@local_{rank}: {key}": v for rank in (0, 1) for key, v in own.items()}
    assert numbers(zero.tensors) == {"model: bias": [3], **pieces}


@pytest.mark.device
def test_what_is_not_finite_on_another_rank_is_found_by_rank_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects_of(piece=True)

    def gathered(rank: int) -> Any:
        worse = float("nan") if rank else 1.0
        layer = {"weight": array(worse), "statistic": array(worse)}
        accumulators = {BIAS: array(worse)} if rank else {}
        tensors = {"model": layer, "optimizer": accumulators}
        return rank_state.Gatherer(LOGGER).gather(found, tensors, {}).nonfinite()

    zero, _ = Ranks(monkeypatch, 2).run(gathered)
    assert zero == "@local_1.model/weight, optimizer.m/model.bias"


def test_accumulators_that_only_some_ranks_have_are_never_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects_of(sharded=False)

    def gathered(rank: int) -> Any:
        tensors = {"optimizer": {"ab"[rank]: array(1)}}
        with pytest.raises(RuntimeError, match=r"self\.optimizer: 'a' is on some of the ranks a"):
            rank_state.Gatherer(LOGGER).gather(found, tensors, {})

    Ranks(monkeypatch, 2).run(gathered)


@pytest.mark.parametrize("blind", [(), (1,), (1, 2)])
def test_a_rank_that_does_not_see_the_checkpoint_is_sent_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: Sequence[int]
) -> None:
    monkeypatch.setattr(rank_state, "_CHUNK", 12)
    tensors = {"model": {"weight": array(7, 8)}, "optimizer": {WEIGHT: array(1), BIAS: array(2)}}
    tensors |= {f"@local_{rank}": {"model/mean": array(*[rank] * 4)} for rank in (1, 2)}
    tensors["model"]["mean"] = array(0, 0, 0, 0)
    path = storage.write(tmp_path, 4, GatheredState(tensors, {}, [{}] * 3, set()).files())
    found = objects_of()  # which updates the weight alone
    made, room = [], rank_state._room
    monkeypatch.setattr(
        rank_state, "_room", lambda part, buffer: made.append(part) or room(part, buffer)
    )

    def taken(rank: int) -> Any:
        saved = rank_state.open_checkpoint(tmp_path / "none" if rank in blind else path)
        return numbers(rank_state.take(saved, found, 3)[0]), saved.state["format"]

    of_ranks = Ranks(monkeypatch, 3).run(taken)
    for rank, (found_there, number) in enumerate(of_ranks):
        expected = {"model: weight": [7, 8], f"optimizer: {WEIGHT}": [1]}
        assert found_there == expected | {"model: mean": [rank] * 4}
        assert number == FORMAT
    assert len(made) == (2 if blind else 0)
    assert all(len(part) == 3 for part in made)


def test_shapes_of_pieces_and_of_sharded_accumulators_may_differ_between_the_ranks() -> None:
    shapes = objects_of(piece=True).shapes()
    assert shapes["self.model: 'weight'"] == "distributed"
    assert shapes["self.model: 'bias'"] == "float32 [2]"


def test_an_optimizer_and_its_wrapper_are_one_and_the_wrapper_steps() -> None:
    layer = paddle.nn.Linear(2, 2)
    wrapper = Sharded(layer)
    for attributes in ({"inner": wrapper._optim, "outer": wrapper}, {"a": wrapper, "b": wrapper}):
        assert [*found_among({"model": layer, **attributes}).optimizers.values()] == [wrapper]


def test_a_layer_in_fleets_wrapper_goes_by_its_own_names() -> None:
    from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

    layer = paddle.nn.Linear(2, 2)
    found = found_among({"model": MetaParallelBase(layer, None, None)})
    assert found.layers == {"model": layer}
    assert len(found.parallel) == 1


def test_what_divides_single_parameters_is_refused(tmp_path: Path) -> None:
    class Divided(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer._slice_params = {}

    with pytest.raises(ValueError, match=r"split_param and .* divide single parameters"):
        make(Divided, tmp_path / "run").setup()


def test_files_of_weights_are_not_made_of_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = objects_of(piece=True).layers["model"]
    model_files.write_weights(tmp_path / "one.safetensors", layer)  # one process has all of it
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    with pytest.raises(model_files.WeightsError, match="'weight' is in pieces, one on each rank"):
        model_files.write_weights(tmp_path / "two.safetensors", layer)
    with pytest.raises(model_files.WeightsError, match="is in pieces"):
        model_files.set_weights(
            model_files.read_weights(tmp_path / "one.safetensors"),
            {"model": layer},
            None,
            partial=True,
        )


@pytest.mark.skipif(
    paddle.__version__ < "3.1", reason="asks one process for the addresses of several"
)
def test_a_tensor_with_a_placement_goes_on_exactly() -> None:
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["x"])

    def made() -> tuple[Any, Any]:
        paddle.seed(3)
        layer = paddle.nn.Linear(3, 2, bias_attr=False)
        layer.weight = paddle.distributed.shard_tensor(
            layer.weight, mesh, [paddle.distributed.Shard(0)]
        )
        return layer, paddle.optimizer.Adam(0.1, parameters=layer.parameters())

    def step(layer: Any, optimizer: Any) -> None:
        layer.weight.square().mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)

    one = made()
    step(*one)
    found = found_among({"model": one[0], "optimizer": one[1]})
    assert found.pieces() == {"model.weight"}
    tensors, values = found.state_dict()
    state = (
        {
            n: {k: replace(a, source=a.data.copy()) for k, a in of.items()}
            for n, of in tensors.items()
        },
        values,
    )
    step(*one)
    other = made()
    second = found_among({"model": other[0], "optimizer": other[1]})
    assert second.problems(state) == []
    second.load_state_dict(state)
    step(*other)
    assert np.array_equal(
        one[0].weight._local_value().numpy(), other[0].weight._local_value().numpy()
    )


@pytest.mark.long
def test_the_script_of_the_docs_runs_on_two_ranks(tmp_path: Path) -> None:
    pages = [TESTS.parent / name for name in ("README.md", "docs/processes.md")]
    line, *blocks = [
        code
        for page in pages
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    sharded = next(code for code in blocks if "class Sharded" in code)
    script = tmp_path / "train.py"
    head, guard, _ = line.partition("if __name__")
    script.write_text(f'{head}{sharded}\n\n{guard} == "__main__":\n    main(Sharded)\n')
    result = run_script(script, "--device", DEVICE, "--nprocs", "2", "--smoke")
    assert result.returncode == 0, result.stderr
    assert "smoke test passed" in result.stdout
