"""A learning rate by hand: it rises in a short run until the loss does; a tenth of that is good."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Digits(ExperimentBase):
    """What is to be trained; its optimizer has a plain rate while a good one is looked for."""

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        self.train_loader = DataLoader(TensorDataset([images, labels]), batch_size=50, shuffle=True)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)


class Ramp(Digits):
    mean, lowest = None, (float("inf"), 0.0)

    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.update(max_iteration=100, log_interval=1, nonfinite="ignore")
        config.training.valid_interval = config.training.save_interval = 0  # a try, not to be kept
        return config

    def train_batch(self):
        share = self.iteration / self.config.training.max_iteration
        self.optimizer.set_lr(1e-6 * 1e7**share)  # from 1e-6 to 10
        super().train_batch()

    def on_log(self, metrics):
        loss = metrics["train/loss"]
        self.mean = loss if self.mean is None else 0.8 * self.mean + 0.2 * loss
        self.lowest = min(self.lowest, (self.mean, metrics["train/lr"]))
        if not self.mean < 4 * self.lowest[0]:  # nan is not, either
            self.stop("the learning rate is too high")

    def on_train_end(self):
        rate = self.lowest[1]
        self.logger.info("the loss was lowest at %.1g: try lr=%.1g", rate, rate / 10)


if __name__ == "__main__":
    main(Ramp)
