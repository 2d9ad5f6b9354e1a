"""Harder data from epoch to epoch; what is hard is learned from the losses."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class Sums(Dataset):
    """Sums of some numbers; `difficulty` says how far apart they are."""

    def __init__(self, size):
        self.numbers = np.random.RandomState(6).rand(size, 6).astype("float32")
        self.difficulty, self.weights = 0.2, np.ones(size, "float32")

    def __getitem__(self, index):
        numbers = self.numbers[index] ** (1 + self.difficulty * np.random.rand())
        return numbers.astype("float32"), numbers.sum(keepdims=True) * self.weights[index], index

    def __len__(self):
        return len(self.numbers)

    def feed_back(self, indices, losses):
        for index, loss in zip(indices, losses, strict=True):
            self.weights[index] = 0.9 * self.weights[index] + 0.1 * loss


class PlateauWatch:
    def __init__(self, patience=2):
        self.patience, self.best, self.bad_epochs = patience, float("inf"), 0

    def is_stuck(self, value):
        self.best, self.bad_epochs = (
            (value, 0) if value < self.best else (self.best, self.bad_epochs + 1)
        )
        return self.bad_epochs >= self.patience


class Curriculum(ExperimentBase):
    def setup_dataloader(self):
        self.dataset = Sums(14)
        self.train_loader = DataLoader(self.dataset, batch_size=4, shuffle=True)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        self.watch, self.epoch_losses = PlateauWatch(), []
        self.history = {"difficulty": [], "loss": []}

    def on_train_epoch_begin(self):
        self.dataset.difficulty = min(0.2 * self.epoch, 2.0)

    def train_batch(self):
        numbers, sums, indices = self.read_batch()
        losses = F.smooth_l1_loss(self.model(numbers), sums, reduction="none").flatten()
        losses.mean().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.dataset.feed_back(indices.tolist(), losses.tolist())
        self.epoch_losses.append(float(losses.mean()))
        self.log(loss=losses.mean(), difficulty=self.dataset.difficulty)

    def on_train_epoch_end(self):
        mean = float(np.mean(self.epoch_losses))
        if self.watch.is_stuck(mean):
            self.optimizer.set_lr(self.optimizer.get_lr() * 0.5)
        self.history["difficulty"].append(self.dataset.difficulty)
        self.history["loss"].append(mean)
        self.epoch_losses.clear()

    def valid(self):
        return {"epochs": float(len(self.history["loss"]))}


if __name__ == "__main__":
    main(Curriculum)
