"""A progress bar and the client of a tracker on self, and what one notes of the machine."""

import logging
import os
import platform
import time
import uuid

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from expbase import ExperimentBase, main

log = logging.getLogger("tracked")


class Bar:
    """What tqdm is, without drawing."""

    def __init__(self, total, desc=""):
        self.total, self.desc, self.n, self.postfix = total, desc, 0, {}
        self.start_t = self.last_print_t = time.time()
        self.smoothing, self.avg_time, self.fp = 0.3, None, None

    def update(self, n=1):
        now = time.time()
        self.n += n
        took = (now - self.last_print_t) / n
        self.avg_time = took if self.avg_time is None else 0.7 * self.avg_time + 0.3 * took
        self.last_print_t = now

    def set_postfix(self, **values):
        self.postfix = {name: f"{value:.3f}" for name, value in values.items()}


class Session:
    def __init__(self, url):
        self.url, self.headers = url, {"run": uuid.uuid4().hex, "host": platform.node()}
        self.sent, self.failed, self.pending = 0, 0, []


class Client:
    """Keeps lines until there are enough of them; here nobody listens."""

    def __init__(self, project):
        self.project, self.session = project, Session("http://127.0.0.1:9/api")
        self.began, self.last_sent = time.time(), 0.0

    def track(self, step, **values):
        self.session.pending.append({"step": step, "time": time.time(), **values})
        if len(self.session.pending) >= 3:
            self.session.sent += len(self.session.pending)
            self.session.pending.clear()
            self.last_sent = time.time()


class Tracked(ExperimentBase):
    def setup_dataloader(self):
        points = np.random.RandomState(8).randn(22, 3).astype("float32")
        data = TensorDataset(
            [paddle.to_tensor(points), paddle.to_tensor(points.sum(1, keepdims=True))]
        )
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)

    def setup_model(self):
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = paddle.optimizer.RMSProp(0.01, parameters=self.model.parameters())
        self.bar, self.client = Bar(self.config.training.max_iteration), Client("sums")
        self.machine = {"pid": os.getpid(), "host": platform.node(), "cores": os.cpu_count()}
        self.began, self.run_id, self.log_of_script = time.time(), uuid.uuid4(), log
        self.step_times, self.last = [], time.perf_counter()

    def train_batch(self):
        points, sums = self.read_batch()
        loss = F.mse_loss(self.model(points), sums)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        now = time.perf_counter()
        self.step_times.append(now - self.last)
        self.last = now
        self.bar.update()
        self.bar.set_postfix(loss=float(loss))
        self.client.track(self.iteration, loss=float(loss))
        self.log(loss=loss)

    def valid(self):
        self.client.track(self.iteration, elapsed=time.time() - self.began)


if __name__ == "__main__":
    main(Tracked)
