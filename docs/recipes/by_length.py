"""Utterances in batches of similar lengths: little padding, and it continues exactly."""

import numpy as np
import paddle
from paddle.io import BatchSampler, DataLoader

from expbase import ExperimentBase, main


def utterances(size, seed):  # of 10 to 199 frames of noise; the label says whether it is above 0
    random = np.random.RandomState(seed)
    labelled = enumerate(random.randint(10, 200, size))
    return [((random.randn(n, 8) + i % 2 - 0.5).astype("float32"), i % 2) for i, n in labelled]


class ByLength(BatchSampler):
    def __init__(self, data, size):
        order = sorted(range(len(data)), key=lambda index: len(data[index][0]))
        self.batches = [order[start : start + size] for start in range(0, len(order), size)]

    def __iter__(self):  # numpy was seeded from training.seed and the epoch
        return iter([self.batches[i] for i in np.random.permutation(len(self.batches))])

    def __len__(self):
        return len(self.batches)


def padded(samples):
    lengths = [len(frames) for frames, _ in samples]
    frames = [np.pad(f, ((0, max(lengths) - len(f)), (0, 0))) for f, _ in samples]
    return np.stack(frames), np.array(lengths, "float32"), np.array([y for _, y in samples])


class Speech(ExperimentBase):
    def setup_dataloader(self):
        data = utterances(400, seed=0)
        self.train_loader = DataLoader(data, batch_sampler=ByLength(data, 20), collate_fn=padded)
        self.valid_loader = DataLoader(utterances(100, seed=1), batch_size=20, collate_fn=padded)

    def setup_model(self):
        self.model = self.data_parallel(paddle.nn.Linear(8, 2))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def loss(self, frames, lengths, labels):  # lengths: without the padding
        logits = self.model(frames.sum(axis=1) / lengths.unsqueeze(-1))
        return paddle.nn.functional.cross_entropy(logits, labels)

    def train_batch(self):
        self.backward(loss := self.loss(*self.read_batch()))
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        for batch in self.valid_batches():
            self.log(loss=self.loss(*batch))


if __name__ == "__main__":
    main(Speech)
