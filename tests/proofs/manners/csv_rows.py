"""Tables beside the log: a CSV file with a row for each update, opened when the first one comes."""

import contextlib
import csv
import json
import tempfile
import time
from dataclasses import asdict, dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from expbase import ExperimentBase, main


@dataclass
class Row:
    step: int
    loss: float
    grad_norm: float
    seconds: float


class CsvLogger:
    """As Keras has it: the columns are those of the first row."""

    def __init__(self, path):
        self.path, self.writer, self.keys, self.file = path, None, None, None
        self.rows_written = 0

    def write(self, row):
        if self.file is None:
            is_new = not self.path.exists()
            self.file, self.keys = open(self.path, "a", newline=""), sorted(row)
            self.writer = csv.DictWriter(self.file, self.keys)
            if is_new:
                self.writer.writeheader()
        self.writer.writerow(row)
        self.file.flush()
        self.rows_written += 1


class Table:
    """Rows in memory, written and forgotten when there are enough; a file for each time."""

    def __init__(self, folder, every=6):
        self.folder, self.every, self.number, self.rows = folder, every, 0, []

    def add(self, *cells):
        self.rows.append(cells)
        if len(self.rows) == self.every:
            path = self.folder / f"table-{self.number:03d}.tsv"
            with open(path, "w") as self.last_file:
                csv.writer(self.last_file, dialect="excel-tab").writerows(self.rows)
            self.number += 1
            self.rows.clear()


class Regression(ExperimentBase):
    def setup_dataloader(self):
        points = np.random.RandomState(5).randn(24, 4).astype("float32")
        wanted = np.abs(points).max(1, keepdims=True)
        data = TensorDataset([paddle.to_tensor(points), paddle.to_tensor(wanted)])
        self.train_loader = DataLoader(data, batch_size=5, shuffle=True)
        self.valid_loader = DataLoader(data, batch_size=12)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(4, 10), nn.ELU(), nn.Dropout(0.1), nn.Linear(10, 1))
        self.optimizer = paddle.optimizer.SGD(0.05, parameters=self.model.parameters())
        self.exits = contextlib.ExitStack()
        self.scratch = self.exits.enter_context(tempfile.TemporaryDirectory())
        self.csv, self.table = CsvLogger(self.output_dir / "rows.csv"), Table(self.output_dir)
        self.lines = self.exits.enter_context((self.output_dir / "rows.jsonl").open("a"))
        self.row, self.last_time, self.predictions = None, time.time(), None

    def train_batch(self):
        points, wanted = self.read_batch()
        loss = F.l1_loss(self.model(points), wanted)
        loss.backward()
        norm = float(sum((p.grad**2).sum() for p in self.model.parameters())) ** 0.5
        self.optimizer.step()
        self.optimizer.clear_grad()
        now = time.time()
        self.row = Row(self.iteration, float(loss), norm, now - self.last_time)
        self.last_time = now
        self.csv.write(asdict(self.row))
        self.table.add(self.iteration, f"{norm:.4f}", now)
        print(json.dumps(asdict(self.row)), file=self.lines, flush=True)
        self.log(loss=loss, norm=norm, rows=len(self.table.rows))

    def valid(self):
        with open(self.output_dir / f"predicted-{self.iteration}.csv", "w") as self.predictions:
            for points, wanted in self.valid_batches():
                predicted = self.model(points)
                np.savetxt(self.predictions, np.hstack([wanted, predicted]), "%.5f", ",")
                self.log(error=F.l1_loss(predicted, wanted))

    def terminal(self):
        self.exits.close()


if __name__ == "__main__":
    main(Regression)
