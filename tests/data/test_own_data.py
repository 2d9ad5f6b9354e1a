"""Training without a train_loader: by iterations, on data that the experiment makes itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import Tiny, make, metrics, same_bits, trained

from expbase import ConfigError, ExperimentBase
from expbase.checkpoint.layout import CheckpointError


class Own(Tiny):
    """Draws its points from all three generators, in train_batch; no epochs, no loader."""

    def setup_dataloader(self) -> None:
        pass

    def read_batch(self) -> Any:
        noise = paddle.randn([4, 4]) + random.random()
        points = paddle.to_tensor(np.random.randn(4, 4).astype("float32")) + noise
        return points, (points.sum(axis=-1) > 0).astype("int64")

    def valid(self) -> dict[str, float]:
        return {"drawn": paddle.randn([]).item()}


def told(exp: ExperimentBase) -> str:
    return (exp.output_dir / "worker_0.log").read_text()


def test_a_run_without_a_loader_has_iterations_and_nothing_of_data(tmp_path: Path) -> None:
    exp = trained(Own, tmp_path)
    assert exp.finished
    assert (exp.iteration, exp.epoch, exp.internals.epochs_ended) == (6, 0, 0)
    assert (exp.batches_per_epoch, exp.internals.batch_in_epoch) == (None, 0)
    rows = told(exp)
    for word in ("WARNING", "epoch", "data ", "update ", "batch "):
        assert word not in rows
    assert {line["epoch"] for line in metrics(tmp_path)} == {0}


def test_it_continues_to_the_same_bits(tmp_path: Path) -> None:
    trained(Own, tmp_path / "straight")
    trained(Own, tmp_path / "again", max_iteration=2)
    continued = trained(Own, tmp_path / "again")
    same_bits(*(tmp_path / run / "checkpoints/step-00000006" for run in ("straight", "again")))
    assert "resumed step-00000002: iteration 2, train/lr=" in told(continued)


@pytest.mark.parametrize("reads", ["read_batch", "micro_batches", "new_epoch"])
def test_reading_without_a_loader_is_an_error_that_says_what_to_do(
    tmp_path: Path, reads: str
) -> None:
    class Forgot(Tiny):
        def setup_dataloader(self) -> None:
            self.loader = [1, 2]

        def train_batch(self) -> None:
            [*(getattr(self, reads)() or ())]

    expected = (
        r"self\.train_loader: not set by setup_dataloader; expected a paddle\.io\.DataLoader or "
        r"an iterable of batches, or no call of read_batch, .* may make its own data"
    )
    with pytest.raises(ValueError, match=expected):
        trained(Forgot, tmp_path)


def test_a_loader_that_comes_too_late_is_an_error(tmp_path: Path) -> None:
    class Late(Own):
        def startup(self) -> None:
            self.train_loader = [1, 2]

    with pytest.raises(ValueError, match="set too late; expected it in setup_dataloader"):
        make(Late, tmp_path).setup()


@pytest.mark.parametrize("key", ["max_epoch", "valid_every_epoch", "save_every_epoch"])
def test_a_key_that_counts_epochs_or_batches_is_an_error_without_them(
    tmp_path: Path, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"training\.{key}: 2 given, and without a self\.train"):
        make(Own, tmp_path, **{key: 2}).setup()


def test_without_batches_none_can_be_left_out(tmp_path: Path) -> None:
    text = r"training\.skip_updates: \[3\] given, and without a self\.train_loader .* expected \[\]"
    with pytest.raises(ConfigError, match=text):
        make(Own, tmp_path, skip_updates=[3]).setup()


def test_a_run_with_a_place_in_its_data_does_not_go_on_without(tmp_path: Path) -> None:
    trained(Tiny, tmp_path, max_iteration=2)
    with pytest.raises(CheckpointError, match=r"self\.train_loader: not set; the checkpoint is of"):
        trained(Own, tmp_path)


def test_a_run_without_data_may_go_on_with_some(tmp_path: Path) -> None:
    trained(Own, tmp_path, max_iteration=2)
    exp = trained(Tiny, tmp_path)
    assert (exp.iteration, exp.epoch, exp.internals.batch_in_epoch) == (6, 1, 4)
