"""A galaxy with some arms: a density in the plane whose entropy is known, and points from it.

It is a standard normal that is gathered into arms and wound up. In polar coordinates, with
u = r²/2, dx dy = r dr dθ = du dθ, so the entropy in the plane is the one of (u, θ).

- As in a normal, u is exponential, of entropy 1, and θ is independent of it.
- The density of θ is exp(κ cos(arms θ)) / (2π I0(κ)), where the mean of cos(arms θ) is
  I1(κ) / I0(κ): as in a von Mises density, which has one arm. So its entropy is
  ln(2π I0(κ)) - κ I1(κ) / I0(κ).
- Then the plane is turned by an angle that grows with r. In (u, θ) this is a shear, whose
  determinant is 1, and changes no entropy.

Source: Mardia and Jupp, Directional Statistics, 1999, for von Mises.
"""

import numpy as np
import paddle

ARMS, CONCENTRATION, TWIST = 2, 2.0, 1.2  # CONCENTRATION is κ; TWIST is in radians per unit of r
LOG_CIRCLE = np.log(2 * np.pi * np.i0(CONCENTRATION))


def entropy():
    """In nats."""
    bessel_1 = paddle.i1(paddle.to_tensor(CONCENTRATION, "float64")).item()
    return 1 + LOG_CIRCLE - CONCENTRATION * bessel_1 / np.i0(CONCENTRATION)


def draw_points(draw, num_points):
    """[N, 2], by a generator of numpy's."""
    radius = np.sqrt(2 * draw.exponential(size=num_points))
    turns = 2 * np.pi * draw.integers(ARMS, size=num_points)
    angle = (draw.vonmises(0, CONCENTRATION, num_points) + turns) / ARMS + TWIST * radius
    return (radius * [np.cos(angle), np.sin(angle)]).T.astype("float32")


def unwind(points):
    """Of points [N, 2], u [N] and the angle before the plane was turned [N], from -π to π."""
    x, y = points.T
    radius = np.hypot(x, y)
    angle = np.arctan2(y, x) - TWIST * radius
    return radius**2 / 2, (angle + np.pi) % (2 * np.pi) - np.pi


def true_nll(points):
    """The negative logarithm of the density at points [N, 2], in nats, [N]."""
    u, angle = unwind(points)
    return u - CONCENTRATION * np.cos(ARMS * angle) + LOG_CIRCLE


class Stream:
    """Batches of new points without end; the ranks share those that a single one would get.

    Batch n is a function of (seed, n) alone, so a stream is continued from any n at once.
    """

    def __init__(self, batch_size, seed, rank, world_size):
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.position = 0  # batches that all ranks together were given

    def __iter__(self):
        while True:
            number = self.position + self.rank
            self.position += self.world_size
            # The 1 keeps off the held-out points: [0, 0] would seed numpy as 0 does.
            draw = np.random.default_rng([1, self.seed, number])
            yield paddle.to_tensor(draw_points(draw, self.batch_size))

    def state_dict(self):
        return {"position": self.position}

    def set_state_dict(self, state):
        self.position = state["position"]
