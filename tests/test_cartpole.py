"""experiments/cartpole: environments that are state, advantages, the picture, gymnasium missing."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from tiny import Tiny, same_bits, trained

gymnasium = pytest.importorskip("gymnasium", "1.1", reason="it needs the extra `cartpole`")

FOLDER = Path(__file__).parents[1] / "experiments/cartpole"


@pytest.fixture
def cart() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "cart.py")))


@pytest.mark.parametrize(
    "mode", ["vector_entry_point", pytest.param("sync", marks=pytest.mark.long)]
)
def test_environments_go_on_in_the_middle_of_their_episodes(
    mode: str, tmp_path: Path, cart: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vec = gymnasium.make_vec
    monkeypatch.setattr(gymnasium, "make_vec", lambda *words: make_vec(*words, mode))
    seen: dict[str, list[np.ndarray]] = {"straight": [], "again": []}

    class Plays(Tiny):
        def setup_dataloader(self) -> None:
            self.envs, self.observations = cart.make_envs("CartPole-v1", 3, seed=7)

        def read_batch(self) -> Any:
            for _ in range(15):  # which is no episode, or more than one
                actions = np.random.randint(0, 2, 3)
                self.observations, *_ = self.envs.step(actions)
                seen[self.output_dir.name].append(self.observations)
            return paddle.to_tensor(self.observations), paddle.zeros([3], "int64")

        def valid(self) -> dict[str, float]:
            return {}

    for output, end in (("straight", 4), ("again", 2), ("again", 4)):
        run = trained(Plays, tmp_path / output, max_iteration=end)
    np.testing.assert_array_equal(seen["again"], seen["straight"])
    same_bits(*(tmp_path / name / "checkpoints/step-00000004" for name in seen))
    told = (run.output_dir / "worker_0.log").read_text()
    assert "resumed step-00000002" in told
    assert "not exact: self" not in told  # but of the test's own list
    assert "set otherwise" not in told


def test_advantages_are_weighted_sums_of_what_follows_within_an_episode(
    monkeypatch: pytest.MonkeyPatch, cart: SimpleNamespace
) -> None:
    monkeypatch.setitem(sys.modules, "cart", cart)  # type: ignore[arg-type]
    advantages_of = runpy.run_path(str(FOLDER / "train.py"))["generalized_advantages"]
    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=[9, 1]), draw.normal(size=[10, 1])
    terminated, done = np.zeros([2, 9, 1], "bool")
    terminated[2], done[[2, 5]] = True, True  # and at step 5 the time was over
    found = advantages_of(values, rewards, terminated, done, 0.9, 0.8)
    for step in range(9):
        end = next((n for n in range(step, 9) if done[n]), 8)
        expected = 0.0
        for later in range(step, end + 1):
            following = 0.0 if later == 2 else values[later + 1, 0]
            error = rewards[later, 0] + 0.9 * following - values[later, 0]
            expected += (0.9 * 0.8) ** (later - step) * error
        assert found[step, 0] == pytest.approx(expected)


def test_a_frame_shows_where_the_cart_is_and_how_the_pole_leans(cart: SimpleNamespace) -> None:
    def middle(frame: np.ndarray, colour: tuple[int, int, int]) -> float:
        return float(np.nonzero((frame == colour).all(axis=-1))[1].mean())

    left, right = cart.draw_frame(-1.0, -0.2, 1), cart.draw_frame(1.0, 0.2, 1)
    moved = middle(right, (60, 60, 60)) - middle(left, (60, 60, 60))
    assert moved == pytest.approx(2 * cart.SCALE, abs=1)
    assert middle(left, (202, 120, 60)) < middle(left, (60, 60, 60)) - 1
    assert middle(right, (202, 120, 60)) > middle(right, (60, 60, 60)) + 1
    states = np.zeros([9, 4])  # fewer than there are frames
    assert cart.draw_strip(states).shape == (2 * cart.HEIGHT, 5 * cart.WIDTH, 3)


def test_without_gymnasium_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(
        SystemExit, match=r"^[^\n]*gymnasium[^\n]*pip install \"paddle-expbase\[cartpole\]\"$"
    ):
        runpy.run_path(str(FOLDER / "cart.py"))
