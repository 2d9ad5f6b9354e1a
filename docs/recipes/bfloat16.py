"""bfloat16: auto_cast on a GPU; on the CPU the same rounding, to see what a model makes of it."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


def rounded(tensor):
    """The nearest numbers of bfloat16, as float32; its gradients are rounded, too."""
    return tensor.astype("bfloat16").astype("float32")


class RoundedLinear(paddle.nn.Linear):
    """What a GPU does: both factors have 8 bits, the sums and the weights themselves 24."""

    def forward(self, x):
        return F.linear(rounded(x), rounded(self.weight), self.bias)


class BFloat16(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration = 300
        return config

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        self.on_gpu = not paddle.get_device().startswith("cpu")
        linear = paddle.nn.Linear if self.on_gpu else RoundedLinear
        self.model = self.data_parallel(
            paddle.nn.Sequential(linear(64, 64), paddle.nn.ReLU(), linear(64, 10))
        )
        self.optimizer = paddle.optimizer.Adam(2e-3, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        # On the CPU it would warn, and change nothing: paddle has no such kernels there.
        with paddle.amp.auto_cast(enable=self.on_gpu, dtype="bfloat16", level="O1"):
            loss = F.cross_entropy(self.model(images), labels)
        self.backward(loss)  # no GradScaler: bfloat16 has the range of float32
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            self.log(loss=F.cross_entropy(self.model(x), y))


if __name__ == "__main__":
    main(BFloat16)
