"""Adam at first, then SGD, for one model, as in SWATS (Keskar and Socher, arXiv:1712.07628)."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class TwoOptimizers(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        config.optim = Config({"switch_loss": 0.2})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train = TensorDataset([images[300:], labels[300:]])
        self.train_loader = DataLoader(train, batch_size=64, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset([images[:300], labels[:300]]), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        # Both are made here, whichever steps: a start must have what its checkpoint has.
        self.adam = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())
        self.sgd = paddle.optimizer.Momentum(5e-2, parameters=self.model.parameters())
        self.mean_loss, self.uses_sgd = 2.3, False  # both change, so they are saved

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers(self.sgd if self.uses_sgd else self.adam)
        self.log(loss=loss, uses_sgd=self.uses_sgd)
        # Of all ranks, so that they switch together.
        (mean,) = self.average({"loss": loss}, weight=1).values()
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * mean
        self.uses_sgd = self.uses_sgd or self.mean_loss < self.config.optim.switch_loss

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(TwoOptimizers)
