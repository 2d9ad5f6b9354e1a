"""Numbers to tensorboard: each line of the log, and one curve, however often it was killed."""

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Tracked(ExperimentBase):
    writer = None  # rank 0 has one, while it trains

    def setup_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        images, labels = paddle.to_tensor(images / 16, "float32"), paddle.to_tensor(labels)
        train, valid = [images[300:], labels[300:]], [images[:300], labels[:300]]
        self.train_loader = DataLoader(TensorDataset(train), batch_size=50, shuffle=True)
        self.valid_loader = DataLoader(TensorDataset(valid), batch_size=100)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(64, 10))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def train_batch(self):
        images, labels = self.read_batch()
        self.backward(loss := F.cross_entropy(self.model(images), labels))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for x, y in self.valid_batches():
            right = self.model(x).argmax(axis=-1) == y
            self.log(accuracy=right.astype("float32").mean())

    def on_train_begin(self):
        if self.rank == 0:
            from tensorboardX import SummaryWriter

            folder = str(self.output_dir / "tensorboard")
            # What comes after the checkpoint will be written again: the old points are hidden.
            self.writer = SummaryWriter(folder, purge_step=self.iteration + 1)

    def on_log(self, metrics):
        if self.writer is not None:
            for name, number in metrics.items():
                self.writer.add_scalar(name, number, self.iteration)
            self.writer.flush()  # or a kill -9 loses the last two minutes

    def on_evaluate_end(self, results):
        self.on_log({f"valid/{name}": number for name, number in results.items()})

    def on_train_end(self):
        if self.writer is not None:
            self.writer.close()


if __name__ == "__main__":
    main(Tracked)
