"""Gymnasium, or how to get it; and a picture of an episode, which needs no pygame."""

import numpy as np

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode  # since 1.1: the step after the last is a reset
except ImportError as error:
    told = f'{error}; expected gymnasium 1.1 or newer: pip install "paddle-expbase[cartpole]"'
    raise SystemExit(told) from None

HEIGHT, WIDTH = 100, 160  # of a frame, in pixels
SCALE = WIDTH / 5.4  # pixels of a metre
END = 2.4  # where the track ends on both sides, in metres
TIME_LIMIT = 500  # steps


def make_envs(name, num_envs, seed):
    """Environments, and what is seen of them [N, ...] when their first episodes begin.

    They reset themselves: the step after the last one of an episode is a reset.
    """
    envs = gymnasium.make_vec(name, num_envs)
    if envs.metadata["autoreset_mode"] != AutoresetMode.NEXT_STEP:
        raise ValueError(f"{name}: {envs.metadata['autoreset_mode']}; expected NEXT_STEP.")
    for space in "action_space", "observation_space":  # else their seed is not the same twice
        getattr(envs, space).seed(seed)
        getattr(envs, f"single_{space}").seed(seed)
    return envs, envs.reset(seed=seed)[0]


def threshold_of(name):
    """The mean return from which on it counts as solved; infinite, if its authors have set none."""
    threshold = gymnasium.spec(name).reward_threshold
    return np.inf if threshold is None else threshold


def draw_frame(position, angle, step):
    """A picture [HEIGHT, WIDTH, 3] of a cart at a position, in metres, with a pole at an angle."""
    y, on_track = np.mgrid[HEIGHT - 30 : -30 : -1, -WIDTH // 2 : WIDTH // 2]
    x = on_track - position * SCALE  # from the axle, in pixels, as y, which grows upwards
    along = np.clip(x * np.sin(angle) + y * np.cos(angle), 0, SCALE)  # the pole is 1 m long
    to_pole = np.hypot(x - along * np.sin(angle), y - along * np.cos(angle))
    frame = np.full([HEIGHT, WIDTH, 3], 255, "uint8")
    frame[(y == -12) | (abs(y + 12) <= 4) & (abs(abs(on_track) - END * SCALE) <= 1)] = 150
    frame[(abs(x) <= 12) & (abs(y + 6) <= 6)] = 60, 60, 60
    frame[to_pole <= 2.5] = 202, 120, 60
    frame[-6:-2, : int(WIDTH * step / TIME_LIMIT)] = 90, 130, 200  # how late it is
    frame[:, 0] = frame[0] = 220  # between frames
    return frame


def draw_strip(states):
    """Ten frames of an episode of states [T, 4], in two rows, from its first to its last step."""
    steps = np.linspace(0, len(states) - 1, 10).round().astype(int)
    frames = [draw_frame(states[step][0], states[step][2], step + 1) for step in steps]
    return np.concatenate([np.concatenate(frames[n : n + 5], axis=1) for n in (0, 5)])
