"""In the manner of PaddleNLP: dataclasses of arguments and state, a collator, decay by name."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import ExperimentBase, main


@dataclass
class TrainingArguments:
    learning_rate: float = 0.01
    warmup_steps: int = 4
    max_grad_norm: float = 1.0
    per_device_train_batch_size: int = 4


@dataclass
class TrainerState:
    global_step: int = 0
    best_metric: float = 0.0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class DataCollatorWithPadding:
    tokenizer: Any
    pad_to_multiple_of: int = 4

    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        longest += -longest % self.pad_to_multiple_of
        ids = [
            f["input_ids"] + [self.tokenizer.pad_token_id] * (longest - len(f["input_ids"]))
            for f in features
        ]
        return {"input_ids": np.array(ids), "labels": np.array([f["labels"] for f in features])}


class Tokenizer:
    pad_token_id = 0

    def __init__(self, words):
        self.vocab = {word: number for number, word in enumerate(["[PAD]", *words])}
        self._cache = {}

    def __call__(self, text):
        if text not in self._cache:
            self._cache[text] = [self.vocab[word] for word in text.split()]
        return self._cache[text]


class Reviews(Dataset):
    def __init__(self, tokenizer, size):
        random = np.random.RandomState(4)
        self.texts = [
            " ".join(random.choice(["good", "bad", "so"], random.randint(2, 7)))
            for _ in range(size)
        ]
        self.tokenizer = tokenizer

    def __getitem__(self, index):
        text = self.texts[index]
        return {"input_ids": self.tokenizer(text), "labels": int("good" in text)}

    def __len__(self):
        return len(self.texts)


class Classifier(nn.Layer):
    def __init__(self, vocab):
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(vocab, 8), nn.LayerNorm(8)
        self.encoder, self.dropout = nn.TransformerEncoderLayer(8, 2, 16, 0.1), nn.Dropout(0.1)
        self.classifier = nn.Linear(8, 2)

    def forward(self, input_ids):
        return self.classifier(
            self.dropout(self.encoder(self.norm(self.embeddings(input_ids))).mean(1))
        )


class Finetuner(ExperimentBase):
    def setup_dataloader(self):
        self.training_args, self.state = TrainingArguments(), TrainerState()
        self.tokenizer = Tokenizer(["good", "bad", "so"])
        self.data_collator = DataCollatorWithPadding(self.tokenizer)
        size = self.training_args.per_device_train_batch_size
        how = {"batch_size": size, "collate_fn": self.data_collator}
        self.train_loader = DataLoader(Reviews(self.tokenizer, 22), shuffle=True, **how)
        self.valid_loader = DataLoader(Reviews(self.tokenizer, 9), **how)

    def setup_model(self):
        self.model = Classifier(len(self.tokenizer.vocab))
        args = self.training_args
        self.lr_scheduler = paddle.optimizer.lr.LambdaDecay(
            args.learning_rate, lambda step: min(1.0, step / args.warmup_steps)
        )
        decayed = [
            p.name for n, p in self.model.named_parameters() if "norm" not in n and "bias" not in n
        ]
        self.optimizer = paddle.optimizer.AdamW(
            self.lr_scheduler, parameters=self.model.parameters(), weight_decay=0.01,
            apply_decay_param_fun=lambda name: name in decayed,
            grad_clip=nn.ClipGradByGlobalNorm(args.max_grad_norm),
        )  # fmt: skip

    def train_batch(self):
        inputs = self.read_batch()
        labels = inputs.pop("labels")
        loss = F.cross_entropy(self.model(**inputs), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.total_flos += float(inputs["input_ids"].size)
        self.state.log_history.append({"step": self.state.global_step, "loss": float(loss)})
        self.log(loss=loss, flos=self.state.total_flos, logged=len(self.state.log_history))

    def valid(self):
        right = [
            float((self.model(b["input_ids"]).argmax(-1) == b["labels"]).sum())
            for b in self.valid_batches()
        ]
        return self.average({"accuracy": sum(right) / 9}, weight=9)

    def on_evaluate_end(self, results):
        self.state.best_metric = max(self.state.best_metric, results["accuracy"])


if __name__ == "__main__":
    main(Finetuner)
