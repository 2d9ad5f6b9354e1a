"""What matters, in objects that hold a lock, a logger, a file or a pool of threads."""

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import BatchSampler, DataLoader, Dataset, Sampler

from expbase import ExperimentBase, main

logger = logging.getLogger(__name__)


class Replay:
    """Many may write into it, so there is a lock."""

    def __init__(self, capacity):
        self.items, self.lock = deque(maxlen=capacity), threading.Lock()
        self.not_empty, self.added = threading.Condition(self.lock), 0

    def add(self, item):
        with self.not_empty:
            self.items.append(item)
            self.added += 1
            self.not_empty.notify()

    def sample(self):
        with self.lock:
            return self.items[np.random.randint(len(self.items))]


class Plateau:
    """Waits for a better loss; tells its own logger of it."""

    def __init__(self, patience):
        self.logger, self.patience = logger.getChild("plateau"), patience
        self.best, self.num_bad, self.factor = float("inf"), 0, 1.0

    def step(self, loss):
        self.num_bad = 0 if loss < self.best else self.num_bad + 1
        self.best = min(self.best, loss)
        if self.num_bad >= self.patience:
            self.factor, self.num_bad = self.factor / 2, 0
            self.logger.info("the factor is %s", self.factor)


class Journal:
    """Writes what it is told, and knows what it was told; the next update asks."""

    def __init__(self, path):
        self.file, self.total, self.told = path.open("a"), 0.0, []

    def tell(self, value):
        self.file.write(f"{value}\n")
        self.total += value
        self.told.append(value)


class HardSampler(Sampler):
    """Prefers what was hard; weights come from a pool of threads."""

    def __init__(self, size):
        self.weights, self.pool, self.rounds = np.ones(size), ThreadPoolExecutor(2), 0

    def harden(self, indices, losses):
        for index, loss in zip(indices, self.pool.map(lambda x: 0.1 + x, losses), strict=True):
            self.weights[index] = loss

    def __iter__(self):
        self.rounds += 1
        chances = self.weights / self.weights.sum()
        yield from np.random.choice(len(chances), len(chances), p=chances).tolist()

    def __len__(self):
        return len(self.weights)


class Points(Dataset):
    def __getitem__(self, index):
        point = np.random.RandomState(index).randn(4).astype("float32")
        return point, np.sin(point[:1] * point[1:2]), index

    def __len__(self):
        return 20


class Held(ExperimentBase):
    def setup_dataloader(self):
        self.sampler = HardSampler(20)
        batches = BatchSampler(sampler=self.sampler, batch_size=4)
        self.train_loader = DataLoader(Points(), batch_sampler=batches)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = paddle.optimizer.Adam(0.02, parameters=self.model.parameters())
        self.replay, self.plateau = Replay(6), Plateau(2)
        self.journal = Journal(self.output_dir / "journal.txt")

    def train_batch(self):
        points, wanted, indices = self.read_batch()
        self.replay.add((points, wanted))
        errors = F.mse_loss(self.model(points), wanted, reduction="none").flatten()
        old, old_wanted = self.replay.sample()
        again = F.mse_loss(self.model(old), old_wanted)
        loss = (errors.mean() + again) * (1 + self.journal.total / 9) * self.plateau.factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.sampler.harden(indices.tolist(), errors.tolist())
        self.plateau.step(float(loss))
        self.journal.tell(round(float(errors.mean()), 3))
        self.log(loss=loss, factor=self.plateau.factor, added=self.replay.added)
        self.log(rounds=self.sampler.rounds, told=len(self.journal.told))

    def valid(self):
        return {"best": self.plateau.best, "held": len(self.replay.items)}


if __name__ == "__main__":
    main(Held)
