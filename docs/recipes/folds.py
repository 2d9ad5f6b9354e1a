"""k-fold and sweeps: one script, whose runs differ in config values alone; a shell loop does it."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class Fold(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.monitor = 300, "accuracy"
        config.data = Config({"fold": 0, "num_folds": 5})
        config.optim = Config({"lr": 1e-2})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        data = self.config.data
        # The same folds in all runs, whatever their training.seed.
        order = np.random.default_rng(0).permutation(len(labels))
        is_held_out = order % data.num_folds == data.fold
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
        lr = self.config.optim.lr
        self.optimizer = paddle.optimizer.Adam(lr, parameters=self.model.parameters())

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


if __name__ == "__main__":
    main(Fold)
