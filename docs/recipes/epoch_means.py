"""The mean of the loss over each epoch, in the log and as a curve, however it was killed."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class EpochMeans(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_epoch = 10
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())
        self.total, self.count = paddle.zeros([]), 0  # they change, so a checkpoint has them

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)
        self.total += loss.detach() * len(labels)  # a tensor: nothing waits for the device
        self.count += len(labels)

    def on_train_epoch_end(self):
        means = self.average({"loss": self.total / self.count}, weight=self.count)  # of all ranks
        self.logger.info("[%d] epoch %d: mean loss %.4f", self.iteration, self.epoch, means["loss"])
        self.visualizer.add_scalar("epoch/loss", means["loss"], self.epoch)
        self.total, self.count = paddle.zeros([]), 0

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(EpochMeans)
