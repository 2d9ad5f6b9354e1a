"""Another batch size, or more data, in the middle of a run: stop it, and continue with --force."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class MidRun(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        config.data = Config({"batch_size": 20, "num_samples": 1000})
        config.optim = Config({"lr": 1e-2})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        data = self.config.data
        train = TensorDataset([x[300 : 300 + data.num_samples] for x in (images, labels)])
        self.train_loader = DataLoader(train, batch_size=data.batch_size, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset([images[:300], labels[:300]]), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        lr = self.config.optim.lr
        # Training does not change it, so a start that is given another one has that.
        self.optimizer = paddle.optimizer.Adam(lr, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(MidRun)
