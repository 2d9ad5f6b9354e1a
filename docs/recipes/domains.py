"""Validation sets of unequal size, one for each domain; each sample counts once on any ranks."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main

SIZES = {"archive": 400, "camera": 90, "tablet": 7}


class Domains(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        config.training.monitor = "worst"
        config.training.save_interval = 100
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        begin, self.valid_loaders = 0, {}
        for name, size in SIZES.items():
            part = slice(begin, begin := begin + size)
            data = TensorDataset([images[part], labels[part]])
            self.valid_loaders[name] = DataLoader(data, batch_size=50)
        data = TensorDataset([images[begin:], labels[begin:]])
        self.train_loader = DataLoader(data, batch_size=50, shuffle=True)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        results = {name: self.accuracy(loader) for name, loader in self.valid_loaders.items()}
        return {**results, "worst": min(results.values())}

    def accuracy(self, loader):
        right = count = 0
        for images, labels in self.valid_batches(loader):
            right += int((self.model(images).argmax(axis=-1) == labels).sum())
            count += len(labels)
        # A rank that has none of these batches takes part, too: weight=0, and its 0 / 1 is ignored.
        return self.average({"accuracy": right / max(count, 1)}, weight=count)["accuracy"]


if __name__ == "__main__":
    main(Domains)
