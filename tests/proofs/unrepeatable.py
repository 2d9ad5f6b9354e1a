"""Counts causes for which a script does not repeat itself, and what verify names for each.

Each is a small script with one planted cause. verify must say that the script does not repeat
itself, and name the place and the cause. Then scripts that repeat themselves, some of them oddly:
verify must find them identical, and updates that are made several times must be the same, too.

    python tests/proofs/unrepeatable.py [--only WORDS OF A NAME] [--show]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from tiny import PYTHONPATH  # noqa: E402

from expbase.tools import nondeterminism  # noqa: E402

HEAD = """
import os, random, tempfile, threading, time
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.io import BatchSampler, DataLoader, Dataset
from tiny import Points, Tiny

from expbase import main


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.drop(F.relu(self.first(x))))


class Base(Tiny):
    size = 20
    net = Net

    def setup_model(self):
        self.model = self.net()
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())

    def loss(self):
        points, labels = self.read_batch()
        return F.cross_entropy(self.model(points), labels)

    def train_batch(self):
        loss = self.loss()
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss)
"""
TAIL = """
if __name__ == "__main__":
    main(Experiment)
"""


@dataclass(frozen=True)
class Case:
    """A script, and what is named.

    Attributes:
        name: What is planted.
        text: The script: a class Experiment between HEAD and TAIL.
        lines: Regular expressions for what verify says; none: it must find nothing.
        iterations: Of each run of verify.
    """

    name: str
    text: str
    lines: tuple[str, ...] = ()
    iterations: int = 12


PLANTED = [
    Case(
        "a dropout with a seed from the clock",
        """
        class Clocked(Net):
            def forward(self, x):
                paddle.seed(time.time_ns() % 2**31)
                return super().forward(x)

        class Experiment(Base):
            net = Clocked
        """,
        (
            r"where: update 1: the output of model\.drop \(Dropout\) differs, and its input is the",
            r"first operator whose result differs is dropout\. Made 4 times .*, it differs, too\.",
            r"causes to look at: the time; numbers of the system",
        ),
    ),
    Case(
        "a dropout as a function, in a forward",
        """
        class Clocked(Net):
            def forward(self, x):
                x = F.relu(self.first(x))
                paddle.seed(time.time_ns() % 2**31)
                return self.last(F.dropout(x, 0.2))

        class Experiment(Base):
            net = Clocked
        """,
        (
            r"the input of model\.last \(Linear\) differs, and what layers gave before is the same",
            r"first operator whose result differs is dropout\.",
        ),
    ),
    Case(
        "Adam and an Embedding with sparse gradients",
        """
        class Words(Net):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(50, 4, sparse=True)

            def forward(self, x):
                return super().forward(self.words((x.abs() * 20).astype("int64") % 50).sum(axis=1))

        class Experiment(Base):
            net = Words
        """,
        (  # or, as chance has it, the loss is nan before verify can compare
            r"model\.words\.weight differs after it, and the gradients are the same: the step of "
            r"self\.optimizer \(Adam\)|The learning rate may not be the cause",
            r"causes to look at: model\.words\.weight has sparse gradients, .*lazy_mode=True|self\."
            r"model\.words is an Embedding\(sparse=True\) that Adam steps on the CPU",
        ),
        iterations=20,
    ),
    Case(
        "a loader that is read by hand",
        """
        class Noisy(Points):
            def __getitem__(self, index):
                time.sleep(random.random() / 1000)
                return super().__getitem__(index)

        class Experiment(Base):
            def setup_dataloader(self):
                super().setup_dataloader()
                self.others = DataLoader(Noisy(500), batch_size=4, shuffle=True)

            def setup_model(self):
                super().setup_model()
                self.iterator = None
                self.exclude_from_state("iterator")

            def loss(self):
                self.iterator = self.iterator or iter(self.others)
                others, _ = next(self.iterator)
                np.random.randn(1000)
                return super().loss() + self.model(others).square().mean()
        """,
        (
            r"where: update \d+: ",
            r"causes to look at: self\.\w+ is read by hand: paddle's thread draws beside training",
        ),
    ),
    Case(
        "the order of a set, with hash randomisation",
        """
        class Named(Points):
            def __init__(self, size):
                super().__init__(size)
                names = {f"class {number}" for number in range(40)}
                self.points = self.points * [[1 + hash(name) % 7] for name in [*names][:size]]
                self.points = self.points.astype("float32")

        class Experiment(Base):
            def setup_dataloader(self):
                super().setup_dataloader()
                self.train_loader = DataLoader(Named(20), batch_size=4, shuffle=True)
        """,
        (
            r"where: update 1: batch\[0\] differs, of the same samples\. Named\.__getitem__\(\d+\) "
            r"differs in another process, and not in one\.",
            r"causes to look at: .*the order of a set \(PYTHONHASHSEED=0 fixes it\)",
        ),
    ),
    Case(
        "a thread that draws",
        """
        def draw():
            while True:
                np.random.rand()
                time.sleep(0)

        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                threading.Thread(target=draw, daemon=True).start()

            def loss(self):
                points, labels = self.read_batch()
                time.sleep(0.002)
                points = points + paddle.to_tensor(np.random.randn(4).astype("float32"))
                return F.cross_entropy(self.model(points), labels)
        """,
        (
            r"where: update \d+: (the samples differ|batch|the input of model \(Net\))",
            r"causes to look at: threads of yours that run beside training: Thread-\d+ \(draw\)",
        ),
    ),
    Case(
        "an operator of one's own that adds in the order of a race",
        """
        class Raced(PyLayer):
            @staticmethod
            def forward(ctx, x):
                parts, done = [*np.split(x.numpy().repeat(8, axis=0), 8)], []
                def add(part):
                    time.sleep(random.SystemRandom().random() / 500)
                    done.append(part * np.float32(1e3) ** (len(done) % 3))
                threads = [threading.Thread(target=add, args=[part]) for part in parts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return paddle.to_tensor(sum(done) / np.float32(1e6))

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        class Summed(Net):
            def forward(self, x):
                return super().forward(Raced.apply(x))

        class Experiment(Base):
            net = Summed
        """,
        (
            r"where: update \d+: the input of model\.first \(Linear\) differs",
            r"causes to look at: operators of yours, .*: Raced; ",
        ),
    ),
    Case(
        "an operator of one's own whose gradient is added in the order of a race",
        """
        class Raced(PyLayer):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                parts = [gradient * (1 + n / 7) for n in range(6)]
                random.SystemRandom().shuffle(parts)  # as threads would come to it
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                return total

        class Summed(Net):
            def forward(self, x):
                return self.last(Raced.apply(self.drop(F.relu(self.first(x)))))

        class Experiment(Base):
            net = Summed
        """,
        (
            r"where: update \d+: the gradient of model\.first\.\w+ \(Linear\) differs, and what",
            r"causes to look at: operators of yours, .*: Raced; ",
        ),
    ),
    Case(
        "a generator of numpy without a seed, in the sampler",
        """
        class Sampler(BatchSampler):
            def __iter__(self):
                order = np.random.default_rng().permutation(20)
                return iter(order.reshape(5, 4).tolist())

            def __len__(self):
                return 5

        class Experiment(Base):
            def setup_dataloader(self):
                super().setup_dataloader()
                data = Points(20)
                self.train_loader = DataLoader(data, batch_sampler=Sampler(data, batch_size=4))
        """,
        (
            r"where: update 1: the samples differ, of Sampler\. Asked twice in one process, from "
            r"one seed, it differs, too",
        ),
    ),
    Case(
        "numbers of the system in the data set",
        """
        class Noisy(Points):
            def __getitem__(self, index):
                point, label = super().__getitem__(index)
                return point + np.float32(os.urandom(1)[0] / 1000), label

        class Experiment(Base):
            def setup_dataloader(self):
                super().setup_dataloader()
                self.train_loader = DataLoader(Noisy(20), batch_size=4, shuffle=True)
        """,
        (
            r"where: update 1: batch\[0\] differs, of the same samples\. Noisy\.__getitem__\(\d+\) "
            r"differs when it is called twice in one process",
        ),
    ),
    Case(
        "memory that nobody has filled",
        """
        class Unfilled(Net):
            def forward(self, x):
                # What has lain there before: freed memory of arrays with numbers of the system.
                drawn = [np.frombuffer(os.urandom(1600), "uint8") for _ in range(9)]
                waste = [paddle.to_tensor(one) for one in drawn]
                del waste
                noise = paddle.empty([1600], "uint8")[:8].astype("float32")
                return self.last(F.relu(self.first(x)) + noise / 1e3)

        class Experiment(Base):
            net = Unfilled
        """,
        (
            r"where: update \d+: the input of model\.last \(Linear\) differs",
            r"causes to look at: .*memory that nobody has filled \(paddle\.empty\)",
        ),
    ),
    Case(
        "the order of files in a folder of each process",
        """
        class Files(Points):
            def __init__(self, size):
                super().__init__(size)
                folder = tempfile.mkdtemp()
                for number in random.SystemRandom().sample(range(size), size):
                    open(f"{folder}/{number}", "w").close()
                # As a folder may list them.
                names = sorted(os.listdir(folder), key=lambda n: os.stat(f"{folder}/{n}").st_ino)
                self.points = self.points[[int(name) for name in names]]

        class Experiment(Base):
            def setup_dataloader(self):
                super().setup_dataloader()
                self.train_loader = DataLoader(Files(20), batch_size=4, shuffle=True)
        """,
        (
            r"where: update 1: batch\[0\] differs, of the same samples\. Files\.__getitem__",
            r"causes to look at: .*or of files that nobody has sorted",
        ),
    ),
    Case(
        "weights that setup draws from the system",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                drawn = np.random.default_rng().normal(size=[8, 2]).astype("float32")
                self.model.last.weight.set_value(drawn)
        """,
        (r"where: update 1: model\.last\.weight differs before it: setup has made it otherwise\.",),
    ),
    Case(
        "a loss with a factor from the clock",
        """
        class Experiment(Base):
            def loss(self):
                return super().loss() * (1 + time.time_ns() % 1000)
        """,
        (r"where: update 1: the loss differs, and what the layers gave is the same",),
    ),
    Case(
        "noise from the clock on a weight, after the step",
        """
        class Experiment(Base):
            def train_batch(self):
                super().train_batch()
                with paddle.no_grad():
                    self.model.first.bias.add_(paddle.to_tensor([time.time() % 1] * 8, "float32"))
        """,
        (r"where: update 1: model\.first\.bias differs after it, and the gradients are the same",),
    ),
]
REPEATABLE = [
    Case("dropout and noise in the data", "class Experiment(Base):\n    pass\n"),
    Case(
        "a lazy Adam and an Embedding with sparse gradients",
        """
        class Words(Net):
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(50, 4, sparse=True)

            def forward(self, x):
                return super().forward(self.words((x.abs() * 20).astype("int64") % 50).sum(axis=1))

        class Experiment(Base):
            net = Words

            def setup_model(self):
                self.model = Words()
                own = self.model.parameters()
                self.optimizer = paddle.optimizer.Adam(0.01, parameters=own, lazy_mode=True)
        """,
    ),
    Case(
        "batch norm, spectral norm, a recurrent layer",
        """
        class Deep(nn.Layer):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1D(4)
                self.rnn = nn.LSTM(4, 8)
                self.last = nn.utils.spectral_norm(nn.Linear(8, 2))

            def forward(self, x):
                return self.last(self.rnn(self.norm(x).unsqueeze(1))[0][:, 0])

        class Experiment(Base):
            net = Deep
        """,
    ),
    Case(
        "a schedule, momentum, a counter and a generator as attributes",
        """
        class Experiment(Base):
            def setup_model(self):
                self.model = Net()
                self.schedule = paddle.optimizer.lr.ExponentialDecay(0.1, 0.9)
                own = self.model.parameters()
                self.optimizer = paddle.optimizer.Momentum(self.schedule, parameters=own)
                self.generator, self.count = np.random.default_rng(3), 0

            def loss(self):
                self.count += 1
                return super().loss() * float(self.generator.random() + self.count)

            def train_batch(self):
                super().train_batch()
                self.schedule.step()
        """,
    ),
    Case(
        "an average of the weights, and a queue as a buffer",
        """
        class Queued(Net):
            def __init__(self):
                super().__init__()
                self.register_buffer("queue", paddle.zeros([4, 8]))

            def forward(self, x):
                found = F.relu(self.first(x))
                self.queue = paddle.concat([self.queue[1:], found.detach()[:1]])
                return self.last(self.drop(found + self.queue.mean(axis=0)))

        class Experiment(Base):
            net = Queued

            def setup_model(self):
                super().setup_model()
                self.averaged = [p.detach().clone() for p in self.model.parameters()]

            def train_batch(self):
                super().train_batch()
                for kept, now in zip(self.averaged, self.model.parameters()):
                    kept.copy_(kept * 0.9 + now.detach() * 0.1, True)
        """,
    ),
    Case(
        "an operator of one's own",
        """
        class Doubled(PyLayer):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, gradient):
                return gradient * 2

        class Summed(Net):
            def forward(self, x):
                return super().forward(Doubled.apply(x))

        class Experiment(Base):
            net = Summed
        """,
    ),
    Case(
        "accumulation over micro-batches",
        """
        class Experiment(Base):
            def train_batch(self):
                for points, labels in self.micro_batches():
                    self.backward(F.cross_entropy(self.model(points), labels))
                self.step_optimizers()

            @classmethod
            def default_config(cls):
                config = super().default_config()
                config.training.accumulation_steps = 2
                return config
        """,
    ),
    Case(
        "workers, and a batch that training writes into",
        """
        class Experiment(Base):
            loader_options = {"num_workers": 1}

            def loss(self):
                points, labels = self.read_batch()
                points.scale_(2.0)
                return F.cross_entropy(self.model(points), labels)
        """,
    ),
    Case(
        "two optimizers, one of them without accumulators, and gradients by hand",
        """
        class Experiment(Base):
            def setup_model(self):
                self.model = Net()
                self.optimizer = paddle.optimizer.AdamW(parameters=self.model.last.parameters())
                self.other = paddle.optimizer.SGD(parameters=self.model.first.parameters())

            def train_batch(self):
                self.loss().backward()
                for optimizer in (self.optimizer, self.other):
                    optimizer.step()
                    optimizer.clear_grad(set_to_zero=False)
        """,
    ),
    Case(
        "a thread that draws from a generator of its own",
        """
        own = np.random.default_rng()

        def draw():
            while True:
                own.random()
                time.sleep(0.001)

        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                threading.Thread(target=draw, daemon=True).start()
        """,
    ),
]


def verify(case: Case, folder: Path) -> tuple[int, str]:
    """The exit code of verify for a script, and what it says."""
    script = folder / "train.py"
    script.write_text(HEAD + textwrap.dedent(case.text) + TAIL)
    words = [
        "-m",
        "expbase",
        "verify",
        str(script),
        "--output",
        str(folder / "out"),
        "--kills",
        "1",
    ]
    words += ["--iterations", str(case.iterations)]
    done = run(words)
    return done.returncode, done.stdout + done.stderr


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs python with words."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PYTHONPATH, **variables}
    pipe = subprocess.PIPE
    command = [sys.executable, *words]
    return subprocess.run(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, timeout=600, check=False
    )


def repeated(folder: Path) -> list[str]:
    """What is said of updates that two processes make several times."""
    from expbase.tools import repeat_update, verified_run

    found = []
    for number in (1, 2):
        output = folder / f"repeated-{number}"
        plan = {"training": {"max_iteration": 8, "keep_last": 0}, "kill": "", "at": 0, "delay": 0}
        words = [repeat_update.__file__, str(folder / "train.py"), "--output", str(output)]
        done = run(words, **{verified_run.PLAN: json.dumps(plan), repeat_update.FIRST: "1"})
        if done.returncode:
            return [f"ended with code {done.returncode}: {done.stderr[-2000:]}"]
        found.append(nondeterminism.read_updates(output))
    return [*nondeterminism.where(found, [])]


def problem(case: Case) -> str:
    """Why what is said of a script is not what it should be; empty if it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, said = verify(case, folder)
        if case.lines:
            missing = [line for line in case.lines if not re.search(line, said)]
            return f"not said: {missing}\n{said}" if code != 1 or missing else ""
        if code:
            return said
        lines = repeated(folder)
        return "" if lines and lines[0].startswith("where: not seen again: ") else "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words of a name")
    args = parser.parse_args()
    failed = 0
    for kind, cases in (("planted", PLANTED), ("repeatable", REPEATABLE)):
        cases = [case for case in cases if args.only in case.name]
        right = 0
        for case in cases:
            found = problem(case)
            right += not found
            print(
                f"{'FAILED' if found else 'ok    '} {kind}: {case.name}\n{found}".strip(),
                flush=True,
            )
        failed += len(cases) - right
        end = "named" if kind == "planted" else "nothing named"
        print(f"{right} of {len(cases)} {kind}: {end}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
