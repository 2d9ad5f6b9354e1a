"""Reinforcement learning (REINFORCE): each iteration plays the episodes that it learns from."""

import paddle
import paddle.nn.functional as F

from expbase import Config, ExperimentBase, main


class Cart(ExperimentBase):
    """A cart on a line is to be pushed to the middle, and to stay there."""

    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.training.max_iteration, config.training.valid_interval = 150, 50
        config.episodes = Config({"number": 64, "steps": 30})
        return config

    def setup_dataloader(self):
        """There is no data: no train_loader, no epochs, and nobody calls read_batch."""

    def setup_model(self):
        layers = paddle.nn.Linear(2, 32), paddle.nn.Tanh(), paddle.nn.Linear(32, 2)
        self.model = self.data_parallel(paddle.nn.Sequential(*layers))
        self.optimizer = paddle.optimizer.Adam(1e-2, parameters=self.model.parameters())

    def play(self, number):
        """States and pushes of some episodes, [steps, N, 2] and [steps, N], and the rewards."""
        states, pushes, rewards = [], [], []
        place, speed = paddle.rand([number]) * 4 - 2, paddle.zeros([number])
        with paddle.no_grad():
            for _ in range(self.config.episodes.steps):
                states.append(paddle.stack([place, speed], axis=-1))
                chances = F.softmax(self.model(states[-1]))
                pushes.append(paddle.multinomial(chances).squeeze(-1))
                speed = 0.9 * speed + 0.2 * (2 * pushes[-1].astype("float32") - 1)
                place = place + speed
                rewards.append(-place.abs())
        return paddle.stack(states), paddle.stack(pushes), paddle.stack(rewards)

    def train_batch(self):
        states, pushes, rewards = self.play(self.config.episodes.number)
        # A push is worth what comes after it, compared with the same step of other episodes.
        worth = rewards.flip(0).cumsum(0).flip(0)
        worth = (worth - worth.mean(1, keepdim=True)) / worth.abs().mean()
        logits = self.model(states)  # again, and this time with gradients
        costs = F.cross_entropy(logits, pushes.unsqueeze(-1), reduction="none").squeeze(-1)
        loss = (costs * worth).mean()
        self.backward(loss)
        self.step_optimizers()
        self.log(loss=loss, reward=rewards.mean())

    def valid(self):
        self.log(reward=self.play(256)[-1].mean())


if __name__ == "__main__":
    main(Cart)
