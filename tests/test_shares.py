"""What a rank holds alone: shares of a checkpoint, several writers, sharded optimizers, pieces."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import TESTS, Tiny, make, run_script, same_bits

from expbase import distributed
from expbase.state import checkpoint, shares, sharing, weights
from expbase.state.arrays import Array
from expbase.state.checkpoint import CheckpointError
from expbase.state.objects import StatefulObjects, find
from expbase.state.snapshot import Snapshot

PARTS = TESTS / "proofs" / "parts.py"
WORDS = ["--device", "cpu", "--nprocs", "2", "data.expert=4", "training.max_iteration=6"]
WORDS += ["data.placed=4"]
WORDS += ["training.save_interval=2", "training.valid_interval=3", "training.log_interval=1"]
END = "checkpoints/step-00000006"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks under fleet's sharded optimizer, each with a part of its own."""
    run: Path = tmp_path_factory.mktemp("parts") / "run"
    result = run_script(PARTS, "--output", str(run), *WORDS)
    assert result.returncode == 0, result.stderr + result.stdout
    return run


def keys(path: Path) -> set[str]:
    """What a file of tensors holds."""
    return {*weights.read_weights(path)[""]}


def test_a_sharded_run_continues_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for iteration in (4, 6):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{iteration:08}")
    result = run_script(PARTS, "--output", str(tmp_path / "run"), *WORDS)
    assert result.returncode == 0, result.stderr
    assert "from step-00000002" in result.stderr
    same_bits(whole / END, tmp_path / "run" / END)


def test_each_rank_writes_what_it_holds_alone_and_the_rest_is_there_once(whole: Path) -> None:
    names = {path.name for path in (whole / END).iterdir()}
    assert names == {
        "model.safetensors", "@share_0.safetensors", "@share_1.safetensors",
        "@rank_1.safetensors", "state.json", "manifest.json",
    }  # fmt: skip
    zero, one = (keys(whole / END / f"@share_{rank}.safetensors") for rank in (0, 1))
    assert {"expert/weight", "expert_optimizer/moment1/expert.weight"} <= zero & one
    assert {"placed/weight", "placed_optimizer/moment1/placed.weight"} <= zero & one
    moments = [
        {key for key in of if key.startswith("optimizer/moment1/model.")} for of in (zero, one)
    ]
    assert not moments[0] & moments[1]
    assert len(moments[0] | moments[1]) == 8  # four layers with weight and bias
    assert keys(whole / END / "@rank_1.safetensors") == {"model/1._mean", "model/1._variance"}
    assert "differs between the ranks" not in (whole / "worker_0.log").read_text()


def test_a_model_in_pieces_is_not_taken_for_a_whole_one(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError, match="'expert/weight' is in pieces, one for each"):
        weights.read_weights(whole / END)
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


def two_ranks(monkeypatch: pytest.MonkeyPatch, gathered: Callable[[Any], list[Any]]) -> None:
    """Makes this process rank 0 of two; `gathered` gives the values of both."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "gather_objects", gathered)


def snapshot(path: Path, number: float = 1.0) -> Snapshot:
    """Of a rank that has one number."""
    file = f"@share_{distributed.rank()}"
    return Snapshot({file: {"model/x": array(number)}}, {}, [], {(file, "model/x")}, path=path)


def write_as_rank_one(monkeypatch: pytest.MonkeyPatch, path: Path, number: float = 1.0) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: 1)
        shares.write(snapshot(path, number))


def test_a_checkpoint_of_several_writers_appears_with_the_files_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.begin(tmp_path, 4)
    write_as_rank_one(monkeypatch, path)
    entries, bad = shares.write_together(snapshot(path), "")
    assert not bad
    assert checkpoint.listed(tmp_path) == []
    saved = checkpoint.write(tmp_path, 4, {}, {}, entries)
    files = ["@share_0.safetensors", "@share_1.safetensors", "state.json"]
    assert sorted(checkpoint.verify(saved)["files"]) == files
    assert {file.name for file in saved.iterdir()} == {*files, "manifest.json"}


def test_a_share_that_does_not_come_is_an_error_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    path = checkpoint.begin(tmp_path, 4)
    (path / "@share_2.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="rank 1 has not written its share"):
        shares.write_together(snapshot(path), "")
    assert not path.exists()


def test_a_file_that_gets_its_name_while_rank_zero_looks_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "entry_1.json.part").symlink_to("gone")  # listed, and not there any more
    (tmp_path / "share").write_bytes(b"four")
    assert shares._size(tmp_path) == 4


def test_a_rank_that_cannot_write_is_named_and_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.begin(tmp_path, 4)

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        real, calls = checkpoint.add, iter([full])
        patch.setattr(checkpoint, "add", lambda *args: next(calls, real)(*args))
        with pytest.raises(CheckpointError, match="No space left"):
            write_as_rank_one(monkeypatch, path)
    with pytest.raises(CheckpointError, match=r"No space left on device \(rank 1\)"):
        shares.write_together(snapshot(path), "")
    assert not path.exists()


def test_what_is_not_finite_on_one_rank_keeps_all_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.begin(tmp_path, 4)
    write_as_rank_one(monkeypatch, path, float("nan"))
    _, bad = shares.write_together(snapshot(path), "model.y")
    assert bad == "model.y, @share_1.model/x"
    assert not path.exists()


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
    return find({"model": layer, "optimizer": make_one(layer)})


WEIGHT, BIAS = "optimizer/m/model.weight", "optimizer/m/model.bias"


@pytest.mark.parametrize(
    ("here", "written", "rank", "taken"),
    [
        # The accumulators that this rank updates now, whoever wrote them.
        (objects_of(), {0: {BIAS: 1.0}, 1: {WEIGHT: 2.0}}, 0, {"m/model.weight": 2.0}),
        (objects_of(), {0: {BIAS: 1.0, WEIGHT: 2.0}}, None, {"m/model.weight": 2.0}),
        # All of them in a process alone.
        (
            objects_of(sharded=False),
            {0: {BIAS: 1.0}, 1: {WEIGHT: 2.0}},
            None,
            {"m/model.weight": 2.0, "m/model.bias": 1.0},
        ),
        # Its own piece.
        (
            objects_of(piece=True, sharded=False),
            {0: {WEIGHT: 1.0}, 1: {WEIGHT: 2.0}},
            1,
            {"m/model.weight": 2.0},
        ),
    ],
)
def test_a_rank_takes_what_it_holds_now(here: Any, written: Any, rank: Any, taken: Any) -> None:
    files = {f"@share_{n}": {k: array(v) for k, v in of.items()} for n, of in written.items()}
    assert shares.take(here, files, rank) == []
    found = {key: float(a.data.view("float32")[0]) for key, a in files["optimizer"].items()}
    assert found == taken


@pytest.mark.parametrize("piece", [True, False])
def test_pieces_fit_no_other_number_of_ranks_and_no_other_layers(*, piece: bool) -> None:
    here = objects_of(piece=piece, sharded=False)
    files = {"@share_0": {WEIGHT: array(1)}, "@share_1": {WEIGHT: array(2)}}
    assert shares.take(here, files, None) == [
        "optimizer: 'm/model.weight' is in pieces; expected 2 ranks that have one each."
    ]


def test_of_what_one_process_has_saved_a_rank_takes_its_share() -> None:
    files = {"optimizer": {"m/model.weight": array(1), "m/model.bias": array(2)}}
    shares.take(objects_of(), files, None)
    assert [*files["optimizer"]] == ["m/model.weight"]


def test_what_several_ranks_have_of_a_share_is_written_by_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects_of()
    tensors = {"optimizer": {"m/model.weight": array(1, 2)}, "model": {"bias": array(3)}}
    two_ranks(monkeypatch, lambda own: [own, own])
    rest, share, others = shares.split(found, tensors)
    assert (rest, [*share["@share_0"]], others) == ({"model": tensors["model"]}, [WEIGHT], 0)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    _, share, others = shares.split(found, tensors)
    assert (share, others) == ({"@share_1": {}}, 8)


def test_pieces_are_written_by_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects_of(piece=True, sharded=False)
    tensors = {"model": {"weight": array(1), "bias": array(3)}}
    two_ranks(monkeypatch, lambda own: [{n.replace("/1", "/0"): 4 for n in own}, own])
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    rest, share, others = shares.split(found, tensors)
    assert rest == {"model": {"bias": tensors["model"]["bias"]}}
    assert ([*share["@share_1"]], others) == (["model/weight"], 4)


def test_ranks_that_do_not_see_the_directory_are_an_error_at_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks(monkeypatch, lambda own: [own, True])
    with pytest.raises(ValueError, match=r"1 of the ranks do not see .*expected one that all see"):
        shares.expected(objects_of(), tmp_path)
    assert [*tmp_path.iterdir()] == []
    two_ranks(monkeypatch, lambda own: [own, own])
    assert shares.expected(objects_of(), tmp_path)
    assert not shares.expected(objects_of(sharded=False), tmp_path)


def test_accumulators_that_only_some_ranks_have_are_never_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gathered(own: Any) -> list[Any]:
        return [own, {("optimizer", "b")}]

    two_ranks(monkeypatch, gathered)
    with pytest.raises(RuntimeError, match=r"self\.optimizer: 'a' is on 1 of the ranks alone"):
        sharing.check_names({("optimizer", "a")})


def test_shapes_of_pieces_and_of_sharded_accumulators_may_differ_between_the_ranks() -> None:
    shapes = objects_of(piece=True).shapes()
    assert shapes["self.model: 'weight'"] == "distributed"
    assert shapes["self.model: 'bias'"] == "float32 [2]"


def test_an_optimizer_and_its_wrapper_are_one_and_the_wrapper_steps() -> None:
    layer = paddle.nn.Linear(2, 2)
    wrapper = Sharded(layer)
    for attributes in ({"inner": wrapper._optim, "outer": wrapper}, {"a": wrapper, "b": wrapper}):
        assert [*find({"model": layer, **attributes}).optimizers.values()] == [wrapper]


def test_a_layer_in_fleets_wrapper_goes_by_its_own_names() -> None:
    from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

    layer = paddle.nn.Linear(2, 2)
    found = find({"model": MetaParallelBase(layer, None, None)})
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
    weights.write_weights(tmp_path / "one.safetensors", layer)  # one process has all of it
    two_ranks(monkeypatch, lambda own: [own, own])
    with pytest.raises(weights.WeightsError, match="'weight' is in pieces, one on each rank"):
        weights.write_weights(tmp_path / "two.safetensors", layer)
    with pytest.raises(weights.WeightsError, match="is in pieces"):
        weights.load(
            weights.read_weights(tmp_path / "one.safetensors"), {"model": layer}, None, partial=True
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
    found = find({"model": one[0], "optimizer": one[1]})
    assert found.pieces() == {"model.weight"}
    tensors, values = found.state_dict()
    state = {n: {k: a.copy() for k, a in of.items()} for n, of in tensors.items()}, values
    step(*one)
    other = made()
    second = find({"model": other[0], "optimizer": other[1]})
    assert second.problems(state) == []
    second.load_state_dict(state)
    step(*other)
    assert np.array_equal(
        one[0].weight._local_value().numpy(), other[0].weight._local_value().numpy()
    )


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
    result = run_script(script, "--device", "cpu", "--nprocs", "2", "--smoke")
    assert result.returncode == 0, result.stderr
    assert "smoke test passed" in result.stdout
