"""Weights alone after each epoch, in files that nothing deletes."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Kept(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_epoch = 5
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
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def on_train_epoch_end(self):  # on all ranks; rank 0 writes
        self.save_model(self.output_dir / "weights" / f"epoch-{self.epoch:04}.safetensors")

    def valid(self):
        for images, labels in self.valid_batches():
            right = self.model(images).argmax(axis=-1) == labels
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(Kept)
