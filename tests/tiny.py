"""What the tests share: a tiny experiment, and ways to run it here and in processes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks
import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from forks import LONG_SECONDS
from paddle.io import DataLoader, Dataset

from expbase import Config, ExperimentBase, get_default_training_config

TESTS = Path(__file__).parent
# Of a script that a test starts: this folder and those of the tests.
FOLDERS = [TESTS, *(TESTS / name for name in ("engine", "extras", "checkpoint", "ranks"))]
PYTHONPATH = os.pathsep.join(map(str, FOLDERS))
DEVICE = os.environ.get("EXPBASE_TEST_DEVICE", "cpu")  # what --device of pytest says


class Notes(list[Any]):
    """What a test writes down on an experiment; it is no state."""


class Facts(dict[Any, Any]):
    """The same by name."""


class Points(Dataset):
    """Points in the plane, each with random noise of its own, and a label."""

    def __init__(self, size: int = 40) -> None:
        random = np.random.RandomState(7)
        self.points = random.randn(size, 4).astype("float32")
        self.labels = (self.points.sum(axis=1) > 0).astype("int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.points[index] + np.random.randn(4).astype("float32") / 10, self.labels[index]

    def __len__(self) -> int:
        return len(self.points)


class Tiny(ExperimentBase):
    """Everything that can make a resumed run differ, on a toy: noise, dropout, batch norm."""

    size = 40
    batch_size = 4
    loader_options: dict[str, Any] = {}  # noqa: RUF012

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(
            Points(self.size), batch_size=self.batch_size, shuffle=True, **self.loader_options
        )
        self.valid_loader = DataLoader(Points(10), batch_size=3)

    def setup_model(self) -> None:
        net = paddle.nn.Sequential(
            paddle.nn.Linear(4, 8), paddle.nn.BatchNorm1D(8), paddle.nn.Dropout(0.2),
            paddle.nn.Linear(8, 2),
        )  # fmt: skip
        self.model = self.data_parallel(net)
        rate = paddle.optimizer.lr.CosineAnnealingDecay(0.01, T_max=30)
        self.optimizer = paddle.optimizer.Adam(rate, parameters=net.parameters())

    def check_setup(self) -> None:
        # What a test notes is no state, on the experiment, in its class, or in a variable.
        noted = [name for name, value in vars(self).items() if isinstance(value, (Notes, Facts))]
        for base in type(self).__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
            noted += [f"class {base.__qualname__}", f"module {Path(file).stem}"]
        self.exclude_from_state(*noted)
        super().check_setup()

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        loss = F.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.optimizer._learning_rate.step()
        self.log(loss=loss)

    def valid(self) -> dict[str, float]:
        right = total = 0
        for points, labels in self.valid_batches():
            right += int((self.model(points).argmax(axis=-1) == labels).sum())
            total += len(labels)
        return self.average({"accuracy": right / max(total, 1)}, weight=total)


class Helped(Tiny):
    """Tiny, whose updates are made by the helpers, of one batch or of several."""

    def train_batch(self) -> None:
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers()


class Broken(Tiny):
    """Tiny, which fails in its first iteration."""

    def train_batch(self) -> None:
        raise ArithmeticError("no")


class Dataless(Tiny):
    """Tiny, which fails in its setup."""

    def setup_dataloader(self) -> None:
        raise ValueError("no data")


def run_of(experiment: ExperimentBase) -> Any:
    """The Run of an experiment: what only a test may look into."""
    return vars(experiment)["_ExperimentBase__run"]


def training_config(**training: Any) -> Config:
    """Defaults, small numbers, and what the test asks for."""
    config = Config({"training": get_default_training_config()})
    small = {"max_iteration": 6, "valid_interval": 3, "save_interval": 2, "log_interval": 1}
    config.training.update({**small, **training})
    return config


def make(
    experiment: type[ExperimentBase],
    output: Path,
    args: dict[str, Any] | None = None,
    **training: Any,
) -> ExperimentBase:
    """An experiment that is set up nowhere yet."""
    namespace = argparse.Namespace(**{"output": str(output), "device": DEVICE, **(args or {})})
    return experiment(training_config(**training), namespace)


def trained(
    experiment: type[ExperimentBase],
    output: Path,
    args: dict[str, Any] | None = None,
    **training: Any,
) -> ExperimentBase:
    """An experiment after setup() and run()."""
    exp = make(experiment, output, args, **training)
    exp.setup()
    exp.run()
    return exp


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def curve(output: Path, name: str) -> dict[int, float]:
    """One metric by iteration."""
    return {line["iteration"]: line[name] for line in metrics(output) if name in line}


def saved(output: Path) -> list[int]:
    """The iterations that have a checkpoint."""
    return sorted(int(path.name[5:]) for path in (output / "checkpoints").glob("step-*"))


def ledger(output: Path) -> list[dict[str, Any]]:
    """The records of ledger.jsonl."""
    return [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]


def validations(output: Path) -> list[dict[str, Any]]:
    """The lines of validations.jsonl, without their times."""
    lines = map(json.loads, (output / "validations.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def same_bits(one: Path, other: Path, *, todo: bool = True) -> None:
    """Asserts that two checkpoints hold the same bytes in the same files.

    Without `todo` the one may have more to be done after it than the other.
    """
    files = sorted(path.name for path in one.iterdir())
    assert files == sorted(path.name for path in other.iterdir())
    for name in set(files) - {"manifest.json"}:  # which holds the lengths of the logs
        contents = [(path / name).read_bytes() for path in (one, other)]
        if name == "state.json" and not todo:
            states = [json.loads(content) for content in contents]
            for state in states:
                state["values"]["loop"].pop("todo")
            assert states[0] == states[1]
        else:
            assert contents[0] == contents[1], name


def refusing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets no checkpoint of these names be renamed, as if a disk were mounted on it."""
    rename = os.rename

    def step(source: Any, target: Any) -> None:
        if Path(source).name in names:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rename(source, target)

    monkeypatch.setattr(os, "rename", step)
    # By its name, which pathlib of Python 3.10 has looked up when it was imported.
    monkeypatch.setattr(Path, "rename", lambda path, target: [step(path, target), Path(target)][1])


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[Any] | None = None
) -> None:
    """Returns when it is true; fails if it is not when this process has ended."""
    deadline = time.monotonic() + LONG_SECONDS
    while True:
        is_over = process is not None and process.poll() is not None
        if condition():
            return
        assert not is_over, process.communicate() if process else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_ranks(
    commands: Sequence[Sequence[str]], **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs ranks, found by each other as those of paddle's launcher; without a command none comes.

    Each has what a command of python is given: a script and its words, say.
    """
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in commands]
        endpoints = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PYTHONPATH, **variables}
    environment["PADDLE_TRAINERS_NUM"] = str(len(commands))
    environment["PADDLE_TRAINER_ENDPOINTS"] = ",".join(endpoints)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, words in enumerate(commands):
            own = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": endpoints[rank]}
            own[f"FLAGS_selected_{DEVICE}s"] = str(rank)  # its device, of several
            if words:
                command = [sys.executable, *words]
                process = forks.Popen(command, env={**environment, **own}, text=True, **pipes)
                ranks.append(stack.enter_context(process))
                stack.callback(process.kill)
        texts = [process.communicate(timeout=LONG_SECONDS) for process in ranks]
        codes = [process.returncode for process in ranks]
    ends = zip(commands, codes, texts, strict=False)
    return [subprocess.CompletedProcess(words, code, *said) for words, code, said in ends]


def run_script(script: Path, *words: str, launch: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, or under paddle's launcher on two or more."""
    command = [sys.executable]
    if launch:
        log = script.parent / "launch_log"
        command += ["-m", "paddle.distributed.launch", "--nproc_per_node", str(launch)]
        command += ["--log_dir", str(log)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PYTHONPATH}
    words = (*command, str(script), *words)
    return forks.run(words, cwd=script.parent, env=environment)
