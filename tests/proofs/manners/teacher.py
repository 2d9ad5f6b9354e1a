"""A mean teacher: an average of the weights in a helper of its own, and a ramp of its weight."""

import copy

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class Points(Dataset):
    def __init__(self, size=26):
        self.points = np.random.RandomState(2).randn(size, 4).astype("float32")

    def __getitem__(self, index):
        point = self.points[index]
        views = [point + np.random.randn(4).astype("float32") / 10 for _ in range(2)]
        return (*views, np.int64(point.sum() > 0), np.float32(index % 3 == 0))

    def __len__(self):
        return len(self.points)


class ModelEMA:
    def __init__(self, model, ema, decay):
        self.module, self.ema, self.decay, self.updates = model, ema, decay, 0

    @paddle.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for slow, fast in zip(self.ema.parameters(), self.module.parameters(), strict=True):
            slow.set_value(slow * decay + fast * (1 - decay))


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.val, self.sum, self.count = value, self.sum + value * n, self.count + n
        self.avg = self.sum / self.count


class MeanTeacher(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Points(), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(Points(9), batch_size=4)

    def setup_model(self):
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1D(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
        )
        self.teacher = copy.deepcopy(self.model)
        for parameter in self.teacher.parameters():
            parameter.stop_gradient = True
        self.ema = ModelEMA(self.model, self.teacher, 0.95)
        schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=20)
        self.optimizer = paddle.optimizer.Momentum(schedule, parameters=self.model.parameters())
        self.meters = {"supervised": AverageMeter(), "consistency": AverageMeter()}

    def train_batch(self):
        one, other, labels, known = self.read_batch()
        logits = self.model(one)
        supervised = (F.cross_entropy(logits, labels, reduction="none").flatten() * known).mean()
        consistency = F.mse_loss(F.softmax(logits), F.softmax(self.teacher(other)).detach())
        ramp = float(np.exp(-5 * (1 - min(self.ema.updates / 15, 1)) ** 2))
        loss = supervised + ramp * consistency
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.optimizer._learning_rate.step()
        self.ema.update()
        self.meters["supervised"].update(float(supervised), len(one))
        self.meters["consistency"].update(float(consistency), len(one))
        self.log(loss=loss, ramp=ramp, mean=self.meters["supervised"].avg)

    def valid(self):
        right = sum(
            float((self.teacher(x).argmax(-1) == y).sum()) for x, _, y, _ in self.valid_batches()
        )
        return self.average({"accuracy": right / 9}, weight=9)


if __name__ == "__main__":
    main(MeanTeacher)
