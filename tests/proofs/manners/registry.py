"""In the manner of PaddleDetection: a global config, a registry of classes, callbacks, a status."""

import time
from collections import OrderedDict, deque

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class AttrDict(dict):
    def __getattr__(self, key):
        if key in self:
            return self[key]
        raise AttributeError(key)

    def __setattr__(self, key, value):
        self[key] = value


global_config = AttrDict(log_iter=5, architecture="Detector")
global_config.Detector = AttrDict(backbone="ResidualNet", head="PointHead")
global_config.ResidualNet = AttrDict(depth=2, width=6)
_registered = AttrDict()


def register(kind):
    """Makes a class known; what is in `__inject__` is created from the config, too."""
    _registered[kind.__name__] = AttrDict(kind=kind, created=0)
    global_config.setdefault(kind.__name__, AttrDict())
    return kind


def create(name):
    schema, given = _registered[name], dict(global_config[name])
    for key in getattr(schema.kind, "__inject__", ()):
        given[key] = create(given[key])
    schema.created += 1
    return schema.kind(**given)


@register
class ResidualNet(nn.Layer):
    def __init__(self, depth=3, width=8):
        super().__init__()
        self.stem = nn.Conv1D(1, width, 3, padding=1)
        self.stages = nn.LayerList([nn.BatchNorm1D(width) for _ in range(depth)])

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = x + F.relu(stage(x))
        return x


@register
class PointHead(nn.Layer):
    def __init__(self, width=6):
        super().__init__()
        self.score, self.size = nn.Conv1D(width, 1, 1), nn.Conv1D(width, 1, 1)

    def get_loss(self, features, place):
        score, size = self.score(features)[:, 0], self.size(features)
        return {"cls": F.cross_entropy(score, place), "size": (size.mean() - 1) ** 2}


@register
class Detector(nn.Layer):
    __inject__ = ("backbone", "head")

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head, self.inputs = backbone, head, {}

    def forward(self, inputs):
        self.inputs = inputs
        return self.head.get_loss(self.backbone(inputs["signal"]), inputs["place"])


class LogPrinter:
    def __init__(self, trainer):
        self.model, self.line, self.best_loss = trainer, "", float("inf")

    def on_step_end(self, status):
        status["eta"] = status["batch_time"][-1] * (status["steps"] - status["step_id"])
        self.line = " ".join(f"{k}: {np.mean(v):.4f}" for k, v in status["losses"].items())
        self.best_loss = min(self.best_loss, status["losses"]["loss"][-1])


class Peaks(Dataset):
    def __getitem__(self, index):
        place = np.array([index % 12])
        signal = np.exp(-np.square(np.arange(12) - place)) + np.random.randn(12) / 20
        return {"signal": signal[None].astype("float32"), "place": place}

    def __len__(self):
        return 22


class Trainer(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Peaks(), batch_size=4, shuffle=True)

    def setup_model(self):
        self.cfg = global_config
        self.cfg.steps = self.config.training.max_iteration
        self.model = create(self.cfg.architecture)
        self.optimizer = paddle.optimizer.Momentum(0.02, parameters=self.model.parameters())
        self.status = AttrDict(batch_time=deque(maxlen=5), losses=OrderedDict())
        self.callbacks = [LogPrinter(self)]

    def train_batch(self):
        start = time.time()
        losses = self.model(self.read_batch())
        losses["loss"] = sum(losses.values())
        losses["loss"].backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        for name, loss in losses.items():
            self.status.losses.setdefault(name, deque(maxlen=4)).append(float(loss))
        self.status.batch_time.append(time.time() - start)
        self.status.update(step_id=self.iteration, steps=self.cfg.steps, mode="train")
        for callback in self.callbacks:
            callback.on_step_end(self.status)
        self.log(losses, best=self.callbacks[0].best_loss)

    def valid(self):
        self.status["mode"] = "eval"
        return {"created": float(_registered.ResidualNet.created)}


if __name__ == "__main__":
    main(Trainer)
