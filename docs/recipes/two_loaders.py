"""A second training loader: each update has a batch without labels, and a smaller one with them."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class SemiSupervised(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype("float32")
        self.train_loader = DataLoader(TensorDataset([images[400:]]), batch_size=64, shuffle=True)
        self.labelled = TensorDataset([images[300:400], labels[300:400]])
        self.valid_loader = DataLoader(TensorDataset([images[:300], labels[:300]]), batch_size=100)

    def read_labelled(self, batch_size=16):
        # The number of this batch among those of all ranks, from the first update on.
        number = (self.iteration - 1) * self.internals.num_shares + self.internals.share
        epoch, place = divmod(number, len(self.labelled) // batch_size)
        random = np.random.default_rng([self.config.training.seed, epoch])
        order = random.permutation(len(self.labelled))
        samples = [self.labelled[i] for i in order[place * batch_size :][:batch_size]]
        return [paddle.to_tensor(np.stack(column)) for column in zip(*samples, strict=True)]

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        for (others,) in self.micro_batches():
            images, labels = self.read_labelled()
            noisy = others + 0.2 * paddle.randn(others.shape)
            outputs = self.model(paddle.concat([images, others, noisy]))
            named, clean, shaken = outputs.split([len(images), len(others), len(others)])
            loss = F.cross_entropy(named, labels) + F.mse_loss(F.softmax(shaken), F.softmax(clean))
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers()

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(SemiSupervised)
