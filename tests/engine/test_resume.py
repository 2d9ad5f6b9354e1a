"""Going on: which checkpoint a start continues, what it says, and that the end is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import DEVICE, Tiny, curve, ledger, metrics, same_bits, saved, trained

from expbase import ConfigError
from expbase.checkpoint.layout import CheckpointError
from expbase.config import load_yaml


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


def test_another_number_of_threads_is_said_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    trained(Tiny, tmp_path / "run", max_iteration=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    trained(Tiny, tmp_path / "run", max_iteration=4)
    text = "not exact: threads: 2 there, 3 now: kernels may sum in another order"
    assert text in capfd.readouterr().err


@pytest.mark.device
def test_a_continued_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    class Short(Tiny):
        size = 20  # five batches an epoch

    options = {"monitor": "accuracy", "save_interval": 4}
    trained(Short, tmp_path / "whole", max_iteration=13, **options)
    trained(Short, tmp_path / "parts", max_iteration=7, **options, valid_interval=0)
    exp = trained(Short, tmp_path / "parts", max_iteration=13, **options)
    assert exp.epoch == 3
    one, other = (tmp_path / name / "checkpoints/step-00000013" for name in ("whole", "parts"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


class Steady(Tiny):
    """Tiny, which draws nothing on the device."""

    def setup_model(self) -> None:
        super().setup_model()
        self.model[2].p = 0


@pytest.mark.pretend  # whose kernels are the CPU's
def test_a_run_that_moves_to_a_device_and_back_ends_with_the_bits_of_one_that_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Steady, tmp_path / "whole", {"device": "cpu"}, max_iteration=12)
    for end, device in ((4, "cpu"), (8, DEVICE), (12, "cpu")):
        exp: Any = trained(Steady, tmp_path / "parts", {"device": device}, max_iteration=end)
        assert exp.model[0].weight.place.is_custom_place() == (device == DEVICE)
    text = f"not exact: device: {DEVICE} there, cpu now"
    assert text in capfd.readouterr().err
    one, other = (tmp_path / name / "checkpoints/step-00000012" for name in ("whole", "parts"))
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


@pytest.mark.pretend
def test_another_kind_of_device_is_said_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run", {"device": "cpu"}, max_iteration=2)
    trained(Tiny, tmp_path / "run", max_iteration=4)
    text = f"device: cpu there, {DEVICE.partition(':')[0]} now: kernels may sum in another order, "
    text += "and paddle draws other random numbers: random_split holds out other samples"
    assert f"not exact: {text}" in capfd.readouterr().err


def test_a_finished_run_says_so_and_trains_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Fragile(Tiny):
        def train_batch(self) -> None:
            raise AssertionError("trained again")

    trained(Tiny, tmp_path / "run", max_iteration=2)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    assert trained(Fragile, tmp_path / "run", max_iteration=2).finished
    assert "FINISHED already: iteration 2" in capfd.readouterr().err
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_fresh_moves_the_old_run_aside(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    exp = trained(Tiny, tmp_path / "run", {"fresh": True}, max_iteration=4)
    assert exp.iteration == 4
    assert saved(tmp_path / "run.old-1") == [2]
    assert curve(tmp_path / "run", "train/loss").keys() == {1, 2, 3, 4}


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
    starts = [record for record in ledger(tmp_path / "run") if record["event"] == "start"]
    assert starts[-1]["config"]["training.seed"] == 2
    with pytest.raises(ConfigError, match=r"training\.seed: 2 there, 1 now"):
        trained(Failing, tmp_path / "run", seed=1)


def test_another_config_is_refused_unless_it_is_forced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=2)
    with pytest.raises(ConfigError, match=r"another config:\n  training\.seed: 0 there, 5 now"):
        trained(Tiny, tmp_path / "run", max_iteration=4, seed=5)
    exp = trained(Tiny, tmp_path / "run", {"force": True}, max_iteration=4, seed=5)
    assert exp.iteration == 4
    assert "config: training.seed: 0 at the first start, 5 now" in capfd.readouterr().err
    with (tmp_path / "run/config.yaml").open("a") as file:
        file.writelines(f"k{number}: {list(range(90))}\n" for number in range(40))
    with pytest.raises(ConfigError, match="  and 21 keys more\n") as caught:
        trained(Tiny, tmp_path / "run", max_iteration=6, seed=5)
    assert len(str(caught.value)) < 20 * 300
    trained(Tiny, tmp_path / "run", {"force": True}, max_iteration=6, seed=5)
    assert "config: and 22 keys more" in capfd.readouterr().err


def test_what_was_written_after_the_checkpoint_is_cut_back(tmp_path: Path) -> None:
    from visualdl import LogReader

    class Dying(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            if self.iteration == 6:
                raise RuntimeError("died")

    options = {"max_iteration": 8, "save_interval": 3, "valid_interval": 2}
    trained(Tiny, tmp_path / "whole", **options)
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
    ("experiment", "at"),
    [
        (SavingInEvaluation, 7),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (DrawingInEvents, 7),
                (SavingInTraining, 6),
                (SavingAfterTheBatch, 6),
                (Drifting, 7),
            )
        ),
    ],
)
def test_whatever_the_events_do_a_killed_run_ends_the_same(
    tmp_path: Path, experiment: type[Tiny], at: int
) -> None:
    class Dying(experiment):  # type: ignore[misc, valid-type]
        def train_batch(self) -> None:
            if self.iteration == at:
                raise RuntimeError("died")
            super().train_batch()

    options = {"max_iteration": 8, "save_interval": 4, "valid_interval": 3}
    trained(experiment, tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="died"):
        trained(Dying, tmp_path / "parts", **options)
    exp = trained(experiment, tmp_path / "parts", **options)
    end = f"checkpoints/step-{exp.iteration:08d}"
    same_bits(tmp_path / "whole" / end, tmp_path / "parts" / end)
    for name in ("train/loss", "valid/accuracy"):
        assert curve(tmp_path / "parts", name) == curve(tmp_path / "whole", name)


def test_a_save_within_an_iteration_comes_at_its_end(tmp_path: Path) -> None:
    trained(SavingInTraining, tmp_path / "run", save_interval=100, keep_last=0)
    assert saved(tmp_path / "run") == [5, 6]


class Copying(Tiny):
    """Begins each start with a teacher that is a copy of the model, as it is then."""

    def setup_model(self) -> None:
        super().setup_model()
        self.teacher = paddle.nn.Linear(4, 8)
        for parameter in self.teacher.parameters():
            parameter.stop_gradient = True

    def on_train_begin(self) -> None:
        self.teacher.set_state_dict(self.model[0].state_dict())


def test_a_weight_that_on_train_begin_sets_anew_is_told(tmp_path: Path) -> None:
    text = "on_train_begin sets it to another value than the checkpoint has"
    for end, names in ((2, []), (4, ["self.teacher.weight", "self.teacher.bias"])):
        trained(Copying, tmp_path / "run", max_iteration=end)
        log = (tmp_path / "run/worker_0.log").read_text()
        assert [name for name in names if f"not exact: {name}: {text}" in log] == names
        assert log.count(text) == len(names)
