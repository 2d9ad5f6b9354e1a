"""Paddle's profiler over ten iterations, by three events; training is the same with and without."""

import paddle
import paddle.nn.functional as F
from paddle import profiler
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Profiled(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 100
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

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())

    def on_train_begin(self):
        folder = str(self.output_dir / f"profile-{self.rank}")
        self.profiler = profiler.Profiler(
            # Ten iterations of this start, after ten that are slower than the others.
            scheduler=profiler.make_scheduler(closed=9, ready=1, record=10, repeat=1),
            on_trace_ready=profiler.export_chrome_tracing(folder),
        )
        self.profiler.start()

    def on_train_batch_end(self):
        self.profiler.step()

    def on_train_end(self):
        self.profiler.stop()


if __name__ == "__main__":
    main(Profiled)
