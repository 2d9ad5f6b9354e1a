"""In the manner of Parakeet: a config of its own, batches unpacked, scalars to VisualDL alone."""

import numpy as np
import paddle
from paddle import nn
from paddle.io import DataLoader, Dataset

from expbase import Config, ExperimentBase, main


class Voices(Dataset):
    def __init__(self, size):
        random = np.random.RandomState(1)
        self.metadata = [(f"utt{n:03d}", int(random.randint(6, 12))) for n in range(size)]

    def __getitem__(self, index):
        name, length = self.metadata[index]
        random = np.random.RandomState(int(name[3:]))
        return random.randint(0, 20, length), random.randn(length, 8).astype("float32")

    def __len__(self):
        return len(self.metadata)


class VoiceCollector:
    def __init__(self, text_pad=0, mel_pad=0.0):
        self.text_pad, self.mel_pad = text_pad, mel_pad

    def __call__(self, examples):
        longest = max(len(text) for text, _ in examples)
        texts = [
            np.pad(t, (0, longest - len(t)), constant_values=self.text_pad) for t, _ in examples
        ]
        mels = [np.pad(m, ((0, longest - len(m)), (0, 0))) for _, m in examples]
        return np.stack(texts), np.stack(mels).astype("float32")


class Experiment(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.model = Config({"hidden": 16, "vocab": 20})
        config.training.update(valid_interval=6, save_interval=4)
        return config

    def setup_dataloader(self):
        collate = VoiceCollector()
        self.train_loader = DataLoader(Voices(26), batch_size=4, shuffle=True, collate_fn=collate)
        self.valid_loader = DataLoader(Voices(8), batch_size=4, collate_fn=collate)

    def setup_model(self):
        hidden = self.config.model.hidden
        self.model = nn.Sequential(
            nn.Embedding(self.config.model.vocab, hidden), nn.Dropout(0.1), nn.Linear(hidden, 8)
        )
        clip = nn.ClipGradByGlobalNorm(1.0)
        self.optimizer = paddle.optimizer.Adam(
            1e-2, parameters=self.model.parameters(), grad_clip=clip
        )
        self.criterion = nn.L1Loss()

    def train_batch(self):
        texts, mels = self.read_batch()
        self.optimizer.clear_grad()
        self.model.train()
        loss = self.criterion(self.model(texts), mels)
        loss.backward()
        self.optimizer.step()
        self.visualizer.add_scalar("train_loss/loss", float(loss), self.iteration)

    @paddle.no_grad()
    def valid(self):
        losses = [float(self.criterion(self.model(t), m)) for t, m in self.valid_batches()]
        self.visualizer.add_scalar("valid/loss", np.mean(losses), self.iteration)


if __name__ == "__main__":
    main(Experiment)
