"""Density estimation: a normalizing flow on an endless stream of points whose entropy is known.

The density is a galaxy, see galaxy.py. No model's negative log-likelihood lies below its entropy,
but by luck of the held-out points. VisualDL gets samples of the model beside those of the truth.
"""

import numpy as np
import paddle
from galaxy import Stream, draw_points, entropy, true_nll, unwind
from matplotlib.figure import Figure
from paddle.io import DataLoader

from expbase import Config, ExperimentBase, main


class Coupling(paddle.nn.Layer):
    """Scales and shifts one coordinate, by functions of the other one."""

    def __init__(self, kept, hidden_size):
        super().__init__()
        self.register_buffer("kept", paddle.eye(2)[kept], persistable=False)
        # Not SiLU: on the CPU paddle 3.3 gives it the gradient nan from -89 down.
        self.body = paddle.nn.Sequential(
            *(paddle.nn.Linear(2, hidden_size), paddle.nn.GELU()),
            *(paddle.nn.Linear(hidden_size, hidden_size), paddle.nn.GELU()),
        )
        zero = paddle.nn.initializer.Constant(0.0)  # so that it begins as the identity
        self.log_scale = paddle.nn.Linear(hidden_size, 2, weight_attr=zero)
        self.shift = paddle.nn.Linear(hidden_size, 2, weight_attr=zero)

    def log_scale_and_shift(self, points):
        features, changed = self.body(points * self.kept), 1 - self.kept
        return paddle.tanh(self.log_scale(features)) * changed, self.shift(features) * changed

    def forward(self, x):
        log_scale, shift = self.log_scale_and_shift(x)
        return x * log_scale.exp() + shift, log_scale.sum(axis=-1)

    def inverse(self, z):
        log_scale, shift = self.log_scale_and_shift(z)  # the same: z has the kept coordinate of x
        return (z - shift) * (-log_scale).exp()


class Flow(paddle.nn.Layer):
    """Source: Dinh, Sohl-Dickstein, Bengio: Density estimation using Real NVP, arXiv:1605.08803."""

    def __init__(self, num_couplings, hidden_size):
        super().__init__()
        couplings = [Coupling(number % 2, hidden_size) for number in range(num_couplings)]
        self.couplings = paddle.nn.LayerList(couplings)

    def forward(self, x):
        """What should be standard normal [N, 2], and the logarithm of the determinant [N]."""
        log_determinant = paddle.zeros([len(x)])
        for coupling in self.couplings:
            x, log_factor = coupling(x)
            log_determinant += log_factor
        return x, log_determinant

    def inverse(self, z):
        for coupling in reversed([*self.couplings]):
            z = coupling.inverse(z)
        return z


def nll(z, log_determinant):
    """The negative log-likelihood of each point, in nats, [N]."""
    return (z**2).sum(axis=-1) / 2 + np.log(2 * np.pi) - log_determinant


def criterion(z, log_determinant):
    return nll(z, log_determinant).mean()


class Galaxy(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.data = Config({"batch_size": 512, "num_held_out": 100000})
        config.model = Config({"num_couplings": 8, "hidden_size": 32})
        config.optim = Config({"lr": 5e-3})
        config.drawing = Config({"interval": 500, "num_points": 4000})  # interval in iterations
        return config

    def setup_dataloader(self):
        data, seed = self.config.data, self.config.training.seed
        self.train_loader = Stream(data.batch_size, seed, self.rank, self.world_size)
        draw = np.random.default_rng(0)  # the same points whatever the seed of the run
        self.held_out = draw_points(draw, data.num_held_out)
        # Ready batches: to collect them point by point would take longer than the model does.
        self.valid_loader = DataLoader(self.held_out.reshape([-1, 1000, 2]), batch_size=None)

    def setup_model(self):
        flow = Flow(**self.config.model)
        self.model = self.data_parallel(flow)
        lr = self.config.optim.lr
        self.scheduler = paddle.optimizer.lr.CosineAnnealingDecay(lr, self.total_iterations)
        self.optimizer = paddle.optimizer.Adam(self.scheduler, parameters=flow.parameters())

    def train_batch(self):
        loss = criterion(*self.model(self.read_batch()))
        self.backward(loss)
        self.step_optimizers()
        self.scheduler.step()
        self.log(loss=loss)

    def valid(self):
        model = truth = count = 0
        for x in self.valid_batches():
            model += float(nll(*self.model(x)).sum())
            truth += true_nll(x.numpy()).sum()
            count += len(x)
        # Of the true density, too: on these very points, and on average, without luck.
        sums = {"nll": model, "true_nll": truth, "entropy": entropy() * count}
        return self.average({k: v / max(count, 1) for k, v in sums.items()}, weight=count)

    def on_train_batch_end(self):
        if self.iteration % self.config.drawing.interval == 0:
            with self.internals.evaluating():  # what is drawn has no effect on training
                self.draw(self.unwrap(self.model), self.config.drawing.num_points)

    def draw(self, flow, num_points):
        samples = flow.inverse(paddle.randn([num_points, 2])).numpy()
        side = np.linspace(-4, 4, 161, dtype="float32")
        grid = paddle.to_tensor(np.stack(np.meshgrid(side, side), axis=-1))
        heights = (-nll(*flow(grid.reshape([-1, 2])))).exp().reshape(grid.shape[:2]).numpy()

        figure = Figure(figsize=(12, 4), layout="constrained")
        truth, model, density = figure.subplots(1, 3)
        truth.scatter(*self.held_out[:num_points].T, s=1)
        model.scatter(*samples.T, s=1)
        density.pcolormesh(side, side, heights, cmap="magma")
        for axes, title in (truth, "truth"), (model, "model"), (density, "density of the model"):
            axes.set(title=title, xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
        self.visualizer.add_figure("galaxy", figure, self.iteration)
        for name, values in zip(["u", "angle"], unwind(samples), strict=True):
            self.visualizer.add_histogram(f"samples/{name}", values, self.iteration, buckets=50)


if __name__ == "__main__":
    main(Galaxy)
