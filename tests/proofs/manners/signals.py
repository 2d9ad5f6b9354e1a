"""Handlers of signals and of the end, a heartbeat by timers, a watcher of the collector."""

import atexit
import gc
import os
import signal
import sys
import threading
import time
import weakref

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class Heartbeat:
    """Touches a file while training lives; each beat is a new timer."""

    def __init__(self, path, seconds):
        self.path, self.seconds, self.beats, self.timer = path, seconds, 0, None

    def beat(self):
        self.beats, self.last_beat = self.beats + 1, time.monotonic()
        self.path.touch()
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(self.seconds, print, ["no beat"])
        self.timer.daemon = True
        self.timer.start()


class SignalHandler:
    """Counts what came, and calls who was there before."""

    def __init__(self, *signals):
        self.received, self.at = dict.fromkeys(signals, 0), None
        self.previous = {number: signal.signal(number, self) for number in signals}

    def __call__(self, number, frame):
        self.received[signal.Signals(number)] += 1
        self.at = time.time()
        if callable(self.previous[number]):
            self.previous[number](number, frame)


class CollectorWatch:
    def __init__(self):
        self.collections, self.started, self.seconds, self.live = 0, 0.0, 0.0, weakref.WeakSet()
        gc.callbacks.append(self.notice)

    def notice(self, phase, info):
        if phase == "start":
            self.started = time.perf_counter()
        else:
            self.collections += 1
            self.seconds += time.perf_counter() - self.started


class Walks(Dataset):
    def __getitem__(self, index):
        steps = np.random.RandomState(index).randn(7, 2) + np.random.randn(2) / 10
        return np.cumsum(steps, axis=0).astype("float32"), np.float32([steps[-1, 0] > 0])

    def __len__(self):
        return 21


class Watched(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Walks(), batch_size=4, shuffle=True)

    def setup_model(self):
        self.rnn, self.head = nn.LSTM(2, 6, dropout=0.1, num_layers=2), nn.Linear(6, 1)
        parameters = [*self.rnn.parameters(), *self.head.parameters()]
        clip = nn.ClipGradByNorm(0.5)
        self.optimizer = paddle.optimizer.Lamb(0.01, parameters=parameters, grad_clip=clip)
        self.heartbeat, self.collector = Heartbeat(self.output_dir / "alive", 30), CollectorWatch()
        self.signals = SignalHandler(signal.SIGUSR2, signal.SIGWINCH)
        self.excepthook, sys.excepthook = sys.excepthook, self.report
        self.main_thread, self.dumped = threading.current_thread(), False
        atexit.register(self.report, None, None, None)

    def report(self, kind, error, trace):
        self.dumped = True
        if kind is not None:
            self.excepthook(kind, error, trace)

    def train_batch(self):
        walks, right = self.read_batch()
        outputs, (hidden, _) = self.rnn(walks)
        self.collector.live.add(outputs)
        loss = F.binary_cross_entropy_with_logits(self.head(hidden[-1]), right)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.heartbeat.beat()
        if self.iteration % 3 == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        self.log(loss=loss)

    def valid(self):
        return {"collected": gc.collect(0) * 0}

    def terminal(self):
        self.heartbeat.timer.cancel()
        gc.callbacks.remove(self.collector.notice)


if __name__ == "__main__":
    main(Watched)
