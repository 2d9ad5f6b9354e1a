"""What looks like a mistake, in the config or at the machine, is told before training."""

from __future__ import annotations

import contextlib
import shutil
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle.io import DataLoader
from tiny import DEVICE, Tiny, make, trained, training_config

from expbase import Config, get_default_training_config
from expbase.doctor.before_training import (
    changed_by_its_file,
    likely_mistakes,
    methods_nobody_calls,
)


@pytest.mark.parametrize(
    ("monitor", "mode", "is_told"),
    [("loss", "max", True), ("valid/error", "max", True), ("loss", "min", False),
     ("accuracy", "max", False)],
)  # fmt: skip
def test_a_loss_of_which_more_is_better_is_told(monitor: str, mode: str, is_told: bool) -> None:
    training = get_default_training_config()
    training.update(monitor=monitor, monitor_mode=mode)
    told = " ".join(likely_mistakes(training, None))
    assert ("expected training.monitor_mode='min'" in told) == is_told


def test_little_shared_memory_for_workers_is_a_likely_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = get_default_training_config()
    room = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    loader = DataLoader([1, 2, 3], num_workers=2, prefetch_factor=3)
    (text,) = likely_mistakes(training, loader)
    assert text.startswith("/dev/shm has room for 64 MB: if 7 batches need more, the workers die")
    in_process = DataLoader([1, 2, 3], num_workers=0)
    by_pipes = DataLoader([1, 2, 3], num_workers=2, use_shared_memory=False)
    assert not [*likely_mistakes(training, in_process), *likely_mistakes(training, by_pipes)]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("expbase.doctor.before_training.SHARED_MEMORY", Path("/dev/none"))
        assert not [*likely_mistakes(training, loader)]
    room.free = 1 << 30
    assert not [*likely_mistakes(training, loader)]


def test_another_distribution_with_our_files_is_told_at_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "expbase-0.1.0.dist-info").mkdir()
    (tmp_path / "expbase-0.1.0.dist-info/RECORD").write_text("expbase/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    exp = make(Tiny, tmp_path / "run")
    exp.setup()
    exp.close()
    log = (tmp_path / "run/worker_0.log").read_text()
    assert log.count("the distribution expbase 0.1.0 is installed, too: it is not paddle-exp") == 1


class Varied(Tiny):
    """Its config gets values of other types than its defaults have."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.update(Config({"sizes": [], "name": "x", "pair": (1, 2), "n": 1, "rate": None}))
        return config


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("pair", (3, 4), ""),
        ("rate", 0.5, ""),
        ("more", Config({"x": 1}), ""),
        ("sizes", [(1, 2)], "1 of 27 values as they are now: config.sizes, [(1, 2)], would be [[1, "
         "2]] in --evaluate, --export and --config RUN/config.yaml; expected a default of the "),
        ("name", "None", "1 of 27 values as they are now: config.name, 'None', would be None in"),
        ("rate", (1, 2), "1 of 27 values as they are now: config.rate, (1, 2), would be [1, 2] in"),
        ("n", 2.5, "config.yaml cannot be read back: n: 2.5 given; expected a whole number like 1"),
    ],
)  # fmt: skip
def test_what_a_run_could_not_be_looked_at_with_is_told(key: str, value: Any, told: str) -> None:
    config = Varied.default_config()
    config[key] = value
    texts = [*changed_by_its_file(Varied, config)]
    assert len(texts) == bool(told)
    assert told in "".join(texts)


def test_it_is_told_when_the_run_begins_and_not_when_it_goes_on(tmp_path: Path) -> None:
    for iterations in 2, 4:
        config = training_config(max_iteration=iterations)
        config.update(Config({"sizes": [(1, 2)], "name": "x", "pair": (1, 2), "n": 1}))
        exp = Varied(config, SimpleNamespace(output=str(tmp_path / "run"), device=DEVICE))
        exp.setup()
        exp.run()
    log = (tmp_path / "run/worker_0.log").read_text()
    assert log.count("config.yaml does not give back 1 of 27 values as they are now: ") == 1


def test_a_key_that_is_read_as_a_method_is_named_before_training_and_where_setup_fails(
    tmp_path: Path,
) -> None:
    told = "config.rate.values is a method of each section, as of each dict, and not your value; "
    told += "expected config.rate['values'], or another name."
    config = training_config(max_iteration=2)
    config.rate = Config({"values": [0.1, 0.01], "value": 1})

    class Wants(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            len(self.config.rate.values)

    for kind, is_wrong in ((Tiny, False), (Wants, True)):
        path = tmp_path / kind.__name__
        exp = kind(config.clone(), SimpleNamespace(output=str(path), device=DEVICE))
        with pytest.raises(TypeError) if is_wrong else contextlib.nullcontext():
            exp.setup()
            exp.run()
        assert (path / "worker_0.log").read_text().count(told) == 1


def test_a_loader_of_almost_the_name_that_is_read_is_told(tmp_path: Path) -> None:
    class Misnamed(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.train_dataloader, self.train_loader = self.train_loader, None

        def train_batch(self) -> None:
            self.stop()

    trained(Misnamed, tmp_path / "run")
    log = (tmp_path / "run/worker_0.log").read_text()
    assert "self.train_dataloader is set, and self.train_loader is not; did you mean" in log


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_process_of_several_that_a_scheduler_started_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    training = get_default_training_config()
    monkeypatch.setenv(name, "1")
    assert not list(likely_mistakes(training, None))
    monkeypatch.setenv(name, "4")
    assert [text.partition(",")[0] for text in likely_mistakes(training, None)] == [f"{name} is 4"]
    monkeypatch.setattr("expbase.ranks.collectives.world_size", lambda: 4)
    assert not list(likely_mistakes(training, None))


def test_a_model_that_is_wanted_before_it_is_made_is_named(tmp_path: Path) -> None:
    class Early(Tiny):
        def setup_dataloader(self) -> None:
            self.optimizer = paddle.optimizer.SGD(parameters=self.model.parameters())

    class Named(Tiny):
        def setup_dataloader(self) -> None:
            self.optimizer = paddle.optimizer.SGD(parameters=self.generator.parameters())

        def setup_model(self) -> None:
            self.generator = paddle.nn.Linear(2, 2)

    class Mistyped(Named):
        def setup_dataloader(self) -> None:
            self.train_loader = self.laoder

    later = r"setup_dataloader: self\.{} is not there yet; setup_model runs after it"
    with pytest.raises(AttributeError, match="(?s)'NoneType'.*" + later.format("model")):
        trained(Early, tmp_path / "a")
    with pytest.raises(AttributeError, match="(?s)'generator'.*" + later.format("generator")):
        trained(Named, tmp_path / "b")
    with pytest.raises(AttributeError, match=r"'laoder'$"):
        trained(Mistyped, tmp_path / "c")


def test_a_method_by_its_name_in_paddlehub_that_nothing_calls_is_told(tmp_path: Path) -> None:
    class Task(Tiny):
        def _finetune_start_event(self) -> None: ...

        def _build_env_end_event(self) -> None: ...

        def _log_interval_event(self, metrics: Any) -> None: ...

        def on_log(self, metrics: Any) -> None:
            self._log_interval_event(metrics)

    exp = make(Task, tmp_path / "run")
    exp.setup()
    exp.close()
    text = (
        "Task._finetune_start_event: PaddleHub's name, which nothing calls here; expected on_train"
    )
    log = (tmp_path / "run/worker_0.log").read_text()
    assert text in log
    assert "nothing calls here; expected on_setup_end of the mixin AllEvents, or a call of" in log
    assert len([*methods_nobody_calls(Task)]) == 2
    assert not [*methods_nobody_calls(Tiny)]


def test_a_warm_up_that_is_longer_than_the_run_says_what_to_do(tmp_path: Path) -> None:
    class WarmUp(Tiny):
        def setup_model(self) -> None:
            rest = self.config.training.max_iteration - 10
            paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=rest)

    with pytest.raises(AssertionError, match="must be a positive integer") as caught:
        make(WarmUp, tmp_path / "run").setup()
    said = "".join(traceback.format_exception(caught.value))
    assert "the run is shorter than its warm-up, or training.max_iteration is 0" in said
    assert "self.total_iterations is 6 here." in said
