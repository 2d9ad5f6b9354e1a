"""LBFGS: stepped by a closure, and what it remembers is saved. It solves u' = -u, u(0) = 1."""

import paddle

from expbase import ExperimentBase, main


class Memory:
    """What an LBFGS remembers of its steps: its directions, gradients and step lengths."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()["state"]

    def set_state_dict(self, state):
        self.optimizer.state.update(state)


class Decay(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.log_interval = 20, 1
        config.training.valid_interval = config.training.save_interval = 10
        return config

    def setup_dataloader(self):
        """There is no data: the loss is that of all points."""

    def setup_model(self):
        layers = paddle.nn.Linear(1, 16), paddle.nn.Tanh(), paddle.nn.Linear(16, 1)
        self.model = paddle.nn.Sequential(*layers)
        self.x = paddle.linspace(0, 2, 64).unsqueeze(-1)
        self.optimizer = paddle.optimizer.LBFGS(
            max_iter=2, line_search_fn="strong_wolfe", parameters=self.model.parameters()
        )
        self.exclude_from_state("optimizer")  # paddle's set_state_dict loads nothing of it
        self.memory = Memory(self.optimizer)

    def closure(self):
        self.optimizer.clear_grad()
        x = self.x.detach()
        x.stop_gradient = False
        u = self.model(x)
        (slope,) = paddle.grad(u, x, paddle.ones_like(u), create_graph=True)
        loss = (slope + u).square().mean() + (u[0] - 1).square().mean()
        loss.backward()
        return loss

    def train_batch(self):
        self.log(loss=self.optimizer.step(self.closure))

    def valid(self):
        return {"error": (self.model(self.x) - paddle.exp(-self.x)).abs().max()}


if __name__ == "__main__":
    main(Decay)
