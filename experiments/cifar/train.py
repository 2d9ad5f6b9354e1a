"""Image classification: a ResNet-18 for CIFAR-10, a small net for drawn shapes (0.96 to 0.98).

It reads CIFAR-10's own archive, see archive.py; with small.yaml one that shapes.py draws. A part of
the training images is held out: they choose the best checkpoint, and the test images are seen once,
at the end. VisualDL gets the held-out images of largest loss, and which class is taken for which.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from archive import find_archive, read_archive
from mistakes import draw_mistakes
from paddle.io import DataLoader, Subset
from resnet import ResNet

from expbase import Config, ConfigError, ExperimentBase, main
from expbase.extras.mixins import ExponentialMovingAverage


class Cifar(ExponentialMovingAverage, ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_epoch = 200
        # An empty archive: the one where paddle keeps it. The last training images are held out.
        config.data = Config({"archive": "", "download": False, "num_valid": 5000})
        config.data.batch_size, config.data.num_workers = 128, 4
        config.model = Config({"width": 64, "blocks": [2, 2, 2, 2]})
        config.optim = Config({"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4})
        config.optim.label_smoothing = 0.1
        config.optim.warmup_iterations = 1755  # five epochs
        config.optim.amp = True  # float16 where the device has it
        return config

    def prepare(self):
        data = self.config.data
        self.archive = find_archive(data.archive, fetch=data.download)

    def setup_dataloader(self):
        data = self.config.data
        augmented, plain, test, self.names = read_archive(self.archive)
        self.check_num_valid(len(plain))
        split = len(plain) - data.num_valid
        self.held_out = Subset(plain, range(split, len(plain)))
        self.train_loader = DataLoader(
            Subset(augmented, range(split)),
            batch_size=data.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=data.num_workers,
            persistent_workers=data.num_workers > 0,
        )
        self.valid_loader = DataLoader(self.held_out, batch_size=250)
        self.test_loader = DataLoader(test, batch_size=250)

    def check_num_valid(self, num_images):
        given, training = self.config.data.num_valid, self.config.training
        least = int(training.valid_interval + training.valid_every_epoch > 0)
        if not least <= given < num_images:
            raise ConfigError(
                f"data.num_valid: {given} given; expected {least} to {num_images - 1}, of the "
                f"{num_images} training images (0: of a run without validations)."
            )

    def setup_model(self):
        optim = self.config.optim
        net = ResNet(**self.config.model)
        self.model = self.data_parallel(net)
        self.schedule = self.build_schedule(optim.lr, optim.warmup_iterations)
        self.optimizer = paddle.optimizer.Momentum(
            self.schedule,
            optim.momentum,
            parameters=net.parameters(),
            use_nesterov=True,
            weight_decay=optim.weight_decay,
        )
        # On the CPU paddle has no mixed precision: it would warn, and compute in float32.
        self.amp = optim.amp and not paddle.get_device().startswith("cpu")
        self.scaler = paddle.amp.GradScaler(enable=self.amp)
        self.input_spec = [paddle.static.InputSpec([None, 3, 32, 32], "uint8", "images")]

    def build_schedule(self, lr, warmup):
        """A warm-up from 0, then a cosine down to 0 at the end of the run."""
        rest = max(self.total_iterations - warmup, 1)
        cosine = paddle.optimizer.lr.CosineAnnealingDecay(lr, T_max=rest)
        return paddle.optimizer.lr.LinearWarmup(cosine, warmup, start_lr=0.0, end_lr=lr)

    def logits(self, images):
        with paddle.amp.auto_cast(enable=self.amp, dtype="float16"):
            return self.model(images).astype("float32")

    def train_batch(self):
        for images, labels in self.micro_batches():
            logits = self.logits(images)
            smoothing = self.config.optim.label_smoothing
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            self.backward(loss)
            right = logits.argmax(axis=-1) == labels
            self.log(loss=loss, accuracy=right.astype("float32").mean())
        self.step_optimizers()
        self.schedule.step()

    def valid(self):  # here the model has the averaged weights
        share = []
        for images, labels in self.valid_batches():
            logits = self.logits(images)
            losses = F.cross_entropy(logits, labels, reduction="none")
            columns = losses.flatten(), logits.argmax(axis=-1), labels
            indices = self.internals.evaluated_indices
            share.append([indices, *(column.numpy() for column in columns)])
        batches = [batch for of_rank in self.gather(share) for batch in of_rank]
        indices, *columns = map(np.concatenate, zip(*batches, strict=True))
        # In the order of the data set, whatever rank has had them.
        losses, predicted, labels = (column[np.argsort(indices)] for column in columns)
        if self.internals.evaluated_loader is self.valid_loader:
            figure = draw_mistakes(self.held_out, losses, predicted, self.names)
            self.visualizer.add_figure("mistakes", figure, self.iteration)
        return {"accuracy": (predicted == labels).mean(), "loss": losses.mean()}

    def on_train_end(self):
        if self.finished:  # and neither failed nor was interrupted
            if self.config.training.monitor:
                self.load_checkpoint("best")
            self.evaluate(self.test_loader)


if __name__ == "__main__":
    main(Cifar)
