"""What `valid` logs: the mean over the samples of all ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, Dataset, IterableDataset, TensorDataset
from tiny import Tiny, curve, make, metrics, run_ranks, trained

from expbase.extras.all_events import AllEvents

# Of ten samples in batches of 4, 4 and 2, whose means have the mean 14.42.
ERRORS = [3.0] * 4 + [4.54] * 4 + [35.72] * 2
MEAN = pytest.approx(10.16)


def errors(size: int = 10, batch_size: int = 4) -> DataLoader:
    return DataLoader(TensorDataset([paddle.to_tensor(ERRORS[:size])]), batch_size=batch_size)


def made(output: Path, valid: Callable[[Any], Any], **training: Any) -> Any:
    """An experiment with such a valid, after setup."""

    class Logging(Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.valid_loader = errors()
            self.other = errors(size=3, batch_size=3)

    exp: Any = make(type("Logging", (Logging,), {"valid": valid}), output, **training)
    exp.setup()
    return exp


def results(output: Path, valid: Callable[[Any], Any], loader: Any = None, **training: Any) -> Any:
    exp = made(output, valid, **training)
    with exp.internals.closing():
        return exp.evaluate(loader)


def log_each(self: Any) -> None:
    for (error,) in self.valid_batches():
        self.log(error=error.mean())


def log_at_the_end(self: Any) -> None:
    total, count = 0.0, 0
    for (error,) in self.valid_batches():
        total += float(error.sum())
        count += len(error)
    self.log(error=total / max(count, 1))
    self.log(again=total / max(count, 1))  # another name has read as much


@pytest.mark.parametrize(("valid", "shares"), [(log_each, 0), (log_at_the_end, 2)])
def test_a_small_batch_counts_as_much_as_its_samples(
    tmp_path: Path, valid: Callable[[Any], Any], shares: int
) -> None:
    found = results(tmp_path, valid, shares=shares)
    assert [*found.values()] == [MEAN] * len(found) != []


def test_training_logs_the_mean_over_the_times(tmp_path: Path) -> None:
    class Logging(Tiny):
        def train_batch(self) -> None:
            super().train_batch()
            for (error,) in errors():
                self.log(error=error.mean())

    trained(Logging, tmp_path, max_iteration=1)
    assert metrics(tmp_path)[0]["train/error"] == pytest.approx(14.42)


# --- which batch a call weighs -----------------------------------------------------------------


def weights(output: Path, look: Callable[[Any, Callable[[str], None]], None]) -> dict[str, float]:
    """What the calls of `note` in a validation have weighed, by name."""

    def valid(self: Any) -> None:
        names: list[str] = []

        def note(name: str) -> None:
            names.append(name)
            self.log({name: 1.0})

        look(self, note)
        for _ in self.valid_batches(self.other):
            self.log(dict.fromkeys(names, 0.0))  # which weighs 3

    return {name: round(3 * x / (1 - x), 6) for name, x in results(output, valid).items()}


def test_of_nested_loops_the_innermost_open_one_counts(tmp_path: Path) -> None:
    def look(self: Any, note: Callable[[str], None]) -> None:
        for number, _ in enumerate(self.valid_batches()):
            note(f"before {number}")
            for _ in self.valid_batches(self.other):
                note(f"inner {number}")
            note(f"after {number}")
        note("outside")

    found = weights(tmp_path, look)
    for number, size in enumerate([4, 4, 2]):
        parts = [found[f"{place} {number}"] for place in ("before", "inner", "after")]
        assert parts == [size, 3, size]
    assert found["outside"] == 10 + 3 * 3


def left_by_break(self: Any) -> Iterator[Any]:
    for batch in self.valid_batches(self.other):
        yield batch
        break


def test_a_loop_that_was_left_is_over(tmp_path: Path) -> None:
    def look(self: Any, note: Callable[[str], None]) -> None:
        for _ in self.valid_batches():
            break
        note("left")
        for _ in itertools.islice(self.valid_batches(), 2):
            pass
        note("sliced")
        try:
            for _ in self.valid_batches():
                raise KeyError
        except KeyError:
            note("failed")
        for _ in self.valid_batches():
            for _ in left_by_break(self):
                pass
            note("inner left")
            break

    found = weights(tmp_path, look)
    # Outside of loops each name weighs all that was read before.
    assert found == {"left": 4, "sliced": 4 + 8, "failed": 4 + 8 + 4, "inner left": 4}


def test_a_loop_that_is_held_ends_with_the_batch_around_it(tmp_path: Path) -> None:
    def look(self: Any, note: Callable[[str], None]) -> None:
        held = iter(())
        for number, _ in enumerate(self.valid_batches()):
            note(f"outer {number}")
            held = self.valid_batches(self.other)
            for _ in held:
                note(f"held {number}")
                break
        note("outside")
        assert held is not None

    found = weights(tmp_path, look)
    assert [found[f"outer {number}"] for number in range(3)] == [4, 4, 2]
    assert [found[f"held {number}"] for number in range(3)] == [3, 3, 3]
    assert found["outside"] == 10 + 3 * 3


def test_two_loops_side_by_side_weigh_the_batch_that_was_read_last(tmp_path: Path) -> None:
    def look(self: Any, note: Callable[[str], None]) -> None:
        pairs = zip(self.valid_batches(), self.valid_batches(), strict=True)
        for number, _ in enumerate(pairs):
            note(str(number))

    assert weights(tmp_path, look) == {"0": 4, "1": 4, "2": 2}


def test_outside_of_loops_a_call_weighs_what_was_read_since_its_name_was_logged(
    tmp_path: Path,
) -> None:
    def valid(self: Any) -> None:
        list(self.valid_batches())
        self.log(error=1.0)
        list(self.valid_batches(self.other))
        self.log(error=0.0, late=5.0)
        for value in (0.0, 1.0):  # nothing was read for the second one: it weighs as much
            self.log(parts=value)

    exp = made(tmp_path, valid)
    with exp.internals.closing():
        assert exp.evaluate() == {"error": 10 / 13, "late": 5.0, "parts": 0.5}
        assert exp.evaluate()["error"] == 10 / 13  # what was read before does not count


def test_a_loop_that_is_held_after_a_validation_is_over(tmp_path: Path) -> None:
    held: list[Any] = []

    def valid(self: Any) -> None:
        held.append(self.valid_batches())
        list(self.valid_batches(self.other))
        self.log(error=0.0)
        next(held[-1])
        self.log(error=1.0)

    exp = made(tmp_path, valid)
    with exp.internals.closing():
        assert exp.evaluate() == exp.evaluate() == {"error": 4 / 7}


def test_each_evaluation_has_its_own_numbers(tmp_path: Path) -> None:
    class Twice(Tiny):
        def evaluate(self, loader: Any = None) -> dict[str, float]:
            super().evaluate(errors())
            return super().evaluate(loader)

        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.valid_loader = errors(3)

        def valid(self) -> None:  # type: ignore[override]
            self.log({f"of {len(self.internals.evaluated_loader.dataset)}": 1.0})  # weighs nothing
            log_each(self)
            with self.internals.evaluating():
                self.log(error=100.0)

    trained(Twice, tmp_path, max_iteration=1)
    assert curve(tmp_path, "valid/error") == {1: 3.0}
    assert curve(tmp_path, "valid/of 3") == {1: 1.0}
    assert curve(tmp_path, "valid/of 10") == {}


def test_what_is_logged_without_data_gives_way_to_what_has_some(tmp_path: Path) -> None:
    def valid(self: Any) -> None:
        self.log(before=8.0, error=8.0)
        for _ in self.valid_batches():
            self.log(error=1.0)

    assert results(tmp_path, valid) == {"before": 8.0, "error": 1.0}


def test_a_listener_of_the_batch_weighs_it(tmp_path: Path) -> None:
    class Listening(AllEvents, Tiny):
        def setup_dataloader(self) -> None:
            super().setup_dataloader()
            self.valid_loader = errors()

        def valid(self) -> None:  # type: ignore[override]
            for _ in self.valid_batches():
                pass

        def on_valid_batch_end(self, batch: Any, indices: Any) -> None:
            self.log(error=batch[0].mean())

    exp = make(Listening, tmp_path)
    exp.setup()
    with exp.internals.closing():
        assert exp.evaluate() == {"error": MEAN}


def test_what_valid_returns_wins_over_what_it_has_logged(tmp_path: Path) -> None:
    def valid(self: Any) -> dict[str, float]:
        self.log(error=1.0, other=2.0)
        return {"error": 3.0}

    assert results(tmp_path, valid) == {"error": 3.0, "other": 2.0}


def test_a_logged_tensor_is_not_read_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def valid(self: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(paddle.Tensor, "item", lambda tensor: pytest.fail("is read"))
            log_each(self)

    assert results(tmp_path, valid) == {"error": MEAN}


def test_what_is_logged_while_predicting_weighs_samples_too(tmp_path: Path) -> None:
    exp = made(tmp_path, log_each)
    with exp.internals.closing():
        with exp.internals.evaluating():
            log_each(exp)
        assert "[0] error=10.16" in (tmp_path / "worker_0.log").read_text()


# --- how many samples a batch has --------------------------------------------------------------


def log_number(self: Any) -> None:
    for number, _ in enumerate(self.valid_batches()):
        self.log(number=number)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(np.arange(4, dtype="float32"))


@pytest.mark.parametrize(
    "loader",
    [
        [paddle.zeros([3]), paddle.zeros([1, 5])],
        [{"scale": paddle.to_tensor(1.0), "x": [["a", np.zeros(3)]]}, (None, "b", np.zeros([1]))],
        DataLoader(Stream(), batch_size=3),
    ],
)
def test_without_indices_the_first_tensor_with_axes_tells_the_size(
    tmp_path: Path, loader: Any
) -> None:
    assert results(tmp_path, log_number, loader) == {"number": 1 / 4}
    assert "weighs 1" not in (tmp_path / "worker_0.log").read_text()


class Ready(TensorDataset):
    def __init__(self) -> None:
        super().__init__([paddle.zeros([4])])

    def __getitem__(self, index: int) -> Any:
        return paddle.zeros([3 - index])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([["a", "b", "c"], ["d"]], "hold no tensor"),
        (DataLoader(Ready(), batch_size=None), "are ready-made (batch_size=None)"),
    ],
)
def test_batches_of_a_size_that_nobody_can_tell_weigh_1_and_a_line_says_so_once(
    tmp_path: Path, loader: Any, why: str
) -> None:
    exp = made(tmp_path, log_number)
    with exp.internals.closing():
        assert exp.evaluate() == {"number": (1 * 4 + 2 * 2) / 10}
        assert exp.evaluate(loader) == exp.evaluate(loader) == {"number": 1 / 2}
    log = (tmp_path / "worker_0.log").read_text()
    what = f"the batches of the loader given to evaluate {why}"
    text = f"[0] log: {what}, so each batch weighs 1 in the means. If"
    assert log.count(text) == log.count("weighs 1") == 1


def only_even(samples: list[Any]) -> Any:
    return np.stack([sample for (sample,) in samples if sample % 2 == 0])


class Numbers(Dataset):
    def __getitem__(self, index: int) -> Any:
        return (np.float32(index),)

    def __len__(self) -> int:
        return 5


class StreamOfNumbers(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return ((np.float32(index),) for index in range(5))


def frames_first(samples: list[Any]) -> Any:
    frames = np.zeros([7, len(samples)], "float32")
    return {"frames": frames, "number": np.stack([sample for (sample,) in samples])}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "collate", "mean", "text"),
    [
        # Batches of 0 1 2 and 3 4, of which 0 2 and 4 are left: batch 0 has two, batch 1 has one.
        (Numbers(), only_even, (0 * 2 + 1 * 1) / 3,
         "have 2 first in their tensors, and 3 samples have gone into collate_fn, so such a batch "
         "weighs 2 in the means. If that is not their number of samples, call self.average("),
        (StreamOfNumbers(), only_even, (0 * 2 + 1 * 1) / 3, "have 2 first in their tensors, and 3"),
        # Three samples and two, though the first tensor has 7 frames first.
        (StreamOfNumbers(), frames_first, (0 * 3 + 1 * 2) / 5, ""),
    ],
)  # fmt: skip
def test_a_batch_weighs_what_collate_fn_has_made_of_its_samples(
    tmp_path: Path, data: Any, collate: Any, mean: float, text: str, workers: int
) -> None:
    loader = DataLoader(data, batch_size=3, collate_fn=collate, num_workers=workers)
    exp = made(tmp_path, log_number)
    with exp.internals.closing():
        assert exp.evaluate(loader) == exp.evaluate(loader) == {"number": mean}
    log = (tmp_path / "worker_0.log").read_text()
    begin = "[0] log: the batches of the loader given to evaluate "
    assert log.count(begin) == bool(text)
    assert begin + text in log if text else True


def test_batches_of_ones_own_of_which_nobody_knows_the_size_are_told(tmp_path: Path) -> None:
    batches = [{"frames": paddle.zeros([7, 3]), "number": paddle.zeros([3])}] * 2
    assert results(tmp_path, log_number, batches) == {"number": 1 / 2}
    text = "have 7, 3 first in their tensors, so such a batch weighs 7 in the means."
    assert text in (tmp_path / "worker_0.log").read_text()


def test_samples_per_second_counts_what_was_read(tmp_path: Path) -> None:
    class Even(Tiny):
        def setup_dataloader(self) -> None:
            self.train_loader = DataLoader(Numbers(), batch_size=3, collate_fn=only_even)

        def train_batch(self) -> None:
            numbers = self.read_batch()
            self.backward(self.model(numbers.reshape([-1, 1]) * paddle.ones([1, 4])).sum())
            self.step_optimizers()
            self.log(loss=0.0)

    trained(Even, tmp_path, max_iteration=4, log_interval=2, valid_interval=0, save_interval=0)
    for line in metrics(tmp_path):  # an epoch: two updates, three of its five samples
        per_update = line["speed/samples_per_second"] / line["speed/steps_per_second"]
        assert per_update == pytest.approx(3 / 2)


def test_who_logs_nothing_is_told_nothing_of_weights(tmp_path: Path) -> None:
    def valid(self: Any) -> dict[str, float]:
        return self.average({"batches": 1.0}, weight=len(list(self.valid_batches([["a"]]))))

    exp = made(tmp_path, valid)
    with exp.internals.closing():
        exp.evaluate()
        with exp.internals.evaluating():
            log_each(exp)
    assert "weighs 1" not in (tmp_path / "worker_0.log").read_text()


# --- several ranks -----------------------------------------------------------------------------

RANKS = """
import json, sys
from pathlib import Path
from paddle.io import DataLoader, TensorDataset
import paddle
from test_logged import errors, log_at_the_end, log_each, made

OUTPUT = Path(sys.argv[1])


def log_on_one(self):
    for error, in self.valid_batches():
        if self.rank == 1:
            self.log(error=error.mean())


def log_nested(self):
    for error, in self.valid_batches():
        for inner, in self.valid_batches(self.other):
            self.log(inner=inner.mean())
        self.log(outer=error.mean())


def log_without_data(self):
    self.log(rank=float(self.rank))


for shares in (0, 2):
    exp = made(OUTPUT / f"shares-{shares}", lambda self: self.way(self), shares=shares)
    facts = {}
    with exp.internals.closing():
        for name, way, loader in [
            ("no data", log_without_data, None),
            ("each", log_each, None),
            ("at the end", log_at_the_end, None),
            ("on one", log_on_one, None),
            ("nested", log_nested, None),
            ("one batch", log_each, errors(4)),
            ("one batch, at the end", log_at_the_end, errors(4)),
        ]:
            exp.way = way
            facts[name] = exp.evaluate(loader)
    (exp.output_dir / f"facts-{exp.rank}.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged")
    (folder / "ranks.py").write_text(RANKS)
    for rank in run_ranks([[str(folder / "ranks.py"), str(folder)]] * 2):
        assert rank.returncode == 0, rank.stderr
    return folder


def facts_of(launched: Path, shares: int) -> tuple[Any, Any]:
    files = [launched / f"shares-{shares}/facts-{rank}.json" for rank in range(2)]
    one, other = (json.loads(file.read_text()) for file in files)
    return one, other


def test_the_mean_is_over_the_samples_of_all_ranks(launched: Path) -> None:
    facts, others = facts_of(launched, 0)
    assert facts == others
    assert facts["each"] == {"error": MEAN}
    assert facts["at the end"] == {"error": MEAN, "again": MEAN}
    assert facts["on one"] == {"error": pytest.approx(4.54)}  # rank 1 has the second batch
    # Of the three samples of the inner loop rank 0 has all.
    assert facts["nested"] == {"inner": 3.0, "outer": MEAN}
    # Rank 1 has none, and logs 0 at the end.
    assert facts["one batch"] == {"error": 3.0}
    assert facts["one batch, at the end"] == {"error": 3.0, "again": 3.0}
    assert facts["no data"] == {"rank": 0.5}


def test_with_shares_nothing_is_summed_over_ranks(launched: Path) -> None:
    facts, others = facts_of(launched, 2)
    assert facts == others
    assert facts["each"] == {"error": MEAN}
    assert facts["nested"] == {"inner": 3.0, "outer": MEAN}
    assert facts["no data"] == {"rank": 0.0}
    log = (launched / "shares-2/worker_0.log").read_text()
    assert "valid: rank: 0.0 on rank 0, 1.0 on rank 1; rank 0's is used for all." in log


def test_the_mean_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path, launched: Path) -> None:
    alone = results(tmp_path, log_each)
    assert facts_of(launched, 0)[0]["each"] == facts_of(launched, 2)[0]["each"] == alone
