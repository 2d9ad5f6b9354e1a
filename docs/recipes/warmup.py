"""Warm-up and cosine: the learning rate rises for a while, then falls to 0 at the end."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ConfigError, ExperimentBase, main


class WarmUp(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        config.optim = Config({"lr": 1e-2, "warmup_iterations": 30})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        lr, warmup = self.config.optim.lr, self.config.optim.warmup_iterations
        # LinearWarmup counts its own steps first, so what follows has that many less.
        rest = self.total_iterations - warmup
        if rest < 1:
            raise ConfigError(f"optim.warmup_iterations: {warmup} given; the run is shorter.")
        cosine = paddle.optimizer.lr.CosineAnnealingDecay(lr, T_max=rest)
        self.schedule = paddle.optimizer.lr.LinearWarmup(cosine, warmup, start_lr=0.0, end_lr=lr)
        self.optimizer = paddle.optimizer.Adam(self.schedule, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.schedule.step()  # once per iteration: nobody else does it
        self.log(loss=loss)

    def valid(self):
        for images, labels in self.valid_batches():
            right = self.model(images).argmax(axis=-1) == labels
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(WarmUp)
