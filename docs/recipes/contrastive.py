"""Contrastive learning with a queue of keys, as in MoCo (He and others, arXiv:1911.05722)."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


def encoder():
    return paddle.nn.Sequential(
        paddle.nn.Linear(64, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, 16)
    )


class Contrastive(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 300, 0
        config.moco = Config({"queue": 512, "momentum": 0.99, "temperature": 0.1, "noise": 0.2})
        return config

    def setup_dataloader(self):
        images = (load_digits().data / 16).astype("float32")
        # Whole batches only: the queue is moved on by a batch at a time.
        self.train_loader = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)

    def setup_model(self):
        self.model, self.keys = self.data_parallel(encoder()), encoder()
        self.keys.set_state_dict(self.unwrap(self.model).state_dict())
        for parameter in self.keys.parameters():
            parameter.stop_gradient = True  # it follows the model, and no optimizer moves it
        self.optimizer = paddle.optimizer.Adam(1e-3, parameters=self.model.parameters())
        self.queue = F.normalize(paddle.randn([self.config.moco.queue, 16]))

    def train_batch(self):
        moco, images = self.config.moco, self.read_batch()
        views = [images + moco.noise * paddle.randn(images.shape) for _ in range(2)]
        queries = F.normalize(self.model(views[0]))
        with paddle.no_grad():
            for key, own in zip(self.keys.parameters(), self.model.parameters(), strict=True):
                key.set_value(moco.momentum * key + (1 - moco.momentum) * own)
            keys = F.normalize(self.keys(views[1]))
        right = (queries * keys).sum(axis=-1, keepdim=True)
        logits = paddle.concat([right, queries @ self.queue.T], axis=-1) / moco.temperature
        loss = F.cross_entropy(logits, paddle.zeros([len(images)], "int64"))
        self.backward(loss)
        self.step_optimizers()
        self.queue = paddle.concat([keys, self.queue])[: moco.queue]  # the oldest ones leave
        self.log(loss=loss, accuracy=(logits.argmax(axis=-1) == 0).astype("float32").mean())

    def valid(self):
        """Nothing: what the features are good for is a question to another experiment."""


if __name__ == "__main__":
    main(Contrastive)
