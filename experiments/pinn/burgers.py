"""Burgers' equation with a shock: its residual, its exact solution, and what is known of it.

    u_t + λ1 u u_x = λ2 u_xx,  u(x, 0) = -sin πx,  u(±1, t) = 0,  x from -1 to 1, t from 0 to 1

Its coefficients are λ1 = 1 and the viscosity λ2 = ν = 0.01 / π. The substitution of Cole and Hopf
makes it a heat equation, whose solution is an integral over a normal density. 100 nodes of Gauss
and Hermite give it to 1e-14: 240 nodes change it by no more.

Source: Basdevant et al., Computers and Fluids 14, 1986, a test of numerical methods.
"""

import numpy as np
import paddle
from paddle.nn.initializer import Constant

NU = 0.01 / np.pi
TRUE = {"lambda_1": 1.0, "lambda_2": NU}
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(100)


def solution(x, t):
    """Returns u at places x and times t, arrays of one shape."""
    spread = 2 * np.sqrt(NU * t)[..., None] * NODES
    angles = np.pi * (x[..., None] - spread)
    heat = WEIGHTS * np.exp(-np.cos(angles) / (2 * np.pi * NU))
    return -(heat * np.sin(angles)).sum(axis=-1) / heat.sum(axis=-1)


def grid():
    """Returns the places and the times at which the error is measured, [100, 256] as published."""
    return np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0, 1, 100))


def measurements(draw, number, noise):
    """Returns x, t and u [N] anywhere; `noise` is a share of the standard deviation of u."""
    x, t = draw.uniform(-1, 1, number), draw.uniform(0, 1, number)
    u = solution(x, t)
    return x, t, u + noise * u.std() * draw.standard_normal(number)


def columns(*arrays):
    """Returns arrays as tensors [N, 1], double ones: a line search needs their digits."""
    return [paddle.to_tensor(array.reshape([-1, 1]), "float64") for array in arrays]


def gradients(y, *x):
    """Returns dy/dx [N, 1] for each x; they can be differentiated, and trained through, again."""
    return paddle.grad(y, x, paddle.ones_like(y), create_graph=True)


class Equation(paddle.nn.Layer):
    """u_t + λ1 u u_x = λ2 u_xx; its coefficients are known, or parameters that are learned."""

    def __init__(self, learned):
        super().__init__()
        # Learned ones begin where they do in the paper. λ2 is positive: its logarithm is learned.
        first = (0.0, -6.0) if learned else (1.0, np.log(NU))
        attributes = (paddle.ParamAttr(None, Constant(v), trainable=learned) for v in first)
        parameters = (self.create_parameter([1], a, dtype="float64") for a in attributes)
        self.lambda_1, self.log_lambda_2 = parameters

    def coefficients(self):
        return {"lambda_1": self.lambda_1, "lambda_2": self.log_lambda_2.exp()}

    def residual(self, net, x, t):
        """Returns the residual f at the collocation points x and t, all [N, 1]: zero at best."""
        x.stop_gradient = t.stop_gradient = False
        u = net(x, t)
        u_x, u_t = gradients(u, x, t)
        (u_xx,) = gradients(u_x, x)
        return u_t + self.lambda_1 * u * u_x - self.log_lambda_2.exp() * u_xx
