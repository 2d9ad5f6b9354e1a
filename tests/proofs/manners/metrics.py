"""Metrics of paddle and of one's own, kept over an epoch, with tables in closures."""

from collections import Counter

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset
from paddle.metric import Accuracy, Auc, Metric, Precision, Recall

from expbase import ExperimentBase, main

PALETTE = {0: "red", 1: "green", 2: "blue"}


class ConfusionMatrix(Metric):
    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.reset()

    def compute(self, logits, labels):
        return logits.argmax(-1), labels

    def update(self, predicted, labels):
        np.add.at(self.matrix, (labels.flatten().numpy(), predicted.flatten().numpy()), 1)
        return self.accumulate()

    def accumulate(self):
        return float(np.diag(self.matrix).sum() / max(self.matrix.sum(), 1))

    def reset(self):
        self.matrix = np.zeros([self.num_classes] * 2, "int64")

    def name(self):
        return "confusion"


class Several:
    def __init__(self, **metrics):
        self.metrics, self.history = metrics, []

    def reset(self):
        self.history.append(self.values())
        for metric in self.metrics.values():
            metric.reset()

    def values(self):
        found = {name: np.mean(metric.accumulate()) for name, metric in self.metrics.items()}
        return {name: float(value) for name, value in found.items()}


def make_namer(palette):
    backwards = {name: number for number, name in palette.items()}

    def name_of(number):
        return palette[int(number)]

    name_of.backwards = backwards
    return name_of


class Colors(Dataset):
    def __getitem__(self, index):
        color = np.random.RandomState(index).rand(3)
        seen = color + np.random.randn(3) / 10
        return seen.astype("float32"), np.array([color.argmax()])

    def __len__(self):
        return 26


class Classified(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Colors(), batch_size=4, shuffle=True, drop_last=True)
        self.valid_loader = DataLoader(Colors(), batch_size=9)

    def setup_model(self):
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.optimizer = paddle.optimizer.Adadelta(0.5, parameters=self.model.parameters())
        self.metrics = [Accuracy(topk=(1, 2)), ConfusionMatrix(3)]
        self.of_green = Several(auc=Auc(num_thresholds=63), precision=Precision(), recall=Recall())
        self.name_of, self.named = make_namer(PALETTE), Counter()

    def train_batch(self):
        colors, labels = self.read_batch()
        logits = self.model(colors)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        for metric in self.metrics:
            computed = metric.compute(logits, labels)
            metric.update(*(computed if isinstance(computed, tuple) else [computed]))
        green, is_green = F.softmax(logits)[:, 1].numpy(), (labels == 1).numpy().astype("int64")
        self.of_green.metrics["auc"].update(np.stack([1 - green, green], axis=1), is_green)
        for name in ("precision", "recall"):
            self.of_green.metrics[name].update(green[:, None], is_green)
        self.named.update(self.name_of(label) for label in labels.flatten())
        top1, top2 = self.metrics[0].accumulate()
        self.log(self.of_green.values(), loss=loss, top1=top1, top2=top2, red=self.named["red"])

    def on_train_epoch_end(self):
        self.of_green.reset()
        for metric in self.metrics:
            metric.reset()

    def valid(self):
        metric = ConfusionMatrix(3)
        for colors, labels in self.valid_batches():
            metric.update(*metric.compute(self.model(colors), labels))
        return {"accuracy": metric.accumulate(), "epochs": len(self.of_green.history)}


if __name__ == "__main__":
    main(Classified)
