"""The client of a tracker: a thread that empties a queue into a database, another that samples."""

import atexit
import os
import queue
import sqlite3
import threading
import time

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class Sender(threading.Thread):
    """Takes records from the queue, some at a time, and counts what became of them."""

    def __init__(self, path):
        super().__init__(name="sender", daemon=True)
        self.path, self.queue, self.lock = path, queue.Queue(maxsize=1000), threading.Lock()
        self.num_sent, self.num_retries, self.last_error, self.last_sent_at = 0, 0, None, 0.0

    def run(self):
        store = sqlite3.connect(self.path)
        store.execute("create table if not exists metrics (run, step, name, value, time)")
        while (record := self.queue.get()) is not None:
            with self.lock, store:
                store.execute("insert into metrics values (?, ?, ?, ?, ?)", record)
                self.num_sent += 1
                self.last_sent_at = time.monotonic()
            self.queue.task_done()
        store.close()


class SystemMetrics(threading.Thread):
    def __init__(self, interval):
        super().__init__(daemon=True)
        self.interval, self.samples, self.shutdown = interval, [], threading.Event()

    def run(self):
        while not self.shutdown.wait(self.interval):
            self.samples.append((time.time(), os.times().user, threading.active_count()))
            del self.samples[:-50]


class Run:
    def __init__(self, path, project, config):
        self.id, self.project, self.config = f"{project}-{os.getpid()}", project, dict(config)
        self.sender, self.system = Sender(path), SystemMetrics(0.01)
        self.summary, self.history, self._step, self.start_time = {}, [], -1, time.time()
        self.sender.start()
        self.system.start()
        atexit.register(self.finish)

    def log(self, values, step):
        self._step = step
        self.summary.update(values, _timestamp=time.time(), _runtime=time.time() - self.start_time)
        self.history.append({"_step": step, **self.summary})
        for name, value in values.items():
            self.sender.queue.put((self.id, step, name, value, time.time()))

    def finish(self):
        atexit.unregister(self.finish)
        self.system.shutdown.set()
        self.sender.queue.put(None)
        self.sender.join(5)


class Sines(Dataset):
    def __getitem__(self, index):
        phase = np.random.RandomState(index).rand() * 6
        wave = np.sin(np.arange(13) / 2 + phase) + np.random.randn(13) / 20
        return wave[:-1, None].astype("float32"), wave[1:, None].astype("float32")

    def __len__(self):
        return 21


class Forecast(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Sines(), batch_size=4, shuffle=True, drop_last=True)
        self.valid_loader = DataLoader(Sines(), batch_size=7)

    def setup_model(self):
        self.rnn, self.head = nn.GRU(1, 8), nn.Linear(8, 1)
        self.lr = paddle.optimizer.lr.StepDecay(0.02, step_size=6)
        parameters = [*self.rnn.parameters(), *self.head.parameters()]
        self.optimizer = paddle.optimizer.Adam(self.lr, parameters=parameters)
        self.tracker = Run(self.output_dir / "tracker.db", "sines", self.config.training)

    def forward(self, waves):
        return self.head(self.rnn(waves)[0])

    def train_batch(self):
        waves, following = self.read_batch()
        loss = F.mse_loss(self.forward(waves), following)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.lr.step()
        self.tracker.log({"loss": float(loss), "lr": self.lr.last_lr}, step=self.iteration)
        self.log(loss=loss)

    def valid(self):
        for waves, following in self.valid_batches():
            self.log(error=F.l1_loss(self.forward(waves), following))

    def on_evaluate_end(self, results):
        self.tracker.log(
            {f"valid_{name}": value for name, value in results.items()}, self.iteration
        )

    def terminal(self):
        self.tracker.finish()


if __name__ == "__main__":
    main(Forecast)
