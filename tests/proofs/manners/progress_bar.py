"""A bar over the whole training and one in each validation: tqdm's shape, locks and monitor."""

import multiprocessing
import sys
import threading
import time
from weakref import WeakSet

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class DefaultWriteLock:
    """Of threads and of processes; made when the first bar is."""

    th_lock = threading.RLock()

    def __init__(self):
        cls = type(self)
        if not hasattr(cls, "mp_lock"):
            cls.mp_lock = multiprocessing.RLock()
        self.locks = [cls.mp_lock, cls.th_lock]

    def __enter__(self):
        for lock in self.locks:
            lock.acquire()

    def __exit__(self, *error):
        for lock in self.locks[::-1]:
            lock.release()


class Monitor(threading.Thread):
    def __init__(self, bars, interval):
        super().__init__(daemon=True)
        self.bars, self.interval, self.woken, self.was_killed = bars, interval, 0, threading.Event()
        self.start()

    def run(self):
        while not self.was_killed.wait(self.interval):
            self.woken += len(self.bars._instances)


class ProgressBar:
    monitor, _instances = None, WeakSet()

    def __new__(cls, *_, **__):
        bar = object.__new__(cls)
        if not hasattr(cls, "_lock"):
            cls._lock = DefaultWriteLock()
        with cls._lock:
            cls._instances.add(bar)
            cls.monitor = cls.monitor or Monitor(cls, 0.01)
        return bar

    def __init__(self, iterable=None, total=None, initial=0, file=None):
        self.iterable, self.total, self.n, self.postfix = iterable, total, initial, ""
        self.fp, self.sp = file or sys.stderr, self.status_printer(file or sys.stderr)
        self.start_t = self.last_print_t = time.time()

    @staticmethod
    def status_printer(file):
        last_len = [0]

        def print_status(text):
            file.write("\r" + text + " " * max(last_len[0] - len(text), 0))
            last_len[0] = len(text)

        return print_status

    def update(self, n=1, **postfix):
        self.n, now = self.n + n, time.time()
        self.postfix = ", ".join(f"{name}={value:.3g}" for name, value in postfix.items())
        if now - self.last_print_t > 0.005:
            with self._lock:
                rate = self.n / (now - self.start_t)
                self.sp(f"{self.n}/{self.total} [{rate:.1f} it/s, {self.postfix}]")
            self.last_print_t = now

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.update()
        self._instances.discard(self)


class Circles(Dataset):
    def __getitem__(self, index):
        radius = index % 3 + 1
        y, x = np.mgrid[:8, :8] - 3.5 + np.random.uniform(-0.5, 0.5)
        return (np.hypot(x, y) < radius).astype("float32")[None], np.int64(radius - 1)

    def __len__(self):
        return 23


class Counting(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Circles(), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(Circles(), batch_size=8)

    def setup_model(self):
        self.model = nn.Sequential(nn.Conv2D(1, 4, 3, stride=2), nn.BatchNorm2D(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 3))
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = paddle.optimizer.Adam(3e-3, parameters=parameters)
        self.pbar = None

    def train(self):
        self.pbar = ProgressBar(total=self.config.training.max_iteration, initial=self.iteration)
        super().train()

    def train_batch(self):
        images, labels = self.read_batch()
        loss = F.cross_entropy(self.head(self.model(images)), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.pbar.update(loss=float(loss), epoch=self.epoch)
        self.log(loss=loss)

    def valid(self):
        for images, labels in ProgressBar(self.valid_batches()):
            right = self.head(self.model(images)).argmax(-1) == labels
            self.log(accuracy=right.astype("float32").mean())


if __name__ == "__main__":
    main(Counting)
