"""A second training loader: each update has a batch without labels, and a smaller one with them."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class SemiSupervised(ExperimentBase):
    num_read = 0  # batches of the second loader; it changes, so it is saved

    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        self.train_loader = DataLoader(TensorDataset([images[400:]]), batch_size=64, shuffle=True)
        self.labelled = TensorDataset([images[300:400], labels[300:400]])
        self.valid_loader = DataLoader(TensorDataset([images[:300], labels[:300]]), batch_size=100)

    def read_labelled(self, batch_size=16):
        epoch, number = divmod(self.num_read, len(self.labelled) // batch_size)
        seed = [self.config.training.seed, self.rank, epoch]
        order = np.random.default_rng(seed).permutation(len(self.labelled))
        samples = [self.labelled[i] for i in order[number * batch_size :][:batch_size]]
        self.num_read += 1
        return [paddle.stack(column) for column in zip(*samples, strict=True)]

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        (others,) = self.read_batch()
        images, labels = self.read_labelled()
        noisy = others + 0.2 * paddle.randn(others.shape)
        outputs = self.model(paddle.concat([images, others, noisy]))
        named, clean, shaken = outputs.split([len(images), len(others), len(others)])
        loss = F.cross_entropy(named, labels) + F.mse_loss(F.softmax(shaken), F.softmax(clean))
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(SemiSupervised)
