"""A model and a loss under paddle.jit.to_static, and functions that close over constant tables."""

import functools
import operator

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset
from paddle.static import InputSpec

from expbase import ExperimentBase, main

LABELS = ("low", "middle", "high")


@paddle.jit.to_static
def focal_loss(logits, labels, weights, gamma: float = 2.0):
    chosen = paddle.take_along_axis(F.log_softmax(logits), labels.unsqueeze(-1), 1).squeeze(-1)
    return -(weights * (1 - chosen.exp()) ** gamma * chosen).mean()


def make_schedule(table):
    """The rate of a step, from a table of (until, rate)."""
    bounds, rates = [until for until, _ in table], [rate for _, rate in table]

    def rate_of(step):
        return rates[min(np.searchsorted(bounds, step, side="right"), len(rates) - 1)]

    return rate_of


def make_weighting(counts):
    table = {name: 1 / count for name, count in counts.items()}
    total = sum(table.values())
    weights = paddle.to_tensor([table[name] / total * len(table) for name in LABELS])

    def weigh(labels):
        return paddle.gather(weights, labels)

    return weigh


def compose(*functions):
    return lambda x: functools.reduce(lambda value, function: function(value), functions, x)


normalize = compose(functools.partial(np.add, -0.5), operator.methodcaller("round", 3))


class Attention(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.score, self.drop = nn.Linear(width, 1), nn.Dropout(0.1)

    def forward(self, x):
        if x.shape[1] > 4:  # of a tensor's shape: for the compiler
            x = x[:, 1:]
        return (F.softmax(self.score(x), axis=1) * self.drop(x)).sum(axis=1)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh())
        self.pool, self.head = Attention(8), nn.Linear(8, len(LABELS))

    def forward(self, x):
        return self.head(self.pool(self.body(x)))

    @paddle.jit.to_static(input_spec=[InputSpec([None, None, 3], "float32")])
    def embed(self, x):
        return F.normalize(self.pool(self.body(x)))


class Sequences(Dataset):
    def __getitem__(self, index):
        values = normalize(np.random.RandomState(index).rand(6, 3)).astype("float32")
        return values + np.float32(np.random.randn()) / 10, np.digitize(values.sum(), [-2, 2])

    def __len__(self):
        return 22


class Compiled(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Sequences(), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(Sequences(), batch_size=11)

    def setup_model(self):
        self.model = paddle.jit.to_static(Net())
        rate_of = make_schedule([(5, 0.02), (12, 0.01), (10**9, 0.005)])
        self.lr = paddle.optimizer.lr.LambdaDecay(1.0, rate_of)
        self.optimizer = paddle.optimizer.Adam(self.lr, parameters=self.model.parameters())
        self.weigh = make_weighting({"low": 7, "middle": 9, "high": 6})

    def train_batch(self):
        values, labels = self.read_batch()
        loss = focal_loss(self.model(values), labels, self.weigh(labels))
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.lr.step()
        self.log(loss=loss)

    def valid(self):
        for values, labels in self.valid_batches():
            alike = self.model.embed(values) @ self.model.embed(values).t()
            self.log(right=(self.model(values).argmax(-1) == labels).astype("float32").mean())
            self.log(alike=alike.mean())


if __name__ == "__main__":
    main(Compiled)
