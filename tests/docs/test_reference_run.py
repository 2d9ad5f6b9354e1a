"""docs/reproduce.md, "In your own CI": a reference run tells whether the code still makes it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import forks
import pytest
from pages import SCRIPT, TEXT, blocks

SECTION = TEXT["reproduce"].partition("### In your own CI")[2].partition("\n## ")[0]
MAKE, CHECK = blocks("reproduce", "bash")[-1].splitlines()


def do(command: str, folder: Path) -> tuple[int, str]:
    """Gives a command of the page in a folder; returns its exit code, and what it says."""
    words = [sys.executable, *shlex.split(command)[1:]]
    done = forks.run(words, cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return done.returncode, done.stdout


@pytest.mark.long
def test_a_reference_run_of_the_files_that_are_named_is_checked_as_the_page_says(
    tmp_path: Path,
) -> None:
    made, checked = tmp_path / "made", tmp_path / "checked"
    for folder in (made, checked):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
    assert MAKE in SECTION
    assert CHECK in SECTION
    assert do(MAKE, made)[0] == 0
    (sentence,) = re.findall(r": (`config\.yaml`[^:]*) are what is read\.", SECTION)
    for name in re.findall("`(.+?)`", sentence):
        source, target = made / "reference/run" / name, checked / "reference/run" / name
        (shutil.copytree if source.is_dir() else write)(source, target)

    code, said = do(CHECK, checked)
    assert said.startswith("the same by the code of now: iterations 1 to 200, ")
    assert code == 0
    renamed = SCRIPT.replace("loss", "distance").replace("mse_distance", "mse_loss")
    (checked / "train.py").write_text(renamed.replace("log(distance=", "log(loss="))
    assert do(CHECK, checked)[0] == 0
    (checked / "train.py").write_text(SCRIPT.replace("Adam(0.02", "Adam(0.03"))
    code, said = do(CHECK, checked)
    assert said.startswith("NOT THE SAME BY THE CODE OF NOW: ")
    assert code == 1
    assert do(CHECK.replace("reference/run", "reference/none"), checked)[0] == 78


def write(source: Path, target: Path) -> None:
    """Copies a file into a folder that may not be there yet."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
