"""Gradient accumulation over tokens: each token of an update weighs the same, in whatever batch."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader

from expbase import ExperimentBase, main

PAD = -100  # the label of padding: cross_entropy ignores it


def sequences(size, seed):  # of 2 to 40 digits, each greater by 1 than the one before, modulo 10
    random = np.random.RandomState(seed)
    ends = zip(random.randint(10, size=size), random.randint(2, 41, size), strict=True)
    return [np.arange(first, first + length) % 10 for first, length in ends]


def padded(samples):
    """Tokens and the ones that follow them, each [B, T]."""
    length = max(map(len, samples)) - 1
    tokens = [np.pad(s[:-1], (0, length + 1 - len(s))) for s in samples]
    labels = [np.pad(s[1:], (0, length + 1 - len(s)), constant_values=PAD) for s in samples]
    return np.stack(tokens), np.stack(labels)


class Tokens(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.accumulation_steps = 200, 4
        return config

    def setup_dataloader(self):
        train, valid = sequences(1000, seed=0), sequences(100, seed=1)
        self.train_loader = DataLoader(train, batch_size=8, shuffle=True, collate_fn=padded)
        self.valid_loader = DataLoader(valid, batch_size=50, collate_fn=padded)

    def setup_model(self):
        layers = paddle.nn.Embedding(10, 16), paddle.nn.Linear(16, 10)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def loss_sum(self, tokens, labels):
        return F.cross_entropy(self.model(tokens), labels, ignore_index=PAD, reduction="sum")

    def train_batch(self):
        batches = list(self.micro_batches())  # all of the update: their tokens are counted first
        count = sum(int((labels != PAD).sum()) for _, labels in batches)
        # Gradients are averaged over the ranks, so what divides them is an average, too.
        total = sum(self.gather(count)) / self.world_size
        loss = 0
        for tokens, labels in batches:
            part = self.loss_sum(tokens, labels) / total
            self.backward(part)  # after the loop over micro_batches a loss is not divided again
            loss += part.detach()
        self.step_optimizers()
        self.log(loss=loss)

    def valid(self):
        loss, count = 0.0, 0
        for tokens, labels in self.valid_batches():
            loss += float(self.loss_sum(tokens, labels))
            count += int((labels != PAD).sum())
        return self.average({"loss": loss / max(count, 1)}, weight=count)


class TokensInShares(Tokens):
    """The same with training.shares, where all gradients come from within the loop."""

    def train_batch(self):
        loss = count = 0
        for tokens, labels in self.micro_batches():
            part = self.loss_sum(tokens, labels)
            self.backward(part)  # divided by the number of shares
            loss, count = loss + part.detach(), count + int((labels != PAD).sum())
        total = sum(self.gather(count)) / self.internals.num_shares  # in each share, on average
        with paddle.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad_.scale_(1 / total)
        self.step_optimizers()
        self.log(loss=loss / count)


if __name__ == "__main__":
    main(Tokens)
