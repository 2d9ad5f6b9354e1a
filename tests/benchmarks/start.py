"""From the command to the end of the first update, against a script of bare paddle.

    python tests/benchmarks/start.py [--rounds 3]

Both train the same small net, in a folder that is a git repository. Each round starts, one after
the other, in fresh processes: the bare script and expbase; both under paddle's launcher on two
processes, and expbase with --nprocs 2; and a resume of both, the bare one by `paddle.load`. Printed
are medians of the wall time until the first update has ended on all ranks, and of the differences
in a round; in brackets those of the processor's time, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMON = """
import os, sys, time
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset

def loader():
    images, labels = paddle.rand([1797, 1, 8, 8]), paddle.randint(0, 10, [1797])
    dataset = TensorDataset([images, labels])
    return DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)

def net():
    return paddle.nn.Sequential(
        paddle.nn.Conv2D(1, 16, 3, padding=1), paddle.nn.ReLU(), paddle.nn.MaxPool2D(2),
        paddle.nn.Conv2D(16, 32, 3, padding=1), paddle.nn.ReLU(), paddle.nn.Flatten(),
        paddle.nn.Dropout(0.3), paddle.nn.Linear(512, 10),
    )

def note():
    with open(f"{os.environ['NOTES']}/{paddle.distributed.get_rank()}", "x") as file:
        file.write(f"{time.time()} {time.process_time()}")
"""

BARE = """
output = sys.argv[1]
paddle.set_device("cpu")
paddle.seed(0)
model = net()
if paddle.distributed.get_world_size() > 1:
    paddle.distributed.init_parallel_env()
    model = paddle.DataParallel(model)
optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
if os.path.exists(f"{output}.pdparams"):
    model.set_state_dict(paddle.load(f"{output}.pdparams"))
    optimizer.set_state_dict(paddle.load(f"{output}.pdopt"))
for images, labels in loader():
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    note()
    break
paddle.save(model.state_dict(), f"{output}.pdparams")
paddle.save(optimizer.state_dict(), f"{output}.pdopt")
"""

OURS = """
from expbase import ExperimentBase, main

class Digits(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = loader()

    def setup_model(self):
        self.model = self.data_parallel(net())
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        note()
        self.log(loss=loss)
        self.stop("measured", on_all_ranks=True)

    def valid(self):
        return None

if __name__ == "__main__":
    main(Digits)
"""

AUTHOR = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]


def started(folder: Path, script: str, words: list[str], nprocs: int = 1) -> tuple[float, float]:
    """Seconds until all ranks have ended their first update: of the wall, of the processor."""
    notes = Path(tempfile.mkdtemp(dir=folder))
    logs = ["--log_dir", str(notes / "log")]
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(nprocs), *logs]
    launcher = launch if nprocs > 1 and "--nprocs" not in words else []
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = {**compiled, "NOTES": str(notes), "PADDLE_DISTRI_BACKEND": "gloo"}
    began = time.time()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, script, *words],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    texts = [(notes / str(rank)).read_text().split() for rank in range(nprocs)]
    times = [(float(wall) - began, float(processor)) for wall, processor in texts]
    return max(wall for wall, _ in times), max(processor for _, processor in times)


def one_round(folder: Path) -> dict[str, tuple[float, float]]:
    """All ways once; what is resumed lies in the folder before."""
    times = {}
    for name, nprocs in (("one process", 1), ("two processes", 2)):
        times[f"{name}, bare"] = started(folder, "bare.py", ["bare_new"], nprocs)
        (folder / "bare_new.pdparams").unlink()
        times[name] = started(folder, "ours.py", ["--output", "new", "--device", "cpu"], nprocs)
        shutil.rmtree(folder / "new")
    words = ["--output", "new", "--device", "cpu", "--nprocs", "2"]
    times["--nprocs 2, bare"] = times["two processes, bare"]
    times["--nprocs 2"] = started(folder, "ours.py", words, 2)
    shutil.rmtree(folder / "new")
    times["resume, bare"] = started(folder, "bare.py", ["bare_old"])
    times["resume"] = started(folder, "ours.py", ["--output", "old", "--device", "cpu"])
    return times


def main() -> None:
    """Prints medians, and the differences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    folder = Path(tempfile.mkdtemp(prefix="start-"))
    try:
        (folder / "bare.py").write_text(COMMON + BARE)
        (folder / "ours.py").write_text(COMMON + OURS)
        for command in (["init", "-q"], ["add", "."], [*AUTHOR, "commit", "-qm", "one"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        started(folder, "bare.py", ["bare_old"])
        started(folder, "ours.py", ["--output", "old", "--device", "cpu"])
        measured = [one_round(folder) for _ in range(rounds)]
    finally:
        shutil.rmtree(folder)
    print(f"medians of {rounds} rounds, in seconds; in brackets the processor's")
    for name in ("one process", "two processes", "--nprocs 2", "resume"):
        bare, ours = ([each[key] for each in measured] for key in (f"{name}, bare", name))
        pairs = [*zip(bare, ours, strict=True)]
        wall, processor = (
            (
                statistics.median(b[clock] for b, _ in pairs),
                statistics.median(o[clock] for _, o in pairs),
                statistics.median(o[clock] - b[clock] for b, o in pairs),
            )
            for clock in (0, 1)
        )
        print(
            f"{name + ':':15} bare {wall[0]:.2f}, expbase {wall[1]:.2f}, "
            f"more {wall[2]:+.2f} ({processor[2]:+.2f})  (allowed: 0.3 s)"
        )


if __name__ == "__main__":
    main()
