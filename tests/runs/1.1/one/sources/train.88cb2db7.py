"""What the runs beside this file were trained by: a little of everything that a run can hold.

Its numbers are small multiples of powers of two. So float32 holds each sum and each product as it
is, whatever the order of a kernel, and a continued run has the same bits on every machine. For that
the output of the batch norm, which has a square root in it, is not used: only its statistics are;
and what the averaged weights give, which warm up by other fractions, is rounded.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque
from typing import Any

import numpy as np
import paddle
from paddle.io import DataLoader, Dataset

from expbase import Config, ExperimentBase, main, on
from expbase.extras.mixins import ExponentialMovingAverage


class Numbers(Dataset):
    """Pairs of whole numbers, each with noise of its own, and what is to be made of them."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        pair = np.float32([index % 4, index % 3 - 1])
        return pair + np.random.randint(0, 2), np.float32([pair.sum(), 2])

    def __len__(self) -> int:
        return 12


class Net(paddle.nn.Layer):
    """A linear layer, and a batch norm that looks on."""

    def __init__(self) -> None:
        super().__init__()
        half = paddle.nn.initializer.Constant(0.5)
        self.linear = paddle.nn.Linear(2, 2, weight_attr=half)
        self.norm = paddle.nn.BatchNorm1D(2, momentum=0.5, weight_attr=False, bias_attr=False)

    def forward(self, pairs: Any) -> Any:
        self.norm(pairs)
        return self.linear(pairs)


class Everything(ExponentialMovingAverage, ExperimentBase):
    """Each of its attributes takes part in what is trained, so that none can be lost unseen."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.step_every = 1  # iterations; in between gradients are added up
        config.ema.decay = 0.5
        config.training.update(
            max_iteration=12, valid_interval=3, save_interval=2, log_interval=1,
            keep_last=2, monitor="valid/error", monitor_mode="min",
        )  # fmt: skip
        return config

    def setup_dataloader(self) -> None:
        self.train_loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
        self.valid_loader = DataLoader(Numbers(), batch_size=4)

    def setup_model(self) -> None:
        self.model = self.data_parallel(Net())
        self.rate = paddle.optimizer.lr.MultiStepDecay(0.125, milestones=[4, 8], gamma=0.5)
        self.optimizer = paddle.optimizer.Momentum(self.rate, 0.5, self.model.parameters())
        self.scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
        self.input_spec = [paddle.static.InputSpec([None, 2])]
        self.drawn_by_numpy = np.random.Generator(np.random.PCG64(3))
        self.drawn_by_python = random.Random(5)
        self.table = np.zeros([2, 2], "int64")
        self.tensor = paddle.zeros([2])
        self.last = deque(maxlen=3)
        self.seen: dict[str, Any] = {"updates": 0, "pair": (1, 2.5), "odd": set()}
        self.ticks = 0
        self.told = 0

    def train_batch(self) -> None:
        self.seen["updates"] += 1
        if self.iteration % 2:
            self.seen["odd"].add(self.iteration)
        self.table[self.iteration % 2] += int(self.drawn_by_numpy.bit_generator.random_raw() % 3)
        self.tensor += 1
        self.last.append(self.drawn_by_python.getrandbits(2))
        counts = [*self.seen.values(), self.table.sum(), self.tensor.sum(), self.ticks, self.told]
        whole = sum(int(one) for one in (*self.last, counts[0], len(counts[2]), *counts[3:]))
        for pairs, wanted in self.micro_batches():
            loss = (self.model(pairs) - wanted - whole % 4).abs().mean()
            self.backward(loss)
            self.log(loss=loss)
        if self.iteration % self.config.step_every == 0:
            self.step_optimizers()
        self.rate.step()
        self.log(whole=whole)

    def valid(self) -> None:
        for pairs, wanted in self.valid_batches():
            self.log(error=round(float((self.model(pairs) - wanted).abs().mean()), 3))

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"told": self.told}

    def on_load_checkpoint(self, state: dict[str, Any]) -> None:
        self.told = state["told"]

    @on("on_train_batch_end", every=2)
    def tick(self) -> None:
        self.ticks += 1
        self.told += 1

    @on("on_train_batch_end")
    def stop_if_asked(self) -> None:
        # Not by an option, which is part of the command: whoever repeats that is not to stop.
        if self.iteration == int(os.environ.get("STOP_AT", "0")):
            self.stop("it was asked for", on_all_ranks=True)

    def on_train_end(self) -> None:
        if self.iteration < self.config.training.max_iteration:  # it was stopped
            return
        results = self.evaluate(self.valid_loader)  # with the averages
        if self.rank == 0:
            tensors = self.unwrap(self.model).state_dict()
            named = {name: tensor.numpy().tolist() for name, tensor in tensors.items()}
            text = repr((sorted(named.items()), results["error"]))
            print("weights", hashlib.sha256(text.encode()).hexdigest())


if __name__ == "__main__":
    main(Everything)
