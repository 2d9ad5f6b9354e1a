"""The ten experiments in short: what is given to each, and the metric of its validation."""

from __future__ import annotations

import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]

SMALL = {
    "line": ([], "valid/error"),
    "digits": ([], "valid/accuracy"),
    "cifar": (
        [
            "data.archive={tmp}/shapes.tar.gz",
            "data.num_valid=20",
            "data.batch_size=8",
            "model.width=4",
            "optim.warmup_iterations=2",
            "training.max_epoch=0",
        ],
        "valid/accuracy",
    ),
    "charlm": (
        [
            "data.num_files=20",
            "data.length=16",
            "model.hidden_size=16",
            "optim.warmup_iterations=2",
        ],
        "valid/bits_per_character",
    ),
    "cartpole": (["optim.num_epochs=2", "evaluation.num_episodes=3"], "valid/return"),
    "gan": (["data.num_points=1000"], "valid/quality"),
    "flow": (["data.num_held_out=1000", "drawing.interval=4"], "valid/nll"),
    "multitask": (
        ["data.num_files=20", "model.hidden_size=8", "training.log_interval=2"],
        "valid/accuracy",
    ),
    "pinn": (
        ["adam.iterations=2", "lbfgs.steps=2", "lbfgs.num_collocation=50"],
        "valid/error",
    ),
    "ctr": (
        [
            "data.lines_per_day=2000",
            "data.folder={tmp}",
            "training.max_epoch=0",
            "training.save_every_epoch=0",
            "training.valid_every_epoch=0",
        ],
        "valid/auc",
    ),
}
_CONFIGS = {"cifar": "small.yaml", "ctr": None}  # whose config.yaml is for the runner


def given_to(name: str, data: Path) -> list[str]:
    """The words of the command line, with a save and a validation after each four updates."""
    config = _CONFIGS.get(name, "config.yaml")
    words = ["--config", str(ROOT / "experiments" / name / config)] if config else []
    words += [word.format(tmp=data) for word in SMALL[name][0]]
    every = ("valid_interval=4", "save_interval=4", "log_interval=2")
    return words + [f"training.{word}" for word in every]


def make_library(folder: Path) -> None:
    """Puts some files of the standard library into a folder: a few experiments read all of it."""
    folder.mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py")):
        (folder / path.name).symlink_to(path)
