"""Counters of time: meters of batches, an estimate of the end, stamps of all types of the clock."""

import collections
import contextlib
import datetime
import time
from fractions import Fraction

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class SmoothedValue:
    def __init__(self, window_size=5):
        self.deque = collections.deque(maxlen=window_size)
        self.count, self.total = 0, 0.0

    def update(self, value):
        self.deque.append(value)
        self.count, self.total = self.count + 1, self.total + value


class Timer:
    """Of a name; starts and stops as often as one likes."""

    def __init__(self, name):
        self.name_, self.elapsed_, self.started_, self.start_time = name, 0.0, False, None

    def start(self):
        assert not self.started_
        self.start_time, self.started_ = time.perf_counter(), True

    def stop(self):
        self.elapsed_ += time.perf_counter() - self.start_time
        self.start_time, self.started_ = None, False


class Timers(dict):
    def __missing__(self, name):
        self[name] = Timer(name)
        return self[name]

    @contextlib.contextmanager
    def measure(self, name):
        self[name].start()
        yield
        self[name].stop()


class Points(Dataset):
    def __getitem__(self, index):
        point = np.random.RandomState(index).randn(5).astype("float32")
        return point, np.tanh(point.sum(keepdims=True))

    def __len__(self):
        return 24


class Timed(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Points(), batch_size=4, shuffle=True)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 1))
        self.optimizer = paddle.optimizer.Adagrad(0.05, parameters=self.model.parameters())
        self.timers, self.batch_time, self.data_time = Timers(), SmoothedValue(), SmoothedValue(3)
        self.meters = collections.defaultdict(SmoothedValue)
        self.started_at, self.eta = datetime.datetime.now(), None
        self.end, self.times, self.last_step_at = time.perf_counter(), None, None
        self.progress, self.speed, self.cpu = Fraction(0), np.float64(0), time.process_time_ns()

    def train_batch(self):
        with self.timers.measure("data"):
            points, wanted = self.read_batch()
        self.data_time.update(time.perf_counter() - self.end)
        with self.timers.measure("forward"):
            loss = F.smooth_l1_loss(self.model(points), wanted)
        with self.timers.measure("backward"):
            loss.backward()
        self.timers["optimizer"].start()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.timers["optimizer"].stop()
        self.batch_time.update(time.perf_counter() - self.end)
        self.meters["loss"].update(float(loss))
        self.meters[f"loss/{self.iteration // 8}"].update(float(loss))
        self.tell_time()
        self.end = time.perf_counter()
        self.log(loss=loss, median=float(np.median(self.meters["loss"].deque)))

    def tell_time(self):
        total = self.config.training.max_iteration
        left = total - self.iteration
        self.eta = datetime.timedelta(seconds=left * self.batch_time.total / self.batch_time.count)
        self.last_step_at = datetime.datetime.now(datetime.timezone.utc)
        self.finishes_at = np.datetime64(datetime.datetime.now() + self.eta)
        self.progress = Fraction(self.iteration, total)
        self.speed = np.float64(4) / max(self.batch_time.deque)
        self.times, self.local = time.get_clock_info("monotonic"), time.localtime()
        self.line = f"{self.iteration} eta {self.eta} {[*self.timers]}"

    def valid(self):
        with self.timers.measure("valid"):
            self.mean_seconds = self.batch_time.total / max(self.batch_time.count, 1)

    def on_train_epoch_end(self):
        self.timers.clear()


if __name__ == "__main__":
    main(Timed)
