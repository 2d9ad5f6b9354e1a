"""From an experiment to its checkpoints and back."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from forks import LONG_SECONDS
from tiny import Tiny, make, refusing, run_of, same_bits, saved, trained

from expbase import __version__
from expbase.__main__ import main
from expbase.base.arrays import parse
from expbase.checkpoint import layout, storage
from expbase.checkpoint.checkpointer import Checkpointer
from expbase.checkpoint.layout import CheckpointError, FormatError
from expbase.record.sources import Code


class Rich(Tiny):
    """Something in every section of a checkpoint."""

    def setup_model(self) -> None:
        super().setup_model()
        self.history: list[Any] = []
        self.judge = paddle.nn.Linear(1, 1)
        self.register_stateful("history")
        self.exclude_from_state("judge")

    def train_batch(self) -> None:
        super().train_batch()
        self.history.append((self.iteration, np.random.rand()))

    def on_save_checkpoint(self) -> dict[str, Any]:
        self.history = [*self.history, "saved"]  # before anything is captured
        return {"array": np.arange(self.iteration), "drawn": np.random.rand()}

    def on_load_checkpoint(self, states: Any) -> None:
        self.loaded = states
        np.random.rand()


@pytest.mark.device
def test_registered_values_and_own_states_come_back(tmp_path: Path) -> None:
    first = trained(Rich, tmp_path / "run", max_iteration=4)
    second = make(Rich, tmp_path / "run", max_iteration=8)
    second.setup()
    second.resume_or_load()
    assert second.history == first.history
    assert second.loaded["array"].tolist() == [0, 1, 2, 3]
    second.close()


@pytest.mark.parametrize("words", ["own", "checkpoint_path", "init_model_path"])
def test_a_start_reads_each_file_of_a_checkpoint_once_to_verify_it(
    tmp_path: Path, two_iterations: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(two_iterations, tmp_path / "run")
    files = [*json.loads((run / "checkpoints/step-00000002/manifest.json").read_bytes())["files"]]
    verified: list[str] = []
    verify = storage._verify_file
    monkeypatch.setattr(
        storage, "_verify_file", lambda f, entry: verified.append(f.name) or verify(f, entry)
    )
    args = {} if words == "own" else {words: str(run)}
    exp = make(Rich, run if words == "own" else tmp_path / "new", args, max_iteration=2)
    exp.setup()
    exp.run()
    assert sorted(verified) == sorted(files)


@pytest.fixture(scope="module")
def two_iterations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Rich: copy it before you change it."""
    run: Path = tmp_path_factory.mktemp("rich") / "run"
    trained(Rich, run, max_iteration=2)
    return run


def test_a_layer_that_is_excluded_makes_no_file(two_iterations: Path) -> None:
    files = {path.name for path in (two_iterations / "checkpoints/step-00000002").iterdir()}
    expected = {"model.safetensors", "optimizer.safetensors", "@values.safetensors"}
    assert files == {*expected, "state.json", "manifest.json"}


ENTRIES = ("objects shares loop data values gradients log listeners environment own").split()


def test_a_checkpoint_holds_these_entries(two_iterations: Path) -> None:
    state = json.loads((two_iterations / "checkpoints/step-00000002/state.json").read_bytes())
    assert sorted(state["values"]) == sorted(ENTRIES)


@pytest.fixture
def run_and_start(tmp_path: Path, two_iterations: Path) -> Iterator[tuple[Path, Any]]:
    """A copy of that run, and a start that is about to go on with it."""
    run = shutil.copytree(two_iterations, tmp_path / "run")
    exp = make(Rich, run, max_iteration=4)
    exp.setup()
    yield run, exp
    exp.close()


def refusal(exp: Tiny) -> str:
    """What is wrong with the checkpoint that it is to go on from; empty: nothing."""
    try:
        exp.resume_or_load()
    except CheckpointError as error:
        return str(error)
    return ""


def without(entry: str) -> Callable[[Any], Any]:
    return lambda state: state["values"].pop(entry)


def own(value: Any) -> Callable[[Any], Any]:
    return lambda state: state["values"].update(own=value)


def test_an_entry_that_is_dropped_is_missed(
    two_iterations: Path, run_and_start: tuple[Path, Any]
) -> None:
    run, exp = run_and_start
    for entry in ENTRIES:
        rewrite(two_iterations, run, without(entry))
        assert f"{entry}: missing in the checkpoint" in refusal(exp)


DAMAGED = "state.json: damaged, or not of expbase"


def test_a_state_that_is_not_ours_is_damaged_and_changes_nothing(
    two_iterations: Path, run_and_start: tuple[Path, Any]
) -> None:
    run, exp = run_and_start
    before = exp.model[0].weight.numpy().tobytes()
    for what, change in {
        "empty": "",
        "a list": "[1]",
        "no entries": "{}",
        "nested without end": "[" * 100_000,
        "a tensor that is not there": own({"x": {"$tensor": "gone"}}),
        "a number for a tuple": own({"x": {"$tuple": 1}}),
        "a list for a dict": own([1]),
    }.items():
        rewrite(two_iterations, run, change)
        assert DAMAGED in refusal(exp), what
        assert exp.model[0].weight.numpy().tobytes() == before, what
    rewrite(two_iterations, run, lambda state: None, metrics_bytes=10**30)
    assert ".json: damaged, or not of expbase" in refusal(exp)


def test_a_value_of_another_type_is_an_error_that_names_the_file(
    two_iterations: Path, run_and_start: tuple[Path, Any]
) -> None:
    run, exp = run_and_start
    for what, change in {
        "an epoch": lambda state: state["values"]["loop"].update(epoch="x"),
        "a gradient": lambda state: state["values"]["gradients"].update({"model.0.weight": "x"}),
    }.items():
        rewrite(two_iterations, run, change)
        assert DAMAGED in refusal(exp), what


def test_a_run_of_another_format_is_refused_before_its_data_and_stays_what_it_was(
    tmp_path: Path, two_iterations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_iterations, tmp_path / "run")
    before = (tmp_path / "run/ledger.jsonl").read_bytes()

    def change(state: dict[str, Any]) -> None:
        state.update(format=6, ranks=state.pop("local"))

    rewrite(two_iterations, tmp_path / "run", change)

    class Early(Rich):
        def setup_dataloader(self) -> None:
            raise AssertionError("its data is read")

    of_manifest = f"finish the run with expbase {__version__}, or"
    text = f"has format 6, and this version reads 15: {of_manifest}"
    with pytest.raises(FormatError, match=text):
        trained(Early, tmp_path / "run", max_iteration=4)
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    assert "finished" in capsys.readouterr().out


def rewrite(source: Path, run: Path, change: Any, **facts: Any) -> None:
    """Writes the checkpoint of `source` into `run`, intact, with another state.json or other facts.

    `change` is what is done to the state, or the text that takes its place.
    """
    path = layout.listed(source / "checkpoints")[-1]
    files = {name: data.tobytes() for name, data in storage.opened(path).files.items()}
    if callable(change):
        state = json.loads(files["state.json"])
        change(state)
        change = json.dumps(state)
    files["state.json"] = change.encode()
    info = {**storage.read_manifest(path)["info"], **facts}
    storage.write(run / "checkpoints", 2, {name: [data] for name, data in files.items()}, info)


def test_another_model_is_refused_and_the_checkpoint_stays(tmp_path: Path) -> None:
    class Wider(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.model[3].weight = paddle.create_parameter([8, 5], "float32")
            self.optimizer = paddle.optimizer.Adam(
                paddle.optimizer.lr.CosineAnnealingDecay(0.01, 30),
                parameters=self.model.parameters(),
            )

    trained(Tiny, tmp_path / "run", max_iteration=2)
    with pytest.raises(CheckpointError) as caught:
        trained(Wider, tmp_path / "run", max_iteration=4)
    text = str(caught.value)
    assert "model: '3.weight' is float32 [8, 2] in the checkpoint and float32 [8, 5] here." in text
    assert "moment1/model.3.weight" in text
    assert "Nothing was changed" in text
    exp = trained(Tiny, tmp_path / "run", max_iteration=4)
    assert exp.iteration == 4


def test_a_damaged_checkpoint_is_passed_over_loudly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=4)
    (tmp_path / "run/checkpoints/step-00000004/optimizer.safetensors").write_bytes(b"torn")
    exp = trained(Tiny, tmp_path / "run", max_iteration=6)
    err = capfd.readouterr().err
    assert "WARNING: damaged checkpoint" in err
    assert "optimizer.safetensors: is no file of" in err
    assert "CONTINUING" in err
    assert "step-00000002" in err
    assert exp.iteration == 6


def test_one_that_cannot_be_deleted_is_told_once_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "step-00000002")
    for last in (8, 10):
        assert trained(Tiny, tmp_path / "run", max_iteration=last, keep_last=1).finished
        text = "WARNING: step-00000002 cannot be deleted: Device or resource busy"
        assert capfd.readouterr().err.count(text) == 1
        assert saved(tmp_path / "run") == [2, last]


def test_a_damaged_one_that_cannot_be_moved_aside_is_passed_over_and_costs_no_good_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trained(Tiny, run, max_iteration=6)
    (run / "checkpoints/step-00000006/optimizer.safetensors").write_bytes(b"torn")
    refusing(monkeypatch, "step-00000006")

    class Looking(Tiny):
        def on_train_batch_end(self) -> None:
            if self.iteration == 5:
                self.save()
            if self.iteration == 6:  # what was saved at 5 is there, and pruned what was before
                run_of(self).checkpointer.close()
                assert saved(run) == [5, 6]

    assert trained(Looking, run, max_iteration=7, save_interval=0, keep_last=1).finished is True
    err = capfd.readouterr().err
    assert "It cannot be moved aside (Device or resource busy), and is passed over." in err
    assert "CONTINUING the run" in err
    assert "from step-00000004" in err


def test_the_lines_that_a_checkpoint_counts_on_are_on_disk_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, flush = [], os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    trained(Tiny, tmp_path / "run", max_iteration=2)
    before = flushed[: flushed.index("manifest.json")]
    assert {"metrics.jsonl", "vdlrecords.run.log", "worker_0.log"} <= {*before}


def test_nothing_but_damaged_checkpoints_is_an_error_and_no_fresh_start(
    tmp_path: Path, two_iterations: Path
) -> None:
    run = shutil.copytree(two_iterations, tmp_path / "run")
    (run / "checkpoints/step-00000002/manifest.json").unlink()
    metrics = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):  # the same command again must not begin anew
        with pytest.raises(CheckpointError, match="no intact checkpoint is left, and damaged-step"):
            trained(Rich, run, max_iteration=4)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    aside = run / "checkpoints/damaged-step-00000002"
    assert [file.name for file in aside.parent.iterdir()] == [aside.name]


@pytest.mark.device
def test_a_save_holds_its_iteration_though_kernels_are_queued_and_training_goes_on(
    tmp_path: Path,
) -> None:
    class Queueing(Tiny):
        """Counts in a weight, on the device, behind what takes a while there; waits for nothing."""

        is_busy = False

        def train_batch(self) -> None:
            self.read_batch()
            for number in range(500 * self.is_busy):
                self.table.fill_(-number)
            self.table.fill_(self.iteration)

        def setup_model(self) -> None:
            super().setup_model()
            self.embedding = paddle.nn.Embedding(100, 300)
            self.table = self.embedding.weight
            self.table.stop_gradient = True

        def on_train_batch_begin(self) -> None:
            self.table.fill_(-1)

    busy = type("Queueing", (Queueing,), {"is_busy": True})
    for name, experiment in (("idle", Queueing), ("busy", busy)):
        trained(experiment, tmp_path / name, max_iteration=3, save_interval=1, keep_last=0)
    for iteration in saved(tmp_path / "busy"):
        step = f"checkpoints/step-{iteration:08d}"
        same_bits(tmp_path / "busy" / step, tmp_path / "idle" / step)
        table = parse((tmp_path / "busy" / step / "embedding.safetensors").read_bytes())["weight"]
        assert {*table.tensor().flatten().tolist()} == {iteration}


@pytest.mark.device
@pytest.mark.parametrize("how", ["zeros", "pending", "never cleared"])
def test_gradients_that_are_there_come_back(tmp_path: Path, how: str) -> None:
    class TwoHeads(Tiny):
        """Each update uses one of two heads; zeros left in the other one move it on."""

        def setup_model(self) -> None:
            super().setup_model()
            self.heads = [paddle.nn.Linear(2, 2) for _ in range(2)]
            layers = [self.model, *self.heads][how == "never cleared" :]
            self.optimizer = paddle.optimizer.Adam(
                0.01, parameters=[p for layer in layers for p in layer.parameters()]
            )

        def train_batch(self) -> None:
            points, _ = self.read_batch()
            self.heads[self.iteration % 3 == 0](self.model(points)).square().mean().backward()
            if how != "pending" or self.iteration % 4 == 0:  # else they wait over the checkpoint
                self.optimizer.step()
                self.optimizer.clear_grad()

    trained(TwoHeads, tmp_path / "whole", max_iteration=5)
    for end in (3, 5):
        trained(TwoHeads, tmp_path / "parts", max_iteration=end)
    step = "checkpoints/step-00000005"
    same_bits(tmp_path / "whole" / step, tmp_path / "parts" / step)


def test_a_layer_that_grows_after_setup_is_told_at_the_save(tmp_path: Path) -> None:
    class Growing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.model.add_sublayer("adapter", paddle.nn.Linear(2, 2))

    with pytest.raises(RuntimeError, match=r"self\.model\.adapter: appeared after setup"):
        trained(Growing, tmp_path / "run")


def test_a_layer_in_an_object_of_the_users_is_saved_like_one_in_a_deque(tmp_path: Path) -> None:
    class Hiding(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.holder = Holder()
            self.holder.net, self.holder.part = paddle.nn.Linear(2, 2), self.model[0]
            self.queue = deque([paddle.nn.Linear(2, 2)])

        def train_batch(self) -> None:
            super().train_batch()
            weight = self.holder.net.weight
            weight.set_value(weight + 1)

    whole: Any = trained(Hiding, tmp_path / "whole", max_iteration=4)
    trained(Hiding, tmp_path / "run", max_iteration=2)
    run: Any = trained(Hiding, tmp_path / "run", max_iteration=4)
    assert (whole.holder.net.weight == run.holder.net.weight).all()
    files = {file.name for file in (tmp_path / "run/checkpoints/step-00000002").iterdir()}
    assert {"queue.0.safetensors", "holder.net.safetensors", "model.safetensors"} <= files


class Holder:
    """An object of the user's."""

    net: Any
    part: Any


def test_another_rank_knows_the_newest_checkpoint_by_its_name(tmp_path: Path) -> None:
    """Rank 0 alone has written it."""
    run = run_of(trained(Tiny, tmp_path / "run", max_iteration=4))

    def checkpointer(folder: str) -> Checkpointer:
        return Checkpointer(
            tmp_path / folder / "checkpoints",
            run.start.training,
            run.start.logger,
            contents=dict,
            told=str,
            on_written=print,
            code=Code.of(Tiny),
            facts=dict,
        )

    of_rank_1 = checkpointer("run")
    of_rank_1._rank = 1
    assert of_rank_1.newest_name == run.checkpointer.newest_name == "step-00000004"
    elsewhere = checkpointer("other")
    assert elsewhere.newest_name == "none yet"
    elsewhere._rank = 1
    assert elsewhere.newest_name == "rank 0's newest"


@pytest.mark.parametrize("failing", [2, 6])
def test_a_first_or_last_save_that_fails_ends_the_run_and_keeps_the_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    class Filling(Tiny):
        def on_save_checkpoint(self) -> None:
            if self.iteration == failing:
                monkeypatch.setattr(storage, "write_flushed", full)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"step-0+\d: .*No space left.*checkpoints are intact"
    ):
        trained(Filling, tmp_path / "run")
    monkeypatch.undo()
    assert saved(tmp_path / "run") == [n for n in (2, 4) if n < failing]
    assert trained(Tiny, tmp_path / "run").iteration == 6


def test_names_of_the_format_are_no_ones_names(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            for name in ("values", "rank_head", "parameters", "state"):
                setattr(self, name, paddle.nn.Linear(1, 1))

    trained(Named, tmp_path / "run", max_iteration=2)
    exp = trained(Named, tmp_path / "run", max_iteration=4)
    assert exp.iteration == 4


def test_a_tool_can_wait_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go_on = storage.write, threading.Event()

    def slowly(*args: Any) -> Path:
        assert go_on.wait(LONG_SECONDS)
        return write(*args)

    monkeypatch.setattr(storage, "write", slowly)
    exp = make(Tiny, tmp_path / "run", save_interval=1)
    exp.setup()
    with exp.internals.closing():
        assert exp.going_on()
        exp.train_batch()
        exp.end_iteration()
        assert saved(tmp_path / "run") == []
        threading.Timer(0.05, go_on.set).start()
        exp.internals.wait_for_checkpoint()
        assert saved(tmp_path / "run") == [1]
