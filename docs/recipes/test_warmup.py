"""Tests of an experiment, warmup.py beside this file. The last one starts it four times."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from warmup import WarmUp

from expbase import main

SCRIPT = Path(__file__).with_name("warmup.py")


def test_one_of_everything_works():
    main(WarmUp, argv=["--smoke", "--device=cpu"])


def test_it_learns(tmp_path):
    words = ["training.max_iteration=60", "training.valid_interval=60", "optim.warmup_iterations=5"]
    exp = main(WarmUp, argv=["--output", str(tmp_path), "--device=cpu", *words])
    assert exp.finished
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["valid/accuracy"] > 0.8


def test_the_model_does_not_look_at_the_neighbours_in_its_batch(tmp_path):
    words = ["training.max_iteration=31"]
    exp = main(WarmUp, argv=["--output", str(tmp_path), "--device=cpu", *words])
    images = exp.valid_loader.dataset.tensors[0][:8]
    exp.model.eval()
    np.testing.assert_allclose(exp.model(images[:1]), exp.model(images)[:1], rtol=1e-5)


def test_it_survives_being_killed(tmp_path):
    words = ["verify", str(SCRIPT), "--output", str(tmp_path / "verified"), "--kills=2"]
    words += ["--", "--device=cpu"]
    verified = subprocess.run([sys.executable, "-m", "expbase", *words], capture_output=True)
    assert verified.returncode == 0, verified.stdout.decode()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
