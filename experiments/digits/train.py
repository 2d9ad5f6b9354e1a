"""Image classification: scikit-learn's handwritten digits, 8 x 8 pixels, by a convolutional net.

`build_net`, `compute_loss` and `compute_metrics` can each be replaced in a subclass, as in
experiments/digits/macro_f1.py; they are this experiment's own idea, and not the template's.
"""

import json

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from expbase import Config, ExperimentBase, main
from expbase.extras.prediction import Prediction


class Digits(Prediction, ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"batch_size": 32})
        config.optim = Config({"lr": 2e-3})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
        rest_x, test_x, rest_y, test_y = split(images, labels)
        train_x, valid_x, train_y, valid_y = split(rest_x, rest_y)
        self.train_loader = DataLoader(
            dataset(train_x, train_y),
            batch_size=self.config.data.batch_size,
            shuffle=True,
            drop_last=True,
        )
        self.valid_loader = DataLoader(dataset(valid_x, valid_y), batch_size=100)
        self.test_loader = DataLoader(dataset(test_x, test_y), batch_size=100)

    def setup_model(self):
        self.model = self.data_parallel(self.build_net())
        self.optimizer = paddle.optimizer.Adam(
            self.config.optim.lr, parameters=self.model.parameters()
        )
        self.input_spec = [paddle.static.InputSpec([None, 1, 8, 8], "float32", "image")]

    def build_net(self):
        return paddle.nn.Sequential(
            *(paddle.nn.Conv2D(1, 16, 3, padding=1), paddle.nn.ReLU(), paddle.nn.MaxPool2D(2)),
            *(paddle.nn.Conv2D(16, 32, 3, padding=1), paddle.nn.ReLU(), paddle.nn.Flatten()),
            *(paddle.nn.Dropout(0.3), paddle.nn.Linear(512, 10)),
        )

    def compute_loss(self, outputs, labels):
        return F.cross_entropy(outputs, labels)

    def compute_metrics(self, predicted, labels):
        """Of all samples, two arrays [N], on every rank."""
        return {"accuracy": (predicted == labels).mean()}

    def train_batch(self):
        for images, labels in self.micro_batches():
            loss = self.compute_loss(self.model(images), labels)
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers()

    def valid(self):
        share = [
            (self.model(x).argmax(axis=-1).numpy(), y.numpy()) for x, y in self.valid_batches()
        ]
        batches = [batch for of_rank in self.gather(share) for batch in of_rank]
        return self.compute_metrics(*map(np.concatenate, zip(*batches, strict=True)))

    def predict_batch(self, batch):
        probabilities = F.softmax(self.model(batch[0]))
        return {"digit": probabilities.argmax(axis=-1), "probability": probabilities.max(axis=-1)}

    def on_train_end(self):
        if self.finished:  # and neither failed nor was interrupted
            if self.config.training.monitor:
                self.load_checkpoint("best")
            self.evaluate(self.test_loader)
            results = self.predict(self.test_loader)
            if self.rank == 0:
                lines = [json.dumps({name: r[name].item() for name in r}) for r in results]
                (self.output_dir / "test.jsonl").write_text("\n".join(lines) + "\n")


def split(images, labels):
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def dataset(images, labels):
    return TensorDataset([paddle.to_tensor(images), paddle.to_tensor(labels)])


if __name__ == "__main__":
    main(Digits)
