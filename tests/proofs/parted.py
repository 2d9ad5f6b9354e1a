"""An experiment whose ranks may part, in the ways that people write; for parting.py and the tests.

`data.way` says how; from update 10 on, or where a rank's own numbers differ from the others'. With
PARTED_KILLED_AT each rank kills itself at the beginning of that update. What a start begins with
is in began_RANK.json, by checksums.

    python tests/proofs/parted.py --nprocs 2 --output runs/parted data.way="raw loss"
"""

from __future__ import annotations

import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from paddle.optimizer import lr

from expbase import Config, ExperimentBase, main
from expbase.base.arrays import parse

CHANGE = 10  # the update at which most of the ways begin
FREEZING = (
    "frozen before",  # and thawed; as everywhere here, at update 10
    "frozen before, wrapped again",
    "frozen after",
    "frozen after, wrapped again",
    "frozen after, unused parameters",  # find_unused_parameters=True
    "partly",  # frozen after: the one half first, then the other, each wrapped again
    "whole",  # frozen before, in a loop that reaches batch norm's statistics; wrapped again
)
RATES = ("schedule", "set_lr", "plateau")
OTHERS = ("nothing", "raw loss", "left out", "used late", "embedding")


class Parted(ExperimentBase):
    """A backbone and a head, with batch norm, Adam and a schedule."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"way": "nothing"})
        intervals = {"max_iteration": 40, "valid_interval": 4, "save_interval": 4}
        config.training.update(log_interval=1, keep_last=0, **intervals)
        return config

    def setup_dataloader(self) -> None:
        generator = np.random.RandomState(7)
        points = generator.randn(80, 4).astype("float32")
        labels = (points.sum(axis=1) > 0).astype("int64")
        words = generator.randint(0, 4000, [80, 3])
        data = TensorDataset([paddle.to_tensor(part) for part in (points, words, labels)])
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(data, batch_size=3)

    def setup_model(self) -> None:
        way = self.config.data.way
        nn = paddle.nn
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.Tanh())
        self.words = nn.Embedding(4000, 8)
        self.head = nn.Linear(8, 2)
        self.late = nn.Linear(8, 2)
        net = nn.LayerList([self.backbone, self.words, self.head, self.late])
        if way.startswith(("frozen before", "whole")):
            self.freeze()
        net = Whole(net)
        unused = {"find_unused_parameters": True} if way.endswith("unused parameters") else {}
        self.model = self.data_parallel(net, **unused)
        if way.startswith(("frozen after", "partly")):
            self.freeze()
        self.schedule = lr.ExponentialDecay(0.02, 0.99)
        self.plateau = lr.ReduceOnPlateau(0.05, patience=0, factor=0.3)
        rate = {"plateau": self.plateau, "set_lr": 0.02}.get(way, self.schedule)
        self.optimizer = paddle.optimizer.Adam(rate, parameters=net.parameters())

    def freeze(self, *, frozen: bool = True, parts: slice = slice(None)) -> None:
        """Freezes or thaws the backbone; by "whole" with batch norm's statistics."""
        linear, normalization, _ = self.backbone
        parameters = [*linear.parameters(), normalization.weight, normalization.bias]
        if self.config.data.way == "whole":
            parameters = self.backbone.parameters()
        for parameter in parameters[parts]:
            parameter.stop_gradient = frozen

    def on_train_begin(self) -> None:
        tensors = self.internals.stateful_objects().arrays()
        text = json.dumps(checksums(tensors))
        (self.output_dir / f"began_{self.rank}.json").write_text(text)

    def train_batch(self) -> None:
        way = self.config.data.way
        if self.iteration == int(os.environ.get("PARTED_KILLED_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.iteration == CHANGE and (way in FREEZING):
            self.freeze(frozen=False, parts=slice(1) if way == "partly" else slice(None))
        if self.iteration == 2 * CHANGE and way == "partly":
            self.freeze(frozen=False)
        is_wrapped_again = way.endswith("wrapped again") or way in ("partly", "whole")
        if self.iteration in (CHANGE, 2 * CHANGE) and is_wrapped_again:
            self.model = self.data_parallel(self.model)
        is_raw = way == "raw loss" and self.iteration >= CHANGE
        model: Any = self.unwrap(self.model) if is_raw else self.model
        uses_late = way == "used late" and self.iteration >= CHANGE
        for points, words, labels in self.micro_batches():
            loss = F.cross_entropy(model(points, words, uses_late=uses_late), labels)
            self.backward(loss)
            self.log(loss=loss)
            own = loss.item()
            if way == "embedding" and self.iteration >= CHANGE:  # of what the wrapper knows nothing
                self.backward(self.words(words).square().mean())
        if way == "left out" and self.iteration >= CHANGE and own > 0.6:
            self.optimizer.clear_grad(set_to_zero=False)
        else:
            self.step_optimizers()
        self.schedule.step()
        if way == "schedule" and own < 0.4:
            self.schedule.step()
        if way == "set_lr" and self.iteration == CHANGE and self.rank == self.world_size - 1:
            self.optimizer.set_lr(0.01)

    def valid(self) -> dict[str, float]:
        wrong = total = 0
        for points, words, labels in self.valid_batches():
            wrong += int((self.model(points, words).argmax(axis=-1) != labels).sum())
            total += len(labels)
        error = wrong / max(total, 1)
        if self.config.data.way == "plateau":
            self.plateau.step(error)
        return self.average({"error": error}, weight=total)


def checksums(tensors: Any) -> dict[str, int]:
    """Of what all ranks should have alike, by file and key: not of batch norm's statistics."""
    return {
        f"{file}/{key}": zlib.crc32(array.data)
        for file, arrays in sorted(tensors.items())
        for key, array in sorted(arrays.items())
        if not key.endswith(("_mean", "_variance")) and not file.startswith("@")
    }


def begins_with(output: Path, checkpoint: Path) -> list[bool]:
    """Whether each rank has begun its last start with the bits that a checkpoint has of rank 0."""
    files = checkpoint.glob("*.safetensors")
    expected = checksums({file.stem: parse(file.read_bytes()) for file in files})
    began = sorted(output.glob("began_*.json"))
    return [json.loads(file.read_text()) == expected for file in began]


class Whole(paddle.nn.Layer):
    """The parts as one layer."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, points: Any, words: Any, *, uses_late: bool = False) -> Any:
        """Returns logits of two classes, [B, 2]."""
        backbone, embedding, head, late = self.parts
        features = backbone(points) + 0.1 * embedding(words).mean(axis=1)
        return late(features) if uses_late else head(features)


if __name__ == "__main__":
    main(Parted)
