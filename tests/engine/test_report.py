"""What a line of a run says."""

from __future__ import annotations

from pathlib import Path

import paddle
import pytest
from tiny import DEVICE, Tiny, curve, metrics, trained


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


@pytest.mark.device
def test_a_line_has_the_peak_memory_of_a_device_that_is_not_the_cpu(tmp_path: Path) -> None:
    tensor = paddle.zeros([2_500_000])
    trained(Tiny, tmp_path, max_iteration=2, log_interval=2)
    line = metrics(tmp_path)[0]
    if DEVICE == "cpu":
        assert "speed/device_memory_gb" not in line
    else:
        assert tensor.size * 4e-9 <= line["speed/device_memory_gb"] < 3


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
