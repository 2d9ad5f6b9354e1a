"""Fine-tuning: the trained part learns slowly, the new head quickly.

The weights come from another run: --init_model_path runs/warmup --init_partial
"""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import Config, ExperimentBase, main


class FineTuning(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 200
        config.optim = Config({"lr": 1e-2, "backbone_factor": 0.1})
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        is_even = labels % 2 == 0  # another question about the same images
        images = paddle.to_tensor(images / 16, "float32")
        is_even = paddle.to_tensor(is_even, "int64")
        train, valid = [images[300:], is_even[300:]], [images[:300], is_even[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        backbone, head = paddle.nn.Linear(64, 64), paddle.nn.Linear(64, 2)
        self.model = self.data_parallel(paddle.nn.Sequential(backbone, paddle.nn.ReLU(), head))
        # In a group "learning_rate" is a factor, by which the rate of all is multiplied.
        groups = [
            {"params": backbone.parameters(), "learning_rate": self.config.optim.backbone_factor},
            {"params": head.parameters()},
        ]
        self.optimizer = paddle.optimizer.Adam(self.config.optim.lr, parameters=groups)

    def train_batch(self):
        images, is_even = self.read_batch()
        loss = F.cross_entropy(self.model(images), is_even)
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(FineTuning)
