"""Distillation: a small model learns from a large one, which is trained already and stays as it is.

The large one is taken from a run of warmup.py: --data runs/warmup
"""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


def network(size):
    layers = paddle.nn.Linear(64, size), paddle.nn.ReLU(), paddle.nn.Linear(size, 10)
    return paddle.nn.Sequential(*layers)


class Distillation(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        config.distillation = Config({"temperature": 4.0})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        self.judge = network(64)
        self.load_model(self.args.data, into="judge")
        self.judge.eval()
        for parameter in self.judge.parameters():
            parameter.stop_gradient = True
        self.exclude_from_state("judge")  # it is read from its own run at each start
        self.model = self.data_parallel(network(8))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, _ = self.read_batch()
        warmth = self.config.distillation.temperature
        judgement = F.softmax(self.judge(images) / warmth)
        loss = F.cross_entropy(self.model(images) / warmth, judgement, soft_label=True)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(Distillation)
