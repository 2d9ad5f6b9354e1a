"""Numbers to wandb or swanlab: each line of the log, and one curve, however often it was killed."""

import uuid

import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

from expbase import ExperimentBase, main


class Tracked(ExperimentBase):
    tracker = None  # rank 0 has one, while it trains

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
            import wandb  # or: import swanlab as wandb

            path = self.output_dir / "tracker_id.txt"  # of the run, not of this start
            if not path.exists():
                path.write_text(uuid.uuid4().hex[:21])
            self.tracker = wandb.init(project="digits", id=path.read_text(), resume="allow")

    def on_log(self, metrics):
        if self.tracker is not None:
            self.tracker.log(metrics, step=self.iteration)

    def on_evaluate_end(self, results):
        self.on_log({f"valid/{name}": number for name, number in results.items()})

    def on_train_end(self):
        if self.tracker is not None:
            self.tracker.finish()


if __name__ == "__main__":
    main(Tracked)
