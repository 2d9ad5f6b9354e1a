"""Early stopping: the run ends when the validation has not become better for a while."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main
from expbase.extras.mixins import EarlyStopping


class Stopping(EarlyStopping, ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.monitor, config.training.monitor_mode = "loss", "min"
        config.training.valid_interval = 20
        config.early_stopping.patience = 3  # validations in a row that are not better
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[1600:], labels[1600:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(2e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))

    def on_train_end(self):
        if self.finished:  # stopped early counts as finished; a Ctrl-C does not
            self.load_checkpoint("best")
            self.evaluate()


if __name__ == "__main__":
    main(Stopping)
