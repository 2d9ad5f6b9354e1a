"""Counts mistakes: each is a small script, run as a user would, and the line that it answers with.

None may end with exit code 0 in silence. Then the six experiments, in short, and odd ones that are
right: none of them may be warned of anything. With --no_advice each is run a second time, without
the doctor: its lines are gone, all others, the exit code and the bits are the same.

    python tests/proofs/user_mistakes.py [--only WORDS OF A NAME] [--no_advice]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from tiny import run_script  # noqa: E402

HEAD = """
import paddle
import paddle.nn.functional as F
from paddle.io import BatchSampler, DataLoader
from tiny import Points, Tiny, make

from expbase import Config, ExperimentBase, main, on, rank_zero_only


class Base(Tiny):
    def setup_model(self):
        super().setup_model()
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())

    def loss(self):
        points, labels = self.read_batch()
        loss = F.cross_entropy(self.model(points), labels)
        self.log(loss=loss)
        return loss

    def update(self, *optimizers):
        for optimizer in optimizers or [self.optimizer]:
            optimizer.step()
            optimizer.clear_grad()

    def train_batch(self):
        self.loss().backward()
        self.update()
"""
TAIL = """
if __name__ == "__main__":
    main(Experiment)
"""
DEFAULTS = (
    r"training\.max_iteration is missing; .* Begin default_config with .*, and return the config"
)
WORDS = ("max_iteration=6", "valid_interval=3", "save_interval=2", "log_interval=2")


@dataclass(frozen=True)
class Case:
    """A script, and what a user sees.

    Attributes:
        name: What is wrong, or odd.
        text: The script: a class Experiment between HEAD and TAIL.
        line: A regular expression for what it says; "": it must not say anything.
        code: The exit code.
        ranks: The number of processes.
        words: Training keys and values, KEY=VALUE, in addition to WORDS.
    """

    name: str
    text: str
    line: str = ""
    code: int = 0
    ranks: int = 1
    words: Sequence[str] = ()

    @property
    def script(self) -> str:
        """All of it."""
        return HEAD + textwrap.dedent(self.text) + TAIL


def update(name: str, body: str, line: str = "", code: int = 0, **options: object) -> Case:
    """A case of a train_batch."""
    body = textwrap.indent(textwrap.dedent(body), " " * 8)
    text = f"class Experiment(Base):\n    def train_batch(self):\n{body}"
    return Case(name, text, line, code, **options)  # type: ignore[arg-type]


MISTAKES = [
    # --- the update ---
    update(
        "no step",
        "self.loss().backward()\nself.optimizer.clear_grad()",
        r"\[6\] in 6 updates no parameter has changed; expected self\.backward",
    ),
    update(
        "no step, and gradients add up",
        "self.loss().backward()",
        r"in 6 updates no parameter has changed; expected self\.backward.*step",
    ),
    update("no backward", "self.loss()\nself.update()", "in 6 updates no parameter has changed"),
    update(
        "no step, in a run that is long enough to be told early",
        "self.loss().backward()\nself.optimizer.clear_grad()",
        r"\[20\] in 20 updates no parameter has changed; expected self\.backward",
        words=["max_iteration=30", "save_interval=30", "valid_interval=30"],
    ),
    update(
        "nothing is logged, in a run that is long enough to be told early",
        "points, labels = self.read_batch()\n"
        "F.cross_entropy(self.model(points), labels).backward()\nself.update()",
        r"\[20\] in 20 updates nothing was logged",
        words=["max_iteration=30", "save_interval=30", "valid_interval=30"],
    ),
    update(
        "nothing is logged",
        "points, labels = self.read_batch()\n"
        "F.cross_entropy(self.model(points), labels).backward()\nself.update()",
        r"in 6 updates nothing was logged.*expected self\.log\(loss=loss\)",
    ),
    update(
        "no clear_grad",
        "self.loss().backward()\nself.optimizer.step()",
        r"\[2\] self\.optimizer: has stepped again with the gradients.*expected clear_grad\(\)",
    ),
    update(
        "no clear_grad, and a step with every third batch",
        "self.loss().backward()\nif self.iteration % 3 == 0:\n    self.optimizer.step()",
        r"\[6\] self\.optimizer: has stepped again with the gradients",
        words=["log_interval=1"],
    ),
    Case(
        "no clear_grad, and a learning rate that begins at 0",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.LinearWarmup(0.1, 3, 0.0, 0.1)
                self.optimizer = paddle.optimizer.Adam(
                    self.rate, parameters=self.model.parameters()
                )

            def train_batch(self):
                self.loss().backward()
                self.optimizer.step()
                self.rate.step()
        """,
        r"\[2\] self\.optimizer: has stepped again with the gradients",
    ),
    update(
        "no clear_grad, with shares",
        """
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            self.backward(loss)
            self.log(loss=loss)
        self.optimizer.step()
        """,
        r"\[2\] self\.optimizer: has stepped again with the gradients",
        words=["shares=2"],
    ),
    update(
        "a loss that is not divided among micro-batches",
        """
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            loss.backward()
            self.log(loss=loss)
        self.update()
        """,
        r"\[1\] loss\.backward\(\) \(.*\.py:\d+\) in the loop over micro_batches\(\): 4 gradients",
        words=["accumulation_steps=4"],
    ),
    update(
        "a loss that is divided by another number of micro-batches",
        """
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            (loss / 2).backward()
            self.log(loss=loss)
        self.update()
        """,
        r"\[1\] loss\.backward\(\) \(.*\.py:\d+\) in the loop over micro_batches\(\): 8 gradients "
        r"are added up, and the loss is divided by 2; expected self\.backward\(loss\)",
        words=["accumulation_steps=8"],
    ),
    Case(
        "a hook of a step that is made by hand",
        """
        class Experiment(Base):
            @on("on_before_optimizers_step")
            def look(self):
                print("a step")
        """,
        r"\[1\] self\.optimizer has stepped, and on_before_optimizers_step, at which the "
        r"experiment acts, has not come; expected self\.step_optimizers\(\)",
    ),
    Case(
        "a hook of a step that is made by hand with every third batch",
        """
        from expbase.extras.all_events import AllEvents

        class Experiment(AllEvents, Base):
            def on_after_optimizers_step(self):
                print("a step")

            def on_after_backward(self):
                print("a backward")

            def train_batch(self):
                self.loss().backward()
                if self.iteration % 3 == 0:
                    self.update()
        """,
        r"\[3\] self\.optimizer has stepped, and on_after_backward, at which .*; "
        r"on_after_optimizers_step, at which .*; expected self\.backward\(loss\), and "
        r"self\.step_optimizers\(\)",
    ),
    Case(
        "GradientClipping, and a step by hand",
        """
        from expbase.extras.mixins import GradientClipping

        class Experiment(GradientClipping, Base):
            pass
        """,
        r"\[1\] self\.optimizer has stepped, and GradientClipping has clipped nothing; expected "
        r"self\.step_optimizers\(\), or self\.clip_gradients\(self\.optimizer\) before the step",
    ),
    Case(
        "a schedule that nobody steps",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                rate = paddle.optimizer.lr.LinearWarmup(0.1, 500, 0.01, 0.1)
                self.optimizer = paddle.optimizer.SGD(rate, self.model.parameters())
        """,
        r"\[11\] in 11 updates nobody has stepped the LinearWarmup of self\.optimizer: its "
        r"learning rate is still 0\.01; expected its step\(\) after each update, or at each epoch",
        words=["max_iteration=15"],
    ),
    Case(
        "a layer that no optimizer updates",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.head = paddle.nn.Linear(2, 2)

            def loss(self):
                points, labels = self.read_batch()
                loss = F.cross_entropy(self.head(self.model(points)), labels)
                self.log(loss=loss)
                return loss
        """,
        r"\[1\] self\.head has got gradients from the loss, and no optimizer updates it",
    ),
    # --- the template's attributes ---
    update(
        "counts epochs", "super().train_batch()\nself.epoch += 1", r"self\.epoch: 2 given; exp", 78
    ),
    update(
        "counts epochs when they end",
        "super().train_batch()\n"
        "if self.internals.batch_in_epoch == self.batches_per_epoch:\n    self.epoch += 1",
        r"self\.epoch: 2 given; expected it to be set in startup\(\).* another name for yours",
        78,
        words=["max_iteration=20"],
    ),
    update(
        "counts iterations",
        "super().train_batch()\nself.iteration += 1",
        r"self\.iteration: 2 given; expected it to be set in startup",
        78,
    ),
    update(
        "writes the rank",
        "super().train_batch()\nself.rank = 1",
        r"self\.rank: 1 given, and expbase sets it; expected another name",
        78,
    ),
    Case(
        "another config",
        """
        class Experiment(Tiny):
            def setup_model(self):
                super().setup_model()
                self.config = {}
        """,
        r"self\.config: \{\} given, and expbase sets it; expected another name",
        78,
    ),
    Case(
        "a list of losses called log",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.log = []
        """,
        r"self\.log: list given, which hides the method of that name; expected another name",
        78,
    ),
    Case(
        "another logger",
        """
        import logging

        class Experiment(Tiny):
            def setup_dataloader(self):
                super().setup_dataloader()
                self.logger = logging.getLogger("mine")
        """,
        r"self\.logger: .* given, and expbase sets it; expected another name",
        78,
    ),
    Case(
        "a visualizer of another kind",
        """
        class Writer:
            def add_scalar(self, tag, value, step): ...
            def close(self): ...

        class Experiment(Tiny):
            def setup_visualizer(self):
                self.visualizer = Writer()
        """,
        r"self\.visualizer: is a Writer; expected a class derived from expbase\.record\.vis",
        78,
    ),
    # --- calls ---
    update(
        "Lightning's log",
        'loss = self.loss()\nloss.backward()\nself.update()\nself.log("loss", loss)',
        r"log: 'loss' given without a name; expected self\.log\(loss=loss\) or self\.log\(\{\"loss",
        78,
    ),
    update(
        "log of a tensor",
        "loss = self.loss()\nloss.backward()\nself.update()\nself.log(loss)",
        r"log: a Tensor of shape \[\] given without a name; expected self\.log",
        78,
    ),
    Case(
        "default_config returns nothing",
        """
        class Experiment(Tiny):
            @classmethod
            def default_config(cls):
                config = super().default_config()
                config.optim = Config({"lr": 0.1})
        """,
        DEFAULTS,
        78,
    ),
    Case(
        "default_config without training",
        """
        class Experiment(Tiny):
            @classmethod
            def default_config(cls):
                return Config({"optim": Config({"lr": 0.1})})
        """,
        DEFAULTS,
        78,
    ),
]

TWO_NETS = """
class Experiment(Base):
    def setup_model(self):
        super().setup_model()
        self.other = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
        self.other_optimizer = paddle.optimizer.Adam(parameters=self.other.parameters())
"""
RANKS = (
    Case(
        "loaders of unequal length",
        """
class Experiment(Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        self.train_loader = DataLoader(Points(24 if self.rank else 40), batch_size=4)
""",
        r"self\.train_loader: 5 batches on rank 0, 3 batches on rank 1; expected the same",
        78,
        2,
    ),
    Case(
        "another config on each rank",
        """
class Experiment(Tiny):
    def prepare(self):
        self.config.training.log_interval += self.rank
""",
        r"config\.training\.log_interval: 2 on rank 0, 3 on rank 1; expected the same",
        78,
        2,
    ),
    Case(
        "another model on each rank",
        """
class Experiment(Tiny):
    def setup_model(self):
        super().setup_model()
        self.head = paddle.nn.Linear(2, 2 + self.rank)
""",
        r"head: 'weight': float32 \[2, 2\] on rank 0, float32 \[2, 3\] on rank 1",
        78,
        2,
    ),
    Case(
        "results of valid without average",
        """
class Experiment(Tiny):
    def valid(self):
        return {"size": sum(len(labels) for _, labels in self.valid_batches())}
""",
        r"WARNING: \[3\] valid: size: 6\.0 on rank 0, 4\.0 on rank 1; rank 0's is used .*average",
        0,
        2,
    ),
    Case(
        "rank_zero_only round a valid that averages",
        """
class Experiment(Tiny):
    @rank_zero_only
    def valid(self):
        return super().valid()
""",
        r"Experiment\.valid: self\.average\(\) needs all ranks, and @rank_zero_only",
        78,
        2,
    ),
    Case(
        "a valid that reads on rank 0 alone",
        """
class Experiment(Tiny):
    def valid(self):
        batches = list(self.valid_batches()) if self.rank == 0 else []
        return {"n": 1.0}
""",
        r"valid_batches\(\) was called on rank 0 and not on rank 1, whose share of the data nobody",
        1,
        2,
    ),
    Case(
        "a rank that is killed",
        """
import os

class Experiment(Base):
    def train_batch(self):
        self.loss().backward()
        self.update()
        if self.rank == 1 and self.iteration == 3:
            os.kill(os.getpid(), 9)
""",
        r"rank 1 was killed by SIGKILL",
        137,
        2,
    ),
)
OTHERS = (
    Case(
        "copies of a net that no optimizer updates, on two ranks",
        """
import copy

class Experiment(Base):
    def setup_model(self):
        super().setup_model()
        self.averaged = copy.deepcopy(self.unwrap(self.model))
""",
        ranks=2,
    ),
    Case(
        "a data set that fails",
        """
class Broken(Points):
    def __getitem__(self, index):
        if index == 17:
            raise KeyError("no such label")
        return super().__getitem__(index)

class Experiment(Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        self.train_loader = DataLoader(Broken(40), batch_size=20, num_workers=2)
""",
        r"self\.train_loader: raised by sample 17 of the data set",
        1,
    ),
    Case(
        "a key of one's own that is all but one of ours",
        """
class Experiment(Tiny):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.eval_interval = 5
        return config
""",
        r"training: unknown key 'eval_interval'\. Did you mean 'valid_interval'\?",
        78,
    ),
    Case(
        "a mistyped monitor",
        "class Experiment(Tiny):\n    pass\n",
        r"training\.monitor: 'acuracy' given; expected one of the metrics .* accuracy",
        78,
        words=["monitor=acuracy"],
    ),
    Case(
        "a parameter that is not finite, and is not logged",
        """
class Experiment(Base):
    def train_batch(self):
        self.loss().backward()
        self.update()
        if self.iteration == 3:
            self.model[0].weight.set_value(paddle.full([4, 8], float("nan")))

    def log(self, *args, **scalars):
        pass
""",
        r"not finite: .*model\.0\.weight.* No checkpoint holds it; the last good one is step-0+2",
        1,
        words=["log_interval=0"],
    ),
)

ODD = [
    Case(
        "a GAN whose gradients are cleared before each step",
        TWO_NETS
        + """
    def train_batch(self):
        points, labels = self.read_batch()
        self.optimizer.clear_grad()
        fake = self.other(points)[:, :1] * points
        loss = F.cross_entropy(self.model(fake.detach()), labels)
        loss.backward()
        self.optimizer.step()
        if self.iteration % 3 == 0:
            self.other_optimizer.clear_grad()
            (-F.cross_entropy(self.model(fake), labels)).backward()
            self.other_optimizer.step()
        self.log(loss=loss)
""",
        words=["max_iteration=120", "save_interval=40", "valid_interval=40"],
    ),
    Case(
        "alternating freezes",
        TWO_NETS
        + """
    def train_batch(self):
        points, labels = self.read_batch()
        first = self.iteration // 40 % 2 == 0
        for layer, frozen in ((self.model, not first), (self.other, first)):
            for parameter in layer.parameters():
                parameter.stop_gradient = frozen
        loss = F.cross_entropy(self.model(points) + self.other(points), labels)
        loss.backward()
        self.update(self.optimizer if first else self.other_optimizer)
        self.log(loss=loss)
""",
        words=["max_iteration=120", "save_interval=40", "valid_interval=40"],
    ),
    Case(
        "reinforcement learning, whose buffer is filled first",
        """
        class Experiment(Base):
            def setup_dataloader(self):
                self.train_loader = range(30)  # episodes
                self.steps = []

            def train_batch(self):
                self.read_batch()
                self.steps.append((paddle.randn([4]), paddle.randn([])))
                if len(self.steps) < 120:
                    return
                states, rewards = map(paddle.stack, zip(*self.steps[-10:]))
                loss = ((self.model(states)[:, 0] - rewards) ** 2).mean()
                loss.backward()
                self.update()
                self.log(loss=loss)

            def valid(self):
                return {"reward": 1.0}
        """,
        words=["max_iteration=200", "save_interval=40", "valid_interval=40"],
    ),
    update(
        "a closure that is called several times, and weights that are set",
        """
        points, labels = self.read_batch()

        def closure():
            self.optimizer.clear_grad()
            loss = F.cross_entropy(self.model(points), labels)
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(closure())
            with paddle.no_grad():
                for parameter in self.optimizer._parameter_list:
                    if parameter.grad is not None:
                        parameter.set_value(parameter - 0.1 * parameter.grad)
        self.log(loss=losses[-1])
        """,
    ),
    Case(
        "a gradient penalty",
        """
        class Experiment(Base):
            def setup_model(self):
                linear, tanh = paddle.nn.Linear, paddle.nn.Tanh
                self.model = paddle.nn.Sequential(linear(4, 8), tanh(), linear(8, 2))
                self.optimizer = paddle.optimizer.Adam(parameters=self.model.parameters())

            def train_batch(self):
                points, labels = self.read_batch()
                points.stop_gradient = False
                out = self.model(points)
                [slope] = paddle.grad(out.sum(), points, create_graph=True)
                loss = F.cross_entropy(out, labels) + (slope**2).mean()
                self.optimizer.clear_grad()
                loss.backward()
                self.optimizer.step()
                self.log(loss=loss)
        """,
    ),
    update(
        "gradients added up by hand",
        "(self.loss() / 4).backward()\nif self.iteration % 4 == 0:\n    self.update()",
        words=["max_iteration=40", "save_interval=6"],
    ),
    update(
        "gradients added up by hand, and cleared before the first of them",
        "if self.iteration % 4 == 1:\n    self.optimizer.clear_grad()\n"
        "(self.loss() / 4).backward()\nif self.iteration % 4 == 0:\n    self.optimizer.step()",
        words=["max_iteration=40", "save_interval=6", "log_interval=1"],
    ),
    update(
        "gradients added up by hand, over more updates than the early look waits for",
        "(self.loss() / 25).backward()\nif self.iteration % 25 == 0:\n    self.update()",
        words=["max_iteration=30", "save_interval=30", "valid_interval=30"],
    ),
    Case(
        "a count of one's own that logs and steps, and a buffer",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.count = 0
                self.kept = []

            def train_batch(self):
                points, labels = self.read_batch()
                self.kept.append(points)
                if len(self.kept) < 22:
                    return
                self.count += 1
                loss = F.cross_entropy(self.model(points), labels)
                loss.backward()
                if self.count % 3 == 0:
                    self.update()
                    self.log(loss=loss)
        """,
        words=["max_iteration=30", "save_interval=30", "valid_interval=30"],
    ),
    Case(
        "a learning rate that is 0 for more updates than the early look waits for",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.PiecewiseDecay([22], [0.0, 0.1])
                self.optimizer = paddle.optimizer.SGD(self.rate, self.model.parameters())

            def train_batch(self):
                super().train_batch()
                self.rate.step()
        """,
        words=["max_iteration=30", "save_interval=30", "valid_interval=30"],
    ),
    update(
        "gradients that are stepped with at the beginning of the next update",
        "if self.iteration % 3 == 1:\n    self.update()\n(self.loss() / 3).backward()",
        words=["max_iteration=40", "log_interval=1"],
    ),
    Case(
        "a learning rate that begins at 0, and gradients cleared first",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.LinearWarmup(0.1, 3, 0.0, 0.1)
                self.optimizer = paddle.optimizer.SGD(self.rate, self.model.parameters())

            def train_batch(self):
                loss = self.loss()
                self.optimizer.clear_grad(set_to_zero=False)
                loss.backward()
                self.optimizer.step()
                self.rate.step()
                return None
        """,
        words=["log_interval=1"],
    ),
    update(
        "gradients that are cleared at the beginning of the next update",
        "self.optimizer.clear_grad()\nself.loss().backward()\nself.optimizer.step()",
    ),
    Case(
        "copies of a net that no optimizer updates",
        """
        import copy

        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.target = copy.deepcopy(self.unwrap(self.model))
                self.averaged = copy.deepcopy(self.target)  # trainable, as everybody has it
                for parameter in self.target.parameters():
                    parameter.stop_gradient = True
        """,
    ),
    Case(
        "a GAN whose generator comes first, and whose gradients are cleared before each backward",
        TWO_NETS
        + """
    def train_batch(self):
        points, labels = self.read_batch()
        fake = self.other(points)[:, :1] * points
        self.other_optimizer.clear_grad()
        (-F.cross_entropy(self.model(fake), labels)).backward()
        self.other_optimizer.step()
        self.optimizer.clear_grad()
        loss = F.cross_entropy(self.model(fake.detach()), labels)
        loss.backward()
        self.optimizer.step()
        self.log(loss=loss)
""",
        words=["max_iteration=20"],
    ),
    update(
        "losses that are divided among micro-batches by hand",
        """
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels)
            if self.iteration % 3 == 0:
                loss = (loss + self.model[0].weight.square().mean()) / 4
            elif self.iteration % 3 == 1:
                loss = loss / 4 + self.model[0].weight.square().mean() / 4
            else:
                loss = 0.25 * loss
            loss.backward()
            self.log(loss=4 * loss)
        self.update()
        """,
        words=["accumulation_steps=4"],
    ),
    Case(
        "gradients that are clipped by hand before a step by hand",
        """
        from expbase.extras.mixins import GradientClipping

        class Experiment(GradientClipping, Base):
            def train_batch(self):
                self.loss().backward()
                self.clip_gradients(self.optimizer)
                self.update()
        """,
    ),
    Case(
        "two optimizers of one net by turns, with a hook, and weights that are clipped",
        """
        from expbase.extras.mixins import GradientClipping

        class Experiment(GradientClipping, Base):
            def setup_model(self):
                super().setup_model()
                self.sgd = paddle.optimizer.SGD(0.1, parameters=self.model.parameters())

            def on_before_optimizers_step(self):
                assert self.internals.stepping

            def train_batch(self):
                self.backward(self.loss())
                self.step_optimizers(self.sgd if self.iteration % 2 else self.optimizer)
                for parameter in self.model.parameters():
                    parameter.set_value(parameter.clip(-0.3, 0.3))
        """,
    ),
    update(
        "a loss that is divided by the samples of all micro-batches",
        """
        for points, labels in self.micro_batches():
            loss = F.cross_entropy(self.model(points), labels, reduction="sum")
            (loss / (4 * 20)).backward()
            self.log(loss=loss / 20)
        self.update()
        """,
        words=["accumulation_steps=4"],
    ),
    Case(
        "a schedule that goes by epochs, in a trial that is shorter than one",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.StepDecay(0.1, 30)
                self.optimizer = paddle.optimizer.SGD(self.rate, self.model.parameters())

            def on_train_epoch_end(self):
                self.rate.step()
        """,
    ),
    Case(
        "a schedule that goes by epochs, stepped with the last batch of one",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.StepDecay(0.1, 30)
                self.optimizer = paddle.optimizer.SGD(self.rate, self.model.parameters())

            def train_batch(self):
                super().train_batch()
                if self.internals.batch_in_epoch == self.batches_per_epoch:
                    self.rate.step()
        """,
        words=["max_iteration=25"],
    ),
    Case(
        "a schedule of an optimizer that begins later",
        TWO_NETS
        + """
        rate = paddle.optimizer.lr.NoamDecay(4, 10)
        self.other_optimizer = paddle.optimizer.SGD(rate, self.other.parameters())

    def train_batch(self):
        points, labels = self.read_batch()
        is_late = self.iteration > 15
        loss = F.cross_entropy((self.other if is_late else self.model)(points), labels)
        loss.backward()
        self.update(self.other_optimizer if is_late else self.optimizer)
        if is_late:
            self.other_optimizer._learning_rate.step()
        self.log(loss=loss)
""",
        words=["max_iteration=20"],
    ),
    Case(
        "a schedule that goes by validations, which are rare",
        """
        class Experiment(Base):
            def setup_model(self):
                super().setup_model()
                self.rate = paddle.optimizer.lr.ReduceOnPlateau(0.1)
                self.optimizer = paddle.optimizer.SGD(self.rate, self.model.parameters())

            def on_evaluate_end(self, results):
                self.rate.step(results["accuracy"])
        """,
        words=["max_iteration=25", "valid_interval=20"],
    ),
    Case(
        "a loop of one's own that takes what train_batch returns, and logs it once",
        """
        class Experiment(Base):
            def train(self):
                while self.going_on():
                    loss = self.train_batch()
                    if self.iteration == 3:
                        self.log(loss=loss)
                    self.end_iteration()

            def train_batch(self):
                points, labels = self.read_batch()
                loss = F.cross_entropy(self.model(points), labels)
                loss.backward()
                self.update()
                return loss
        """,
        words=["log_interval=1"],
    ),
    Case(
        "mixins that call super, and a class that decides",
        """
        class One(ExperimentBase):
            def on_save_checkpoint(self):
                return {**(super().on_save_checkpoint() or {}), "one": 1}

        class Other(ExperimentBase):
            def on_save_checkpoint(self):
                return {"other": 2}

        class Both(One, Other, Tiny): ...

        class Third(ExperimentBase):
            def on_save_checkpoint(self):
                return {"third": 3}

        class Experiment(Third, Both):
            def on_save_checkpoint(self):
                return {**Third.on_save_checkpoint(self), **Both.on_save_checkpoint(self)}
        """,
    ),
]
EXPERIMENTS = {  # with what makes them short
    "charlm": ["data.num_files=20", "optim.warmup_iterations=2"],
    "ctr": ["data.lines_per_day=2000", "data.folder={tmp}", "training.max_epoch=0"],
    "digits": [],
    "flow": ["data.num_held_out=1000", "drawing.interval=40"],
    "gan": ["data.num_points=1000"],
    "line": [],
    "multitask": ["data.num_files=20"],
    "pinn": ["lbfgs.num_collocation=200"],
}


def said(text: str) -> list[str]:
    """What is a warning or an error in an output; every rank and every traceback has its own."""
    found = re.findall(r"^.*(?:WARNING: |ERROR: |Error: |\.py: error: ).*$", text, re.MULTILINE)
    return list(dict.fromkeys(re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in found))


def run(case: Case, folder: Path, of_whom: Counter[str] | None = None) -> bool:
    """Runs one script; tells whether it said what is expected, and prints it.

    With `of_whom` it is run without the doctor, too, and counted whose line it is.
    """
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(case.script)
    words = [f"training.{word}" for word in (*WORDS, *case.words)]
    words += ["--output", str(folder / "run"), "--device", "cpu"]
    words += ["--nprocs", str(case.ranks)]
    result = run_script(script, *words)
    text = result.stdout + result.stderr
    lines = said(text)
    matching = [line for line in text.splitlines() if case.line and re.search(case.line, line)]
    good = bool(matching) if case.line else not lines
    good = good and result.returncode == case.code
    print(f"{'ok ' if good else 'BAD'} {case.name}: exit {result.returncode}", flush=True)
    for line in matching[:1] or lines or ["(silence)"] * bool(case.line):
        print(f"      {line.strip()}", flush=True)
    if of_whom is not None:
        words[words.index("--output") + 1] = str(folder / "alone")
        alone = run_script(script, *words, "--no_advice")
        left = said(alone.stdout + alone.stderr)
        is_left = any(re.search(case.line, line) for line in alone.stderr.splitlines())
        whose = "nobody's" if not case.line else "the core's" if is_left else "the doctor's"
        is_same = {*map(place_free, left)} <= {*map(place_free, lines)}
        is_same &= alone.returncode == result.returncode
        is_same &= bits(folder / "alone") == bits(folder / "run")
        of_whom[whose] += 1
        print(f"      without the doctor: {whose}{'' if is_same else ', and NOT the same'}")
        good = good and is_same
    return good


def place_free(line: str) -> str:
    """A line without the directory of the run."""
    return re.sub(r"\S*/(run|alone)\b", "RUN", line)


def bits(run_dir: Path) -> object:
    """The checksums of the files of each checkpoint."""
    found = sorted(run_dir.glob("checkpoints/*/manifest.json"))
    return [json.loads(path.read_text())["files"] for path in found]


def run_experiment(name: str, folder: Path) -> bool:
    """Runs one of experiments/ in short; tells whether it was right and nothing was warned of."""
    script = TESTS.parent / "experiments" / name / "train.py"
    words = [word.format(tmp=folder) for word in EXPERIMENTS[name]]
    words += ["training.max_iteration=8", "training.log_interval=2"]
    words += ["training.valid_interval=4", "training.save_interval=4"]
    if name != "ctr":  # whose YAML is for the runner
        words += ["--config", str(script.with_name("config.yaml"))]
    result = run_script(script, *words, "--output", str(folder / name), "--device", "cpu")
    lines = said(result.stdout + result.stderr)
    good = result.returncode == 0 and not lines
    print(f"{'ok ' if good else 'BAD'} {name}: exit {result.returncode}", *lines, sep="\n      ")
    return good


def main() -> None:
    """Runs the proof; the exit code says whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="what a name contains")
    parser.add_argument("--no_advice", action="store_true", help="each without the doctor, too")
    given = parser.parse_args()
    only = given.only
    of_whom: Counter[str] | None = Counter() if given.no_advice else None
    with tempfile.TemporaryDirectory() as folder:
        cases = [case for case in (*MISTAKES, *RANKS, *OTHERS, *ODD) if only in case.name]
        held = [run(case, Path(folder) / str(number), of_whom) for number, case in enumerate(cases)]
        held += [run_experiment(name, Path(folder)) for name in EXPERIMENTS if only in name]
    if of_whom is not None:
        print(", ".join(f"{count} {whose}" for whose, count in sorted(of_whom.items())))
    print(f"{sum(held)} of {len(held)} hold")
    sys.exit(not held or not all(held))


if __name__ == "__main__":
    main()
