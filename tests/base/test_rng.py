"""Random numbers are derived: what is drawn in one place moves nothing that comes later."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader
from tiny import Notes, Points, Tiny, same_bits, trained

from expbase import on
from expbase.base import rng
from expbase.extras.all_events import AllEvents


def draws() -> list[Any]:
    """Draws from all three libraries, an odd number of normal ones: the second waits inside."""
    return [
        random.random(), random.gauss(0, 1),
        np.random.rand(), np.random.randn(3).tolist(),
        paddle.rand([3]).tolist(), paddle.randperm(5).tolist(),
    ]  # fmt: skip


def test_one_seed_is_enough_for_all_libraries() -> None:
    rng.seed_all(1 << 62)
    first = draws()
    rng.seed_all(1 << 62)
    assert draws() == first
    rng.seed_cpu(1 << 62)
    assert draws() == first
    rng.seed_for(0, rng.TRAIN, 3)
    assert all(one != other for one, other in zip(draws()[:-1], first[:-1], strict=True))


def test_derived_seeds_differ_by_every_number_of_the_path_and_their_order() -> None:
    paths = [path for n in (1, 2, 3) for path in itertools.product(range(6), repeat=n)]
    seeds = {rng.derive(seed, *path) for seed in (0, 1, 2, -1, 1 << 40) for path in paths}
    assert len(seeds) == 5 * len(paths)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 62


def test_a_derived_seed_is_the_same_in_every_version() -> None:
    # A run is continued by a later version, with the order of its data as it was.
    assert rng.derive(0, rng.ORDER, 1) == 2236338143322339785


class Watching(Tiny):
    """Notes what every place draws in which a user may draw, of all that counts."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        # Not shuffled: a sampler that draws would be seeded right before an epoch.
        self.train_loader = DataLoader(Points(self.size), batch_size=self.batch_size)

    def setup_model(self) -> None:
        super().setup_model()
        self.noted = Notes()

    def note(self, place: str) -> None:
        """Notes what is drawn now."""
        self.noted.append((place, self.iteration, draws()))

    def train_batch(self) -> None:
        self.note("before reading")
        super().train_batch()
        self.note("in the iteration")

    def on_train_epoch_begin(self) -> None:
        self.note("epoch begin")

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def valid(self) -> dict[str, float]:
        self.note("validation")
        for _ in self.valid_batches():
            self.note("batch of a validation")
        return super().valid()

    def on_train_begin(self) -> None:
        self.note("start")


def in_training(exp: Any) -> list[Any]:
    """What was noted, but for validations and starts, of which there may be more."""
    return [note for note in exp.noted if "validation" not in note[0] and note[0] != "start"]


OPTIONS = {"max_iteration": 12, "save_interval": 4, "valid_interval": 3, "log_interval": 2}


class InListener(Watching):
    @on("on_train_batch_end")
    def draw(self) -> None:
        draws()


class InFetch(AllEvents, Watching):
    def on_fetch_data_end(self) -> None:
        draws()


class InValidation(AllEvents, Watching):
    def valid(self) -> dict[str, float]:
        results = super().valid()
        draws()
        return results

    def on_valid_batch_end(self, batch: Any, indices: Sequence[int] | None) -> None:
        draws()


class InLogLine(Watching):
    def on_log(self, metrics: Mapping[str, float]) -> None:
        draws()


class InSave(Watching):
    def on_save_checkpoint(self) -> None:
        draws()


class InLoader(Watching):
    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.valid_loader = DataLoader(Drawing(10), batch_size=3)


class InSetup(AllEvents, Watching):
    def on_setup_end(self) -> None:
        draws()


class InStart(Watching):
    def on_train_begin(self) -> None:
        super().on_train_begin()
        draws()


class Drawing(Points):
    """A data set that draws more than the other."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        draws()
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "experiment",
    [InListener, InFetch, InValidation, InLogLine, InSave, InLoader, InSetup, InStart],
)
def test_what_is_drawn_elsewhere_moves_nothing(tmp_path: Path, experiment: Any) -> None:
    plain: Any = trained(Watching, tmp_path / "plain", **OPTIONS)
    other: Any = trained(experiment, tmp_path / "other", **OPTIONS)
    assert plain.noted == other.noted
    same_bits(*(tmp_path / run / "checkpoints/step-00000012" for run in ("plain", "other")))


def test_whether_and_when_one_validates_saves_or_logs_moves_nothing(tmp_path: Path) -> None:
    often = {"valid_interval": 1, "save_interval": 1, "log_interval": 1}
    plain: Any = trained(Watching, tmp_path / "plain", **OPTIONS)
    other: Any = trained(Watching, tmp_path / "other", **{**OPTIONS, **often})
    assert in_training(plain) == in_training(other)


def test_a_resumed_run_draws_what_the_other_one_drew(tmp_path: Path) -> None:
    whole: Any = trained(Watching, tmp_path / "whole", **OPTIONS)
    parts: list[Any] = []
    for end in (4, 8, 12):  # the last one of the second part ends an epoch
        options = {**OPTIONS, "max_iteration": end}
        exp: Any = trained(Watching, tmp_path / "parts", **options)
        parts += in_training(exp)
    assert parts == in_training(whole)


def test_each_batch_of_an_update_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    class Shares(Tiny):
        def train_batch(self) -> None:
            for _ in self.micro_batches():
                drawn.append(np.random.rand())
            self.backward(self.model(paddle.ones([1, 4])).mean())
            self.step_optimizers()

    def seeded(share: int) -> float:
        rng.seed_for(0, rng.TRAIN, 1, share, 0)
        return np.random.rand()

    drawn: list[float] = []
    trained(Shares, tmp_path / "run", max_iteration=1, accumulation_steps=3)
    assert drawn == [seeded(share) for share in range(3)]


def test_only_the_device_of_this_process_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        is_gpu_place: Callable[[Any], bool] = staticmethod(lambda: True)
        gpu_device_id: Callable[[Any], int] = staticmethod(lambda: 3)

        def set_place(self, device: object) -> None:
            assert device is card

    class Generator:
        def manual_seed(self, seed: int) -> None:
            seeded.append(seed)

        def get_state(self) -> int:
            return 7

        set_state = manual_seed

    def generator_of(index: int) -> Generator:
        assert index == 3
        return Generator()

    seeded: list[int] = []
    card = object()
    monkeypatch.setattr(rng.framework, "_current_expected_place_", lambda: card)
    monkeypatch.setattr(rng.core, "Place", Place)
    monkeypatch.setattr(rng.core, "default_cuda_generator", generator_of, raising=False)
    rng.seed_all(5)
    assert seeded == [5]
    with rng.unmoved():
        pass
    assert seeded == [5, 7]  # what it was


def test_what_is_drawn_in_a_block_moves_nothing_after_it() -> None:
    rng.seed_all(5)
    draws()
    with rng.unmoved():
        drawn = draws()
        paddle.seed(3)
    assert draws() == drawn
