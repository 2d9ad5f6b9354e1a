"""A curriculum: noise on the images that grows from epoch to epoch."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class NoisyDigits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels, self.noise = images, labels, 0.0

    def __getitem__(self, index):
        noise = self.noise * np.random.randn(64).astype("float32")
        return self.images[index] + noise, self.labels[index]

    def __len__(self):
        return len(self.images)


class Curriculum(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype("float32")
        data = NoisyDigits(images[300:], labels[300:])
        self.train_loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=1)
        valid = TensorDataset([paddle.to_tensor(x[:300]) for x in (images, labels)])
        self.valid_loader = DataLoader(valid, batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def on_train_epoch_begin(self):
        self.train_loader.dataset.noise += 0.05  # it changes, so it is saved

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss, noise=self.train_loader.dataset.noise)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(Curriculum)
