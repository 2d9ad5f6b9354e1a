"""Multi-task learning, tagging and classification: two heads on one net read lines of code.

The lines are those of Python's own standard library, split by file, see lines.py. The head "tags"
names each character as `tokenize` does, "kinds" names the statement as `ast` does; each update
trains one of them. At the end both name a twentieth of the test lines, in `<head>.predict.jsonl`.
"""

import itertools

import numpy as np
import paddle
import paddle.nn.functional as F
from lines import (
    CHARACTERS,
    CODES_SPEC,
    KIND_SPEC,
    KINDS,
    LENGTH,
    NO_TAG,
    PADDING,
    TAGS,
    TAGS_SPEC,
    split_library,
)
from paddle.io import DataLoader, Subset
from paddle.static import InputSpec

from expbase import Config, main
from expbase.extras.components import Backbone, Composed, Head, MultiHead, Task


class Encoder(Backbone):
    inputs_attr = (CODES_SPEC,)

    def __init__(self, embedding_size, hidden_size):
        super().__init__()
        self.outputs_attr = (
            InputSpec([-1, LENGTH, 2 * hidden_size], "float32", "characters"),
            InputSpec([-1, 2 * hidden_size], "float32", "line"),
        )
        self.embedding = paddle.nn.Embedding(len(CHARACTERS), embedding_size)
        self.gru = paddle.nn.GRU(embedding_size, hidden_size, direction="bidirect")

    def forward(self, inputs):
        codes = inputs["codes"]
        lengths = (codes != PADDING).sum(axis=-1)
        characters, last = self.gru(self.embedding(codes), sequence_length=lengths)
        return {"characters": characters, "line": paddle.concat([last[0], last[1]], axis=-1)}


class Classifier(Head):
    """Chooses names, from one feature of the backbone; a subclass makes the results readable."""

    def __init__(self, feature, label, names):
        super().__init__()
        self.feature, self.label, self.names = feature, label, names
        self.linear = paddle.nn.Linear(feature.shape[-1], len(names))

    @property
    def inputs_attrs(self):
        # In prediction there is no label, and the codes give the line back.
        wanted = self.label if self.phase == "train" else CODES_SPEC
        return {"reader": [wanted], "backbone": [self.feature]}

    @property
    def outputs_attr(self):
        if self.phase == "train":
            return [InputSpec([], "float32", "loss")]
        return [CODES_SPEC, InputSpec(self.label.shape, "int64", "number")]

    def forward(self, inputs):
        logits = self.linear(inputs["backbone"][self.feature.name])
        if self.phase == "train":
            labels = inputs["reader"][self.label.name]
            return {"loss": F.cross_entropy(logits, labels, ignore_index=NO_TAG)}
        return {"codes": inputs["reader"]["codes"], "number": logits.argmax(axis=-1)}

    def batch_postprocess(self, rt_outputs):
        results = []
        for codes, number in zip(rt_outputs["codes"], rt_outputs["number"], strict=True):
            line = "".join(CHARACTERS[code] for code in codes if code != PADDING)
            results.append({"line": line, self.label.name: self.name_of(number, line)})
        return results


class Tags(Classifier):
    def name_of(self, numbers, line):
        """The pieces of the line with their names, without the space between them."""
        pairs = zip(line, numbers, strict=False)  # what padding is called means nothing
        runs = itertools.groupby(pairs, key=lambda pair: self.names[pair[1]])
        return [["".join(c for c, _ in run), name] for name, run in runs if name != "space"]


class Kinds(Classifier):
    def name_of(self, number, line):
        return self.names[number]


class Statements(MultiHead):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"num_files": 120, "batch_size": 64})
        config.model = Config({"embedding_size": 32, "hidden_size": 48})
        config.optim = Config({"lr": 1e-2})
        config.heads.tags_mix_ratio = 1.0  # updates of "tags" for each one of "kinds"
        return config

    def setup_dataloader(self):
        data = self.config.data
        train, valid, test = self.readers = split_library(data.num_files)
        self.train_loader = DataLoader(
            train, batch_size=data.batch_size, shuffle=True, drop_last=True
        )
        self.valid_loader = DataLoader(valid, batch_size=256)
        self.test_loader = DataLoader(test, batch_size=256)

    def setup_model(self):
        backbone = Encoder(**self.config.model)
        characters, line = backbone.outputs_attr
        tags, kinds = Tags(characters, TAGS_SPEC, TAGS), Kinds(line, KIND_SPEC, KINDS)
        net = Composed(backbone, {"tags": tags, "kinds": kinds})
        for reader in self.readers:
            reader.register_with(net)
        self.model = self.data_parallel(net, find_unused_parameters=True)
        ratio = self.config.heads.tags_mix_ratio
        self.setup_tasks({"tags": Task("tags", mix_ratio=ratio), "kinds": Task("kinds")})
        lr = self.config.optim.lr
        self.scheduler = paddle.optimizer.lr.CosineAnnealingDecay(lr, self.total_iterations)
        self.optimizer = paddle.optimizer.Adam(self.scheduler, parameters=net.parameters())

    def train_batch(self):
        name = self.draw_task()
        loss = self.model(self.read_task(name), self.tasks[name].head)["loss"]
        self.backward(loss)
        self.step_optimizers()  # the other head has no gradients, and stays
        self.scheduler.step()
        self.log({f"{name}_loss": loss})

    def valid(self):
        counts = np.zeros([2, 2])  # by head: right ones, all
        for batch in self.valid_batches():
            for row, (head, label) in enumerate([("tags", "tags"), ("kinds", "kind")]):
                number, truth = self.model(batch, head, "predict")["number"], batch[label]
                counts[row] += int((number == truth).sum()), int((truth != NO_TAG).sum())
        right, total = sum(self.gather(counts)).T
        tags, kinds = right / np.maximum(total, 1)
        return {"tags_accuracy": tags, "kinds_accuracy": kinds, "accuracy": (tags + kinds) / 2}

    def on_train_end(self):
        if self.finished:  # and neither failed nor was interrupted
            if self.config.training.monitor:
                self.load_checkpoint("best")
            self.evaluate(self.test_loader)
            reader = self.test_loader.dataset.clone("predict")
            reader.register_with(self.unwrap(self.model))
            some = DataLoader(Subset(reader, range(0, len(reader), 20)), batch_size=64)
            for head in "tags", "kinds":
                self.predict_head(head, some, self.output_dir)


if __name__ == "__main__":
    main(Statements)
