"""Computational physics: Burgers' equation by a physics-informed neural network (PINN).

`problem=forward` finds the solution from the equation, its initial and its boundary condition.
`problem=inverse` finds the two coefficients of the equation from measurements of the solution.
Both begin with Adam, on new points in each iteration, and end with LBFGS, on points that are drawn
anew where the equation holds least. There is no loader: the points, and what LBFGS remembers, are
state like the weights. It trains on one process, since a line search needs the whole loss.

Sources: Raissi, Perdikaris, Karniadakis: Physics-informed neural networks, J. Comput. Phys. 378,
2019, for both problems; Wu et al., arXiv:2207.10289, for points by residual.
"""

import warnings

import numpy as np
import paddle
from burgers import VISCOSITY, Equation, grid, measurements, solution
from paddle.nn.initializer import XavierNormal
from paddle.static import InputSpec
from pictures import draw_solution

from expbase import Config, ConfigError, ExperimentBase, main

warnings.filterwarnings("ignore", "To copy construct")  # which paddle's LBFGS says of itself


def columns(*arrays):
    # A line search needs more digits than float32 has, and on a CPU double ones cost little.
    return [paddle.to_tensor(array.reshape([-1, 1]), "float64") for array in arrays]


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
        config.adam = Config({"iterations": 300, "lr": 5e-3, "num_points": 500})
        config.lbfgs = Config({"steps": 20, "num_points": 2000, "redraw_interval": 25})
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
            self.known = columns(*measurements(draw, settings.num_measurements, settings.noise))

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
        self.points = self.draw_points(adam.num_points)
        self.input_spec = [InputSpec([None, 1], "float64")] * 2  # for --export

    def draw_points(self, number):
        x, t = paddle.rand([2, number, 1], "float64")
        return [2 * x - 1, t]

    def redraw_points(self):
        """Draws points for LBFGS, half of them by the size of the residual."""
        number = self.config.lbfgs.num_points
        x, t = self.draw_points(10 * number)
        sizes = self.equation.residual(self.model, x, t).abs().numpy().ravel()
        chances = 1 + sizes / sizes.mean()
        chosen = np.random.choice(len(sizes), number, replace=False, p=chances / chances.sum())
        self.points = columns(x.numpy()[chosen], t.numpy()[chosen])
        self.lbfgs.state.clear()  # it is about another loss

    def closure(self):
        self.lbfgs.clear_grad()
        loss = self.equation.residual(self.model, *self.points).square().mean()
        if self.inverse:
            x, t, u = self.known
            loss += self.config.inverse.weight * (self.model(x, t) - u).square().mean()
        loss.backward()
        return loss

    def train_batch(self):
        since_adam = self.iteration - self.config.adam.iterations - 1
        if since_adam < 0:
            self.points = self.draw_points(self.config.adam.num_points)
            loss = self.closure()
            self.adam.step()
            self.schedule.step()
        else:
            if since_adam % self.config.lbfgs.redraw_interval == 0:
                self.redraw_points()
            loss = self.lbfgs.step(self.closure)
        self.log(loss=loss, **(self.equation.coefficients() if self.inverse else {}))

    def valid(self):
        u = self.model(*columns(*self.grid)).numpy().reshape(self.exact.shape)
        norm = np.linalg.norm
        found = {"error": norm(u - self.exact) / norm(self.exact)}  # relative, as published
        if self.inverse:
            true = {"lambda_1": 1.0, "lambda_2": VISCOSITY}
            for name, value in self.equation.coefficients().items():
                found[f"{name}_percent"] = 100 * abs(value.item() / true[name] - 1)
        title = ", ".join(f"{name} {value:.2g}" for name, value in found.items())
        points = [tensor.numpy().ravel() for tensor in self.points]
        figure = draw_solution(self.grid, u, self.exact, points, title)
        self.visualizer.add_figure("solution", figure, self.iteration)
        return found


if __name__ == "__main__":
    main(Pinn)
