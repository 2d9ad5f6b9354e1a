"""Freezing and thawing: the backbone is frozen while the new head learns, and trained afterwards.

The weights come from another run: --init_model_path runs/warmup --init_partial
"""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class Freezing(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_epoch = 6
        config.optim = Config({"lr": 1e-2, "frozen_epochs": 2})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = paddle.to_tensor(images / 16, "float32")
        is_even = paddle.to_tensor(labels % 2 == 0, "int64")  # another question about them
        train, valid = [images[300:], is_even[300:]], [images[:300], is_even[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        nn = paddle.nn
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1D(64), nn.ReLU(), nn.Linear(64, 2))
        self.backbone = net[:3]
        self.freeze()
        self.model = self.data_parallel(net)
        # It has all parameters from the start, and leaves those alone that have no gradient.
        self.optimizer = paddle.optimizer.Adam(self.config.optim.lr, parameters=net.parameters())

    def freeze(self):
        for parameter in self.backbone.parameters():
            parameter.stop_gradient = True
        self.backbone.eval()  # batch norm uses its statistics, and leaves them as they are

    def thaw(self):
        for parameter in self.backbone.parameters():
            parameter.stop_gradient = False
        self.backbone.train()
        self.model = self.data_parallel(self.model)  # else ranks would not average new gradients

    def on_train_epoch_begin(self):
        if self.epoch == self.config.optim.frozen_epochs + 1:
            self.thaw()

    def train_batch(self):
        images, is_even = self.read_batch()
        loss = F.cross_entropy(self.model(images), is_even)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(Freezing)
