"""Random numbers are derived: what is drawn in one place moves nothing that comes later."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.distributed.fleet.base import topology
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
from paddle.io import DataLoader
from tiny import DEVICE, Helped, Notes, Points, Tiny, same_bits, trained

from expbase import on
from expbase.base import rng
from expbase.base.generator_states import generator_state, set_generator_state
from expbase.extras.all_events import AllEvents


def draws() -> list[Any]:
    """Draws from all three libraries, an odd number of normal ones: the second waits inside."""
    return [
        random.random(), random.gauss(0, 1),
        np.random.rand(), np.random.randn(3).tolist(),
        paddle.rand([3]).tolist(), F.dropout(paddle.ones([20])).tolist(),
        paddle.randperm(5).tolist(),
    ]  # fmt: skip


@pytest.fixture
def on_device() -> None:
    """Makes the device of this test run that of the process, as an experiment does."""
    paddle.set_device(DEVICE)


@pytest.mark.device
@pytest.mark.usefixtures("on_device")
def test_one_seed_is_enough_for_all_libraries() -> None:
    rng.seed_all(1 << 62)
    first = draws()
    rng.seed_all(1 << 62)
    assert draws() == first
    rng.seed_for(0, rng.TRAIN, 3)
    assert all(one != other for one, other in zip(draws()[:-1], first[:-1], strict=True))


def test_what_a_worker_may_draw_from_is_seeded_alike() -> None:
    rng.seed_all(1 << 62)
    first = draws()
    rng.seed_cpu(1 << 62)
    assert draws() == first


@pytest.mark.pretend
@pytest.mark.usefixtures("on_device")
def test_a_device_draws_from_a_generator_of_its_own() -> None:
    def states() -> list[Any]:
        return [generator_state(g) for g in (rng.core.default_cpu_generator(), *rng._of_device())]

    rng.seed_all(7)
    of_cpu, of_device = states()
    drawn = paddle.rand([5]).tolist()
    assert states()[0] == of_cpu
    assert states()[1][2] == 8  # the offset: drawn are fours
    rng.seed_cpu(8)  # as a worker does, which must touch no device
    assert states()[0] != of_cpu
    assert states()[1][2] == 8
    set_generator_state(*rng._of_device(), of_device)
    assert paddle.rand([5]).tolist() == drawn


@pytest.fixture
def tracker() -> Iterator[Any]:
    """Fleet's tracker of generators, as a tensor parallel program sets it up."""
    found = get_rng_state_tracker()
    found.reset()
    yield found
    found.reset()


def tracked(name: str) -> Any:
    """Draws under a name of fleet's tracker."""
    with get_rng_state_tracker().rng_state(name):
        return paddle.rand([3]).tolist()


@pytest.mark.device
@pytest.mark.usefixtures("on_device")
def test_the_states_of_fleets_tracker_are_seeded_too(tracker: Any) -> None:
    rng.seed_all(5)
    first = draws()
    tracker.add("local", 11)
    tracker.add("global", 12)
    rng.seed_all(5)
    with rng.unmoved():
        drawn = tracked("local"), tracked("global")
    assert drawn == (tracked("local"), tracked("global"))
    assert drawn[0] != drawn[1]
    assert draws() == first  # what is drawn under a name moves nothing else
    rng.seed_all(6)
    assert tracked("global") != drawn[1]
    rng.seed_all(5)
    assert tracked("global") == drawn[1]
    # Another start, or another rank: what has the same seed draws the same.
    tracker.reset()
    tracker.add("global", 12)
    tracker.add("local", 13)
    rng.seed_all(5)
    assert tracked("global") == drawn[1]
    assert tracked("local") != drawn[0]


def test_derived_seeds_differ_by_every_number_of_the_path_and_their_order() -> None:
    paths = [path for n in (1, 2, 3) for path in itertools.product(range(6), repeat=n)]
    seeds = {rng.derive(seed, *path) for seed in (0, 1, 2, -1, 1 << 40) for path in paths}
    assert len(seeds) == 5 * len(paths)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 62


def test_a_derived_seed_is_the_same_in_every_version() -> None:
    # A run is continued by a later version, with the order of its data as it was.
    assert rng.derive(0, rng.ORDER, 1) == 2236338143322339785


@pytest.mark.pretend
@pytest.mark.parametrize("is_met", [False, True])
def test_a_state_of_fleets_tracker_that_is_of_another_device_is_left_alone(
    tracker: Any, is_met: bool
) -> None:
    paddle.set_device("cpu")
    tracker.add("of the CPU", 11)
    if is_met:
        rng.seed_all(5)
    paddle.set_device(DEVICE)
    rng.seed_all(5)
    first = draws()
    rng.seed_all(5)
    assert draws() == first


class Watching(Tiny):
    """Notes what every place draws in which a user may draw, of all that counts: also under a name
    of fleet's tracker, as layers of tensor parallel do.
    """

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        # Not shuffled: a sampler that draws would be seeded right before an epoch.
        self.train_loader = DataLoader(Points(self.size), batch_size=self.batch_size)

    def setup_model(self) -> None:
        super().setup_model()
        self.noted = Notes()
        get_rng_state_tracker().reset()
        get_rng_state_tracker().add("local", 4)

    def note(self, place: str) -> None:
        """Notes what is drawn now."""
        self.noted.append((place, self.iteration, draws(), tracked("local")))

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


def in_training(noted: list[Any]) -> list[Any]:
    """What was noted, but for validations and starts, of which there may be more."""
    return [note for note in noted if "validation" not in note[0] and "start" not in note[0]]


OPTIONS = {"max_iteration": 12, "save_interval": 4, "valid_interval": 3, "log_interval": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What a run of one start has noted, and its last checkpoint."""
    path = tmp_path_factory.mktemp("rng")
    exp: Any = trained(Watching, path, **OPTIONS)
    get_rng_state_tracker().reset()
    return exp.noted, path / "checkpoints/step-00000012"


class Drawing(Points):
    """A data set that draws more than the other."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        draws()
        return super().__getitem__(index)


class Elsewhere(AllEvents, Watching):
    """Draws in all the places that have numbers of their own, too."""

    def setup_dataloader(self) -> None:
        super().setup_dataloader()
        self.valid_loader = DataLoader(Drawing(10), batch_size=3)

    def on_setup_end(self) -> None:
        draws()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        draws()

    @on("on_train_batch_end")
    def draw(self) -> None:
        draws()

    def on_fetch_data_end(self) -> None:
        draws()

    def on_log(self, metrics: Mapping[str, float]) -> None:
        draws()

    def on_save_checkpoint(self) -> None:
        draws()

    def valid(self) -> dict[str, float]:
        results = super().valid()
        draws()
        return results

    def on_valid_batch_end(self, batch: Any, indices: Sequence[int] | None) -> None:
        draws()


@pytest.mark.device
@pytest.mark.usefixtures("tracker")
def test_what_is_drawn_elsewhere_moves_nothing(
    plain: tuple[list[Any], Path], tmp_path: Path
) -> None:
    noted, end = plain
    other: Any = trained(Elsewhere, tmp_path, **OPTIONS)
    assert noted == other.noted
    same_bits(end, tmp_path / "checkpoints/step-00000012")


@pytest.mark.device
@pytest.mark.usefixtures("tracker")
def test_whether_and_when_one_validates_saves_or_logs_moves_nothing(
    plain: tuple[list[Any], Path], tmp_path: Path
) -> None:
    often = {"valid_interval": 1, "save_interval": 1, "log_interval": 1}
    other: Any = trained(Watching, tmp_path, **{**OPTIONS, **often})
    assert in_training(plain[0]) == in_training(other.noted)


@pytest.mark.device
@pytest.mark.usefixtures("tracker")
def test_a_resumed_run_draws_what_the_other_one_drew(
    plain: tuple[list[Any], Path], tmp_path: Path
) -> None:
    noted, end = plain
    parts: list[Any] = []
    for last in (4, 8, 12):  # the last one of the second part ends an epoch
        exp: Any = trained(Watching, tmp_path, **{**OPTIONS, "max_iteration": last})
        parts += in_training(exp.noted)
    assert parts == in_training(noted)
    same_bits(end, tmp_path / "checkpoints/step-00000012")


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


@pytest.mark.device
def test_what_a_data_set_draws_depends_on_the_place_in_the_order_alone(tmp_path: Path) -> None:
    class Noting(Points):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
            drawn.append(paddle.rand([2]).tolist())
            return super().__getitem__(index)

    class Loading(Helped):
        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(Noting(8), batch_size=2)

    drawn: list[Any] = []
    none = {"valid_interval": 0, "max_epoch": 1}
    trained(Loading, tmp_path / "one", **none)
    one, drawn[:] = [*drawn], []
    trained(Loading, tmp_path / "other", accumulation_steps=2, **none)
    assert drawn == one


def test_ranks_that_share_layers_draw_the_numbers_of_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Groups:  # as fleet.init leaves them
        def get_model_parallel_group_src_rank(self) -> int:
            return 6

    class Connected(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", Groups())

        def on_train_batch_begin(self) -> None:
            drawn.append(np.random.rand())

        def train_batch(self) -> None:
            super().train_batch()
            drawn.append(np.random.rand())

    def seeded(*part: int) -> float:
        rng.seed_for(0, rng.TRAIN, 1, *part)
        return np.random.rand()

    drawn: list[float] = []
    trained(Connected, tmp_path / "run", max_iteration=1)
    assert drawn == [seeded(6), seeded(6, 0)]


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


@pytest.mark.device
@pytest.mark.usefixtures("on_device")
def test_what_is_drawn_in_a_block_moves_nothing_after_it() -> None:
    rng.seed_all(5)
    draws()
    with rng.unmoved():
        drawn = draws()
        paddle.seed(3)
    assert draws() == drawn
