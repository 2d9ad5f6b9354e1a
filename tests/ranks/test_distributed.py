"""Several processes, by paddle's launcher or --nprocs: shards, averages, one set of files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.base import core
from paddle.io import DataLoader
from tiny import Points, Tiny, curve, make, metrics, run_ranks, run_script, same_bits, trained

from expbase import ConfigError
from expbase.base.arrays import parse
from expbase.extras.all_events import AllEvents
from expbase.ranks import collectives, compare_gathered, store

# Writes what each rank saw into its own file, beside the run.
PROBE = """
import json, os, time, zlib
from unittest.mock import Mock
import numpy as np
import paddle
from tiny import Notes, Tiny
from expbase.ranks import collectives, store
from expbase import main, rank_zero_only
from expbase.ranks.compare_gathered import check_alike
from expbase.checkpoint import rank_state as local
from expbase.extras.all_events import AllEvents
from expbase.data.loaders import Shard, adapt_loader
from paddle.io import BatchSampler, DataLoader

broadcast = local._broadcast


class Probe(AllEvents, Tiny):
    odd = None

    def setup_model(self):
        super().setup_model()
        self.names = [paddle.utils.unique_name.generate("x"), paddle.to_tensor([1.0]).name]
        self.alone = paddle.nn.Linear(1, 1)  # each rank trains its own
        self.own = paddle.optimizer.SGD(0.1, parameters=self.alone.parameters())
        self.tally = 0  # a value of each rank

    def train_batch(self):
        super().train_batch()
        self.tally += 1 + self.rank
        self.alone(paddle.full([1, 1], 1.0 + self.rank)).sum().backward()
        self.own.step()
        self.own.clear_grad()

    def on_fetch_data_begin(self):
        time.sleep(0.02 * self.rank)

    def on_batch_read(self, batch, indices):
        self.seen = Notes([*getattr(self, "seen", []), indices])

    def sharding(self, step):
        own = list(range(self.rank if step > 1 else 0, 16, step))
        loader = DataLoader(range(16), batch_sampler=BatchSampler(sampler=own, batch_size=2))
        adapter = adapt_loader(loader, "loader", Shard(0, self.rank, self.world_size))
        return [adapter.sharding, [i for batch in adapter.open(1) for i in batch.tolist()]]

    def valid(self):
        if self.odd is not None and self.rank:
            return None
        if self.odd == "samples":  # what a sampler of one's own draws is compared between ranks
            sampler = BatchSampler(sampler=[3, 1, 2], batch_size=2)
            return {"n": len(list(self.valid_batches(DataLoader(range(4), batch_sampler=sampler))))}
        if self.odd == "reads":
            return {"n": len(list(self.valid_batches()))}
        share = sum(len(labels) for _, labels in self.valid_batches())
        self.shares = self.gather(share)
        return {**super().valid(), "share": share, **({"bleu": 1.0} if self.rank == 0 else {})}

    def on_checkpoint_written(self, path):
        try:
            self.gather(path)
        except RuntimeError as error:
            (self.output_dir / f"facts_written_{self.rank}.txt").write_text(str(error))

    def is_closed_in_a_child(self):
        child = os.fork()
        if child == 0:
            os._exit(self._ExperimentBase__run.rank_watch._door.fileno() != -1)
        return os.waitpid(child, 0)[1] == 0

    def read_of(self, there):
        # What this rank takes of a checkpoint, and whether nothing was sent, because each rank has
        # found the same one `there`.
        path = self.checkpoint_dir / "step-00000008"
        saved = local.open_checkpoint(path if self.rank == 0 else path.with_name(there))
        tensors, problems = local.take(saved, self.internals.stateful_objects(), 2)
        assert not problems
        flat = {f"{file}/{key}": a for file, of in tensors.items() for key, a in of.items()}
        return [saved.is_seen, {name: zlib.crc32(array.data) for name, array in flat.items()}]

    def load_of(self, there):
        # The weights that load_model sets, and how often something was sent; rank 1 reads `there`.
        path = self.checkpoint_dir / "step-00000008"
        local._broadcast = Mock(side_effect=broadcast)
        for layer in (self.model, self.alone):
            layer.set_state_dict({n: t * 0 for n, t in layer.state_dict().items()})
        self.load_model(path if self.rank == 0 else path.with_name(there))
        tensors = self.unwrap(self.model).state_dict()
        content = [tensors[name].numpy().tobytes() for name in sorted(tensors)]
        of_model = zlib.crc32(b"".join(content))
        return [local._broadcast.call_count, of_model, self.alone.weight.item()]

    def evaluate_oddly(self, odd):
        self.odd = odd
        self.evaluate()

    def on_train_end(self):
        parameters = [p for p in self.model.parameters() if not p.stop_gradient]
        weights = [parameter.numpy().tolist() for parameter in parameters]
        facts = {
            "parallel": self.parallel, "world": self.world_size, "rank": self.rank,
            "seen": self.seen, "weights": weights, "shares": self.shares,
            "per_epoch": self.batches_per_epoch, "names": self.names,
            "alone": self.alone.weight.item(),
            "closed": self.is_closed_in_a_child(),
            "read": [self.read_of(f"step-0000000{n}") for n in (8, 4, 1)],  # there is none of 1
            "wrapped": isinstance(self.model, paddle.DataParallel),
            "unwrapped": type(self.unwrap(self.model)).__name__,
            "zero_only": rank_zero_only(lambda: "ran")(),
            "greatest": collectives.max_over_ranks(self.rank, -self.rank),
            "samplers": [self.sharding(step) for step in (1, 2)],
            "loaded": [self.load_of(f"step-0000000{n}") for n in (8, 4, 1)],
            "weightless": self.average(*((({"x": 1.0}, 1)) if self.rank == 0 else ({}, 0))),
        }
        for name, fail in {
            "rank zero failed": lambda: collectives.on_rank_zero(lambda: 1 / 0, "dividing"),
            "names differ": lambda: self.average({"ab"[self.rank]: 1.0}, 1),
            "places differ": lambda: self.evaluate_oddly("gathers"),
            "one sampler": lambda: self.evaluate_oddly("samples"),
            "half the data": lambda: self.evaluate_oddly("reads"),
            "zero only": rank_zero_only(lambda: self.save_model("model.safetensors")),
            "zero averages": rank_zero_only(lambda: self.average({"x": 1.0}, 1)),
            "not alike": lambda: check_alike({"a": "1", "b": str(self.rank)}),
        }.items():
            try:
                fail()
            except Exception as error:
                facts[name] = repr(error)
        facts["waited"] = []
        for number in range(3):  # the late rank is waited for each time
            arrived = self.output_dir / f"facts_arrived_{number}"
            if self.rank == 1:
                time.sleep(0.2)
                arrived.touch()
            collectives.barrier("a test")
            facts["waited"].append(arrived.exists())
        path = self.output_dir / f"facts_{self.rank}.json"
        path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Probe)
"""


WORDS = ["training.max_iteration=11", "training.valid_interval=4", "training.save_interval=4"]
WORDS += ["training.log_interval=1"]


def loader(size: int) -> DataLoader:
    return DataLoader(Points(size), batch_size=4)


def facts_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads((output / f"facts_{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, which find each other as under paddle's launcher: 11 iterations, more
    than an epoch.
    """
    folder = tmp_path_factory.mktemp("launched")
    script = folder / "train.py"
    script.write_text(PROBE)
    for end in run_ranks([[str(script), "--output", str(folder / "run"), *WORDS]] * 2):
        assert end.returncode == 0, end.stderr + end.stdout
    return folder / "run"


def test_under_the_launcher_a_run_is_parallel_without_being_told(launched: Path) -> None:
    for rank, facts in enumerate(facts_of(launched)):
        assert (facts["parallel"], facts["world"], facts["rank"]) == (True, 2, rank)
        assert (facts["wrapped"], facts["unwrapped"]) == (True, "Sequential")
        assert facts["zero_only"] == ("ran" if rank == 0 else None)


def test_a_plain_loader_is_dealt_out_over_the_ranks(launched: Path) -> None:
    one, two = (facts["seen"] for facts in facts_of(launched))
    first_epoch = one[:5] + two[:5]
    assert sorted(index for batch in first_epoch for index in batch) == list(range(40))
    assert facts_of(launched)[0]["per_epoch"] == 5
    assert one[5:10] != one[:5]


def test_a_sampler_of_ones_own_is_dealt_out_unless_it_shards(launched: Path) -> None:
    for way, samples in zip(*(facts["samplers"] for facts in facts_of(launched)), strict=True):
        assert sorted(way[1] + samples[1]) == list(range(16))
    for facts in facts_of(launched):
        assert [way for way, _ in facts["samplers"]] == [
            "dealt out over 2 ranks", "sharded by its sampler",
        ]  # fmt: skip
    log = (launched / "worker_1.log").read_text()
    assert "40 samples, 5 batches a rank's epoch, dealt out over 2 ranks" in log


def test_names_and_weights_are_the_same_on_all_ranks(launched: Path) -> None:
    one, two = facts_of(launched)
    for name in ("names", "weights"):
        assert one[name] == two[name], name


def test_parameters_that_each_rank_trains_for_itself_are_told_and_rank_zeros_are_saved(
    launched: Path,
) -> None:
    one, two = (facts["alone"] for facts in facts_of(launched))
    assert one != two
    for rank in (0, 1):
        text = "WARNING: alone.weight differs between the ranks; rank 0's is saved, so a resumed r"
        assert (launched / f"worker_{rank}.log").read_text().count(text) == 1
    checkpoint = launched / "checkpoints/step-00000011"
    assert json.loads((checkpoint / "state.json").read_text())["differing"] == ["alone.weight"]
    assert b"alone/" not in (checkpoint / "@local_1.safetensors").read_bytes()


def test_a_rank_without_the_disk_of_rank_zero_gets_the_bytes_of_a_checkpoint(
    launched: Path,
) -> None:
    files = {
        path.stem: parse(path.read_bytes())
        for path in (launched / "checkpoints/step-00000008").glob("*.safetensors")
    }
    common = {
        f"{file}/{key}": zlib.crc32(array.data)
        for file, arrays in files.items()
        for key, array in arrays.items()
        if not file.startswith("@local_")
    }
    different = {key: zlib.crc32(array.data) for key, array in files["@local_1"].items()}
    assert "model/1._mean" in different
    assert different.keys() < common.keys()
    for expected, facts in zip((common, common | different), facts_of(launched), strict=True):
        assert facts["read"] == [[True, expected], [False, expected], [False, expected]]


def test_a_validation_and_averages_are_over_the_samples_of_all_ranks(launched: Path) -> None:
    for facts in facts_of(launched):
        assert facts["shares"] == [6, 4]  # batches of 3, 3, 3, 1 dealt out
        assert facts["weightless"] == {"x": 1.0}  # a rank had no sample
        assert facts["greatest"] == [1.0, 0.0]


MISTAKES = {  # each told on all ranks
    "names differ": "the ranks name different metrics: ['a'] and ['b']",
    "places differ": "rank 0 at self.gather(), rank 1 at the end of valid()",
    "one sampler": "rank 0 at the sampler of the loader given to valid_batches, rank 1 at the end",
    "half the data": "called on rank 0 and not on rank 1",
    "not alike": "b: 0 on rank 0, 1 on rank 1; expected the same",
}


def test_a_mistake_that_needs_two_ranks_is_told_on_both(launched: Path) -> None:
    for facts in facts_of(launched):
        assert [name for name, text in MISTAKES.items() if text not in facts[name]] == []


def test_an_error_of_rank_zero_is_raised_on_every_rank(launched: Path) -> None:
    assert [facts["rank zero failed"] for facts in facts_of(launched)] == [
        "ZeroDivisionError('division by zero')",
        "RankZeroError(\"dividing: rank 0 failed: ZeroDivisionError('division by zero')\")",
    ]


def test_a_forked_child_does_not_keep_the_connection_of_a_rank_that_dies(launched: Path) -> None:
    assert [facts["closed"] for facts in facts_of(launched)] == [True, True]


def test_what_needs_all_ranks_is_an_error_where_only_rank_zero_comes(launched: Path) -> None:
    zero, one = facts_of(launched)
    assert "<lambda>: save_model needs all ranks, and @rank_zero_only" in zero["zero only"]
    assert "<lambda>: self.average() needs all ranks, and @rank" in zero["zero averages"]
    assert not {"zero only", "zero averages"} & one.keys()


def test_results_that_differ_between_the_ranks_are_told_once(launched: Path) -> None:
    log = (launched / "worker_0.log").read_text()
    warning = "WARNING: [4] valid: share: 6.0 on rank 0, 4.0 on rank 1; rank 0's is used"
    assert log.count("WARNING: [4] valid: ") == log.count(warning) == 1  # bleu was left to rank 0


def test_a_late_rank_is_waited_for_each_time(launched: Path) -> None:
    for facts in facts_of(launched):
        assert facts["waited"] == [True] * 3


def test_there_is_one_set_of_files_and_a_log_for_each_rank(launched: Path) -> None:
    names = {path.name for path in launched.iterdir() if not path.name.startswith((".", "facts"))}
    assert names == {
        "config.yaml", "checkpoints", "metrics.jsonl", "vdlrecords.run.log", "ledger.jsonl",
        "validations.jsonl", "digest.txt", "doctor.json", "sources",
        "worker_0.log", "worker_1.log",
    }  # fmt: skip
    assert list(curve(launched, "train/loss")) == list(range(1, 12))
    assert len([line for line in metrics(launched) if "valid/accuracy" in line]) == 3
    assert "[11]" in (launched / "worker_1.log").read_text()


def test_weights_are_sent_only_to_a_rank_that_does_not_find_the_same_ones(launched: Path) -> None:
    files = {
        name: parse((launched / f"checkpoints/step-00000008/{name}.safetensors").read_bytes())
        for name in ("model", "alone")
    }
    content = zlib.crc32(b"".join(array.data.tobytes() for array in files["model"].values()))
    alone = float(files["alone"]["weight"].data.view("float32")[0])
    for facts in facts_of(launched):
        assert facts["loaded"] == [[0, content, alone], [1, content, alone], [1, content, alone]]


def test_rank_zero_alone_hears_of_a_checkpoint_that_is_written(launched: Path) -> None:
    (facts,) = launched.glob("facts_written_*")
    assert facts.name == "facts_written_0.txt"
    assert "on_checkpoint_written: self.gather() needs all ranks, and" in facts.read_text()


def test_a_line_names_the_slowest_rank(launched: Path) -> None:
    lines = [line for line in metrics(launched) if "speed/slowest_rank" in line]
    assert 1 in {line["speed/slowest_rank"] for line in lines}
    for line in lines:
        seconds = line["speed/slowest_rank_seconds"], line["speed/slowest_rank_data_seconds"]
        assert seconds[0] >= seconds[1] > 0


@pytest.mark.long
def test_paddles_launcher_gives_the_same_bits(launched: Path, tmp_path: Path) -> None:
    script = shutil.copy(launched.parent / "train.py", tmp_path)
    result = run_script(Path(script), "--output", str(tmp_path / "run"), *WORDS, launch=2)
    assert result.returncode == 0, result.stderr + result.stdout
    end = "checkpoints/step-00000011"
    same_bits(launched / end, tmp_path / "run" / end)
    for one, other in zip(facts_of(launched), facts_of(tmp_path / "run"), strict=True):
        assert one == other


def test_nprocs_gives_the_bits_of_the_launcher_and_continues_its_run(
    launched: Path, tmp_path: Path
) -> None:
    shutil.copytree(launched, tmp_path / "run")
    for iteration in (8, 11):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{iteration:08}")
    result = run_script(
        launched.parent / "train.py", "--nprocs", "2", "--output", str(tmp_path / "run"), *WORDS
    )
    assert result.returncode == 0, result.stderr
    assert "CONTINUING" in result.stderr
    assert "from step-00000004" in result.stderr
    end = "checkpoints/step-00000011"
    same_bits(launched / end, tmp_path / "run" / end)


def test_another_number_of_ranks_continues_the_same_order_and_says_so(
    launched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Single(AllEvents, Tiny):
        read: list[Any] = []  # noqa: RUF012

        def setup_model(self) -> None:
            super().setup_model()
            self.alone = paddle.nn.Linear(1, 1)
            self.own = paddle.optimizer.SGD(0.1, parameters=self.alone.parameters())

        def on_batch_read(self, batch: Any, indices: Any) -> None:
            self.read.append(indices)

    path = {"checkpoint_path": str(launched / "checkpoints/step-00000004")}
    trained(Single, tmp_path / "run", path, max_iteration=6)
    said = capsys.readouterr().err
    assert said.count("not exact: saved by 2 processes and continued by 1") == 1
    # The two batches of the first epoch that were left, one for each of the two ranks.
    assert Single.read == [facts["seen"][4] for facts in facts_of(launched)]


def with_buffer(self: Tiny) -> None:
    Tiny.setup_model(self)
    self.model.register_buffer("mask", paddle.zeros([3]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"setup_dataloader": lambda self: setattr(self, "train_loader", loader(24))},
            "self.train_loader: 10 batches on rank 0, 6 batches on rank 1;",
        ),
        (
            {"setup_dataloader": lambda self: setattr(self, "valid_loader", loader(11))},
            "self.valid_loader: 10 samples on rank 0, 11 samples on rank 1;",
        ),
        (
            {"setup_model": with_buffer},
            "self.model: 'mask': not there on rank 0, float32 [3] on rank 1;",
        ),
        (
            {"startup": lambda self: setattr(self, "generator", np.random.default_rng())},
            "self.generator: not there on rank 0, Generator of PCG64 on rank 1;",
        ),
        (
            {"prepare": lambda self: self.config.training.update(seed=1)},
            "config.training.seed: 0 on rank 0, 1 on rank 1;",
        ),
    ],
)
def test_what_differs_between_the_ranks_at_setup_is_an_error_with_both_values(
    changes: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup_dataloader(self: Tiny) -> None:
        Tiny.setup_dataloader(self)
        changes.get("setup_dataloader", lambda self: None)(self)

    members = {**changes, "setup_dataloader": setup_dataloader}
    theirs: dict[str, str] = {}
    with monkeypatch.context() as patch:
        patch.setattr(compare_gathered, "check_alike", theirs.update)
        other = make(type("Other", (Tiny,), members), tmp_path / "other")
        other.setup()
        other.close()

    def gathered(value: Any) -> list[Any]:
        return [value, theirs if isinstance(value, dict) else "another checksum"]

    monkeypatch.setattr(compare_gathered, "all_gather_object", gathered)
    with pytest.raises(ValueError, match=re.escape(text)):
        make(Tiny, tmp_path / "run").setup()


def test_layers_that_differ_are_found_before_paddle_connects_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(Tiny):
        def setup_model(self) -> None:
            monkeypatch.setattr(collectives, "world_size", lambda: 2)
            self.data_parallel(paddle.nn.Linear(4, 2))

    def gathered(value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return [value, "another checksum"]
        return [value, value | {"self.data_parallel(Linear): 'weight'": "float32 [4, 3]"}]

    monkeypatch.setattr(compare_gathered, "all_gather_object", gathered)
    with pytest.raises(
        ValueError, match=r"'weight': float32 \[4, 2\] on rank 0, float32 \[4, 3\] on"
    ):
        make(Wide, tmp_path / "run").setup()


def test_questions_to_the_store_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def connections() -> dict[str, bool]:
        """Whether each connection of this process to the store sends at once, by its number."""
        found = {}
        for path in filter(Path.is_socket, Path("/proc/self/fd").iterdir()):
            made = socket.socket(fileno=int(path.name))
            with contextlib.suppress(OSError, IndexError):
                if made.getpeername()[1] == port:
                    found[path.name] = bool(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            made.detach()
        return found

    monkeypatch.setattr(store, "_connections", [])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paddles = core.TCPStore("127.0.0.1", port, True, 1)
    before = connections()
    store._ask_at_once("127.0.0.1", port)
    assert not any(before.values())  # paddle's own stays as it is
    assert [at_once for number, at_once in connections().items() if number not in before] == [True]
    assert store.add("a", 2) == paddles.add("a", 0) == 2


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("npu:1", "xccl")])
def test_processes_are_connected_by_the_backend_of_the_device_or_not_at_all(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paddle connects those of the first plug-in that it has found, and makes them use that one."""
    monkeypatch.setenv("PADDLE_DISTRI_BACKEND", "of the launcher")
    monkeypatch.setattr(core, "get_all_custom_device_type", lambda: ["other", "npu"])
    monkeypatch.setattr(paddle.device, "get_device", lambda: "other:1")
    monkeypatch.setattr(dist, "init_parallel_env", lambda: None)
    text = f"--device: '{device[:3]}' given, and paddle has connected the processes on 'other:1'; "
    with pytest.raises(ConfigError, match=text):
        collectives.init_parallel(device)
    assert os.environ["PADDLE_DISTRI_BACKEND"] == backend


def test_a_second_run_of_a_process_is_not_on_another_kind_of_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Paddle's collectives of tensors of one device, by the backend of another, crash."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for connected, same, other in (("GLOO", "cpu", "npu:0"), ("NCCL", "gpu:1", "cpu")):
        monkeypatch.setattr(dist, "get_backend", lambda connected=connected: connected)
        collectives.init_parallel(same)
        with pytest.raises(ConfigError, match=f"connected by {connected.lower()}"):
            collectives.init_parallel(other)


def test_with_one_process_everything_is_itself() -> None:
    assert collectives.all_gather_object(3) == [3]
    assert collectives.max_over_ranks(2, 0.5) == [2, 0.5]
    assert collectives.broadcast_object("a") == "a"
    assert collectives.on_rank_zero(lambda: 5, "counting") == 5
    assert collectives.weighted_average({"x": 2.0}, 4) == {"x": 2.0}
    assert collectives.weighted_average({"x": float("nan")}, 0) == {}
    with pytest.raises(ValueError, match="weight -1 given"):
        collectives.weighted_average({"x": 1.0}, -1)
