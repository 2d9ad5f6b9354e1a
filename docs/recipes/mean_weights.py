"""The mean of the weights of the last checkpoints: tested and exported instead of the newest."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Mean(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.save_interval = 300, 20
        config.training.keep_last = 5  # the mean is that of these
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
            self.log(loss=F.cross_entropy(self.model(x), y))

    def on_train_end(self):
        if self.finished:
            self.load_mean(self.config.training.keep_last)
            self.evaluate()  # of the mean: it goes into the text log
            self.save_model(self.output_dir / "mean.safetensors")

    def load_mean(self, count):
        self.load_checkpoint("last")  # the files of the last one are there after that
        paths = sorted(self.checkpoint_dir.glob("step-*"))[-count:]
        sums = {}
        for name in self.gather([path.name for path in paths])[0]:  # those that rank 0 sees
            self.load_checkpoint(name)
            for key, weight in self.unwrap(self.model).state_dict().items():
                sums[key] = sums.get(key, 0) + weight.astype("float64") / len(paths)
        means = {key: total.astype("float32") for key, total in sums.items()}
        self.unwrap(self.model).set_state_dict(means)


if __name__ == "__main__":
    main(Mean)
