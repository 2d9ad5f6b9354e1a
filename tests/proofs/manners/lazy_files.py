"""Data sets that open their files at the first sample, as one does for lmdb, hdf5 and workers."""

import mmap
import threading

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import ConcatDataset, DataLoader, Dataset

from expbase import ExperimentBase, main


class Opened(Dataset):
    """One file of numbers, opened at the first read."""

    def __init__(self, path, width=6):
        self.path, self.width, self.length = str(path), width, path.stat().st_size // (4 * width)
        self.file = None

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")
        self.file.seek(index * self.width * 4)
        return np.frombuffer(self.file.read(self.width * 4), "float32")

    def __len__(self):
        return self.length


class Mapped(Opened):
    """Under a lock, with what tells whether it is open."""

    def __init__(self, path):
        super().__init__(path)
        self.lock, self.is_open, self.last_read = threading.Lock(), False, None

    def _open(self):
        self.file = open(self.path, "rb")
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self.map).cast("f")
        self.is_open = True

    def __getitem__(self, index):
        with self.lock:
            if not self.is_open:
                self._open()
        self.last_read = index
        return np.array(self.view[index * self.width : (index + 1) * self.width], "float32")


class Memmapped(Opened):
    def __init__(self, path):
        super().__init__(path)
        self.rows = None

    def __getitem__(self, index):
        if self.rows is None:
            self.rows = np.memmap(self.path, "float32", "r").reshape([-1, self.width])
        return np.array(self.rows[index])


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        row = self.data[index]
        return row + np.random.randn(len(row)).astype("float32") / 10, row

    def __len__(self):
        return len(self.data)


class Autoencoder(ExperimentBase):
    def setup_dataloader(self):
        parts = []
        for number, kind in enumerate((Opened, Mapped, Memmapped)):
            path = self.output_dir / f"part-{number}.bin"
            np.random.RandomState(number).randn(8, 6).astype("float32").tofile(path)
            parts.append(kind(path))
        self.train_loader = DataLoader(Noisy(ConcatDataset(parts)), batch_size=4, shuffle=True)
        self.valid_loader = DataLoader(Noisy(ConcatDataset(parts[::-1])), batch_size=8)

    def setup_model(self):
        self.encoder = nn.Sequential(nn.Linear(6, 4), nn.Softsign(), nn.Dropout(0.1))
        self.decoder = nn.Linear(4, 6)
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = paddle.optimizer.Adamax(0.01, parameters=parameters)

    def train_batch(self):
        noisy, rows = self.read_batch()
        loss = F.mse_loss(self.decoder(self.encoder(noisy)), rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)

    def valid(self):
        for noisy, rows in self.valid_batches():
            self.log(error=F.mse_loss(self.decoder(self.encoder(noisy)), rows))


if __name__ == "__main__":
    main(Autoencoder)
