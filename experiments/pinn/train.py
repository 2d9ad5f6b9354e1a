"""Computational physics: Burgers' equation by a physics-informed neural network, to 0.3 % and less.

`problem=forward` finds the solution from the equation, its initial and its boundary condition.
`problem=inverse` finds the coefficients lambda_1 and lambda_2 from measurements of the solution.
Both begin with Adam, on new collocation points in each iteration, and end with LBFGS, on points
that are drawn anew where the residual f is large. There is no loader: the points, and what LBFGS
remembers, are state like the weights. One process trains: a line search needs the whole loss.

Sources: Raissi, Perdikaris, Karniadakis: Physics-informed neural networks, J. Comput. Phys. 378,
2019, for both problems; Wu et al., arXiv:2207.10289, for points by residual.
"""

import warnings

import numpy as np
import paddle
from burgers import TRUE, Equation, columns, grid, measurements, solution
from paddle.nn.initializer import XavierNormal
from paddle.static import InputSpec
from pictures import draw_solution

from expbase import Config, ConfigError, ExperimentBase, main

warnings.filterwarnings("ignore", "To copy construct")  # which paddle's LBFGS says of itself


class Net(paddle.nn.Layer):
    """u at x and t, [N, 1]; with `conditions` it is right at t = 0 and x = ±1, whatever it learns.

    Source: Lagaris, Likas, Fotiadis, IEEE Transactions on Neural Networks 9, 1998.
    """

    def __init__(self, num_layers, hidden_size, conditions):
        super().__init__()
        layers, size = [], 2
        for _ in range(num_layers):
            layers += [paddle.nn.Linear(size, hidden_size, XavierNormal()), paddle.nn.Tanh()]
            size = hidden_size
        self.body = paddle.nn.Sequential(*layers, paddle.nn.Linear(size, 1, XavierNormal()))
        self.conditions = conditions

    def forward(self, x, t):
        u = self.body(paddle.concat([x, 2 * t - 1], axis=1))
        return t * (1 - x * x) * u - paddle.sin(np.pi * x) if self.conditions else u


class Memory:
    """What an LBFGS remembers of its steps; paddle's set_state_dict loads nothing of it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()["state"]

    def set_state_dict(self, state):
        self.optimizer.state.clear()
        self.optimizer.state.update(state)


class Pinn(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.problem = "forward"  # or inverse
        config.inverse = Config({"num_measurements": 2000, "noise": 0.0, "weight": 10.0})
        config.model = Config({"num_layers": 4, "hidden_size": 20})
        config.adam = Config({"iterations": 300, "lr": 5e-3, "num_collocation": 500})
        config.lbfgs = Config({"steps": 20, "num_collocation": 2000, "redraw_interval": 25})
        return config

    def setup_dataloader(self):
        """There is no data: measurements, or nothing; and a grid on which the error is measured."""
        if self.parallel or self.config.problem not in ("forward", "inverse"):
            raise ConfigError(
                f"pinn: problem={self.config.problem!r} on {self.world_size} processes; expected "
                "forward or inverse, on one. Change `problem`, or leave out --nprocs."
            )
        self.inverse = self.config.problem == "inverse"
        self.grid, self.exact = grid(), solution(*grid())
        if self.inverse:
            draw = np.random.default_rng(self.config.training.seed)
            settings = self.config.inverse
            self.measured = columns(*measurements(draw, settings.num_measurements, settings.noise))

    def setup_model(self):
        self.model = Net(**self.config.model, conditions=not self.inverse).to(dtype="float64")
        self.equation = Equation(learned=self.inverse)
        both = self.model.parameters() + self.equation.parameters()
        trained = [parameter for parameter in both if parameter.trainable]
        adam, steps = self.config.adam, self.config.lbfgs.steps
        self.schedule = paddle.optimizer.lr.CosineAnnealingDecay(adam.lr, max(adam.iterations, 1))
        self.adam = paddle.optimizer.Adam(self.schedule, parameters=trained)
        # Without tolerances: a loss of 1e-6 is no reason to stop.
        quiet = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
        self.lbfgs = paddle.optimizer.LBFGS(max_iter=steps, parameters=trained, **quiet)
        self.exclude_from_state("lbfgs")  # its memory is state instead
        self.memory = Memory(self.lbfgs)
        self.collocation = self.draw_points(adam.num_collocation)
        self.history = []  # lambda_1 and lambda_2 after each update
        self.input_spec = [InputSpec([None, 1], "float64")] * 2  # for --export

    def draw_points(self, number):
        x, t = paddle.rand([2, number, 1], "float64")
        return [2 * x - 1, t]

    def redraw_collocation(self):
        """Draws collocation points for LBFGS, half of them by the size of the residual f."""
        number = self.config.lbfgs.num_collocation
        x, t = self.draw_points(10 * number)
        sizes = self.equation.residual(self.model, x, t).abs().numpy().ravel()
        chances = 1 + sizes / sizes.mean()
        chosen = np.random.choice(len(sizes), number, replace=False, p=chances / chances.sum())
        self.collocation = columns(x.numpy()[chosen], t.numpy()[chosen])
        self.lbfgs.state.clear()  # what it remembers is of another loss

    def closure(self):
        self.lbfgs.clear_grad()
        loss = mse_f = self.equation.residual(self.model, *self.collocation).square().mean()
        if self.inverse:
            x, t, u = self.measured
            mse_u = (self.model(x, t) - u).square().mean()
            loss = mse_f + self.config.inverse.weight * mse_u
            self.log(mse_f=mse_f, mse_u=mse_u)  # means over the line searches
        loss.backward()
        return loss

    def train_batch(self):
        since_adam = self.iteration - self.config.adam.iterations - 1
        if since_adam < 0:
            self.collocation = self.draw_points(self.config.adam.num_collocation)
            loss = self.closure()
            self.adam.step()  # by hand: the closure, which LBFGS needs, clears and goes backward
            self.schedule.step()
        else:
            if since_adam % self.config.lbfgs.redraw_interval == 0:
                self.redraw_collocation()
            loss = self.lbfgs.step(self.closure)
        self.log(loss=loss)
        if self.inverse:
            found = self.equation.coefficients()
            self.log(found)
            self.history.append([value.item() for value in found.values()])

    def valid(self):
        u = self.model(*columns(*self.grid)).numpy().reshape(self.exact.shape)
        found = {"error": np.linalg.norm(u - self.exact) / np.linalg.norm(self.exact)}  # L2
        if self.inverse:
            for name, value in self.equation.coefficients().items():
                found[f"{name}_percent"] = 100 * abs(value.item() / TRUE[name] - 1)
        title = ", ".join(f"{name} {value:.2g}" for name, value in found.items())
        points = [tensor.numpy().ravel() for tensor in self.collocation]
        figure = draw_solution(self.grid, u, self.exact, points, self.history, title)
        self.visualizer.add_figure("solution", figure, self.iteration)
        return found


if __name__ == "__main__":
    main(Pinn)
