"""Generative models: a GAN on eight Gaussians on a ring, of which it should find each.

Two networks, whose optimizers step at different frequencies.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.io import DataLoader

from expbase import Config, ExperimentBase, main

NUM_MODES, RADIUS, SD = 8, 2.0, 0.1
ANGLES = 2 * np.pi * np.arange(NUM_MODES) / NUM_MODES
CENTRES = RADIUS * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)  # [modes, 2]


def perceptron(inputs, hidden, outputs):
    return paddle.nn.Sequential(
        *(paddle.nn.Linear(inputs, hidden), paddle.nn.ReLU()),
        *(paddle.nn.Linear(hidden, hidden), paddle.nn.ReLU()),
        paddle.nn.Linear(hidden, outputs),
    )


class Gan(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"num_points": 10000, "batch_size": 128})
        config.model = Config({"noise_size": 2, "hidden_size": 64, "pack": 2})
        config.optim = Config({"lr": 2e-3, "beta1": 0.5, "generator_interval": 2})
        return config

    def setup_dataloader(self):
        draw = np.random.default_rng(0)  # the same points whatever the seed of the run
        centres = CENTRES[draw.integers(NUM_MODES, size=self.config.data.num_points)]
        points = draw.normal(centres, SD).astype("float32")
        batch_size = self.config.data.batch_size
        self.train_loader = DataLoader(points, batch_size=batch_size, shuffle=True, drop_last=True)

    def setup_model(self):
        model = self.config.model
        generator = perceptron(model.noise_size, model.hidden_size, 2)
        discriminator = perceptron(2 * model.pack, model.hidden_size, 1)
        self.generator = self.data_parallel(generator)
        self.discriminator = self.data_parallel(discriminator)
        self.g_optimizer = self.adam(generator)
        self.d_optimizer = self.adam(discriminator)

    def adam(self, net):
        optim = self.config.optim
        return paddle.optimizer.Adam(optim.lr, optim.beta1, parameters=net.parameters())

    def generate(self, num_points):
        return self.generator(paddle.randn([num_points, self.config.model.noise_size]))

    def judge(self, points):
        # A few points at once: so it sees a lack of variety (PacGAN, arXiv:1712.04086).
        return self.discriminator(points.reshape([-1, 2 * self.config.model.pack]))

    def train_batch(self):
        real = self.read_batch()
        with paddle.no_grad():
            fake = self.generate(len(real))
        d_loss = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()
        self.backward(d_loss)
        self.step_optimizers(self.d_optimizer)
        self.log(d_loss=d_loss)

        if self.iteration % self.config.optim.generator_interval == 0:
            g_loss = F.softplus(-self.judge(self.generate(len(real)))).mean()
            self.backward(g_loss)
            self.step_optimizers(self.g_optimizer)
            self.d_optimizer.clear_grad()  # g_loss left gradients in the discriminator, too
            self.log(g_loss=g_loss)

    def valid(self):
        points = self.generate(4000).numpy()
        distances = np.linalg.norm(points[:, None] - CENTRES, axis=-1)  # [points, modes]
        # For each mode the share of the samples near it; found: at least a third of a fair share.
        shares = np.mean(self.gather((distances < 3 * SD).mean(axis=0)), axis=0)
        return {"modes": sum(shares >= 1 / NUM_MODES / 3), "quality": sum(shares)}


if __name__ == "__main__":
    main(Gan)
