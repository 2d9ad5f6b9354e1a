"""Handwritten digits, 8 x 8 pixels: scikit-learn's bundled data, a small convolutional net."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from expbase import Config, ExperimentBase, main


class Digits(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"batch_size": 32})
        config.optim = Config({"lr": 2e-3})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
        parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
        train_x, test_x, train_y, test_y = map(paddle.to_tensor, parts)
        batch_size = self.config.data.batch_size
        self.train_loader = DataLoader(
            TensorDataset([train_x, train_y]), batch_size=batch_size, shuffle=True, drop_last=True
        )
        self.valid_loader = DataLoader(TensorDataset([test_x, test_y]), batch_size=100)

    def setup_model(self):
        net = paddle.nn.Sequential(
            *(paddle.nn.Conv2D(1, 16, 3, padding=1), paddle.nn.ReLU(), paddle.nn.MaxPool2D(2)),
            *(paddle.nn.Conv2D(16, 32, 3, padding=1), paddle.nn.ReLU(), paddle.nn.Flatten()),
            *(paddle.nn.Dropout(0.3), paddle.nn.Linear(512, 10)),
        )
        self.model = self.data_parallel(net)
        self.optimizer = paddle.optimizer.Adam(self.config.optim.lr, parameters=net.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)

    def valid(self):
        right = total = 0
        for images, labels in self.valid_batches():
            right += int((self.model(images).argmax(axis=-1) == labels).sum())
            total += len(labels)
        return self.average({"accuracy": right / max(total, 1)}, weight=total)


if __name__ == "__main__":
    main(Digits)
