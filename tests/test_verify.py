"""`python -m expbase verify`: sound experiments pass, and each broken one is caught and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import TESTS

from expbase.__main__ import main

HEAD = """
import numpy as np
import paddle
import paddle.nn.functional as F
from tiny import Points, Tiny
from expbase import main
from paddle.io import DataLoader

HIDDEN = np.random.default_rng(3)  # nobody saves it
"""

BROKEN = {
    "data order": """
class Sampler:
    def __iter__(self):
        return iter(HIDDEN.permutation(40).reshape(10, 4).tolist())
    def __len__(self):
        return 10

class Broken(Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        self.train_loader = DataLoader(Points(40), batch_sampler=Sampler())
""",
    "augmentation": """
class Noisy(Points):
    def __getitem__(self, index):
        point, label = super().__getitem__(index)
        return point + HIDDEN.normal(size=4).astype("float32"), label

class Broken(Tiny):
    def setup_dataloader(self):
        super().setup_dataloader()
        self.train_loader = DataLoader(Noisy(40), batch_size=4, shuffle=True)
""",
    "dropout": """
class Broken(Tiny):
    def train_batch(self):
        points, labels = self.read_batch()
        mask = paddle.to_tensor((HIDDEN.random(points.shape) > 0.5).astype("float32"))
        loss = F.cross_entropy(self.model(points * mask), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)
""",
    "optimizer": """
class Broken(Tiny):
    def setup_model(self):
        super().setup_model()
        self.optimizer = paddle.optimizer.Momentum(0.01, parameters=self.model.parameters())
        self.exclude_from_state("optimizer")
    def train_batch(self):
        points, labels = self.read_batch()
        F.cross_entropy(self.model(points), labels).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
""",
    "schedule": """
STEPS = [0]

class Broken(Tiny):
    def setup_model(self):
        super().setup_model()
        self.optimizer = paddle.optimizer.Adam(0.01, parameters=self.model.parameters())
    def train_batch(self):
        STEPS[0] += 1
        self.optimizer.set_lr(0.01 / STEPS[0])
        points, labels = self.read_batch()
        loss = F.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.log(loss=loss)
""",
    "random states": """
class Broken(Tiny):
    def resume_or_load(self):
        super().resume_or_load()
        if self.iteration:
            np.random.rand()
""",
}


def test_words_after_two_dashes_go_to_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, "class Broken(Tiny): pass", "--", "training.sed=1") == 1
    assert "unknown key 'training.sed'. Did you mean 'training.seed'?" in capsys.readouterr().err


def test_without_a_tool_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verify" in capsys.readouterr().out


def verify(folder: Path, body: str, *words: str) -> int:
    script = folder / "train.py"
    script.write_text(f"{HEAD}{body}\nif __name__ == '__main__':\n    main(Broken)\n")
    base = ["verify", str(script), "--output", str(folder / "out"), "--iterations", "24"]
    return main([*base, "--kills", "2", *words])


@pytest.fixture(autouse=True)
def _helpers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


def test_a_sound_experiment_is_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, "class Broken(Tiny): pass", "--kills", "3") == 0
    output = capsys.readouterr().out
    assert "killed 1 times inside a save" in output
    assert "killed 1 times inside a validation" in output
    assert "identical: 24 iterations, 3 kills" in output


@pytest.mark.parametrize("cause", BROKEN)
def test_a_broken_experiment_is_caught_and_the_cause_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    assert verify(tmp_path, BROKEN[cause]) == 1
    output = capsys.readouterr().out
    assert "NOT IDENTICAL: first at iteration" in output
    assert cause in output.split("Likely cause: ")[1]


def test_a_script_that_fails_by_itself_is_told_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(tmp_path, "raise OSError('no data here')") == 1
    error = capsys.readouterr().err
    assert "python -m expbase verify: error: the run 'straight' ended with code 1" in error
    assert "no data here" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.py", "--output", "out"], "missing.py: no such file"),
        ([__file__, "--output", str(TESTS)], "is not empty; remove it, or name a new one"),
        ([__file__, "--output", "out", "--kills", "0"], "--kills of 1 or more"),
    ],
)
def test_wrong_words_are_told(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 1
    assert text in capsys.readouterr().err
