"""A small GPT with all the caches that one meets: of functions, methods, tables, masks, texts."""

import functools
import math
from functools import cached_property

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main

TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps on and on".split()
_FREQUENCIES = {}


@functools.lru_cache(maxsize=8)
def causal_mask(length):
    return paddle.triu(paddle.full([length, length], -1e9), 1)


def frequencies(width):
    if width not in _FREQUENCIES:
        _FREQUENCIES[width] = 1.0 / 100 ** (np.arange(0, width, 2) / width)
    return _FREQUENCIES[width]


class Rotary(nn.Layer):
    """Turns pairs; its tables grow when a longer text comes."""

    def __init__(self, width):
        super().__init__()
        self.width, self.length, self.cos, self.sin = width, 0, None, None

    def forward(self, x):
        length = x.shape[1]
        if length > self.length:
            angles = np.outer(np.arange(length), np.tile(frequencies(self.width), 2))
            self.cos, self.sin = (paddle.to_tensor(f(angles), "float32") for f in (np.cos, np.sin))
            self.length = length
        one, other = x.chunk(2, axis=-1)
        turned = paddle.concat([-other, one], axis=-1)
        return x * self.cos[:length] + turned * self.sin[:length]


class Block(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.rotary, self.drop = Rotary(width), nn.Dropout(0.1)

    @cached_property
    def scale(self):
        return 1 / math.sqrt(self.rotary.width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, axis=-1)
        weights = self.rotary(q) @ self.rotary(k).transpose([0, 2, 1]) * self.scale
        return x + self.drop(F.softmax(weights + causal_mask(x.shape[1]), axis=-1) @ v)


class Windows(Dataset):
    def __init__(self):
        self.encoded = {}

    @cached_property
    def vocab(self):
        return {word: number for number, word in enumerate(sorted(set(TEXT)))}

    @functools.lru_cache(maxsize=64)  # noqa: B019 (as people write it)
    def encode(self, word):
        return self.vocab[word]

    def __getitem__(self, index):
        if index not in self.encoded:
            self.encoded[index] = np.array([self.encode(w) for w in TEXT[index : index + 8]])
        return self.encoded[index]

    def __len__(self):
        return len(TEXT) - 7


class Gpt(ExperimentBase):
    def setup_dataloader(self):
        self.data = Windows()
        self.train_loader = DataLoader(self.data, batch_size=2, shuffle=True)

    def setup_model(self):
        size = len(self.data.vocab)
        self.model = nn.Sequential(nn.Embedding(size, 8), Block(8), Block(8), nn.Linear(8, size))
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())

    @cached_property
    def num_params(self):
        return sum(int(p.size) for p in self.model.parameters())

    def train_batch(self):
        words = self.read_batch()[:, : 4 + self.iteration // 5]  # longer and longer
        loss = F.cross_entropy(self.model(words[:, :-1]), words[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss, params=self.num_params)

    @paddle.no_grad()
    def valid(self):
        text = paddle.to_tensor([[self.data.encode("the")]])
        while text.shape[1] < 9:
            text = paddle.concat([text, self.model(text)[:, -1:].argmax(-1)], axis=1)
        return {"distinct": float(len(set(text[0].tolist())))}


if __name__ == "__main__":
    main(Gpt)
