"""training.shares: the bits of a run do not depend on the number of processes.

tests/proofs/shares_of_ranks.py kills such runs, and starts them on other numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, Dataset, DistributedBatchSampler, IterableDataset
from tiny import DEVICE, TESTS, Helped, Tiny, make, metrics, run_of, run_script, trained

from expbase import ConfigError
from expbase.checkpoint import rank_state
from expbase.data.loaders import Shard, adapt_loader
from expbase.engine.shares.gradient_tree import GradientTree
from expbase.engine.shares.share_checks import check_shares, refuse_different
from expbase.record.meter import Meter

sys.path.insert(0, str(TESTS / "proofs"))

from compare import differences

MANY = TESTS / "proofs" / "many.py"
INTERVALS = {"valid_interval": 5, "save_interval": 4, "log_interval": 3}


# Each net of many.py once, and a run that goes from one process to two and the other way round.
@pytest.mark.parametrize(
    ("net", "processes", "ends"),
    [
        ("classifier", (1, 2), (3, 8)),
        pytest.param("gan", (2, 1), (6, 14), marks=pytest.mark.long),
        pytest.param("recurrent", (4, 1), (6, 14), marks=pytest.mark.long),
    ],
)
def test_a_run_on_other_numbers_of_processes_has_the_bytes_of_one_on_one(
    tmp_path: Path, forked: None, net: str, processes: tuple[int, int], ends: tuple[int, int]
) -> None:
    outputs = [tmp_path / "straight", tmp_path / "run"]
    starts = [(outputs[0], 1, ends[1]), *zip(outputs[1:] * 2, processes, ends, strict=True)]
    for output, number, iterations in starts:
        words = [f"training.{k}={n}" for k, n in {**INTERVALS, "max_iteration": iterations}.items()]
        words += ["--device", DEVICE, "--nprocs", str(number), f"data.net={net}"]
        result = run_script(MANY, "--output", str(output), *words)
        assert result.returncode == 0, result.stderr
    assert "not exact" not in (outputs[1] / "worker_0.log").read_text()
    assert differences(outputs[1], outputs[0]) == []


@pytest.mark.device
def test_each_share_has_statistics_of_its_own_and_the_model_those_of_the_first(
    tmp_path: Path,
) -> None:
    exp = trained(Helped, tmp_path / "run", max_iteration=3, shares=4)
    path = tmp_path / "run" / "checkpoints" / "step-00000003" / "state.json"
    saved = json.loads(path.read_bytes())["values"]["shares"]
    assert [*saved] == ["0", "1", "2", "3"]
    assert {*saved["0"]} == {"model.1._mean", "model.1._variance"}
    own = run_of(exp).share_states._kept
    means = [own[number]["model.1._mean"].numpy() for number in range(4)]
    assert all((one != other).any() for one in means for other in means if one is not other)
    assert (exp.model[1]._mean.numpy() == means[0]).all()


def test_what_changes_between_two_loops_is_no_statistic(tmp_path: Path) -> None:
    class Teaching(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            self.teacher = paddle.nn.Linear(4, 2)
            for parameter in self.teacher.parameters():
                parameter.stop_gradient = True

        def train_batch(self) -> None:
            super().train_batch()
            self.teacher.weight.add_(paddle.ones([4, 2]))
            super().train_batch()

    exp = trained(Teaching, tmp_path / "run", max_iteration=2, shares=2)
    begun = make(Teaching, tmp_path / "other", shares=2)
    begun.setup()
    assert (exp.teacher.weight - begun.teacher.weight).numpy().round(5).tolist() == [[2.0] * 2] * 4
    begun.close()


@pytest.mark.device
def test_a_loss_is_the_mean_over_all_shares_and_a_number_of_the_update_counts_once(
    tmp_path: Path,
) -> None:
    class Counting(Helped):
        def train_batch(self) -> None:
            super().train_batch()
            self.log(share=self.internals.share, shares=self.internals.num_shares)

    trained(Counting, tmp_path / "run", max_iteration=1, shares=4, log_interval=1)
    (line,) = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert (line["train/share"], line["train/shares"]) == (3, 4)


def test_what_several_meters_have_is_one_mean_in_any_order() -> None:
    numbers = [0.1 * 3**place for place in range(20)] + [1e300, -1e300, 5e-324]
    whole = Meter()
    for number in numbers:
        whole.add(1, {"x": number})
    for parts in (2, 4):
        meters = [Meter() for _ in range(parts)]
        for place, number in enumerate(reversed(numbers)):
            meters[place % parts].add(1, {"x": number})
        meters[0].take_all([meter.state_dict() for meter in meters])
        assert meters[0].means() == {"x": math.fsum(numbers) / len(numbers)}
    assert whole.means() == {"x": math.fsum(numbers) / len(numbers)}


@pytest.mark.device
def test_gradients_are_added_in_one_tree() -> None:
    one, other = (paddle.create_parameter([1], "float32") for _ in range(2))
    tree = GradientTree(lambda: [("one", one), ("other", other)])
    numbers = [1e8, 1.0, -1e8, 3.0]
    other.grad = paddle.ones([1])  # of an update before, which is added up with this one
    tree.begin()
    for place, number in enumerate(numbers):
        (one * number).sum().backward()
        if place == 2:
            (other * 2).sum().backward()
        tree.add_share(place)
    tree.add_up({})
    expected = np.float32(1e8) + np.float32(1), np.float32(-1e8) + np.float32(3)
    assert one.grad.item() == expected[0] + expected[1] != sum(numbers)
    assert other.grad.item() == 3


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index, np.random.rand()])

    def __len__(self) -> int:
        return self.size


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return (np.array([index, np.random.rand()]) for index in range(26))


class Sub(DistributedBatchSampler):
    pass


def distributed(kind: type = DistributedBatchSampler) -> DataLoader:
    data = Numbers(26)
    return DataLoader(data, batch_sampler=kind(data, 2, num_replicas=2, rank=1, shuffle=True))


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: DataLoader(Numbers(26), batch_size=2, shuffle=True),
        lambda: DataLoader(Endless(), batch_size=2),
        distributed,
        lambda: distributed(Sub),
    ],
)
def test_an_update_has_the_same_batches_on_any_number_of_ranks(
    make_loader: Callable[[], Any],
) -> None:
    def updates(ranks: int, position: int = 0) -> list[Any]:
        """All batches in the order of their shares."""
        parts = []
        for rank in range(ranks):
            shard = Shard(0, rank, ranks, 4 // ranks, one_order=True)
            batches = adapt_loader(make_loader(), "loader", shard).open(2, position)
            own = [np.concatenate([np.array(part) for part in batch]) for batch in batches]
            assert len(own) % (4 // ranks) == 0
            parts.append(own)
        rounds = len(parts[0]) * ranks // 4
        return [
            batch.tolist()
            for number in range(rounds)
            for own in parts
            for batch in own[number * 4 // ranks : (number + 1) * 4 // ranks]
        ]

    assert updates(1) == updates(2) == updates(4)
    assert updates(2, position=8) == updates(1)[4:]
    assert len(updates(1)) in (12, 16)  # of a stream whole rounds alone


class Remembering:
    """Batches without an end, which goes on where its state says."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield np.array([self.position])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_loader_that_remembers_goes_on_behind_the_update_on_other_ranks() -> None:
    def adapter(ranks: int) -> Any:
        return adapt_loader(Remembering(), "loader", Shard(0, ranks - 1, ranks, 4 // ranks, True))

    first = adapter(1)
    batches = first.open(1)
    assert [next(batches)[0] for _ in range(8)] == [*range(1, 9)]
    second = adapter(2)
    second.load_state_dict(first.state_dict())
    batches = second.open(1, batches.taken[2])
    assert [next(batches)[0] for _ in range(4)] == [11, 12, 15, 16]


def test_data_that_is_dealt_out_by_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_rank_state import Ranks

    for deals in (True, False):
        ranks = Ranks(monkeypatch, 2)
        for name in ("all_gather_object", "barrier"):
            monkeypatch.setattr(f"expbase.data.loaders.{name}", getattr(ranks, name))

        def adapted(rank: int, *, deals: bool = deals) -> Any:
            data = paddle.io.Subset([*range(40)], range(rank if deals else 0, 40, 2))
            shard = Shard(0, rank, 2, 2, True, "share")
            return adapt_loader(DataLoader(data, batch_size=2), "loader", shard).sharding

        if deals:
            with pytest.raises(ValueError, match=r"other data on rank 0 .* Look for self\.rank"):
                ranks.run(adapted)
        else:
            assert ranks.run(adapted) == ["dealt out over 4 shares"] * 2


def test_what_differs_between_ranks_and_is_no_share_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from test_rank_state import LOGGER, Ranks, array, objects_of

    def gathered(rank: int) -> Any:
        tensors = {"@values": {f"shares.{rank}.x": array(rank)}}
        values = {"values": {"epsilon": 0.5 * rank}, "shares": {str(rank): {}}}
        return rank_state.Gatherer(LOGGER, refuse_different).gather(objects_of(), tensors, values)

    with pytest.raises(RuntimeError, match=r"self\.epsilon: a value that is another one on r"):
        Ranks(monkeypatch, 2).run(gathered)


class Careless(Helped):
    def train_batch(self) -> None:
        self.backward(self.model(self.read_batch()[0]).mean())
        self.step_optimizers()


class Hasty(Helped):
    def train_batch(self) -> None:
        for points, _ in self.micro_batches():
            self.backward(self.model(points).mean())
            if self.internals.share == 3:
                break
        self.step_optimizers()


class Sparse(Helped):
    def setup_model(self) -> None:
        super().setup_model()
        self.table = paddle.nn.Embedding(4, 2, sparse=True)

    def train_batch(self) -> None:
        for points, labels in self.micro_batches():
            self.backward(self.model(points).mean() + self.table(labels).mean())


@pytest.mark.parametrize(
    ("experiment", "text"),
    [
        (Careless, r"training\.shares: 4 given, and train_batch did not call self\.micro_batches"),
        (
            Hasty,
            r"micro_batches: the update was made after 4 of 4 batches; expected it after the",
        ),
        (Sparse, r"self\.table\.weight: has a sparse gradient, which training\.shares cannot add"),
    ],
)
def test_a_train_batch_that_cannot_be_added_up_is_an_error(
    tmp_path: Path, experiment: type[Tiny], text: str
) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=text):
        trained(experiment, tmp_path / "run", shares=4)


class ByHand(Helped):
    def setup_model(self) -> None:
        super().setup_model()
        self.extra = paddle.nn.SyncBatchNorm(4)


def test_what_depends_on_the_ranks_is_refused_at_setup(tmp_path: Path) -> None:
    exp = make(ByHand, tmp_path / "run", shares=4)
    with pytest.raises(
        ValueError, match=r"SyncBatchNorm extra depends on the number of ranks; expected"
    ):
        exp.setup()


def test_the_processes_divide_the_shares() -> None:
    with pytest.raises(ConfigError, match="shares: 4 given, and 3 processes; expected one of 1, 2"):
        check_shares(4, 3)


def test_without_shares_a_value_that_is_named_by_share_is_state(tmp_path: Path) -> None:
    class Named(Tiny):
        def setup_model(self) -> None:
            super().setup_model()
            self.hidden = 1.0
            self.register_stateful("hidden", by_share=True)

    trained(Named, tmp_path / "run", max_iteration=1)
    path = tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json"
    saved = json.loads(path.read_bytes())["values"]["values"]["hidden"]
    assert saved["$encoded"][-1] == 1.0


class Counted(Helped):
    """Changes a value for each batch."""

    how = ""

    def setup_model(self) -> None:
        super().setup_model()
        self.count = 0
        self.generator = np.random.default_rng(3)
        if self.how:
            self.register_stateful("count", "generator", by_share=True)

    def train_batch(self) -> None:
        for points, _ in self.micro_batches():
            self.count += 1
            self.backward(self.model(points).mean() * self.generator.random())
        self.step_optimizers()


class Registered(Counted):
    how = "by share"


def test_a_value_that_changes_for_each_batch_is_an_error_on_one_process_too(
    tmp_path: Path,
) -> None:
    text = r"self\.count: a value that has changed within the loop over micro_batches\(\), which"
    with pytest.raises(RuntimeError, match=text):
        trained(Counted, tmp_path / "run", shares=2)


def test_a_change_that_begins_later_is_found_without_a_look_at_each_line(tmp_path: Path) -> None:
    made: list[int] = []

    class Later(Helped):
        def setup_model(self) -> None:
            super().setup_model()
            self.count = 0

        def train_batch(self) -> None:
            made.append(self.iteration)
            for points, _ in self.micro_batches():
                self.count += self.iteration > 5
                self.backward(self.model(points).mean())
            self.step_optimizers()

    words = {"shares": 2, "log_interval": 1, "save_interval": 12, "max_iteration": 20}
    with pytest.raises(RuntimeError, match=r"self\.count: a value that has changed within"):
        trained(Later, tmp_path / "run", **words)
    assert made[-1] == 9


def test_a_value_and_a_generator_of_each_share_are_continued(tmp_path: Path) -> None:
    straight = trained(Registered, tmp_path / "straight", max_iteration=4, shares=2)
    trained(Registered, tmp_path / "run", max_iteration=2, shares=2)
    exp = trained(Registered, tmp_path / "run", max_iteration=4, shares=2)
    assert (straight.count, exp.count) == (4, 4)
    assert differences(tmp_path / "run", tmp_path / "straight") == []
