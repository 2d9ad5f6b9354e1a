"""docs/take_out.md: what a run has read is found, left out, and shown to have no effect.

All of it is long: a dozen processes train.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from pages import blocks
from tiny import same_bits

SCRIPT, BLANK = blocks("take_out", "python")
TRAIN, FIND, WITHOUT, AGAIN, PARTS, PROOF = blocks("take_out", "bash")
FOUND, REPRODUCED, OF_PARTS = blocks("take_out", "text")
ROWS = np.random.default_rng(0).normal(size=[400, 5]).astype("float32")
TAKEN = [42, *range(7, 400, 43)][:10]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prices")
    (folder / "train.py").write_text(SCRIPT)
    np.save(folder / "prices.npy", ROWS)
    return folder


def given(commands: str, folder: Path, code: int = 0) -> str:
    """Gives commands of the page to a shell; returns what they say."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"}
    words = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done: Any = subprocess.run(commands, shell=True, check=False, **words)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout)


def shape(said: str) -> str:
    """Without what depends on the kernels of a CPU."""
    return re.sub(r"(\d+\.\d+|\b[0-9a-f]{64} of [\d,]+ bytes)", "0", said)


def trained(folder: Path, name: str, skipped: list[int], *words: str) -> Path:
    """Trains the page's script with updates that are left out; returns the last checkpoint."""
    command = [sys.executable, "train.py", "--output", f"runs/{name}", "--device=cpu", *words]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command.append(f"training.skip_updates={skipped}")
    done = forks.run(command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / f"runs/{name}/checkpoints" / f"step-{200 - len(skipped):08d}"


def test_the_commands_of_the_page_do_what_it_says(project: Path) -> None:
    given(TRAIN, project)
    assert shape(given(FIND, project)) == shape(FOUND)
    given(WITHOUT, project)
    given(f"python - <<'END'\n{BLANK}END", project)
    assert shape(given(AGAIN, project).splitlines()[-1]) == shape(REPRODUCED.strip())
    *parts, result = given(PARTS, project, code=1).splitlines()
    assert shape("\n".join(parts)) == shape(OF_PARTS.strip())
    assert result.startswith("NOT REPRODUCED: iterations 51 to 100: train/loss at iteration 80")
    given(PROOF.replace("\n", " && ").removesuffix(" && "), project)


def test_what_setup_computes_from_the_data_has_seen_it(tmp_path: Path) -> None:
    line = 'rows = paddle.to_tensor(np.load("prices.npy"))\n'
    assert SCRIPT.count(line) == 1
    (tmp_path / "train.py").write_text(
        SCRIPT.replace(line, line + " " * 8 + "rows -= rows.mean()\n")
    )
    np.save(tmp_path / "prices.npy", ROWS)
    given(TRAIN + WITHOUT, tmp_path)
    given(f"python - <<'END'\n{BLANK}END", tmp_path)
    said = given(AGAIN, tmp_path, code=1)
    assert "NOT REPRODUCED: iterations 51 to 100: " in said
    assert "(3 of 3 parts are not the same)" in said


def test_of_ten_rows_each_is_taken_out_to_the_bytes_of_a_run_without_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    np.save(tmp_path / "prices.npy", ROWS)
    given(TRAIN, tmp_path)
    updates = given(FIND.partition("|")[0], tmp_path)
    for row in TAKEN:
        np.save(tmp_path / "prices.npy", ROWS)
        found = re.findall(rf"^\[(\d+)\] .*samples.*\b{row}\b", updates, re.M)
        read = [int(number) for number in found]
        assert len(read) == 2  # once an epoch
        begin = (read[0] - 1) // 50 * 50
        words = ["--checkpoint_path", f"runs/prices/{begin}"] * (begin > 0)
        without = trained(tmp_path, f"without{row}", read, *words)
        part = trained(tmp_path, f"part{row}", read[1:])
        np.save(tmp_path / "prices.npy", np.where(np.arange(400)[:, None] == row, 1e3, ROWS))
        same_bits(without, trained(tmp_path, f"proof{row}", read))
        with pytest.raises(AssertionError):
            same_bits(part, trained(tmp_path, f"other{row}", read[1:]))
    assert len(TAKEN) == 10
