"""An experiment for a cluster that shrinks and grows: what could depend on how many processes.

Digits with noise that loader workers draw; batch norm and dropout; a normalization that is used
late for the first time, a layer that is unfrozen late, a value of each share, and a value that the
experiment has.

    python tests/proofs/elastic.py --nprocs 2 --output runs/elastic training.max_iteration=600
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main

TRACE = (
    "trace.txt"  # beside the run: time, process, number of processes and iteration of each update
)
HURRY = "hurry"  # if this file is there, PACE_SECONDS between updates are not waited any more


class Noisy(Dataset):
    """Digits with noise that is drawn anew whenever one is looked at."""

    def __init__(self, begin: int, end: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = images[begin:end].reshape(-1, 1, 8, 8).astype("float32") / 16
        self.labels = labels[begin:end].astype("int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        noise = np.random.randn(1, 8, 8).astype("float32") / 10
        return self.images[index] + noise, self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


class Elastic(ExperimentBase):
    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"workers": 2})
        config.model = Config({"late_from": 60, "unfrozen_at": 120})
        intervals = {"max_iteration": 1200, "valid_interval": 200, "save_interval": 20}
        config.training.update(shares=4, log_interval=5, **intervals)
        return config

    def setup_dataloader(self) -> None:
        workers = self.config.data.workers
        self.train_loader = DataLoader(
            Noisy(0, 1437), batch_size=8, shuffle=True, num_workers=workers
        )
        self.valid_loader = DataLoader(Noisy(1437, 1797), batch_size=60)

    def setup_model(self) -> None:
        nn = paddle.nn
        self.model = nn.Sequential(
            nn.Conv2D(1, 8, 3), nn.BatchNorm2D(8), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10),
        )  # fmt: skip
        self.late = nn.BatchNorm1D(10)
        layers = self.model, self.late
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        for parameter in self.model[0].parameters():
            parameter.stop_gradient = True
        self.optimizer = paddle.optimizer.Adam(5e-4, parameters=parameters)
        self.seen = 0  # batches of each share
        self.register_stateful("seen", by_share=True)
        self.smoothed = 0.0

    def train_batch(self) -> None:
        if self.iteration == self.config.model.unfrozen_at:
            for parameter in self.model[0].parameters():
                parameter.stop_gradient = False
        for images, labels in self.micro_batches():
            loss = F.cross_entropy(self.outputs(images), labels)
            self.backward(loss)
            self.seen += 1
            self.log(loss=loss, seen=self.seen)
        norm = sum(float(p.grad.norm()) for p in self.model.parameters() if p.grad is not None)
        self.smoothed = 0.9 * self.smoothed + 0.1 * norm
        self.log(smoothed=self.smoothed)
        self.step_optimizers()
        if self.rank == 0:  # what is done again stands here twice, and in no log
            with (self.output_dir.parent / TRACE).open("a", encoding="utf-8") as file:
                file.write(f"{time.time()} {os.getpid()} {self.world_size} {self.iteration}\n")
        if not (self.output_dir.parent / HURRY).exists():
            time.sleep(float(os.environ.get("PACE_SECONDS", 0)))

    def outputs(self, images: Any) -> Any:
        """Logits [N, 10]."""
        outputs = self.model(images)
        if self.iteration < self.config.model.late_from:
            return outputs
        return outputs + 0.1 * self.late(outputs)

    def valid(self) -> dict[str, Any]:
        right = total = 0
        for images, labels in self.valid_batches():
            right += int((self.outputs(images).argmax(axis=-1) == labels).sum())
            total += len(labels)
        return self.average({"accuracy": right / total}, weight=total)


if __name__ == "__main__":
    main(Elastic)
