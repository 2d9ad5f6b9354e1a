"""Parts with declared inputs and outputs: readers, heads, what they predict, write and export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.io import DataLoader
from paddle.static import InputSpec
from tiny import curve, make, same_bits, trained

from expbase import Config
from expbase.extras.components import Backbone, Composed, Head, MultiHead, Reader, Task, multi_head

POINT = InputSpec([-1, 4], "float32", "point")
LABEL = InputSpec([-1], "int64", "label")
FEATURE = InputSpec([None, 8], "float32", "feature")
LOSS = InputSpec([], "float32", "loss")
SCORE = InputSpec([-1, 2], "float32", "score")


class Points(Reader):
    """Points in the plane, and on which side of it they lie."""

    outputs_attr = (POINT, LABEL, InputSpec([-1], "float32", "weight"))

    def __init__(self, phase: str = "train", size: int = 24, seed: int = 0) -> None:
        super().__init__(phase)
        self.points = np.random.RandomState(seed).randn(size, 4).astype("float32")

    def __len__(self) -> int:
        return len(self.points)

    def sample(self, index: int) -> dict[str, Any]:
        point = self.points[index]
        return {"point": point, "label": int(point.sum() > 0), "weight": np.float32(1)}

    def get_epoch_outputs(self) -> dict[str, Any]:
        return {"size": len(self)}


class Net(Backbone):
    inputs_attr = (POINT,)
    outputs_attr = (FEATURE,)

    def __init__(self, phase: str = "train") -> None:
        super().__init__(phase)
        self.linear = paddle.nn.Linear(4, 8)

    def forward(self, inputs: Any) -> dict[str, Any]:
        return {"feature": F.relu(self.linear(inputs["point"]))}


class Classify(Head):
    epoch_inputs_attrs: ClassVar[Any] = {"reader": ["size"]}

    def __init__(self, phase: str = "train") -> None:
        super().__init__(phase)
        self.linear = paddle.nn.Linear(8, 2)

    @property
    def inputs_attrs(self) -> Any:  # type: ignore[override]
        trains = self.phase == "train"
        return {"backbone": [FEATURE], **({"reader": [LABEL]} if trains else {})}

    @property
    def outputs_attr(self) -> Any:  # type: ignore[override]
        return [LOSS] if self.phase == "train" else [SCORE]

    def forward(self, inputs: Any) -> dict[str, Any]:
        score = self.linear(inputs["backbone"]["feature"])
        if self.phase == "predict":
            return {"score": score}
        return {"loss": F.cross_entropy(score, inputs["reader"]["label"])}

    def epoch_postprocess(self, post_inputs: Any = None, output_dir: Any = None) -> None:
        self.last_inputs = post_inputs
        super().epoch_postprocess(post_inputs, output_dir)


def composed(**heads: Head) -> Composed:
    return Composed(Net(), heads or {"one": Classify(), "other": Classify()})


# --- readers ---------------------------------------------------------------------------------


def test_a_reader_yields_only_what_somebody_registered_for() -> None:
    reader = Points()
    assert reader[0] == {}
    reader.register_with(composed())
    assert sorted(reader[0]) == ["label", "point"]
    reader.require_attr("weight")
    assert sorted(reader[0]) == ["label", "point", "weight"]
    assert reader.num_examples == 24


def test_a_clone_is_independent_of_its_original() -> None:
    reader = Points()
    reader.register_with(composed())
    clone = reader.clone("predict")
    assert clone[0] == {}
    clone.register_with(composed())
    assert (sorted(clone[0]), sorted(reader[0])) == (["point"], ["label", "point"])
    assert (clone.phase, reader.phase) == ("predict", "train")
    with pytest.raises(ValueError, match="phase: 'valid' given; expected train or predict"):
        reader.clone("valid").register_with(composed())


def test_a_reader_registers_with_a_backbone_alone_too() -> None:
    reader = Points()
    reader.register_with(Net("train"))  # as PALM's take a phase
    assert sorted(reader[0]) == ["point"]


def test_what_palm_calls_otherwise_is_named_before_training() -> None:
    class Iterated(Reader):
        def _iterator(self) -> Any: ...

    class Built(Net):
        forward = Backbone.forward

        def build(self, inputs: Any) -> Any: ...

    class BuiltHead(Head):
        def build(self, inputs: Any, scope_name: str = "") -> Any: ...

    class Empty(Head): ...

    for make_it, start, is_of_palm in (
        (
            lambda: len(Iterated()),
            "Iterated.__len__: not defined; expected `def __len__(self):`",
            1,
        ),
        (lambda: Iterated().sample(0), "Iterated.sample: not defined; expected `def sample(", 1),
        (lambda: Composed(Built(), {}), "Built.forward: not defined; expected `def forward(", 1),
        (lambda: composed(a=BuiltHead()), "BuiltHead.forward: not defined; expected `def f", 1),
        (lambda: composed(a=Empty()), "Empty.forward: not defined; expected `def forward(", 0),
        (
            lambda: Built()({}),
            "Built.forward: not defined; expected `def forward(self, inputs):`",
            1,
        ),
    ):
        with pytest.raises(NotImplementedError) as caught:
            make_it()
        assert str(caught.value).startswith(start)
        theirs = "_iterator" if "Iterated" in start else "build"
        tail = f"in place of {theirs}, PALM's name, which nothing calls here. docs/moving/palm.md"
        assert (tail in str(caught.value)) == bool(is_of_palm)


def test_a_reader_that_has_not_what_a_model_takes_is_refused() -> None:
    reader = type("Points", (Points,), {"outputs_attr": (POINT,)})()
    with pytest.raises(ValueError, match="reader Points: 'label' is asked for; it returns point"):
        reader.register_with(composed())


GOOD = {"point": paddle.ones([3, 4]), "label": paddle.ones([3], "int64")}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"point": paddle.ones([3, 4], "float64")},
            "backbone Net takes 'point', float32 [-1, 4]; it is float64 [3, 4].",
        ),
        ({"point": paddle.ones([3, 5])}, "float32 [-1, 4]; it is float32 [3, 5]."),
        ({"point": paddle.ones([4])}, "float32 [-1, 4]; it is float32 [4]."),
        (
            {"label": paddle.ones([3, 1], "int64")},
            "head one takes from its reader 'label', int64 [-1]; it is int64 [3, 1].",
        ),
    ],
)
def test_a_batch_that_is_not_as_it_was_declared_is_named(changed: Any, message: str) -> None:
    model = composed()
    assert model(GOOD, "one")["loss"].shape == []
    with pytest.raises(ValueError, match=re.escape(message)):
        model({**GOOD, **changed}, "one")


def test_a_batch_of_a_reader_that_nobody_registered_with_is_named() -> None:
    message = "backbone Net takes 'point', float32 [-1, 4]; there is nothing."
    with pytest.raises(ValueError, match=re.escape(message)):
        composed()({}, "one")
    message = "head one takes from its reader 'label', int64 [-1]; there is point."
    with pytest.raises(ValueError, match=re.escape(message)):
        composed()({"point": GOOD["point"]}, "one")


def test_what_a_part_returns_is_compared_with_its_declaration() -> None:
    class Lying(Net):
        outputs_attr = (InputSpec([-1, 9], "float32", "feature"),)

    with pytest.raises(
        ValueError, match=r"backbone Lying returns 'feature', .*; it is float32 \[3"
    ):
        Composed(Lying(), {"a": Classify()})(GOOD, "a")

    class Silent(Classify):
        def forward(self, inputs: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(ValueError, match=r"head a returns 'loss', float32 \[\]; there is nothing"):
        composed(a=Silent())(GOOD, "a")


def after(component: str) -> Any:
    """A class of heads that take another head's scores and train both."""

    class After(Classify):
        def __init__(self, phase: str = "train") -> None:
            super().__init__(phase)
            self.linear = paddle.nn.Linear(2, 2)

        @property
        def inputs_attrs(self) -> Any:  # type: ignore[override]
            reader = {"reader": [LABEL]} if self.phase == "train" else {}
            return {component: [SCORE], **reader}

        def forward(self, inputs: Any) -> dict[str, Any]:
            before = inputs[component]["score"]
            return super().forward({**inputs, "backbone": {"feature": before}})

    return After


class Scores(Classify):
    """Returns its scores in training, too."""

    @property
    def outputs_attr(self) -> Any:  # type: ignore[override]
        return [LOSS, SCORE] if self.phase == "train" else [SCORE]

    def forward(self, inputs: Any) -> dict[str, Any]:
        score = self.linear(inputs["backbone"]["feature"])
        return {"score": score, "loss": score.mean()}


def test_a_head_takes_what_another_head_returns(tmp_path: Path) -> None:
    model = composed(one=Scores(), two=after("one")(), three=after("one")())
    outputs = model(GOOD, "two")
    outputs["loss"].backward()
    with_gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    assert with_gradients == {n for n, _ in model.named_parameters() if "three" not in n}
    predicted = model({"point": GOOD["point"]}, "two", "predict")
    direct = model.heads["two"].linear(
        model.heads["one"].linear(model.backbone({"point": GOOD["point"]})["feature"])
    )
    assert np.array_equal(predicted["score"].numpy(), direct.numpy())

    inputs, layer = model.for_export("two")
    paddle.jit.save(layer, str(tmp_path / "two"), input_spec=inputs)
    loaded = paddle.jit.load(str(tmp_path / "two"))(GOOD["point"])
    assert np.allclose(loaded.numpy(), direct.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (
            {"a": after("b")},
            "head a takes from 'b'; expected reader, backbone or a head of the model, which has a.",
        ),
        ({"a": after("b"), "b": after("a")}, "head a: takes its own output: a ← b ← a."),
        ({"reader": Classify}, "head 'reader': means the reader here. Give it another name."),
        (
            {"a": type("Old", (Classify,), {"outputs_attr": {"score": [[-1, 2], "float32"]}})},
            "head a: outputs_attr: {'score': [[-1, 2], 'float32']} given; expected a list of Input",
        ),
    ],
)
def test_what_a_model_cannot_be_composed_of_is_named(heads: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        composed(**{name: head() for name, head in heads.items()})


# --- heads -----------------------------------------------------------------------------------


@pytest.mark.device
def test_results_are_kept_copied_and_forgotten(tmp_path: Path) -> None:
    head = Classify()
    outputs = {"a": np.arange(2), "b": np.array([[0.5], [1.5]], "float32")}
    assert head.batch_postprocess(outputs) == head.get_results()
    head.get_results().clear()
    head.epoch_postprocess(output_dir=tmp_path / "new")
    lines = (tmp_path / "new/classify.train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 0, "b": [0.5]}, {"a": 1, "b": [1.5]}]
    head.reset()
    assert head.get_results() == []


def test_without_a_directory_results_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    head = Classify()
    head.batch_postprocess({"a": np.arange(2)})
    head.epoch_postprocess()
    assert capsys.readouterr().out == '{"a": 0}\n{"a": 1}\n'


def test_outputs_of_different_lengths_are_kept_together_with_a_warning() -> None:
    head = Classify()
    with pytest.warns(UserWarning, match="head classify: outputs of different lengths"):
        assert head.batch_postprocess({"a": np.arange(2), "b": np.arange(3)}) is None
    assert len(head.get_results()) == 1


def test_lists_of_different_lengths_per_sample_are_results() -> None:
    head = Classify()
    results = head.batch_postprocess({"line": ["a", "b"], "tags": [["x"], ["x", "y"]]})
    assert results == [{"line": "a", "tags": ["x"]}, {"line": "b", "tags": ["x", "y"]}]


# --- training several heads ------------------------------------------------------------------


class Several(MultiHead):
    """Two heads on one backbone, two readers."""

    ratios: ClassVar[Any] = {"one": 3.0, "other": 1.0}
    auxiliary: ClassVar[Any] = {"other"}

    def setup_dataloader(self) -> None:
        self.readers = {"one": Points(), "other": Points(size=16, seed=1)}
        self.train_loader = DataLoader(self.readers["one"], batch_size=4, shuffle=True)
        self.side_loader = DataLoader(self.readers["other"], batch_size=4, shuffle=True)

    def setup_model(self) -> None:
        model = self.build()
        for reader in self.readers.values():
            reader.register_with(model)
        self.model = self.data_parallel(model, find_unused_parameters=True)
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
        self.setup_tasks(
            {
                "one": Task("one", mix_ratio=self.ratios["one"], auxiliary="one" in self.auxiliary),
                "other": Task(
                    "other", self.side_loader, self.ratios["other"], "other" in self.auxiliary
                ),
            }
        )
        self.drawn: list[str] = []
        self.register_stateful("drawn")

    def build(self) -> Composed:
        return composed()

    def train_batch(self) -> None:
        task = self.draw_task()
        self.drawn.append(task)
        loss = self.model(self.read_task(task), self.tasks[task].head)["loss"]
        self.backward(loss)
        self.step_optimizers()
        self.log({f"{task}_loss": loss})

    def valid(self) -> dict[str, float]:
        return {}


@pytest.mark.long
def test_heads_are_drawn_by_their_ratios_the_same_for_a_seed_and_continued(tmp_path: Path) -> None:
    options: dict[str, Any] = {"valid_interval": 0, "save_interval": 100, "log_interval": 100}
    whole: Any = trained(Several, tmp_path / "whole", max_iteration=100, **options)
    assert abs(whole.task_steps["one"] / 100 - 0.75) < 0.1
    assert whole.task_steps == {name: whole.drawn.count(name) for name in ("one", "other")}
    trained(Several, tmp_path / "parts", max_iteration=33, **options)
    parts: Any = trained(Several, tmp_path / "parts", max_iteration=100, **options)
    assert parts.drawn == whole.drawn
    step = "checkpoints/step-00000100"
    same_bits(tmp_path / "whole" / step, tmp_path / "parts" / step)
    other: Any = trained(Several, tmp_path / "other", max_iteration=20, seed=1, **options)
    assert other.drawn != whole.drawn[:20]


@pytest.mark.parametrize(("auxiliary", "waits"), [({"other"}, False), (set(), True)])
def test_auxiliary_heads_do_not_delay_the_end(
    tmp_path: Path, auxiliary: set[str], waits: bool
) -> None:
    class Rare(Several):
        ratios: ClassVar[Any] = {"one": 10.0, "other": 1.0}

        @classmethod
        def default_config(cls) -> Config:
            config = super().default_config()
            config.heads.epochs = 2
            return config

    Rare.auxiliary = auxiliary
    options: dict[str, Any] = {"max_iteration": 100000, "valid_interval": 0, "save_interval": 9999}
    exp: Any = trained(Rare, tmp_path, **options)
    assert exp.finished
    epochs = {name: exp.epochs_of(name) for name in exp.tasks}
    if waits:  # for the rare one
        assert min(epochs.values()) == 2
        assert epochs["one"] > 5
        assert exp.drawn[-1] == "other"  # its last batch ended the run, and not a later one
    else:
        assert epochs == {"one": 2, "other": 0}
        assert exp.task_steps["one"] == 12  # two epochs of six batches
    again: Any = trained(Rare, tmp_path, **options)
    assert (again.iteration, again.finished) == (exp.iteration, True)


def test_each_task_has_an_order_of_its_own_and_its_loader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(Several):
        def setup_tasks(self, tasks: Any) -> None:
            loaders = [DataLoader(self.readers["one"], batch_size=24, shuffle=True)] * 2
            super().setup_tasks({str(n): Task("one", loader) for n, loader in enumerate(loaders)})

    closed: list[Any] = []
    monkeypatch.setattr(multi_head.EndlessBatches, "close", lambda batches: closed.append(batches))
    exp: Any = make(Twice, tmp_path)
    exp.setup()
    with exp.internals.closing():
        one, other = (exp.read_task(name)["point"].numpy() for name in "01")
    assert not np.array_equal(one, other)
    assert np.array_equal(np.sort(one, axis=0), np.sort(other, axis=0))
    assert closed == list(exp.task_batches.values())


def test_a_head_can_be_shared(tmp_path: Path) -> None:
    class Shared(Several):
        def build(self) -> Composed:
            head = Classify()
            return composed(one=head, other=head)

    exp: Any = trained(Shared, tmp_path / "whole", max_iteration=8, save_interval=4)
    trained(Shared, tmp_path / "parts", max_iteration=4, save_interval=4)
    trained(Shared, tmp_path / "parts", max_iteration=8, save_interval=4)
    same_bits(*(tmp_path / f / "checkpoints/step-00000008" for f in ("whole", "parts")))
    assert exp.model.heads["one"] is exp.model.heads["other"]
    assert exp.model.heads["one"].head_name == "one"


def test_a_task_of_a_head_that_is_not_there_is_named_when_it_is_drawn(tmp_path: Path) -> None:
    class Wrong(Several):
        def setup_tasks(self, _: Any) -> None:
            super().setup_tasks({"a": Task("no")})

    with pytest.raises(ValueError, match="head 'no': not in the model, which has one, other"):
        trained(Wrong, tmp_path)


def test_predict_head_gives_all_results_and_writes_them(tmp_path: Path) -> None:
    exp: Any = trained(Several, tmp_path / "run", max_iteration=2)
    reader = exp.readers["other"].clone("predict")
    reader.register_with(exp.model)
    results = exp.predict_head("other", DataLoader(reader, batch_size=5), tmp_path / "out")
    with paddle.no_grad():
        batch = {"point": paddle.to_tensor(reader.points)}
        expected = exp.model(batch, "other", "predict")["score"].numpy()
    assert np.allclose([result["score"] for result in results], expected)
    lines = (tmp_path / "out/other.predict.jsonl").read_text().splitlines()
    assert np.allclose([json.loads(line)["score"] for line in lines], expected)
    assert exp.model.heads["other"].last_inputs == {"reader": {"size": 16}}


def test_a_head_gets_what_reader_and_backbone_return_of_an_epoch(tmp_path: Path) -> None:
    class Counting(Net):
        batches = 0

        def forward(self, inputs: Any) -> dict[str, Any]:
            self.batches += 1
            return super().forward(inputs)

        def get_epoch_outputs(self) -> dict[str, Any]:
            return {"batches": self.batches}

    class Asking(Several):
        def build(self) -> Composed:
            return Composed(Counting(), {"one": Classify(), "other": Classify()})

    exp: Any = trained(Asking, tmp_path / "run", max_iteration=1, valid_interval=0)
    reader = exp.readers["other"].clone("predict")
    reader.register_with(exp.model)
    loader = DataLoader(reader, batch_size=4)
    head = exp.model.heads["other"]
    for asked in ("batches", InputSpec([], "int64", "batches")):
        exp.model.backbone.batches = 0
        head.epoch_inputs_attrs = {"reader": ["size"], "backbone": [asked]}
        exp.predict_head("other", loader, tmp_path)
        assert head.last_inputs == {"reader": {"size": 16}, "backbone": {"batches": 4}}, asked
    head.epoch_inputs_attrs = {"backbone": ["samples"]}
    message = r"attrs ask the backbone for 'samples'; its get_epoch_outputs returns batches\."
    with pytest.raises(ValueError, match=message):
        exp.predict_head("other", loader, tmp_path)
    head.epoch_inputs_attrs = {"one": ["loss"]}
    message = r"head other: epoch_inputs_attrs name 'one'; expected reader or backbone\."
    with pytest.raises(ValueError, match=message):
        exp.predict_head("other", loader, tmp_path)


@pytest.mark.device
def test_one_head_is_exported_from_its_declarations(tmp_path: Path) -> None:
    exp: Any = make(Several, tmp_path / "run")
    exp.setup()
    exp.export(tmp_path / "model", *exp.model.for_export("one"))
    exp.close()
    points = paddle.randn([3, 4])
    loaded = paddle.jit.load(str(tmp_path / "model"))
    expected = exp.model({"point": points}, "one", "predict")["score"]
    assert np.allclose(loaded(points).numpy(), expected.numpy(), atol=1e-6)


DOCS = Path(__file__).parents[2] / "experiments/multitask/README.md"


def documented(name: str) -> Any:
    """A class of the page."""
    scope: dict[str, Any] = {"__name__": "documented"}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, scope)
    return scope[name]


def test_the_example_of_the_docs_trains_and_is_exported(tmp_path: Path) -> None:
    exp: Any = trained(documented("Experiment"), tmp_path, max_iteration=40, valid_interval=40)
    assert curve(tmp_path, "valid/accuracy")[40] > 0.6
    assert len((tmp_path / "side.predict.jsonl").read_text().splitlines()) == 100
    exp.export(tmp_path / "side", *exp.unwrap(exp.model).for_export("side"))
    loaded = paddle.jit.load(str(tmp_path / "side"))
    assert loaded(paddle.randn([3, 4])).shape == [3]


def test_heads_postprocess_in_training_by_the_two_calls_of_the_docs(tmp_path: Path) -> None:
    trained(documented("Postprocessing"), tmp_path, max_iteration=20, valid_interval=0, seed=3)
    files = sorted(tmp_path.glob("*.train.jsonl"))  # of the last epoch's ten updates
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 10
    assert {line["task"] for line in lines} == {"side", "again"}
