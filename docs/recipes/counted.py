"""Metrics that are no mean of batches, such as F1: counts add up over batches and ranks."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Confusion:
    """How often which label was taken for which."""

    def __init__(self, num_classes):
        self.counts = np.zeros([num_classes, num_classes], "int64")

    def add(self, labels, logits):
        np.add.at(self.counts, (labels.numpy(), logits.argmax(axis=-1).numpy()), 1)

    def results(self, gather):
        counts = sum(gather(self.counts))  # over the ranks, once, also where there was no batch
        right = counts.diagonal()
        f1 = 2 * right / np.maximum(counts.sum(axis=0) + counts.sum(axis=1), 1)
        worst = (counts - np.diag(right)).max()  # the most frequent confusion
        return {"accuracy": right.sum() / counts.sum(), "macro_f1": f1.mean(), "confused": worst}


class Counted(ExperimentBase):
    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=70)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        confusion = Confusion(10)
        for images, labels in self.valid_batches():
            confusion.add(labels, self.model(images))
        return confusion.results(self.gather)


if __name__ == "__main__":
    main(Counted)
