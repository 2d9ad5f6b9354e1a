"""Language modelling: the next character of Python's own standard library, by a recurrent net.

The text is read from the running interpreter and split by file. Beside the bits per character of
the model, validation gives those of a trigram model of the same training text. Every 100 iterations
VisualDL's text panel gets a piece that the model wrote.
"""

import sysconfig
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader

from expbase import Config, ExperimentBase, main, on
from expbase.extras.mixins import EarlyStopping, GradientClipping

CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
SIZE = len(CHARACTERS)  # the last one stands for every other byte
# Not installed everywhere, or tables more than text.
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}


def read_library(num_files):
    """The numbers of the characters of some files, which depend on no order but that of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in folder.rglob("*.py") if not SKIPPED & {*p.relative_to(folder).parts})
    paths = [path for path in paths if 1_000 < path.stat().st_size < 60_000]
    numbers = np.full(256, SIZE - 1)
    numbers[list(CHARACTERS[:-1].encode())] = np.arange(SIZE - 1)
    chosen = np.random.RandomState(0).permutation(len(paths))[:num_files]
    return [numbers[np.frombuffer(paths[i].read_bytes(), "uint8")] for i in chosen]


def pairs_and_next(text):
    """Each pair of characters as one number, and the character after it."""
    return text[:-2] * SIZE + text[1:-1], text[2:]


def fit_trigram(text):
    """Bits of each character after each pair, [SIZE * SIZE, SIZE], by interpolated counts.

    Source: Witten and Bell 1991, method C: what a shorter context says weighs as many counts as
    different characters were seen after the longer one.
    """
    pairs, following = pairs_and_next(text)
    chances = np.full([1, SIZE], 1 / SIZE)
    for length, grams in enumerate((text, pairs, pairs * SIZE + following)):
        # The same whatever stands before.
        chances = np.tile(chances, [SIZE**length // len(chances), 1])
        counts = np.bincount(grams, minlength=SIZE ** (length + 1)).reshape(-1, SIZE)
        weights = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)
        chances = (counts + weights * chances) / (counts.sum(axis=1, keepdims=True) + weights)
    return -np.log2(chances)


def windows(text, length):
    """A data set of pieces of a text: so many pairs, and the character after each."""
    pairs, following = pairs_and_next(text)
    whole = len(pairs) // length * length
    return list(zip(*(x[:whole].reshape(-1, length) for x in (pairs, following)), strict=True))


class Net(paddle.nn.Layer):
    def __init__(self, embedding_size, hidden_size):
        super().__init__()
        # Of pairs, not of characters: what a trigram knows is nearly looked up, which saves time.
        self.embedding = paddle.nn.Embedding(SIZE * SIZE, embedding_size)
        self.gru = paddle.nn.GRU(embedding_size, hidden_size)
        self.head = paddle.nn.Linear(hidden_size, SIZE)

    def forward(self, pairs, state=None):
        features, state = self.gru(self.embedding(pairs), state)
        return self.head(features), state


class CharLM(EarlyStopping, GradientClipping, ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"num_files": 140, "length": 64, "batch_size": 16})
        config.model = Config({"embedding_size": 32, "hidden_size": 96})
        config.optim = Config({"lr": 2e-2, "warmup_iterations": 40})
        return config

    def setup_dataloader(self):
        data = self.config.data
        files = read_library(data.num_files)
        tenth = len(files) // 10
        parts = files[2 * tenth :], files[:tenth], files[tenth : 2 * tenth]
        train, valid, test = map(np.concatenate, parts)
        self.train_loader = DataLoader(
            windows(train, data.length), batch_size=data.batch_size, shuffle=True, drop_last=True
        )
        # Longer than in training: fewer starts without a past, and cheaper.
        self.valid_loader = DataLoader(windows(valid, 256), batch_size=64)
        self.test_loader = DataLoader(windows(test, 256), batch_size=64)
        self.trigram_bits = fit_trigram(train)

    def setup_model(self):
        net = Net(**self.config.model)
        self.model = self.data_parallel(net)
        lr, warmup = self.config.optim.lr, self.config.optim.warmup_iterations
        cosine = paddle.optimizer.lr.CosineAnnealingDecay(lr, self.total_iterations)
        self.scheduler = paddle.optimizer.lr.LinearWarmup(cosine, warmup, 0.0, lr)
        self.optimizer = paddle.optimizer.Adam(self.scheduler, parameters=net.parameters())

    def train_batch(self):
        for pairs, following in self.micro_batches():
            logits, _ = self.model(pairs)
            loss = F.cross_entropy(logits, following)
            self.backward(loss)
            self.log(loss=loss)
        self.step_optimizers()
        self.scheduler.step()

    def valid(self):
        bits = trigram = total = 0
        for pairs, following in self.valid_batches():
            logits, _ = self.model(pairs)
            bits += float(F.cross_entropy(logits, following, reduction="sum")) / np.log(2)
            trigram += self.trigram_bits[pairs.numpy(), following.numpy()].sum()
            total += following.size
        sums = {"bits_per_character": bits, "trigram_bits_per_character": trigram}
        return self.average({k: v / max(total, 1) for k, v in sums.items()}, weight=total)

    @on("on_train_batch_end", every=100)
    def write_text(self):
        numbers, state = [0, 0], None
        with self.internals.evaluating():  # what is drawn has no effect on training
            for _ in range(200):
                pair = paddle.to_tensor([[numbers[-2] * SIZE + numbers[-1]]])
                logits, state = self.unwrap(self.model)(pair, state)
                chances = F.softmax(logits[0, 0].astype("float64"))
                numbers.append(np.random.choice(SIZE, p=chances.numpy()))
        text = "".join(CHARACTERS[number] for number in numbers)
        self.visualizer.add_text("text", text, self.iteration)


if __name__ == "__main__":
    main(CharLM)
