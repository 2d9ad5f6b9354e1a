"""What a run says of itself at its start and at its end."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import paddle
import pytest
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, IterableDataset
from tiny import DEVICE, Points, Tiny, make, metrics, run_of, trained

from expbase.engine import report
from expbase.ranks import collectives
from expbase.record import provenance
from expbase.record.card import clock


def said(output: Path) -> list[str]:
    return [line.split(" ", 2)[2] for line in (output / "worker_0.log").read_text().splitlines()]


@pytest.mark.device
def test_the_card_says_what_there_is_before_the_first_batch(tmp_path: Path) -> None:
    exp = make(Tiny, tmp_path / "run", accumulation_steps=2)
    exp.setup()
    exp.close()
    text = "\n".join(said(tmp_path / "run"))
    rows = [re.split(r"  +", line, maxsplit=1) for line in text.splitlines()]
    assert [words for name, words in rows if name == "config"] == [
        "training.max_iteration=6",
        "training.valid_interval=3",
        "training.save_interval=2",
        "training.log_interval=1",
        "training.accumulation_steps=2",
    ]
    card = {name: words for name, words in rows if name != "config"}
    assert card.pop("versions").startswith("expbase ")
    assert card == {
        "experiment": "Tiny",
        "output": str(tmp_path / "run"),
        "self.model": "90 parameters, 74 trainable",
        "data": "40 samples, 10 batches an epoch; validation: 10 samples",
        "update": "2 batches of 4 samples, 8 together",
        "end": "by training.max_iteration (6 updates)",
        "valid": "every 3 updates, and at the end",
        "save": "every 2 updates, and at the end",
        "device": f"{paddle.device.get_device()}, ranks: 1",
    }


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield Points(1)[0]


class Streamed(Tiny):
    """Tiny over a stream: nobody knows how long an epoch is."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.train_loader = Endless()


@pytest.mark.parametrize(
    ("experiment", "limits", "text"),
    [
        (Tiny, {}, "training.max_iteration (10,000 updates)"),
        (Tiny, {"max_epoch": 1}, "training.max_epoch (1 epoch, 10 updates)"),
        (Tiny, {"max_epoch": 3, "accumulation_steps": 4},
         "training.max_epoch (3 epochs, 8 updates)"),
        (Tiny, {"max_epoch": 3, "max_iteration": 20},
         "training.max_iteration (20 updates), before training.max_epoch (3 epochs, 30 updates)"),
        (Tiny, {"max_epoch": 3, "max_iteration": 40},
         "training.max_epoch (3 epochs, 30 updates), before training.max_iteration (40 updates)"),
        (Streamed, {"max_epoch": 3}, "training.max_epoch (3 epochs)"),
        (Streamed, {"max_epoch": 3, "max_iteration": 20},
         "training.max_iteration (20 updates) or training.max_epoch (3 epochs), "
         "whichever comes first"),
    ],
)  # fmt: skip
def test_the_card_says_which_limit_ends_the_run_and_after_how_many_updates(
    tmp_path: Path, experiment: type[Tiny], limits: dict[str, int], text: str
) -> None:
    config = experiment.default_config()
    config.training.update(limits)
    exp = experiment(config, argparse.Namespace(output=str(tmp_path), device=DEVICE))
    exp.setup()
    exp.close()
    lines = said(tmp_path)
    assert f"end         by {text}" in lines
    # What is changed, and no limit that counts by default.
    changes = [line.split("  ")[-1].strip() for line in lines if line.startswith("config ")]
    assert sorted(changes) == sorted(f"training.{key}={value}" for key, value in limits.items())


@pytest.mark.parametrize(
    ("given", "valid", "save"),
    [
        ({}, "every 1,000 updates, and at the end", "every 1,000 updates, and at the end"),
        ({"max_epoch": 3}, "every epoch", "every epoch"),
        ({"valid_every_epoch": 1}, "every epoch, and at the end",
         "every 1,000 updates, and at the end"),
        ({"valid_interval": 0, "save_seconds": 60}, "never: training.valid_interval=0",
         "every 1,000 updates and every 60 seconds, and at the end"),
        ({"valid_interval": 1, "valid_every_epoch": 2, "save_interval": 0},
         "every update and every 2 epochs, and at the end", "never: training.save_interval=0"),
    ],
)  # fmt: skip
def test_the_card_says_how_often_a_run_is_validated_and_saved(
    tmp_path: Path, given: dict[str, int], valid: str, save: str
) -> None:
    config = Tiny.default_config()
    config.training.update(given)
    exp = Tiny(config, argparse.Namespace(output=str(tmp_path), device=DEVICE))
    exp.setup()
    exp.close()
    rows = [line for line in said(tmp_path) if line.startswith(("valid ", "save "))]
    assert rows == [f"valid       {valid}", f"save        {save}"]


class Own(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 2]])

    def __len__(self) -> int:
        return 1


def over(size: int, make_sampler: Any, **options: Any) -> DataLoader:
    return DataLoader(Points(size), batch_sampler=make_sampler(Points(size), **options))


READ = {
    "all": (lambda: DataLoader(Points(10), batch_size=4), "10 samples, 3 batches", "10 samples"),
    "drop_last": (
        lambda: DataLoader(Points(10), batch_size=4, drop_last=True),
        "8 samples, 2 batches",
        "8 samples",
    ),
    "fewer": (
        lambda: DataLoader(Points(10), batch_sampler=BatchSampler(sampler=[3, 1, 2], batch_size=2)),
        "3 samples, 2 batches",
        "3 samples",
    ),
    # Each rank has 7 of 13 samples, with one twice; in a validation nothing is.
    "padded": (
        lambda: over(13, DistributedBatchSampler, batch_size=4, num_replicas=2, rank=0),
        "13 samples, 2 batches",
        "13 samples",
    ),
    "padded, drop_last": (
        lambda: over(
            13, DistributedBatchSampler, batch_size=4, num_replicas=2, rank=0, drop_last=True
        ),
        "8 samples, 1 batches",
        "12 samples",
    ),
    "its own": (
        lambda: over(10, Own, batch_size=2),
        "a data set of 10 samples, 1 batches",
        "a data set of 10 samples",
    ),
}


@pytest.mark.parametrize(("loader", "trained_on", "validated"), READ.values(), ids=READ)
def test_the_card_counts_what_is_read(
    tmp_path: Path, loader: Any, trained_on: str, validated: str
) -> None:
    class Reading(Tiny):
        def setup_dataloader(self) -> None:
            self.train_loader, self.valid_loader = loader(), loader()

    exp = make(Reading, tmp_path / "run")
    exp.setup()
    exp.close()
    (data,) = (line for line in said(tmp_path / "run") if line.startswith("data "))
    assert data == f"data        {trained_on} an epoch; validation: {validated}"


@pytest.fixture
def searching() -> Iterator[list[str]]:
    """Flags that paddle has on the CPU, too, switched on."""
    flags = ["FLAGS_use_autotune", "FLAGS_enable_blaslt_global_search"]
    before = paddle.get_flags(flags)
    paddle.set_flags(dict.fromkeys(flags, True))
    yield flags
    paddle.set_flags(before)


def test_deterministic_sets_the_flags_that_this_paddle_has_and_the_card_names_them(
    tmp_path: Path, searching: list[str]
) -> None:
    for name, deterministic in (("fast", False), ("run", True)):
        exp = make(Tiny, tmp_path / name, deterministic=deterministic)
        exp.setup()
        exp.close()
        assert [*paddle.get_flags(searching).values()] == [not deterministic] * 2
    rows = [line.split() for line in said(tmp_path / "run")]
    assert [{*row[1:]} >= {f"{name}=False" for name in searching} for row in rows].count(True) == 1
    assert not [line for line in said(tmp_path / "fast") if line.startswith("repeatable")]


def test_on_a_gpu_the_card_names_what_the_environment_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    has_all = SimpleNamespace(is_public=lambda name: True)
    monkeypatch.setattr("expbase.base.device.core", SimpleNamespace(globals=lambda: has_all))
    assert provenance.repeatable().startswith(
        "FLAGS_cudnn_deterministic=True FLAGS_embedding_deterministic=1 "
    )
    assert provenance.repeatable().endswith(
        " FLAGS_use_autotune=False CUBLAS_WORKSPACE_CONFIG=unset NCCL_ALGO=unset"
    )
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert provenance.repeatable().endswith(" NCCL_ALGO=Tree")


def test_a_stream_has_no_sizes_and_the_card_says_so(tmp_path: Path) -> None:
    exp = make(Streamed, tmp_path / "run")
    exp.setup()
    exp.close()
    text = "\n".join(said(tmp_path / "run"))
    assert "data        a stream of unknown length; validation: 10 samples" in text
    assert "a batch of the loader's size" in text


def test_the_end_says_how_long_it_took_what_is_best_and_how_to_see_the_curves(
    tmp_path: Path,
) -> None:
    trained(Tiny, tmp_path / "a run", monitor="accuracy", max_iteration=4, valid_interval=2)
    time, best, digest, curves, last = said(tmp_path / "a run")[-5:]
    assert re.fullmatch(r"time        [\d.]+ s", time)
    assert re.fullmatch(r"best        accuracy=[\d.]+ at iteration [24]", best)
    assert re.fullmatch(r"digest      [\da-f]{64}", digest)
    assert curves == f"curves      python -m expbase board '{tmp_path}/a run'"
    assert last.startswith("[4] FINISHED: epoch 1, step-00000004 in ")


def test_only_one_rank_draws_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: Any) -> NoReturn:
        raise AssertionError("a progress bar")

    monkeypatch.setattr(report, "is_terminal", lambda stream: True)
    monkeypatch.setattr(report, "progress_bar", draw)
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    with run_of(make(Tiny, tmp_path / "run")).report.progress(0):
        pass


def test_a_start_without_a_checkpoint_says_that_it_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        trained(Tiny, tmp_path / "run", max_iteration=2, save_interval=0)
    text = (tmp_path / "run/worker_0.log").read_text()
    assert text.count("has no checkpoint: it begins anew") == 1
    # Without a monitor nothing is called the best.
    assert not [line for line in said(tmp_path / "run") if line.startswith("best")]


def test_a_continued_run_knows_the_time_left_at_its_first_line(tmp_path: Path) -> None:
    trained(Tiny, tmp_path / "run", max_iteration=4, save_interval=4, valid_interval=0)
    trained(Tiny, tmp_path / "run", max_iteration=40, save_interval=40, valid_interval=0)
    first = next(line for line in metrics(tmp_path / "run") if line["iteration"] == 5)
    assert 0 < first["speed/seconds_left"] < 35 * 60


def test_a_time_reads_as_a_person_says_it() -> None:
    assert [clock(n) for n in (0.04, 59.9, 61.2, 3600 * 26)] == [
        "0.0 s", "59.9 s", "0:01:01", "1 day, 2:00:00",
    ]  # fmt: skip
