"""Evaluating, predicting, exporting: done at any time, and felt by nothing."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import random
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.io import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedBatchSampler,
    IterableDataset,
    RandomSampler,
    SequenceSampler,
)
from tiny import (
    Facts,
    Notes,
    Points,
    Tiny,
    curve,
    make,
    metrics,
    run_of,
    run_ranks,
    same_bits,
    trained,
)

from expbase import main, on
from expbase.base.background import Background
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.model_files import read_weights
from expbase.engine.stop import StopRequests
from expbase.extras.prediction import Prediction

BEST = 4  # the iteration that Graded.valid finds best


class Graded(Prediction, Tiny):
    """A validation with a number of many digits, one that counts, and a best iteration."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.other = DataLoader(Points(7), batch_size=2, shuffle=True)

    def setup_model(self) -> None:
        super().setup_model()
        self.input_spec = [paddle.static.InputSpec([None, 4], "float32")]

    def valid(self) -> dict[str, float]:
        losses, total = 0.0, 0
        for points, labels in self.valid_batches():
            losses += float(F.cross_entropy(self.model(points), labels, reduction="sum"))
            total += len(labels)
        sizes, own = self.gather(total), {"rank": self.rank}
        means = self.average({"loss": losses / max(total, 1)}, weight=total)
        return {**means, "samples": sum(sizes), "score": -abs(self.iteration - BEST), **own}

    def predict_batch(self, batch: Any) -> Any:
        return self.model(batch[0])


# What the runs of Graded below have in common: each checkpoint is validated and kept.
SETTINGS = {
    "seed": 5, "max_iteration": 6, "valid_interval": 2, "save_interval": 2, "log_interval": 1,
    "keep_last": 0, "monitor": "score",
}  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; nothing here may change it."""
    output = tmp_path_factory.mktemp("graded") / "run"
    trained(Graded, output, **SETTINGS)
    return output


def steps(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").glob("step-*"))


def same_run(one: Path, other: Path) -> None:
    """Asserts the same checkpoints, to the bit, and the same curves but for times."""
    assert steps(one) == steps(other) != []
    for step in steps(one):
        same_bits(one / "checkpoints" / step, other / "checkpoints" / step)

    def facts(line: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in line.items() if k != "time" and not k.startswith("speed/")}

    assert [*map(facts, metrics(one))] == [*map(facts, metrics(other))]


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and directory, when it was changed and what it holds."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [directory, *directory.rglob("*")]
    }


def test_predict_in_valid_keeps_its_phase_and_out_of_the_log_of_it(tmp_path: Path) -> None:
    phases: list[str] = []

    class Asking(Graded):
        def predict_batch(self, batch: Any) -> Any:
            phases.append(self.phase)
            self.log(inner=1.0)
            return super().predict_batch(batch)

        def valid(self) -> dict[str, float]:
            self.log(outer=1.0)
            self.predict(self.valid_loader)
            return super().valid()

    trained(Asking, tmp_path / "run", max_iteration=1)
    assert phases == ["valid"] * 4
    assert curve(tmp_path / "run", "valid/outer") == {1: 1.0}
    assert curve(tmp_path / "run", "valid/inner") == {}


# --- validation by passes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"valid_interval": 0, "valid_every_epoch": 2, "max_iteration": 45}, [20, 40, 45]),
        ({"valid_interval": 15, "valid_every_epoch": 1, "max_iteration": 30}, [10, 15, 20, 30]),
        ({"valid_interval": 0, "valid_every_epoch": 1, "max_iteration": 10}, [10]),
    ],
)
def test_an_iteration_that_is_due_by_passes_and_by_interval_is_validated_once(
    tmp_path: Path, options: dict[str, int], expected: list[int]
) -> None:
    validated: list[int] = []

    class Counting(Tiny):
        def valid(self) -> dict[str, float]:
            validated.append(self.iteration)
            return super().valid()

    trained(Counting, tmp_path / "run", **options, save_interval=0, log_interval=0)
    assert validated == expected
    assert [line["iteration"] for line in metrics(tmp_path / "run")] == expected


def test_a_pass_that_ends_within_an_update_is_validated_after_it(
    graded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Accumulating(Graded):
        def train_batch(self) -> None:
            for points, labels in self.micro_batches():
                self.backward(F.cross_entropy(self.model(points), labels))
            self.step_optimizers()

    # A pass has ten batches, so update 4 takes batch 10 of the first and two of the second.
    options = {"valid_interval": 0, "valid_every_epoch": 1, "accumulation_steps": 3}
    options |= {"max_iteration": 5, "save_interval": 4, "log_interval": 0}
    trained(Accumulating, tmp_path / "run", **{**SETTINGS, **options})
    logged = curve(tmp_path / "run", "valid/loss")
    assert [*logged] == [4, 5]
    given = answer(capsys, Accumulating, "--output", str(tmp_path / "run"), "--evaluate", "4")
    assert given["loss"] == logged[4]


# --- at any time, without a trace --------------------------------------------------------------


class Evaluating(Graded):
    """Evaluates other data after each update, and between a validation and its save."""

    def setup_model(self) -> None:
        super().setup_model()
        self.found = Facts()

    @on("on_train_batch_end")
    @on("on_train_epoch_end")
    def look(self) -> None:
        self.found.update(self.evaluate(self.other))
        assert self.found.keys() == {"loss", "samples", "score", "rank"}
        assert self.found["samples"] == 7


class Predicting(Graded):
    """Predicts, by a model that draws, the data that are trained on, too."""

    def predict_batch(self, batch: Any) -> Any:
        random.random(), np.random.rand(), paddle.rand([2])
        self.log(anything=1.0)
        assert not any(layer.training for layer in self.model.sublayers(include_self=True))
        output = self.model(batch[0])
        assert (self.phase, output.stop_gradient) == ("predict", True)
        return output

    @on("on_train_batch_end")
    def look(self) -> None:
        assert len(self.predict(self.valid_loader)) == 10
        assert len(self.predict(self.train_loader)) == 40


class Exporting(Graded):
    @on("on_train_batch_end")
    def look(self) -> None:
        if self.iteration in (1, 5):
            self.export(self.output_dir / "exported/model")


@pytest.mark.parametrize("experiment", [Evaluating, Predicting, Exporting])
def test_what_is_looked_at_during_training_does_not_change_it(
    tmp_path: Path, experiment: type[Graded]
) -> None:
    options = {**SETTINGS, "max_iteration": 10, "valid_interval": 5, "save_interval": 5}
    options |= {"monitor": "samples", "monitor_mode": "min"}  # the other data have fewer
    trained(Graded, tmp_path / "plain", **options)
    looked = make(experiment, tmp_path / "looked", **options)
    looked.setup()
    looked.look()  # from outside, too
    looked.run()
    same_run(tmp_path / "plain", tmp_path / "looked")
    assert curve(tmp_path / "looked", "valid/samples") == {5: 10, 10: 10}
    assert all(layer.training for layer in looked.model.sublayers(include_self=True))


class Leaving(Graded):
    """Its validation leaves gradients or clears them; its training has some, zeros or none then."""

    has = leaves = ""

    def setup_model(self) -> None:
        super().setup_model()
        self.scale = paddle.create_parameter([2], "float32")  # of no layer
        self.other_optimizer = paddle.optimizer.Momentum(0.01, parameters=[self.scale])

    def add_gradients(self, batch: Any) -> None:
        points, labels = batch
        F.cross_entropy(self.model(points) * self.scale, labels).backward()

    def train_batch(self) -> None:
        self.add_gradients(self.read_batch())
        if self.has != "some" or self.iteration % 2 == 0:
            for optimizer in (self.optimizer, self.other_optimizer):
                optimizer.step()
            self.clear(self.has)

    def clear(self, what: str) -> None:
        for optimizer in (self.optimizer, self.other_optimizer):
            optimizer.clear_grad(set_to_zero=what != "none")

    def valid(self) -> dict[str, float]:
        if self.leaves:
            with paddle.enable_grad():
                for batch in self.valid_batches():
                    self.add_gradients(batch)
        if self.leaves in ("zeros", "none"):
            self.clear(self.leaves)
        return super().valid()


@pytest.mark.parametrize("has", ["zeros", "none", "some"])
def test_gradients_that_a_validation_leaves_are_not_felt_by_training(
    tmp_path: Path, has: str
) -> None:
    for leaves in ("nothing", "some", "zeros", "none"):
        told = {"has": has, "leaves": leaves.replace("nothing", "")}
        options = {**SETTINGS, "valid_interval": 1}
        trained(type("Leaving", (Leaving,), told), tmp_path / leaves, **options)
        same_run(tmp_path / "nothing", tmp_path / leaves)


def test_evaluate_by_hand_in_a_validated_iteration_adds_no_second_line(tmp_path: Path) -> None:
    class Again(Graded):
        def on_train_epoch_end(self) -> None:
            self.again = self.evaluate()["loss"]

    options = {**SETTINGS, "max_iteration": 10, "valid_interval": 10}
    exp = trained(Again, tmp_path / "run", **options)
    lines = [line for line in metrics(tmp_path / "run") if "valid/loss" in line]
    assert [(line["iteration"], line["valid/loss"]) for line in lines] == [(10, exp.again)]


def test_a_wrong_monitor_fails_in_an_evaluation_by_hand_too(tmp_path: Path) -> None:
    class ByHand(Tiny):
        def on_train_batch_end(self) -> None:
            self.evaluate()

    with pytest.raises(ValueError, match=r"training\.monitor: 'acuracy' given; .*: accuracy\."):
        trained(ByHand, tmp_path / "run", monitor="acuracy", valid_interval=0)


def test_persistent_workers_serve_after_the_run_too(tmp_path: Path) -> None:
    class Working(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            options = {"num_workers": 1, "persistent_workers": True}
            self.valid_loader = DataLoader(Points(10), batch_size=3, **options)

    exp = trained(Working, tmp_path / "run", **{**SETTINGS, "max_iteration": 2})
    try:
        assert exp.evaluate()["loss"] == curve(tmp_path / "run", "valid/loss")[2]
        assert len(exp.predict(exp.valid_loader)) == 10
    finally:
        run_of(exp).evaluation.let_go()


def test_evaluate_after_the_run_gives_the_numbers_of_then_and_logs_no_curve(tmp_path: Path) -> None:
    exp = trained(Evaluating, tmp_path / "run", **{**SETTINGS, "max_iteration": 10})
    before = snapshot(tmp_path / "run")
    assert exp.evaluate(exp.other) == exp.found
    own = exp.evaluate()
    assert own == {name: curve(tmp_path / "run", f"valid/{name}")[10] for name in own}
    assert own["loss"] != exp.found["loss"]
    assert snapshot(tmp_path / "run") == before


# --- prediction --------------------------------------------------------------------------------


class Numbers(Dataset):
    """Sample i is i."""

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.full(4, index, "float32"),)

    def __len__(self) -> int:
        return 11


class Chunks(Dataset):
    """The same numbers in batches that are ready."""

    chunks = ((0, 1, 2), (3,), (4, 5, 6, 7, 8), (9, 10))

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.stack([np.full(4, n, "float32") for n in self.chunks[index]]),)

    def __len__(self) -> int:
        return len(self.chunks)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[np.ndarray]]:
        return (Numbers()[index] for index in range(11))


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": shuffled,
    "shuffled by a worker": lambda: shuffled(num_workers=1),
    "random sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(sampler=RandomSampler(Numbers()), batch_size=5)
    ),
    "distributed sampler": lambda: DataLoader(
        Numbers(), batch_sampler=DistributedBatchSampler(Numbers(), 4, shuffle=True)
    ),
    "ready batches": lambda: DataLoader(Chunks(), batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "list": lambda: [Chunks()[index] for index in range(4)],
    "generator": lambda: (Chunks()[index] for index in range(4)),
}
SHUFFLED = ("shuffled", "shuffled by a worker", "random sampler")


class Oracle(Graded):
    """What predict_batch gives is a function of the numbers; it can be exchanged."""

    gives: Any = staticmethod(lambda numbers: numbers)

    def setup_model(self) -> None:
        super().setup_model()
        self.order: list[float] = []
        self.events: list[str] = []

    def predict_batch(self, batch: Any) -> Any:
        self.order += np.asarray(batch[0])[:, 0].tolist()
        return self.gives(paddle.to_tensor(np.asarray(batch[0])[:, 0]))

    def on_predict_begin(self) -> None:
        self.events.append("begin")

    def on_predict_batch_end(self, outputs: Any) -> None:
        self.events.append("batch")

    def on_predict_end(self, results: Any) -> None:
        self.events.append(f"end {len(results)}")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    exp = make(Oracle, tmp_path_factory.mktemp("oracle") / "run")
    exp.setup()
    with exp.closing():
        yield exp


@pytest.fixture
def asked(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Oracle]:
    """The oracle with another function."""

    def ask(gives: Any) -> Oracle:
        monkeypatch.setattr(Oracle, "gives", staticmethod(gives))
        return oracle

    return ask


@pytest.mark.parametrize("kind", LOADERS)
def test_predict_gives_one_result_per_sample_in_the_order_of_the_data(
    oracle: Oracle, kind: str
) -> None:
    oracle.order, oracle.events = [], []
    assert oracle.predict(LOADERS[kind]()) == list(range(11))
    assert sorted(oracle.order) == list(range(11))
    assert (oracle.order == list(range(11))) == (kind not in SHUFFLED)
    num_batches = 4 if "batches" in kind or kind in ("list", "generator", "stream") else 3
    assert oracle.events == ["begin", *["batch"] * num_batches, "end 11"]


def test_predict_tells_the_samples_of_every_kind_of_output_apart(
    asked: Callable[[Any], Oracle],
) -> None:
    def first_and_last(gives: Any) -> tuple[Any, Any]:
        results = asked(gives).predict(shuffled())
        assert len(results) == 11
        return results[0], results[10]

    assert first_and_last(lambda n: n.numpy()) == (0, 10)
    assert first_and_last(lambda n: (n, n.numpy() * 2)) == ((0, 0), (10, 20))
    assert first_and_last(lambda n: [f"no. {int(i)}" for i in n]) == ("no. 0", "no. 10")
    assert first_and_last(lambda n: n.astype("bfloat16")) == (0, 10)
    numbers = first_and_last(lambda n: [i + 1 for i in n])
    assert (numbers, type(numbers[0])) == ((1, 11), float)
    nested = first_and_last(lambda n: {"n": n, "more": (n, {"text": [str(int(i)) for i in n]})})
    assert nested[1] == {"n": 10, "more": (10, {"text": "10"})}
    rows = first_and_last(lambda n: n.unsqueeze(1) * paddle.ones([1, 3]))
    assert [type(row) for row in rows] == [np.ndarray] * 2
    assert rows[1].tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("gives", "error", "text"),
    [
        (lambda n: n[:1], ValueError, "returned 1 results for 4 samples; expected one per sample"),
        (lambda n: [1, 2], ValueError, "returned 2 results for 4 samples"),
        (lambda n: {}, ValueError, "returned 0 results for 4 samples"),
        (lambda n: n.mean(), TypeError, r"returned Tensor\(shape=\[\]"),
        (lambda n: None, TypeError, "returned None; expected"),
    ],
)
def test_outputs_that_are_not_one_per_sample_are_refused(
    asked: Callable[[Any], Oracle], gives: Any, error: type[Exception], text: str
) -> None:
    exp = asked(gives)
    with pytest.raises(error, match=f"predict_batch: {text}"):
        exp.predict(LOADERS["in order"]())
    assert exp.phase == "train"
    assert exp.model.training


def test_a_loader_that_leaves_samples_out_is_refused(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Numbers(), batch_size=4, drop_last=True))
    sampler = BatchSampler(sampler=SequenceSampler(Numbers()), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Numbers(), batch_sampler=sampler))
    with pytest.raises(ValueError, match=r"drop_last=True.*expected drop_last=False"):
        oracle.predict(DataLoader(Stream(), batch_size=4, drop_last=True))


def test_predict_without_a_loader_says_so(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="predict: no loader given; expected one"):
        oracle.predict(oracle.test_loader)


def test_a_loader_that_was_made_for_one_prediction_is_let_go(oracle: Oracle) -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    gone = weakref.ref(loader)
    oracle.predict(loader)
    del loader
    gc.collect()
    assert gone() is None


class Remembering:
    """A loader that knows its place, which is saved and restored."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def set_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        while self.place < 30:
            self.place += 1
            random = np.random.RandomState(self.place)
            points, labels = random.randn(4, 4).astype("float32"), random.randint(0, 2, 4)
            yield paddle.to_tensor(points), paddle.to_tensor(labels)
        self.place = 0


def test_predict_over_a_training_loader_that_has_a_place_does_not_move_it(tmp_path: Path) -> None:
    class Plain(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_loader = Remembering()

    class Asking(Plain):
        @on("on_train_batch_end", filter_fn=lambda _, exp: exp.iteration == 2)
        def ask(self) -> None:
            assert self.predict(self.train_loader)

    for experiment in (Plain, Asking):
        trained(experiment, tmp_path / experiment.__name__, **SETTINGS)
    lines = [curve(tmp_path / name, "train/loss") for name in ("Plain", "Asking")]
    assert lines[0] == lines[1]


def test_predict_without_predict_batch_says_what_is_missing(tmp_path: Path) -> None:
    class Silent(Prediction, Tiny):
        pass

    exp: Any = make(Silent, tmp_path / "run")
    exp.setup()
    with exp.closing(), pytest.raises(NotImplementedError, match=r"Silent\.predict_batch: not d"):
        exp.predict(exp.valid_loader)


class Noting(Tiny):
    """Notes what its events tell about each batch and each loader."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.test_loader = DataLoader(Points(4), batch_size=3)
        self.noted: list[Any] = []

    def valid(self) -> dict[str, float]:
        for points, _ in self.valid_batches():
            self.wrong = len(points)  # what a listener of the batch wants to see
        return {}

    def on_valid_batch_end(self, batch: Any, indices: Any) -> None:
        self.noted.append((len(batch[0]), indices, self.wrong, self.phase))

    def on_evaluate_end(self, results: Any) -> None:
        self.noted.append(self.evaluated_loader)


def test_events_of_a_validation_know_its_batches_and_its_loader(tmp_path: Path) -> None:
    exp: Any = make(Noting, tmp_path)
    exp.setup()
    with exp.closing():
        exp.evaluate(exp.test_loader)
        assert exp.noted == [(3, [0, 1, 2], 3, "valid"), (1, [3], 1, "valid"), exp.test_loader]
        assert exp.evaluated_loader is exp.valid_loader
        exp.evaluate()
        assert exp.noted[-1] is exp.valid_loader


# --- --evaluate --------------------------------------------------------------------------------


def answer(capsys: pytest.CaptureFixture[str], experiment: type[Tiny], *words: str) -> Any:
    """What a command line printed: one JSON object and no other word."""
    capsys.readouterr()
    main(experiment, argv=["--device", "cpu", *words])
    return json.loads(capsys.readouterr().out)


class Drawing(Graded):
    """Writes files of its own, by what the template offers for that."""

    def valid(self) -> dict[str, float]:
        self.visualizer.add_scalar("own", 1.0, self.iteration)
        self.logger.info("drawn")
        return super().valid()

    def on_evaluate_end(self, results: Any) -> None:
        self.save()


@pytest.mark.parametrize(("which", "iteration"), [("best", BEST), ("last", 6), ("2", 2)])
def test_evaluate_gives_what_was_logged_then_of_a_run_in_use_and_changes_no_file(
    graded: Path, capsys: pytest.CaptureFixture[str], which: str, iteration: int
) -> None:
    holder = make(Graded, graded, **SETTINGS)
    holder.setup()
    with holder.closing():
        with pytest.raises(SystemExit, match="is in use"):
            main(Graded, argv=["--output", str(graded), "training.seed=5"])
        before = snapshot(graded)
        given = answer(capsys, Drawing, "--output", str(graded), "--evaluate", which)
        assert snapshot(graded) == before
    names = ("loss", "samples", "score", "rank")
    logged = {name: curve(graded, f"valid/{name}")[iteration] for name in names}
    assert given == {"iteration": iteration, "epoch": 1, "loader": "valid_loader", **logged}


def test_evaluate_takes_the_runs_own_config_but_for_what_the_command_line_says(
    graded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--output", str(graded), "--evaluate", "last")
    logged = curve(graded, "valid/loss")[6]
    (tmp_path / "c.yaml").write_text("training: {seed: 6}\n")
    config = ("--config", str(tmp_path / "c.yaml"))
    assert answer(capsys, Graded, *words)["loss"] == logged  # the validation draws: by seed 5
    other = answer(capsys, Graded, *words, "training.seed=6")["loss"]
    assert other != logged
    assert answer(capsys, Graded, *words, *config)["loss"] == other
    assert answer(capsys, Graded, *words, *config, "training.seed=5")["loss"] == logged


def test_evaluate_takes_the_test_data_if_there_are_any(
    graded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tested(Graded):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.test_loader = DataLoader(Points(6), batch_size=4)

    given = answer(capsys, Tested, "--output", str(graded), "--evaluate", "best")
    assert (given["loader"], given["samples"], given["iteration"]) == ("test_loader", 6, BEST)


def test_a_number_that_json_does_not_have_is_null_or_text(
    graded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Infinite(Graded):
        def valid(self) -> dict[str, float]:
            return {"nan": math.nan, "infinite": -math.inf}

    main(Infinite, argv=["--output", str(graded), "--evaluate", "last"])
    given = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (given["nan"], given["infinite"]) == ("nan", "-inf")


@pytest.fixture(scope="module")
def unmonitored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a best checkpoint, and in `empty` one without any."""
    output = tmp_path_factory.mktemp("unmonitored") / "run"
    trained(Graded, output, **{**SETTINGS, "monitor": "", "max_iteration": 2})
    trained(Graded, output.with_name("empty"), max_iteration=1, save_interval=0)
    return output


@pytest.mark.parametrize("option", ["--evaluate", "--export"])
@pytest.mark.parametrize(
    ("run", "which", "text"),
    [
        ("run", "7", r"step-00000007: does not exist; there are: step-00000002\."),
        ("run", "best", r"no checkpoint is the best one; expected training\.monitor"),
        ("run", "bset", "'bset' given; expected best, last or an iteration"),
        ("run", "-1", "'-1' given; expected best, last or an iteration"),
        ("run", "", "'' given; expected best, last or an iteration"),  # an unset variable
        ("empty", "last", "no intact checkpoint there"),
        ("nowhere", "last", "nowhere' holds no run; expected the directory of one"),
        ("run/checkpoints", "last", "holds no run; expected the directory of one"),
    ],
)
def test_what_cannot_be_looked_at_is_answered_by_one_line_and_changes_nothing(
    unmonitored: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    run: str,
    which: str,
    text: str,
) -> None:
    before = snapshot(unmonitored.parent)
    with pytest.raises(SystemExit, match=text) as caught:
        main(Graded, argv=["--output", str(unmonitored.parent / run), f"{option}={which}"])
    assert caught.value.code == 78
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert snapshot(unmonitored.parent) == before


def test_a_fresh_start_is_not_something_that_looks(graded: Path) -> None:
    before = snapshot(graded.parent)
    for option in ("--evaluate", "--export"):
        with pytest.raises(SystemExit, match="--fresh: given with --evaluate or --export"):
            main(Graded, argv=["--output", str(graded), option, "last", "--fresh"])
    assert snapshot(graded.parent) == before


# --- --export ----------------------------------------------------------------------------------


def test_an_exported_model_gives_the_outputs_of_its_checkpoint_in_eval_mode(
    graded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(graded, tmp_path / "run")
    given = answer(capsys, Graded, "--output", str(run), "--export", "best")
    assert given["iteration"] == BEST
    assert (run / f"export/step-0000000{BEST}/model") == Path(given["exported"])
    loaded = paddle.jit.load(given["exported"])
    exp = make(Graded, tmp_path / "other")
    exp.setup()
    with exp.closing():
        outputs = {}
        for iteration in (BEST, 6):
            exp.load_model(run / f"checkpoints/step-0000000{iteration}")
            exp.model.eval()
            for size in (1, 5):
                points = paddle.to_tensor(Points(5).points[:size])
                outputs[iteration, size] = exp.model(points).numpy(), loaded(points).numpy()
    for size in (1, 5):
        assert np.allclose(*outputs[BEST, size], atol=1e-6)
        assert not np.allclose(*outputs[6, size], atol=1e-6)


def test_export_without_an_input_spec_says_what_it_needs(graded: Path, tmp_path: Path) -> None:
    class Without(Graded):
        def setup_model(self) -> None:
            super().setup_model()
            del self.input_spec

    with pytest.raises(SystemExit, match=r"error: export: no input_spec given"):  # and one line
        main(Without, argv=["--output", str(graded), "--export", "last"])
    assert not (graded / "export").exists()
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    with exp.closing(), pytest.raises(ValueError, match=r"no input_spec given.*self\.input_spec"):
        exp.export(tmp_path / "exported/model")
    assert not (tmp_path / "exported").exists()


def test_any_layer_can_be_exported_at_any_time_and_that_is_done_in_eval_mode(
    tmp_path: Path,
) -> None:
    class Offset(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.offset = self.create_parameter([4], is_bias=True)  # zeros

        def forward(self, points: Any) -> Any:
            return points + self.offset + (100.0 if self.training else 1.0)

    class Two(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.offset = Offset()

    exp = make(Two, tmp_path / "run")
    exp.setup()
    with exp.closing():
        for number, layer in enumerate((exp.offset, Offset())):  # one does not stand on self
            path = tmp_path / f"exported_{number}/offset"
            exp.export(path, [paddle.static.InputSpec([None, 4])], layer)
            assert layer.training
            outputs = paddle.jit.load(str(path))(paddle.zeros([3, 4]))
            assert outputs.numpy().tolist() == [[1.0] * 4] * 3
            names = {file.name.partition(".")[0] for file in path.parent.iterdir()}
            assert names == {"offset"}  # nothing half written is left


# --- load_best and finished --------------------------------------------------------------------


class Testing(Graded):
    """Tests its best weights at the end."""

    __test__ = False  # pytest takes the name for its own

    def on_train_end(self) -> None:
        self.load_best()
        self.best_weights = {n: t.numpy().copy() for n, t in self.model.state_dict().items()}
        self.tested = self.evaluate(self.other)
        self.save()


def test_the_best_checkpoint_can_be_tested_at_the_end_and_the_run_goes_on_from_the_last(
    graded: Path, tmp_path: Path
) -> None:
    shutil.copytree(graded, tmp_path / "plain")
    exp = trained(Testing, tmp_path / "tested", **SETTINGS)
    best = read_weights(graded / f"checkpoints/step-0000000{BEST}")["model"]
    last = read_weights(graded / "checkpoints/step-00000006")["model"]
    assert exp.best_weights.keys() == best.keys()
    for name, array in best.items():
        assert array.data.tobytes() == exp.best_weights[name].tobytes(), name
    assert any(best[name].data.tobytes() != last[name].data.tobytes() for name in best)
    assert (exp.tested["samples"], exp.iteration, exp.finished) == (7, 6, True)
    same_run(tmp_path / "plain", tmp_path / "tested")
    for name in ("plain", "tested"):  # a longer one goes on from the last, not from the best
        trained(Graded, tmp_path / name, **{**SETTINGS, "max_iteration": 9})
    assert steps(tmp_path / "tested")[-1] == "step-00000009"
    same_run(tmp_path / "plain", tmp_path / "tested")


def test_load_best_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rising(Testing):
        def valid(self) -> dict[str, float]:
            return {"score": self.iteration, "samples": 7}

        def train_batch(self) -> None:
            super().train_batch()
            self.now = self.model[0].weight.numpy().copy()

    asked = threading.Event()
    start, wait = Background.start, Background.wait

    def begin(self: Background, job: Callable[[], object]) -> None:
        asked.clear()
        start(self, lambda: asked.wait(10) and job())  # a disk that is as slow as may be

    def end(self: Background) -> None:
        asked.set()
        wait(self)

    monkeypatch.setattr(Background, "start", begin)
    monkeypatch.setattr(Background, "wait", end)
    exp = trained(Rising, tmp_path / "run", **SETTINGS)
    assert np.array_equal(exp.best_weights["0.weight"], exp.now)


def test_what_was_brought_back_to_be_looked_at_is_not_saved(graded: Path, tmp_path: Path) -> None:
    run = shutil.copytree(graded, tmp_path / "run")
    exp = make(Graded, run, **{**SETTINGS, "max_iteration": 8})
    exp.setup()
    before = steps(run)
    exp.load_best()
    with pytest.raises(RuntimeError, match=r"save: the state is that of step-00000004, loaded"):
        exp.save()
    assert steps(run) == before
    with pytest.raises(CheckpointError, match=r"step-00000003: does not exist"):
        exp.load_checkpoint("3")
    exp.run()  # brings the whole state back
    trained(Graded, tmp_path / "whole", **{**SETTINGS, "max_iteration": 8})
    same_bits(*(folder / "checkpoints/step-00000008" for folder in (run, tmp_path / "whole")))


def test_load_best_within_training_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    class Hasty(Graded):
        refused: list[int] = []  # noqa: RUF012

        @on("on_train_batch_end")
        @on("on_evaluate_end")
        def hurry(self, *results: Any) -> None:
            with pytest.raises(RuntimeError, match="load_checkpoint: called before the end"):
                self.load_best()
            self.refused.append(self.iteration)

        def on_train_begin(self) -> None:
            self.hurry()

    trained(Hasty, tmp_path / "hasty", **SETTINGS)
    trained(Graded, tmp_path / "plain", **SETTINGS)
    assert Hasty.refused == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    exp = make(Hasty, tmp_path / "hasty", **{**SETTINGS, "max_iteration": 8})
    exp.setup()
    exp.resume_or_load()
    exp.hurry()  # run() would train on from the best weights
    exp.run()
    trained(Graded, tmp_path / "plain", **{**SETTINGS, "max_iteration": 8})
    same_run(tmp_path / "plain", tmp_path / "hasty")


@pytest.mark.parametrize(
    ("reason", "error", "finished"),
    [
        ("the end", None, True),
        ("stop()", None, True),
        ("an error", OSError, False),
        ("SIGTERM", SystemExit, False),
        ("the time limit", SystemExit, False),
    ],
)
def test_finished_tells_the_end_from_an_interruption(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    error: type[BaseException] | None,
    finished: bool,
) -> None:
    said: list[bool] = []

    class Ending(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            said.append(self.finished)
            if self.iteration == 2 and reason == "stop()":
                self.stop()
            if self.iteration == 2 and reason == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)

        def valid(self) -> dict[str, float]:
            if reason == "an error":  # in the last iteration
                raise OSError
            return super().valid()

        def on_train_end(self) -> None:
            said.append(self.finished)

    seconds = itertools.count()  # one at every look
    hasty = functools.partial(StopRequests, clock=seconds.__next__)
    monkeypatch.setattr("expbase.engine.run.StopRequests", hasty)
    limit = 1 if reason == "the time limit" else 0
    exp = make(
        Ending, tmp_path / "run", max_iteration=3, valid_interval=3, time_limit_seconds=limit
    )
    exp.setup()
    assert not exp.finished
    if error is None:
        exp.run()
    else:
        with pytest.raises(error):
            exp.run()
    assert said == [False] * (len(said) - 1) + [finished]
    assert exp.finished is finished


# --- on two ranks ------------------------------------------------------------------------------

TWO = """
import contextlib, io, json, sys
from pathlib import Path
import numpy as np
from test_evaluation import LOADERS, SETTINGS, Everything, Graded, Oracle
from tiny import make, trained
from expbase import main

if __name__ == "__main__":
    folder, graded = Path(sys.argv[1]), sys.argv[2]
    facts = {}

    def printed(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(Graded, argv=["--device", "cpu", *words])
        return out.getvalue()

    facts["evaluated"] = printed("--output", graded, "--evaluate", "best")
    exp = make(Graded, Path(graded), {"evaluate": "last"}, seed=5)
    exp.setup()
    with exp.closing():
        exp.load_checkpoint("last")
        facts["predicted"] = [np.stack(exp.predict(loader)).tolist()
                              for loader in (exp.valid_loader, exp.other)]
    oracle = make(Oracle, folder / "oracle")
    oracle.setup()
    with oracle.closing():
        kinds = ("in order", "shuffled", "distributed sampler", "ready batches")
        facts["orders"] = [np.stack(oracle.predict(LOADERS[kind]())).tolist() for kind in kinds]
        facts["stream"] = np.stack(oracle.predict([LOADERS["list"]()[oracle.rank]])).tolist()
    trained(Graded, folder / "plain", **SETTINGS)
    everything = trained(Everything, folder / "everything", **SETTINGS)
    facts["found"], facts["best"] = everything.found[0], everything.best
    facts["of_two"] = printed("--output", str(folder / "plain"), "--evaluate", "4")
    (folder / f"facts_{everything.rank}.json").write_text(json.dumps(facts))
"""


class Everything(Graded):
    """All of it in one run."""

    found = Notes()

    @on("on_evaluate_end")
    def look(self, results: Any) -> None:
        if self.iteration == BEST and not self.found:
            self.found.append("begun")  # the next line comes back to here
            self.found[:] = [self.evaluate(self.other)]
            self.predict(self.train_loader)
            self.export(self.output_dir / "exported/model")

    def on_train_end(self) -> None:
        self.load_best()
        self.best = self.unwrap(self.model)[0].weight.numpy().tolist()


def test_two_ranks_look_together_and_see_what_one_process_sees(
    graded: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO)
    for rank in run_ranks([[str(script), str(tmp_path), str(graded)]] * 2):
        assert rank.returncode == 0, rank.stderr
    one, two = (json.loads((tmp_path / f"facts_{rank}.json").read_text()) for rank in range(2))

    # --evaluate: rank 0 alone prints, and what one process has logged but for the order of a sum
    given = json.loads(one["evaluated"])
    assert (given["iteration"], given["samples"]) == (BEST, 10)
    assert math.isclose(given["loss"], curve(graded, "valid/loss")[BEST], rel_tol=1e-6)
    assert two["evaluated"] == ""
    assert json.loads(one["of_two"])["loss"] == curve(tmp_path / "plain", "valid/loss")[4]

    # predict: the whole list on both ranks, with the bits of one process
    exp = make(Graded, graded, {"evaluate": "last"}, seed=5)
    exp.setup()
    with exp.closing():
        exp.load_checkpoint("last")
        alone = [np.stack(exp.predict(it)).tolist() for it in (exp.valid_loader, exp.other)]
    assert one["predicted"] == two["predicted"] == alone
    assert one["orders"] == two["orders"] == [list(range(11))] * 4
    assert one["stream"] == two["stream"] == [0, 1, 2, 3]  # rank by rank

    # training does not feel any of it, on no rank
    same_run(tmp_path / "plain", tmp_path / "everything")
    assert one["found"] == two["found"]
    assert (one["found"]["samples"], one["found"]["rank"]) == (7, 0)
    assert one["best"] == two["best"]
    best = read_weights(tmp_path / f"plain/checkpoints/step-0000000{BEST}")["model"]["0.weight"]
    assert best.data.tobytes() == np.array(one["best"], "float32").tobytes()


def test_generators_on_self_that_valid_draws_from_are_not_felt_by_training(tmp_path: Path) -> None:
    class Drawing(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.generators = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]

        def draw(self) -> float:
            return float(sum(generator.random() for generator in self.generators))

        def train_batch(self) -> None:
            super().train_batch()
            self.log(drawn=self.draw())

        def valid(self) -> dict[str, float]:
            return {"drawn": self.draw()}

    for interval in (0, 1):
        trained(Drawing, tmp_path / str(interval), valid_interval=interval)
    one, other = (curve(tmp_path / folder, "train/drawn") for folder in ("0", "1"))
    assert one == other
    same_bits(*(tmp_path / f / "checkpoints/step-00000006" for f in ("0", "1")), todo=False)


def test_a_valid_that_does_not_read_what_evaluate_was_given_is_told(tmp_path: Path) -> None:
    class Bare(Tiny):
        def valid(self) -> dict[str, float]:
            return {"batches": float(len(list(self.valid_loader)))}

        def on_train_end(self) -> None:
            self.evaluate()
            self.evaluate(self.valid_loader)
            assert "did not call" not in (self.output_dir / "worker_0.log").read_text()
            self.evaluate(self.train_loader)

    trained(Bare, tmp_path / "bare")
    log = (tmp_path / "bare/worker_0.log").read_text()
    assert log.count("valid: did not call self.valid_batches(); these are numbers of the") == 1


@pytest.mark.parametrize(("monitor", "mode", "is_told"), [
    ("loss", "max", True), ("valid/error", "max", True), ("loss", "min", False),
    ("accuracy", "max", False),
])  # fmt: skip
def test_a_loss_of_which_more_is_better_is_told(
    tmp_path: Path, monitor: str, mode: str, is_told: bool
) -> None:
    exp = make(Tiny, tmp_path / "run", monitor=monitor, monitor_mode=mode)
    exp.setup()
    exp.close()
    told = "expected training.monitor_mode='min'" in (tmp_path / "run/worker_0.log").read_text()
    assert told == is_told


@pytest.mark.parametrize("returned", [None, {}])
def test_a_valid_without_a_result_is_told_once_unless_it_is_meant(
    tmp_path: Path, returned: Any
) -> None:
    class Drawing(Tiny):
        def valid(self) -> Any:
            for _ in self.valid_batches():
                pass
            return returned

    trained(Drawing, tmp_path, valid_interval=2)
    told = (tmp_path / "worker_0.log").read_text()
    text = "[2] valid: returned None and logged nothing, so it has no result; expected numbers by"
    assert told.count("returned None") == told.count(text) == int(returned is None)
