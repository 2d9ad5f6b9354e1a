"""Reinforcement learning: proximal policy optimization (PPO) on gymnasium's CartPole-v1.

An iteration plays some steps in each environment, and learns from them for some epochs. What an
environment does is state, like all else on self: a run that was killed goes on in the middle of
its episodes, to the same bits.

Source: Schulman and others 2017, arXiv:1707.06347; the details as in Huang and others: The 37
implementation details of PPO, ICLR blog track 2022. The value loss is not clipped: they found no
use in it. An episode that the time limit ends is worth what its last observation promises.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from cart import draw_strip, make_envs, threshold_of

from expbase import Config, ExperimentBase, main


def perceptron(inputs, hidden, outputs, gain):
    """Two hidden layers, orthogonal weights; biases begin at 0."""
    sizes = [(inputs, hidden, 2**0.5), (hidden, hidden, 2**0.5), (hidden, outputs, gain)]
    init = paddle.nn.initializer.Orthogonal
    first, second, last = (paddle.nn.Linear(m, n, weight_attr=init(g)) for m, n, g in sizes)
    return paddle.nn.Sequential(first, paddle.nn.Tanh(), second, paddle.nn.Tanh(), last)


class Agent(paddle.nn.Layer):
    """A policy and the values of what is seen: two nets that share nothing."""

    def __init__(self, observation_size, num_actions, hidden_size):
        super().__init__()
        self.actor = perceptron(observation_size, hidden_size, num_actions, gain=0.01)
        self.critic = perceptron(observation_size, hidden_size, 1, gain=1.0)

    def forward(self, observations):
        """Logarithms of the actions' probabilities [..., A], and values [...]."""
        return F.log_softmax(self.actor(observations)), self.critic(observations).squeeze(-1)


def generalized_advantages(values, rewards, terminated, done, gamma, gae_lambda):
    """Advantages [T, N], of values [T + 1, N]. Source: Schulman and others, arXiv:1506.02438."""
    advantages = rewards + gamma * values[1:] * ~terminated - values[:-1]
    for step in reversed(range(len(advantages) - 1)):
        advantages[step] += gamma * gae_lambda * ~done[step] * advantages[step + 1]
    return advantages


class CartPole(ExperimentBase):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.env = Config({"id": "CartPole-v1", "num_envs": 8, "num_steps": 32})  # of a rank
        config.model = Config({"hidden_size": 64})
        config.optim = Config({"lr": 1e-3, "num_epochs": 20, "num_minibatches": 1, "max_norm": 0.5})
        config.ppo = Config({"gamma": 0.98, "gae_lambda": 0.8, "clip": 0.2})
        config.ppo.update({"value_factor": 0.5, "entropy_factor": 0.0})
        config.evaluation = Config({"num_episodes": 100})
        return config

    def setup_dataloader(self):
        """There is no data: no train_loader, no epochs, and nobody calls read_batch."""
        env = self.config.env
        seed = int(np.random.default_rng([self.config.training.seed, self.rank]).integers(2**31))
        self.envs, self.observations = make_envs(env.id, env.num_envs, seed)
        self.done = np.zeros(env.num_envs, "bool")  # whether the next step is a reset
        self.returns, self.lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, "int64")

    def setup_model(self):
        observations, actions = self.envs.single_observation_space, self.envs.single_action_space
        agent = Agent(observations.shape[0], actions.n, self.config.model.hidden_size)
        self.model = self.data_parallel(agent)
        optim, iterations = self.config.optim, self.total_iterations
        self.scheduler = paddle.optimizer.lr.PolynomialDecay(optim.lr, iterations, end_lr=0.0)
        clip = paddle.nn.ClipGradByGlobalNorm(optim.max_norm)
        self.optimizer = paddle.optimizer.Adam(
            self.scheduler, epsilon=1e-5, parameters=agent.parameters(), grad_clip=clip
        )

    def train_batch(self):
        samples = self.play()
        for _ in range(self.config.optim.num_epochs):
            order = np.random.permutation(len(samples[0]))
            for some in np.array_split(order, self.config.optim.num_minibatches):
                loss = self.compute_loss(*(paddle.to_tensor(column[some]) for column in samples))
                self.backward(loss)
                self.step_optimizers()
        self.scheduler.step()

    @paddle.no_grad()
    def play(self):
        """Plays T steps in N environments; returns the columns of compute_loss, arrays [B, ...]."""
        agent, ppo = self.unwrap(self.model), self.config.ppo
        seen, steps = [self.observations], []
        for _ in range(self.config.env.num_steps):
            logits = agent.actor(paddle.to_tensor(self.observations)).numpy()
            actions = (logits + np.random.gumbel(size=logits.shape)).argmax(-1)  # drawn by logits
            is_step = ~self.done  # else it is a reset: no sample
            self.observations, rewards, terminated, truncated, _ = self.envs.step(actions)
            self.done = terminated | truncated
            self.count(rewards, is_step)
            seen.append(self.observations)
            steps.append([actions, is_step, rewards.astype("float32"), terminated, self.done])
        actions, is_step, *outcomes = map(np.stack, zip(*steps, strict=True))
        log_probs, values = (x.numpy() for x in agent(paddle.to_tensor(np.stack(seen))))
        advantages = generalized_advantages(values, *outcomes, ppo.gamma, ppo.gae_lambda)
        taken = np.take_along_axis(log_probs[:-1], actions[..., None], axis=-1)[..., 0]
        columns = np.stack(seen[:-1]), actions, taken, advantages, advantages + values[:-1]
        columns = [column[is_step] for column in columns]
        self.log(explained_variance=1 - columns[-2].var() / max(columns[-1].var(), 1e-8))
        return columns

    def count(self, rewards, is_step):
        """Adds a step to the episodes in progress, and logs those that it has ended."""
        self.returns += rewards
        self.lengths += is_step
        for number in np.flatnonzero(self.done):
            self.log({"return": self.returns[number], "length": self.lengths[number]})
        self.returns[self.done] = self.lengths[self.done] = 0

    def compute_loss(self, observations, actions, old_log_probs, advantages, returns):
        ppo = self.config.ppo
        log_probs, values = self.model(observations)
        entropy = -(log_probs.exp() * log_probs).sum(axis=-1).mean()
        taken = paddle.take_along_axis(log_probs, actions.unsqueeze(-1), axis=-1).squeeze(-1)
        log_ratio = taken - old_log_probs
        ratio = log_ratio.exp()
        clipped = ratio.clip(1 - ppo.clip, 1 + ppo.clip)
        advantages = advantages - advantages.mean()
        advantages = advantages / (advantages.square().mean().sqrt() + 1e-8)
        policy_loss = -paddle.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = F.mse_loss(values, returns)
        # Of the KL divergence the estimate k3 of Schulman: Approximating KL divergence, 2020.
        self.log(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy)
        self.log(approx_kl=(ratio - 1 - log_ratio).mean())
        self.log(clip_fraction=(ratio != clipped).astype("float32").mean())
        return policy_loss + ppo.value_factor * value_loss - ppo.entropy_factor * entropy

    def valid(self):
        """One episode in each of some new environments, by the most probable actions."""
        name = self.config.env.id
        number = -(-self.config.evaluation.num_episodes // self.world_size)  # of this rank
        envs, observations = make_envs(name, number, seed=np.random.randint(2**31))
        returns, is_going_on, states = np.zeros(number), np.ones(number, "bool"), []
        while is_going_on.any():
            if is_going_on[0]:
                states.append(observations[0])
            actions = self.unwrap(self.model).actor(paddle.to_tensor(observations)).argmax(-1)
            observations, rewards, terminated, truncated, _ = envs.step(actions.numpy())
            returns += rewards * is_going_on
            is_going_on &= ~(terminated | truncated)
        if name == "CartPole-v1":
            self.visualizer.add_image("episode", draw_strip(states), self.iteration)
        results = self.average({"return": returns.mean()}, weight=number)
        return {**results, "solved": results["return"] >= threshold_of(name)}


if __name__ == "__main__":
    main(CartPole)
