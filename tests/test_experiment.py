"""The life cycle, the loop, evaluation, logging and closing of ExperimentBase."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import re
import threading
from pathlib import Path
from typing import Any

import forks
import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from tiny import Notes, Tiny, curve, make, metrics, run_of, same_bits, trained, training_config

from expbase import Config, ConfigError, ExperimentBase
from expbase.checkpoint import layout, storage
from expbase.checkpoint.layout import CheckpointError
from expbase.checkpoint.named import find_in_run
from expbase.config import load_yaml
from expbase.front import put_in_front
from expbase.record.meter import NonFiniteError
from expbase.smoke import Smoke


def saved(output: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (output / "checkpoints").glob("step-*"))


# --- construction ------------------------------------------------------------------------------


def test_a_missing_method_is_named_at_construction(tmp_path: Path) -> None:
    class Half(ExperimentBase):
        def setup_model(self) -> None: ...

        def train_batch(self) -> None: ...

    with pytest.raises(TypeError, match="Half: setup_dataloader, valid not defined"):
        make(Half, tmp_path)


def test_a_mistyped_method_is_named_beside_the_missing_one(tmp_path: Path) -> None:
    class Mistyped(ExperimentBase):
        def setup_dataloaders(self) -> None: ...

        def setup_model(self) -> None: ...

        def train_step(self) -> None: ...

        def valid(self) -> None: ...

    hint = "By setup_dataloaders, did you mean setup_dataloader? By train_step, did you mean train_"
    with pytest.raises(TypeError, match=re.escape(hint)):
        make(Mistyped, tmp_path)


@pytest.mark.parametrize("output", [None, ""])
def test_no_output_is_an_error_at_construction(output: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--output: not given"):
        Tiny(training_config(), argparse.Namespace(output=output, device="cpu"))


def test_three_training_keys_and_two_args_are_enough(tmp_path: Path) -> None:
    config = Config({"training": {"max_iteration": 2, "valid_interval": 2, "save_interval": 2}})
    exp = Tiny(config, argparse.Namespace(output=str(tmp_path / "run"), device=None))
    exp.setup()
    exp.run()
    assert exp.iteration == 2
    assert saved(tmp_path / "run") == [2]
    assert set(config.training) == {"max_iteration", "valid_interval", "save_interval"}


def test_an_unknown_device_is_an_error_that_names_it(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run", {"device": "toaster"})
    with pytest.raises(ConfigError, match=r"--device: 'toaster' given; expected cpu"):
        exp.setup()


def test_an_init_without_super_is_named(tmp_path: Path) -> None:
    class Lonely(Tiny):
        def __init__(self, config: Any, args: Any) -> None:
            self.mine = config

    with pytest.raises(AttributeError, match="_ExperimentBase__run"):
        make(Lonely, tmp_path / "run").setup()


# --- setup -------------------------------------------------------------------------------------


def test_setup_goes_in_the_order_of_the_design(tmp_path: Path) -> None:
    calls: list[str] = []
    names = (
        "prepare setup_device setup_output_dir dump_config setup_visualizer setup_logger "
        "setup_checkpointer on_setup_begin setup_dataloader setup_model startup check_setup "
        "on_setup_end"
    ).split()

    def wrapped(name: str) -> Any:
        def method(self: ExperimentBase) -> None:
            calls.append(name)
            getattr(Tiny, name)(self)

        return method

    traced = type("Traced", (Tiny,), {name: wrapped(name) for name in names})
    exp = make(traced, tmp_path / "run")
    exp.setup()
    exp.close()
    assert calls == names


def test_a_directory_that_nobody_locked_is_refused(tmp_path: Path) -> None:
    class WithoutSuper(Tiny):
        def setup_output_dir(self) -> None:
            Path(self.args.output).mkdir()

    with pytest.raises(TypeError, match=r"setup_output_dir: .*expected super's call"):
        make(WithoutSuper, tmp_path / "run").setup()


@pytest.mark.parametrize(
    ("attribute", "text"), [("model", "no paddle.nn.Layer"), ("optimizer", "no optimizer")]
)
def test_a_layer_and_an_optimizer_must_stand_on_self(
    tmp_path: Path, attribute: str, text: str
) -> None:
    class Lacking(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            setattr(self, attribute, None)

    with pytest.raises(ValueError, match=text):
        make(Lacking, tmp_path / "run").setup()


def test_an_optimizer_of_parameters_that_nobody_saves_is_refused(tmp_path: Path) -> None:
    class Hidden(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            head = paddle.nn.Linear(2, 2)
            self.head_optimizer = paddle.optimizer.SGD(parameters=head.parameters())

    with pytest.raises(ValueError, match=r"self\.head_optimizer: updates 2 parameters"):
        make(Hidden, tmp_path / "run").setup()


def test_what_training_would_lose_is_said_before_or_after_the_first_update(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Careless(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.head = paddle.nn.Linear(2, 2)

        def train_batch(self) -> None:
            next(iter(self.train_loader))

    trained(Careless, tmp_path / "run", max_iteration=2)
    err = capfd.readouterr().err
    assert "self.head has trainable parameters, and no optimizer updates them" in err
    assert err.count("train_batch did not call self.read_batch()") == 1


def test_state_is_named_before_training(tmp_path: Path) -> None:
    class Late(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.register_stateful("iteration")

    with pytest.raises(RuntimeError, match="state is named in setup_model"):
        trained(Late, tmp_path / "run")


def test_read_batch_in_validation_is_an_error(tmp_path: Path) -> None:
    class Stealing(Tiny):
        def valid(self) -> None:  # type: ignore[override]
            self.read_batch()

    with pytest.raises(RuntimeError, match=r"read_batch: called in the phase 'valid'.*valid_batch"):
        trained(Stealing, tmp_path / "run")


def test_another_data_set_is_said_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Smaller(Tiny):
        size = 32

    trained(Tiny, tmp_path / "run", max_iteration=2)
    text = "40 samples, shuffled, .* there, 32 samples, shuffled, .* now, in the middle of epoch 1;"
    with pytest.raises(CheckpointError, match=text):
        trained(Smaller, tmp_path / "run", max_iteration=4)
    capfd.readouterr()
    exp = trained(Smaller, tmp_path / "run", {"force": True}, max_iteration=4)
    assert exp.epoch == 2
    assert (
        "40 samples, shuffled, in batches of 4 there, 32 samples, shuffled, in batches "
        "of 4 now: the next epoch is the first one of the new size"
    ) in capfd.readouterr().err


@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_with_workers_ends_cleanly_and_continues_to_the_same_bits(
    tmp_path: Path, persistent: bool
) -> None:
    class Working(Tiny):
        loader_options = {"num_workers": 2, "persistent_workers": persistent}  # noqa: RUF012

    trained(Tiny, tmp_path / "without", max_iteration=14)
    trained(Working, tmp_path / "with", max_iteration=7, valid_interval=0)
    trained(Working, tmp_path / "with", max_iteration=14)
    for file in ("model.safetensors", "optimizer.safetensors"):
        end = f"checkpoints/step-00000014/{file}"
        assert (tmp_path / "with" / end).read_bytes() == (tmp_path / "without" / end).read_bytes()
    assert "ERROR" not in (tmp_path / "with/worker_0.log").read_text()


def test_an_empty_loader_is_an_error_before_training(tmp_path: Path) -> None:
    class Empty(Tiny):
        size = 3
        loader_options = {"drop_last": True}  # noqa: RUF012

    exp = make(Empty, tmp_path / "run")
    with pytest.raises(ValueError, match=r"self\.train_loader: has no batch"):
        exp.setup()


def test_the_config_of_the_first_start_stays(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    first = (tmp_path / "run/config.yaml").read_text()
    trained(Tiny, tmp_path / "run", max_iteration=4)
    assert (tmp_path / "run/config.yaml").read_text() == first


# --- the loop ----------------------------------------------------------------------------------


def test_the_last_iteration_is_validated_and_saved_off_the_interval(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=5, keep_last=0)
    assert saved(tmp_path / "run") == [2, 4, 5]
    assert list(curve(tmp_path / "run", "valid/accuracy")) == [3, 5]


def test_the_last_iteration_on_the_interval_is_validated_and_saved_once(tmp_path: Path) -> None:
    class Counting(Tiny):
        validated = 0

        def valid(self) -> dict[str, float]:
            self.validated += 1
            return super().valid()

    exp = trained(Counting, tmp_path / "run", max_iteration=6)
    assert exp.validated == 2


def test_an_interval_of_zero_means_never(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", valid_interval=0, save_interval=0, log_interval=0)
    assert saved(tmp_path / "run") == []
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_epochs_count_passes_begun_and_max_epoch_ends_the_run(tmp_path: Path) -> None:
    exp = trained(Tiny, tmp_path / "run", max_iteration=0, max_epoch=2)
    assert (exp.iteration, exp.epoch, exp.batch_in_epoch) == (20, 2, 10)
    assert exp.batches_per_epoch == 10


def test_validation_by_passes_and_by_iterations_come_once_where_they_meet(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=20, valid_interval=10, valid_every_epoch=1)
    lines = [line["iteration"] for line in metrics(tmp_path / "run") if "valid/accuracy" in line]
    assert lines == [10, 20]


def test_saves_by_passes(tmp_path: Path) -> None:
    exp = trained(Tiny, tmp_path / "run", max_iteration=25, save_interval=0, save_every_epoch=1)
    assert saved(tmp_path / "run") == [10, 20, 25]
    assert exp.epoch == 3


def test_a_train_batch_may_read_any_number_of_batches(tmp_path: Path) -> None:
    class Greedy(Tiny):
        def train_batch(self) -> None:
            self.read_batch()
            self.read_batch()
            super().train_batch()

    exp = trained(Greedy, tmp_path / "run", max_iteration=4)
    assert (exp.epoch, exp.batch_in_epoch) == (2, 2)


def test_stop_ends_after_the_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    class Stopping(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.stop("enough")

    exp = trained(Stopping, tmp_path / "run", max_iteration=100, save_interval=50)
    assert exp.iteration == 3
    assert saved(tmp_path / "run") == [3]
    assert "[3] STOPPED by enough" in (tmp_path / "run/worker_0.log").read_text()


# --- going on ----------------------------------------------------------------------------------


def test_a_continued_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "whole", max_iteration=26, monitor="accuracy")
    trained(Tiny, tmp_path / "parts", max_iteration=13, monitor="accuracy", valid_interval=0)
    exp = trained(Tiny, tmp_path / "parts", max_iteration=26, monitor="accuracy")
    assert exp.epoch == 3
    one, other = (tmp_path / name / "checkpoints/step-00000026" for name in ("whole", "parts"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_that_a_run_is_continued_is_the_first_thing_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    capfd.readouterr()
    trained(Tiny, tmp_path / "run", max_iteration=4)
    first = capfd.readouterr().err.splitlines()[0]
    assert "CONTINUING" in first
    assert "step-00000002" in first
    assert "--fresh" in first


def test_a_finished_run_says_so_and_trains_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Fragile(Tiny):
        def train_batch(self) -> None:
            raise AssertionError("trained again")

    trained(Tiny, tmp_path / "run", max_iteration=2)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    trained(Fragile, tmp_path / "run", max_iteration=2)
    assert "FINISHED already: iteration 2" in capfd.readouterr().err
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    exp = trained(Tiny, tmp_path / "run", {"fresh": True}, max_iteration=4)
    assert exp.iteration == 4
    assert saved(tmp_path / "run.old-1") == [2]
    assert curve(tmp_path / "run", "train/loss").keys() == {1, 2, 3, 4}


def test_another_runs_state_is_continued_in_a_new_place(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "first", max_iteration=4)
    for where in ("first", "first/checkpoints", "first/checkpoints/step-00000004"):
        output = tmp_path / f"new-{where.replace(chr(47), chr(45))}"
        exp = trained(Tiny, output, {"checkpoint_path": str(tmp_path / where)}, max_iteration=6)
        assert list(curve(output, "train/loss")) == [5, 6]
        assert exp.iteration == 6


def test_checkpoint_path_takes_the_names_that_evaluate_takes(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", monitor="accuracy", save_interval=3, valid_interval=3)
    best = layout.iteration_of(find_in_run(tmp_path / "run", "best"))
    for name, iteration in {
        "best": best, "last": 6, "step-3": 3, "3": 3, "checkpoints/step-3": 3, "step-00000006": 6,
    }.items():  # fmt: skip
        exp = make(Tiny, tmp_path / "new", {"checkpoint_path": str(tmp_path / "run" / name)})
        exp.setup()
        exp.resume_or_load()
        assert exp.iteration == iteration, name
        exp.close()
    for name, text in (("7", "there are: step-00000003"), ("bset", "no intact checkpoint there")):
        with pytest.raises(CheckpointError, match=text):
            trained(Tiny, tmp_path / "new", {"checkpoint_path": str(tmp_path / "run" / name)})


def test_after_a_failure_before_the_first_update_another_config_may_begin(tmp_path: Path) -> None:
    class Failing(Tiny):
        def train_batch(self) -> None:
            if self.config.training.seed < 2:
                raise ValueError("too large")
            super().train_batch()

    for seed in (0, 1):
        with pytest.raises(ValueError, match="too large"):
            trained(Failing, tmp_path / "run", seed=seed)
    trained(Failing, tmp_path / "run", seed=2, max_iteration=2)
    assert load_yaml(tmp_path / "run/config.yaml")["training"]["seed"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    exp = trained(Failing, tmp_path / "run", seed=2, max_iteration=3)
    assert exp.iteration == 3
    lines = (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in lines if '"event": "start"' in line]
    assert starts[-1]["config"]["training.seed"] == 2
    with pytest.raises(ConfigError, match=r"training\.seed: 2 there, 1 now"):
        trained(Failing, tmp_path / "run", seed=1)


def test_the_own_checkpoint_goes_before_checkpoint_path(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "other", max_iteration=2)
    trained(Tiny, tmp_path / "run", max_iteration=4)
    args = {"checkpoint_path": str(tmp_path / "other")}
    trained(Tiny, tmp_path / "run", args, max_iteration=5)
    assert list(curve(tmp_path / "run", "train/loss")) == [1, 2, 3, 4, 5]


def test_two_experiments_in_one_process_do_not_meet(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "alone", max_iteration=6)
    trained(Tiny, tmp_path / "one", max_iteration=4)
    other = make(Tiny, tmp_path / "other", max_iteration=6)
    other.setup()
    one = trained(Tiny, tmp_path / "one", max_iteration=6)  # resumes while the other is alive
    other.run()
    for name in ("one", "other"):
        end = tmp_path / name / "checkpoints/step-00000006"
        for file in ("model.safetensors", "optimizer.safetensors"):
            alone = tmp_path / "alone/checkpoints/step-00000006" / file
            assert (end / file).read_bytes() == alone.read_bytes()
    assert "[6]" in (tmp_path / "other/worker_0.log").read_text()
    assert (tmp_path / "one/worker_0.log").read_text().count("[6] saved") == 1
    assert one.iteration == 6


def killed_and_continued(experiment: type[Tiny], folder: Path, at: int, **training: Any) -> None:
    """Asserts that a run that dies at an iteration and goes on equals one that does not."""

    class Dying(experiment):  # type: ignore[misc, valid-type]
        def train_batch(self) -> None:
            if self.iteration == at:
                raise RuntimeError("died")
            super().train_batch()

    options = {"max_iteration": 9, "save_interval": 4, "valid_interval": 3, **training}
    trained(experiment, folder / "whole", **options)
    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, folder / "parts", **options)
    exp = trained(experiment, folder / "parts", **options)
    end = f"checkpoints/step-{exp.iteration:08d}"
    same_bits(folder / "whole" / end, folder / "parts" / end)
    for name in ("train/loss", "valid/accuracy"):
        assert curve(folder / "parts", name) == curve(folder / "whole", name)


class SavingInEvaluation(Tiny):
    def on_evaluate_end(self, results: Any) -> None:
        self.save()


class SavingInTraining(Tiny):
    def train_batch(self) -> None:
        if self.iteration == 5:
            self.save()
        super().train_batch()


class SavingAfterTheBatch(Tiny):
    def on_train_batch_end(self) -> None:
        if self.iteration == 5:
            self.save()


class DrawingInEvents(Tiny):
    def on_train_begin(self) -> None:
        self.noise = np.random.rand()

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"drawn": np.random.rand() < 2}


class Drifting(Tiny):
    def setup_model(self) -> None:
        super().setup_model()
        self.count = 0
        self.register_stateful("count")

    def on_save_checkpoint(self) -> None:
        self.count += 1

    def train_batch(self) -> None:
        super().train_batch()
        self.log(count=self.count)


@pytest.mark.parametrize(
    "experiment",
    [SavingInEvaluation, SavingInTraining, SavingAfterTheBatch, DrawingInEvents, Drifting],
)
@pytest.mark.parametrize("at", [6, 7])
def test_whatever_the_events_do_a_killed_run_ends_the_same(
    tmp_path: Path, experiment: type[Tiny], at: int
) -> None:
    killed_and_continued(experiment, tmp_path, at)


def test_a_save_within_an_iteration_comes_at_its_end(tmp_path: Path) -> None:
    trained(SavingInTraining, tmp_path / "run", save_interval=100, keep_last=0)
    assert saved(tmp_path / "run") == [5, 6]


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_pending_nan_that_is_allowed_does_not_stop_a_save(tmp_path: Path, policy: str) -> None:
    class Bad(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            self.log(loss=float("nan"))

    exp = trained(Bad, tmp_path / "run", nonfinite=policy, log_interval=5, save_interval=2)
    assert exp.iteration == 6


def test_an_infinite_score_is_kept(tmp_path: Path) -> None:
    class Unbounded(Tiny):
        def valid(self) -> dict[str, float]:
            return {"perplexity": float("inf")}

    trained(Unbounded, tmp_path / "run", monitor="perplexity", max_iteration=3)
    trained(Unbounded, tmp_path / "run", monitor="perplexity", max_iteration=6)


def test_names_of_the_format_are_no_ones_names(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            for name in ("values", "rank_head", "parameters", "state"):
                setattr(self, name, paddle.nn.Linear(1, 1))

    trained(Named, tmp_path / "run", max_iteration=2)
    exp = trained(Named, tmp_path / "run", max_iteration=4)
    assert exp.iteration == 4


def test_lookahead_and_lbfgs_are_refused_unless_excluded(tmp_path: Path) -> None:
    class Looking(Tiny):
        excluded = False

        def setup_model(self) -> None:
            super().setup_model()
            self.optimizer = paddle.incubate.LookAhead(self.optimizer, alpha=0.2, k=2)
            if self.excluded:
                self.exclude_from_state("optimizer")

    with pytest.raises(ValueError, match=r"self\.optimizer: paddle's LookAhead does not continue"):
        make(Looking, tmp_path / "run").setup()
    Looking.excluded = True
    exp = make(Looking, tmp_path / "run")
    exp.setup()
    exp.close()


def test_a_pass_that_ends_within_an_update_ends_the_run_there(tmp_path: Path) -> None:
    class Pairs(Tiny):
        size = 20  # five batches a pass

        def train_batch(self) -> None:
            self.read_batch()
            super().train_batch()

    rare = {"valid_interval": 0, "log_interval": 0, "keep_last": 0}
    exp = trained(Pairs, tmp_path / "run", max_iteration=0, max_epoch=1, save_interval=50, **rare)
    assert exp.iteration == 3
    trained(Pairs, tmp_path / "every", max_iteration=8, save_interval=0, save_every_epoch=1, **rare)
    assert saved(tmp_path / "every") == [3, 5, 8]


def test_logs_are_cut_back_also_before_the_first_own_checkpoint(tmp_path: Path) -> None:
    class Dying(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 7:
                raise RuntimeError("died")

    trained(Tiny, tmp_path / "first", max_iteration=4)
    args = {"checkpoint_path": str(tmp_path / "first")}
    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, tmp_path / "run", args, save_interval=100, max_iteration=9)
    trained(Tiny, tmp_path / "run", args, save_interval=100, max_iteration=9)
    lines = [line["iteration"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert lines == [5, 6, 7, 8, 9]


def test_interleaved_experiments_save_and_load_each_others_state(tmp_path: Path) -> None:
    one, other = (make(Tiny, tmp_path / name, max_iteration=9) for name in ("one", "other"))
    for exp in (one, other):
        exp.setup()
    for _ in range(5):  # by turns, in one process, by loops of our own
        for exp in (one, other):
            assert exp.going_on()
            exp.train_batch()
            exp.end_iteration()
    one.save()
    one.close()
    args = {"checkpoint_path": str(tmp_path / "one")}
    trained(Tiny, tmp_path / "crossed", args, max_iteration=9)  # while the other is alive
    other.close()
    trained(Tiny, tmp_path / "one", max_iteration=9)
    end = "checkpoints/step-00000009"
    for file in ("model.safetensors", "optimizer.safetensors"):
        own = (tmp_path / "one" / end / file).read_bytes()
        assert (tmp_path / "crossed" / end / file).read_bytes() == own


def test_another_config_is_refused_unless_it_is_forced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    with pytest.raises(ConfigError, match=r"another config:\n  training\.seed: 0 there, 5 now"):
        trained(Tiny, tmp_path / "run", max_iteration=4, seed=5)
    exp = trained(Tiny, tmp_path / "run", {"force": True}, max_iteration=4, seed=5)
    assert exp.iteration == 4
    assert "config: training.seed: 0 at the first start, 5 now" in capfd.readouterr().err


def test_what_was_written_after_the_checkpoint_is_cut_back(tmp_path: Path) -> None:
    from visualdl import LogReader

    class Dying(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 6:
                raise RuntimeError("died")

    options = {"max_iteration": 8, "save_interval": 3, "valid_interval": 2}
    trained(Tiny, tmp_path / "whole", **options)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="died"):
            trained(Dying, tmp_path / "run", **options)
    with (tmp_path / "run/vdlrecords.run.log").open("ab") as file:
        file.write(b"a record that a kill tore")
    trained(Tiny, tmp_path / "run", **options)
    for name in ("train/loss", "valid/accuracy"):
        assert curve(tmp_path / "run", name) == curve(tmp_path / "whole", name)
    iterations = [line["iteration"] for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert iterations == list(range(1, 9))
    reader = LogReader(file_path=str(tmp_path / "run/vdlrecords.run.log"))
    points = reader.get_data("scalar", "train/loss")
    assert [point.id for point in points] == list(range(1, 9))


def test_a_run_that_died_before_its_first_checkpoint_begins_its_logs_anew(tmp_path: Path) -> None:
    class Dying(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, tmp_path / "run", save_interval=100)
    trained(Tiny, tmp_path / "run", max_iteration=4)
    assert [line["iteration"] for line in metrics(tmp_path / "run")][:3] == [1, 2, 3]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failing", [2, 6])
def test_a_first_or_last_save_that_fails_ends_the_run_and_keeps_the_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, background: bool
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
        trained(Filling, tmp_path / "run", background_save=background)
    monkeypatch.undo()
    assert saved(tmp_path / "run") == [n for n in (2, 4) if n < failing]
    assert trained(Tiny, tmp_path / "run").iteration == 6


def test_background_and_plain_saves_write_the_same(tmp_path: Path) -> None:
    for background in (False, True):
        trained(Tiny, tmp_path / str(background), background_save=background)
    same_bits(*(tmp_path / n / "checkpoints/step-00000006" for n in ("True", "False")))


def test_the_ledger_holds_each_start_and_each_end(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    with pytest.raises(ZeroDivisionError):
        trained(Failing, tmp_path / "run", max_iteration=4)
    records = [
        json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()
    ]
    told = [(r["event"], r["iteration"], r.get("reason"), r.get("exit_code")) for r in records]
    assert told == [
        ("start", 0, None, None),
        ("data", 1, None, None),
        ("end", 2, "finished", 0),
        ("start", 2, None, None),
        ("data", 3, None, None),
        ("end", 3, "ZeroDivisionError('the original')", 1),
    ]
    assert records[3]["resumed"] == "step-00000002"
    assert records[1]["first_batch"] != records[4]["first_batch"]


# --- evaluation --------------------------------------------------------------------------------


class Watching(Tiny):
    """Overrides valid without any decorator, and looks at where it runs."""

    def setup_model(self) -> None:
        super().setup_model()
        self.seen = Notes()

    def valid(self) -> dict[str, float]:
        self.seen[:] = [self.phase, self.model.training, self.model[1].training]
        self.seen.append(paddle.is_grad_enabled())
        paddle.rand([3])
        return {"accuracy": 1.0}


def test_valid_runs_in_eval_mode_without_gradients_though_it_is_overridden(tmp_path: Path) -> None:
    exp = trained(Watching, tmp_path / "run")
    assert exp.seen == ["valid", False, False, False]
    assert exp.model.training
    assert exp.phase == "train"


def test_layers_get_back_the_mode_that_each_had(tmp_path: Path) -> None:
    class Frozen(Watching):
        def setup_model(self) -> None:
            super().setup_model()
            self.model[1].eval()

    exp = trained(Frozen, tmp_path / "run")
    assert (exp.model.training, exp.model[1].training) == (True, False)


@pytest.mark.parametrize("experiment", [Tiny, Watching])
def test_when_one_validates_never_changes_training(tmp_path: Path, experiment: type[Tiny]) -> None:
    trained(experiment, tmp_path / "often", valid_interval=1)
    trained(experiment, tmp_path / "never", valid_interval=0)
    often, never = (tmp_path / n / "checkpoints/step-00000006" for n in ("often", "never"))
    same_bits(often, never, todo=False)


def test_what_valid_logs_is_part_of_its_results(tmp_path: Path) -> None:
    class Logging(Tiny):
        def valid(self) -> None:  # type: ignore[override]
            self.log(loss=paddle.to_tensor(1.0))
            self.log(loss=paddle.to_tensor(3.0))

    trained(Logging, tmp_path / "run", max_iteration=3)
    assert curve(tmp_path / "run", "valid/loss") == {3: 2.0}
    assert 2.0 not in curve(tmp_path / "run", "train/loss").values()


def test_an_excluded_model_is_in_eval_mode_too(tmp_path: Path) -> None:
    class Judged(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.judge = paddle.nn.BatchNorm1D(4)
            self.exclude_from_state("judge")

        def valid(self) -> None:  # type: ignore[override]
            for points, _ in self.valid_batches():
                self.judge(points)

    exp = trained(Judged, tmp_path / "run")
    assert exp.judge._mean.tolist() == [0.0] * 4


def test_what_an_overridden_evaluate_returns_counts(tmp_path: Path) -> None:
    class Own(Tiny):
        def evaluate(self) -> dict[str, float]:
            return {**super().evaluate(), "fid": -float(self.iteration)}

    options = {"monitor": "fid", "valid_interval": 1, "save_interval": 1, "keep_last": 1}
    trained(Own, tmp_path / "run", **options)
    assert saved(tmp_path / "run") == [1, 6]


def test_validation_leaves_no_worker_behind(tmp_path: Path) -> None:
    before = {*multiprocessing.active_children()}  # of earlier tests: they may end at any time

    def workers() -> int:
        return len({*multiprocessing.active_children()} - before)

    class Persistent(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            options = {"num_workers": 2, "persistent_workers": True}
            self.valid_loader = DataLoader(self.valid_loader.dataset, batch_size=3, **options)
            self.children: list[int] = []

        def valid(self) -> None:  # type: ignore[override]
            for _ in self.valid_batches():
                break
            list(self.valid_batches())
            self.children.append(workers())

    exp = trained(Persistent, tmp_path / "run", valid_interval=2)
    assert max(exp.children) <= 4
    assert workers() == 0


def test_results_that_are_no_mapping_are_an_error(tmp_path: Path) -> None:
    class Wrong(Tiny):
        def valid(self) -> float:  # type: ignore[override]
            return 0.5

    with pytest.raises(TypeError, match=r"valid: returned 0\.5; expected numbers by name"):
        trained(Wrong, tmp_path / "run")


def test_the_best_checkpoints_are_kept_and_nan_never_wins(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: float("nan"), 4: 0.5, 5: 0.9, 6: 0.2}

    class Scored(Tiny):
        def valid(self) -> dict[str, float]:
            return {"f1": scores[self.iteration]}

    options = {"valid_interval": 1, "save_interval": 1, "keep_last": 1, "monitor": "f1"}
    trained(Scored, tmp_path / "max", **options)
    assert saved(tmp_path / "max") == [2, 6]
    trained(Scored, tmp_path / "min", **options, monitor_mode="min", keep_best=2, keep_every=4)
    assert saved(tmp_path / "min") == [1, 4, 6]


def test_a_monitor_that_valid_does_not_give_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.monitor: 'acc' given; .* accuracy"):
        trained(Tiny, tmp_path / "run", monitor="acc", valid_interval=2)


# --- logging -----------------------------------------------------------------------------------


def test_a_line_holds_the_mean_of_the_window_the_rate_the_speed_and_the_time_left(
    tmp_path: Path,
) -> None:
    trained(Tiny, tmp_path / "each", max_iteration=4)
    trained(Tiny, tmp_path / "window", max_iteration=4, log_interval=2)
    each = curve(tmp_path / "each", "train/loss")
    window = curve(tmp_path / "window", "train/loss")
    assert window == {2: (each[1] + each[2]) / 2, 4: (each[3] + each[4]) / 2}
    line = metrics(tmp_path / "window")[0]
    assert {"iteration", "epoch", "time", "train/lr", "speed/steps_per_second"} <= set(line)
    assert {"speed/samples_per_second", "speed/data_wait", "speed/seconds_left"} <= set(line)
    assert 0.05 < line["speed/memory_gb"] < 100
    assert "speed/slowest_rank" not in line  # there is one


@pytest.mark.parametrize("where", ["attribute", "list"])
def test_the_rate_in_a_line_is_that_of_the_optimizer_that_is_there_now(
    tmp_path: Path, where: str
) -> None:
    class Exchanging(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            if where == "list":
                self.several = [self.optimizer]
                del self.optimizer

        def train_batch(self) -> None:
            self.read_batch()
            if self.iteration == 2:
                new = paddle.optimizer.SGD(0.5, parameters=self.model.parameters())
                if where == "list":
                    self.several[0] = new
                else:
                    self.optimizer = new

    trained(Exchanging, tmp_path / "run", max_iteration=3, save_interval=0)
    assert curve(tmp_path / "run", "train/lr") == {1: 0.01, 2: 0.5, 3: 0.5}


def test_pending_scalars_survive_a_stop_between_two_lines(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "whole", max_iteration=4, log_interval=4)

    class Halting(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.stop()

    trained(Halting, tmp_path / "parts", max_iteration=4, log_interval=4)
    trained(Tiny, tmp_path / "parts", max_iteration=4, log_interval=4)
    loss = "train/loss"
    assert curve(tmp_path / "parts", loss) == curve(tmp_path / "whole", loss)


@pytest.mark.parametrize("interval", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_holds_it(
    tmp_path: Path, interval: int
) -> None:
    class Diverging(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                self.log(loss=float("nan"))

    with pytest.raises(NonFiniteError, match=r"loss=nan at iteration 3.*step-00000002"):
        trained(Diverging, tmp_path / "run", log_interval=interval)
    assert saved(tmp_path / "run") == [2]
    warned = trained(Diverging, tmp_path / "warned", nonfinite="warn")
    assert warned.iteration == 6
    assert "loss=nan at iteration 3" in (tmp_path / "warned/worker_0.log").read_text()


# --- the end -----------------------------------------------------------------------------------


class Failing(Tiny):
    """Fails in training, and again in every handler that comes after."""

    def train_batch(self) -> None:
        super().train_batch()
        raise ZeroDivisionError("the original")

    def on_exception(self, exception: BaseException) -> None:
        self.exceptions = [*getattr(self, "exceptions", []), exception]
        raise RuntimeError("in the handler")

    def on_train_end(self) -> None:
        raise RuntimeError("at the end")

    def terminal(self) -> None:
        self.terminals = getattr(self, "terminals", 0) + 1
        raise RuntimeError("in terminal")


def test_the_original_exception_goes_on_whatever_the_handlers_do(tmp_path: Path) -> None:
    exp = make(Failing, tmp_path / "run")
    exp.setup()
    with pytest.raises(ZeroDivisionError, match="the original"):
        exp.run()
    exp.close()
    assert [str(e) for e in exp.exceptions] == ["the original"]
    assert exp.terminals == 1
    log = (tmp_path / "run/worker_0.log").read_text()
    assert log.count("ZeroDivisionError: the original") == 1
    for text in ("in the handler", "at the end", "in terminal"):
        assert text in log


def test_a_failure_in_terminal_alone_is_an_error(tmp_path: Path) -> None:
    class Ending(Tiny):
        def terminal(self) -> None:
            raise OSError("upload failed")

    with pytest.raises(OSError, match="upload failed"):
        trained(Ending, tmp_path / "run", max_iteration=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_everything_is_closed_once_however_it_ends(
    tmp_path: Path, error: type[BaseException]
) -> None:
    class Interrupted(Tiny):
        closed = 0

        def train_batch(self) -> None:
            raise error

        def terminal(self) -> None:
            self.closed += 1

    handlers = list(logging.getLogger().handlers)
    exp = make(Interrupted, tmp_path / "run")
    exp.setup()
    with pytest.raises(error):
        exp.run()
    exp.close()
    assert exp.closed == 1
    assert logging.getLogger().handlers == handlers
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    trained(Tiny, tmp_path / "run", max_iteration=1)  # the lock is free


def test_a_failed_setup_frees_what_it_took(tmp_path: Path) -> None:
    class Broken(Tiny):
        def setup_model(self) -> None:
            raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        make(Broken, tmp_path / "run").setup()
    trained(Tiny, tmp_path / "run", max_iteration=1)


def test_a_stateful_object_that_appears_after_setup_is_an_error(tmp_path: Path) -> None:
    class Late(Tiny):
        def on_train_begin(self) -> None:
            self.ema = paddle.nn.Linear(1, 1)

    with pytest.raises(RuntimeError, match=r"self\.ema: appeared after setup"):
        trained(Late, tmp_path / "run")


def test_no_absolute_path_stands_in_the_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(Tiny, Path("run"), max_iteration=2)
    trained(Tiny, Path("run"), max_iteration=4)
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file


class Reading(Tiny):
    """Notes what it trains on, and spoils it."""

    noted: dict[int, Any] = {}  # noqa: RUF012

    def read_batch(self) -> Any:
        points, labels = super().read_batch()
        self.noted[self.iteration] = (points.numpy().copy(), run_of(self).data.batches.indices)
        points.zero_()
        return points, labels


@pytest.mark.parametrize("how", ["stop", "epoch", "save"])
def test_every_checkpoint_that_is_asked_for_may_be_the_best_one(tmp_path: Path, how: str) -> None:
    class Rising(Tiny):
        def valid(self) -> dict[str, float]:
            if how == "save":
                self.save()
            if how == "stop" and self.iteration == 3:
                self.stop()
            return {"accuracy": -abs(self.iteration - 3)}

    options: dict[str, Any] = {"valid_interval": 1, "save_interval": 0, "monitor": "accuracy"}
    if how == "epoch":
        Rising.size, options["save_every_epoch"] = 12, 1
    if how == "stop":
        options["save_interval"] = 100
    exp = trained(Rising, tmp_path, **options)
    assert run_of(exp).checkpointer.validations.best[0] == (3, 0)


def test_valid_is_needed_only_where_something_is_validated(tmp_path: Path) -> None:
    class Without(Tiny):
        valid = ExperimentBase.valid  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"Without: valid not defined; .*valid_interval=0"):
        make(Without, tmp_path)
    exp = trained(Without, tmp_path, valid_interval=0)
    assert exp.iteration == 6
    with put_in_front(Smoke):
        assert trained(Without, tmp_path / "smoke", valid_interval=0).smoke_is_trained


def test_a_run_that_had_finished_is_finished_in_a_second_start_too(tmp_path: Path) -> None:
    assert trained(Tiny, tmp_path).finished
    exp = trained(Tiny, tmp_path)
    assert exp.finished
    assert "FINISHED already" in (tmp_path / "worker_0.log").read_text()


@pytest.mark.parametrize("name", ["setup_checkpointer", "check_setup"])
def test_a_step_of_setup_without_super_is_an_error_in_words(tmp_path: Path, name: str) -> None:
    own = type("Own", (Tiny,), {name: lambda self: None})
    with pytest.raises(TypeError, match=rf"^{name}: does not call super\(\)\.{name}\(\); expected"):
        trained(own, tmp_path)


@pytest.mark.parametrize("name", ["run", "evaluate", "resume_or_load"])
def test_what_comes_before_setup_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{name}: called before setup\(\); expected exp.setup"):
        getattr(make(Tiny, tmp_path), name)()


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    class Wordy(Tiny):
        def valid(self) -> dict[str, Any]:
            return {"accuracy": "good"}

    with pytest.raises(TypeError, match="valid: the metric 'accuracy' is 'good'; expected a numb"):
        trained(Wordy, tmp_path)


def test_a_save_that_failed_beside_the_failure_is_told_and_hides_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def refuse(*args: Any) -> None:
        failing.wait(forks.LONG_SECONDS)
        raise layout.CheckpointError("no room")

    class Failing(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 3:
                failing.set()
                raise ValueError("broken")

    monkeypatch.setattr(storage, "write", refuse)
    with pytest.raises(ValueError, match="broken"):
        trained(Failing, tmp_path / "run", save_interval=2)
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "in saving, after the failure: CheckpointError" in log
    assert "[3] the update was made of batch 3 of epoch 1, samples [" in log
    assert "of the data set; the same command comes to it again, from none yet" in log


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("log", {}, "self.log: dict given, which hides the method of that name; expected another"),
        ("on_log", 3, "self.on_log: int given, which hides the method of that name; expected"),
        ("average", paddle.nn.AvgPool1D(2), "self.average: AvgPool1D given, which hides the"),
        ("rank", 3, "self.rank: 3 given, and expbase sets it; expected another name."),
        ("config", {}, "self.config: {} given, and expbase sets it; expected another name."),
    ],
)
def test_an_attribute_does_not_take_a_name_of_expbases(
    name: str, value: Any, said: str, tmp_path: Path
) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            setattr(self, name, value)

    with pytest.raises(AttributeError) as caught:
        trained(Named, tmp_path / "run")
    assert str(caught.value).startswith(said)


def test_a_function_may_take_the_place_of_a_method(tmp_path: Path) -> None:
    class Replaced(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.train_batch = functools.partial(self.train_batch)  # type: ignore[method-assign]

    assert trained(Replaced, tmp_path / "run", max_iteration=2).finished


def test_an_override_that_cannot_be_called_is_named_at_construction(tmp_path: Path) -> None:
    class Wrong(Tiny):
        def valid(self, loader: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(TypeError, match=r"Wrong\.valid: cannot be called as .*; expected \(self"):
        make(Wrong, tmp_path / "run")
