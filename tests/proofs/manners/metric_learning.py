"""Contrast with a queue of keys, a slow encoder, and centers of classes."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import BatchSampler, DataLoader, Dataset, Sampler

from expbase import ExperimentBase, main


class Faces(Dataset):
    def __init__(self):
        self.labels = np.repeat(np.arange(6), 4)
        self.points = (self.labels[:, None] + np.random.RandomState(0).randn(24, 5)).astype(
            "float32"
        )

    def __getitem__(self, index):
        noise = np.random.randn(2, 5).astype("float32") / 5
        return self.points[index] + noise[0], self.points[index] + noise[1], self.labels[index]

    def __len__(self):
        return len(self.labels)


class BalancedSampler(Sampler):
    """Some classes, and some of each; its lists are made once."""

    def __init__(self, labels):
        self.by_class = {int(c): np.flatnonzero(labels == c).tolist() for c in np.unique(labels)}

    def __iter__(self):
        for chosen in np.random.permutation([*self.by_class]).reshape([-1, 2]).tolist():
            for number in chosen:
                yield from np.random.choice(self.by_class[number], 4, replace=False).tolist()

    def __len__(self):
        return 24


class MoCo(nn.Layer):
    def __init__(self, width=8, length=16):
        super().__init__()
        self.query, self.key = (
            nn.Sequential(nn.Linear(5, width), nn.BatchNorm1D(width)) for _ in "qk"
        )
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.set_value(q)
            k.stop_gradient = True
        self.register_buffer("queue", F.normalize(paddle.randn([length, width])))
        self.register_buffer("queue_ptr", paddle.zeros([1], "int64"))
        self.length = length

    @paddle.no_grad()
    def enqueue(self, keys):
        start = int(self.queue_ptr.item())
        for place, key in enumerate(keys):
            self.queue[(start + place) % self.length] = key
        self.queue_ptr[0] = (start + len(keys)) % self.length

    def forward(self, one, other):
        queries = F.normalize(self.query(one))
        with paddle.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.set_value(k * 0.9 + q * 0.1)
            keys = F.normalize(self.key(other))
        positive = (queries * keys).sum(1, keepdim=True)
        logits = paddle.concat([positive, queries @ self.queue.clone().t()], 1) / 0.2
        self.enqueue(keys)
        return queries, logits


class Metric(ExperimentBase):
    def setup_dataloader(self):
        data = Faces()
        batches = BatchSampler(sampler=BalancedSampler(data.labels), batch_size=8)
        self.train_loader = DataLoader(data, batch_sampler=batches)

    def setup_model(self):
        self.model = MoCo()
        parameters = [p for p in self.model.parameters() if not p.stop_gradient]
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=parameters)
        self.centers, self.seen = np.zeros((6, 8), "float32"), np.zeros(6, int)
        self.bank = {}

    def train_batch(self):
        one, other, labels = self.read_batch()
        queries, logits = self.model(one, other)
        centers = paddle.to_tensor(self.centers[labels.numpy()])
        loss = F.cross_entropy(logits, paddle.zeros([len(one)], "int64")) + 0.1 * F.mse_loss(
            queries, centers
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        for label, feature in zip(labels.tolist(), queries.detach().numpy(), strict=True):
            self.seen[label] += 1
            self.centers[label] += (feature - self.centers[label]) / self.seen[label]
            self.bank.setdefault(label, []).append(feature.copy())
            self.bank[label] = self.bank[label][-3:]
        spread = float(np.mean([np.std(features) for features in self.bank.values()]))
        self.log(loss=loss, spread=spread)

    def valid(self):
        return {"classes": float((self.seen > 0).sum())}


if __name__ == "__main__":
    main(Metric)
