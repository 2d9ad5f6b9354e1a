"""Configs of all kinds: dataclasses, named tuples, dicts with attributes, enums; and counters."""

import enum
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


class EasyDict(dict):
    """Items are attributes, and attributes items: each value stands in both."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        if type(value) is dict:
            value = EasyDict(**value)
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


class Mode(enum.Enum):
    WARM = "warm"
    FULL = "full"


class Shape(NamedTuple):
    height: int = 2
    width: int = 3


@dataclass(frozen=True)
class ModelConfig:
    shape: Shape = field(default_factory=Shape)
    hidden: int = 8
    acts: ClassVar = MappingProxyType({"mish": nn.Mish, "relu": nn.ReLU})


@dataclass(frozen=True)
class TrainState:
    """Never changed, always replaced."""

    step: int = 0
    mode: Mode = Mode.WARM
    shown: Shape | None = None
    best: float = float("inf")


class Named:
    """Numbers its objects, for their names."""

    instances = 0
    names: ClassVar[list] = []

    def __init__(self, prefix="item"):
        self.name = f"{prefix}_{Named.instances}"
        Named.instances += 1
        Named.names.append(self.name)


class Grids(Named, Dataset):
    shape = Shape()

    def __getitem__(self, index):
        grid = np.random.RandomState(index).randn(*self.shape).astype("float32")
        return grid.ravel(), grid.max(axis=1) + np.float32(np.random.randn() / 20)

    def __len__(self):
        return 23


class Configured(ExperimentBase):
    def setup_dataloader(self):
        self.model_config = ModelConfig()
        self.cfg = EasyDict(model=asdict(self.model_config), run={"step": 0, "notes": ["begun"]})
        self.train_loader = DataLoader(Grids("grids"), batch_size=4, shuffle=True)

    def setup_model(self):
        config = self.model_config
        parts = [nn.Linear(config.shape.height * config.shape.width, config.hidden)]
        parts += [config.acts["mish"](), nn.Dropout(0.1), nn.Linear(config.hidden, 2)]
        self.model = nn.Sequential(*parts)
        self.optimizer = paddle.optimizer.Momentum(0.03, parameters=self.model.parameters())
        self.state, self.helpers = TrainState(), [Named("helper") for _ in range(3)]
        self.info = SimpleNamespace(losses=[], last=None, mode=Mode.WARM)

    def train_batch(self):
        grids, wanted = self.read_batch()
        loss = F.mse_loss(self.model(grids), wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        step, best = self.state.step + 1, min(self.state.best, float(loss))
        mode = Mode.FULL if step > 5 else Mode.WARM
        self.state = replace(self.state, step=step, mode=mode, best=best, shown=Shape(*grids.shape))
        self.cfg.run.step = self.iteration
        self.cfg.run["loss"], self.cfg.last_shape = float(loss), [*grids.shape]
        self.info.last, self.info.mode = self.state.shown, mode
        self.info.losses.append(best)
        self.log(loss=loss, best=self.state.best, step=step, mode=self.info.mode is Mode.FULL)

    def valid(self):
        return {"instances": Named.instances, "losses": len(self.info.losses)}


if __name__ == "__main__":
    main(Configured)
