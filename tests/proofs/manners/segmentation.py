"""In the manner of PaddleSeg: transforms, a config that says what is built, averagers, best IoU."""

import time
from collections import deque

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main

CFG = {
    "optimizer": {"type": "Momentum", "momentum": 0.9, "weight_decay": 4e-5},
    "lr_scheduler": {"type": "PolynomialDecay", "learning_rate": 0.05, "end_lr": 0, "power": 0.9},
    "loss": {"types": ["CrossEntropyLoss", "MSELoss"], "coef": [1, 0.4]},
}


class Compose:
    def __init__(self, transforms):
        self.transforms, self.to_rgb = transforms, True

    def __call__(self, image, label):
        for transform in self.transforms:
            image, label = transform(image, label)
        return image, label


class RandomFlip:
    def __init__(self, prob=0.5):
        self.prob = prob

    def __call__(self, image, label):
        if np.random.rand() < self.prob:
            return image[..., ::-1].copy(), label[..., ::-1].copy()
        return image, label


class Shapes(Dataset):
    def __init__(self, transforms, size=22):
        self.transforms, self.file_list = Compose(transforms), [*range(size)]

    def __getitem__(self, index):
        image = np.random.RandomState(index).randn(1, 6, 6).astype("float32")
        return self.transforms(image, (image[0] > 0).astype("int64"))

    def __len__(self):
        return len(self.file_list)


class TimeAverager:
    def __init__(self):
        self.reset()

    def reset(self):
        self._cnt = self._total_time = self._total_samples = 0

    def record(self, usetime, num_samples):
        self._cnt, self._total_time = self._cnt + 1, self._total_time + usetime
        self._total_samples += num_samples


class Trainer(ExperimentBase):
    def setup_dataloader(self):
        flip = [RandomFlip()]
        self.train_loader = DataLoader(Shapes(flip), batch_size=4, shuffle=True, drop_last=True)
        self.valid_loader = DataLoader(Shapes([], 6), batch_size=1)

    def setup_model(self):
        self.model = nn.Sequential(
            nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.Conv2D(4, 2, 1)
        )
        decay = dict(CFG["lr_scheduler"], decay_steps=20)
        self.lr = getattr(paddle.optimizer.lr, decay.pop("type"))(**decay)
        how = dict(CFG["optimizer"], parameters=self.model.parameters(), learning_rate=self.lr)
        self.optimizer = getattr(paddle.optimizer, how.pop("type"))(**how)
        self.losses = {"types": [F.cross_entropy, F.mse_loss], "coef": CFG["loss"]["coef"]}
        self.reader_cost, self.batch_cost = TimeAverager(), TimeAverager()
        self.best_mean_iou, self.best_model_iter, self.save_models = -1.0, -1, deque()
        self.avg_loss_list = []

    def train_batch(self):
        start = time.time()
        images, labels = self.read_batch()
        self.reader_cost.record(time.time() - start, len(images))
        logits = self.model(images)
        soft = F.softmax(logits, axis=1)[:, 1]
        parts = [
            self.losses["coef"][0] * F.cross_entropy(logits, labels, axis=1),
            self.losses["coef"][1] * F.mse_loss(soft, labels.astype("float32")),
        ]
        loss = sum(parts)
        loss.backward()
        self.optimizer.step()
        self.lr.step()
        self.model.clear_gradients()
        self.avg_loss_list = [float(part) for part in parts]
        self.batch_cost.record(time.time() - start, num_samples=4)
        self.log(loss=loss)

    def valid(self):
        ious = []
        for image, label in self.valid_batches():
            pred = self.model(image).argmax(axis=1)
            both = float(((pred == 1) & (label == 1)).sum())
            ious.append(both / max(float(((pred == 1) | (label == 1)).sum()), 1))
        return self.average({"miou": float(np.mean(ious))}, weight=len(ious))

    def on_evaluate_end(self, results):
        self.save_models.append(f"iter_{self.iteration}")
        if len(self.save_models) > 2:
            self.save_models.popleft()
        if results["miou"] > self.best_mean_iou:
            self.best_mean_iou, self.best_model_iter = results["miou"], self.iteration
        for averager in (self.reader_cost, self.batch_cost):
            averager.reset()


if __name__ == "__main__":
    main(Trainer)
