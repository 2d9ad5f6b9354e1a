"""An experiment whose ranks hold state of their own; for shards.py and the tests.

The net is trained by fleet's sharded optimizer: each rank has the accumulators of some parameters.
With `data.expert` columns each rank also trains a part of its own, marked `is_distributed` as the
layers of tensor parallel are; `data.placed` columns are a tensor with a placement.

    python tests/proofs/parts.py --nprocs 2 --output runs/parts data.expert=4 data.placed=4
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.io import DataLoader, TensorDataset

from expbase import Config, ExperimentBase, main


class Parts(ExperimentBase):
    """A small net, and what each rank has for itself."""

    @classmethod
    def default_config(cls) -> Config:
        config = super().default_config()
        config.data = Config({"width": 16, "layers": 1, "expert": 0, "placed": 0})
        return config

    def init_parallel(self) -> None:
        super().init_parallel()
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"sharding_degree": self.world_size, "dp_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)

    def setup_dataloader(self) -> None:
        (self.output_dir / f"pid_{self.rank}").write_text(str(os.getpid()), encoding="utf-8")
        generator = np.random.RandomState(7)
        points = generator.randn(78, 6).astype("float32")
        labels = (points.sum(axis=1) > 0).astype("int64")
        data = TensorDataset([paddle.to_tensor(points), paddle.to_tensor(labels)])
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(data, batch_size=8)

    def setup_model(self) -> None:
        width, layers = self.config.data.width, self.config.data.layers
        self.model = paddle.nn.Sequential(
            paddle.nn.Linear(6, width), paddle.nn.BatchNorm1D(width), paddle.nn.ReLU(),
            paddle.nn.Dropout(0.2), *(paddle.nn.Linear(width, width) for _ in range(layers)),
            paddle.nn.Linear(width, 2),
        )  # fmt: skip
        self.schedule = paddle.optimizer.lr.ExponentialDecay(0.01, gamma=0.99)
        self.optimizer = self.adam(self.model)
        if self.parallel:
            self.model = fleet.distributed_model(self.model)
            self.optimizer = fleet.distributed_optimizer(self.optimizer)
        if self.config.data.expert:
            self.expert = paddle.nn.Linear(6, self.config.data.expert, bias_attr=False)
            self.expert.weight.is_distributed = True
            self.expert.weight.set_value(self.expert.weight + 0.01 * self.rank)
            self.expert_optimizer = self.adam(self.expert)
        if self.config.data.placed:
            mesh = paddle.distributed.ProcessMesh([*range(self.world_size)], dim_names=["x"])
            place = [paddle.distributed.Shard(1)]
            self.placed = paddle.nn.Linear(6, self.config.data.placed, bias_attr=False)
            self.placed.weight = paddle.distributed.shard_tensor(self.placed.weight, mesh, place)
            self.placed_optimizer = self.adam(self.placed)

    def adam(self, layer: Any) -> Any:
        return paddle.optimizer.AdamW(self.schedule, parameters=layer.parameters())

    def train_batch(self) -> None:
        points, labels = self.read_batch()
        loss = F.cross_entropy(self.model(points), labels)
        if self.config.data.expert:
            loss = loss + self.expert(points).square().mean()
        if self.config.data.placed:
            self.placed.weight.square().mean().backward()
        loss.backward()
        self.step_optimizers()
        self.schedule.step()
        self.log(loss=loss)

    def valid(self) -> dict[str, float]:
        right = total = 0
        for points, labels in self.valid_batches():
            right += int((self.model(points).argmax(axis=-1) == labels).sum())
            total += len(labels)
        return self.average({"accuracy": right / max(total, 1)}, weight=total)

    def on_load_checkpoint(self, states: Any) -> None:
        """Notes the checksum of every tensor that this rank has taken from a checkpoint."""
        tensors, _ = self.internals.stateful_objects().state_dict()
        sums = {
            f"{file}/{key}": zlib.crc32(array.data)
            for file, arrays in tensors.items()
            for key, array in arrays.items()
        }
        (self.output_dir / f"loaded_{self.rank}").write_text(json.dumps(sums), encoding="utf-8")

    def terminal(self) -> None:
        """Notes how much memory this start needed at most, in kB."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        (self.output_dir / f"peak_{self.rank}").write_text(peak, encoding="utf-8")


if __name__ == "__main__":
    main(Parts)
