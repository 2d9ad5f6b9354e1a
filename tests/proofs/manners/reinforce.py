"""Reinforcement learning: an environment, exploration that fades, a ring of transitions."""

from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from expbase import ExperimentBase, main


@dataclass
class Transition:
    state: np.ndarray
    action: int = 0
    reward: float = 0.0
    next_state: np.ndarray = None
    done: bool = False


class Corridor:
    """Walk to the right end; the wind is random."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.place, self.steps, self.episodes = 0.0, 0, 0

    def reset(self):
        self.place, self.steps = float(self.random.uniform(-1, 0)), 0
        self.episodes += 1
        return self.observe()

    def observe(self):
        return np.array([self.place, self.steps / 10], "float32")

    def step(self, action):
        self.place += (0.3 if action else -0.3) + float(self.random.normal()) / 10
        self.steps += 1
        return self.observe(), float(self.place), self.place > 1 or self.steps >= 10


class ReplayBuffer:
    def __init__(self, capacity):
        empty = np.zeros(2, "float32")
        self.ring = [Transition(empty, next_state=empty) for _ in range(capacity)]
        self.position = self.size = 0

    def push(self, state, action, reward, next_state, done):
        slot = self.ring[self.position]
        slot.state, slot.action, slot.reward = state, action, reward
        slot.next_state, slot.done = next_state, done
        self.position = (self.position + 1) % len(self.ring)
        self.size = min(self.size + 1, len(self.ring))

    def sample(self, count):
        return [self.ring[n] for n in np.random.randint(0, self.size, count)]


class DQN(ExperimentBase):
    def setup_dataloader(self):
        self.env = Corridor(seed=5)
        self.buffer = ReplayBuffer(16)
        self.observation = self.env.reset()
        self.episode_return, self.returns = 0.0, []

    def setup_model(self):
        self.model, self.target = (
            nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in "ab"
        )
        self.target.set_state_dict(self.model.state_dict())
        for parameter in self.target.parameters():
            parameter.stop_gradient = True
        self.optimizer = paddle.optimizer.Adam(5e-3, parameters=self.model.parameters())
        self.epsilon = 1.0

    def act(self):
        if np.random.rand() < self.epsilon:
            return int(np.random.randint(2))
        with paddle.no_grad():
            return int(self.model(paddle.to_tensor(self.observation)).argmax())

    def train_batch(self):
        for _ in range(3):
            action = self.act()
            seen, reward, done = self.env.step(action)
            self.buffer.push(self.observation, action, reward, seen, done)
            self.episode_return += reward
            self.observation = self.env.reset() if done else seen
            if done:
                self.returns.append(self.episode_return)
                self.episode_return = 0.0
        self.epsilon = max(0.1, self.epsilon * 0.95)
        batch = self.buffer.sample(8)
        states = paddle.to_tensor(np.stack([t.state for t in batch]))
        after = paddle.to_tensor(np.stack([t.next_state for t in batch]))
        rewards = paddle.to_tensor([t.reward for t in batch])
        goes_on = paddle.to_tensor([1.0 - t.done for t in batch])
        wanted = rewards + 0.9 * goes_on * self.target(after).max(axis=1)
        taken = F.one_hot(paddle.to_tensor([t.action for t in batch]), 2)
        loss = F.smooth_l1_loss((self.model(states) * taken).sum(axis=1), wanted)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        if self.iteration % 5 == 0:
            self.target.set_state_dict(self.model.state_dict())
        self.log(loss=loss, epsilon=self.epsilon, episodes=self.env.episodes)

    def valid(self):
        return {"return": float(np.mean(self.returns or [0.0]))}


if __name__ == "__main__":
    main(DQN)
