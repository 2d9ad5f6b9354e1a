"""Python's logging in all its forms: handlers, filters, adapters, files, warnings that count."""

import logging
import logging.handlers
import sys
import time
import warnings
from collections import Counter

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main

logger = logging.getLogger(__name__)
logger.setLevel(logging.DEBUG)
logger.propagate = False


class OncePerMessage(logging.Filter):
    """Lets a text pass the first time."""

    def __init__(self):
        super().__init__()
        self.seen, self.dropped = set(), 0

    def filter(self, record):
        is_new = record.msg not in self.seen
        self.seen.add(record.msg)
        self.dropped += not is_new
        return is_new or record.levelno > logging.WARNING


class CountingHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.counts, self.last_record, self.last_emit = Counter(), None, time.time()

    def emit(self, record):
        self.counts[record.levelname] += 1
        self.last_record, self.last_emit = record, time.time()


class StepAdapter(logging.LoggerAdapter):
    def process(self, text, options):
        return f"[{self.extra['step']:>6}] {text}", options


def setup_logger(output_dir):
    formatter = logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S")
    path = output_dir / "train.log"
    rotating = logging.handlers.RotatingFileHandler(path, "a", 2000, backupCount=2, delay=True)
    memory = logging.handlers.MemoryHandler(5, target=rotating)
    stream, counting = logging.StreamHandler(sys.stdout), CountingHandler()
    stream.addFilter(OncePerMessage())
    for handler in (memory, stream, counting):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logging.captureWarnings(True)
    return logger, counting


class Noisy(Dataset):
    logger = logging.getLogger(f"{__name__}.data")

    def __getitem__(self, index):
        image = np.random.RandomState(index).rand(1, 8, 8).astype("float32")
        if index % 7 == 0:
            self.logger.debug("sample %d is dark", index)
            warnings.warn(f"sample {index} is dark", UserWarning, stacklevel=2)
        return image, image + np.random.randn(1, 8, 8).astype("float32") / 5

    def __len__(self):
        return 24


class Denoiser(ExperimentBase):
    def setup_dataloader(self):
        self.train_loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(Noisy(), batch_size=8)

    def setup_model(self):
        self.py_logger, self.counting = setup_logger(self.output_dir)
        self.step_logger = StepAdapter(logger, {"step": 0, "phase": "train"})
        self.model = nn.Sequential(
            nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.PReLU(), nn.Conv2D(4, 1, 1)
        )
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        self.num_warned = 0

    def train_batch(self):
        clean, noisy = self.read_batch()
        self.step_logger.extra.update(step=self.iteration, phase="train")
        loss = F.mse_loss(self.model(noisy), clean)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        if float(loss) > 0.05:
            self.num_warned += 1
            self.step_logger.warning("the loss is large: %.4f", float(loss))
        self.step_logger.info("loss %.4f, warned %d times", float(loss), self.num_warned)
        self.log(loss=loss, large=self.num_warned)

    def valid(self):
        self.step_logger = StepAdapter(logger, {"step": self.iteration, "phase": "valid"})
        for clean, noisy in self.valid_batches():
            self.log(psnr=-10 * paddle.log10(F.mse_loss(self.model(noisy), clean)))
        self.step_logger.info("so far %s", dict(self.counting.counts))


if __name__ == "__main__":
    main(Denoiser)
