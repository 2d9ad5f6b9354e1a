"""Proves that `reproduce` makes whole runs again by their parts, and names what was changed.

All ten experiments on one rank and on two, some with changes that are not committed, with shares on
another number of ranks, and runs that were killed, continued or begun from others: the receipt must
say yes of all parts and all checkpoints. Then differences are planted, each in a copy, and no must
be said of the parts that lie in their reach, and of no others, with the cause. Then receipts that
are put together, a loss that jumps because of one bad sample of 10,000, and what all this costs.

    python tests/proofs/reproduce.py [--only whole continued planted receipts jump]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from repository import commit, git

from expbase.base.files import checksum_of
from expbase.checkpoint import layout, storage
from expbase.checkpoint.best import best_of
from expbase.engine.compare_runs import logged

ROOT = Path(__file__).parents[2]
AT_ONCE = 2  # cases, as there are cores


# --- what all of it needs ---------------------------------------------------------------------


class Count:
    """Counts what holds, and prints a line about each case."""

    def __init__(self) -> None:
        self.held = 0
        self.all = 0

    def add(self, name: str, problem: str, words: str = "") -> None:
        """Prints a case; it holds if there is no problem."""
        self.held += not problem
        self.all += 1
        text = f"{name}: FAILED: {problem} | {words}" if problem else f"{name}: {words}"
        print(text[:1200], flush=True)

    def add_all(self, function: Callable[..., tuple[str, str]], cases: Mapping[str, Any]) -> None:
        """Adds several cases, some at once; the function returns the problem and words."""

        def problem_of(item: tuple[str, Any]) -> tuple[str, str]:
            try:
                return function(*item)
            except Exception as error:
                return f"{error!r:.1000}", ""

        with ThreadPoolExecutor(AT_ONCE) as executor:
            for name, found in zip(cases, executor.map(problem_of, cases.items()), strict=True):
                self.add(name, *found)


def call(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of python there."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **variables}
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


def train(folder: Path, *words: str, is_killed: bool = False, **variables: str) -> None:
    """Runs a script, which must end well unless it is killed."""
    result = call(folder, *words, **variables)
    assert bool(result.returncode) is is_killed, result.stderr[-1000:]


def receipt(folder: Path, run: str | Path, words: str = "", **variables: str) -> dict[str, Any]:
    """What `reproduce` says of a run: its receipt, and its lines."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "receipt.json")
        command = ["-m", "expbase", "reproduce", str(run), "--record", str(file), *words.split()]
        result = call(folder, *command, **variables)
        assert result.returncode in (0, 1), result.stderr[-1000:]
        found: dict[str, Any] = json.loads(file.read_text())
    assert result.stdout.splitlines()[-1] == found["result"]
    assert result.returncode == 1 - found["reproduced"]
    return found | {"lines": result.stdout.splitlines()}


def kept(run: Path) -> list[int]:
    """The iterations of a run's checkpoints."""
    return [layout.iteration_of(path) or 0 for path in layout.listed(run / layout.FOLDER)]


def why_not_whole(run: Path, found: dict[str, Any], first: int = 0) -> str:
    """Why a receipt does not show that all of a run is the same; empty if it does."""
    there = kept(run)
    ends = [iteration for iteration in there if iteration > first]
    parts = [(part["first"], part["last"]) for part in found["parts"]]
    compared = [name for part in found["parts"] for name in part["then"]["saved"]]
    if not found["reproduced"]:
        return str(found["result"])
    if parts != [*zip([first, *ends], ends, strict=False)]:
        return f"parts {parts} of a run that has kept {there}"
    if compared != [layout.name_of(iteration) for iteration in there]:
        return f"only {compared} of {there} were compared"
    numbers = {name for part in found["parts"] for name in part["then"]["numbers"]}
    if left := logged(run).keys() - numbers:
        return f"logged, and not compared: {sorted(left)}"
    if any(part["then"] | {"facts": 0} != part["now"] | {"facts": 0} for part in found["parts"]):
        return "what is noted of then and now differs"
    return ""


# --- whole runs -------------------------------------------------------------------------------

DIGITS = ["digits/train.py", "--config=digits/config.yaml"]
EXPERIMENTS: dict[str, list[str]] = {
    "line": ["line/train.py", "--config=line/config.yaml"],
    "digits": DIGITS,
    "charlm": ["charlm/train.py", "--config=charlm/config.yaml", "data.batch_size=8"],
    "ctr": ["ctr/train.py"],
    "multitask": ["multitask/train.py", "--config=multitask/config.yaml", "data.batch_size=8"],
    "gan": ["gan/train.py", "--config=gan/config.yaml"],
    "flow": ["flow/train.py", "--config=flow/config.yaml"],
    "cartpole": [
        *("cartpole/train.py", "--config=cartpole/config.yaml", "evaluation.num_episodes=2"),
    ],
    "pinn": [
        *("pinn/train.py", "--config=pinn/config.yaml", "problem=inverse", "adam.iterations=25"),
        *("lbfgs.steps=5", "lbfgs.redraw_interval=7"),  # both phases, and points drawn anew
    ],
    "cifar": [
        *("cifar/train.py", "--config=cifar/small.yaml", "training.max_epoch=0"),
        *("training.valid_every_epoch=0", "training.save_every_epoch=0"),
    ],
}
# Checkpoints of iterations 20 and 40 are kept, and that of the best validation, perhaps 15 or 30.
SHORT = ["training.max_iteration=40", "training.save_interval=10", "training.valid_interval=15"]
SHORT += ["training.log_interval=5", "training.keep_last=1", "training.keep_every=20"]
SHORT += ["--device=cpu"]
SHARES = ["training.shares=2", "data.batch_size=8"]


@dataclass
class Whole:
    """A run of an experiment, and the words of `reproduce`."""

    words: list[str]
    added: str = ""


WHOLE = {name: Whole(words) for name, words in EXPERIMENTS.items()}
WHOLE["digits, macro F1"] = Whole(["digits/macro_f1.py", "training.monitor=macro_f1"])
WHOLE["digits, all checkpoints kept"] = Whole([*DIGITS, "training.keep_last=0"])
WHOLE |= {
    f"{name}, two ranks": Whole([*words, "--nprocs=2"])
    for name, words in EXPERIMENTS.items()
    if name != "pinn"  # which is of one process
}
WHOLE["digits, shares, one rank and then two"] = Whole([*DIGITS, *SHARES], "-- --nprocs=2")
WHOLE["digits, shares, two ranks and then one"] = Whole(
    [*DIGITS, *SHARES, "--nprocs=2"], "-- --nprocs=1"
)
WHOLE["cifar, shares, two ranks and then one"] = Whole(
    [*EXPERIMENTS["cifar"], "--nprocs=2"], "-- --nprocs=1"
)
OTHER_CODE = "digits, continued by other code"
WHOLE[OTHER_CODE] = Whole([*DIGITS, "training.max_iteration=12"])


def whole(folder: Path, count: Count) -> None:
    """Trains the experiments and makes each again by all parts, by code that is no longer there."""
    top = folder / "repository"
    shutil.copytree(ROOT / "experiments", top, ignore=shutil.ignore_patterns("__pycache__"))
    (top / ".gitignore").write_text("__pycache__\n")
    git(top, "init", "--quiet")
    commit(top, "one")
    train(top, "cifar/shapes.py", "shapes.tar.gz")  # git does not know it
    scripts = sorted(top.glob("*/train.py"))
    for script in scripts[::2]:
        script.write_text(f"{script.read_text()}\n# a change that is not committed\n")
    runs = {name: folder / f"runs/{number}" for number, name in enumerate(WHOLE)}
    with ThreadPoolExecutor(AT_ONCE) as executor:
        jobs = [
            executor.submit(train, top, one.words[0], *SHORT, *one.words[1:], f"--output={run}")
            for one, run in zip(WHOLE.values(), runs.values(), strict=True)
        ]
        for job in jobs:
            job.result()
    script = top / DIGITS[0]
    script.write_text(script.read_text().replace("cross_entropy(", "cross_entropy(1.5 * "))
    train(top, DIGITS[0], *SHORT, *DIGITS[1:], f"--output={runs[OTHER_CODE]}")
    for script in scripts:
        script.write_text("raise SystemExit('the code of today')\n")

    def made_again(name: str, run: Path) -> tuple[str, str]:
        found = receipt(top, run, WHOLE[name].added)
        problem = why_not_whole(run, found)
        best = [iteration for iteration, _ in best_of(run)[:1]]
        if not {*best} <= {*kept(run)}:
            problem = problem or f"the best one, {best}, is not there"
        words = f"{found['result']} (kept: {kept(run)}, the best: {best})"
        named = [name for part in found["parts"] for name in part["not as it was"]]
        if {*named} - ({"ranks", "loaders.self.train_loader"} if WHOLE[name].added else set()):
            problem = problem or f"not as it was: {named}"
        return problem, words

    count.add_all(made_again, runs)
    trees = git(top, "worktree", "list").splitlines()
    count.add("work trees of git that are left", "" if len(trees) == 1 else f"{trees}", "none")


# --- a project in which things are changed ------------------------------------------------------

# It reads each sample once in its 30 iterations. Kept are 10, 20, 30 and, as the best one, 15.
SCRIPT = """
import os
import signal
os.environ["OMP_NUM_THREADS"] = os.environ.get("THREADS_OF_THIS_MACHINE", "1")
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset
from expbase import Config, ExperimentBase, main
from measured import SCALE  # of an installed package

class Images(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):  # read from the disk one by one
        image = np.load("data/images.npy", mmap_mode="r")[index]
        return np.asarray(image), np.int64(index % 4)

class Convolution(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.optim = Config({"lr": 0.01})
        config.training.update(max_iteration=30, save_interval=5, valid_interval=5, log_interval=1)
        config.training.update(keep_last=1, keep_every=10, monitor="nearness")
        return config

    def setup_dataloader(self):
        self.train_loader = DataLoader(Images(), batch_size=16, shuffle=True)

    def setup_model(self):
        self.model = paddle.nn.Sequential(
            paddle.nn.Conv2D(3, 32, 5, padding=2), paddle.nn.ReLU(), paddle.nn.Flatten(),
            paddle.nn.Linear(32 * 32 * 32, 4),
        )
        lr = self.config.optim.lr
        self.optimizer = paddle.optimizer.Adam(lr, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels) * SCALE
        self.backward(loss)
        self.log(loss=loss)
        self.step_optimizers()
        if str(self.iteration) == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if str(self.iteration) == os.environ.get("STOPPED_AT"):
            self.stop()

    def valid(self):
        bias = self.model[-1].bias.abs().sum().item()
        return {"bias": bias, "nearness": -abs(self.iteration - 15)}

if __name__ == "__main__":
    main(Convolution)
"""
HIGH = 2  # a byte of a number of 4 bytes: its last bit is 2^-7 of it, and that of the first 2^-23
PARTS = [(0, 10), (10, 15), (15, 20), (20, 30)]
TRAIN = ["train.py", "--config=config.yaml", "--device=cpu"]
P = "runs/a/checkpoints/step-00000010"
WEIGHTS = "runs/weights.safetensors"
INIT = [f"--init_model_path={WEIGHTS}"]


def project(folder: Path) -> Path:
    """Makes a folder with a script, data, an installed package, and runs: a; b of another seed."""
    (folder / "data").mkdir(parents=True)
    source = np.random.default_rng(0)
    np.save(folder / "data/images.npy", source.normal(size=(480, 3, 32, 32)).astype("float32"))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "site-packages/measured-1.0.dist-info").mkdir(parents=True)
    install("1.0", folder)
    (folder / "config.yaml").write_text("optim: {lr: 0.01}\n")
    train_there(folder, "a")
    train_there(folder, "b", "training.seed=1")
    shutil.copy(folder / "runs/b/checkpoints/step-00000010/model.safetensors", folder / WEIGHTS)
    return folder


def packages(folder: Path) -> str:
    """Where a project's package is found, before what is on the path already."""
    return os.pathsep.join([str(folder / "site-packages"), os.environ.get("PYTHONPATH", "")])


def train_there(folder: Path, name: str, *words: str, **options: Any) -> None:
    """Makes a run in a project, or continues it."""
    options["PYTHONPATH"] = packages(folder)
    train(folder, *TRAIN, f"--output=runs/{name}", *words, **options)


def say_there(folder: Path, name: str, words: str = "", **variables: str) -> dict[str, Any]:
    """The receipt of a run in a project."""
    variables["PYTHONPATH"] = packages(folder)
    return receipt(folder, f"runs/{name}", words, **variables)


def continued(original: Path, folder: Path, count: Count) -> None:
    """Runs of several starts, and those that began from others, by all parts."""

    def several(case: str, starts: list[Callable[[str], None]]) -> tuple[str, str]:
        run = case.partition(":")[0]
        for start in starts:
            start(run)
        found = say_there(original, run, "--jobs 2")
        first = 10 if "checkpoint_path" in case else 0
        named = [name for part in found["parts"] for name in part["not as it was"]]
        problem = why_not_whole(original / "runs" / run, found, first)
        return problem or (f"not as it was: {named}" if named else ""), found["result"]

    def start(*words: str, **options: Any) -> Callable[[str], None]:
        return lambda run: train_there(original, run, *words, **options)

    killed = start(is_killed=True, KILLED_AT="18")
    shorter = "training.max_iteration=12"
    cases: dict[str, list[Callable[[str], None]]] = {
        "plain: from its beginning to its end": [start()],
        "killed: at 18 and continued": [killed, start()],
        "killed_twice: at 7, before a checkpoint is kept, and at 18": [
            start(is_killed=True, KILLED_AT="7"), killed, start(),
        ],
        "killed_ranks: two, at 18, and continued": [
            start("--nprocs=2", is_killed=True, KILLED_AT="18"), start("--nprocs=2"),
        ],
        "stopped: at 13, and continued; all checkpoints are kept": [
            start("training.keep_last=0", STOPPED_AT="13"), start("training.keep_last=0"),
        ],
        "longer: with another training.max_iteration": [start(shorter), start()],
        "forced: with another lr and --force": [
            start(shorter), start("--force", "optim.lr=0.003"),
        ],
        "other_ranks: continued on two": [start(shorter), start("--nprocs=2")],
        "from_checkpoint: --checkpoint_path": [start(f"--checkpoint_path={P}")],
        "from_checkpoint_killed: --checkpoint_path, killed at 12 and 18 and continued": [
            start(f"--checkpoint_path={P}", is_killed=True, KILLED_AT="12"),
            start(f"--checkpoint_path={P}", is_killed=True, KILLED_AT="18"),
            start(f"--checkpoint_path={P}"),
        ],
        "from_weights: --init_model_path": [start(*INIT)],
        "from_weights_killed: --init_model_path, killed and continued": [
            start(*INIT, is_killed=True, KILLED_AT="18"), start(*INIT),
        ],
    }  # fmt: skip
    count.add_all(several, cases)


# --- what is planted ----------------------------------------------------------------------------


def install(version: str, folder: Path) -> None:
    """Puts a version of the package in the place of another one."""
    shutil.rmtree(folder / "site-packages")
    info = folder / f"site-packages/measured-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: measured\nVersion: {version}\n")
    (folder / "site-packages/measured.py").write_text(f"SCALE = {version}\n")


def checkpoint(folder: Path, iteration: int, run: str = "a") -> Path:
    return folder / "runs" / run / layout.FOLDER / layout.name_of(iteration)


def swap(iteration: int, folder: Path, *, run: str = "a") -> None:
    """Puts another run's checkpoint of the same iteration in the place of a run's."""
    target = checkpoint(folder, iteration, run)
    shutil.rmtree(target)
    shutil.copytree(checkpoint(folder, iteration, "b"), target)


def flip(file: Path, byte: int = 0) -> None:
    """Changes a bit of the first number of the last tensor, which is a bias."""
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = {name: one for name, one in header.items() if name != "__metadata__"}
    bias = max(tensors.values(), key=lambda one: one["data_offsets"][1])
    content[8 + size + bias["data_offsets"][0] + byte] ^= 1
    file.write_bytes(content)


def flip_initial(folder: Path) -> None:
    flip(folder / WEIGHTS, HIGH)


def flip_weight(
    iteration: int, folder: Path, *, byte: int = 0, is_mended: bool = True, run: str = "a"
) -> None:
    """Changes one bit of one weight, and perhaps the checksums of the manifest."""
    path = checkpoint(folder, iteration, run)
    manifest = storage.read_manifest(path)
    file = path / "model.safetensors"
    flip(file, byte)
    if is_mended:
        manifest["files"][file.name]["crc32"] = checksum_of([file.read_bytes()])
        parts = [manifest[part] for part in ("iteration", "files", "info")]
        (path / layout.MANIFEST).write_bytes(storage._manifest_bytes(*parts))
        storage.verify(path)


def edit_line(file: str, iteration: int, name: str, folder: Path) -> None:
    """Changes a number that was logged."""
    path = folder / "runs/a" / file
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in lines if line["iteration"] == iteration and name in line)
    line[name] = np.nextafter(line[name], 9.0).item()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def delete_line(iteration: int, folder: Path) -> None:
    path = folder / "runs/a/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(one for one in lines if json.loads(one)["iteration"] != iteration))


def edit_data(index: int | slice, folder: Path) -> None:
    path = folder / "data/images.npy"
    images = np.load(path)
    images[index] += np.float32(1e-6)
    np.save(path, images)


def edit_script(old: str, new: str, folder: Path) -> None:
    text = (folder / "train.py").read_text()
    assert old in text
    (folder / "train.py").write_text(text.replace(old, new))


def rename(folder: Path) -> None:
    """Renames a variable, and writes a comment."""
    edit_script("images", "pictures", folder)
    edit_script("data/pictures.npy", "data/images.npy", folder)
    edit_script("        self.step_opt", "        # a comment\n        self.step_opt", folder)


def log_more(folder: Path) -> None:
    edit_script("self.log(loss=loss)", "self.log(loss=loss, largest=images.max())", folder)


def write_config(text: str, folder: Path) -> None:
    (folder / "config.yaml").write_text(text)


@dataclass
class Plant:
    """A difference: what plants it, in which parts it must be found, and what is said of it."""

    plant: Callable[[Path], object]
    parts: list[tuple[int, int]]
    says: str  # stands in the problem of the first of these parts
    named: str = ""  # with what the first fact begins that is not as it was; "": none is named
    words: str = ""  # of `reproduce`
    run: str = "a"
    threads: str = "1"
    may: tuple[int, int] | None = None  # a part in which it may be found, too
    new: list[str] = field(default_factory=list)  # numbers that the run has not logged


def nothing(folder: Path) -> None:
    """Plants nothing in the project."""


MATTERS = partial(edit_script, "* SCALE", "* SCALE * 1.001")
SOURCE = "sources.train.py"
HERE = "--here"


def around(iteration: int) -> list[tuple[int, int]]:
    """The parts that begin or end at a checkpoint."""
    return [part for part in PARTS if iteration in part]


def plants(part_of_sample: tuple[int, int]) -> dict[str, Plant]:
    """All that is planted; sample 100 was read in the given part."""
    found: dict[str, Plant] = {}
    for iteration in (10, 15, 20, 30):
        says = f" of {layout.name_of(iteration)} differs: "
        case = f"checkpoint {iteration}{' (the best)' * (iteration == 15)}"
        ending, *beginning = around(iteration)
        found[f"{case}, swapped"] = Plant(partial(swap, iteration), around(iteration), says)
        # The last bit is lost if the first update makes the weight much larger.
        found[f"{case}, the last bit of a weight"] = Plant(
            partial(flip_weight, iteration), [ending], says, may=next(iter(beginning), None)
        )
    damage = partial(flip_weight, is_mended=False)
    for iteration in (15, 30):
        found[f"checkpoint {iteration}, the last bit of a weight, not mended"] = Plant(
            partial(damage, iteration), around(iteration), "its content has changed since"
        )
    # What follows a checkpoint in its iteration is done by the part that ends there, and by the one
    # that begins there; the update and its line only by the first of them.
    for name, iteration, parts in (
        ("train/loss", 7, [(0, 10)]), ("train/loss", 10, [(0, 10)]),
        ("train/loss", 30, [(20, 30)]), ("valid/bias", 25, [(20, 30)]),
        ("valid/bias", 15, around(15)),
    ):  # fmt: skip
        says = f"{name} at iteration {iteration} differs: "
        plant = partial(edit_line, "metrics.jsonl", iteration, name)
        found[f"metrics.jsonl, {name} at {iteration}"] = Plant(plant, parts, says)
    says = "at iteration 12 differs: None then"
    found["metrics.jsonl, without line 12"] = Plant(partial(delete_line, 12), [(10, 15)], says)
    for iteration, parts in ((5, [(0, 10)]), (20, around(20))):
        says = f"valid/bias at iteration {iteration} of validations.jsonl differs: "
        plant = partial(edit_line, "validations.jsonl", iteration, "valid/bias")
        found[f"validations.jsonl, iteration {iteration}"] = Plant(plant, parts, says)
    at_once = "train/loss at iteration 1 differs: "
    seed = partial(write_config, "optim: {lr: 0.01}\ntraining: {seed: 1}\n")
    lr = partial(write_config, "optim: {lr: 0.011}\n")
    of_weights, of_checkpoint = {"run": "from_weights"}, {"run": "from_checkpoint"}
    began_from, version = "began_from", partial(install, "1.5")
    found |= {
        # A millionth more need not be seen in the first loss.
        "data, all": Plant(
            partial(edit_data, slice(None)), PARTS, "train/loss at iteration ", "first_batch"
        ),
        "data, one sample": Plant(partial(edit_data, 100), [part_of_sample], "differs: "),
        "seed": Plant(seed, PARTS, at_once, "config.training.seed"),
        "config": Plant(lr, PARTS, "train/lr at iteration 1 differs: ", "config.optim.lr"),
        "weights of --init_model_path, a bit": Plant(
            flip_initial, [(0, 10)], "differs: ", began_from, **of_weights
        ),
        "--checkpoint_path, a bit": Plant(
            partial(flip_weight, 10, byte=HIGH),
            [(10, 15)],
            "differs: ",
            began_from,
            **of_checkpoint,
        ),
        "--checkpoint_path, another run's": Plant(
            partial(swap, 10), [(10, 15)], "differs: ", began_from, **of_checkpoint
        ),
        "the run's copy of --checkpoint_path, swapped": Plant(
            partial(swap, 10, run="from_checkpoint"),
            [(10, 15)],
            "model.safetensors of step-00000010 differs: ",
            **of_checkpoint,
        ),
        "source": Plant(MATTERS, PARTS, "this is not the code of the run", SOURCE),
        "source, --here": Plant(MATTERS, PARTS, at_once, SOURCE, HERE),
        "source, a comment and other names, --here": Plant(rename, [], "", SOURCE, HERE),
        "source, more is logged, --here": Plant(
            log_more, [], "", SOURCE, HERE, new=["train/largest"]
        ),
        "nothing": Plant(nothing, [], ""),
        "nothing, --here": Plant(nothing, [], "", words=HERE),
        "version": Plant(version, PARTS, at_once, "packages.measured"),
        "version, --here": Plant(version, PARTS, at_once, "packages.measured", HERE),
        "threads": Plant(nothing, PARTS, "differs: ", "processor.threads", threads="2"),
    }
    return found


def planted(original: Path, folder: Path, count: Count) -> None:
    """Plants each difference in a copy of the project."""
    for run, words in {"from_weights": INIT, "from_checkpoint": [f"--checkpoint_path={P}"]}.items():
        if not (original / "runs" / run).exists():
            train_there(original, run, *words)
    looked = say_there(original, "a", "--updates")
    updates = {(one["first"], one["last"]): one["updates"] for one in looked["parts"]}
    readers = [
        part
        for part, lines in updates.items()
        for line in lines
        if re.search(r"samples (\d+,)*100(,|$)", line)
    ]
    problem = "" if len(readers) == 1 else "expected one"
    count.add("in which part sample 100 is read, by --updates", problem, str(readers))

    def try_one(case: str, one: Plant) -> tuple[str, str]:
        place = shutil.copytree(original, folder / re.sub(r"\W+", "_", case))
        one.plant(place)
        found = say_there(place, one.run, one.words, THREADS_OF_THIS_MACHINE=one.threads)
        shutil.rmtree(place)
        hit = [part for part in found["parts"] if part["problem"]] or found["parts"]
        named = [name for part in hit for name in part["not as it was"]]
        words = f"{_parts(found)}: {hit[0]['problem'] or found['result']}"
        return _why_wrong(one, found, named), f"{words}; not as it was: {', '.join(named) or '-'}"

    count.add_all(try_one, plants(readers[0]))


def _parts(found: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The parts of a receipt that are not the same."""
    return [(part["first"], part["last"]) for part in found["parts"] if part["problem"]]


def _why_wrong(one: Plant, found: Mapping[str, Any], named: list[str]) -> str:
    """Why a receipt does not say of a difference what it should; empty if it does."""
    said = next((part["problem"] for part in found["parts"] if part["problem"]), "")
    new = {name.partition(" ")[0] for part in found["parts"] for name in part["new"]}
    if [part for part in _parts(found) if part != one.may] != one.parts:
        return f"parts {one.parts} expected"
    if found["reproduced"] is bool(one.parts):
        return f"reproduced: {found['reproduced']}"
    if one.says not in said:
        return f"{one.says!r} expected"
    if not (named and named[0].startswith(one.named) if one.named else not named):
        return f"{one.named or 'nothing'} expected among what is not as it was"
    return "" if [*new] == one.new else f"{new} are said to be new"


# --- receipts that are put together -------------------------------------------------------------


def receipts(original: Path, folder: Path, count: Count) -> None:
    """Makes parts one by one, with a receipt each, and puts these together."""
    place = shutil.copytree(original, folder / "receipts")

    def one_part(case: str, words: str) -> tuple[str, str]:
        first, last = re.findall(r"\d+", case)
        words += f" --from {first} --to {last}"
        command = ["-m", "expbase", "reproduce", *words.split()]
        result = call(place, *command, PYTHONPATH=packages(place))
        wrong = result.returncode != ("says no" in case)
        return result.stderr[-500:] if wrong else "", result.stdout.strip()

    for run in ("a", "b"):
        parts = [*PARTS, (10, 12)] if run == "a" else [PARTS[1]]
        cases = {
            f"run {run}, {first} to {last}": f"runs/{run} --record {run}{last}.json"
            for first, last in parts
        }
        count.add_all(one_part, cases)
    log_more(place)
    cases = {"code that logs more, 10 to 15": "runs/a --here --record here.json"}
    count.add_all(one_part, cases)
    (place / "train.py").write_text(SCRIPT)
    swap(15, place)
    count.add_all(one_part, {"a swapped one says no, 10 to 15": "runs/a --record no.json"})
    shutil.rmtree(checkpoint(place, 15))
    shutil.copytree(checkpoint(original, 15), checkpoint(place, 15))
    (place / "list.json").write_text("[]")

    def together(case: str, one: tuple[str, int, str]) -> tuple[str, str]:
        names, code, says = one
        words = ["runs/a", "--receipts", *(f"{name}.json" for name in names.split())]
        result = call(place, "-m", "expbase", "reproduce", *words)
        said = (result.stdout or result.stderr).strip().splitlines()[-1]
        if result.returncode != code or says not in said:
            return f"code {result.returncode}; expected {code} and {says!r}", said
        return "", said

    other = "no.json: iterations 11 to 15: model.safetensors of step-00000015 differs"
    tables: dict[str, tuple[str, int, str]] = {
        "together, all": ("a10 a15 a20 a30", 0, "by the receipts of 4 parts, the same bits (4 ch"),
        "together, in another order": (
            "a30 a10 a20 a15",
            0,
            "iterations 1 to 30, by the receipts of 4 parts",
        ),
        "together, one missing": ("a10 a15 a30", 1, "no receipt of the iterations from 16 on"),
        "together, the first missing": ("a15 a20 a30", 1, "no receipt of the iterations from 1 on"),
        "together, the last missing": ("a10 a15 a20", 1, "no receipt of the iterations from 21 on"),
        "together, one that ends too early": ("a10 a12 a20 a30", 1, "from 13 on"),
        "together, one of another run": ("a10 b15 a20 a30", 1, "the run has another step-00000015"),
        "together, one that says no": ("a10 no a20 a30", 1, other),
        "together, a no and a yes": ("a10 no a15 a20 a30", 1, other),
        "together, one by other code": (
            "a10 here a20 a30",
            1,
            "here.json: iterations 11 to 15: it ",
        ),
        "together, no receipt": ("a10 list", 78, "list.json: is no receipt"),
    }
    count.add_all(together, tables)
    edit_line("metrics.jsonl", 12, "train/loss", place)
    says = "a15.json: iterations 11 to 15: train/loss at iteration 12 was "
    count.add_all(together, {"together, a line changed since": ("a10 a15 a20 a30", 1, says)})


# --- a loss that jumps, and costs -----------------------------------------------------------------

BAD = 7310
JUMP = """
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset
from expbase import ExperimentBase, main

class Images(Dataset):
    def __init__(self):
        source = np.random.default_rng(0)
        self.images = source.normal(size=(10000, 1, 16, 16)).astype("float32")
        self.targets = self.images.mean(axis=(1, 2, 3)) * 16
        self.targets[BAD] = 100  # a slip of the pen

    def __len__(self):
        return 10000

    def __getitem__(self, index):
        return self.images[index], self.targets[index]

class Jump(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.update(max_iteration=1250, save_interval=125, valid_interval=0)
        config.training.update(log_interval=1, keep_last=0)
        return config

    def setup_dataloader(self):
        self.train_loader = DataLoader(Images(), batch_size=16, shuffle=True)

    def setup_model(self):
        self.model = paddle.nn.Sequential(
            paddle.nn.Conv2D(1, 48, 5, padding=2), paddle.nn.ReLU(),
            paddle.nn.Conv2D(48, 48, 3), paddle.nn.ReLU(), paddle.nn.MaxPool2D(4),
            paddle.nn.Flatten(), paddle.nn.Linear(48 * 9, 1),
        )
        self.optimizer = paddle.optimizer.Adam(1e-4, parameters=self.model.parameters())

    def train_batch(self):
        images, targets = self.read_batch()
        loss = F.mse_loss(self.model(images)[:, 0], targets)
        self.backward(loss)
        self.log(loss=loss)
        self.step_optimizers()

if __name__ == "__main__":
    main(Jump)
""".replace("BAD", str(BAD))
LOOK = """
        with paddle.no_grad():
            each = F.mse_loss(self.model(images)[:, 0], targets, reduction="none")
            samples = self.internals.batch_indices
            self.log(worst_sample=samples[each.argmax().item()], worst_loss=each.max())
        self.backward(loss)"""


def jump(folder: Path, count: Count) -> None:
    """Finds the sample by which a loss jumped, and tells what parts cost."""
    folder.mkdir()
    script, run = folder / "train.py", folder / "runs/a"
    script.write_text(JUMP)
    run_seconds, _ = timed(train, folder, "train.py", f"--output={run}", "--device=cpu")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    at = max(lines, key=lambda line: float(line["train/loss"]))["iteration"]
    first = max(iteration for iteration in (0, *kept(run)) if iteration < at)

    words = f"--from {first} --to {at} --updates"
    seconds, found = timed(receipt, folder, run, words)
    line = next((line for line in found["lines"] if line.startswith(f"[{at}] ")), "")
    has_sample = str(BAD) in line.partition(" samples ")[2].split(",")
    problem = "" if found["reproduced"] and has_sample else found["result"]
    cost = f"{seconds / run_seconds:.2f} of the run's {run_seconds:.0f} s"
    count.add(f"the jump at {at}, sample {BAD}: {words}", problem, f"{line} | {cost}")

    script.write_text(JUMP.replace("\n        self.backward(loss)", LOOK))
    words += " --here"
    seconds, found = timed(receipt, folder, run, words)
    line = next((line for line in found["lines"] if line.startswith(f"[{at}] ")), "")
    new = found["parts"][0]["new"].get(f"train/worst_sample at iteration {at}")
    is_shown = new == BAD and f" worst_sample={BAD} " in line
    problem = "" if found["reproduced"] and is_shown else found["result"]
    cost = f"{seconds / run_seconds:.2f} of the run"
    count.add(f"the same, looked at: {words}", problem, f"{line} | {found['result']} | {cost}")
    script.write_text(JUMP)

    seconds, found = timed(receipt, folder, run, "--from 625 --to 750")
    cost = f"{seconds:.1f} s, {seconds / run_seconds:.2f} of the run"
    count.add("cost of one part of ten", "" if found["reproduced"] else found["result"], cost)
    four = "--parts 4 --seed 0"
    alone, found = timed(receipt, folder, run, four)
    for jobs in (2, 4):
        seconds, other = timed(receipt, folder, run, f"{four} --jobs {jobs}")
        is_same = found["parts"] == other["parts"] and found["reproduced"]
        cost = f"{seconds / alone:.2f} of {alone:.1f} s one after the other"
        count.add(f"cost of four parts, --jobs {jobs}", "" if is_same else other["result"], cost)


def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """The seconds that a call takes, and what it returns."""
    begin = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - begin, result


# ------------------------------------------------------------------------------------------------

OF_PROJECT = {"continued": continued, "planted": planted, "receipts": receipts}
SECTIONS = ["whole", *OF_PROJECT, "jump"]


def prove(folder: Path, sections: Iterable[str]) -> dict[str, Count]:
    """Proves some sections, in a folder that is empty."""
    counts = {name: Count() for name in SECTIONS if name in sections}
    if "whole" in counts:
        whole(folder / "whole", counts["whole"])
    if OF_PROJECT.keys() & counts.keys():
        original = project(folder / "original")
    for name, prove_one in OF_PROJECT.items():
        if name in counts:
            prove_one(original, folder, counts[name])
    if "jump" in counts:
        jump(folder / "jump", counts["jump"])
    return counts


def main() -> None:
    """Runs the proof; the exit code says whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts = prove(Path(folder), parser.parse_args().only)
    words = ", ".join(f"{name} {one.held} of {one.all}" for name, one in counts.items())
    print(f"{words}, in {time.perf_counter() - begin:.0f} s")
    sys.exit(any(one.held < one.all for one in counts.values()))


if __name__ == "__main__":
    main()
