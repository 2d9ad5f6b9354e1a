"""What editors and type checkers know of expbase, asked from outside of the repository."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from expbase import ExperimentBase
from expbase.training import TRAINING, TrainingKeys

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
SCRIPT = """
from argparse import Namespace
from expbase import ExperimentBase, main
class Mine(ExperimentBase):
    letters: str
    def train_batch(self) -> None:
        reveal_type(self.iteration)
        reveal_type(self.output_dir)
        reveal_type(self.logger)
        reveal_type(self.total_iterations)
        reveal_type(self.batches_per_epoch)
        reveal_type(self.config.training.max_epoch)
        reveal_type(self.config.training.valid_interval)
        reveal_type(self.config.training.a_key_of_ones_own)
        self.config.training.seed = "0"
        self.rank = 3
        print(range(self.total_iterations // self.batches_per_epoch))
        self.step_optimizer()
        self.train_loader, self.valid_loader, self.model = [1], None, print
def test_it_learns() -> None:
    exp = main(Mine, argv=[])
    assert exp.finished
    reveal_type(exp)
class Other(Mine):
    model = None
    train_loader: list[int]
    def train_batch(self) -> None:
        reveal_type(self.train_loader)
reveal_type(Mine({}, Namespace()))
Mine({}, 3)
"""
# The types of paddle and numpy would take most of the time; the recipes have none, and import much.
CONFIG = """
[mypy]
strict = True
[mypy-numpy.*,paddle.*,rich.*]
follow_imports = skip
[mypy-boto3,optuna.*,pandas.*,sklearn.*,tensorboardX,wandb]
ignore_missing_imports = True
"""
UNTYPED = (
    *("--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs"),
    *("--allow-subclassing-any", "--check-untyped-defs", "--disable-error-code=var-annotated"),
)


@pytest.mark.long
def test_a_type_checker_outside_of_the_repository_knows_expbase(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    recipes = map(str, sorted(RECIPES.glob("*.py")))
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", *UNTYPED, "mine.py", *recipes]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.findall('mine.py:([0-9]+): note: Revealed type is "(.*)"', said) == [
        ("7", "int"),
        ("8", "pathlib.Path"),
        ("9", "logging.Logger"),
        ("10", "int | Any"),
        ("11", "int | Any"),
        ("12", "int"),
        ("13", "int"),
        ("14", "Any"),
        ("23", "mine.Mine | Any"),
        ("28", "list[int]"),
        ("29", "mine.Mine"),
    ]
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert [error.partition("error: ")[2] for error in errors] == [
        'Incompatible types in assignment (expression has type "str", variable has type "int")  '
        "[assignment]",
        'Property "rank" defined in "ExperimentBase" is read-only  [misc]',
        '"Mine" has no attribute "step_optimizer"  [attr-defined]',
        'Argument 2 to "Mine" has incompatible type "int"; expected "Namespace"  [arg-type]',
    ]


def test_help_shows_what_an_experiment_is_made_with() -> None:
    class Mine(ExperimentBase):
        pass

    class Other(ExperimentBase):
        def __init__(self, number: int) -> None:
            pass

    assert [*inspect.signature(ExperimentBase).parameters] == ["config", "args"]
    assert [*inspect.signature(Mine).parameters] == ["config", "args"]
    assert [*inspect.signature(Other).parameters] == ["number"]


def test_an_editor_shows_a_text_at_every_key_of_training() -> None:
    [section] = ast.parse(inspect.getsource(TrainingKeys)).body
    assert isinstance(section, ast.ClassDef)
    pairs = list(itertools.pairwise(section.body))
    keys = [
        (node.target.id, isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
        for node, after in pairs
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert keys == [(key, True) for key in TRAINING]
