"""The best checkpoint: kept while training, tested at its end, used afterwards."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Best(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.monitor = 300, "accuracy"
        # Each validation at a checkpoint: the best one is one of these.
        config.training.valid_interval = 50
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid, test = ([x[part] for x in (images, labels)] for part in PARTS)
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)
        self.test_loader = DataLoader(TensorDataset(test), batch_size=100)

    def setup_model(self):
        layers = paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())
        self.input_spec = [paddle.static.InputSpec([None, 64])]  # for --export best

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())

    def on_train_end(self):
        if self.finished:  # this event comes after a failure and a Ctrl-C, too
            self.load_checkpoint("best")
            self.evaluate(self.test_loader)


PARTS = slice(600, None), slice(300), slice(300, 600)


def best_model(output):
    """The model of a run, as it was at its best; for another script, or a notebook."""
    return main(Best, argv=["--output", output, "--evaluate", "best"]).model


if __name__ == "__main__":
    main(Best)
