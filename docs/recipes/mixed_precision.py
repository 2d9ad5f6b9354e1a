"""Mixed precision: auto_cast round the forward, a GradScaler as an attribute."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class Mixed(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        config.amp = Config({"loss_scale": 2.0**15})
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
        self.optimizer = paddle.optimizer.Adam(2e-3, parameters=self.model.parameters())
        # On the CPU paddle has neither of the two: it would warn, and compute in float32.
        self.on_gpu = not paddle.get_device().startswith("cpu")
        scale = self.config.amp.loss_scale
        self.scaler = paddle.amp.GradScaler(enable=self.on_gpu, init_loss_scaling=scale)

    def train_batch(self):
        images, labels = self.read_batch()
        with paddle.amp.auto_cast(enable=self.on_gpu, dtype="float16"):
            loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)  # multiplied by the scale: float16 has no small numbers
        self.step_optimizers()  # divided again; a step whose gradients overflowed is left out
        self.log(loss=loss)

    def valid(self):
        for images, labels in self.valid_batches():
            right = self.model(images).argmax(axis=-1) == labels
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(Mixed)
