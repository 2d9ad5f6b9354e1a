"""Proves that `python -m expbase reproduce` makes runs again, and says no, with its reason, if not.

Thirteen runs, at least one of each experiment, in a git repository of their own, some with changes
that are not committed, with two processes, or with shares: each is made again and has a receipt.
Then each of six differences is planted in a run of its own (code, config, seed, data, version,
threads), and the receipt must say no and name it.

    python tests/proofs/reproduce.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNS: dict[str, list[str]] = {
    "line": ["line/train.py", "--config=line/config.yaml"],
    "digits": ["digits/train.py", "--config=digits/config.yaml"],
    "digits, macro F1": ["digits/macro_f1.py"],
    "digits, two processes": ["digits/train.py", "--nprocs=2"],
    "digits, shares": ["digits/train.py", "training.shares=2", "data.batch_size=8"],
    "charlm": ["charlm/train.py", "--config=charlm/config.yaml"],
    "ctr": ["ctr/train.py"],
    "multitask": ["multitask/train.py", "--config=multitask/config.yaml"],
    "gan": ["gan/train.py", "--config=gan/config.yaml"],
    "flow": ["flow/train.py", "--config=flow/config.yaml"],
    "cartpole": ["cartpole/train.py", "evaluation.num_episodes=2"],
    "pinn": ["pinn/train.py", "adam.iterations=50", "lbfgs.steps=5", "problem=inverse"],
    "cifar": ["cifar/train.py", "--config=cifar/small.yaml", "training.max_epoch=0"],
}
SHORT = ["training.max_iteration=60", "training.save_interval=20", "training.valid_interval=20"]
SHORT += ["training.log_interval=5", "--device=cpu"]
ADDED = {"digits, shares": ["--nprocs=2"]}  # the run was of one process

SCRIPT = """
import os
os.environ["OMP_NUM_THREADS"] = os.environ.get("THREADS_OF_THIS_MACHINE", "1")
from pathlib import Path
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset
from expbase import Config, ExperimentBase, main
from measured import SCALE  # of an installed package

class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):  # read from the disk one by one
        image = np.load("data/images.npy", mmap_mode="r")[index]
        return np.asarray(image), np.int64(index % 4)

class Convolution(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.optim = Config({"lr": 0.01})
        config.training.update(max_iteration=20, save_interval=10, valid_interval=0, log_interval=1)
        config.training.max_epoch = 0
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

if __name__ == "__main__":
    main(Convolution)
"""


def call(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of python there."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **variables}
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


def git(folder: Path, *words: str) -> None:
    """Calls git as nobody."""
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def receipt(folder: Path, run: Path, *words: str, **variables: str) -> dict[str, Any]:
    """What `reproduce` says of a run."""
    file = run.with_name(f"{run.name}.json")
    command = ["-m", "expbase", "reproduce", str(run), "--record", str(file), *words]
    result = call(folder, *command, **variables)
    if not file.exists():
        return {"reproduced": None, "result": result.stderr.strip()[-1000:], "not as it was": {}}
    found: dict[str, Any] = json.loads(file.read_text())
    assert result.stdout.strip() == found["result"]
    assert result.returncode == 1 - found["reproduced"]
    return found


def experiments(folder: Path) -> int:
    """Runs the experiments and makes each again; returns of how many the receipt says yes."""
    top = folder / "repository"
    shutil.copytree(ROOT / "experiments", top, ignore=shutil.ignore_patterns("__pycache__"))
    (top / ".gitignore").write_text("__pycache__\n")
    git(top, "init", "--quiet")
    git(top, "add", ".")
    git(top, "commit", "--quiet", "-m", "one")
    assert call(top, "cifar/shapes.py", "shapes.tar.gz").returncode == 0  # git does not know it
    count = 0
    for number, (name, words) in enumerate(RUNS.items()):
        script = top / words[0]
        text = script.read_text()
        script.write_text(f"{text}\n# a change that is not committed\n" if number % 2 else text)
        run = folder / f"runs/{number}"
        made = call(top, *words, "--output", str(run), *SHORT)
        assert made.returncode == 0, made.stderr
        script.write_text("raise SystemExit('the code of today')\n")
        added = ["--", *ADDED[name]] if name in ADDED else []
        found = receipt(top, run, "--iterations=60", *added)
        script.write_text(text)
        count += found["reproduced"] is True
        print(f"{name}: {found['result']}", flush=True)
    return count


def project(folder: Path) -> Path:
    """Makes a folder with a script, data, an installed package, and its run in runs/a."""
    import numpy as np

    (folder / "data").mkdir(parents=True)
    source = np.random.default_rng(0)
    np.save(folder / "data/images.npy", source.normal(size=(64, 3, 32, 32)).astype("float32"))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "site-packages/measured-1.0.dist-info").mkdir(parents=True)
    install(folder, "1.0")
    (folder / "config.yaml").write_text("optim: {lr: 0.01}\n")
    words = ["train.py", "--config=config.yaml", "--output=runs/a", "--device=cpu"]
    made = call(folder, *words, PYTHONPATH=str(folder / "site-packages"))
    assert made.returncode == 0, made.stderr
    return folder


def install(folder: Path, version: str) -> None:
    """Puts a version of the package in the place of another one."""
    shutil.rmtree(folder / "site-packages")
    info = folder / f"site-packages/measured-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: measured\nVersion: {version}\n")
    (folder / "site-packages/measured.py").write_text(f"SCALE = {version}\n")


def other_data(folder: Path) -> None:
    import numpy as np

    path = folder / "data/images.npy"
    np.save(path, np.load(path) + np.float32(1e-6))


def other_code(folder: Path) -> None:
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(text.replace("* SCALE", "* SCALE * 1.001"))


def other_seed(folder: Path) -> None:
    (folder / "config.yaml").write_text("optim: {lr: 0.01}\ntraining: {seed: 1}\n")


def other_config(folder: Path) -> None:
    (folder / "config.yaml").write_text("optim: {lr: 0.011}\n")


# What is changed, and the beginning of the one fact that must be named.
PLANTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (other_code, "sources.train.py"),
    "config": (other_config, "config.optim.lr"),
    "seed": (other_seed, "config.training.seed"),
    "data": (other_data, "first_batch"),
    "version": (lambda folder: install(folder, "1.5"), "packages.measured"),
    "threads": (lambda folder: None, "environment.OMP_NUM_THREADS"),
}


def planted(folder: Path) -> int:
    """Plants the differences; returns of how many the receipt says no for the right reason."""
    original = project(folder / "original")
    untouched = receipt(original, original / "runs/a", PYTHONPATH=str(original / "site-packages"))
    print(f"nothing planted: {untouched['result']}", flush=True)
    assert untouched["reproduced"] is True
    count = 0
    for name, (plant, expected) in PLANTED.items():
        place = shutil.copytree(original, folder / name)
        plant(place)
        variables = {"PYTHONPATH": str(place / "site-packages")}
        if name == "threads":
            variables["THREADS_OF_THIS_MACHINE"] = "2"
        found = receipt(place, place / "runs/a", **variables)
        named = [*found["not as it was"]]
        # Of a seed the first batch is another one, too; of threads the checkpoint says it again.
        count += found["reproduced"] is False and named[:1] == [expected]
        print(f"{name}: {found['result']}", flush=True)
    return count


def main() -> None:
    """Runs the proof; the exit code says whether it holds."""
    with tempfile.TemporaryDirectory() as folder:
        same = experiments(Path(folder, "experiments"))
        said_no = planted(Path(folder, "planted"))
    print(f"{same} of {len(RUNS)} reproduced, {said_no} of {len(PLANTED)} differences named")
    sys.exit(same < len(RUNS) or said_no < len(PLANTED))


if __name__ == "__main__":
    main()
