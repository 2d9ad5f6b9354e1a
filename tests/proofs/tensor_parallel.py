"""An experiment in fleet's tensor parallel: each rank has a part of two layers; for test_proofs.py.

A rank drops its part of the hidden numbers under a name of fleet's tracker of generators, each rank
others; of the output, which all ranks have whole, all drop the same. Fleet's wrapper gives all
ranks the batch of the first one. Its layers need a device that is not the CPU:

    python tests/proofs/tensor_parallel.py --device gpu --nprocs 2 --output runs/tensor_parallel
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_rng_state_tracker,
    model_parallel_random_seed,
)
from paddle.io import DataLoader, TensorDataset

from expbase import ExperimentBase, main


class Net(paddle.nn.Layer):
    """Two layers, of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(4, 8, has_bias=True, gather_output=False)
        self.second = RowParallelLinear(8, 2, has_bias=True, input_is_parallel=True)

    def forward(self, points: Any, targets: Any) -> Any:
        hidden = self.first(points)
        with get_rng_state_tracker().rng_state():
            hidden = F.dropout(hidden, 0.5)
        return F.mse_loss(F.dropout(self.second(hidden), 0.2), targets)


class TensorParallel(ExperimentBase):
    """Trains that net."""

    def init_parallel(self) -> None:
        super().init_parallel()
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": self.world_size, "dp_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)

    def setup_dataloader(self) -> None:
        numbers = np.random.RandomState(7).randn(64, 6).astype("float32")
        data = TensorDataset([numbers[:, :4], numbers[:, 4:]])
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)

    def setup_model(self) -> None:
        model_parallel_random_seed(self.config.training.seed + 1)
        self.model = fleet.distributed_model(Net())
        adam = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        self.optimizer = fleet.distributed_optimizer(adam)

    def train_batch(self) -> None:
        loss = self.model(*self.read_batch())
        loss.backward()
        self.step_optimizers()
        self.log(loss=loss)


if __name__ == "__main__":
    main(TensorParallel)
