"""The experiment of the proofs: everything that can make a continued run differ, on a toy.

Augmentation that draws from numpy, python and paddle, in the order of a shuffle; dropout, batch
norm, a schedule with a memory, a generator and a plain value of its own; a pass that ends with
a smaller batch and, on two ranks, with a round that has to be filled.

    python tests/proofs/net.py --output runs/net data.workers=2 training.max_iteration=44
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset

from expbase import Config, ExperimentBase, main

BATCH_SIZE = 4


class Augmented(Dataset):
    """Points with noise of three kinds, drawn anew whenever one is looked at."""

    def __init__(self, size: int) -> None:
        generator = np.random.RandomState(7)
        self.points = generator.randn(size, 6).astype("float32")
        self.labels = (self.points.sum(axis=1) > 0).astype("int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        noise = np.random.randn(6) / 10 + random.gauss(0, 0.1)
        point = self.points[index] + noise + paddle.randn([6]).numpy() / 10
        return point.astype("float32"), self.labels[index]

    def __len__(self) -> int:
        return len(self.points)


class Net(ExperimentBase):
    """A small net; `data.samples` and `data.workers` say how much data, and who loads it."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"samples": 78, "workers": 0})
        return config

    def setup_dataloader(self) -> None:
        samples, workers = self.config.data.samples, self.config.data.workers
        note_pid = partial(_note_pid, str(self.output_dir / "pids"))
        note_pid()
        self.train_loader = DataLoader(
            Augmented(samples),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            worker_init_fn=note_pid,
        )
        self.valid_loader = DataLoader(Augmented(50), batch_size=BATCH_SIZE)

    def setup_model(self) -> None:
        net = paddle.nn.Sequential(
            paddle.nn.Linear(6, 16), paddle.nn.BatchNorm1D(16), paddle.nn.ReLU(),
            paddle.nn.Dropout(0.2), paddle.nn.Linear(16, 2),
        )  # fmt: skip
        self.model = self.data_parallel(net)
        # Its own state_dict forgets two of its values.
        self.schedule = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.01, T_0=5, T_mult=2)
        self.optimizer = paddle.optimizer.AdamW(
            self.schedule,
            parameters=net.parameters(),
            grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
        )
        self.generator = np.random.default_rng(self.rank)
        self.smoothed = 0.0

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        points = points + 0.01 * float(self.generator.normal())
        loss = F.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.schedule.step()
        self.smoothed = 0.9 * self.smoothed + 0.1 * loss.item()
        self.log(loss=loss, smoothed=self.smoothed)

    def valid(self) -> dict[str, Any]:
        right = total = 0
        for points, labels in self.valid_batches():
            right += int((self.model(points).argmax(axis=-1) == labels).sum())
            total += len(labels)
        return self.average({"accuracy": right / max(total, 1)}, weight=total)


def _note_pid(path: str, worker_id: int = -1) -> None:
    """Writes down a process of the run: paddle's files in shared memory bear its number."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    main(Net)
