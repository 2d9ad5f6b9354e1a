"""Model files: every way in and out, reports, and a reader that runs nothing."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.amp.auto_cast import StateDictHook
from safetensors.paddle import load_file, save_file
from tiny import Tiny, make, trained

from expbase.base.arrays import Array, serialize
from expbase.checkpoint.best import best_of
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.model_files import (
    WeightsError,
    find_weights,
    read_weights,
    set_weights,
    write_weights,
)


def layer() -> Any:
    return paddle.nn.Sequential(paddle.nn.Linear(3, 2), paddle.nn.BatchNorm1D(2))


def content(weights: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.data.tobytes() for name, array in weights.items()}


def expected(model: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


@pytest.mark.device
@pytest.mark.parametrize("ending", [".safetensors", ".pdparams"])
def test_a_written_file_is_read_back_and_others_read_it_too(tmp_path: Path, ending: str) -> None:
    model, path = layer(), tmp_path / f"new/model{ending}"
    write_weights(path, model)
    assert content(read_weights(path)[""]) == expected(model)
    theirs = paddle.load(str(path)) if ending == ".pdparams" else load_file(path)
    other = layer()
    other.set_state_dict(theirs)
    assert expected(other) == expected(model)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


class Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_a_malicious_pdparams_does_not_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pdparams"
    path.write_bytes(pickle.dumps({"0.weight": np.ones(3), "evil": Malicious()}))
    with pytest.raises(WeightsError, match=r"names '.*\.mkdir', which weights do not need"):
        read_weights(path)
    assert not (tmp_path / "harm").exists()


CRASHING = b"})" + b"\x85" * 1_000_000 + b"K\x01s."  # a key whose hash Python cannot make


@pytest.mark.parametrize(
    "data",
    [b"", pickle.dumps({"a": 1})[:5], pickle.dumps([1]), CRASHING],
    ids=["empty", "cut", "list", "crashing"],  # an id stands in the environment, which is small
)
def test_what_is_no_model_file_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pdparams"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"x\.pdparams: cannot be read: .*[a-z]") as caught:
        read_weights(path)
    assert ("Convert it to safetensors" in str(caught.value)) == (data is CRASHING)


def test_an_unknown_ending_is_an_error_both_ways(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(WeightsError, match="is of an unknown kind; expected a checkpoint dir"):
        read_weights(tmp_path / "model.pt")
    with pytest.raises(WeightsError, match=r"ends in '\.pt'; expected \.safetensors or \.pdparams"):
        write_weights(tmp_path / "out.pt", layer())


def in_parts(directory: Path, model: Any, *, index: str = "model.safetensors.index.json") -> Path:
    """The files of a model in two parts, as Hugging Face and PaddleFormers write them."""
    arrays = {name: Array.of(tensor) for name, tensor in model.state_dict().items()}
    directory.mkdir()
    places = {}
    for number, part in enumerate((sorted(arrays)[::2], sorted(arrays)[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        (directory / file).write_bytes(b"".join(serialize({name: arrays[name] for name in part})))
        places |= dict.fromkeys(part, file)
    content = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / index).write_text(json.dumps(content))
    return directory


def test_a_model_in_parts_is_read_by_its_directory_or_its_index(tmp_path: Path) -> None:
    model = layer()
    directory = in_parts(tmp_path / "parts", model)
    for path in (directory, directory / "model.safetensors.index.json"):
        assert content(read_weights(find_weights(path))[""]) == expected(model)
    variant = in_parts(tmp_path / "fp16", model, index="model.fp16.safetensors.index.json")
    path = variant / "model.fp16.safetensors.index.json"
    assert content(read_weights(path)[""]) == expected(model)
    write_weights(tmp_path / "one/model.safetensors", model)
    assert content(read_weights(find_weights(tmp_path / "one"))[""]) == expected(model)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}',
     "{"],
)  # fmt: skip
def test_a_wrong_index_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_bytes(b"")
    path = tmp_path / "parts/model.safetensors.index.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(WeightsError, match=r"cannot be read: .*model\.safetensors\.index\.json"):
        read_weights(find_weights(path.parent))


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = in_parts(tmp_path / "parts", layer())
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"No such file .*model-00002-of-00002\.safetensors"):
        read_weights(find_weights(directory))


# --- in an experiment --------------------------------------------------------------------------


def weights_of(exp: Any) -> dict[str, bytes]:
    return expected(exp.unwrap(exp.model))


def ready(output: Path, experiment: type[Tiny] = Tiny, **args: Any) -> Any:
    exp = make(experiment, output, args)
    exp.setup()
    return exp


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has ended, with checkpoints of 3 and 6."""
    output = tmp_path_factory.mktemp("model_files") / "first"
    return trained(Tiny, output, monitor="accuracy", save_interval=3, valid_interval=3)


@pytest.mark.device
def test_weights_alone_are_loaded_from_everything(tmp_path: Path, first: Any) -> None:
    for name in ("model.safetensors", "model.pdparams"):
        first.save_model(tmp_path / name)
    run = first.output_dir
    places = [run, run / "checkpoints/step-00000006", *sorted(tmp_path.glob("model.*"))]
    for path in places:
        exp = ready(tmp_path / f"from_{path.name}", init_model_path=str(path))
        exp.resume_or_load()
        assert weights_of(exp) == weights_of(first), path
        assert (exp.iteration, exp.epoch) == (0, 0)
        assert not exp.optimizer._accumulators
        exp.close()


def test_of_a_run_the_newest_one_is_loaded_and_the_log_names_it(tmp_path: Path, first: Any) -> None:
    run = first.output_dir
    (best, *_), *_ = best_of(run)
    exp = ready(tmp_path / "second")
    names = {"": 6, "last": 6, "best": best, "3": 3, "step-3": 3, "checkpoints/step-00000003": 3}
    for name, iteration in names.items():
        path = run / f"checkpoints/step-{iteration:08}"
        exp.load_model(run / name)
        assert weights_of(exp) == content(read_weights(path)["model"]), name
        text = (tmp_path / "second/worker_0.log").read_text()
        assert f"loaded model from {path}: " in text.splitlines()[-1], name
    with pytest.raises(CheckpointError, match="there are: step-00000003"):
        exp.load_model(run / "7")
    exp.close()


class Wider(Tiny):
    def setup_model(self) -> None:
        net = paddle.nn.Sequential(
            paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Dropout(0.2),
            paddle.nn.Linear(8, 3), paddle.nn.Linear(3, 2),
        )  # fmt: skip
        self.model = net
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())


@pytest.mark.device
def test_what_does_not_fit_is_told_in_a_table_and_changes_nothing(
    tmp_path: Path, first: Any
) -> None:
    exp = ready(tmp_path / "second", Wider)
    before = weights_of(exp)
    with pytest.raises(WeightsError) as caught:
        exp.load_model(first.output_dir)
    text = str(caught.value)
    assert "6 fitted" in text
    assert "4.weight: missing in the file." in text
    assert "3.weight is float32 [8, 2] in the file and float32 [8, 3] here." in text
    assert "--init_partial" in text
    assert weights_of(exp) == before
    exp.load_model(first.output_dir, partial=True)
    after = weights_of(exp)
    assert {name for name in after if after[name] != before[name]} >= {"0.weight", "1._mean"}
    assert after["3.weight"] == before["3.weight"]
    exp.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_another_precision_are_converted_and_the_log_says_so(
    tmp_path: Path, dtype: str
) -> None:
    class Half(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.model[0].to(dtype=dtype)

    half, single = ready(tmp_path / "half", Half), ready(tmp_path / "single")
    text = f"8 fitted\n  2 of them converted: 0.weight from float32 to {dtype}\n"
    single.save_model(tmp_path / "single.safetensors")
    half.load_model(tmp_path / "single.safetensors")
    assert text in (tmp_path / "half/worker_0.log").read_text()
    rounded = single.model[0].weight.astype(dtype)
    assert half.model[0].weight.numpy().tobytes() == rounded.numpy().tobytes()
    half.save_model(tmp_path / "half.safetensors")
    single.load_model(tmp_path / "half.safetensors")
    assert (single.model[0].weight == rounded.astype("float32")).all()
    if dtype == "float16":  # which cannot hold what the other one can
        single.model[0].weight.set_value(paddle.full([4, 8], 1e6))
        single.save_model(tmp_path / "large.safetensors")
        with pytest.raises(
            WeightsError, match=r"0\.weight is float32 \[4, 8\] with numbers too la"
        ):
            half.load_model(tmp_path / "large.safetensors")
        half.load_model(tmp_path / "large.safetensors", partial=True)
        assert half.model[0].weight.isfinite().all()
    half.close()
    single.close()


def test_a_layer_says_itself_what_its_state_dict_holds(tmp_path: Path) -> None:
    class Averaged(paddle.nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {"weight": self.mean, "bias": self.bias}

    layer = Averaged(8, 2)
    layer.mean = paddle.ones([8, 2])
    write_weights(tmp_path / "mean.safetensors", layer)
    layer.mean.set_value(paddle.zeros([8, 2]))
    before = layer.weight.tolist()
    found = read_weights(tmp_path / "mean.safetensors")
    set_weights(found, {"": layer}, None, partial=False, optimizers=[])
    assert layer.mean.tolist() == [[1, 1]] * 8
    assert layer.weight.tolist() == before


def test_weights_are_loaded_into_a_layer_whose_state_dict_gives_copies(tmp_path: Path) -> None:
    exp = ready(tmp_path / "run")
    exp.save_model(tmp_path / "first.safetensors")
    before = weights_of(exp)
    for part in exp.model.sublayers(include_self=True):  # as paddle.amp.decorate(save_dtype=…)
        part.register_state_dict_hook(StateDictHook("float64"))
    exp.model[0].weight.set_value(paddle.zeros([4, 8]))
    exp.load_model(tmp_path / "first.safetensors")
    exp.close()
    assert exp.model[0].weight.numpy().tobytes() == before["0.weight"]


class Parts(Tiny):
    """Two models and something without weights."""

    first = "body"

    def setup_model(self) -> None:
        body, self.head = paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 2)
        self.model = None
        self.act = paddle.nn.ReLU()
        setattr(self, self.first, body)
        parameters = [*body.parameters(), *self.head.parameters()]
        self.optimizer = paddle.optimizer.Adam(0.1, parameters=parameters)


class Renamed(Parts):
    first = "encoder"


def test_a_layer_that_gets_no_weights_at_all_is_an_error(tmp_path: Path) -> None:
    exp = ready(tmp_path / "first", Parts)
    exp.head.weight.set_value(paddle.zeros([8, 2]))
    exp.resume_or_load()
    exp.save()
    exp.close()
    again = ready(tmp_path / "again", Parts, init_model_path=str(tmp_path / "first"))
    again.resume_or_load()
    assert expected(again.body) == expected(exp.body)
    again.close()
    renamed = ready(tmp_path / "renamed", Renamed, init_model_path=str(tmp_path / "first"))
    before = expected(renamed.head)
    with pytest.raises(WeightsError) as caught:
        renamed.resume_or_load()
    text = str(caught.value)
    assert "head: 2 fitted\nact: 0 fitted" in text
    assert "the weights do not fit; there are body, head:" in text
    assert "encoder: 0 fitted\n  weight: missing in the file" in text
    assert "--init_partial" in text
    assert expected(renamed.head) == before != expected(exp.head)
    renamed.close()
    path = str(tmp_path / "first")
    partly = ready(tmp_path / "partly", Renamed, init_model_path=path, init_partial=True)
    partly.resume_or_load()
    assert expected(partly.head) == expected(exp.head)
    partly.close()


def test_nothing_that_fits_is_an_error_even_for_a_part(tmp_path: Path) -> None:
    exp = ready(tmp_path / "run")
    write_weights(tmp_path / "other.safetensors", paddle.nn.Conv2D(1, 1, 3))
    for partial in (True, False):
        with pytest.raises(WeightsError, match="weight: in the file, and not here") as caught:
            exp.load_model(tmp_path / "other.safetensors", partial=partial)
        assert "--init_partial" not in str(caught.value)  # which would help nobody
    exp.close()


def test_with_several_models_one_says_which(tmp_path: Path) -> None:
    class Two(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.generator, self.critic, self.model = self.model, paddle.nn.Linear(2, 2), None

    exp = ready(tmp_path / "run", Two)
    exp.save_model(tmp_path / "critic.safetensors", exp.critic)
    with pytest.raises(WeightsError, match=r"self has generator, critic; .*: into=NAME"):
        exp.load_model(tmp_path / "critic.safetensors")
    with pytest.raises(WeightsError, match=r"into='judge' given, and self has generator, critic"):
        exp.load_model(tmp_path / "critic.safetensors", into="judge")
    before = expected(exp.critic)
    exp.critic.weight.set_value(paddle.zeros([2, 2]))
    exp.load_model(tmp_path / "critic.safetensors", into="critic")
    assert expected(exp.critic) == before
    exp.close()


def test_the_own_checkpoint_goes_before_the_weights_to_start_from(
    tmp_path: Path, first: Any
) -> None:
    run = trained(Tiny, tmp_path / "run", max_iteration=2)
    exp = ready(tmp_path / "run", init_model_path=str(first.output_dir))
    exp.resume_or_load()
    assert weights_of(exp) == weights_of(run) != weights_of(first)
    exp.close()


def test_weights_by_other_names_are_renamed(tmp_path: Path) -> None:
    exp = ready(tmp_path / "run")
    wanted = {name: np.full(t.shape, 2, "float32") for name, t in exp.model.state_dict().items()}
    theirs = {f"encoder.{name}": paddle.to_tensor(array) for name, array in wanted.items()}
    path = tmp_path / "theirs.safetensors"
    save_file(theirs, path)
    exp.load_model(path, rename=lambda name: name.removeprefix("encoder."))
    assert weights_of(exp) == {name: array.tobytes() for name, array in wanted.items()}

    odd, *rest = sorted(theirs)
    save_file(
        {name.removeprefix("encoder."): theirs[name] for name in rest} | {"odd": theirs[odd]}, path
    )
    exp.model.set_state_dict({name: tensor * 0 for name, tensor in exp.model.state_dict().items()})
    exp.load_model(path, rename={"odd": odd.removeprefix("encoder.")})
    assert weights_of(exp) == {name: array.tobytes() for name, array in wanted.items()}

    before = weights_of(exp)
    with pytest.raises(WeightsError, match="rename: gives several weights the same name"):
        exp.load_model(path, rename=lambda name: "x")
    with pytest.raises(WeightsError, match="x: in the file, and not here"):
        exp.load_model(path, rename={"odd": "x"})
    assert weights_of(exp) == before
    exp.close()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.js"])
def test_a_pipe_in_the_place_of_a_model_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    directory = in_parts(tmp_path / "parts", layer())
    (pipe,) = directory.glob(f"{name}*")
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(WeightsError, match="no regular file"):
        read_weights(directory / "model.safetensors.index.json")
    os.mkfifo(tmp_path / "x.pdparams")
    with pytest.raises(WeightsError, match="no regular file"):
        read_weights(tmp_path / "x.pdparams")


def test_of_a_run_that_is_not_there_the_directory_is_named(tmp_path: Path) -> None:
    text = r"nowhere: there is no such directory; expected the output directory of a run\."
    for name in ("best", "7"):
        with pytest.raises(CheckpointError, match=text):
            find_weights(tmp_path / "nowhere" / name)
