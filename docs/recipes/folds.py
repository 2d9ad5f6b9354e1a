"""Five folds in one go, and a table; if it is killed, the same command goes on where it was."""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main

FOLDER = Path("runs/folds")
NUM_FOLDS = 5


class Fold(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        config.data = Config({"fold": 0})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        # The same folds in all runs, whatever their training.seed.
        order = np.random.default_rng(0).permutation(len(labels))
        is_held_out = order % NUM_FOLDS == self.config.data.fold
        self.train_loader = DataLoader(
            self.dataset(images, labels, ~is_held_out), batch_size=50, shuffle=True
        )
        self.valid_loader = DataLoader(self.dataset(images, labels, is_held_out), batch_size=100)

    def dataset(self, images, labels, chosen):
        images = paddle.to_tensor(images[chosen] / 16, "float32")
        return TensorDataset([images, paddle.to_tensor(labels[chosen])])

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for images, labels in self.valid_batches():
            right = self.model(images).argmax(axis=-1) == labels
            self.log(accuracy=right.astype("float32").mean())


def cross_validate():
    accuracies = []
    for fold in range(NUM_FOLDS):
        output = FOLDER / f"fold{fold}"
        main(Fold, argv=["--output", str(output), f"data.fold={fold}", *sys.argv[1:]])
        accuracies.append(last_accuracy(output))
    for fold, accuracy in enumerate(accuracies):
        print(f"fold {fold}  {accuracy:.4f}")
    print(f"mean    {statistics.mean(accuracies):.4f} ± {statistics.stdev(accuracies):.4f}")


def last_accuracy(output):
    """Of the last weights: those that this fold calls the best would flatter the mean."""
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["valid/accuracy"] for line in lines if "valid/accuracy" in line][-1]


if __name__ == "__main__":
    cross_validate()
