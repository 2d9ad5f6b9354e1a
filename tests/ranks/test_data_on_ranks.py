"""Data on one rank and two: the same first weights, each sample once, and nothing is no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import run_script

# Writes what each rank saw into its own file, beside the run.
PROBE = """
import json, random, zlib
import numpy as np
import paddle
from paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler, IterableDataset
from tiny import Notes, Tiny
from expbase import main
from expbase.extras.all_events import AllEvents
from expbase.extras.prediction import Prediction


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __getitem__(self, index):
        return np.array([index])

    def __len__(self):
        return self.size


class Drawn:
    # Asking it for its order draws from everything there is.
    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(len(self)):
            random.random(), paddle.rand([1])
            yield np.random.randint(0, 10, 3).tolist()


class Own(BatchSampler):
    # Draws from a generator of its own, shuffles a list in place, counts its passes by itself.
    def __init__(self):
        super().__init__(range(40), batch_size=4)
        self.generator = np.random.RandomState(3)
        self.indices = [*range(40)]
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        random.Random(self.passes).shuffle(self.indices)
        order = self.generator.permutation(40)
        return iter(np.array(self.indices)[order].reshape([10, 4]).tolist())


class Same(DistributedBatchSampler):
    pass


class Padded(BatchSampler):
    # Its padding is its own: 14 indices of 13 samples, a half for each rank.
    def __init__(self, rank):
        super().__init__(range(13), batch_size=4)
        self.rank = rank

    def __iter__(self):
        own = [*range(13), 0][self.rank :: 2]
        return iter([own[:4], own[4:]])


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


class Stored:
    # Gives what it holds once, since it keeps its iterator.
    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


class Probe(AllEvents, Prediction, Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        data = self.train_loader.dataset
        self.train_loader = DataLoader(data, batch_sampler=Own())
        self.valid_loader = DataLoader(self.valid_loader.dataset, batch_sampler=Drawn())

    def setup_model(self):
        super().setup_model()
        weights = b"".join(p.numpy().tobytes() for p in self.model.parameters())
        draws = [random.random(), np.random.rand(), paddle.rand([1]).item()]
        self.first = Notes([zlib.crc32(weights), *draws])
        self.seen = Notes()

    def on_batch_read(self, batch, indices):
        self.seen.append(indices)

    def valid(self):
        if not hasattr(self, "given"):
            return super().valid()
        self.read = Notes()
        for batch in self.valid_batches():
            self.read.append(np.array(batch).reshape(-1).tolist())
        if self.given() == "ends":
            return {"error": 0.0}  # the best of all, and of nothing
        return {"error": 0.0, "count": sum(map(len, sum(self.gather(self.read), [])))}

    def predict_batch(self, batch):
        return batch

    def counted(self, loader, given=lambda: None):
        self.given = given
        return self.evaluate(loader)["count"]

    def error_of(self, act):
        try:
            return repr(act())
        except Exception as error:
            return repr(error)

    def in_setup(self, loader):
        self.valid_loader = loader
        return self._ExperimentBase__run._check_evaluated()

    def over(self, size, sampler):
        return DataLoader(Numbers(size), batch_sampler=sampler)

    def on_train_end(self):
        six = lambda: DataLoader(Numbers(6), batch_size=8, drop_last=True)
        stream = lambda: DataLoader(Nothing(), batch_size=4)
        facts = {"first": self.first, "seen": self.seen, "epochs": self.epoch}
        facts["same"] = self.counted(self.over(13, Same(Numbers(13), 4)))
        self.padded = self.over(13, Padded(self.rank))
        facts["padded"] = [self.counted(self.padded) for _ in range(2)]
        facts["one has none"] = self.counted([[1]] * (1 - self.rank))
        stored = Stored([[1], [2]])
        facts["stored"] = [self.error_of(lambda: self.counted(stored)) for _ in range(2)]
        half = Stored([[1], [2]]) if self.rank or not self.parallel else [[1]]
        twice = lambda: [*self.valid_batches()]
        facts["half"] = self.error_of(lambda: self.counted(half, twice))
        empty = six(), [], stream()
        facts["evaluate"] = [self.error_of(lambda: self.counted(of)) for of in empty]
        ends = lambda: "ends"
        facts["ended"] = [self.error_of(lambda: self.counted(of, ends)) for of in empty]
        facts["predict"] = [self.error_of(lambda: self.predict(of)) for of in ([], stream())]
        averaged = lambda: self.average({"error": 0.0}, 0)["error"]
        facts["averaged"] = self.error_of(lambda: self.counted([], averaged))
        facts["setup"] = [self.error_of(lambda: self.in_setup(of)) for of in (six(), [], [1])]
        facts["setup"].append(self.error_of(lambda: self.in_setup([[1]] * self.rank)))
        path = self.output_dir.parent / f"facts_{self.world_size}_{self.rank}.json"
        path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Probe)
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same script on one process and on two: more than two epochs of both."""
    folder = tmp_path_factory.mktemp("probed")
    script = folder / "train.py"
    script.write_text(PROBE)
    for ranks, updates in ((1, 24), (2, 12)):
        words = ["--nprocs", str(ranks), "--output", str(folder / f"run_{ranks}")]
        options = {"max_iteration": updates, "valid_interval": 0, "save_interval": 0}
        words += [f"training.{name}={value}" for name, value in options.items()]
        result = run_script(script, *words)
        assert result.returncode == 0, result.stderr + result.stdout
    return folder


def facts(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts_{ranks}_{n}.json").read_text()) for n in range(ranks)]


@pytest.mark.long
def test_what_the_ranks_ask_of_samplers_changes_no_first_weights_and_draws(probed: Path) -> None:
    (alone,) = facts(probed, 1)
    for facts_of_rank in facts(probed):
        assert facts_of_rank["first"] == alone["first"]


@pytest.mark.long
def test_a_sampler_that_has_a_past_begins_alike_on_one_rank_and_on_two(probed: Path) -> None:
    (alone,) = facts(probed, 1)
    one, other = facts(probed)
    dealt = [batch for both in zip(one["seen"], other["seen"], strict=True) for batch in both]
    assert dealt == alone["seen"]
    assert (alone["epochs"], one["epochs"]) == (3, 3)


def test_of_an_empty_subclass_of_paddles_sampler_nothing_is_counted_twice(probed: Path) -> None:
    assert [facts_of_rank["same"] for facts_of_rank in facts(probed)] == [13, 13]


def test_what_a_sampler_pads_by_hand_is_told_once(probed: Path) -> None:
    assert [facts_of_rank["padded"] for facts_of_rank in facts(probed)] == [[14, 14]] * 2
    log = (probed / "run_2/worker_0.log").read_text()
    assert log.count("counted twice") == 1
    assert "[12] self.padded: 1 of 14 samples were counted twice: its sampler gives them" in log


def test_a_validation_of_which_no_rank_has_a_batch_is_an_error_on_each(probed: Path) -> None:
    given = "the loader given to {}: has no batch; expected at least one. It "
    six = given + "has 6 samples, batch_size=8, drop_last=True."
    stream = given + "has a Nothing of unknown length, batch_size=4, drop_last=False."
    empty = given + "is a list of 0 batches."
    for of in [*facts(probed, 1), *facts(probed)]:
        expected = [f"ValueMistake('{text.format('evaluate')}')" for text in (six, empty, stream)]
        assert of["evaluate"] == of["ended"] == expected
        expected = [f"ValueMistake('{text.format('predict')}')" for text in (empty, stream)]
        assert of["predict"] == expected
        assert of["averaged"] == f"ValueMistake('{empty.format('evaluate')}')"
    for of in facts(probed):
        assert of["one has none"] == 1


def test_a_validation_without_a_batch_is_found_in_setup_if_no_rank_has_one(probed: Path) -> None:
    six = "self.valid_loader: has no batch; expected at least one. It has 6 samples, batch_size=8,"
    for of in facts(probed):
        assert six in of["setup"][0]
        assert (
            "self.valid_loader: has no batch; expected at least one. It is a list of 0"
            in (of["setup"][1])
        )
        assert of["setup"][2:] == ["None", "None"]


def test_what_was_used_up_before_is_no_validation(probed: Path) -> None:
    text = "It is a Stored, and a pass before it may have taken all: expected an __iter__ that"
    for of in [*facts(probed, 1), *facts(probed)]:
        assert float(of["stored"][0]) > 0
        assert text in of["stored"][1]
    # Also where another rank has some: the one that had batches before says so on all.
    assert all(text in of["half"] for of in facts(probed))
