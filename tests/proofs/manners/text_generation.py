"""A language model of pieces of words: caches of a tokenizer and of masks, texts by chance."""

import functools
import re

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main

TEXT = "the cat sat on the mat and the dog ran to the cat that sat on a rug in the den " * 3


@functools.lru_cache(maxsize=512)
def pieces_of(word):
    return (*re.findall("..?", word), "_")


class Tokenizer:
    def __init__(self, text):
        pieces = sorted({piece for word in text.split() for piece in pieces_of(word)})
        self.encoder = {piece: number for number, piece in enumerate(pieces)}
        self.decoder = {number: piece for piece, number in self.encoder.items()}
        self.cache = {}
        self.pattern = re.compile(r"\w+")

    def encode(self, text):
        ids = []
        for word in self.pattern.findall(text):
            if word not in self.cache:
                self.cache[word] = [self.encoder[piece] for piece in pieces_of(word)]
            ids += self.cache[word]
        return ids

    def decode(self, ids):
        return "".join(self.decoder[number] for number in ids).replace("_", " ")


class Windows(Dataset):
    def __init__(self, tokenizer, length=10):
        self.tokenizer, self.length = tokenizer, length
        self.words = TEXT.split()

    def __getitem__(self, index):
        ids = self.tokenizer.encode(" ".join(self.words[index : index + self.length]))
        return np.array(ids[: self.length + 1])

    def __len__(self):
        return 26


class Attention(nn.Layer):
    def __init__(self, vocab, width=12):
        super().__init__()
        self.embedding, self.qkv, self.out = (
            nn.Embedding(vocab, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, vocab),
        )
        self.dropout = nn.Dropout(0.1)
        self._masks, self._positions = {}, None

    def mask(self, size):
        if size not in self._masks:
            self._masks[size] = paddle.triu(paddle.full([size, size], -1e9), 1)
        return self._masks[size]

    def positions(self, size):
        if self._positions is None or len(self._positions) < size:
            angles = np.arange(size)[:, None] / 10 ** np.linspace(0, 2, 12)
            self._positions = paddle.to_tensor(np.sin(angles).astype("float32"))
        return self._positions[:size]

    def forward(self, ids):
        x = self.embedding(ids) + self.positions(ids.shape[1])
        q, k, v = self.qkv(x).chunk(3, axis=-1)
        weights = F.softmax(q @ k.transpose([0, 2, 1]) / 3.5 + self.mask(ids.shape[1]))
        return self.out(x + self.dropout(weights) @ v)


class Generation(ExperimentBase):
    def setup_dataloader(self):
        self.tokenizer = Tokenizer(TEXT)
        self.train_loader = DataLoader(Windows(self.tokenizer), batch_size=4, shuffle=True)

    def setup_model(self):
        self.model = Attention(len(self.tokenizer.encoder))
        self.optimizer = paddle.optimizer.AdamW(0.01, parameters=self.model.parameters())
        self.samples, self.tokens_seen = [], 0

    def train_batch(self):
        ids = self.read_batch()
        loss = F.cross_entropy(self.model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.tokens_seen += int(ids.size)
        self.log(loss=loss, tokens=self.tokens_seen)

    def valid(self):
        ids = self.tokenizer.encode("the cat")
        for _ in range(8):
            probabilities = F.softmax(self.model(paddle.to_tensor([ids]))[0, -1])
            ids.append(int(paddle.multinomial(probabilities).item()))
        self.samples.append(self.tokenizer.decode(ids))
        return {"length": float(len(self.samples[-1]))}


if __name__ == "__main__":
    main(Generation)
