"""An experiment of shares, for shares_of_ranks.py: whatever could depend on how many processes.

Three nets, by `data.net`: "classifier" has batch norm, dropout, draws of numpy and paddle in the
data set and in train_batch, clipping, a GradScaler, averaged weights, a schedule that follows the
validation; "gan" two models and two updates; "recurrent" carries its hidden state on, for each
share, has statistics that first move in the eighth update, and trains a layer from the tenth on.
The last round of an epoch has to be filled.

    python tests/proofs/many.py --nprocs 2 --output runs/many data.net=gan training.shares=4
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.amp import grad_scaler
from paddle.io import DataLoader, Dataset, IterableDataset

from expbase import Config, ExperimentBase, main
from expbase.extras.mixins import ExponentialMovingAverage, GradientClipping

SAMPLES = 78
BATCH_SIZE = 4


class Pictures(Dataset):
    """Small pictures with noise that is drawn anew whenever one is looked at."""

    def __init__(self, size: int) -> None:
        generator = np.random.RandomState(7)
        self.pictures = generator.randn(size, 1, 6, 6).astype("float32")
        self.labels = (self.pictures.sum(axis=(1, 2, 3)) > 0).astype("int64")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        noise = np.random.randn(1, 6, 6) / 10 + paddle.randn([1]).numpy() / 10
        return (self.pictures[index] + noise).astype("float32"), self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


class Stream(IterableDataset):
    """The same pictures without a length."""

    def __iter__(self) -> Iterator[Any]:
        pictures = Pictures(SAMPLES)
        return (pictures[index] for index in range(SAMPLES))


class Many(ExponentialMovingAverage, GradientClipping, ExperimentBase):
    """The parts that all of the nets have."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"net": "classifier", "workers": 0, "stream": False})
        config.training.update(shares=4, monitor="loss", monitor_mode="min")
        return config

    def setup_dataloader(self) -> None:
        data = Stream() if self.config.data.stream else Pictures(SAMPLES)
        order = {} if self.config.data.stream else {"shuffle": True}
        self.train_loader = DataLoader(
            data, batch_size=BATCH_SIZE, num_workers=self.config.data.workers, **order
        )
        self.valid_loader = DataLoader(Pictures(23), batch_size=BATCH_SIZE)

    def setup_model(self) -> None:
        make, self.update = {
            "classifier": (self.make_classifier, self.update_classifier),
            "gan": (self.make_gan, self.update_gan),
            "recurrent": (self.make_recurrent, self.update_recurrent),
        }[self.config.data.net]
        make()
        self.scale = 1.0

    def train_batch(self) -> None:
        # Drawn before the batches and after them: on all ranks the same.
        self.scale = 0.9 * self.scale + 0.2 * float(np.random.rand())
        self.update()
        with paddle.no_grad():
            noise = 1 + 0.001 * float(paddle.randn([]))
            self.model.parameters()[0].multiply_(paddle.to_tensor(noise))
        self.log(scale=self.scale)

    def make_classifier(self) -> None:
        net = paddle.nn.Sequential(
            paddle.nn.Conv2D(1, 6, 3), paddle.nn.BatchNorm2D(6), paddle.nn.ReLU(),
            paddle.nn.Flatten(), paddle.nn.Dropout(0.2), paddle.nn.Linear(96, 2),
        )  # fmt: skip
        net[0].bias.stop_gradient = True
        self.model = self.data_parallel(net)
        switch_scalers_on()
        self.scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=5)
        self.plateau = paddle.optimizer.lr.ReduceOnPlateau(0.01, patience=1)
        self.optimizer = paddle.optimizer.Adam(self.plateau, parameters=net.parameters())

    def update_classifier(self) -> None:
        for pictures, labels in self.micro_batches():
            mixed = pictures * float(np.random.rand()) + 0.01 * paddle.randn(pictures.shape)
            loss = F.cross_entropy(self.model(mixed), labels)
            # At times infinite in one of the shares.
            is_over = self.internals.share == 1 and self.iteration % 7 == 3
            self.backward(loss * (math.inf if is_over else self.scale))
            self.log(loss=loss)
        self.step_optimizers()

    def make_gan(self) -> None:
        self.model = paddle.nn.Sequential(
            paddle.nn.Linear(8, 36), paddle.nn.BatchNorm1D(36), paddle.nn.Linear(36, 36)
        )
        self.judge = paddle.nn.Sequential(
            paddle.nn.Linear(36, 16), paddle.nn.BatchNorm1D(16), paddle.nn.ReLU(),
            paddle.nn.Dropout(0.2), paddle.nn.Linear(16, 1),
        )  # fmt: skip
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())
        schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.01, T_max=30)
        self.j_optimizer = paddle.optimizer.Momentum(schedule, parameters=self.judge.parameters())

    def update_gan(self) -> None:
        for pictures, _ in self.micro_batches():
            fake = self.model(paddle.randn([len(pictures), 8])).detach()
            real = self.judge(pictures.flatten(1))
            loss = F.softplus(-real).mean()
            self.backward(loss)
            self.backward(F.softplus(self.judge(fake)).mean())
            self.log(judge=loss)
        self.step_optimizers(self.j_optimizer)
        for pictures, _ in self.micro_batches():
            loss = F.softplus(-self.judge(self.model(paddle.randn([len(pictures), 8])))).mean()
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers(self.optimizer)
        self.j_optimizer.clear_grad()
        self.j_optimizer._learning_rate.step()

    def make_recurrent(self) -> None:
        self.model = paddle.nn.LSTM(6, 8)
        self.head = paddle.nn.Linear(8, 2)
        self.late = paddle.nn.BatchNorm1D(2)
        for parameter in self.head.parameters():
            parameter.stop_gradient = True
        layers = (self.model, self.head, self.late)
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=parameters)
        self.hidden: Any = None
        self.register_stateful("hidden", by_share=True)

    def update_recurrent(self) -> None:
        if self.iteration == 10:
            for parameter in self.head.parameters():
                parameter.stop_gradient = False
        for pictures, labels in self.micro_batches():
            outputs, hidden = self.model(pictures.squeeze(1), self.carried(len(pictures)))
            logits = self.head(outputs[:, -1])
            logits = self.late(logits) if self.iteration >= 8 else logits
            loss = F.cross_entropy(logits, labels)
            self.backward(loss)
            self.hidden = [part.detach().mean(axis=1, keepdim=True) for part in hidden]
            self.log(loss=loss)
        self.step_optimizers()

    def carried(self, size: int) -> Any:
        """The hidden state of the share for a batch of this size."""
        return self.hidden and tuple(part.expand([1, size, 8]) for part in self.hidden)

    def valid(self) -> Mapping[str, Any]:
        total = count = 0.0
        for pictures, labels in self.valid_batches():
            total += float(self.outputs(pictures, labels).sum())
            count += len(labels)
        return self.average({"loss": total / count}, weight=count)

    def outputs(self, pictures: Any, labels: Any) -> Any:
        """A number for each sample."""
        if self.config.data.net == "gan":
            return self.judge(self.model(paddle.randn([len(pictures), 8])))
        if self.config.data.net == "recurrent":
            return self.head(self.model(pictures.squeeze(1))[0][:, -1])
        return F.cross_entropy(self.model(pictures), labels, reduction="none")

    def on_evaluate_end(self, results: Mapping[str, float]) -> None:
        if self.config.data.net == "classifier":
            self.plateau.step(results["loss"])


def switch_scalers_on() -> None:
    """Of this process, on the CPU, too, where paddle switches them off."""
    tracer = SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    grad_scaler._dygraph_tracer = lambda: tracer
    grad_scaler.amp_global_state().amp_dtype = "float16"
    # Paddle's own message on an overflow makes a float of shape [1], which numpy 2.4 refuses.
    grad_scaler.float = lambda number: np.asarray(number).item()


if __name__ == "__main__":
    main(Many)
