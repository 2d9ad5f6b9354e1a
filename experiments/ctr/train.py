"""Advertising and recommendation: a factorization machine, on clicks drawn from a known model.

The lines lie in text files, one for each day, and are read as blocks, see blocks.py. Beside the AUC
validation gives the one of the true probabilities: the best possible, which no model beats but by
luck.
"""

import fcntl
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from blocks import Blocks, index_of, write_whole
from paddle.io import DataLoader

from expbase import Config, ExperimentBase, main

# A line is `click user item hour device`, whole numbers. Remove the data folder if you change this.
SIZES = np.array([500, 200, 24, 5])
OFFSETS = np.cumsum([0, *SIZES[:-1]])  # where each field begins among all ids
NUM_IDS = int(SIZES.sum())


def interactions(weights, factors):
    """Sums over the fields and over their pairs, [N], of [N, fields, 1] and [N, fields, factors].

    Source: Rendle 2010, Factorization Machines. For arrays and for tensors.
    """
    pairs = factors.sum(1) ** 2 - (factors**2).sum(1)
    return weights.sum(1).sum(-1) + pairs.sum(-1) / 2


def click_chances(fields):
    """The true probabilities, [N], for fields [N, fields]."""
    draw = np.random.RandomState(0)  # whose numbers no version of numpy will change
    weights, factors = draw.normal(0, 0.5, [NUM_IDS, 1]), draw.normal(0, 0.5, [NUM_IDS, 4])
    ids = fields + OFFSETS
    return 1 / (1 + np.exp(1.5 - interactions(weights[ids], factors[ids])))


def draw_day(day, num_lines):
    draw = np.random.RandomState([1, day])
    fields = (draw.rand(num_lines, len(SIZES)) ** 1.5 * SIZES).astype(int)  # small ids are frequent
    clicks = draw.rand(num_lines) < click_chances(fields)
    return np.column_stack([clicks, fields])


def fields_and_clicks(blocks):
    """The batch of some blocks."""
    lines = np.concatenate(blocks)
    return lines[:, 1:], lines[:, 0].astype("float32")


def auc(scores, clicks):
    """The chance that a click scores above a line without one; a tie counts half.

    With probabilities in the place of clicks: the AUC that clicks drawn from them have on average.
    """
    _, ranks = np.unique(scores, return_inverse=True)
    ones, zeros = np.bincount(ranks, clicks), np.bincount(ranks, 1 - clicks)
    return (ones * (zeros.cumsum() - zeros / 2)).sum() / (ones.sum() * zeros.sum())


class FactorizationMachine(paddle.nn.Layer):
    def __init__(self, num_factors):
        super().__init__()
        normal = paddle.nn.initializer.Normal(0, 0.1)
        self.weights = paddle.nn.Embedding(NUM_IDS, 1, weight_attr=normal)
        self.factors = paddle.nn.Embedding(NUM_IDS, num_factors, weight_attr=normal)
        self.bias = self.create_parameter([1], is_bias=True)
        # Once: to_tensor waits until a device has done all that is queued.
        self.register_buffer("offsets", paddle.to_tensor(OFFSETS), persistable=False)

    def forward(self, fields):
        ids = fields + self.offsets
        return interactions(self.weights(ids), self.factors(ids)) + self.bias


class Clicks(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.update(max_epoch=3, log_interval=100, monitor="auc")
        config.data = Config({"days": [0, 1, 2, 3], "valid_day": 4, "test_day": 5})
        config.data.folder, config.data.lines_per_day = "runs/data", 150000  # beside this file
        config.data.block_size, config.data.batch_size = 250, 4  # lines, blocks: 1000 lines
        config.data.num_workers = 0
        config.model = Config({"num_factors": 4, "embeddings": ""})  # to start from: startup.py
        config.optim = Config({"lr": 1e-2})
        return config

    def prepare(self):
        data = self.config.data
        folder = Path(__file__).parent / data.folder / f"{data.lines_per_day}_lines"
        folder.mkdir(parents=True, exist_ok=True)
        days = [*data.days, data.valid_day, data.test_day]
        self.paths = {day: folder / f"day-{day}.txt" for day in days}
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # every rank comes here: the first one makes them
            for day, path in self.paths.items():
                if not path.exists():
                    lines = draw_day(day, data.lines_per_day)
                    write_whole(path, lambda file, lines=lines: np.savetxt(file, lines, "%d"))
                index_of(path, data.block_size)

    def setup_dataloader(self):
        data = self.config.data
        # Blocks are shuffled, not lines: so a batch has several, and a block is small.
        self.train_loader = self.loader_of(
            data.days, data.batch_size, shuffle=True, drop_last=True, num_workers=data.num_workers
        )
        self.valid_loader = self.loader_of([data.valid_day], batch_size=40)
        self.test_loader = self.loader_of([data.test_day], batch_size=40)

    def loader_of(self, days, batch_size, **options):
        paths = [self.paths[day] for day in days]
        blocks = Blocks(paths, self.config.data.block_size, 1 + len(SIZES))
        return DataLoader(blocks, batch_size=batch_size, collate_fn=fields_and_clicks, **options)

    def setup_model(self):
        self.model = self.data_parallel(FactorizationMachine(self.config.model.num_factors))
        parameters = self.model.parameters()
        self.optimizer = paddle.optimizer.Adam(self.config.optim.lr, parameters=parameters)
        self.input_spec = [paddle.static.InputSpec([None, len(SIZES)], "int64", "fields")]

    def train_batch(self):
        fields, clicks = self.read_batch()
        loss = F.binary_cross_entropy_with_logits(self.model(fields), clicks)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        share = [
            (self.model(fields).numpy(), click_chances(fields.numpy()), clicks.numpy())
            for fields, clicks in self.valid_batches()
        ]
        batches = [batch for of_rank in self.gather(share) for batch in of_rank]
        scores, chances, clicks = map(np.concatenate, zip(*batches, strict=True))
        # Of these very clicks, to compare with, and on average, without luck.
        bayes = {"bayes_auc": auc(chances, clicks), "bayes_auc_expected": auc(chances, chances)}
        return {"auc": auc(scores, clicks), **bayes}

    def on_train_end(self):
        if self.finished:
            self.evaluate(self.test_loader)


if __name__ == "__main__":
    main(Clicks)
