"""A batch that grows, instead of a rate that falls (Smith and others, arXiv:1711.00489)."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class GrowingBatch(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 100
        config.data = Config({"batch_size": 16, "most": 128})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train = TensorDataset([images[300:], labels[300:]])
        self.train_loader = DataLoader(train, batch_size=self.config.data.batch_size, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset([images[:300], labels[:300]]), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=self.model.parameters())

    def on_train_epoch_begin(self):
        data = self.config.data
        size = min(data.batch_size * 2 ** (self.epoch - 1), data.most)
        self.train_loader.batch_sampler.batch_size = size  # the epoch is cut into batches by it

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss, batch_size=len(images))

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(GrowingBatch)
