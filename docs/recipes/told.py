"""A message to a chat when a run ends, and why: finished, stopped, by a signal, failed."""

import json
import os
import urllib.request

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Told(ExperimentBase):
    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))

    def terminal(self):  # once, however the start ends; not after a kill -9
        address = os.environ.get("WEBHOOK")
        if address and self.rank == 0 and not self.internals.read_only:
            text = f"{self.output_dir.name}: {self.end_reason}, at iteration {self.iteration}"
            body = json.dumps({"text": text}).encode()
            request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            try:
                urllib.request.urlopen(request, timeout=10).close()
            except OSError as error:
                self.logger.warning("no message was sent: %s", error)


if __name__ == "__main__":
    main(Told)
